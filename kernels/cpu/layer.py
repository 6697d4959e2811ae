"""What a usual decoder layer computes before its attention and after it, one operator each.

A layer is ten operators otherwise, and what Python does between them takes its time: with three, a
step of 16 tokens takes 7 % less (`docs/log.md`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.cpu.linear import Activation, NativeLinear

__all__ = ["feed", "project"]


def project(
    x: Tensor,
    norm: Tensor,
    epsilon: float,
    product: NativeLinear,
    heads: tuple[int, int],
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [T, Hq, D], key [T, Hkv, D] and value [T, Hkv, D] of `x` [T, hidden].

    `rms_norm` with the weight `norm`, then `product`, whose outputs are heads of queries, then of
    keys, then of values; `heads`: Hq and Hkv. The first two turn as by `rotate`. To the bits of
    these operators. Raises RuntimeError where shapes or dtypes do not go together.
    """
    packed, scales, bias = product.operands
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aioengine_cpu.project(
        x, norm, epsilon, packed, scales, bias, *heads, cos, sin
    )
    return found


def feed(
    x: Tensor,
    attended: Tensor,
    out: NativeLinear,
    norm: Tensor,
    epsilon: float,
    up: NativeLinear,
    activation: Activation,
    is_gated: bool,
    down: NativeLinear,
) -> Tensor:
    """`x` [T, hidden] plus `out(attended)`; to that the feed-forward layer of its norm, added.

    `attended` [T, Hq * D]. To the bits of these operators and of sums that are rounded each. Raises
    RuntimeError where shapes or dtypes do not go together.
    """
    found: Tensor = torch.ops.aioengine_cpu.feed(
        x,
        attended,
        *out.operands,
        norm,
        epsilon,
        *up.operands,
        up.num_outputs,
        int(activation),
        is_gated,
        *down.operands,
    )
    return found
