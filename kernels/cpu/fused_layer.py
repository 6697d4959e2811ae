"""Fused operators of a usual decoder layer, before its attention and after it, and their weights.

A layer is ten operators otherwise, and Python between them takes its time: with three, a step of 16
tokens takes 7 % less (docs/decisions/fused-decoder.md). Several layers can be one operator,
`CpuBackend.run_layers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aioengine.kernels.cpu.linear import Activation, NativeLinear

__all__ = ["Layers", "UsualLayer", "listed"]


@dataclass(frozen=True, slots=True, eq=False)
class UsualLayer:
    """Weights and sizes of a layer, as `project`, attention and `feed` take it.

    `heads`: Hq and Hkv. `window`: tokens that one sees, 0 for all; `softcap`: 0 for none.
    """

    norm: Tensor
    epsilon: float
    qkv: NativeLinear
    heads: tuple[int, int]
    scale: float
    softcap: float
    window: int
    out: NativeLinear
    feed_norm: Tensor
    feed_epsilon: float
    up: NativeLinear
    activation: Activation
    is_gated: bool
    down: NativeLinear

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [T, Hq, D], key [T, Hkv, D] and value [T, Hkv, D] of `x` [T, hidden].

        `rms_norm` with the weight `norm`, then `qkv`, whose outputs are heads of queries, then of
        keys, then of values. The first two are rotated as by `rotate`. To the bits of these
        operators. Raises RuntimeError where shapes or dtypes do not go together.
        """
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aioengine_cpu.project(
            x, self.norm, self.epsilon, *self.qkv.operands, *self.heads, cos, sin
        )
        return found

    def feed(self, x: Tensor, attended: Tensor) -> Tensor:
        """`x` [T, hidden] plus `out(attended)`; to that the feed-forward layer of its norm, added.

        `attended` [T, Hq * D]. To the bits of these operators and of sums that are rounded each.
        Raises RuntimeError where shapes or dtypes do not go together.
        """
        norm, out = (self.feed_norm, self.feed_epsilon), self.out.operands
        inner = *self.up.operands, self.up.num_outputs, int(self.activation), self.is_gated
        found: Tensor = torch.ops.aioengine_cpu.feed(
            x, attended, *out, *norm, *inner, *self.down.operands
        )
        return found

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors in the order of the operator; what there is none of is empty."""
        nothing = torch.empty(0)
        layers = (self.qkv, self.out, self.up, self.down)
        qkv, out, up, down = (
            [nothing if each is None else each for each in layer.operands] for layer in layers
        )
        return [self.norm, *qkv, *out, self.feed_norm, *up, *down]

    @property
    def sizes(self) -> list[int]:
        """Values in the order of the operator."""
        feeds = [self.up.num_outputs, int(self.activation), int(self.is_gated)]
        return [*self.heads, *feeds, self.window]

    @property
    def numbers(self) -> list[float]:
        """Values in the order of the operator."""
        return [self.epsilon, self.feed_epsilon, self.scale, self.softcap]


Layers = tuple[list[Tensor], list[int], list[float]]
"""What `CpuBackend.run_layers` takes of layers: 14 tensors, 6 sizes and 4 numbers of each."""


def listed(layers: Sequence[UsualLayer]) -> Layers:
    """Their tensors, sizes and numbers."""
    return (
        [each for layer in layers for each in layer.tensors],
        [each for layer in layers for each in layer.sizes],
        [each for layer in layers for each in layer.numbers],
    )
