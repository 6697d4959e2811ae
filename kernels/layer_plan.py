"""A decoder's layers as data, and the order in which any device runs them.

A `DecoderPlan` says what the layers are made of; it knows no module. A device brings `Operators`,
the few parts that a layer falls into. `run_plan` calls them in a fixed order and reads nothing back
on the host, so that a step's launches can be captured. A device may also take a whole step at once
(`Operators.run`).

    x  [T, hidden] --norm--> qkv --> norms of heads --> rotation --> pages, attention
    x += out(attended), with a norm of its own or without
    x += feed-forward(norm(x)), likewise
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor, rms_norm

from aioengine.kernels.attention import AttentionArgs
from aioengine.kernels.layer_slot import LayerSlot, Slot, StepContext
from aioengine.kernels.matmul import Activation, Matmul

__all__ = [
    "Angles",
    "DecoderPlan",
    "FeedForwardPlan",
    "LayerPlan",
    "NormPlan",
    "Operators",
    "add_module",
    "normalize",
    "rows_wanted",
    "run_layer",
    "run_plan",
]

Angles: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines [T, head_dim] of a step's positions."""


@dataclass(frozen=True, slots=True, eq=False)
class NormPlan:
    """An RMS norm: `weight` [dim], of the rows' dtype or float32. Computed in float32."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class FeedForwardPlan:
    """`down(activation(up(x)))`; gated: the first half of `up`'s outputs are the gates."""

    up: Matmul
    activation: Activation
    is_gated: bool
    down: Matmul


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerPlan:
    """One decoder layer. A norm that is None is not there.

    `qkv`: outputs are heads of queries, then of keys, then of values, `head_dim` each.
    `query_norm`, `key_norm`: of each head. `angles`: which of the step's rotate queries and keys,
    None for none. `out_norm`, `feed_out_norm`: of what attention and the feed-forward layer give,
    before it is added. `feed_forward`: a plan, or a module [1, T, hidden] -> the same, which may
    return more beside it. `slot`: the layer's pages.
    """

    norm: NormPlan | None
    qkv: Matmul
    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_norm: NormPlan | None = None
    key_norm: NormPlan | None = None
    angles: int | None = 0
    attention: AttentionArgs
    slot: Slot | None = None
    out: Matmul
    out_norm: NormPlan | None = None
    feed_norm: NormPlan | None
    feed_forward: FeedForwardPlan | Callable[[Tensor], Any]
    feed_out_norm: NormPlan | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderPlan:
    """All layers, the norm after them, and how a step's angles are made.

    `make_angles`: embeddings [T, hidden] and positions [T] or [3, T] -> angles of each kind, whose
    axes are merged already.
    """

    layers: tuple[LayerPlan, ...]
    norm: NormPlan
    make_angles: Callable[[Tensor, Tensor], Sequence[Angles]]


class Operators(Protocol):
    """Interface of what a device computes of a plan's layers, each named by its index.

    `x` [T, hidden] is contiguous, and may be overwritten by what returns it anew.
    """

    def prepare(self, angles: Sequence[Angles]) -> Sequence[Tensor]:
        """Make of a step's angles what `project` takes, once for all layers."""

    def project(
        self, index: int, x: Tensor, angles: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query [T, Hq, D], key and value [T, Hkv, D], as they are attended with."""

    def add_attended(self, index: int, x: Tensor, attended: Tensor) -> Tensor:
        """`x` plus the output matmul of `attended` [T, Hq * D]."""

    def add_feed(self, index: int, x: Tensor) -> Tensor:
        """`x` plus the feed-forward layer of it."""

    def finish(self, x: Tensor, wanted: Tensor | None, num_tokens: int) -> Tensor:
        """The norm after the last layer, [num_tokens, hidden]; `x` holds the rows `wanted`."""

    def run(
        self, x: Tensor, angles: Sequence[Tensor], rows: Sequence[Tensor], step: StepContext
    ) -> Tensor | None:
        """All of `run_plan` at once, None where this step has to be run layer by layer."""


def run_plan(
    plan: DecoderPlan,
    operators: Operators,
    x: Tensor,
    positions: Tensor,
    rows: Sequence[Tensor] = (),
    slots: Sequence[Slot] | None = None,
) -> Tensor:
    """The last hidden states [T, hidden] of embeddings `x` [T, hidden] at `positions`.

    `rows` [T, hidden] each: added behind the first layers. `slots`: taken for the layers' own.
    """
    angles = operators.prepare(plan.make_angles(x, positions))
    last = plan.layers[-1].slot if slots is None else None
    x = x.contiguous()
    if isinstance(last, LayerSlot) and last.holder.current is not None:
        found = operators.run(x, angles, rows, last.holder.current)
        if found is not None:
            return found
    num_tokens = x.shape[0]
    wanted = rows_wanted(last, num_tokens)
    for index, layer in enumerate(plan.layers):
        slot = layer.slot if slots is None else slots[index]
        assert slot is not None, "a layer has no pages"
        cut = wanted if index + 1 == len(plan.layers) else None
        x = run_layer(operators, index, layer, x, angles, slot, cut)
        if index < len(rows):
            x = x + (rows[index] if cut is None else rows[index][cut])
    return operators.finish(x, wanted, num_tokens)


def run_layer(
    operators: Operators,
    index: int,
    layer: LayerPlan,
    x: Tensor,
    angles: Sequence[Tensor],
    slot: Slot,
    wanted: Tensor | None,
) -> Tensor:
    """The rows `wanted` of a layer's result, [n, hidden]; all of them for None."""
    query, key, value = operators.project(index, x, angles)
    attended = slot.attend(query, key, value, layer.attention).flatten(-2)
    if wanted is not None:
        x, attended = x[wanted], attended[wanted]
        if not len(wanted):
            return x  # a feed-forward layer that is a module may know no empty batch
    return operators.add_feed(index, operators.add_attended(index, x, attended))


def rows_wanted(slot: Slot | None, num_tokens: int) -> Tensor | None:
    """The rows that are read of what comes after this slot's layer, None for all."""
    wanted = slot.wanted if isinstance(slot, LayerSlot) else None
    return None if wanted is None or len(wanted) == num_tokens else wanted


def add_module(
    layer: LayerPlan, x: Tensor, normalize: Callable[[Tensor, NormPlan], Tensor]
) -> Tensor:
    """`x` plus what a layer's module makes of it, where that is its feed-forward layer."""
    assert not isinstance(layer.feed_forward, FeedForwardPlan)
    normed = x if layer.feed_norm is None else normalize(x, layer.feed_norm)
    found = layer.feed_forward(normed[None])
    found = (found[0] if isinstance(found, tuple) else found)[0]
    if layer.feed_out_norm is not None:
        found = normalize(found, layer.feed_out_norm)
    total: Tensor = x + found
    return total


def normalize(x: Tensor, norm: NormPlan) -> Tensor:
    """`x` [..., dim] with an RMS norm in PyTorch: in the weight's dtype, rounded to that of `x`."""
    weight = norm.weight
    if weight.dtype == x.dtype:
        return rms_norm(x, weight.shape, weight, norm.epsilon)
    return rms_norm(x.to(weight.dtype), weight.shape, weight, norm.epsilon).to(x.dtype)
