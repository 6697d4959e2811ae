"""Paged attention in plain PyTorch, one sequence at a time: the specification of every backend.

It is written to be read and to be right, in any floating dtype and on any device. Scores, softmax
and the weighted sum run in float32 at least (float64 stays float64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.attention import (
    AttentionArgs,
    AttentionMetadata,
    KeyValue,
    blocks_of,
    split_by_sequence,
)
from aioengine.kernels.pool import numbers_in, to_numbers, to_stored

__all__ = ["ReferenceBackend", "attend_dense", "bias_by_distance", "visible_mask"]


class ReferenceBackend:
    """See `AttentionBackend`."""

    name = "reference"
    takes_bytes = True

    def write_kv(self, new: KeyValue, pages: KeyValue, meta: AttentionMetadata) -> None:
        """Put keys [T, Hkv, Dk] and values [T, Hkv, Dv] into their slots; mutates the pages."""
        for rows, cache in zip(new, pages, strict=True):
            cache[meta.slot_blocks, meta.slot_offsets] = to_stored(rows, cache)

    def attend(
        self,
        query: Tensor,
        pages: KeyValue,
        meta: AttentionMetadata,
        args: AttentionArgs,
        *,
        new: KeyValue | None = None,
    ) -> Tensor:
        """Attention of `query` [T, Hq, Dk] over each sequence's pages -> [T, Hq, Dv]."""
        if new is not None:
            self.write_kv(new, pages, meta)
        out = query.new_empty(*query.shape[:2], numbers_in(pages[1]))
        for i, (first, last) in enumerate(split_by_sequence(meta)):
            context = meta.context_lens[i]
            start = context - (last - first)
            begin = 0 if args.window is None else max(0, start - args.window + 1)
            mask = torch.ones(last - first, context, dtype=torch.bool, device=query.device)
            if meta.is_causal:
                ids = blocks_of(meta, i)
                mask = visible_mask(
                    start, context, begin, args.window, query.device, ids, meta.blocks_in_window
                )
            bias = None
            if args.distance_bias is not None:
                bias = bias_by_distance(args.distance_bias, start, context, begin)
            positions = torch.arange(begin, context, device=query.device)
            blocks = meta.block_table[i, positions // meta.block_size].long()
            offsets = positions % meta.block_size
            key, value = (to_numbers(cache[blocks, offsets], query.dtype) for cache in pages)
            out[first:last] = attend_dense(query[first:last], key, value, mask, args, bias)
        return out


def visible_mask(
    start: int,
    end: int,
    begin: int,
    window: int | None,
    device: torch.device,
    block_ids: Tensor | None = None,
    blocks_in_window: bool = False,
) -> Tensor:
    """Mask the keys [begin, end) that the queries at positions [start, end) see: bool [queries,
    keys].

    `block_ids` [queries]: equal ids see each other, -1 none. With `blocks_in_window`, the window
    bounds that too: window and (causal or block), else (window and causal) or block.
    """
    query = torch.arange(start, end, device=device)[:, None]
    key = torch.arange(begin, end, device=device)[None, :]
    visible = key <= query
    is_near = None if window is None else key > query - window
    if is_near is not None and not blocks_in_window:
        visible &= is_near
    if block_ids is not None:
        same = (block_ids[:, None] == block_ids[None, :]) & (block_ids[:, None] >= 0)
        visible[:, start - begin :] |= same
    if is_near is not None and blocks_in_window:
        visible &= is_near
    return visible


def bias_by_distance(distance_bias: Tensor, start: int, end: int, begin: int) -> Tensor:
    """`distance_bias` [Hq, n] of the queries at [start, end) and keys [begin, end), as
    [Hq, queries, keys]; what lies after a query gets what distance 0 has."""
    query = torch.arange(start, end, device=distance_bias.device)[:, None]
    key = torch.arange(begin, end, device=distance_bias.device)[None, :]
    return distance_bias[:, (query - key).clamp(0, distance_bias.shape[1] - 1)]


def attend_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    args: AttentionArgs,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of `query` [T, Hq, Dk] over `key` [N, Hkv, Dk], `value` [N, Hkv, Dv], spelt out.

    `mask` bool [T, N], True where a query sees a key, in place of the window; `bias` [Hq, T, N] is
    added to the scores.
    Returns [T, Hq, Dv] in the query's dtype.
    """
    num_tokens, num_heads, _ = query.shape
    num_kv_heads = key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(dtype).reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, -1)
    scores = torch.einsum("thgd,nhd->hgtn", grouped, key.to(dtype)) * args.scale
    if args.softcap is not None:
        scores = args.softcap * torch.tanh(scores / args.softcap)
    if bias is not None:
        scores = scores + bias.to(dtype).view(num_kv_heads, -1, *bias.shape[1:])
    scores = scores.masked_fill(~mask, float("-inf"))
    if args.sinks is not None:
        # A sink is one more key whose logit is given and whose value is zero.
        column = args.sinks.to(dtype).view(num_kv_heads, -1, 1, 1).expand(-1, -1, num_tokens, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[0]]
    out = torch.einsum("hgtn,nhd->thgd", weights, value.to(dtype))
    return out.flatten(1, 2).to(query.dtype)
