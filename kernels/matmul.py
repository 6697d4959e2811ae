"""The matmul that layers are made of, as every device offers it."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from torch import Tensor

__all__ = ["Activation", "Matmul"]


class Activation(IntEnum):
    """Activations that a matmul can apply to its outputs; numbered as in linear.h."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2
    QUICK_GELU = 3
    GELU = 4


class Matmul(Protocol):
    """A weight [out, in] and a bias [out] or None, ready to be multiplied with."""

    num_outputs: int

    @property
    def can_gate(self) -> bool:
        """Return whether the first half of the outputs can be gates of the second."""

    def __call__(
        self, x: Tensor, activation: Activation = Activation.NONE, is_gated: bool = False
    ) -> Tensor:
        """`x` [..., in] -> [..., out], or [..., out / 2] where the first half are gates.

        `activation` is applied to the outputs, or to the gates, which then multiply the others.
        """
