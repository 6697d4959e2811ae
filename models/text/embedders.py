"""Settings of a checkpoint's embeddings, in the files that sentence-transformers writes.

`modules.json` lists what is run one after the other: a transformer, its pooling, perhaps a
normalisation. Checkpoints without it say nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from aioengine.errors import ModelLoadError
from aioengine.processors.checkpoint_errors import read_settings, shown

__all__ = ["EmbedderSettings", "read_embedder"]

Source = str | os.PathLike[str]

_MODULES = "modules.json"
_KNOWN = ("Transformer", "Pooling", "Normalize")
_POOLINGS = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
"""sentence-transformers' names -> ours."""
_FLAGS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_MEDIA = ("vision_config", "audio_config")


@dataclass(frozen=True, slots=True)
class EmbedderSettings:
    """`pooling`: "last", "mean" or "cls", None where the checkpoint does not say; `normalizes`:
    whether vectors have length 1, None likewise. `obstacle`: what it does to hidden states that is
    not done here, in words; empty if there is nothing."""

    pooling: str | None = None
    normalizes: bool | None = None
    obstacle: str = ""


def read_embedder(
    source: Source, hf_config: Any, *, revision: str | None
) -> EmbedderSettings | None:
    """Read what a folder or hub id says of embeddings; None where it says nothing.

    Has `hf_config` name the backbone where its head is not wanted; mutates it. Raises
    ModelLoadError for files that are no valid JSON.
    """
    file = _find(source, _MODULES, revision)
    _take_backbone(hf_config, is_embedder=file is not None)
    return None if file is None else _read(file, source, revision)


def _read(file: Path, source: Source, revision: str | None) -> EmbedderSettings:
    try:
        modules = json.loads(file.read_bytes())
        kinds = [str(each["type"]).rpartition(".")[2] for each in modules]
        paths = [str(each.get("path", "")) for each in modules]
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        message = f"{_MODULES} of {shown(source)!r} is no list of modules: fetch the file again"
        raise ModelLoadError(message) from error
    others = [kind for kind in kinds if kind not in _KNOWN]
    if others:
        return EmbedderSettings(obstacle=f"its {_MODULES} has the module {others[0]!r:.40}")
    normalizes = "Normalize" in kinds
    if "Pooling" not in kinds:
        return EmbedderSettings(normalizes=normalizes)
    name = f"{paths[kinds.index('Pooling')]}/config.json"
    found = _find(source, name, revision)
    mode = "mean" if found is None else _mode(read_settings(found, source))
    if mode not in _POOLINGS:
        obstacle = f"its {name} has the pooling {mode!r:.60}"
        return EmbedderSettings(normalizes=normalizes, obstacle=obstacle)
    return EmbedderSettings(_POOLINGS[mode], normalizes)


def _mode(settings: Mapping[str, Any]) -> str:
    """The pooling of a module's settings, by sentence-transformers' name; its default is "mean"."""
    named = settings.get("pooling_mode")
    if named is not None:
        return named if isinstance(named, str) else "+".join(map(str, named))
    found = [mode for flag, mode in _FLAGS.items() if settings.get(flag)]
    return "+".join(found) or "mean"


def _find(source: Source, name: str, revision: str | None) -> Path | None:
    """Find a file of a folder or hub id."""
    if os.path.isdir(source):
        return path if (path := Path(source, name)).is_file() else None
    found = cached_file(
        os.fspath(source),
        name,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def _take_backbone(hf_config: Any, *, is_embedder: bool) -> None:
    """Have a config name the backbone where its head is not wanted; mutates it.

    That is a head that fills in masked words, and any head for text of an embedder, whose
    checkpoint may lack its weights.
    """
    from transformers import MODEL_MAPPING

    backbone = MODEL_MAPPING.get(type(hf_config), None)
    name = next(iter(hf_config.architectures or ()), "")
    is_headed = name.endswith("ForMaskedLM") or (is_embedder and name.endswith("ForCausalLM"))
    has_media = any(getattr(hf_config, each, None) for each in _MEDIA)
    if is_headed and isinstance(backbone, type) and not has_media:
        hf_config.architectures = [backbone.__name__]
