"""Requests as clients ask them, and the parts that kinds of requests have in common."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aioengine.asgi.api.fields import SAMPLING, Fields, done, ignored, known
from aioengine.errors import InvalidRequestError
from aioengine.sampling_params import SamplingParams, StructuredOutputs
from aioengine.types import Prompt

__all__ = [
    "FORMAT",
    "SCHEMA",
    "Ask",
    "check_schema",
    "flag",
    "in_words",
    "make_ask",
    "prompt_options",
    "read_metadata",
    "read_stream_options",
    "read_structure",
    "wrong",
]

MAX_COMPLETIONS = 1024
"""Of all prompts of a request."""
MAX_SALT_CHARACTERS = 1024
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
STREAM_OPTIONS = ("include_usage", "include_obfuscation")
"""Obfuscation pads events against who guesses texts from their lengths; it is taken, not built."""
STRUCTURES = dict.fromkeys(StructuredOutputs.__dataclass_fields__, done())
FORMAT: Fields = {
    "type": done("`text`, `json_object`, `json_schema`"),
    "json_schema": done(),
}
SCHEMA: Fields = {
    "schema": done(),
    "name": ignored("the model does not see it"),
    "description": ignored("the model does not see it"),
    "strict": ignored("the schema is always followed"),
}
TOKEN_ID = re.compile("[0-9]{1,10}")
ALIASES = {
    "structured_outputs": "response_format",
    "max_tokens": "max_completion_tokens",
    "prompt": "messages",
}
"""The engine's names of parameters, and OpenAI's, of which a client may have used either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request. A chat has one prompt. `model`: None takes the one there is; `are_listed`: the
    prompts are a list in the body, be it of one.

    `fields`: those that were given and are done; `aliases`: the engine's names of parameters ->
    those that the client has used.
    """

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    model: str | None = None
    is_streamed: bool = False
    wants_usage: bool = False
    are_listed: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def in_its_words(self, error: Exception) -> Exception:
        """An error that names the client's own parameter."""
        return in_words(error, self.aliases)

    @contextmanager
    def naming(self, number: int) -> Iterator[None]:
        """Have an error of one of several prompts say of which."""
        try:
            yield
        except InvalidRequestError as error:
            if self.are_listed and error.parameter == "prompt":
                raise error.for_parameter(f"prompt[{number}]") from error
            raise


def make_ask(
    given: Mapping[str, Any],
    prompts: tuple[Prompt, ...],
    logprobs: int | None,
    aliases: Mapping[str, str] = ALIASES,
) -> Ask:
    """The request that fields of OpenAI's names make. Raises InvalidRequestError."""
    sampling = {name: given[name] for name in SAMPLING if name in given}
    if "logit_bias" in given:
        sampling["logit_bias"] = _read_bias(given["logit_bias"])
    model = given.get("model")
    if not isinstance(model, str | None):
        raise wrong("model", "text")
    used = {name: alias for name, alias in aliases.items() if alias in given}
    try:
        params = SamplingParams(
            **sampling, logprobs=logprobs, structured_outputs=read_structure(given)
        )
    except InvalidRequestError as error:
        raise in_words(error, used) from error
    if params.n > 1 and len(prompts) * params.n > MAX_COMPLETIONS:
        raise wrong("n", f"so small that all prompts together have {MAX_COMPLETIONS} completions")
    return Ask(
        prompts=prompts,
        params=params,
        model=model,
        fields=given,
        aliases=used,
        is_streamed=flag(given, "stream"),
        wants_usage=read_stream_options(given).get("include_usage", False),
    )


