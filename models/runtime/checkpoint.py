"""A checkpoint's files, looked at before anything long is done with them.

Folder, config and weights are checked by names, sizes and headers: milliseconds, where building the
model first would take seconds before the same error. Of weights only the headers are read. A hub
id's files are checked if they are in the local cache; others are fetched when the model is loaded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers
from transformers.utils import cached_file
from transformers.utils.hub import (
    build_hf_headers,
    constants,
    get_session,
    hf_hub_url,
    snapshot_download,
)

from aioengine.errors import ModelLoadError
from aioengine.models.quantization.checkpoints import check_packed_names, is_quantized
from aioengine.models.quantization.gguf_weights import check_gguf, find_gguf
from aioengine.models.runtime.hf_loading import Held, load_config
from aioengine.models.runtime.registry import find_class, resolve
from aioengine.processors.checkpoint_errors import read_settings, shown, without_folders

__all__ = ["check_files", "find_source", "read_config"]

Source = str | os.PathLike[str]
Find = Callable[[str], Path | None]
Header = dict[str, dict[str, Any]]
"""Of safetensors files: a tensor's name -> its dtype, shape and place."""

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_SETTINGS = (
    "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "processor_config.json", "preprocessor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_OTHERS = ("*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.npz", "*.safetensors")
_MAX_HEADER_BYTES = 100_000_000
"""The format's own bound."""
_SHOWN = 5
_LAYERS = r"(.*_)?(num|n)_(.*_)?layers?|depth|(.*_)?(en|de)coder_layers"
_POSITIONS = r"max_(.*_positions|position_embeddings|seq(uence)?_len(gth)?)|n_positions|n_ctx"
_NEEDED = (
    r"num_hidden_layers|n_layers?|num_layers|num_attention_heads|n_heads?|hidden_size|d_model|"
    "n_embd|vocab_size"
)
_SIZES = rf"{_NEEDED}|{_LAYERS}|{_POSITIONS}|(.*_)?(heads|experts|dim|(hidden|intermediate)_size)"
_MOST_LAYERS, _MOST_POSITIONS = 10_000, 1 << 24
"""Beyond what any model has, and harmless to a class that makes lists and tables of it."""
_MOST_ENTRIES = 1 << 16
"""Of a list in a config; transformers compares, prints and searches them, some for each layer."""


def find_source(source: Source, *, revision: str | None) -> Source:
    """Return the source itself, or its folder in the local cache where the hub is out of reach.

    The hub is asked once: transformers would ask for each file, and wait half a minute for each
    answer. Raises ModelLoadError where there is neither.
    """
    if _is_here(source) or constants.HF_HUB_OFFLINE:  # there, transformers does not ask
        return source
    name = os.fspath(source)
    try:
        url = hf_hub_url(name, _CONFIG, revision=revision)
        timeout_s = constants.HF_HUB_ETAG_TIMEOUT
        # Whatever it answers: what that means is transformers' to say.
        get_session().head(url, headers=build_hf_headers(), timeout=timeout_s)
    except Exception as error:  # whatever an HTTP client raises without a network
        with suppress(Exception):  # as that of an id which cannot be one
            found: str = snapshot_download(name, revision=revision, local_files_only=True)
            return found
        raise ModelLoadError(_unreachable(source)) from error
    return source


def read_config(source: Source, *, revision: str | None, trust_remote_code: bool) -> Any:
    """The config of a folder or hub id, of the class that its architecture's model class names.

    Raises ModelLoadError where there is none and where it cannot be read.
    """
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    settings = _read_folder(source) if _is_here(source) else {}
    _check_numbers(settings, "")
    try:
        return load_config(source, **options)  # type: ignore[arg-type]
    except ModelLoadError:
        raise
    # transformers raises OSError, ValueError, KeyError, and whatever a config's own class raises.
    except Exception as error:
        if not settings:
            raise ModelLoadError(_unreachable(source)) from error
        _check_known(settings)  # an architecture that nobody knows is the reason
        raise ModelLoadError(
            f"transformers {transformers.__version__} cannot read {_CONFIG} of "
            f"{shown(source)!r} (model_type {settings.get('model_type')!r}): "
            f"{type(error).__name__}: {without_folders(error, source)}"
        ) from error


def check_files(source: Source, hf_config: Any, *, revision: str | None = None) -> Held | None:
    """Find what the weights' files hold; None where they cannot be known so.

    Raises ModelLoadError, which names the file, where settings or weights are unusable.

    Settings must be JSON. Weights must be in safetensors files, whole by their headers, which hold
    what their index names, and packed only where the config says so. What the weights fit, and
    their values, are not looked at.
    """
    find = _finder(source, revision)
    for name in _SETTINGS:
        file = find(name)
        if file is not None:
            read_settings(file, source)
    if getattr(hf_config, "transformers_weights", None) is not None:
        return None  # other names: transformers will say whether it finds them
    single, index = find(_WEIGHTS), find(_INDEX)
    header: Header = {}
    is_whole = True
    if single is not None:
        header = _read_header(single, source)
    elif index is not None:
        header, is_whole = _check_shards(index, find, source)
    elif _is_here(source):
        files = find_gguf(Path(source))
        if not files:
            raise ModelLoadError(_no_weights(Path(source)))
        check_gguf(files)
    is_packed = is_quantized(hf_config)
    if not is_packed:
        check_packed_names(header.keys(), shown(source))
    return _held(header, is_packed=is_packed) if header and is_whole else None


# ---- the folder and its config


def _is_here(source: Source) -> bool:
    """Return whether this is a folder. Raises ModelLoadError for what is neither folder nor hub
    id."""
    if os.path.isdir(source):
        return True
    name = shown(source)
    if os.path.exists(source):
        raise ModelLoadError(f"{name!r} is a file, and no .gguf: give the folder that it is in")
    # At most one slash, no dots at the start: nothing else can be an id.
    is_id = isinstance(source, str) and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source)
    if not is_id:
        raise ModelLoadError(
            f"there is no folder {name!r}: give the one that holds {_CONFIG} and the weights, "
            "or a hub id"
        )
    return False


