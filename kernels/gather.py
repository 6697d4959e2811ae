"""Paged attention in plain PyTorch, fast: gather the pages' rows, then dense kernels.

Sequences with one new token are batched: their context rows are gathered into one padded
[sequences, length] batch (by length, in a few buckets, so that little of it is padding) and
attended to in one call. Other chunks run one sequence at a time. Query heads that share a key head
ride along as a dimension of their own, so keys and values are never repeated.

A fused kernel does the arithmetic (`dense`); logit soft-capping and attention sinks, which it does
not know, are spelt out. On a GPU the number of keys in a masked call is a multiple of 64, so that a
growing context makes few shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from aioengine.kernels.attention import (
    AttentionArgs,
    AttentionMetadata,
    KeyValue,
    blocks_of,
    split_by_sequence,
)
from aioengine.kernels.dense import attention_over, dense_attention, padded_length
from aioengine.kernels.pool import BYTES, LayerPages, numbers_in, row_index, to_numbers, to_stored
from aioengine.kernels.reference import bias_by_distance, visible_mask

__all__ = ["GatherBackend"]

# Bytes of keys gathered for one batched call. Smaller pieces would stay in a core's cache, but
# every call costs a meeting of all threads, which on a busy machine is dearer.
MAX_BUCKET_BYTES_CPU = 16 << 20
MAX_BUCKET_BYTES_DEVICE = 256 << 20
# Rows of scores that exist at a time where attention is spelt out.
MAX_EXPLICIT_QUERIES = 256


@dataclass(frozen=True, slots=True)
class _Copy:
    """The place that rows of pages are copied to, the same for all layers of a step.

    `index` int64: rows of the layer's matrix. `rows` [len(index), D]: the place. `key`, `value`
    [..., Hkv, n, D]: views of it.
    """

    index: Tensor
    rows: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Some one-token sequences, padded to one length.

    `rows` int64 [m] on the device: their rows of the flat batch; None if these are [0, m) in order.
    `blocks`, `offsets` int64 [m, length]: where their context lies; padding repeats the sequence's
    own last position, so that nobody else's rows are ever read.
    `mask` [m, 1, 1, length], -inf on padding, else 0; None if there is no padding.
    `distances` int64 [m, length]: how far back each lies.
    """

    rows: Tensor | None
    blocks: Tensor
    offsets: Tensor
    mask: Tensor | None
    distances: Tensor


