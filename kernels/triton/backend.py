"""Attention over pages by kernels of our own, on GPUs. Needs Triton, which comes with PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.attention import AttentionArgs, AttentionMetadata, KeyValue
from aioengine.kernels.gather import GatherBackend
from aioengine.kernels.triton.attend import attend
from aioengine.kernels.triton.combine import combine
from aioengine.kernels.triton.launch import INTERPRETED, padded, strides
from aioengine.kernels.triton.tiles import Tiles, num_cores, tiles_of
from aioengine.kernels.triton.write import write

__all__ = ["TritonBackend"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_DIM = 256
"""Of a head: a tile of longer keys does not fit in the registers."""
MAX_SPLITS = 64
PROGRAMS_PER_CORE = 4
"""That a decode step is split into at least, so that each core has reads to wait for."""


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
        num_sequences = len(meta.query_lens)
        num_singles = num_sequences if meta.is_open else meta.num_decodes
        if num_singles:
            _attend_singles(query, pages, meta, args, out, num_singles)
        if meta.num_decodes < num_sequences:
            tiles = tiles_of(query, pages, is_single=False)
            num_tokens = query.shape[0] - meta.num_decodes
            count = num_tokens // (tiles.rows // tiles.heads) + num_sequences - meta.num_decodes
            between = meta.num_decodes, num_sequences
            _launch(query, pages, meta, args, out, out, tiles, count, 1, between)
        return out


def _attend_singles(
    query: Tensor,
    pages: KeyValue,
    meta: AttentionMetadata,
    args: AttentionArgs,
    out: Tensor,
    count: int,
) -> None:
    """Attend to those of the first `count` sequences that have one token, into `out`."""
    tiles, num_heads, dim = tiles_of(query, pages, is_single=True), query.shape[1], out.shape[2]
    programs = count * pages[0].shape[2] * tiles.parts
    num_splits = min(max(1, PROGRAMS_PER_CORE * num_cores(query.device) // programs), MAX_SPLITS)
    if num_splits == 1:
        _launch(query, pages, meta, args, out, out, tiles, count, 1, (0, count), is_single=True)
        return
    parts = out.new_empty(num_splits, count, num_heads, dim, dtype=torch.float32)
    sums = parts.new_empty(parts.shape[:3])
    between = 0, count
    _launch(
        query, pages, meta, args, parts, sums, tiles, count, num_splits, between, is_single=True
    )
    combine[(count, num_heads)](
        parts, sums, out, meta.query_start, num_splits, parts.stride(0), sums.stride(0),
        *strides(out),
        DV=dim, DV_PADDED=padded(dim), MOST_SPLITS=MAX_SPLITS,
    )  # fmt: skip


def _launch(
    query: Tensor,
    pages: KeyValue,
    meta: AttentionMetadata,
    args: AttentionArgs,
    out: Tensor,
    sums: Tensor,
    tiles: Tiles,
    count: int,
    num_splits: int,
    between: tuple[int, int],
    *,
    is_single: bool = False,
) -> None:
    """Attend to the sequences `between` with so many tiles; `out` [splits, sequences, Hq, Dv] where
    keys are split."""
    key, value = pages
    kv_heads, (key_dim, value_dim) = key.shape[2], (key.shape[3], value.shape[3])
    group = query.shape[1] // kv_heads
    has_blocks = meta.block_ids is not None and not is_single
    bias = args.distance_bias
    attend[(count, kv_heads * tiles.parts, num_splits)](
        query, key, value, out, sums, meta.query_start, meta.seq_lens, meta.block_table,
        _table_starts(meta), meta.block_ids if has_blocks else query,
        query if args.sinks is None else args.sinks,
        query if bias is None else bias.contiguous(),
        *between, 2 if meta.is_open else 1, args.scale, args.softcap or 0.0, args.window or 0,
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


def _table_starts(meta: AttentionMetadata) -> Tensor:
    """Find where each sequence's blocks begin in the table, int32 [S]."""
    if meta.table_starts is not None:
        return meta.table_starts
    count, width = meta.block_table.shape
    device = meta.block_table.device

    def made() -> Tensor:
        return torch.arange(0, count * width, width or 1, dtype=torch.int32, device=device)

    return meta.once("table_starts", made)


def _in_rows(numbers: Tensor) -> Tensor:
    """The numbers [T, H, D] with a token's heads behind each other: strides that do not depend on
    how many tokens there are, as another program would be compiled for some of them."""
    is_so = numbers.stride(2) == 1 and numbers.stride(1) == numbers.shape[2]
    return numbers if is_so else numbers.contiguous()
