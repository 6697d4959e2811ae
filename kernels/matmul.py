"""The matmul that layers are made of, as every device offers it; and PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

__all__ = [
    "FORMULAS",
    "NO_LIMIT",
    "Activation",
    "ExpertMatmul",
    "Gating",
    "Matmul",
    "TorchLinear",
    "activated",
]


class Activation(IntEnum):
    """Activations that a matmul can apply to its outputs; numbered as in linear.h."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2
    QUICK_GELU = 3
    GELU = 4


FORMULAS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: silu,
    Activation.GELU_TANH: lambda x: gelu(x, approximate="tanh"),
    Activation.QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
    Activation.GELU: gelu,
}
"""The activations in PyTorch."""


class Gating(NamedTuple):
    """The limit and shift of gates and what they multiply, beside their activation.

    `limit`: what gates are at most before they are activated, and outputs from its negative on; 0
    for none. `shift`: added to outputs then, before they are multiplied.
    """

    limit: float = 0.0
    shift: float = 0.0


NO_LIMIT = Gating()
"""Gates as they are, and what they multiply."""


def activated(
    out: Tensor, activation: Activation, is_gated: bool, gating: Gating = NO_LIMIT
) -> Tensor:
    """Outputs [..., out] of a matmul, or [..., out / 2] where the first half are gates."""
    gate, up = out.chunk(2, dim=-1) if is_gated else (out, None)
    if up is not None and gating.limit:
        gate = gate.clamp(max=gating.limit)
        up = up.clamp(-gating.limit, gating.limit) + gating.shift
    found = gate if activation is Activation.NONE else FORMULAS[activation](gate)
    return found if up is None else found * up


class ExpertMatmul(Protocol):
    """Weights [out, in] of several experts, packed as one for a CPU.

    `operands`: the packed weight, factors of outputs and bias. `num_outputs`: of one expert.
    """

    operands: tuple[Tensor, Tensor | None, Tensor | None]
    num_experts: int
    num_outputs: int


class Matmul(Protocol):
    """A weight [out, in] and a bias [out] or None, ready to be multiplied with."""

    num_outputs: int
    nbytes: int

    @property
    def can_gate(self) -> bool:
        """Return whether the first half of the outputs can be gates of the second."""

    def __call__(
        self, x: Tensor, activation: Activation = Activation.NONE, is_gated: bool = False
    ) -> Tensor:
        """`x` [..., in] -> [..., out], or [..., out / 2] where the first half are gates.

        `activation` is applied to the outputs, or to the gates, which then multiply the others.
        """


class TorchLinear:
    """A weight where PyTorch has it, on any device: nothing is copied. See `Matmul`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight.detach()
        self._transposed = self.weight.mT
        self.bias = None if bias is None else bias.detach()
        self.num_outputs = len(weight)
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    @property
    def can_gate(self) -> bool:
        """Return whether there are two halves."""
        return self.num_outputs % 2 == 0

    def __call__(
        self, x: Tensor, activation: Activation = Activation.NONE, is_gated: bool = False
    ) -> Tensor:
        """See `Matmul`."""
        return activated(linear(x, self.weight, self.bias), activation, is_gated)

    def add_to(self, x: Tensor, given: Tensor) -> Tensor:
        """`x` [T, out] plus the outputs for `given` [T, in]; mutates and returns `x`."""
        if self.bias is None:
            return x.addmm_(given, self._transposed)
        return x.add_(linear(given, self.weight, self.bias))
