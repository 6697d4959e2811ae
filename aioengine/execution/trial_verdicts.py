"""Verdicts of earlier trials, kept in the user's cache folder.

A trial shows that code and settings compute a model rightly; that does not change from start to
start. So the name of a verdict covers all that it could depend on: the model's config, the engine's
settings, the versions of what computes, and the very files of this package and of the model's
class. Only passed trials are kept. Where nothing can be written, every start has its trial.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["is_kept", "keep", "settings_of", "verdict_name"]

VERSIONS = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pillow")
PROCESSING = (
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "tokenizer_config.json", "tekken.json",
)  # fmt: skip
UNIMPORTANT = ("_name_or_path", "transformers_version")
"""Entries of a config that do not say what is computed."""


def verdict_name(model_class: type[Any], hf_config: Any, settings: Any) -> str | None:
    """The name of the verdict on a model; `settings` is JSON that says how it is run.

    None for what a name does not identify: code of a checkpoint, and classes without a file.
    """
    files = _files_of(model_class)
    if files is None or getattr(hf_config, "auto_map", None):
        return None
    config = {n: value for n, value in hf_config.to_dict().items() if n not in UNIMPORTANT}
    facts = [config, settings, _environment(), files]
    said = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()


def settings_of(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """The processing files of a local folder, by name and digest; none for a hub id."""
    found = []
    for name in PROCESSING:
        with suppress(OSError):
            found.append((name, hashlib.sha256((Path(path) / name).read_bytes()).hexdigest()))
    return found


def is_kept(name: str) -> bool:
    """Return whether a trial of this name has been passed before."""
    with suppress(OSError, RuntimeError):
        return (_folder() / name).is_file()
    return False


def keep(name: str) -> None:
    """Keep that a trial of this name has been passed; done in silence where it cannot be."""
    with suppress(OSError, RuntimeError):
        _folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        # A link that somebody left there is not followed to a file of another name.
        os.close(os.open(_folder() / name, os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600))


def _folder() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():  # to be ignored, says the XDG Base Directory Specification
        root = Path.home() / ".cache"
    return root / "aioengine" / "trials"


@cache
def _environment() -> list[Any]:
    package = Path(__file__).parent
    # The floors lie beside the package, and are linked into it.
    roots = [package, *(each.resolve() for each in package.iterdir() if each.is_symlink())]
    files = {file for root in roots for ending in ("*.py", "*.so") for file in root.rglob(ending)}
    stamps = sorted((str(file), *_stamp(file)) for file in files)
    versions = [version(name) for name in VERSIONS]
    return [sys.version, platform.machine(), versions, stamps]


def _files_of(model_class: type[Any]) -> list[Any] | None:
    """The classes that a model's is made of, with their files' sizes and times; None where one has
    no file."""
    found = []
    for each in model_class.__mro__:
        file = getattr(sys.modules.get(each.__module__), "__file__", None)
        if file is not None:
            found.append((each.__module__, each.__qualname__, *_stamp(Path(file))))
        elif each.__module__ not in sys.builtin_module_names:
            return None
    return found


def _stamp(file: Path) -> tuple[int, int]:
    with suppress(OSError):
        stat = file.stat()
        return stat.st_size, stat.st_mtime_ns
    return 0, 0
