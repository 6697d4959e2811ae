"""Angles of positions, by which heads are rotated: the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.layer_plan import Angles
from aioengine.kernels.triton.launch import padded

__all__ = ["angles_of"]

TOKENS = 16
"""Of a program."""


@triton.jit(
    do_not_specialize=("scaling", "num_tokens", "stride"),
    do_not_specialize_on_alignment=("Positions", "Axes"),
)
def angles(
    Positions: tl.tensor, Frequencies: tl.tensor, Axes: tl.tensor, Cos: tl.tensor, Sin: tl.tensor,
    scaling: tl.tensor, num_tokens: tl.tensor, stride: tl.tensor,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr, TOKENS: tl.constexpr, HAS_AXES: tl.constexpr,
) -> None:  # fmt: skip
    """Cosines and sines [tokens, 2 * HALF], of which both halves are the same. Grid: tokens.

    Positions on another axis lie `stride` numbers further on.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = tl.arange(0, HALF_PADDED)
    is_known = (token < num_tokens)[:, None] & (place < HALF)[None, :]
    frequency = tl.load(Frequencies + place, mask=place < HALF, other=0.0)
    if HAS_AXES:
        axis = tl.load(Axes + place, mask=place < HALF, other=0)
        at = Positions + axis[None, :] * stride + token[:, None]
        turn = tl.load(at, mask=is_known, other=0).to(tl.float32) * frequency[None, :]
    else:
        position = tl.load(Positions + token, mask=token < num_tokens, other=0).to(tl.float32)
        turn = position[:, None] * frequency[None, :]
    cos = (tl.cos(turn) * scaling).to(Cos.dtype.element_ty)
    sin = (tl.sin(turn) * scaling).to(Cos.dtype.element_ty)
    at = token[:, None] * (2 * HALF) + place[None, :]
    tl.store(Cos + at, cos, mask=is_known)
    tl.store(Cos + at + HALF, cos, mask=is_known)
    tl.store(Sin + at, sin, mask=is_known)
    tl.store(Sin + at + HALF, sin, mask=is_known)


def angles_of(
    positions: Tensor,
    frequencies: Tensor,
    scaling: float,
    dtype: torch.dtype,
    axes: Tensor | None = None,
) -> Angles:
    """Cosines and sines [T, D] of `positions` int64, by `frequencies` [D / 2] float32.

    `positions` are [T]; or [A, T] where `axes`, int64 [D / 2], says by which of them each frequency
    turns.
    """
    assert positions.dim() == (1 if axes is None else 2)
    positions = positions.contiguous()
    count = positions.shape[-1]
    shape = count, 2 * len(frequencies)
    cos, sin = (frequencies.new_empty(shape, dtype=dtype) for _ in range(2))
    if count:
        angles[(-(-count // TOKENS),)](
            positions, frequencies, positions if axes is None else axes, cos, sin, scaling, count,
            0 if axes is None else positions.stride(0), HALF=len(frequencies),
            HALF_PADDED=padded(len(frequencies), 1), TOKENS=TOKENS, HAS_AXES=axes is not None,
        )  # fmt: skip
    return cos, sin
