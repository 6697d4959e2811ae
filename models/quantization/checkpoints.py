"""Quantized checkpoints: the kinds that are read, packed or unpacked; all others are refused.

transformers skips a kind that it does not know without an error, and takes packed numbers for
weights. What it knows how to unpack becomes ordinary layers, in the engine's dtype. Its layers that
compute on packed weights are not run: the engine lays out, fuses and packs layers itself, and reads
weights that stay packed by itself (`packed_checkpoints`).
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from aioengine.errors import ModelLoadError
from aioengine.models.quantization.packed_checkpoints import packing_of, unreadable
from aioengine.processors.checkpoint_errors import shown

__all__ = ["check_packed_names", "check_quantization", "is_quantized", "unpacked"]

_UNPACKED: Mapping[str, str | None] = {
    "compressed-tensors": "compressed-tensors",
    "fp8": "accelerate",
    "mxfp4": None,
    "mxfp8": "accelerate",
}
"""`quant_method` -> the package that transformers wants, to unpack it."""
_PACKED_METHODS = ("awq", "gptq")
"""Those that are read packed or not at all."""
_FIELDS = ("quantization_config", "compression_config")
_PLACES = ("quantization_config", "text_config.quantization_config")
"""Where transformers looks."""
_PACKED = re.compile(
    r".*\.(qweight|qzeros|g_idx|weight_(scale(_inv|_2)?|packed|zero_point)|\w+_(blocks|scales))"
)
_SHOWN = 5
_WAY_OUT = (
    "Take the checkpoint that is not quantized; quantization='int8' quantizes a decoder as it is "
    "loaded"
)


def is_quantized(hf_config: Any) -> bool:
    """Tell whether a config, if there is one, says anywhere that its weights are quantized."""
    return hf_config is not None and any(True for _ in _find(hf_config.to_dict()))


def check_quantization(settings: Mapping[str, Any], source: str | os.PathLike[str]) -> None:
    """Raise ModelLoadError for a quantized checkpoint that is not read here, by its kind's name.

    `settings`: what is in its config.json.
    """
    for place, packing in _find(settings):
        reason = _refusal(place, packing)
        if reason:
            raise ModelLoadError(
                f"the weights of {shown(source)!r} are quantized ({place} in config.json), and "
                f"{reason}"
            )


def unpacked(hf_config: Any) -> Any:
    """Copy a config so that transformers unpacks quantized weights as it reads them."""
    is_packed = packing_of(hf_config) is not None
    hf_config = copy.deepcopy(hf_config)
    for config in (hf_config, hf_config.get_text_config(decoder=True)):
        packing = getattr(config, "quantization_config", None)
        if is_packed and packing is not None:
            del config.quantization_config  # the weights are plain by then
        elif isinstance(packing, Mapping):
            config.quantization_config = {**packing, "dequantize": True}
    return hf_config


def check_packed_names(names: Iterable[str], name: str) -> None:
    """Raise ModelLoadError where weights that nobody reads belong to packed ones.

    `name`: what holds them, for the message.
    """
    packed = sorted(each for each in names if _PACKED.fullmatch(each))
    if packed:
        raise ModelLoadError(
            f"{name} has quantized weights that would not be unpacked, as its config.json does not "
            f"say so, or in another way: {', '.join(packed[:_SHOWN])}. {_WAY_OUT}"
        )


def _find(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Find each field about quantization, in parts of a config too: (its place, its value)."""
    for key, value in settings.items():
        if key in _FIELDS and value not in (None, {}):
            yield above + key, value
        elif key.endswith("_config") and isinstance(value, Mapping):
            yield from _find(value, f"{above}{key}.")


def _refusal(place: str, packing: Any) -> str:
    """Say why a kind is not read; nothing where it is."""
    if not isinstance(packing, Mapping):
        return f"what is there is no object but {type(packing).__name__}. {_WAY_OUT}"
    method = packing.get("quant_method")
    if packing.get("load_in_4bit") or packing.get("load_in_8bit"):
        method = "bitsandbytes"
    known = ", ".join(sorted([*_UNPACKED, *_PACKED_METHODS]))
    if method is None:
        return f"no quant_method says how; {known} are read. {_WAY_OUT}"
    if not isinstance(method, str) or method not in (*_UNPACKED, *_PACKED_METHODS):
        return f"{str(method)[:40]!r} is not read here; {known} are. {_WAY_OUT}"
    if place not in _PLACES:
        return (
            f"transformers does not look there; where {' or '.join(_PLACES)} says the same, it "
            f"does. {_WAY_OUT}"
        )
    reason = unreadable(packing)
    if not reason:
        return ""
    if method in _PACKED_METHODS:
        return f"{reason}. {_WAY_OUT}"
    package = _UNPACKED[method]
    if package is not None and find_spec(package.replace("-", "_")) is None:
        return (
            f"{reason}; transformers unpacks {method!r} with the package {package}, which is not "
            f"installed: pip install {package}"
        )
    return ""