def _read_folder(source: Source) -> dict[str, Any]:
    """Read a folder's config.json."""
    file, name = Path(source) / _CONFIG, shown(source)
    if not file.is_file():
        raise ModelLoadError(
            f"the folder {name!r} has no {_CONFIG}: give a folder as transformers' "
            "save_pretrained writes it"
        )
    settings = read_settings(file, source)
    names = settings.get("architectures")
    is_list = isinstance(names, list) and names and all(isinstance(each, str) for each in names)
    if not is_list:
        raise ModelLoadError(
            f'{_CONFIG} of {name!r} names no architectures: add "architectures" with the name of '
            "the model's class in a list"
        )
    return settings


def _check_known(settings: Mapping[str, Any]) -> None:
    """Raise ModelLoadError where neither the registry nor transformers has the architecture."""
    names = settings.get("architectures")
    with suppress(ModelLoadError):
        find_class(SimpleNamespace(architectures=names))
        return
    resolve(names)


def _check_numbers(settings: Mapping[str, Any], path: str) -> None:
    """Raise ModelLoadError for sizes that no model has, before a class makes lists as long."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            _check_numbers(value, f"{path}{name}.")
        elif isinstance(value, list):
            _check_list(value, f"{path}{name}")
        elif type(value) is int and (fault := _fault_of(path, name, value)):  # else its class knows
            raise ModelLoadError(f"{_CONFIG}: {path}{name} is {value!s:.40}, and {fault}")


def _check_list(values: list[Any], path: str) -> None:
    """Raise ModelLoadError for a list, or one in it, that is longer than any model's."""
    if len(values) > _MOST_ENTRIES:
        raise ModelLoadError(
            f"{_CONFIG}: {path} is a list of {len(values)}, and must not be over {_MOST_ENTRIES}"
        )
    for value in values:
        if isinstance(value, Mapping):
            _check_numbers(value, f"{path}.")
        elif isinstance(value, list):
            _check_list(value, path)


def _fault_of(path: str, name: str, value: int) -> str:
    """Say what is wrong with a size; empty where it may be right."""
    if value < 0 and re.fullmatch(_SIZES, name):
        return "must not be negative"
    if value == 0 and re.fullmatch(_NEEDED, name) and path in ("", "text_config."):
        return "must be positive"
    if value > _MOST_LAYERS and re.fullmatch(_LAYERS, name):
        return f"must not be over {_MOST_LAYERS}"
    if value > _MOST_POSITIONS and re.fullmatch(_POSITIONS, name):
        return f"must not be over {_MOST_POSITIONS}"
    return ""


def _unreachable(source: Source) -> str:
    return (
        f"there is no folder {shown(source)!r}, and as a hub id it could not be read: "
        f"its {_CONFIG} is not in the local cache and could not be fetched. Give a local folder, "
        "or fetch the model once (`hf download`), with a network and without HF_HUB_OFFLINE"
    )