class GatherBackend:
    """See `AttentionBackend`."""

    name = "gather"
    takes_bytes = True

    def __init__(self) -> None:
        # Reused from call to call: fresh memory of this size costs more than filling it.
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def write_kv(self, new: KeyValue, pages: KeyValue, meta: AttentionMetadata) -> None:
        """Put keys [T, Hkv, Dk] and values [T, Hkv, Dv] into their slots; mutates the pages."""
        slots = _slots(meta)
        for rows, cache in zip(new, pages, strict=True):
            cache.index_put_(slots, to_stored(rows, cache))

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
        if not isinstance(pages, LayerPages):
            pages = LayerPages(pages)
        buckets = _decode_buckets(meta, args.window, pages[0], query.dtype)
        if len(buckets) == 1 and meta.num_decodes == len(meta.query_lens):
            return self._decode(query, pages, meta, buckets[0], args)
        out = query.new_empty(*query.shape[:2], numbers_in(pages[1]))
        for bucket in buckets:
            chosen = slice(len(bucket.blocks)) if bucket.rows is None else bucket.rows
            out[chosen] = self._decode(query[chosen], pages, meta, bucket, args)
        bounds = split_by_sequence(meta)
        # Those that see most first, for the same reason as with buckets.
        chunks = range(meta.num_decodes, len(bounds))
        for i in sorted(
            chunks, key=lambda i: _first_seen(meta, i, args.window) - meta.context_lens[i]
        ):
            first, last = bounds[i]
            out[first:last] = self._prefill(query[first:last], pages, meta, i, args)
        return out

    def _decode(
        self,
        query: Tensor,
        pages: LayerPages,
        meta: AttentionMetadata,
        bucket: _Bucket,
        args: AttentionArgs,
    ) -> Tensor:
        """Attention of a bucket's tokens [m, Hq, Dk] -> [m, Hq, Dv]."""
        # The heads of one group stand where a sequence's tokens would: one read of its keys.
        grouped = _group_heads(query, pages[0].shape[2])
        rows = self._gather(pages, meta, bucket.blocks, bucket.offsets)
        key, value = (to_numbers(each, query.dtype) for each in rows)
        if args.softcap is None and args.sinks is None:

            def make() -> Callable[[Tensor, float | None], Tensor]:
                mask = _bucket_mask(meta, bucket, args, grouped.shape[1])
                return attention_over(grouped, key, value, mask)

            # Without steps, or of bytes, keys and values are in another place each time.
            name = "attend", id(key), grouped.shape, args.distance_bias
            is_in_place = pages.steps is not None and pages[0].dtype is not BYTES
            attend = meta.once(name, make) if is_in_place else make()
            return attend(grouped, args.scale).flatten(1, 2)
        mask = _bucket_mask(meta, bucket, args, grouped.shape[1])
        sinks = None if args.sinks is None else args.sinks.view(grouped.shape[1], -1, 1)
        return _attend_explicitly(grouped, key, value, mask, sinks, args).flatten(1, 2)

    def _prefill(
        self,
        query: Tensor,
        pages: LayerPages,
        meta: AttentionMetadata,
        index: int,
        args: AttentionArgs,
    ) -> Tensor:
        end = meta.context_lens[index]
        start = end - query.shape[0]
        window = None if args.window is None or args.window >= end else args.window
        begin = _first_seen(meta, index, window)
        is_plain = start == 0 and window is None and not meta.sees_blocks(index)
        is_masked = args.distance_bias is not None or (meta.is_causal and not is_plain)
        is_fused = args.softcap is None and args.sinks is None
        length = end - begin
        if is_masked and is_fused:
            length = padded_length(length, query.device)
        slots = _context_slots(meta, index, begin, end, length)
        key, value = (to_numbers(x, query.dtype) for x in self._gather(pages, meta, *slots))
        # [Hkv, group, tokens, dim]: a whole group sees its keys and values without a copy.
        grouped = _group_heads(query, key.shape[0]).permute(1, 2, 0, 3)
        keys = key[:, None].expand(-1, grouped.shape[1], -1, -1)
        values = value[:, None].expand(-1, grouped.shape[1], -1, -1)
        if args.distance_bias is not None:
            result = _attend_with_bias(grouped, keys, values, start, begin, window, args)
        elif not is_fused:
            mask = _chunk_mask(meta, index, begin, window, length, query.dtype)
            result = _attend_in_parts(grouped, keys, values, mask, args)
        elif is_masked:
            mask = _chunk_mask(meta, index, begin, window, length, query.dtype)
            result = dense_attention(grouped, keys, values, mask, scale=args.scale)
        else:
            result = dense_attention(
                grouped, keys, values, scale=args.scale, is_causal=meta.is_causal
            )
        return result.permute(2, 0, 1, 3).flatten(1, 2)

    def _gather(
        self, pages: LayerPages, meta: AttentionMetadata, blocks: Tensor, offsets: Tensor
    ) -> KeyValue:
        """The rows at `blocks`, `offsets` [..., n], which `meta` keeps -> [..., Hkv, n, D] each.

        They are valid until the next call.
        """
        key, steps = pages[0], pages.steps
        if steps is None:
            return pages.at(blocks, offsets)

        def make() -> _Copy:
            num_heads, dim = key.shape[2:]
            index = row_index(blocks, offsets, num_heads, steps)
            rows = self._buffer(index.shape[0] * dim, key).as_strided((len(index), dim), (dim, 1))
            place = rows.view(2, *blocks.shape[:-1], num_heads, blocks.shape[-1], dim)
            return _Copy(index, rows, *place.unbind())

        copy = meta.once(("copy", id(blocks), key.shape[2:], steps), make)
        # Whole rows of one matrix are copied several times faster than indexed elements.
        torch.index_select(pages.rows, 0, copy.index, out=copy.rows)
        return copy.key, copy.value

    def _buffer(self, numel: int, like: Tensor) -> Tensor:
        """Scratch memory for at least `numel` numbers."""
        name = (like.dtype, like.device)
        buffer = self._scratch.get(name)
        if buffer is None or buffer.numel() < numel:
            # A tensor made in inference mode could not be written outside it.
            with torch.inference_mode(False):
                buffer = torch.empty(numel, dtype=like.dtype, device=like.device)
            self._scratch[name] = buffer
        return buffer


