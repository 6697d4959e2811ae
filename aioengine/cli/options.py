"""Flags from the fields of the configuration classes, and back."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

from aioengine import EngineConfig, MediaConfig, SamplingParams, demo_model
from aioengine.errors import did_you_mean

__all__ = [
    "DEMO",
    "MAX_TOKENS",
    "MODEL",
    "CommandParser",
    "Commands",
    "add_engine_flags",
    "add_sampling_flags",
    "checked",
    "decimal",
    "engine_config",
    "given",
    "media_item",
    "model_source",
    "new_parser",
    "parse_bytes",
]

Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"

NOT_BUILT = {"tensor_parallel_size", "mm_encoder_tp_mode"}
UNSAID = {
    *("n", "logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids"),
    *("detokenize", "structured_outputs", "logits_processors"),
}
"""What of SamplingParams a command that shows one text has no use for."""
MAX_TOKENS = 1024
UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


DEMO = "demo"
"""The word for the model that is shipped, unless there is a folder of this name."""
MODEL = f"a folder, a GGUF file, a hub id, or {DEMO} (the small model that is shipped)"
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class CommandParser(argparse.ArgumentParser):
    """Takes a command's arguments in any order, also when one of them may be left out."""

    _is_within = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See argparse, which calls this for a command, and may call it again for each part."""
        if self._is_within:
            return super().parse_known_args(args, namespace)
        self._is_within = True
        try:
            found, others = self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_within = False
        if others:  # else the parser of all commands would refuse them, with its own usage
            flags = [text for action in self._actions for text in action.option_strings]
            wrong = next((text for text in others if text.startswith("--")), "")
            meant = did_you_mean(wrong.partition("=")[0], flags) if wrong else ""
            self.error(f"unrecognized arguments: {' '.join(others)}{meant}")
        return found, others


def new_parser(
    commands: Commands, name: str, summary: str, details: str, arguments: str = "MODEL"
) -> CommandParser:
    """The parser of one command that runs a MODEL."""
    parser = commands.add_parser(
        name,
        usage=f"%(prog)s [OPTIONS] {arguments}",
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}. {details}",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", type=model_source, help=MODEL)
    return parser


def add_engine_flags(
    parser: argparse.ArgumentParser, defaults: Mapping[str, str] | None = None
) -> None:
    """A flag for each field of EngineConfig and MediaConfig that text can say.

    `defaults`: what a command says of fields for which it has a default of its own.
    """
    _add_fields(parser.add_argument_group("engine"), EngineConfig, NOT_BUILT, defaults)
    _add_fields(parser.add_argument_group("media"), MediaConfig, ())


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of SamplingParams that concerns one text."""
    group = parser.add_argument_group(
        "sampling",
        "What has no default here is as the checkpoint's generation_config.json recommends; where "
        "that does not say to sample, the answer is greedy.",
    )
    defaults = {**dict.fromkeys(SamplingParams.RECOMMENDED), "max_tokens": MAX_TOKENS}
    _add_fields(group, SamplingParams, UNSAID, defaults)


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The configuration that the flags say. Raises InvalidRequestError."""
    media = MediaConfig(**given(options, MediaConfig))
    return EngineConfig(media=media, **given(options, EngineConfig))


def given(options: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    """The fields of a class that were given on the command line."""
    return {
        field.name: getattr(options, field.name) for field in fields(kind) if field.name in options
    }


def model_source(text: str) -> str:
    """A model as it is typed: `demo`, a folder, a file, or a hub id. Raises ArgumentTypeError."""
    path = Path(text).expanduser()
    if text and path.exists():
        return str(path)
    if text == DEMO:
        return str(demo_model())
    if HUB_ID.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(
        f"there is no folder or file {text!r}, and a hub id has the form OWNER/NAME"
    )


def media_item(text: str, folder: Path = Path()) -> str | Path:
    """A file, from a folder on, or a URL. Raises ArgumentTypeError where there is no such file."""
    if re.match(r"data:|[a-z][a-z0-9+.-]*://", text, re.IGNORECASE):
        return text
    with suppress(OSError, RuntimeError, ValueError):  # no name of a file, or no such home
        path = folder / Path(text).expanduser()
        if path.is_file():
            return path
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r:.200} is a folder, not a file")
    raise argparse.ArgumentTypeError(f"there is no file {text!r:.200}")


def checked(
    read: Callable[[str], Any], accepts: Callable[[Any], bool], what: str
) -> Callable[[str], Any]:
    """Make a reader for argparse of text that must be `what`: read to a value that is accepted."""

    def read_checked(text: str) -> Any:
        with suppress(ValueError):
            value = read(text)
            if accepts(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return read_checked


def decimal(text: str) -> int:
    """A number of digits alone. Raises ValueError."""
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def parse_bytes(text: str) -> int:
    """A number of bytes: 4096, 512MB (of a million), 4GiB or 4G (of 2**30)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 4096, 512MB or 4GiB")
    number, unit, suffix = found.groups(default="")
    base = 1000 if suffix.lower() == "b" else 1024
    return int(float(number) * base ** UNITS[unit.lower()])


def _add_fields(
    group: Any, kind: Any, without: Collection[str], defaults: Mapping[str, Any] | None = None
) -> None:
    hints, meanings = get_type_hints(kind), _docstrings(kind)
    for field in fields(kind):
        settings = _settings(field.name, hints[field.name])
        if field.name in without or settings is None:
            continue
        default = (defaults or {}).get(field.name, field.default)
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=_help(meanings.get(field.name, ""), field, default),
            **settings,
        )


def _settings(name: str, hint: Any) -> dict[str, Any] | None:
    """Return how a field's value is read from text; None where no text says it."""
    kinds = [each for each in get_args(hint) if each is not NoneType]
    is_optional = isinstance(hint, UnionType) and len(kinds) < len(get_args(hint))
    if isinstance(hint, UnionType):
        # Of a text or a list of texts, the list: the flag may be given again.
        hint = next((each for each in kinds if get_origin(each) is not None), kinds[0])
    origin = get_origin(hint)
    if origin in (tuple, Sequence):
        element = _settings(name, get_args(hint)[0])
        return None if element is None else {**element, "action": "append"}
    if origin is Mapping:
        what = 'a JSON object, such as {"image": 4}'
        read = checked(json.loads, lambda value: isinstance(value, dict), what)
        return {"type": read, "metavar": "JSON"}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if hint is int and name.endswith("_bytes"):
        return {"type": _or_none(parse_bytes, is_optional), "metavar": "SIZE"}
    if hint in (int, float):
        return {"type": _or_none(hint, is_optional), "metavar": "N" if hint is int else "X"}
    if hint is str:
        return {"type": str, "metavar": "TEXT"}
    return None


def _or_none(read: Callable[[str], Any], is_optional: bool) -> Callable[[str], Any]:
    def read_or_none(text: str) -> Any:
        return None if is_optional and text == "none" else read(text)

    read_or_none.__name__ = read.__name__  # argparse tells it of a value that cannot be read
    return read_or_none


def _help(meaning: str, field: Field[Any], default: Any) -> str:
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif isinstance(default, int) and field.name.endswith("_bytes"):
        default = f"{default >> 20}MiB"
    elif isinstance(default, tuple):
        default = ", ".join(default)
    says_default = default not in (MISSING, None, "")
    text = f"{meaning} (default: {default})" if says_default else meaning
    return text.strip().replace("%", "%%")


@cache
def _docstrings(kind: Any) -> dict[str, str]:
    """Read what stands under each field in the source; nothing where the source is not at hand."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, SyntaxError, ValueError):
        return {}
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }
