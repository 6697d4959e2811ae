"""Logits as they are read: in float32 at least, and the largest of each row.

On a CPU both are ours where the operators were built. PyTorch's have their threads meet at the end
of each, and so wait for one that has lost its core.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.cpu.library import instruction_set, is_available

__all__ = ["argmax", "to_floats"]


def argmax(logits: Tensor) -> Tensor:
    """`logits` [n, vocab] -> the place of each row's largest, int64 [n]; the first of several."""
    if not _is_ours(logits):
        return logits.argmax(dim=-1)
    found: Tensor = torch.ops.aioengine_cpu.argmax(logits)
    return found


def to_floats(logits: Tensor) -> Tensor:
    """`logits` [n, vocab] in float32; of float32 or more already, they themselves."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if dtype == logits.dtype or not _is_ours(logits):
        return logits.to(dtype)
    found: Tensor = torch.ops.aioengine_cpu.widen(logits)
    return found


def _is_ours(logits: Tensor) -> bool:
    if logits.device.type != "cpu" or logits.dim() != 2 or not logits.numel():
        return False
    if logits.stride(1) != 1 or not is_available():
        return False
    has_half = logits.dtype == torch.float16 and instruction_set() != "generic"
    return has_half or logits.dtype in (torch.float32, torch.bfloat16)
