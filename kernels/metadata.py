"""Metadata of a step's attention, made on the host and staged for the device.

See `kernels.attention` for what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, repeat
from operator import add, eq, sub
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from aioengine.kernels.attention import AttentionMetadata, Unread
from aioengine.kernels.transfer import Staged, StepBuffer

__all__ = [
    "GroupTables",
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


class GroupTables(NamedTuple):
    """Blocks of a step's sequences in one KV group.

    `block_tables[i]` names at least the blocks of the positions that sequence i has after the step.
    `chunk`: a token sees none before the last multiple of this position, which is one of the block
    size; a sequence that goes on behind one is several to the kernels, each with a context of its
    own. `block_ids[i]` int32 [new tokens], or None where all tokens are causal.
    """

    block_tables: Sequence[Sequence[int]]
    chunk: int | None = None
    block_ids: Sequence[Tensor | None] | None = None


def build_metadata(
    *,
    block_size: int,
    block_tables: Sequence[Sequence[int]],
    chunk: int | None = None,
    block_ids: Sequence[Tensor | None] | None = None,
    device: torch.device | str = "cpu",
    **sequences: Any,
) -> AttentionMetadata:
    """The metadata of a step by itself, of one group; `sequences`: the other arguments of
    `stage_metadata`."""
    buffer = StepBuffer(device)
    groups = [GroupTables(block_tables, chunk, block_ids)]
    (staged,) = stage_metadata(buffer, groups, block_size=block_size, **sequences)
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
    groups: Sequence[GroupTables],
    *,
    block_size: int,
    starts: Sequence[int],
    ends: Sequence[int],
    stored: Sequence[bool] | None = None,
    blocks_in_window: bool = False,
    is_captured: bool = False,
    is_open: bool = False,
) -> list[Callable[[], AttentionMetadata]]:
    """Stage a step that computes positions [starts[i], ends[i]) of sequence i.

    Returns, for each group, what gives its metadata once the buffer has been sent.

    `stored[i]`: the pages hold the sequence's one token already; what is written of it goes to the
    place of the token after it, for which there must be a block, and is not read. `is_captured`,
    `is_open`: see `AttentionMetadata`; if both, a sequence may have no token. Nothing is mutated.
    """
    assert len(starts) == len(ends)
    stage_lengths = partial(
        _causal_lengths, buffer, block_size, is_captured=is_captured, is_open=is_open
    )
    all_of: _Lengths | None = None
    found = []
    for tables, chunk, block_ids in groups:
        assert len(tables) == len(starts)
        # What is captured has sizes that do not depend on how long a sequence is.
        if chunk is not None and (is_captured or max(ends, default=0) > chunk):
            ids_of = block_ids or ()
            assert all(ids is None for ids in ids_of), "spans seen both ways lie across chunks"
            least = len(ends) + (sum(ends) - sum(starts)) // chunk + 1 if is_open else 0
            parts = _split_by_chunk(block_size, chunk, tables, starts, ends, stored, least)
            tables, block_ids = parts[0], None
            lengths = stage_lengths(*parts[1:])
        else:
            all_of = lengths = all_of or stage_lengths(starts, ends, stored)
        room = map(block_size.__mul__, map(len, tables))
        assert min(map(sub, room, lengths.context_lens), default=0) >= 0, (
            "a table ends before its sequence"
        )
        flat_ids, has_blocks = _stage_block_ids(buffer, block_ids, lengths.query_lens)
        found.append(
            _staged(
                buffer,
                lengths,
                tables,
                tables,
                block_ids=flat_ids,
                has_blocks=has_blocks,
                blocks_in_window=blocks_in_window,
            )
        )
    return found


def _causal_lengths(
    buffer: StepBuffer,
    block_size: int,
    starts: Sequence[int],
    ends: Sequence[int],
    stored: Sequence[bool] | None,
    *,
    is_captured: bool,
    is_open: bool,
) -> _Lengths:
    query_lens = [*map(sub, ends, starts)]
    least = 0 if is_open else 1
    assert min(starts, default=0) >= 0 and min(query_lens, default=1) >= least
    new = starts, ends
    if stored is not None and any(stored):
        new = [*map(add, starts, stored)], [*map(add, ends, stored)]  # True is one
    return _stage_lengths(
        buffer, block_size, query_lens, ends, *new, is_captured=is_captured, is_open=is_open
    )


def _stage_block_ids(
    buffer: StepBuffer, block_ids: Sequence[Tensor | None] | None, query_lens: Sequence[int]
) -> tuple[Staged | None, tuple[bool, ...]]:
    """Stage the blocks of all tokens, and say which sequences have any; None where none has."""
    has_blocks = tuple(
        ids is not None and len(ids) > 1 and bool((ids >= 0).any()) for ids in block_ids or ()
    )
    if block_ids is None or not any(has_blocks):
        return None, ()
    pairs = zip(block_ids, query_lens, strict=True)
    all_ids = [torch.full((n,), -1) if ids is None else ids for ids, n in pairs]
    return buffer.put(torch.cat(all_ids), torch.int32), has_blocks


def _split_by_chunk(
    block_size: int,
    chunk: int,
    block_tables: Sequence[Sequence[int]],
    starts: Sequence[int],
    ends: Sequence[int],
    stored: Sequence[bool] | None,
    least: int,
) -> tuple[list[Sequence[int]], list[int], list[int], list[bool]]:
    """Split sequences where a chunk ends; positions and tables count from a chunk's beginning.

    `least`: parts that there are, some without a token, if the sequences have no more.
    """
    assert chunk % block_size == 0
    tables: list[Sequence[int]] = []
    lows: list[int] = []
    highs: list[int] = []
    held: list[bool] = []
    for index, (blocks, start, end) in enumerate(zip(block_tables, starts, ends, strict=True)):
        for first in range(start // chunk * chunk, max(end, start + 1), chunk):
            tables.append(blocks[first // block_size : (first + chunk) // block_size + 1])
            lows.append(max(start - first, 0))
            highs.append(min(end - first, chunk))
            held.append(stored is not None and stored[index])
    for _ in range(least - len(tables)):
        tables.append(())
        lows.append(0)
        highs.append(0)
        held.append(False)
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
    is_open: bool = False,
) -> Callable[[], AttentionMetadata]:
    """Stage cross-attention: sequence i's tokens see `context_lens[i]` rows.

    `block_tables[i]` names the blocks of these rows, which this step writes where `is_new[i]`.
    `seen[i]`: what the sequence's tokens see, in their order; None: all of them see all rows.
    """
    assert len(block_tables) == len(query_lens) == len(context_lens) == len(is_new)
    assert all(
        len(row) * block_size >= n for row, n in zip(block_tables, context_lens, strict=True)
    )
    stage_lengths = partial(
        _stage_lengths, buffer, block_size, is_captured=is_captured, is_open=is_open
    )
    written = [n if writes else 0 for n, writes in zip(context_lens, is_new, strict=True)]
    new = [0] * len(written), written
    if seen is None:
        assert all(n > 0 for n in context_lens)
        lengths = stage_lengths(query_lens, context_lens, *new)
        return _staged(buffer, lengths, block_tables, block_tables, is_causal=False)
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
    runs_of = [run.num_tokens for run, *_ in runs], [run.num_rows for run, *_ in runs]
    return _staged(
        buffer,
        stage_lengths(*runs_of, *new),
        [table for *_, table in runs],
        block_tables,
        readers=buffer.put([*readers], torch.int64),
        sighted=buffer.put(sighted, torch.bool),
        is_causal=False,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Lengths:
    """Lengths that a step's groups share: how much of each sequence is new, written and read.

    `begins`, `ends`: positions [begin, end) that each sequence writes.
    """

    block_size: int
    query_lens: Sequence[int]
    context_lens: Sequence[int]
    begins: Sequence[int]
    ends: Sequence[int]
    num_decodes: int
    is_captured: bool
    is_open: bool
    query_start: Staged
    seq_lens: Staged
    slot_offsets: Staged
    by_length: Staged


def _stage_lengths(
    buffer: StepBuffer,
    block_size: int,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    begins: Sequence[int],
    ends: Sequence[int],
    *,
    is_captured: bool,
    is_open: bool,
) -> _Lengths:
    num_decodes = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
    assert is_open or not is_captured or num_decodes == len(query_lens)
    # Longest first, for who takes them in batches that are padded.
    by_length = [] if is_captured else sorted(range(num_decodes), key=lambda i: -context_lens[i])
    offsets = _slot_offsets(begins, ends, block_size)
    numbers = [0, *accumulate(query_lens)], context_lens, offsets, by_length
    staged = [buffer.put(each, torch.int32) for each in numbers]
    lens = query_lens, context_lens, begins, ends
    return _Lengths(block_size, *lens, num_decodes, is_captured, is_open, *staged)


def _staged(
    buffer: StepBuffer,
    lengths: _Lengths,
    block_tables: Sequence[Sequence[int]],
    new_tables: Sequence[Sequence[int]],
    *,
    block_ids: Staged | None = None,
    readers: Staged | None = None,
    sighted: Staged | None = None,
    **others: Any,
) -> Callable[[], AttentionMetadata]:
    """Stage the tensors of a group's metadata. `new_tables`: blocks that sequences write to."""
    size, is_captured = lengths.block_size, lengths.is_captured
    query_lens, context_lens = lengths.query_lens, lengths.context_lens
    blocks = _slot_blocks(new_tables, lengths.begins, lengths.ends, size)
    slot_blocks = buffer.put(blocks, torch.int32)
    if is_captured:
        # Blocks that are not read are rather sent than left out one by one.
        flat = buffer.put_varying(chain.from_iterable(block_tables))
        begins = accumulate(map(len, block_tables[:-1]), initial=flat.first)
        table_starts = buffer.put(begins if block_tables else (), torch.int32)
    else:
        padded = buffer.put(_padded(block_tables, context_lens, size), torch.int32)

    def built() -> AttentionMetadata:
        count = len(query_lens)
        return AttentionMetadata(
            query_start=lengths.query_start.tensor,
            seq_lens=lengths.seq_lens.tensor,
            block_table=flat.base if is_captured else padded.tensor.view(count, -1 if count else 0),
            slot_blocks=slot_blocks.tensor,
            slot_offsets=lengths.slot_offsets.tensor,
            by_length=lengths.by_length.tensor,
            query_lens=_known(query_lens, not lengths.is_open),
            context_lens=_known(context_lens, not is_captured),
            num_decodes=0 if lengths.is_open else lengths.num_decodes,
            block_size=size,
            block_ids=None if block_ids is None else block_ids.tensor,
            is_open=lengths.is_open,
            table_starts=table_starts.tensor if is_captured else None,
            readers=None if readers is None else readers.tensor,
            sighted=None if sighted is None else sighted.tensor,
            **others,
        )

    return built


