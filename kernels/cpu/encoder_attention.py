"""Attention of every row to every row of its sequence, as in encoders, by the operator for pages.

A sequence of keys is one page there, read where it lies. Where the CPU multiplies bfloat16 that is
faster than PyTorch's own operator (by tiles for short sequences, by vectors four times as fast);
elsewhere that is left to do it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.cpu.library import has_bfloat16_attention

__all__ = ["attend_to_all", "is_faster"]

_KEY_MULTIPLE, _VALUE_MULTIPLE = 32, 16
"""What a head's width must be a multiple of for matmuls of bfloat16."""


def is_faster(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether `attend_to_all` is the better way for such tensors, whose shapes are as
    there."""
    return (
        query.dtype == key.dtype == value.dtype == torch.bfloat16
        and query.device.type == "cpu"
        and has_bfloat16_attention()
        and query.shape[-1] % _KEY_MULTIPLE == 0
        and value.shape[-1] % _VALUE_MULTIPLE == 0
        and query.shape[1] % key.shape[1] == 0
        and all(each.numel() and each.stride(-1) == 1 for each in (query, key, value))
    )


def attend_to_all(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`query` [n, Hq, T, Dk], `key` [n, Hkv, S, Dk], `value` [n, Hkv, S, Dv] -> [n, T, Hq, Dv].

    `scale` multiplies the scores. All of one dtype: float32, bfloat16, or float16 where the CPU
    converts it. Raises RuntimeError for others.
    """
    count, heads, num_queries, _ = query.shape
    num_keys = key.shape[2]
    rows = query.transpose(1, 2).flatten(0, 1), None, None
    pages = key.transpose(1, 2), value.transpose(1, 2)
    nothing = torch.empty(0, dtype=torch.int64)  # is written
    starts = torch.arange(count + 1, dtype=torch.int32) * num_queries
    lengths = torch.full((count,), num_keys, dtype=torch.int32)
    table = torch.arange(count, dtype=torch.int32)[:, None]
    places, biases = (nothing, nothing, starts, lengths, table, None), (None, None)
    out: Tensor = torch.ops.aioengine_cpu.attend(
        *rows, *pages, *places, *biases, scale, 0.0, 0, False, False
    )
    return out.view(count, num_queries, heads, -1)
