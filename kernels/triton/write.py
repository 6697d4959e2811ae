"""Keys and values into their places in the pages: the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["write"]


@triton.jit(do_not_specialize_on_alignment=("Blocks", "Offsets"))
def write(
    Keys: tl.tensor, Values: tl.tensor, KeyPages: tl.tensor, ValuePages: tl.tensor,
    Blocks: tl.tensor, Offsets: tl.tensor, key_row: tl.tensor, key_head: tl.tensor,
    value_row: tl.tensor, value_head: tl.tensor, key_block: tl.tensor, key_token: tl.tensor,
    key_page_head: tl.tensor, value_block: tl.tensor, value_token: tl.tensor,
    value_page_head: tl.tensor,
    DK: tl.constexpr, DV: tl.constexpr, DK_PADDED: tl.constexpr, DV_PADDED: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """Write one token's keys and values [heads, dim], a program. Grid: tokens."""
    row = tl.program_id(0)
    block, offset = tl.load(Blocks + row).to(tl.int64), tl.load(Offsets + row)
    heads = tl.arange(0, HEADS_PADDED)[:, None]
    dims_k, dims_v = tl.arange(0, DK_PADDED)[None, :], tl.arange(0, DV_PADDED)[None, :]
    is_k, is_v = (heads < HEADS) & (dims_k < DK), (heads < HEADS) & (dims_v < DV)
    k = tl.load(Keys + row.to(tl.int64) * key_row + heads * key_head + dims_k, mask=is_k)
    v = tl.load(Values + row.to(tl.int64) * value_row + heads * value_head + dims_v, mask=is_v)
    k_at = block * key_block + offset * key_token
    v_at = block * value_block + offset * value_token
    tl.store(KeyPages + k_at + heads * key_page_head + dims_k, k, mask=is_k)
    tl.store(ValuePages + v_at + heads * value_page_head + dims_v, v, mask=is_v)
