"""The parts of a decoder layer, found by their names and kinds as a `LayerPlan`.

What is found is a guess: whether a layer computes what the plan says is shown by a trial
(`decoder_plan`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from torch import nn

from aioengine.kernels.attention import AttentionArgs
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.kernels.layer_plan import FeedForwardPlan, LayerPlan, NormPlan
from aioengine.kernels.layer_slot import slot_of
from aioengine.kernels.matmul import TorchLinear
from aioengine.models.fusion.fused_mlp import ActivatedFeedForward
from aioengine.models.fusion.fused_rms_norm import FusedRMSNorm
from aioengine.models.fusion.packed_linear import Packed, PackedPart

__all__ = ["Kind", "attention_of", "find_layer"]


class _Norms(NamedTuple):
    """Names of a layer's norms, None where there is none: see `LayerPlan`."""

    norm: str | None
    out_norm: str | None
    feed_norm: str | None
    feed_out_norm: str | None


_NORMS = (
    _Norms(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    _Norms("input_layernorm", None, "post_attention_layernorm", None),
    _Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
)
_HEAD_NORMS = ("q_norm", "k_norm")
_IDLE = (nn.Dropout, nn.Identity)
Kind: TypeAlias = type[NativeLinear] | type[TorchLinear]
"""Matmuls of one device."""


def attention_of(layer: nn.Module) -> nn.Module | None:
    """The one child of a layer that has a slot."""
    found = [child for child in layer.children() if slot_of(child) is not None]
    return found[0] if len(found) == 1 else None


def find_layer(layer: nn.Module, kind: Kind) -> LayerPlan | None:
    """Guess a layer's plan, if it holds such parts, matmuls of one kind and nothing else.

    Its attention's arguments are not known yet. Modules with hooks are left alone.
    """
    attention = attention_of(layer)
    if attention is None or any(_is_hooked(each) for each in layer.modules()):
        return None
    norms = {name: each for name, each in layer.named_children() if isinstance(each, FusedRMSNorm)}
    others = [
        each
        for each in layer.children()
        if each is not attention and not isinstance(each, (FusedRMSNorm, *_IDLE))
    ]
    names = next((each for each in _NORMS if {*filter(None, each)} == {*norms}), None)
    if names is None or len(others) != 1:
        return None
    found = _attention(attention, kind)
    if found is None:
        return None
    plans: dict[str, Any] = {
        field: None if name is None else norms[name].fused[1]
        for field, name in names._asdict().items()
    }
    feed_forward = _feed_forward(others[0], kind)
    return LayerPlan(**plans, **found, slot=slot_of(attention), feed_forward=feed_forward)


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _attention(module: nn.Module, kind: Kind) -> dict[str, Any] | None:
    """The parts of an attention layer: see `LayerPlan`."""
    parts = [child for child in module.children() if isinstance(child, PackedPart)]
    norms = {name: each for name, each in module.named_children() if isinstance(each, FusedRMSNorm)}
    others = [
        child
        for child in module.children()
        if not isinstance(child, (PackedPart, FusedRMSNorm, *_IDLE))
    ]
    head_dim = getattr(module, "head_dim", None)
    if len(parts) != 3 or len(others) != 1 or not isinstance(head_dim, int):
        return None
    merged, (out,) = parts[0].merged, others
    is_whole = all(part.merged is merged for part in parts) and len(merged.sizes) == 3
    is_whole = is_whole and merged.sizes[1] == merged.sizes[2]
    if not is_whole or [part.index for part in parts] != [0, 1, 2]:
        return None
    if not isinstance(merged.packed, kind) or not isinstance(out, Packed):
        return None
    if not isinstance(out.packed, kind) or any(size % head_dim for size in merged.sizes):
        return None
    of_heads = _head_norms(norms, head_dim)
    if of_heads is None:
        return None
    return {
        "qkv": merged.packed,
        "num_heads": merged.sizes[0] // head_dim,
        "num_kv_heads": merged.sizes[1] // head_dim,
        "head_dim": head_dim,
        "query_norm": of_heads[0],
        "key_norm": of_heads[1],
        "attention": AttentionArgs(scale=1.0),
        "out": out.packed,
    }


def _head_norms(
    norms: dict[str, FusedRMSNorm], head_dim: int
) -> tuple[NormPlan | None, NormPlan | None] | None:
    """Norms of queries and keys, if there are any: then both, of each head."""
    if not norms:
        return None, None
    if {*norms} != {*_HEAD_NORMS}:
        return None
    query, key = (norms[name].fused[1] for name in _HEAD_NORMS)
    is_of_heads = len(query.weight) == len(key.weight) == head_dim
    return (query, key) if is_of_heads and query.epsilon == key.epsilon else None


def _feed_forward(module: nn.Module, kind: Kind) -> FeedForwardPlan | nn.Module:
    """The module's plan; itself where it is of another kind."""
    if isinstance(module, ActivatedFeedForward):
        names, up, activation = module.fused
        down = getattr(getattr(module, names.down), "packed", None)
        if isinstance(up, kind) and isinstance(down, kind):
            return FeedForwardPlan(up, activation, names.gate is not None, down)
    return module
