"""A plan's layers in plain PyTorch, on any device, with few launches.

The order is fixed and nothing is read back, so that a step can be captured. A layer is eleven
launches besides attention: two norms, three of rotation (queries and keys side by side, by angles
whose signs were prepared once a step), four matmuls of which two add to the residual, an activation
and a product of gates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, rms_norm

from aioengine.kernels.layer_plan import (
    Angles,
    CrossPlan,
    FeedForwardPlan,
    LayerPlan,
    NormPlan,
    add_module,
    normalize,
)
from aioengine.kernels.layer_slot import Slot, StepContext
from aioengine.kernels.matmul import Matmul, TorchLinear

__all__ = ["TorchOperators"]


class TorchOperators:
    """See `Operators`. For matmuls of any kind."""

    def __init__(self, layers: Sequence[LayerPlan], norm: NormPlan | None = None) -> None:
        self._layers = layers
        self._norm = norm
        self._head_norms = [_of_heads(layer) for layer in layers]

    def prepare(self, angles: Sequence[Angles]) -> Sequence[Tensor]:
        """See `Operators`: cosines, and sines with the signs of the halves that they multiply."""
        found = []
        for cos, sin in angles:
            first, second = sin.chunk(2, dim=-1)
            found += [cos[:, None], torch.cat([-first, second], dim=-1)[:, None]]
        return found

    def project(
        self, index: int, x: Tensor, angles: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query [T, Hq, D], key and value [T, Hkv, D], as they are attended with."""
        layer = self._layers[index]
        normed = x if layer.norm is None else self.normalize(x, layer.norm)
        whole = layer.qkv(normed).view(x.shape[0], -1, layer.head_dim)
        num_turned = layer.num_heads + layer.num_kv_heads
        heads, value = whole.split_with_sizes((num_turned, layer.num_kv_heads), dim=1)
        heads = self._normalize_heads(index, heads)
        if layer.angles is not None:
            cos, sin = angles[2 * layer.angles : 2 * layer.angles + 2]
            # Rolled by a half, each number stands where the one that it turns against was.
            heads = torch.addcmul(heads * cos, heads.roll(layer.head_dim // 2, -1), sin)
        query, key = heads.split_with_sizes((layer.num_heads, layer.num_kv_heads), dim=1)
        return query, key, value

    def _normalize_heads(self, index: int, heads: Tensor) -> Tensor:
        """Queries and keys [T, Hq + Hkv, D] with their norms, which have a weight for each head."""
        norm = self._head_norms[index]
        if norm is None:
            return heads
        weight, dtype = norm.weight, heads.dtype
        rows = heads if dtype == weight.dtype else heads.to(weight.dtype)
        normed = rms_norm(rows, weight.shape[-1:], None, norm.epsilon).mul_(weight)
        return normed if dtype == weight.dtype else normed.to(dtype)

    def attend(self, index: int, x: Tensor, angles: Sequence[Tensor], slot: Slot) -> Tensor:
        """See `Operators`."""
        query, key, value = self.project(index, x, angles)
        return slot.attend(query, key, value, self._layers[index].attention).flatten(-2)

    def normalize(self, x: Tensor, plan: NormPlan) -> Tensor:
        """`x` [..., dim] with a norm."""
        return normalize(x, plan)

    def feed(self, layer: LayerPlan, x: Tensor) -> Tensor:
        """Input of the last matmul of a feed-forward layer, of normed `x`."""
        plan = layer.feed_forward
        assert isinstance(plan, FeedForwardPlan)
        return plan.up(x, plan.activation, plan.is_gated)

    def add_attended(self, index: int, x: Tensor, attended: Tensor) -> Tensor:
        """See `Operators`."""
        layer = self._layers[index]
        # What goes into the first layer is the caller's.
        return self._add(x.clone() if index == 0 else x, attended, layer.out, layer.out_norm)

    def project_cross(self, index: int, x: Tensor) -> Tensor:
        """See `Operators`."""
        cross = self._cross(index)
        normed = x if cross.norm is None else self.normalize(x, cross.norm)
        return cross.query(normed).view(x.shape[0], -1, cross.head_dim)

    def project_memory(self, index: int, memory: Tensor) -> tuple[Tensor, Tensor]:
        """See `Operators`."""
        cross = self._cross(index)
        both = cross.key_value(memory).view(memory.shape[0], -1, cross.head_dim)
        key, value = both.chunk(2, dim=1)
        return key, value

    def add_crossed(self, index: int, x: Tensor, attended: Tensor) -> Tensor:
        """See `Operators`."""
        return self._add(x, attended, self._cross(index).out, None)

    def _cross(self, index: int) -> CrossPlan:
        cross = self._layers[index].cross
        assert cross is not None, "the layer has no cross-attention"
        return cross

    def add_feed(self, index: int, x: Tensor) -> Tensor:
        """See `Operators`."""
        layer = self._layers[index]
        feed = layer.feed_forward
        if not isinstance(feed, FeedForwardPlan):
            return add_module(layer, x, self.normalize)
        normed = x if layer.feed_norm is None else self.normalize(x, layer.feed_norm)
        return self._add(x, self.feed(layer, normed), feed.down, layer.feed_out_norm)

    def finish(self, x: Tensor, wanted: Tensor | None, num_tokens: int) -> Tensor:
        """See `Operators`; rows that nobody wants are 0."""
        assert self._norm is not None, "these layers are not a decoder's all"
        normed = self.normalize(x, self._norm)
        if wanted is None:
            return normed
        return normed.new_zeros(num_tokens, normed.shape[1]).index_copy_(0, wanted, normed)

    def _add(self, x: Tensor, given: Tensor, matmul: Matmul, plan: NormPlan | None) -> Tensor:
        """`x` plus a matmul of `given`, which has a norm of its own or none; mutates `x`."""
        if plan is None and isinstance(matmul, TorchLinear):
            return matmul.add_to(x, given)
        found = matmul(given)
        return x.add_(found if plan is None else self.normalize(found, plan))

    def run(
        self, x: Tensor, angles: Sequence[Tensor], rows: Sequence[Tensor], step: StepContext
    ) -> Tensor | None:
        """See `Operators`: layer by layer."""
        return None


def _of_heads(layer: LayerPlan) -> NormPlan | None:
    """The norms of queries and keys as one, with a weight [Hq + Hkv, D]."""
    query, key = layer.query_norm, layer.key_norm
    if query is None or key is None:
        assert query is key, "queries and keys have norms both, or none"
        return None
    assert query.epsilon == key.epsilon, "one norm is for both"
    counts = (layer.num_heads, layer.num_kv_heads)
    weights = [
        norm.weight.expand(count, -1) for norm, count in zip((query, key), counts, strict=True)
    ]
    return NormPlan(torch.cat(weights), query.epsilon)
