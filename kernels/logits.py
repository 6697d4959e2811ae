"""Logits as they are read: capped, in float32 at least, the largest of each row, or one drawn.

On a CPU all are ours where the operators were built. PyTorch's have their threads meet at the end
of each, and so wait for one that has lost its core.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aioengine.kernels.cpu.library import instruction_set, is_available

__all__ = [
    "MOST_PROBABLE",
    "Choice",
    "argmax",
    "cap_softly",
    "draw",
    "draws",
    "draws_on",
    "to_floats",
]


class Choice(NamedTuple):
    """The draw of a token, as the operators take it.

    `top_k` of 0 and `top_p` of 1 leave all tokens; `min_p`: of the largest probability. `pick`: the
    number in [0, 1) that draws.
    """

    temperature: float
    top_k: float
    top_p: float
    min_p: float
    pick: float


MOST_PROBABLE = Choice(0.0, 0.0, 1.0, 0.0, 0.0)


def argmax(logits: Tensor) -> Tensor:
    """`logits` [n, vocab] -> the place of each row's largest, int64 [n]; the first of several."""
    if not _is_ours(logits):
        return logits.argmax(dim=-1)
    found: Tensor = torch.ops.aioengine_cpu.argmax(logits)
    return found


def cap_softly(logits: Tensor, cap: float) -> Tensor:
    """`logits` [n, vocab] -> cap * tanh(logits / cap), of their dtype."""
    if not _is_ours(logits):
        return torch.tanh(logits / cap) * cap
    found: Tensor = torch.ops.aioengine_cpu.cap(logits, cap)
    return found


def draws(logits: Tensor) -> bool:
    """Return whether `draw` takes such logits."""
    return draws_on(logits.device) if logits.device.type != "cpu" else _is_ours(logits)


def draws_on(device: torch.device) -> bool:
    """Return whether a device that is no CPU takes all logits."""
    return device.type == "cuda" and _triton().are_right_on(device)


def draw(
    logits: Tensor, choices: Tensor, bans: Tensor | None = None, where: Tensor | None = None
) -> Tensor:
    """`logits` [n, vocab] -> tokens, int64 [n], each by a `Choice`, float64 [n, 5].

    `bans` int32: tokens that may not come, whose logits become -infinity. On a CPU each row has so
    many of them as `where` [n] int32 says; elsewhere it has those from the place in `where` [n + 1]
    up to the next.
    """
    if logits.device.type != "cpu":
        drawn: Tensor = _triton().sampler().draw(logits, choices, bans, where)
        return drawn
    found: Tensor = torch.ops.aioengine_cpu.draw(logits, choices, bans, where)
    return found


def _triton() -> Any:
    return import_module("aioengine.kernels.triton")


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
