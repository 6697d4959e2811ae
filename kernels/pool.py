"""Memory for the pages of the KV cache, where rows lie in it, and rows in 8 bits.

A row of 8 bits has its numbers as int8, and behind them a scale for each group. A group is 32
numbers, or what is left of them: one key's outliers then blunt a part of that key, and nothing of
any other. The largest number of a group is 127 of its scale, a bfloat16. A group with a number that
is not finite is read as NaN.

    row of 40 numbers: [40 x int8 | scale of 0..31 | scale of 32..39]      44 bytes
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "BYTES",
    "LayerPages",
    "PageFormat",
    "RowSteps",
    "empty_pool",
    "numbers_in",
    "pack_rows",
    "row_bytes",
    "row_index",
    "to_numbers",
    "to_stored",
    "unpack_rows",
]

BYTES = torch.uint8
"""The dtype of rows in 8 bits."""
GROUP = 32
SCALE_BYTES = 2
MOST = 127
LEAST = 1e-30
"""Groups whose numbers are all smaller are zeros: their scale has no inverse."""


def row_bytes(dim: int) -> int:
    """Bytes of a row of `dim` numbers."""
    return dim + -(-dim // GROUP) * SCALE_BYTES


def numbers_in(cache: Tensor) -> int:
    """Numbers in a row of a cache [..., row]."""
    num_bytes = cache.shape[-1]
    if cache.dtype is not BYTES:
        return num_bytes
    return num_bytes - ((num_bytes - 1) // (GROUP + SCALE_BYTES) + 1) * SCALE_BYTES


def to_stored(rows: Tensor, cache: Tensor) -> Tensor:
    """Rows [..., dim] as they lie in a cache: packed where that is of bytes."""
    return pack_rows(rows) if cache.dtype is BYTES else rows


def to_numbers(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a cache as numbers [..., dim]: unpacked where they are of bytes."""
    return unpack_rows(rows, dtype) if rows.dtype is BYTES else rows


def pack_rows(rows: Tensor) -> Tensor:
    """Pack rows [..., dim] of any floating dtype, uint8 [..., row_bytes(dim)]."""
    dim = rows.shape[-1]
    wide = torch.promote_types(rows.dtype, torch.float32)
    missing = -dim % GROUP
    padded = torch.nn.functional.pad(rows.to(wide), (0, missing))
    groups = padded.view(*rows.shape[:-1], padded.shape[-1] // GROUP, GROUP)
    most = groups.abs().amax(-1)
    scales = torch.where(most < LEAST, 0, most / MOST)
    scales = scales.masked_fill(~scales.isfinite(), torch.nan).to(torch.bfloat16)
    inverse = torch.where(scales > 0, 1 / scales.to(wide), 0)
    numbers = (groups * inverse[..., None]).round().nan_to_num(0).clamp(-MOST, MOST)
    numbers = numbers.to(torch.int8).flatten(-2)[..., :dim].view(BYTES)
    return torch.cat([numbers, scales.contiguous().view(BYTES)], -1)


def unpack_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack rows, uint8 [..., row_bytes(dim)], as numbers [..., dim] of a floating dtype."""
    dim = numbers_in(rows)
    wide = torch.promote_types(dtype, torch.float32)
    numbers = rows[..., :dim].view(torch.int8).to(wide)
    # A copy in any case: a row may begin at an odd byte.
    halves = rows[..., dim:].clone(memory_format=torch.contiguous_format)
    scales = halves.view(torch.bfloat16).to(wide).repeat_interleave(GROUP, -1)[..., :dim]
    most = torch.finfo(dtype).max  # which a scale that was rounded up may lead beyond
    return (numbers * scales).clamp(-most, most).to(dtype)


@dataclass(frozen=True)
class PageFormat:
    """Format of keys and values in pages: as they are, or for `BYTES` as rows of 8 bits."""

    dtype: torch.dtype

    def row_size(self, dim: int) -> int:
        """Elements of the pool that a row of `dim` numbers takes."""
        return row_bytes(dim) if self.dtype is BYTES else dim

    def row_bytes(self, dim: int) -> int:
        """Bytes that it takes."""
        return self.row_size(dim) * self.dtype.itemsize


def empty_pool(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`count` numbers [count], uninitialised. What is not touched takes no memory on a CPU.

    There it is in huge pages of the system, if Linux has some: what one head attends to lies in
    pieces of a few KiB all over the pool, and each piece in a small page of its own would be looked
    up by itself.
    """
    if device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without huge pages, or without so much memory
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
            memory.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(memory, dtype=dtype)
    return torch.empty(count, dtype=dtype, device=device)


class RowSteps(NamedTuple):
    """Distances in a matrix of `num_rows` rows [D], which begins with a layer's first key and has
    all of its keys and values: from a block, a token, a head to the next, from a key to its value.
    """

    block: int
    token: int
    head: int
    value: int
    num_rows: int


class LayerPages(tuple[Tensor, Tensor]):
    """A layer's keys and values [blocks, block_size, Hkv, D], and the matrix that has them all."""

    @cached_property
    def steps(self) -> RowSteps | None:
        """The distances of rows in the matrix; None if keys and values are not in one pool, alike,
        in whole rows."""
        key, value = self
        distance = value.storage_offset() - key.storage_offset()
        if not distance or key.shape != value.shape or key.stride() != value.stride():
            return None
        if key.untyped_storage()._cdata != value.untyped_storage()._cdata:
            return None
        return _steps_of(key.shape, key.stride(), distance)

    @cached_property
    def is_one(self) -> bool:
        """Return whether a value is a part of its key, from the first number on."""
        key, value = self
        places = ((each.storage_offset(), each.stride()) for each in self)
        is_alike = next(places) == next(places)
        return is_alike and key.untyped_storage()._cdata == value.untyped_storage()._cdata

    def at(self, blocks: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Copies [..., Hkv, n, D] of the keys and values at `blocks`, `offsets` [..., n]."""
        key, value = self
        rows = key[blocks, offsets].transpose(-2, -3)
        if self.is_one:
            return rows, rows[..., : value.shape[-1]]
        return rows, value[blocks, offsets].transpose(-2, -3)

    @cached_property
    def rows(self) -> Tensor:
        """The matrix [num_rows, D]. Only where there are `steps`."""
        key, _ = self
        assert self.steps is not None
        dim = key.shape[-1]
        return key.as_strided((self.steps.num_rows, dim), (dim, 1))


@lru_cache(maxsize=64)
def _steps_of(shape: tuple[int, ...], strides: tuple[int, ...], distance: int) -> RowSteps | None:
    *sizes, dim = shape
    *outer, last = strides
    if last != 1 or distance < 0 or any(step % dim for step in (*outer, distance)):
        return None
    block, token, head = (step // dim for step in outer)
    value = distance // dim
    furthest = sum((n - 1) * step for n, step in zip(sizes, (block, token, head), strict=True))
    return RowSteps(block, token, head, value, furthest + value + 1)


def row_index(blocks: Tensor, offsets: Tensor, num_heads: int, steps: RowSteps) -> Tensor:
    """The rows of the tokens at `blocks`, `offsets` [..., n]: of their keys, then of their values.

    int64 [2 * ... * num_heads * n], the tokens of one head side by side.
    """
    rows = (blocks * steps.block + offsets * steps.token)[..., None, :]
    heads = torch.arange(num_heads, device=blocks.device)[:, None] * steps.head
    keys = (rows + heads).flatten()
    return torch.cat([keys, keys + steps.value])
