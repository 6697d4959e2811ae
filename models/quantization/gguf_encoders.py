"""Encoders of images in GGUF files (mmproj), under the names that transformers' modules have.

Those of Idefics 3 and SmolVLM, Gemma 3, Qwen2-VL and Qwen2.5-VL; others are refused by name. They
are read as floats: an encoder computes in the engine's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from aioengine.errors import ModelLoadError
from aioengine.models.quantization.gguf_blocks import check_tensors, read_floats
from aioengine.models.quantization.gguf_file import GgufFile

__all__ = ["find_encoder", "is_encoder", "read_encoder"]

_MARK = "mmproj"
_KIND = "clip.projector_type"
_LAYER = re.compile(r"(?:.*\.)?(?:encoder\.layers|visual\.blocks)\.(\d+)\.(.+)\.(weight|bias)")
_INSIDE = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "attn.proj": "attn_out",
    "norm1": "ln1",
    "norm2": "ln2",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
_SIGLIP = {
    "embeddings.patch_embedding.weight": "v.patch_embd.weight",
    "embeddings.patch_embedding.bias": "v.patch_embd.bias",
    "embeddings.position_embedding.weight": "v.position_embd.weight",
    "post_layernorm.weight": "v.post_ln.weight",
    "post_layernorm.bias": "v.post_ln.bias",
}
_QWEN = {
    "merger.ln_q.weight": "v.post_ln.weight",
    "merger.ln_q.bias": "v.post_ln.bias",
    "merger.mlp.0.weight": "mm.0.weight",
    "merger.mlp.0.bias": "mm.0.bias",
    "merger.mlp.2.weight": "mm.2.weight",
    "merger.mlp.2.bias": "mm.2.bias",
}
_NORM = "mm.soft_emb_norm.weight"
_AROUND: Mapping[str, Mapping[str, str]] = {
    "idefics3": {**_SIGLIP, "modality_projection.proj.weight": "mm.model.fc.weight"},
    "gemma3": {
        **_SIGLIP,
        "mm_input_projection_weight": "mm.input_projection.weight",
        "mm_soft_emb_norm.weight": _NORM,
    },
    "qwen2vl_merger": _QWEN,
    "qwen2.5vl_merger": _QWEN,
}
"""By `clip.projector_type`: ends of weights' names, and their tensors."""
_FRAMES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""Of a convolution over two frames, one each."""


def is_encoder(path: Path) -> bool:
    """Return whether a file has by its name the weights of an encoder of images or audio."""
    return _MARK in path.name.lower()


def find_encoder(folder: Path) -> GgufFile | None:
    """The encoder's file beside a model's, of several the largest, which is the most exact.

    Raises ModelLoadError for one of a kind that is not read.
    """
    paths = [each for each in folder.glob("*.gguf") if is_encoder(each)]
    if not paths:
        return None
    file = GgufFile(max(paths, key=lambda path: (path.stat().st_size, path.name)))
    kind = file.metadata.get(_KIND)
    if kind not in _AROUND:
        raise ModelLoadError(
            f"{file.path.name!r} has a projector of the kind {str(kind)[:40]!r}; "
            f"{', '.join(_AROUND)} are read. Take the checkpoint in safetensors; "
            "quantization='int4' rounds its decoder as it is loaded"
        )
    check_tensors(file)
    return file


def read_encoder(file: GgufFile, names: Iterable[str]) -> dict[str, Tensor]:
    """Read those of a model's weights that the file has, float32.

    Raises ModelLoadError for tensors that no weight is.
    """
    around = _AROUND[str(file.metadata[_KIND])]
    is_swapped = _is_swapped(file)
    found, unread = dict[str, Tensor](), set(file.tensors)
    for name in names:
        tensors = _tensors_of(name, around, is_swapped)
        if tensors and unread.issuperset(tensors):
            unread.difference_update(tensors)
            parts = [read_floats(file, each) for each in tensors]
            found[name] = torch.stack(parts, 2) if tensors == _FRAMES else torch.cat(parts)
            if tensors == (_NORM,):
                found[name] -= 1
    if unread:
        raise ModelLoadError(
            f"{file.path.name!r} has {len(unread)} tensors that the model has no place for "
            f"({', '.join(sorted(unread)[:5])}): it belongs to another model's config.json"
        )
    return found


def _is_swapped(file: GgufFile) -> bool:
    """Return whether the feed-forward matrices have each other's names, as in files before 2025."""
    norm, down = (file.tensors.get(f"v.blk.0.{name}.weight") for name in ("ln1", "ffn_down"))
    return norm is not None and down is not None and down.shape[-1:] == norm.shape


def _tensors_of(name: str, around: Mapping[str, str], is_swapped: bool) -> tuple[str, ...]:
    """The tensors that a weight is, one's outputs behind the other's; none for none."""
    match = _LAYER.fullmatch(name)
    if match is None:
        if name.endswith("visual.patch_embed.proj.weight"):
            return _FRAMES
        return tuple(tensor for end, tensor in around.items() if name.endswith(f".{end}"))
    index, path, part = match.groups()
    if path == "attn.qkv":
        return tuple(f"v.blk.{index}.attn_{each}.{part}" for each in "qkv")
    inner = _INSIDE.get(path)
    if inner is not None and is_swapped:
        inner = _SWAPPED.get(inner, inner)
    return () if inner is None else (f"v.blk.{index}.{inner}.{part}",)
