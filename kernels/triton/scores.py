"""Scores of a tile of queries and keys, and which of them count: parts of a kernel."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["NEVER", "are_seen", "dot", "scores", "sinks"]

NEVER = tl.constexpr(-1.0e30)
"""A score that has no weight. Not -inf, of which a row's first tile would make NaN."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, IN_FLOAT32: tl.constexpr) -> tl.tensor:
    """The product of two tiles, in float32."""
    if IN_FLOAT32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def scores(
    q: tl.tensor, k: tl.tensor, Bias: tl.tensor, far: tl.tensor, is_row: tl.tensor,
    scale: tl.tensor, softcap: tl.tensor, bias_length: tl.tensor,
    HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, IN_FLOAT32: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Scores of rows `q` [M, D] and keys `k` [N, D], not masked, in powers of two."""
    s = dot(q, tl.trans(k), IN_FLOAT32) * scale
    if HAS_SOFTCAP:
        small = tl.exp2(tl.abs(s / softcap) * (-2.0 * LOG2E))
        size = (1.0 - small) / (1.0 + small)
        s = softcap * tl.where(s < 0, -size, size)
    if HAS_BIAS:
        far = tl.minimum(tl.maximum(far, 0), bias_length - 1)
        s += tl.load(Bias[:, None] + far, mask=is_row[:, None], other=0.0)
    return s * LOG2E


@triton.jit
def are_seen(
    at: tl.tensor, keys: tl.tensor, is_row: tl.tensor, is_key: tl.tensor, Ids: tl.tensor,
    ids: tl.tensor, start: tl.tensor, window: tl.tensor,
    BLOCKS: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Mask of the keys at positions `keys` [N] that rows at positions `at` [M] see.

    BLOCKS: 2 where the window bounds them too. `Ids`: of the tokens from position `start` on.
    """
    seen = is_key[None, :] & is_row[:, None]
    if IS_CAUSAL:
        is_near = keys[None, :] <= at[:, None]
        if HAS_WINDOW and BLOCKS != 2:
            is_near = is_near & (keys[None, :] > at[:, None] - window)
        if BLOCKS:
            key_ids = tl.load(Ids + keys - start, mask=is_key & (keys >= start), other=-1)
            is_near = is_near | ((ids[:, None] == key_ids[None, :]) & (ids[:, None] >= 0))
        if HAS_WINDOW and BLOCKS == 2:
            is_near = is_near & (keys[None, :] > at[:, None] - window)
        seen = seen & is_near
    return seen


@triton.jit
def sinks(
    Sinks: tl.tensor, head: tl.tensor, is_row: tl.tensor, split: tl.tensor,
    HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Maximum and sum of the softmax before any key."""
    most, total = tl.full([BLOCK_M], NEVER, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:  # noqa: SIM102 - a constant of the compilation
        if split == 0:
            most = tl.load(Sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
            total += 1.0
    return most, total
