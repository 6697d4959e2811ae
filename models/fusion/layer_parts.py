"""The parts of a decoder layer, found by their names and kinds as a `LayerPlan`.

What is found is a guess: whether a layer computes what the plan says is shown by a trial
(`decoder_plan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from aioengine.kernels.attention import AttentionArgs
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.kernels.layer_plan import (
    CrossPlan,
    FeedForwardPlan,
    LayerPlan,
    NormPlan,
    RoutedPlan,
)
from aioengine.kernels.layer_slot import slot_of
from aioengine.models.fusion.fused_mlp import ActivatedFeedForward, ActivatedLinear, Kind
from aioengine.models.fusion.fused_norm import FusedLayerNorm, FusedRMSNorm
from aioengine.models.fusion.packed_linear import Packed, PackedPart
from aioengine.models.fusion.routed_experts import RoutedFeedForward
from aioengine.models.fusion.swap import is_hooked

__all__ = ["NORMS", "attentions_of", "find_layer"]

NORMS = (FusedLayerNorm, FusedRMSNorm)


class _Norms(NamedTuple):
    """Names of a layer's norms, None where there is none: see `LayerPlan`, and `CrossPlan`."""

    norm: str | None
    out_norm: str | None
    feed_norm: str | None
    feed_out_norm: str | None
    cross_norm: str | None = None


