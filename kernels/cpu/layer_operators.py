"""A plan's layers on the CPU: in C++, and all of a step in one call.

Between two operators Python takes its time, the more so as matmuls of megabytes leave nothing of it
in the caches (docs/decisions/layer-plan.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aioengine.kernels.attention import AttentionMetadata
from aioengine.kernels.cpu.backend import CpuBackend, places_of
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.kernels.cpu.norm import compute_norm
from aioengine.kernels.layer_plan import (
    Angles,
    ExpertsPlan,
    FeedForwardPlan,
    LayerPlan,
    NormPlan,
    RoutedPlan,
    add_module,
    rows_wanted,
)
from aioengine.kernels.layer_slot import LayerSlot, Slot, StepContext
from aioengine.kernels.matmul import Activation, Matmul

__all__ = ["NativeOperators", "run_chosen_experts", "run_experts"]

_NOTHING = torch.empty(0, dtype=torch.float32)


class NativeOperators:
    """See `Operators`. For layers whose matmuls are `NativeLinear`; float32, bfloat16, float16.

    `norm`: after the last layer, None where these layers are not all. `by_pages`: whether `encode`
    attends by our own operator, not PyTorch's. Raises RuntimeError where
    shapes or dtypes do not go together.
    """

    def __init__(
        self,
        layers: Sequence[LayerPlan],
        norm: NormPlan | None = None,
        *,
        by_pages: bool = False,
    ) -> None:
        self._by_pages = by_pages
        self._layers = layers
        self._ops = torch.ops.aioengine_cpu
        tensors = [each for layer in layers for each in _tensors(layer)]
        sizes = [each for layer in layers for each in _sizes(layer)]
        numbers = [each for layer in layers for each in _numbers(layer)]
        last = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.epsilon)
        self._plan: Tensor = self._ops.pack_plan(tensors, sizes, numbers, *last)
        # Where a module computes a layer's feed-forward part.
        self._stops = [
            index
            for index, layer in enumerate(layers)
            if not isinstance(layer.feed_forward, FeedForwardPlan | RoutedPlan)
        ]
        plans = [each for layer in layers for each in (layer, layer.cross) if each is not None]
        slots = [plan.slot for plan in plans if isinstance(plan.slot, LayerSlot)]
        is_usual = all(slot.distance_bias is None for slot in slots)
        self._slots = slots if is_usual and len(slots) == len(plans) else None

    @property
    def whole(self) -> Tensor | None:
        """The layers as `pack_plan` has packed them, where `run` is one call for all of them."""
        return None if self._slots is None or self._stops else self._plan

    def caches(self, pages: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The pages of each layer, keys and values in turns, of all that the slots name."""
        assert self._slots is not None
        return [each for slot in self._slots for each in pages[slot.layer]]

    def prepare(self, angles: Sequence[Angles]) -> Sequence[Tensor]:
        """See `Operators`: cosines and sines in turns."""
        return [each for pair in angles for each in pair]

    def project(
        self, index: int, x: Tensor, angles: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query [T, Hq, D], key and value [T, Hkv, D], as they are attended with."""
        found: tuple[Tensor, Tensor, Tensor] = self._ops.project(self._plan, index, x, angles)
        return found

    def attend(self, index: int, x: Tensor, angles: Sequence[Tensor], slot: Slot) -> Tensor:
        """See `Operators`."""
        query, key, value = self.project(index, x, angles)
        return slot.attend(query, key, value, self._layers[index].attention).flatten(-2)

    def add_attended(self, index: int, x: Tensor, attended: Tensor) -> Tensor:
        """See `Operators`."""
        found: Tensor = self._ops.add_attended(self._plan, index, x, attended)
        return found

    def encode(self, x: Tensor, angles: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
        """The only layer's result, of an encoder: each row of `x` [..., hidden] attends to all of
        its sequence, of which there are some of these lengths. Contiguous, as `x` has to be."""
        found: Tensor = self._ops.encode_layer(self._plan, x, [*angles], [*lengths], self._by_pages)
        return found

    def project_cross(self, index: int, x: Tensor) -> Tensor:
        """See `Operators`."""
        found: Tensor = self._ops.project_cross(self._plan, index, x)
        return found

    def project_memory(self, index: int, memory: Tensor) -> tuple[Tensor, Tensor]:
        """See `Operators`."""
        found: tuple[Tensor, Tensor] = self._ops.project_memory(self._plan, index, memory)
        return found

    def add_crossed(self, index: int, x: Tensor, attended: Tensor) -> Tensor:
        """See `Operators`."""
        found: Tensor = self._ops.add_crossed(self._plan, index, x, attended)
        return found

    def add_feed(self, index: int, x: Tensor) -> Tensor:
        """See `Operators`."""
        if index in self._stops:
            return add_module(self._layers[index], x, compute_norm)
        found: Tensor = self._ops.add_feed(self._plan, index, x)
        return found

    def finish(self, x: Tensor, wanted: Tensor | None, num_tokens: int) -> Tensor:
        """See `Operators`; rows that nobody wants are 0."""
        found: Tensor = self._ops.finish(self._plan, x, wanted, num_tokens)
        return found

    def run(
        self, x: Tensor, angles: Sequence[Tensor], rows: Sequence[Tensor], step: StepContext
    ) -> Tensor | None:
        """See `Operators`: one call, and one more after each layer that has a module."""
        if self._slots is None or not _takes(x, step):
            return None
        num_tokens, last = len(x), len(self._layers) - 1
        wanted = rows_wanted(self._slots[-1], num_tokens)
        caches = self.caches(step.caches)
        places = [each for meta in step.metadata for each in _places(meta)]
        in_window = [int(meta.blocks_in_window) for meta in step.metadata]
        is_cross = (not meta.is_causal and meta.slot_blocks.shape[0] for meta in step.metadata)
        memory = step.memory if any(is_cross) else None
        others = caches, places, in_window, rows, wanted, memory
        first = 0
        for stop in self._stops:
            x = self._run(first, x, angles, *others)
            x = self.add_feed(stop, x)
            if stop < len(rows):
                is_cut = stop == last and wanted is not None
                x = x + (rows[stop][wanted] if is_cut else rows[stop])
            first = stop + 1
        if first > last:
            return self.finish(x, wanted, num_tokens)
        return self._run(first, x, angles, *others)

    def _run(self, first: int, x: Tensor, *step: object) -> Tensor:
        found: Tensor = self._ops.run_plan(self._plan, first, x, *step)
        return found


def run_experts(plan: RoutedPlan, x: Tensor) -> Tensor:
    """Run a routed layer whose matmuls are for a CPU: `x` [T, hidden] -> [T, hidden].

    Raises RuntimeError where shapes or dtypes do not go together.
    """
    tensors = [*_routed_tensors(plan), *_feed_tensors(plan.shared)]
    sizes = [*_routed_sizes(plan), *_feed_sizes(plan.shared)]
    numbers = _gating_numbers(plan)
    found: Tensor = torch.ops.aioengine_cpu.routed_feed(x, tensors, sizes, numbers)
    return found


def run_chosen_experts(plan: ExpertsPlan, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Run experts whose matmuls are for a CPU on `x` [T, hidden] -> [T, hidden].

    Each row goes to those that are `chosen` int64 [T, k], by `shares` float32 [T, k]. Raises as
    `run_experts` does, and where there is no such expert.
    """
    tensors = [*_listed(plan.up.operands), *_listed(plan.down.operands)]
    sizes, numbers = [*_expert_sizes(plan), plan.up.num_experts], _gating_numbers(plan)
    found: Tensor = torch.ops.aioengine_cpu.expert_feed(x, chosen, shares, tensors, sizes, numbers)
    return found


def _takes(x: Tensor, step: StepContext) -> bool:
    """Return whether the operators know all of a step."""
    # Another backend, or one made of it, wants to be called for each layer.
    if type(step.backend) is not CpuBackend:
        return False
    # The pages of all layers are of one dtype.
    is_known = step.backend.knows(x, step.caches[0][0])
    return is_known


def _places(meta: AttentionMetadata) -> list[Tensor]:
    return _listed(places_of(meta))


# What `pack_plan` (kernels/cpu/layers/layer_plan.cpp) takes of a layer, in its order.


def _tensors(layer: LayerPlan) -> list[Tensor]:
    sinks, cross = layer.attention.sinks, layer.cross
    crossed = [None] * 3 if cross is None else [cross.query, cross.key_value, cross.out]
    return [
        *(each for norm in _norms(layer) for each in _weights(norm)),
        *(each for product in (layer.qkv, layer.out) for each in _operands(product)),
        *_feed_tensors(_feed(layer)),
        _NOTHING if sinks is None else sinks.to(torch.float32).contiguous(),
        *_weights(None if cross is None else cross.norm),
        *(each for product in crossed for each in _operands(product)),
        *_routed_tensors(_routed(layer)),
    ]


def _feed(layer: LayerPlan) -> FeedForwardPlan | None:
    """The feed-forward layer that all rows go to."""
    found = layer.feed_forward
    if isinstance(found, RoutedPlan):
        return found.shared
    return found if isinstance(found, FeedForwardPlan) else None


def _routed(layer: LayerPlan) -> RoutedPlan | None:
    found = layer.feed_forward
    return found if isinstance(found, RoutedPlan) else None


def _feed_tensors(plan: FeedForwardPlan | None) -> list[Tensor]:
    products = (None, None) if plan is None else (plan.up, plan.down)
    return [each for product in products for each in _operands(product)]


def _feed_sizes(plan: FeedForwardPlan | None) -> list[int]:
    if plan is None:
        return [int(Activation.NONE), 0, 0]
    return [int(plan.activation), int(plan.is_gated), plan.up.num_outputs]


def _routed_tensors(plan: RoutedPlan | None) -> list[Tensor]:
    if plan is None:
        return [_NOTHING] * 9
    return [*_operands(plan.router), *_listed(plan.up.operands), *_listed(plan.down.operands)]


def _routed_sizes(plan: RoutedPlan | None) -> list[int]:
    if plan is None:
        return [0] * 6
    more = plan.up.num_experts, plan.num_chosen, int(plan.is_normalized)
    return [*_expert_sizes(plan), *more]


def _expert_sizes(plan: ExpertsPlan) -> list[int]:
    num_outputs = plan.up.num_experts * plan.up.num_outputs
    return [int(plan.activation), int(plan.is_gated), num_outputs]


def _gating_numbers(plan: ExpertsPlan | None) -> list[float]:
    return [0.0, 0.0] if plan is None else [*plan.gating]


def _weights(norm: NormPlan | None) -> list[Tensor]:
    if norm is None:
        return [_NOTHING] * 2
    return [norm.weight, _NOTHING if norm.bias is None else norm.bias]


def _operands(product: Matmul | None) -> list[Tensor]:
    if product is None:
        return [_NOTHING] * 3
    assert isinstance(product, NativeLinear)
    return _listed(product.operands)


def _listed(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [_NOTHING if each is None else each for each in tensors]


def _sizes(layer: LayerPlan) -> list[int]:
    group, stores = 0, True
    if isinstance(layer.slot, LayerSlot):
        group, stores = layer.slot.group, layer.slot.stores
    cross, crossed = layer.cross, [0] * 4
    if cross is not None:
        of_cross = cross.slot.group if isinstance(cross.slot, LayerSlot) else 0
        crossed = [cross.num_heads, cross.num_kv_heads, cross.head_dim, of_cross]
    return [
        *(layer.num_heads, layer.num_kv_heads, layer.head_dim),
        -1 if layer.angles is None else layer.angles,
        *(layer.attention.window or 0, group, int(stores), layer.out.num_outputs),
        *_feed_sizes(_feed(layer)),
        *crossed,
        *_routed_sizes(_routed(layer)),
    ]


def _numbers(layer: LayerPlan) -> list[float]:
    epsilons = [0.0 if each is None else each.epsilon for each in _norms(layer)]
    norm, scale = None, 0.0
    if layer.cross is not None:
        norm, scale = layer.cross.norm, layer.cross.attention.scale
    last = [0.0 if norm is None else norm.epsilon, scale]
    own = layer.attention.scale, layer.attention.softcap or 0.0
    return [*epsilons, *own, *last, *_gating_numbers(_routed(layer))]


def _norms(layer: LayerPlan) -> list[NormPlan | None]:
    return [
        *(layer.norm, layer.query_norm, layer.key_norm),
        *(layer.out_norm, layer.feed_norm, layer.feed_out_norm),
    ]