def prompt_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options that every kind of `Prompt` takes."""
    salt = given.get("cache_salt", "")
    if not isinstance(salt, str) or len(salt) > MAX_SALT_CHARACTERS:
        raise wrong("cache_salt", f"text of {MAX_SALT_CHARACTERS} characters at most")
    if not isinstance(given.get("mm_processor_kwargs", {}), dict):
        raise wrong("mm_processor_kwargs", "an object")
    return {name: given[name] for name in ("cache_salt", "mm_processor_kwargs") if name in given}


def read_metadata(given: Any) -> dict[str, str]:
    """Texts of a client's own that are given back. Raises InvalidRequestError."""
    if (
        not isinstance(given, dict)
        or len(given) > MAX_METADATA
        or not all(len(key) <= MAX_KEY for key in given)
        or not all(isinstance(value, str) and len(value) <= MAX_VALUE for value in given.values())
    ):
        rule = f"an object of {MAX_METADATA} texts at most, of {MAX_VALUE} characters at most"
        raise wrong("metadata", f"{rule}, under names of {MAX_KEY} at most")
    return given


def read_structure(given: Mapping[str, Any]) -> StructuredOutputs | None:
    """`response_format`, or the engine's own `structured_outputs`."""
    own, wanted = given.get("structured_outputs"), given.get("response_format")
    if own is not None and wanted is not None:
        raise wrong("structured_outputs", "absent where response_format is given")
    if own is not None:
        if not isinstance(own, dict):
            raise wrong("structured_outputs", f"an object with one of {', '.join(STRUCTURES)}")
        return StructuredOutputs(**known(own, STRUCTURES, "structured_outputs."))
    if wanted is None:
        return None
    if isinstance(wanted, dict):
        wanted = known(wanted, FORMAT, "response_format.")
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    described = wanted.get("json_schema") if kind == "json_schema" else None
    if isinstance(described, dict) and isinstance(described.get("schema"), dict):
        check_schema(described, "response_format.json_schema.")
        try:
            return StructuredOutputs(json=described["schema"])
        except InvalidRequestError as error:
            raise in_words(error, ALIASES) from error
    raise wrong("response_format", "of type text, json_object, or json_schema with a schema")


def read_stream_options(
    given: Mapping[str, Any], names: Sequence[str] = STREAM_OPTIONS
) -> dict[str, bool]:
    """The `stream_options` of a body, of these names. Raises InvalidRequestError."""
    options = given.get("stream_options")
    if options is None:
        return {}
    if not flag(given, "stream"):
        raise wrong("stream_options", "absent where stream is not true")
    if not isinstance(options, dict) or options.keys() - {*names}:
        raise wrong("stream_options", f"an object with {' and '.join(names)} at most")
    return {name: flag(options, name, "stream_options.") for name in names}


def check_schema(given: Mapping[str, Any], path: str, fields: Fields = SCHEMA) -> None:
    """Refuse what stands wrongly beside a schema. `path`: of the object, with a dot at its end.

    Raises InvalidRequestError.
    """
    known(given, fields, path)
    flag(given, "strict", path)
    for name in ("name", "description"):
        if not isinstance(given.get(name), str | None):
            raise wrong(path + name, "text")


def in_words(error: Exception, aliases: Mapping[str, str]) -> Exception:
    """An error that names the parameter as `aliases` do."""
    name = getattr(error, "parameter", None) or ""
    ends = [len(name), *(end for end in reversed(range(len(name))) if name[end] in ".[")]
    known = next((name[:end] for end in ends if name[:end] in aliases), None)
    if known is None or not isinstance(error, InvalidRequestError):
        return error
    # A place has the same places in it; what is in an option of ours has no name of the client's.
    rest = name[len(known) :]
    rest = rest if "[" in known or rest.startswith("[") else ""
    return error.for_parameter(aliases[known] + rest)


def flag(given: Mapping[str, Any], name: str, path: str = "") -> bool:
    """A field that is true or false; false where it is not given."""
    value = given.get(name)
    if not isinstance(value, bool | None):
        raise wrong(path + name, "true or false")
    return bool(value)


def wrong(name: str, rule: str) -> InvalidRequestError:
    """The error for a field that is not what it must be."""
    return InvalidRequestError(f"{name} must be {rule}", parameter=name)


def _read_bias(given: Any) -> dict[int, Any]:
    """JSON's keys are text."""
    if not isinstance(given, dict) or not all(TOKEN_ID.fullmatch(key) for key in given):
        raise wrong("logit_bias", "an object whose keys are token ids")
    return {int(key): value for key, value in given.items()}
