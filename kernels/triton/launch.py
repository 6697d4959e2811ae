"""Parts that all launches share."""

from __future__ import annotations

from torch import Tensor
from triton import knobs

__all__ = ["INTERPRETED", "padded", "strides"]

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels. It computes matmuls of bfloat16 wrongly."""


def padded(size: int, least: int = 16) -> int:
    """The next power of two, which is what a tile's sides are."""
    return max(least, 1 << (size - 1).bit_length())


def strides(numbers: Tensor) -> tuple[int, ...]:
    """The strides of all dimensions but the last, in which numbers lie close together."""
    assert numbers.stride(-1) == 1, "the numbers of a row lie apart"
    return numbers.stride()[:-1]
