"""A decoder's layers as data, and the order in which any device runs them.

A `DecoderPlan` says what the layers are made of; it knows no module. A device brings `Operators`,
the few parts that a layer falls into. `run_plan` calls them in a fixed order and reads nothing back
on the host, so that a step's launches can be captured. A device may also take a whole step at once
(`Operators.run`).

    x  [T, hidden] --norm--> qkv --> norms of heads --> rotation --> pages, attention
    x += out(attended), with a norm of its own or without
    x += out(attended to an encoder's rows), where there is cross-attention
    x += feed-forward(norm(x)), likewise
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor, rms_norm
from torch.nn.functional import embedding, layer_norm

from aioengine.kernels.attention import AttentionArgs
from aioengine.kernels.layer_slot import LayerSlot, Slot, StepContext
from aioengine.kernels.matmul import NO_LIMIT, Activation, ExpertMatmul, Gating, Matmul

__all__ = [
    "Angles",
    "CrossPlan",
    "DecoderPlan",
    "ExpertsPlan",
    "FeedForwardPlan",
    "LayerPlan",
    "NormPlan",
    "Operators",
    "RoutedPlan",
    "add_module",
    "normalize",
    "rows_wanted",
    "run_layer",
    "run_plan",
    "slots_of",
]

Angles: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines [T, head_dim] of a step's positions."""


@dataclass(frozen=True, slots=True, eq=False)
class NormPlan:
    """An RMS norm: `weight` [dim], of the rows' dtype or float32. Computed in float32.

    With a `bias`, of the weight's dtype, a layer norm (Ba et al., 2016).
    """

    weight: Tensor
    epsilon: float
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FeedForwardPlan:
    """`down(activation(up(x)))`; gated: the first half of `up`'s outputs are the gates."""

    up: Matmul
    activation: Activation
    is_gated: bool
    down: Matmul


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExpertsPlan:
    """A `FeedForwardPlan` of several experts; each row goes to some of them."""

    up: ExpertMatmul
    activation: Activation
    is_gated: bool
    gating: Gating = NO_LIMIT
    down: ExpertMatmul


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RoutedPlan(ExpertsPlan):
    """Experts, of which each row goes to `num_chosen`: those with the largest logits of `router`.

    What they come to is added up by their shares, of a softmax over these logits where it
    `is_normalized`, over all logits otherwise. `shared`: a layer that all rows go to; what it comes
    to is added.
    """

    router: Matmul
    num_chosen: int
    is_normalized: bool
    shared: FeedForwardPlan | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CrossPlan:
    """Attention over an encoder's rows: see `LayerPlan`. `key_value`: of these rows, outputs are
    heads of keys, then of values."""

    norm: NormPlan | None
    query: Matmul
    key_value: Matmul
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention: AttentionArgs
    slot: Slot | None = None
    out: Matmul


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerPlan:
    """One decoder layer. A norm that is None is not there.

    `qkv`: outputs are heads of queries, then of keys, then of values, `head_dim` each.
    `query_norm`, `key_norm`: of each head. `angles`: which of the step's rotate queries and keys,
    None for none. `out_norm`, `feed_out_norm`: of what attention and the feed-forward layer give,
    before it is added. `cross`: attention over an encoder's rows, behind the layer's own.
    `feed_forward`: a plan, or a module [1, T, hidden] -> the same, which may return more beside it.
    `slot`: the layer's pages.
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
    cross: CrossPlan | None = None
    feed_norm: NormPlan | None
    feed_forward: FeedForwardPlan | RoutedPlan | Callable[[Tensor], Any]
    feed_out_norm: NormPlan | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderPlan:
    """All layers, the norm after them, and how a step's angles are made.

    `make_angles`: embeddings [T, hidden] and positions [T] or [3, T] -> angles of each kind, whose
    axes are merged already. `places` [n, hidden]: the row of a token's position is added to its
    embedding.
    """

    layers: tuple[LayerPlan, ...]
    norm: NormPlan
    make_angles: Callable[[Tensor, Tensor], Sequence[Angles]]
    places: Tensor | None = None


class Operators(Protocol):
    """Interface of what a device computes of a plan's layers, each named by its index.

    `x` [T, hidden] is contiguous, and may be overwritten by what returns it anew.
    """

    def prepare(self, angles: Sequence[Angles]) -> Sequence[Tensor]:
        """Make of a step's angles what `attend` takes, once for all layers."""

    def attend(self, index: int, x: Tensor, angles: Sequence[Tensor], slot: Slot) -> Tensor:
        """Attention of the layer [T, Hq * D]; its keys and values go to the `slot`."""

    def add_attended(self, index: int, x: Tensor, attended: Tensor) -> Tensor:
        """`x` plus the output matmul of `attended` [T, Hq * D]."""

    def project_cross(self, index: int, x: Tensor) -> Tensor:
        """Query [T, Hq, D] of cross-attention."""

    def project_memory(self, index: int, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value [R, Hkv, D] of an encoder's rows [R, dim]."""

    def add_crossed(self, index: int, x: Tensor, attended: Tensor) -> Tensor:
        """`x` plus the output matmul of cross-attention, of `attended` [T, Hq * D]."""

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
    memory: Tensor | None = None,
) -> Tensor:
    """The last hidden states [T, hidden] of embeddings `x` [T, hidden] at `positions`.

    `rows` [T, hidden] each: added behind the first layers. `slots`, `memory` [R, dim]: taken for
    the layers' own, in the order in which they attend, and for the step's.
    """
    angles = operators.prepare(plan.make_angles(x, positions))
    own = slots_of(plan.layers)
    last = own[-1] if slots is None else None
    if plan.places is not None:
        x = x + embedding(positions, plan.places)
    x = x.contiguous()
    if isinstance(last, LayerSlot) and last.holder.current is not None:
        memory = last.holder.current.memory
        found = operators.run(x, angles, rows, last.holder.current)
        if found is not None:
            return found
    num_tokens = x.shape[0]
    wanted = rows_wanted(last, num_tokens)
    places = iter(own if slots is None else slots)
    for index, layer in enumerate(plan.layers):
        cut = wanted if index + 1 == len(plan.layers) else None
        x = run_layer(operators, index, layer, x, angles, places, cut, memory)
        if index < len(rows):
            x = x + (rows[index] if cut is None else rows[index][cut])
    return operators.finish(x, wanted, num_tokens)