# ---- weights


def _finder(source: Source, revision: str | None) -> Find:
    """Locate a file by its name; None where it is not, or not yet."""
    if _is_here(source):
        return lambda name: path if (path := Path(source) / name).is_file() else None

    def find_cached(name: str) -> Path | None:
        found = cached_file(
            os.fspath(source),
            name,
            revision=revision,
            local_files_only=True,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return None if found is None else Path(found)

    return find_cached


def _no_weights(folder: Path) -> str:
    begin = f"the folder {shown(folder)!r} has no weights that can be read, no {_WEIGHTS}"
    pickles, others = _names(folder, _PICKLES), _names(folder, _OTHERS)
    if pickles:
        return (
            f"{begin}; {pickles} is a pickle, which could run code and is not opened: convert it "
            "where you trust it (transformers' from_pretrained, then save_pretrained), or take "
            "the checkpoint's safetensors files"
        )
    if others:
        return f"{begin} and no {_INDEX}, only {others}: fetch what is missing"
    return f"{begin}: fetch it to where {_CONFIG} is"


def _names(folder: Path, patterns: Iterable[str]) -> str:
    found = sorted(file.name for pattern in patterns for file in folder.glob(pattern))
    return ", ".join(found[:_SHOWN]) + (" and others" if len(found) > _SHOWN else "")


def _held(header: Header, *, is_packed: bool) -> Held:
    """`is_packed`: a number may take a part of a byte, and no shape tells how many there are."""
    num_bytes = sum(each["data_offsets"][1] - each["data_offsets"][0] for each in header.values())
    num_numbers = 8 * num_bytes if is_packed else sum(prod(e["shape"]) for e in header.values())
    return Held(len(header), num_numbers, num_bytes)


def _check_shards(index: Path, find: Find, source: Source) -> tuple[Header, bool]:
    """Read the headers of the files that the index names; also tell whether all are there."""
    name, places = shown(source), read_settings(index, source).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(each, str) for each in places.values()):
        raise ModelLoadError(f"{_INDEX} of {name!r} has no weight_map: fetch the file again")
    files = sorted(set(places.values()))
    strange = [file for file in files if Path(file).name != file or "\\" in file]
    if strange:
        raise ModelLoadError(f"{_INDEX} of {name!r} names files that are not beside it")
    found = {file: path for file in files if (path := find(file)) is not None}
    missing = [file for file in files if file not in found]
    if missing and _is_here(source):  # and not merely not fetched yet
        raise ModelLoadError(
            f"{_INDEX} of {name!r} names {len(missing)} files that are not there: "
            f"{', '.join(missing[:_SHOWN])}; fetch them"
        )
    held = {file: _read_header(path, source) for file, path in found.items()}
    lost = sorted(each for each, file in places.items() if file in held and each not in held[file])
    if lost:
        raise ModelLoadError(
            f"{len(lost)} weights that {_INDEX} of {name!r} names are not in their files "
            f"({places[lost[0]]}: {', '.join(lost[:_SHOWN])}); fetch files and index again"
        )
    of_all = {name: entry for header in held.values() for name, entry in header.items()}
    return of_all, not missing


def _read_header(file: Path, source: Source) -> Header:
    """A safetensors file's header, whose sizes fit the file's.

    The format: 8 bytes with the header's length, little endian; the header, JSON; the data.
    """
    name, size = f"{file.name} of {shown(source)!r}", file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version " and b"git-lfs" in opened.read(64):
            raise ModelLoadError(f"{name} is a Git LFS pointer: fetch the weights (`git lfs pull`)")
        if size >= 8 and length > _MAX_HEADER_BYTES:
            raise ModelLoadError(f"{name} is not in the safetensors format: fetch the file again")
        whole = 8 + length
        try:
            if size >= whole:
                opened.seek(8)
                header: Header = json.loads(opened.read(length))
                header.pop("__metadata__", None)
                _held(header, is_packed=False)  # which reads all that is read later
                whole += max((each["data_offsets"][1] for each in header.values()), default=0)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ModelLoadError(f"{name} has a damaged header: fetch the file again") from error
    if size < whole:
        raise ModelLoadError(
            f"{name} is cut short, with {size} of {whole} bytes: fetch the file again"
        )
    if size > whole:
        raise ModelLoadError(
            f"{name} is damaged: it has {size} bytes, and {whole} by its header; fetch it again"
        )
    return header
