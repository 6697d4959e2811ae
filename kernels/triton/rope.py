"""Heads on their way from the matmul to attention, normalised, rotated and stored: the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["rope"]


@triton.jit(do_not_specialize_on_alignment=("Blocks", "Offsets"))
def rope(
    Heads: tl.tensor, Weight: tl.tensor, Cos: tl.tensor, Sin: tl.tensor, Query: tl.tensor,
    KeyPages: tl.tensor, ValuePages: tl.tensor, Blocks: tl.tensor, Offsets: tl.tensor,
    row_step: tl.tensor, epsilon: tl.tensor, key_block: tl.tensor, key_token: tl.tensor,
    key_head: tl.tensor, value_block: tl.tensor, value_token: tl.tensor, value_head: tl.tensor,
    NUM_QUERY: tl.constexpr, NUM_KEY: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ANGLES: tl.constexpr,
) -> None:  # fmt: skip
    """Take a token's heads [queries, keys, values] to `Query`, and the last two to the pages.

    Queries and keys are normalised by the `Weight` [queries and keys, DIM] of each, and rotated by
    the token's angles [DIM]. Grid: tokens, heads in parts.
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    dims = tl.arange(0, DIM_PADDED)[None, :]
    half = (dims + DIM // 2) % DIM  # the place of what each number turns against
    is_dim = dims < DIM
    is_turned = is_dim & (head < NUM_QUERY + NUM_KEY)
    row = Heads + token * row_step + head * DIM
    x = tl.load(row + dims, mask=is_dim & (head < NUM_QUERY + 2 * NUM_KEY), other=0.0)
    x = x.to(tl.float32)
    other = tl.load(row + half, mask=is_turned, other=0.0).to(tl.float32) if HAS_ANGLES else x
    if HAS_NORM:
        size = tl.rsqrt(tl.sum(x * x, 1) / DIM + epsilon)[:, None]
        weight = tl.load(Weight + head * DIM + dims, mask=is_turned, other=0.0).to(tl.float32)
        x = tl.where(is_turned, x * size * weight, x)
        if HAS_ANGLES:
            weight = tl.load(Weight + head * DIM + half, mask=is_turned, other=0.0).to(tl.float32)
            other = other * size * weight
    if HAS_ANGLES:
        cos = tl.load(Cos + token * DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
        sin = tl.load(Sin + token * DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
        turn = tl.where(dims < DIM // 2, -other, other) * sin
        x = tl.where(is_turned, x * cos + turn, x)
    x = x.to(Query.dtype.element_ty)
    block, offset = tl.load(Blocks + token).to(tl.int64), tl.load(Offsets + token)
    is_query, key = is_dim & (head < NUM_QUERY), head - NUM_QUERY
    tl.store(Query + (token * NUM_QUERY + head) * DIM + dims, x, mask=is_query)
    k_at = block * key_block + offset * key_token + key * key_head
    tl.store(KeyPages + k_at + dims, x, mask=is_dim & (key >= 0) & (key < NUM_KEY))
    value = key - NUM_KEY
    v_at = block * value_block + offset * value_token + value * value_head
    tl.store(ValuePages + v_at + dims, x, mask=is_dim & (value >= 0) & (value < NUM_KEY))