_NORMS = (
    _Norms(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    _Norms("input_layernorm", None, "post_attention_layernorm", None),
    _Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    _Norms("self_attn_layer_norm", None, "final_layer_norm", None, "encoder_attn_layer_norm"),
    _Norms("self_attn_layer_norm", None, "final_layer_norm", None),
    _Norms("layer_norm1", None, "layer_norm2", None),
    _Norms("norm1", None, "norm2", None),
    _Norms("layernorm_before", None, "layernorm_after", None),
    _Norms("attention_norm", None, "ffn_norm", None),
)
_HEAD_NORMS = ("q_norm", "k_norm")
_SCALES = ("lambda_1", "lambda_2")
"""Parameters of a layer by which what attention and the feed-forward layer give is multiplied."""
_OF_CROSS = {"q_proj", "out_proj"}
_IDLE = (nn.Dropout, nn.Identity)


def attentions_of(layer: nn.Module) -> list[nn.Module]:
    """The children of a layer that have slots: its attention, and perhaps cross-attention."""
    return [child for child in layer.children() if slot_of(child) is not None]


def find_layer(
    layer: nn.Module, kind: Kind, attentions: Sequence[nn.Module] | None = None
) -> LayerPlan | None:
    """Guess a layer's plan, if it holds such parts, matmuls of one kind and nothing else.

    `attentions`: those of its children, which have slots where it is None. Its attention's
    arguments are not known yet. Modules with hooks are left alone.
    """
    attentions = attentions_of(layer) if attentions is None else attentions
    if not 1 <= len(attentions) <= 2 or any(is_hooked(each) for each in layer.modules()):
        return None
    norms = {name: each for name, each in layer.named_children() if isinstance(each, NORMS)}
    others = [
        each
        for each in layer.children()
        if each not in attentions and not isinstance(each, (*NORMS, *_IDLE))
    ]
    names = next((each for each in _NORMS if {*filter(None, each)} == {*norms}), None)
    found, feed = _attention(attentions[0], kind), _feed_forward(others, kind)
    if names is None or found is None or feed is None:
        return None
    scales = [each for name in _SCALES if (each := layer._parameters.get(name)) is not None]
    if scales:
        out = found["out"]
        if len(scales) < 2 or not isinstance(feed, FeedForwardPlan):
            return None
        if not isinstance(out, NativeLinear) or not isinstance(feed.down, NativeLinear):
            return None
        found["out"] = out.scaled(scales[0])
        feed = replace(feed, down=feed.down.scaled(scales[1]))
    if (names.cross_norm is None) != (len(attentions) == 1):
        return None
    plans: dict[str, Any] = {
        field: None if name is None else norms[name].fused[1]
        for field, name in names._asdict().items()
    }
    cross, cross_norm = None, plans.pop("cross_norm")
    if len(attentions) == 2:
        parts = _cross_attention(attentions[1], kind)
        if parts is None:
            return None
        cross = CrossPlan(norm=cross_norm, **parts, slot=slot_of(attentions[1]))
    own = slot_of(attentions[0])
    return LayerPlan(**plans, **found, slot=own, cross=cross, feed_forward=feed)


def _attention(module: nn.Module, kind: Kind) -> dict[str, Any] | None:
    """The parts of an attention layer: see `LayerPlan`."""
    parts = [child for child in module.children() if isinstance(child, PackedPart)]
    norms = {name: each for name, each in module.named_children() if isinstance(each, NORMS)}
    others = [
        child for child in module.children() if not isinstance(child, (PackedPart, *NORMS, *_IDLE))
    ]
    head_dim = getattr(module, "head_dim", None)
    if not parts and isinstance(head_dim, int) and not norms:
        return _joined_attention(module, head_dim, kind)
    if len(parts) != 3 or len(others) != 1 or not isinstance(head_dim, int):
        return None
    merged, (out,) = parts[0].merged, others
    is_whole = all(part.merged is merged for part in parts) and len(merged.sizes) == 3
    is_whole = is_whole and merged.sizes[1] == merged.sizes[2]
    if not is_whole or sorted(part.index for part in parts) != [0, 1, 2]:
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


def _joined_attention(module: nn.Module, head_dim: int, kind: Kind) -> dict[str, Any] | None:
    """The same of a layer whose queries, keys and values are one matmul from the beginning."""
    children = dict(module.named_children())
    if {*children} != {"qkv", "proj"}:
        return None
    qkv, out = children["qkv"], children["proj"]
    if not isinstance(qkv, Packed) or not isinstance(out, Packed):
        return None
    if not isinstance(qkv.packed, kind) or not isinstance(out.packed, kind):
        return None
    if qkv.out_features % (3 * head_dim):
        return None
    num_heads = qkv.out_features // (3 * head_dim)
    return {
        "qkv": qkv.packed,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": head_dim,
        "attention": AttentionArgs(scale=1.0),
        "out": out.packed,
    }


def _cross_attention(module: nn.Module, kind: Kind) -> dict[str, Any] | None:
    """The parts of an attention layer whose keys and values are an encoder's: see `CrossPlan`."""
    parts = [child for child in module.children() if isinstance(child, PackedPart)]
    whole = {name: each for name, each in module.named_children() if isinstance(each, Packed)}
    kinds = (PackedPart, Packed, *_IDLE)
    head_dim = getattr(module, "head_dim", None)
    if not all(isinstance(child, kinds) for child in module.children()) or len(parts) != 2:
        return None
    if {*whole} != _OF_CROSS or not isinstance(head_dim, int):
        return None
    merged, query, out = parts[0].merged, whole["q_proj"].packed, whole["out_proj"].packed
    if parts[1].merged is not merged or len({*merged.sizes}) != 1 or len(merged.sizes) != 2:
        return None
    if not all(isinstance(each, kind) for each in (query, out, merged.packed)):
        return None
    num_queries = whole["q_proj"].out_features
    if num_queries % head_dim or merged.sizes[0] % head_dim:
        return None
    return {
        "query": query,
        "key_value": merged.packed,
        "num_heads": num_queries // head_dim,
        "num_kv_heads": merged.sizes[0] // head_dim,
        "head_dim": head_dim,
        "attention": AttentionArgs(scale=1.0),
        "out": out,
    }


def _head_norms(
    norms: dict[str, FusedLayerNorm | FusedRMSNorm], head_dim: int
) -> tuple[NormPlan | None, NormPlan | None] | None:
    """Norms of queries and keys, if there are any: then both, of each head."""
    if not norms:
        return None, None
    if {*norms} != {*_HEAD_NORMS}:
        return None
    query, key = (norms[name].fused[1] for name in _HEAD_NORMS)
    is_of_heads = len(query.weight) == len(key.weight) == head_dim and query.bias is None
    return (query, key) if is_of_heads and query.epsilon == key.epsilon else None


def _feed_forward(
    modules: Sequence[nn.Module], kind: Kind
) -> FeedForwardPlan | RoutedPlan | nn.Module | None:
    """The plan of what a layer holds beside attention and norms; a module itself of another
    kind."""
    if len(modules) == 2:
        first, second = modules
        if not isinstance(first, ActivatedLinear) or not isinstance(second, Packed):
            return None
        inner, activation = first.activated
        outer: Any = second.packed
        is_known = isinstance(inner, kind) and isinstance(outer, kind)
        return FeedForwardPlan(inner, activation, False, outer) if is_known else None
    if len(modules) != 1:
        return None
    (module,) = modules
    if isinstance(module, RoutedFeedForward):
        return module.routed
    found = module.plan(kind) if isinstance(module, ActivatedFeedForward) else None
    return module if found is None else found