def _group_heads(query: Tensor, num_kv_heads: int) -> Tensor:
    """[T, Hq, D] as [T, Hkv, Hq // Hkv, D]: the heads that share a key head, side by side."""
    num_tokens, num_heads, dim = query.shape
    return query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, dim)


def _attend_in_parts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, args: AttentionArgs
) -> Tensor:
    """Spelt-out attention over [Hkv, group, tokens, dim], some of the tokens at a time."""
    sinks = None if args.sinks is None else args.sinks.view(*query.shape[:2], 1, 1)
    parts = zip(
        torch.split(query, MAX_EXPLICIT_QUERIES, dim=2),
        torch.split(mask, MAX_EXPLICIT_QUERIES),
        strict=True,
    )
    return torch.cat(
        [_attend_explicitly(part, key, value, seen, sinks, args) for part, seen in parts], dim=2
    )


def _attend_with_bias(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: int,
    begin: int,
    window: int | None,
    args: AttentionArgs,
) -> Tensor:
    """Causal attention of the tokens from `start` on, [Hkv, group, tokens, dim], to the keys from
    `begin` on, some of the tokens at a time: a bias is as large as all scores are."""
    table = args.distance_bias
    assert table is not None
    sinks = None if args.sinks is None else args.sinks.view(*query.shape[:2], 1, 1)
    is_fused = args.softcap is None and sinks is None
    parts = []
    for part in torch.split(query, MAX_EXPLICIT_QUERIES, dim=2):
        end = start + part.shape[2]
        visible = visible_mask(start, end, begin, window, query.device)
        bias = bias_by_distance(table, start, end, begin).to(query.dtype)
        mask = bias.masked_fill_(~visible, float("-inf")).view(*query.shape[:2], *visible.shape)
        length = padded_length(end - begin, query.device) if is_fused else end - begin
        seen = key[:, :, :length], value[:, :, :length]
        if is_fused:
            mask = _pad_keys(mask, length)
            found = dense_attention(part, *seen, mask, scale=args.scale)
        else:
            found = _attend_explicitly(part, *seen, mask, sinks, args)
        parts.append(found)
        start = end
    return torch.cat(parts, dim=2)


