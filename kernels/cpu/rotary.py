"""Rotary position embeddings in C++."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate"]


def rotate(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, in_pairs: bool = False
) -> tuple[Tensor, Tensor]:
    """`query` [T, Hq, D] and `key` [T, Hkv, D], turned by `cos` and `sin` [T, D]; contiguous.

    The first half of each head is turned against the second: x * cos + (-second, first) * sin.
    Angles [T, D / 2] are those of both halves. `in_pairs`: the halves take turns in what is given,
    number by number, and lie one behind the other in what is found. All of float32, bfloat16 or
    (with F16C) float16; computed in float32 and rounded once. Where the operators are loaded
    (`aioengine.kernels.cpu.library`). Raises RuntimeError where shapes or dtypes do not go
    together, or the numbers of a head do not lie side by side.
    """
    found: tuple[Tensor, Tensor] = torch.ops.aioengine_cpu.rotate(query, key, cos, sin, in_pairs)
    return found
