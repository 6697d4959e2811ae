"""Tiles that a program of attention goes over, and how many there may be at a time."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aioengine.kernels.attention import KeyValue
from aioengine.kernels.triton.launch import INTERPRETED, padded

__all__ = ["Tiles", "num_cores", "tiles_of"]

CORES = 4 if INTERPRETED else 132
"""Where there is no GPU to ask: of an H200, or few, as an interpreter has them take turns."""


class Tiles(NamedTuple):
    """Rows and keys of a tile, whose rows are of so many query heads, and the parts of a group that
    these make; warps of a program, and tiles on their way to it."""

    heads: int
    parts: int
    rows: int
    keys: int
    num_warps: int
    num_stages: int


def tiles_of(query: Tensor, pages: KeyValue, *, is_single: bool) -> Tiles:
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
    return Tiles(heads, -(-group // heads), rows, keys, num_warps=4, num_stages=2)


@cache
def num_cores(device: torch.device) -> int:
    if device.type != "cuda":
        return CORES
    found: Any = torch.cuda.get_device_properties(device)
    return int(found.multi_processor_count)
