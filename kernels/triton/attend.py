"""Paged attention over one step's tokens (Dao, "FlashAttention-2", 2023): the kernels.

A program has a tile of rows: some tokens of one sequence, by some query heads that share a key
head. It goes over the sequence's keys in tiles, finds each row of them through the block table, and
keeps a running maximum and sum of the softmax, in powers of two.

    rows of a tile    [ token 0, heads 0..3 | token 1, heads 0..3 | ... ]   4 heads a key head
    keys              tile, tile, tile, ...                        up to the last that is seen

Of sequences with one new token there are too few tiles to fill a GPU. Their keys are split, as in
Flash-Decoding (Dao et al., 2023): each split writes its part of the result and the logarithm of its
sum (`combine`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from aioengine.kernels.triton.scores import NEVER, are_seen, dot, scores, sinks

__all__ = ["attend"]

STAGED = ("QueryStart", "Lengths", "Table", "TableStarts", "Ids")
"""Parts of the step buffer, which lie at any address."""


@triton.jit
def _sequence_of(
    tile: tl.tensor, QueryStart: tl.tensor, first: tl.tensor, last: tl.tensor,
    BLOCK_Q: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The sequence that tile number `tile` is of, among [first, last), and its number within it.

    Each has a tile more than its tokens fill: where it begins follows from `QueryStart` alone.
    """
    begin = tl.load(QueryStart + first)
    low, high = first, last
    while low < high - 1:
        middle = (low + high) // 2
        start = (tl.load(QueryStart + middle) - begin) // BLOCK_Q + middle - first
        if start <= tile:
            low = middle
        else:
            high = middle
    return low, tile - ((tl.load(QueryStart + low) - begin) // BLOCK_Q + low - first)


@triton.jit
def _limits(
    at: tl.tensor, start: tl.tensor, length: tl.tensor, window: tl.tensor,
    BLOCK_Q: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCKS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The keys [low, high) that a tile from position `at` on sees; the step's begin at `start`."""
    low, high = 0, length
    if IS_CAUSAL:
        if HAS_WINDOW:
            low = tl.maximum(at - window + 1, 0)
        if BLOCKS:
            low = tl.minimum(low, start)
        else:
            high = tl.minimum(at + BLOCK_Q, length)
    return low, high


@triton.jit(
    do_not_specialize=("first", "last", "fewest", "window", "bias_length"),
    do_not_specialize_on_alignment=STAGED,
)
def attend(
    Query: tl.tensor, Keys: tl.tensor, Values: tl.tensor, Out: tl.tensor, Sums: tl.tensor,
    QueryStart: tl.tensor, Lengths: tl.tensor, Table: tl.tensor, TableStarts: tl.tensor,
    Ids: tl.tensor, Sinks: tl.tensor, Bias: tl.tensor, first: tl.tensor, last: tl.tensor,
    fewest: tl.tensor, scale: tl.tensor, softcap: tl.tensor, window: tl.tensor,
    bias_length: tl.tensor, query_token: tl.tensor, query_head: tl.tensor, key_block: tl.tensor,
    key_token: tl.tensor, key_head: tl.tensor, value_block: tl.tensor, value_token: tl.tensor,
    value_head: tl.tensor, out_split: tl.tensor, out_token: tl.tensor, out_head: tl.tensor,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DK_PADDED: tl.constexpr, DV_PADDED: tl.constexpr,
    PAGE: tl.constexpr, IS_SPLIT: tl.constexpr, ARE_SINGLE: tl.constexpr, IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCKS: tl.constexpr, IN_FLOAT32: tl.constexpr,
) -> None:  # fmt: skip
    """Attention of the sequences [first, last), of `HEADS` query heads a program.

    Grid: tiles, key heads times parts of their groups, splits. `ARE_SINGLE`: of one token, a tile;
    else of `fewest` or more. `IS_SPLIT`: `Sums` and `Out` are [splits, sequences, heads, ...].
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    if ARE_SINGLE:
        seq, tile = first + tl.program_id(0), 0
    else:
        seq, tile = _sequence_of(tl.program_id(0), QueryStart, first, last, BLOCK_Q)
    kv_head, split, tokens = tl.program_id(1) // PARTS, tl.program_id(2), tl.load(QueryStart + seq)
    num_q, length = tl.load(QueryStart + seq + 1) - tokens, tl.load(Lengths + seq)
    if num_q != 1 if ARE_SINGLE else (num_q < fewest) | (tile * BLOCK_Q >= num_q):
        return
    rows, start = tl.arange(0, BLOCK_M), length - num_q
    token = tile * BLOCK_Q + rows // HEADS
    in_group = tl.program_id(1) % PARTS * HEADS + rows % HEADS
    head, where, at = kv_head * GROUP + in_group, (tokens + token).to(tl.int64), start + token
    is_row = (rows < BLOCK_Q * HEADS) & (token < num_q) & (in_group < GROUP)
    ids = tl.load(Ids + where, mask=is_row, other=-1) if BLOCKS else at
    dk, dv = tl.arange(0, DK_PADDED)[None, :], tl.arange(0, DV_PADDED)[None, :]
    q_at = (where * query_token + head * query_head)[:, None]
    q = tl.load(Query + q_at + dk, mask=is_row[:, None] & (dk < DK), other=0.0)
    first_at = start + tile * BLOCK_Q
    low, high = _limits(first_at, start, length, window, BLOCK_Q, IS_CAUSAL, HAS_WINDOW, BLOCKS)
    begin, end = low // BLOCK_N, (high + BLOCK_N - 1) // BLOCK_N
    share = (end - begin + tl.num_programs(2) - 1) // tl.num_programs(2)
    begin += split * share
    most, total = sinks(Sinks, head, is_row, split, HAS_SINKS, BLOCK_M)
    found, blocks = tl.zeros([BLOCK_M, DV_PADDED], tl.float32), Table + tl.load(TableStarts + seq)
    for index in range(begin, tl.minimum(begin + share, end)):
        keys = index * BLOCK_N + tl.arange(0, BLOCK_N)
        is_key = (keys >= low) & (keys < high)
        block = tl.load(blocks + keys // PAGE, mask=is_key, other=0).to(tl.int64)
        k_at = (block * key_block + keys % PAGE * key_token + kv_head * key_head)[:, None]
        v_at = (block * value_block + keys % PAGE * value_token + kv_head * value_head)[:, None]
        k = tl.load(Keys + k_at + dk, mask=is_key[:, None] & (dk < DK), other=0.0)
        s = scores(q, k, Bias + head * bias_length, at[:, None] - keys[None, :], is_row, scale,
                    softcap, bias_length, HAS_SOFTCAP, HAS_BIAS, IN_FLOAT32)  # fmt: skip
        seen = are_seen(at, keys, is_row, is_key, Ids + tokens, ids, start, window,
                         BLOCKS, HAS_WINDOW, IS_CAUSAL)  # fmt: skip
        s = tl.where(seen, s, NEVER)
        larger = tl.maximum(most, tl.max(s, 1))
        shrunk, w = tl.exp2(most - larger), tl.where(seen, tl.exp2(s - larger[:, None]), 0.0)
        total, most = total * shrunk + tl.sum(w, 1), larger
        v = tl.load(Values + v_at + dv, mask=is_key[:, None] & (dv < DV), other=0.0)
        found = found * shrunk[:, None] + dot(w.to(v.dtype), v, IN_FLOAT32)
    divisor = tl.where(total > 0, total, 1.0)
    out_at = (seq + token if IS_SPLIT else where).to(tl.int64) * out_token + head * out_head
    out_at += split.to(tl.int64) * out_split
    found = (found / divisor[:, None]).to(Out.dtype.element_ty)
    tl.store(Out + out_at[:, None] + dv, found, mask=is_row[:, None] & (dv < DV))
    if IS_SPLIT:
        sums = tl.where(total > 0, most + tl.log2(divisor), NEVER)
        tl.store(Sums + out_at // DV, sums, mask=is_row)