def _attend_explicitly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    args: AttentionArgs,
) -> Tensor:
    """softmax(cap(query key^T scale) | sinks) value, over [..., queries, dim], in float32 at least.

    `mask` is added to the scores and broadcasts to them; `sinks` to [..., queries, 1].
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = torch.matmul(query.to(dtype), key.to(dtype).transpose(-1, -2)) * args.scale
    if args.softcap is not None:
        scores = torch.tanh(scores / args.softcap) * args.softcap
    if mask is not None:
        scores = scores + mask
    length = scores.shape[-1]
    if sinks is not None:
        column = sinks.to(dtype).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., :length]
    return torch.matmul(weights, value.to(dtype)).to(query.dtype)


def _decode_buckets(
    meta: AttentionMetadata, window: int | None, pages: Tensor, dtype: torch.dtype
) -> list[_Bucket]:
    """The step's one-token sequences in padded batches of so many rows as may be gathered."""

    def make() -> list[_Bucket]:
        row_bytes = pages.shape[2] * pages.shape[3] * pages.element_size()
        most = MAX_BUCKET_BYTES_CPU if pages.device.type == "cpu" else MAX_BUCKET_BYTES_DEVICE
        lens = sorted(meta.context_lens[: meta.num_decodes], reverse=True)
        seen = lens if window is None else [min(n, window) for n in lens]
        buckets = [
            _make_bucket(meta, first, last, seen, window, dtype)
            for first, last in _split_by_length(seen, most // row_bytes)
        ]
        # The largest first: the place that their rows are copied to grows once.
        return sorted(buckets, key=lambda bucket: bucket.blocks.numel(), reverse=True)

    return meta.once(("decode", window, pages.shape[2:], dtype), make)


def _first_seen(meta: AttentionMetadata, index: int, window: int | None) -> int:
    """The first position that any of a sequence's new tokens sees."""
    start = meta.context_lens[index] - meta.query_lens[index]
    return 0 if window is None else max(0, start - window + 1)


def _slots(meta: AttentionMetadata) -> tuple[Tensor, Tensor]:
    """Compute where keys and values are written, as PyTorch indexes: once for all layers."""
    return meta.once("slots", lambda: (meta.slot_blocks.long(), meta.slot_offsets.long()))


def _split_by_length(lens: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Ranges of `lens`, the largest first, alike in length, each padded within `limit` rows."""
    bounds = [0]
    for i, length in enumerate(lens):
        longest = lens[bounds[-1]]
        alike = length * 4 >= longest * 3 or longest - length <= 64
        if i and (not alike or (i + 1 - bounds[-1]) * longest > limit):
            bounds.append(i)
    return [*pairwise([*bounds, len(lens)])] if lens else []


def _make_bucket(
    meta: AttentionMetadata,
    first: int,
    last: int,
    seen: Sequence[int],
    window: int | None,
    dtype: torch.dtype,
) -> _Bucket:
    """The bucket of sequences [first, last), counted by length, the longest first.

    Of all, `seen` has how many positions each sees. Nothing is sent to the device.
    """
    device = meta.seq_lens.device
    length = padded_length(seen[first], device)
    # All of them need no reordering: they stay where they are in the batch.
    rows = None if last - first == len(seen) else meta.by_length[first:last].long()
    chosen = slice(last) if rows is None else rows
    ends = meta.seq_lens[chosen].long()[:, None]
    counts = ends if window is None else ends.clamp(max=window)
    steps = torch.arange(length, device=device)[None, :]
    positions = torch.minimum(ends - counts + steps, ends - 1)
    blocks = meta.block_table[chosen].long().gather(1, positions // meta.block_size)
    is_padded = seen[last - 1] != length
    return _Bucket(
        rows=rows,
        blocks=blocks,
        offsets=positions % meta.block_size,
        mask=_additive(steps < counts, dtype)[:, None, None, :] if is_padded else None,
        distances=ends - 1 - positions,
    )


def _bucket_mask(
    meta: AttentionMetadata, bucket: _Bucket, args: AttentionArgs, num_kv_heads: int
) -> Tensor | None:
    """Build what is added to a bucket's scores: it broadcasts to [m, Hkv, group, length]; or
    nothing."""
    table, mask = args.distance_bias, bucket.mask
    if table is None:
        return mask

    def make() -> Tensor:
        far = bucket.distances.clamp(max=table.shape[1] - 1)
        bias = table[:, far].view(num_kv_heads, -1, *far.shape).permute(2, 0, 1, 3)
        return bias if mask is None else bias + mask

    return meta.once(("bias", id(bucket), table), make)


def _context_slots(
    meta: AttentionMetadata, index: int, begin: int, end: int, length: int
) -> tuple[Tensor, Tensor]:
    """Block and row of positions [begin, begin + length) of sequence `index`: int64 [length] each.

    The last position, `end` - 1, stands for those from `end` on.
    """

    def make() -> tuple[Tensor, Tensor]:
        positions = torch.arange(begin, begin + length, device=meta.block_table.device)
        if begin + length > end:
            positions = positions.clamp(max=end - 1)
        blocks = meta.block_table[index, positions // meta.block_size].long()
        return blocks, positions % meta.block_size

    return meta.once(("slots", index, begin, end, length), make)


def _chunk_mask(
    meta: AttentionMetadata,
    index: int,
    begin: int,
    window: int | None,
    length: int,
    dtype: torch.dtype,
) -> Tensor:
    """`visible_mask` as numbers to add to scores, [queries, length], once per step instead of once
    per layer."""
    end = meta.context_lens[index]
    start = end - meta.query_lens[index]
    device, has_blocks = meta.seq_lens.device, meta.sees_blocks(index)
    if not meta.is_causal:
        return torch.zeros(meta.query_lens[index], end, dtype=dtype, device=device)

    def make() -> Tensor:
        ids = blocks_of(meta, index)
        visible = visible_mask(start, end, begin, window, device, ids, meta.blocks_in_window)
        return _pad_keys(_additive(visible, dtype), length)

    # Causal ones are the same for all chunks of the same place and size.
    key = ("mask", start, end, begin, window, length, dtype, index if has_blocks else None)
    return meta.once(key, make)


def _pad_keys(mask: Tensor, length: int) -> Tensor:
    """Extend a mask to add to scores, [..., keys], to `length` keys; nobody sees those behind."""
    missing = length - mask.shape[-1]
    return mask if not missing else pad(mask, (0, missing), value=float("-inf"))


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `visible`, -inf elsewhere: what the fused kernels would make of it in every layer."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf"))
