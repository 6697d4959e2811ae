"""A plan's layers on a GPU: PyTorch's matmuls, and kernels for what lies between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aioengine.kernels.layer_plan import Angles, FeedForwardPlan, LayerPlan, NormPlan
from aioengine.kernels.layer_slot import LayerSlot, Slot
from aioengine.kernels.matmul import Activation, Matmul, TorchLinear
from aioengine.kernels.torch_operators import TorchOperators
from aioengine.kernels.triton.angles import angles_of
from aioengine.kernels.triton.backend import TritonBackend
from aioengine.kernels.triton.gate import gate
from aioengine.kernels.triton.launch import padded, strides
from aioengine.kernels.triton.norm import norm
from aioengine.kernels.triton.rope import rope

__all__ = ["TritonOperators"]

MAX_DIM = 1 << 14
"""Of a row that is normalised: a program has all of it."""
HEADS = 8
"""Of a program that rotates."""
PART = 1024
"""Gates of a program."""


class TritonOperators(TorchOperators):
    """See `Operators`. Ten launches a layer, nine where keys are not split."""

    angles_of = staticmethod(angles_of)

    def prepare(self, angles: Sequence[Angles]) -> Sequence[Tensor]:
        """See `Operators`: what `TorchOperators` takes where it is needed, made there."""
        return [each.contiguous() for pair in angles for each in pair]

    def normalize(self, x: Tensor, plan: NormPlan) -> Tensor:
        """See `TorchOperators`: one launch, in float32."""
        if not _is_known(x, plan):
            return super().normalize(x, plan)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        _normalize(x, plan, out, adds=False)
        return out

    def attend(self, index: int, x: Tensor, angles: Sequence[Tensor], slot: Slot) -> Tensor:
        """See `Operators`: queries are normalised and rotated, and keys and values stored, by one
        launch."""
        layer = self._layers[index]
        step = slot.holder.current if isinstance(slot, LayerSlot) else None
        if step is None or not isinstance(step.backend, TritonBackend):
            return super().attend(index, x, self._signed(angles), slot)
        assert isinstance(slot, LayerSlot)
        meta, pages = step.metadata[slot.group], step.caches[slot.layer]
        if not slot.stores or meta.readers is not None or not step.backend.knows(pages):
            return super().attend(index, x, self._signed(angles), slot)
        cos, sin = x, x
        if layer.angles is not None:
            cos, sin = angles[2 * layer.angles : 2 * layer.angles + 2]
            if cos.shape[-1] != layer.head_dim:
                return super().attend(index, x, self._signed(angles), slot)
        normed = x if layer.norm is None else self.normalize(x, layer.norm)
        heads = layer.qkv(normed)
        query = heads.new_empty(len(x), layer.num_heads, layer.head_dim)
        weight = self._head_norms[index]
        count = layer.num_heads + 2 * layer.num_kv_heads
        rope[(len(x), -(-count // HEADS))](
            heads, heads if weight is None else weight.weight, cos, sin, query, *pages,
            meta.slot_blocks, meta.slot_offsets, heads.stride(0),
            0.0 if weight is None else weight.epsilon, *strides(pages[0]), *strides(pages[1]),
            NUM_QUERY=layer.num_heads, NUM_KEY=layer.num_kv_heads, BLOCK=HEADS,
            DIM=layer.head_dim, DIM_PADDED=padded(layer.head_dim), HAS_NORM=weight is not None,
            HAS_ANGLES=layer.angles is not None,
        )  # fmt: skip
        args = layer.attention
        if slot.distance_bias is not None:
            args = args._replace(distance_bias=slot.distance_bias)
        return step.backend.attend(query, pages, meta, args).flatten(-2)

    def _add(self, x: Tensor, given: Tensor, matmul: Matmul, plan: NormPlan | None) -> Tensor:
        if plan is None or not _is_known(x, plan) or not x.is_contiguous():
            return super()._add(x, given, matmul, plan)
        _normalize(matmul(given), plan, x, adds=True)
        return x

    def _signed(self, angles: Sequence[Tensor]) -> Sequence[Tensor]:
        """Angles as `TorchOperators` prepares them."""
        return super().prepare([*zip(angles[::2], angles[1::2], strict=True)])

    def feed(self, layer: LayerPlan, x: Tensor) -> Tensor:
        """See `TorchOperators`: gates are activated and multiplied by one launch."""
        plan = layer.feed_forward
        assert isinstance(plan, FeedForwardPlan)
        is_known = isinstance(plan.up, TorchLinear) and plan.activation is not Activation.NONE
        if not is_known or not plan.is_gated or x.dtype is torch.float64:
            return super().feed(layer, x)
        both = plan.up(x)
        dim = both.shape[-1] // 2
        out = both.new_empty(len(x), dim)
        if len(x):
            gate[(len(x), -(-dim // PART))](
                both, out, both.stride(0), DIM=dim, BLOCK=PART, ACTIVATION=int(plan.activation)
            )
        return out


def _is_known(x: Tensor, plan: NormPlan) -> bool:
    is_known = x.dtype is not torch.float64 and len(plan.weight) <= MAX_DIM
    return is_known and x.dim() == 2 and x.stride(1) == 1


def _normalize(x: Tensor, plan: NormPlan, out: Tensor, *, adds: bool) -> None:
    """Write the normalised rows of `x` to `out`, or add them to its rows."""
    if not len(x):
        return
    dim = len(plan.weight)
    norm[(len(x),)](
        x, plan.weight, plan.weight if plan.bias is None else plan.bias, out, x.stride(0),
        plan.epsilon, DIM=dim, DIM_PADDED=padded(dim), HAS_BIAS=plan.bias is not None, ADDS=adds,
        num_warps=4 if dim <= 4096 else 16,
    )  # fmt: skip