def _known(lens: Sequence[int], is_known: bool) -> tuple[int, ...]:
    return tuple(lens) if is_known else cast("tuple[int, ...]", Unread(len(lens)))


def _padded(
    block_tables: Sequence[Sequence[int]], context_lens: Sequence[int], block_size: int
) -> list[int]:
    """The blocks of all contexts, as many of each, 0 where it has fewer."""
    used = [-(-length // block_size) for length in context_lens]
    width = max(used, default=0)
    table: list[int] = []
    for blocks, count in zip(block_tables, used, strict=True):
        table += blocks[:count]
        table += [0] * (width - count)
    return table


def _slot_blocks(
    tables: Sequence[Sequence[int]], begins: Sequence[int], ends: Sequence[int], block_size: int
) -> list[int]:
    """Blocks of positions [begin, end) of each sequence."""
    if _are_single(begins, ends):
        return [table[at // block_size] for table, at in zip(tables, begins, strict=True)]
    blocks: list[int] = []
    for table, begin, end in zip(tables, begins, ends, strict=True):
        for index in range(begin // block_size, -(-end // block_size)):
            first = max(begin, index * block_size)
            blocks += [table[index]] * (min(end, (index + 1) * block_size) - first)
    return blocks


def _slot_offsets(begins: Sequence[int], ends: Sequence[int], block_size: int) -> list[int]:
    """Rows, in their blocks, of the same positions."""
    if _are_single(begins, ends):
        return [at % block_size for at in begins]
    rows: list[int] = []
    for begin, end in zip(begins, ends, strict=True):
        for first in range(begin // block_size * block_size, end, block_size):
            rows += range(max(begin - first, 0), min(end - first, block_size))
    return rows


def _are_single(begins: Sequence[int], ends: Sequence[int]) -> bool:
    return all(map(eq, map(sub, ends, begins), repeat(1)))
