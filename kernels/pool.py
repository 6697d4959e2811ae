"""Memory for the pages of the KV cache."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

__all__ = ["empty_pool"]


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
