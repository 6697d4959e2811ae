"""Metadata of a step's attention, made on the host and staged for the device.

See `kernels.attention` for what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from operator import sub
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from aioengine.kernels.attention import AttentionMetadata, Unread
from aioengine.kernels.transfer import Staged, StepBuffer

__all__ = [
    "SeenRows",
    "build_cross_metadata",
    "build_metadata",
    "stage_cross_metadata",
    "stage_metadata",
]


class SeenRows(NamedTuple):
    """Rows [first, first + num_rows) of a sequence's cross-attention, which `num_tokens` tokens in
    a row see.

    `first` begins a block. `is_sighted`: the model's own mask shows them something; where it shows
    nothing, some models attend to rows all the same.
    """

    num_tokens: int
    first: int
    num_rows: int
    is_sighted: bool = True


def build_metadata(
    *, block_size: int, device: torch.device | str = "cpu", **sequences: Any
) -> AttentionMetadata:
    """The metadata of a step by itself; `sequences`: the other arguments of `stage_metadata`."""
    buffer = StepBuffer(device)
    staged = stage_metadata(buffer, block_size=block_size, **sequences)
    buffer.send()
    return staged()


def build_cross_metadata(
    *, block_size: int, device: torch.device | str = "cpu", **sequences: Any
) -> AttentionMetadata:
    """The same for cross-attention; `sequences`: other arguments of `stage_cross_metadata`."""
    buffer = StepBuffer(device)
    staged = stage_cross_metadata(buffer, block_size=block_size, **sequences)
    buffer.send()
    return staged()


def stage_metadata(
    buffer: StepBuffer,
    *,
    block_size: int,
    block_tables: Sequence[Sequence[int]],
    starts: Sequence[int],
    ends: Sequence[int],
    stored: Sequence[bool] | None = None,
    block_ids: Sequence[Tensor | None] | None = None,
    blocks_in_window: bool = False,
    chunk: int | None = None,
    is_captured: bool = False,
) -> Callable[[], AttentionMetadata]:
    """Stage a step that computes positions [starts[i], ends[i]) of sequence i.

    Returns what gives its metadata once the buffer has been sent.

    `block_tables[i]` names at least the blocks of positions [0, ends[i]); `block_ids[i]` int32
    [ends[i] - starts[i]], or None where all tokens are causal. `stored[i]`: the pages hold the
    sequence's one token already; what is written of it goes to the place of the token after it,
    for which there must be a block, and is not read. `chunk`: a token sees none before the last
    multiple of this position, which is one of `block_size`; a sequence that goes on behind one is
    several to the kernels, each with a context of its own. `is_captured`: see `AttentionMetadata`;
    then a sequence may have no token. Nothing is mutated.
    """
    assert len(block_tables) == len(starts) == len(ends)
    if chunk is not None and max(ends, default=0) > chunk:
        assert all(ids is None for ids in block_ids or ()), "spans seen both ways lie across chunks"
        block_ids = None
        parts = _split_by_chunk(block_size, chunk, block_tables, starts, ends, stored)
        block_tables, starts, ends, stored = parts
    query_lens = tuple(map(sub, ends, starts))
    least = 0 if is_captured else 1
    assert min(starts, default=0) >= 0 and min(query_lens, default=1) >= least
    room = map(block_size.__mul__, map(len, block_tables))
    assert min(map(sub, room, ends), default=0) >= 0, "a table ends before its sequence"

    has_blocks = tuple(
        ids is not None and len(ids) > 1 and bool((ids >= 0).any()) for ids in block_ids or ()
    )
    flat_ids = None
    if any(has_blocks):
        assert block_ids is not None
        pairs = zip(block_ids, query_lens, strict=True)
        all_ids = [torch.full((n,), -1) if ids is None else ids for ids, n in pairs]
        flat_ids = buffer.put(torch.cat(all_ids), torch.int32)
    shifts = [0] * len(ends) if stored is None else map(int, stored)
    new = [
        (table, low + by, high + by)
        for table, low, high, by in zip(block_tables, starts, ends, shifts, strict=True)
    ]
    return _staged(
        buffer,
        block_size,
        block_tables,
        query_lens,
        ends,
        new,
        block_ids=flat_ids,
        has_blocks=has_blocks if flat_ids is not None else (),
        blocks_in_window=blocks_in_window,
        is_captured=is_captured,
    )


def _split_by_chunk(
    block_size: int,
    chunk: int,
    block_tables: Sequence[Sequence[int]],
    starts: Sequence[int],
    ends: Sequence[int],
    stored: Sequence[bool] | None,
) -> tuple[list[Sequence[int]], list[int], list[int], list[bool]]:
    """Split sequences where a chunk ends; positions and tables count from a chunk's beginning."""
    assert chunk % block_size == 0
    tables: list[Sequence[int]] = []
    lows: list[int] = []
    highs: list[int] = []
    held: list[bool] = []
    for index, (blocks, start, end) in enumerate(zip(block_tables, starts, ends, strict=True)):
        for first in range(start // chunk * chunk, end, chunk):
            tables.append(blocks[first // block_size :])
            lows.append(max(start - first, 0))
            highs.append(min(end - first, chunk))
            held.append(stored is not None and stored[index])
    return tables, lows, highs, held


def stage_cross_metadata(
    buffer: StepBuffer,
    *,
    block_size: int,
    block_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    is_new: Sequence[bool],
    seen: Sequence[Sequence[SeenRows]] | None = None,
    is_captured: bool = False,
) -> Callable[[], AttentionMetadata]:
    """Stage cross-attention: sequence i's tokens see `context_lens[i]` rows.

    `block_tables[i]` names the blocks of these rows, which this step writes where `is_new[i]`.
    `seen[i]`: what the sequence's tokens see, in their order; None: all of them see all rows.
    """
    assert len(block_tables) == len(query_lens) == len(context_lens) == len(is_new)
    assert all(
        len(row) * block_size >= n for row, n in zip(block_tables, context_lens, strict=True)
    )
    new = [
        (table, 0, n if writes else 0)
        for table, n, writes in zip(block_tables, context_lens, is_new, strict=True)
    ]
    if seen is None:
        assert all(n > 0 for n in context_lens)
        lens = query_lens, context_lens
        return _staged(
            buffer, block_size, block_tables, *lens, new, is_causal=False, is_captured=is_captured
        )
    runs = []
    base = 0
    for table, part in zip(block_tables, seen, strict=True):
        for run in part:
            assert run.first % block_size == 0
            if run.num_rows:
                runs.append((run, base, table[run.first // block_size :]))
            base += run.num_tokens
    assert base == sum(query_lens)
    runs.sort(key=lambda each: each[0].num_tokens > 1)  # single tokens are one batch
    readers = chain.from_iterable(range(at, at + run.num_tokens) for run, at, _ in runs)
    sighted = [run.is_sighted for part in seen for run in part for _ in range(run.num_tokens)]
    return _staged(
        buffer,
        block_size,
        [table for *_, table in runs],
        [run.num_tokens for run, *_ in runs],
        [run.num_rows for run, *_ in runs],
        new,
        readers=buffer.put([*readers], torch.int64),
        sighted=buffer.put(sighted, torch.bool),
        is_causal=False,
        is_captured=is_captured,
    )


def _staged(
    buffer: StepBuffer,
    block_size: int,
    block_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    new: Sequence[tuple[Sequence[int], int, int]],
    *,
    is_captured: bool,
    block_ids: Staged | None = None,
    readers: Staged | None = None,
    sighted: Staged | None = None,
    **others: Any,
) -> Callable[[], AttentionMetadata]:
    """Stage the tensors of metadata. `new`: blocks, and positions [start, end) in them, of each
    sequence's writes."""
    blocks_used = [-(-length // block_size) for length in context_lens]
    width = max(blocks_used, default=0)
    table, table_starts = _table(block_tables, blocks_used, width=None if is_captured else width)
    slot_blocks, slot_offsets = _slots(new, block_size)
    num_decodes = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
    is_open = is_captured and num_decodes < len(query_lens)
    # Longest first, for who takes them in batches that are padded.
    by_length = [] if is_captured else sorted(range(num_decodes), key=lambda i: -context_lens[i])
    numbers = [0, *accumulate(query_lens)], context_lens, slot_blocks, slot_offsets, by_length
    staged = [buffer.put(each, torch.int32) for each in numbers]
    if is_captured:
        flat = buffer.put_varying(table)
        begins = buffer.put([flat.first + start for start in table_starts], torch.int32)
    else:
        padded = buffer.put(table, torch.int32)

    def built() -> AttentionMetadata:
        query_start, seq_lens, blocks, offsets, order = (each.tensor for each in staged)
        return AttentionMetadata(
            query_start=query_start,
            seq_lens=seq_lens,
            block_table=flat.base
            if is_captured
            else padded.tensor.view(len(query_lens), -1 if query_lens else 0),
            slot_blocks=blocks,
            slot_offsets=offsets,
            by_length=order,
            query_lens=_known(query_lens, not is_open),
            context_lens=_known(context_lens, not is_captured),
            num_decodes=0 if is_open else num_decodes,
            block_size=block_size,
            block_ids=None if block_ids is None else block_ids.tensor,
            is_open=is_open,
            table_starts=begins.tensor if is_captured else None,
            readers=None if readers is None else readers.tensor,
            sighted=None if sighted is None else sighted.tensor,
            **others,
        )

    return built


def _known(lens: Sequence[int], is_known: bool) -> tuple[int, ...]:
    return tuple(lens) if is_known else cast("tuple[int, ...]", Unread(len(lens)))


def _table(
    block_tables: Sequence[Sequence[int]], used: Sequence[int], *, width: int | None
) -> tuple[list[int], list[int]]:
    """The blocks of all sequences, so many of each, and where each one's begin; `width`: what each
    is padded to, with 0."""
    table: list[int] = []
    starts: list[int] = []
    for blocks, count in zip(block_tables, used, strict=True):
        starts.append(len(table))
        table += blocks[:count]
        if width is not None:
            table += [0] * (width - count)
    return table, starts


def _slots(
    new: Sequence[tuple[Sequence[int], int, int]], block_size: int
) -> tuple[list[int], list[int]]:
    """Blocks, and rows in them, of positions [start, end) of each sequence."""
    slot_blocks: list[int] = []
    slot_offsets: list[int] = []
    for blocks, start, end in new:
        if end - start == 1:
            slot_blocks.append(blocks[start // block_size])
            slot_offsets.append(start % block_size)
            continue
        for index in range(start // block_size, -(-end // block_size)):
            first = max(start - index * block_size, 0)
            last = min(end - index * block_size, block_size)
            slot_blocks += [blocks[index]] * (last - first)
            slot_offsets += range(first, last)
    return slot_blocks, slot_offsets