def run_layer(
    operators: Operators,
    index: int,
    layer: LayerPlan,
    x: Tensor,
    angles: Sequence[Tensor],
    slots: Iterator[Slot],
    wanted: Tensor | None,
    memory: Tensor | None = None,
) -> Tensor:
    """The rows `wanted` of a layer's result, [n, hidden]; all of them for None.

    `slots` gives the next slot of each attention; `memory` [R, dim] is for cross-attention.
    """
    attended = operators.attend(index, x, angles, next(slots))
    add = operators.add_attended
    if layer.cross is not None:
        assert memory is not None, "cross-attention needs an encoder's rows"
        x = add(index, x, attended)
        query, (key, value) = (
            operators.project_cross(index, x),
            operators.project_memory(index, memory),
        )
        attended = next(slots).attend(query, key, value, layer.cross.attention).flatten(-2)
        add = operators.add_crossed
    if wanted is not None:
        x, attended = x[wanted], attended[wanted]
        if not len(wanted):
            return x  # a feed-forward layer that is a module may know no empty batch
    return operators.add_feed(index, add(index, x, attended))


def slots_of(layers: Sequence[LayerPlan]) -> list[Slot]:
    """The slots of layers, in the order in which they attend."""
    plans = [each for layer in layers for each in (layer, layer.cross) if each is not None]
    found = [plan.slot for plan in plans if plan.slot is not None]
    assert len(found) == len(plans), "a layer has no pages"
    return found


def rows_wanted(slot: Slot | None, num_tokens: int) -> Tensor | None:
    """The rows that are read of what comes after this slot's layer, None for all."""
    wanted: Tensor | None = getattr(slot, "wanted", None)
    return None if wanted is None or len(wanted) == num_tokens else wanted


def add_module(
    layer: LayerPlan, x: Tensor, normalize: Callable[[Tensor, NormPlan], Tensor]
) -> Tensor:
    """`x` plus what a layer's module makes of it, where that is its feed-forward layer."""
    assert not isinstance(layer.feed_forward, FeedForwardPlan | RoutedPlan)
    normed = x if layer.feed_norm is None else normalize(x, layer.feed_norm)
    found = layer.feed_forward(normed[None])
    found = (found[0] if isinstance(found, tuple) else found)[0]
    if layer.feed_out_norm is not None:
        found = normalize(found, layer.feed_out_norm)
    total: Tensor = x + found
    return total


def normalize(x: Tensor, norm: NormPlan) -> Tensor:
    """`x` [..., dim] with a norm in PyTorch: in the weight's dtype, rounded to that of `x`."""
    weight = norm.weight
    rows = x if weight.dtype == x.dtype else x.to(weight.dtype)
    if norm.bias is None:
        found = rms_norm(rows, weight.shape, weight, norm.epsilon)
    else:
        found = layer_norm(rows, weight.shape, weight, norm.bias, norm.epsilon)
    return found if weight.dtype == x.dtype else found.to(x.dtype)
