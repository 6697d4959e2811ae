"""Memory for the pages of the KV cache, and where rows lie in it."""

from __future__ import annotations

import mmap
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LayerPages", "RowSteps", "empty_pool", "row_index"]


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
