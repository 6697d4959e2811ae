"""Attention over pages by kernels of our own, on GPUs. Needs Triton, which comes with PyTorch."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aioengine.kernels.attention import AttentionArgs, AttentionMetadata, KeyValue
from aioengine.kernels.gather import GatherBackend
from aioengine.kernels.triton.attend import attend
from aioengine.kernels.triton.combine import combine
from aioengine.kernels.triton.launch import INTERPRETED, padded, strides
from aioengine.kernels.triton.write import write

__all__ = ["TritonBackend"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_DIM = 256
"""Of a head: a tile of longer keys does not fit in the registers."""
MAX_SPLITS = 64
PROGRAMS_PER_CORE = 4
"""That a decode step is split into at least, so that each core has reads to wait for."""
CORES = 4 if INTERPRETED else 132
"""Where there is no GPU to ask: of an H200, or few, as an interpreter has them take turns."""


class _Tiles(NamedTuple):
    """Rows and keys of a tile, whose rows are of so many query heads, and the parts of a group that
    these make; warps of a program, and tiles on their way to it."""

    heads: int
    parts: int
    rows: int
    keys: int
    num_warps: int
    num_stages: int


class TritonBackend:
    """See `AttentionBackend`. What the kernels do not know is left to `GatherBackend`:
    float64, pages of bytes and heads of more than 256 numbers."""

    name = "triton"
    takes_bytes = True

    def __init__(self) -> None:
        self._others = GatherBackend()

    def knows(self, pages: KeyValue) -> bool:
        """Return whether the kernels read such pages."""
        return pages[0].dtype in DTYPES and max(page.shape[-1] for page in pages) <= MAX_DIM

    def captures(self, pages: KeyValue) -> bool:
        """See `AttentionBackend`."""
        return self.knows(pages)

    def write_kv(self, new: KeyValue, pages: KeyValue, meta: AttentionMetadata) -> None:
        """Put keys [T, Hkv, Dk] and values [T, Hkv, Dv] into their slots; mutates the pages."""
        if not self.knows(pages):
            self._others.write_kv(new, pages, meta)
            return
        (keys, values), (key_pages, value_pages) = new, pages
        keys, values = _in_rows(keys), _in_rows(values)
        num_heads, (key_dim, value_dim) = keys.shape[1], (keys.shape[2], values.shape[2])
        write[(len(meta.slot_blocks),)](
            keys, values, key_pages, value_pages, meta.slot_blocks, meta.slot_offsets,
            *strides(keys), *strides(values), *strides(key_pages), *strides(value_pages),
            DK=key_dim, DV=value_dim, DK_PADDED=padded(key_dim), DV_PADDED=padded(value_dim),
            HEADS=num_heads, HEADS_PADDED=padded(num_heads, 1),
        )  # fmt: skip

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
        if not self.knows(pages):
            return self._others.attend(query, pages, meta, args, new=new)
        if new is not None:
            self.write_kv(new, pages, meta)
        query = _in_rows(query)
        out = query.new_empty(*query.shape[:2], pages[1].shape[-1])
        num_decodes, num_sequences = meta.num_decodes, len(meta.query_lens)
        if num_decodes:
            _attend_singles(query, pages, meta, args, out)
        if num_decodes < num_sequences:
            tiles = _tiles(query, pages, is_single=False)
            num_tokens = query.shape[0] - num_decodes
            count = num_tokens // (tiles.rows // tiles.heads) + num_sequences - num_decodes
            _launch(query, pages, meta, args, out, out, tiles, count, 1)
        return out


def _attend_singles(
    query: Tensor, pages: KeyValue, meta: AttentionMetadata, args: AttentionArgs, out: Tensor
) -> None:
    """The first sequences, of one token each, into `out`."""
    tiles = _tiles(query, pages, is_single=True)
    count, num_heads, dim = meta.num_decodes, query.shape[1], out.shape[2]
    programs = count * pages[0].shape[2] * tiles.parts
    num_splits = min(max(1, PROGRAMS_PER_CORE * _num_cores(query.device) // programs), MAX_SPLITS)
    if num_splits == 1:
        _launch(query, pages, meta, args, out, out, tiles, count, 1, is_single=True)
        return
    parts = out.new_empty(num_splits, count, num_heads, dim, dtype=torch.float32)
    sums = parts.new_empty(parts.shape[:3])
    _launch(query, pages, meta, args, parts, sums, tiles, count, num_splits, is_single=True)
    combine[(count, num_heads)](
        parts, sums, out, num_splits, parts.stride(0), sums.stride(0), *strides(out),
        DV=dim, DV_PADDED=padded(dim), MOST_SPLITS=padded(num_splits, 1),
    )  # fmt: skip


def _launch(
    query: Tensor,
    pages: KeyValue,
    meta: AttentionMetadata,
    args: AttentionArgs,
    out: Tensor,
    sums: Tensor,
    tiles: _Tiles,
    count: int,
    num_splits: int,
    *,
    is_single: bool = False,
) -> None:
    """Attend with so many tiles; `out` [splits, tokens, Hq, Dv] where keys are split."""
    key, value = pages
    kv_heads, (key_dim, value_dim) = key.shape[2], (key.shape[3], value.shape[3])
    group = query.shape[1] // kv_heads
    first, last = (0, meta.num_decodes) if is_single else (meta.num_decodes, len(meta.query_lens))
    has_blocks = meta.block_ids is not None and not is_single
    bias = args.distance_bias
    attend[(count, kv_heads * tiles.parts, num_splits)](
        query, key, value, out, sums, meta.query_start, meta.seq_lens, meta.block_table,
        _table_starts(meta), meta.block_ids if has_blocks else query,
        query if args.sinks is None else args.sinks,
        query if bias is None else bias.contiguous(),
        first, last, args.scale, args.softcap or 0.0, args.window or 0,
        0 if bias is None else bias.shape[1],
        *strides(query), *strides(key), *strides(value),
        *(strides(out) if out.dim() == 4 else (0, *strides(out))),
        GROUP=group, HEADS=tiles.heads, BLOCK_M=tiles.rows, BLOCK_N=tiles.keys,
        DK=key_dim, DV=value_dim, DK_PADDED=padded(key_dim), DV_PADDED=padded(value_dim),
        PAGE=meta.block_size, IS_SPLIT=num_splits > 1, ARE_SINGLE=is_single,
        IS_CAUSAL=meta.is_causal, HAS_WINDOW=args.window is not None,
        HAS_SOFTCAP=args.softcap is not None, HAS_SINKS=args.sinks is not None,
        HAS_BIAS=bias is not None, BLOCKS=(2 if meta.blocks_in_window else 1) if has_blocks else 0,
        IN_FLOAT32=INTERPRETED or query.dtype == torch.float32,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def _tiles(query: Tensor, pages: KeyValue, *, is_single: bool) -> _Tiles:
    """Tiles of which the keys and values of two fit in the shared memory of every chip."""
    key, value = pages
    group = query.shape[1] // key.shape[2]
    width = max(padded(key.shape[3]), padded(value.shape[3]))
    if query.dtype == torch.float32:  # without tensor cores, all of a tile is in registers
        rows, keys = 16, 32 if width <= 64 else 16
    elif is_single:
        rows = min(padded(group), 32)
        keys = 64 if rows == 16 and width <= 128 else 32
    else:
        rows, keys = 64, 64 if width <= 64 else 32
    heads = min(group, rows)
    return _Tiles(heads, -(-group // heads), rows, keys, num_warps=4, num_stages=2)


def _table_starts(meta: AttentionMetadata) -> Tensor:
    """Where each sequence's blocks begin in the table, int32 [S]."""
    if meta.table_starts is not None:
        return meta.table_starts
    count, width = meta.block_table.shape
    device = meta.block_table.device

    def made() -> Tensor:
        return torch.arange(0, count * width, width or 1, dtype=torch.int32, device=device)

    return meta.once("table_starts", made)


def _in_rows(numbers: Tensor) -> Tensor:
    return numbers if numbers.stride(-1) == 1 else numbers.contiguous()


@cache
def _num_cores(device: torch.device) -> int:
    if device.type != "cuda":
        return CORES
    found: Any = torch.cuda.get_device_properties(device)
    return int(found.multi_processor_count)
