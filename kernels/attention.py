"""Parts that every attention backend shares: the metadata of a step, the contract, the choice.

Keys and values live in pages (Kwon et al., "Efficient Memory Management for Large Language Model
Serving with PagedAttention", 2023): a sequence's token at position p is in block
`block_table[p // block_size]`, row `p % block_size`. One step's tokens of all sequences lie flat,
one sequence after the other:

    tokens      [ A A A A | B | C C ]          T = 7
    query_start [ 0, 4, 5, 7 ]                 S = 3
    seq_lens    [ 4, 19, 9 ]                   A starts, B decodes, C is in its second chunk

The caches of one layer are `[num_blocks, block_size, num_kv_heads, dim]`, in any strides but that
a row of `dim` numbers lies close together: the blocks of all layers of a group share one page of a
byte pool, and within a block a head's rows may be neighbours.
Rows that no sequence of the step has written may hold anything, NaN included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from aioengine.kernels.staging import Staged, StepBuffer

__all__ = [
    "AttentionArgs",
    "AttentionBackend",
    "AttentionMetadata",
    "KeyValue",
    "SeenRows",
    "build_cross_metadata",
    "build_metadata",
    "list_backends",
    "register_backend",
    "select_backend",
    "stage_cross_metadata",
    "stage_metadata",
]

Made = TypeVar("Made")
KeyValue: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values: of tokens, or a layer's caches."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """One step's attention over one KV group: S sequences, T new tokens in all.

    On the device, int32:
    `query_start` [S + 1]: where each sequence's tokens begin; the last entry is T.
    `seq_lens` [S]: tokens in each sequence's context, this step's included.
    `block_table` [S, max_blocks]: block ids, padded with 0.
    `slot_blocks`, `slot_offsets` [T]: block and row where each token's K/V is written
    (of cross-attention: [R], for each of the encoder's rows that are new).
    `by_length` [num_decodes]: the first sequences, those of the longest context first.

    On the host, so that nothing has to wait for the device:
    `query_lens`, `context_lens`: per sequence; `context_lens` equals `seq_lens`.
    `num_decodes`: how many sequences, counted from the first, have exactly one new token; those
    after them may have any number.
    `block_size`: tokens in a block.

    `block_ids` int32 [T] or None: tokens of one sequence with the same id (-1: none) see each other
    in both directions, however far apart. All of a block's tokens are in one step. `has_blocks`:
    per sequence, on the host, whether any of its tokens is in one. `blocks_in_window`: whether a
    layer's window bounds what a block sees too.

    `is_causal`: False for cross-attention, where the context is an encoder's output, every token
    sees all of it, and the slots are those of the rows that are new in this step, if any.

    `readers` int64 [n]: the tokens of cross-attention that see anything, in the order of the
    sequences here, which are runs of tokens that see the same rows; None where all tokens see all
    rows. `sighted` bool [T], beside it: see `SeenRows`.

    `scratch`: what a backend derives from the rest once per step and reuses in every layer.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_blocks: Tensor
    slot_offsets: Tensor
    by_length: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_decodes: int
    block_size: int
    block_ids: Tensor | None = None
    has_blocks: tuple[bool, ...] = ()
    blocks_in_window: bool = False
    is_causal: bool = True
    readers: Tensor | None = None
    sighted: Tensor | None = None
    scratch: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def num_tokens(self) -> int:
        """T, the step's tokens over all sequences."""
        return sum(self.query_lens)

    def sees_blocks(self, index: int) -> bool:
        """Return whether tokens of sequence `index` see others of their block both ways."""
        return self.block_ids is not None and self.has_blocks[index]

    def once(self, key: Any, make: Callable[[], Made]) -> Made:
        """Return what `make` gives, made for the first layer that asks and kept in `scratch`."""
        found: Made | None = self.scratch.get(key)
        if found is None:
            found = self.scratch[key] = make()
        return found


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


class AttentionArgs(NamedTuple):
    """Settings of one layer's attention, beside its tensors.

    The scores are multiplied by `scale`, then bounded to `softcap * tanh(score / softcap)`, then
    masked. `window`: a token sees the last `window` positions, its own included; earlier blocks are
    never read, but for a block's tokens. `sinks` [Hq]: a logit per head that takes part in the
    softmax and has no value. `distance_bias` [Hq, n]: is added to the scaled score of the key that
    lies so many positions back, the last of them to all that lie further; for causal attention
    without blocks.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    distance_bias: Tensor | None = None


class AttentionBackend(Protocol):
    """Writes this step's keys and values into pages, and attends over pages.

    An instance belongs to one engine and is called by one thread at a time. One that reads pages of
    bytes (`kernels.pool`) too says so: `takes_bytes = True`.
    """

    name: str

    def write_kv(self, new: KeyValue, pages: KeyValue, meta: AttentionMetadata) -> None:
        """Put keys [T, Hkv, Dk] and values [T, Hkv, Dv] into their slots; mutates the pages."""

    def attend(
        self,
        query: Tensor,
        pages: KeyValue,
        meta: AttentionMetadata,
        args: AttentionArgs,
        *,
        new: KeyValue | None = None,
    ) -> Tensor:
        """Attention of `query` [T, Hq, Dk] over each sequence's pages -> [T, Hq, Dv].

        Causal, unless the metadata is of cross-attention. `new`: keys and values that are written
        first, as by `write_kv`. Hq is a multiple of Hkv; query head h reads key head
        h // (Hq // Hkv).
        """


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
) -> Callable[[], AttentionMetadata]:
    """Stage a step that computes positions [starts[i], ends[i]) of sequence i.

    Returns what gives its metadata once the buffer has been sent.

    `block_tables[i]` names at least the blocks of positions [0, ends[i]); `block_ids[i]` int32
    [ends[i] - starts[i]], or None where all tokens are causal. `stored[i]`: the pages hold the
    sequence's one token already; what is written of it goes to the place of the token after it,
    for which there must be a block, and is not read. `chunk`: a token sees none before the last
    multiple of this position, which is one of `block_size`; a sequence that goes on behind one is
    several to the kernels, each with a context of its own. Nothing is mutated.
    """
    assert len(block_tables) == len(starts) == len(ends)
    if chunk is not None and max(ends, default=0) > chunk:
        assert all(ids is None for ids in block_ids or ()), "spans seen both ways lie across chunks"
        block_ids = None
        parts = _split_by_chunk(block_size, chunk, block_tables, starts, ends, stored)
        block_tables, starts, ends, stored = parts
    assert all(0 <= start < end for start, end in zip(starts, ends, strict=True))
    query_lens = tuple(end - start for start, end in zip(starts, ends, strict=True))
    assert all(len(row) * block_size >= n for row, n in zip(block_tables, ends, strict=True))

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
        return _staged(
            buffer, block_size, block_tables, query_lens, context_lens, new, is_causal=False
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
    )


def _staged(
    buffer: StepBuffer,
    block_size: int,
    block_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    new: Sequence[tuple[Sequence[int], int, int]],
    *,
    block_ids: Staged | None = None,
    readers: Staged | None = None,
    sighted: Staged | None = None,
    **others: Any,
) -> Callable[[], AttentionMetadata]:
    """Stage the tensors of metadata. `new`: blocks, and positions [start, end) in them, of each
    sequence's writes."""
    blocks_used = [-(-length // block_size) for length in context_lens]
    width = max(blocks_used, default=0)
    table: list[int] = []
    slot_blocks: list[int] = []
    slot_offsets: list[int] = []
    for blocks, used in zip(block_tables, blocks_used, strict=True):
        table += blocks[:used]
        table += [0] * (width - used)
    for blocks, start, end in new:
        for index in range(start // block_size, -(-end // block_size)):
            first = max(start - index * block_size, 0)
            last = min(end - index * block_size, block_size)
            slot_blocks += [blocks[index]] * (last - first)
            slot_offsets += range(first, last)
    num_decodes = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
    by_length = sorted(range(num_decodes), key=lambda i: -context_lens[i])
    numbers = [0, *accumulate(query_lens)], context_lens, table, slot_blocks, slot_offsets
    staged = [buffer.put(each, torch.int32) for each in (*numbers, by_length)]

    def built() -> AttentionMetadata:
        query_start, seq_lens, tables, blocks, offsets, order = (each.tensor for each in staged)
        return AttentionMetadata(
            query_start=query_start,
            seq_lens=seq_lens,
            block_table=tables.view(len(query_lens), -1 if query_lens else 0),
            slot_blocks=blocks,
            slot_offsets=offsets,
            by_length=order,
            query_lens=tuple(query_lens),
            context_lens=tuple(context_lens),
            num_decodes=num_decodes,
            block_size=block_size,
            block_ids=None if block_ids is None else block_ids.tensor,
            readers=None if readers is None else readers.tensor,
            sighted=None if sighted is None else sighted.tensor,
            **others,
        )

    return built


def split_by_sequence(meta: AttentionMetadata) -> list[tuple[int, int]]:
    """Each sequence's [first, last) rows in the flat batch, on the host."""
    return list(pairwise([0, *accumulate(meta.query_lens)]))


def blocks_of(meta: AttentionMetadata, index: int) -> Tensor | None:
    """The block ids of the tokens of sequence `index`; None if all are causal."""
    if meta.block_ids is None or not meta.sees_blocks(index):
        return None
    first = sum(meta.query_lens[:index])
    return meta.block_ids[first : first + meta.query_lens[index]]


def _create(module: str, attribute: str) -> AttentionBackend:
    backend: AttentionBackend = getattr(import_module(module), attribute)()
    return backend


_FACTORIES: dict[str, Callable[[], AttentionBackend]] = {
    "cpu": partial(_create, "aioengine.kernels.cpu.backend", "CpuBackend"),
    "gather": partial(_create, "aioengine.kernels.gather", "GatherBackend"),
    "reference": partial(_create, "aioengine.kernels.reference", "ReferenceBackend"),
    "triton": partial(_create, "aioengine.kernels.triton", "new_backend"),
}


def register_backend(name: str, factory: Callable[[], AttentionBackend]) -> None:
    """Make `factory` selectable as `name`; it is called when an engine selects it."""
    _FACTORIES[name] = factory


def list_backends() -> tuple[str, ...]:
    """The names that `select_backend` takes, besides "auto"."""
    return tuple(sorted(_FACTORIES))


def select_backend(
    name: str = "auto", device: torch.device | str | None = None
) -> AttentionBackend:
    """A new backend for one engine. "auto" takes the fastest that runs on `device`.

    Raises ValueError for a name that is not registered.
    """
    chosen = _fastest(device) if name == "auto" else name
    factory = _FACTORIES.get(chosen)
    if factory is None:
        names = ", ".join(list_backends())
        raise ValueError(f"attention backend must be auto, {names}, not {name!r}")
    return factory()


def _fastest(device: torch.device | str | None) -> str:
    if device is None or torch.device(device).type == "cpu":
        library = import_module("aioengine.kernels.cpu.library")
        return "cpu" if library.is_available() else "gather"
    kernels = import_module("aioengine.kernels.triton")
    return "triton" if kernels.are_right_on(torch.device(device)) else "gather"
