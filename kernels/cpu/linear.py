"""Linear layers multiplied in C++: weights in panels of 32 outputs, which lie side by side.

A packed weight is [ceil(out / 32), in, 32], padded with zeros. All arithmetic is in float32,
however narrow the weights are in memory. Where the CPU multiplies bfloat16 itself, such weights are
[ceil(out / 32), in / 2, 32, 2], and so are their products (exact, and added up in float32). In
either case an output adds up its products in an order of its own: a row's results are the same bits
in any batch. Weights of 4 and 8 bits lie in groups (`kernels/grouped.py`, grouped.h).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from aioengine.kernels.cpu.library import has_bfloat16, instruction_set, is_available
from aioengine.kernels.matmul import Activation

__all__ = ["NativeLinear", "native_way"]

PANEL = 32
"""Outputs whose weights lie side by side."""
PAIRED_INPUTS = 32
"""What a number of inputs must be a multiple of for bfloat16 to be multiplied as such."""


class NativeLinear:
    """A packed weight of float32, bfloat16 or float16, or one in groups. See `PackedLinear`.

    `operands`: what the operators take, the packed weight, factors of outputs and bias. Raises
    RuntimeError where the operators were not built.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        _check_built()
        packed: Tensor = torch.ops.aioengine_cpu.pack_panels(weight)
        self._set(packed, None, bias, weight.shape[0], weight.nbytes)

    @classmethod
    def of_groups(
        cls,
        numbers: Tensor,
        scales: Tensor,
        lowest: Tensor | None,
        factors: Tensor,
        bias: Tensor | None,
        *,
        bits: int,
        group: int,
        has_full_inputs: bool,
        levels: Sequence[int] | None = None,
    ) -> NativeLinear:
        """A weight in groups, whose parts are those of a `GroupedWeight`."""
        _check_built()
        packed: Tensor = torch.ops.aioengine_cpu.pack_groups(
            numbers,
            scales,
            lowest,
            bits,
            group,
            has_full_inputs,
            None if levels is None else torch.tensor(levels, dtype=torch.int8),
        )
        found = cls.__new__(cls)
        found._set(packed, factors, bias, len(numbers), packed.nbytes)
        return found

    def _set(
        self,
        packed: Tensor,
        factors: Tensor | None,
        bias: Tensor | None,
        num_outputs: int,
        num_bytes: int,
    ) -> None:
        self.num_outputs = num_outputs
        self.operands = packed, _copied(factors), _copied(bias)
        self._multiply = torch.ops.aioengine_cpu.linear.default
        self.nbytes = num_bytes + sum(x.nbytes for x in self.operands[1:] if x is not None)

    def __call__(
        self, x: Tensor, activation: Activation = Activation.NONE, is_gated: bool = False
    ) -> Tensor:
        """`x` [..., in] of float32, bfloat16 or float16 -> [..., out] of the same.

        Where the CPU multiplies bfloat16 itself, weights of that type want such an `x`.

        `activation` is applied before anything is rounded. `is_gated`: to the first half of the
        outputs, which the second half is multiplied by: [..., out / 2]. See `can_gate`.
        """
        out: Tensor = self._multiply(
            _rows(x), *self.operands, self.num_outputs, int(activation), is_gated
        )
        return out if x.dim() == out.dim() else out.view(*x.shape[:-1], out.shape[-1])

    def scaled(self, factors: Tensor) -> NativeLinear:
        """The same weight, whose outputs are multiplied by `factors` [out] before rounding."""
        packed, own, bias = self.operands
        wide = factors.detach().float()
        found = copy.copy(self)
        found.operands = (
            packed,
            _copied(wide if own is None else wide * own),
            None if bias is None else _copied(wide * bias),
        )
        return found

    @property
    def is_paired(self) -> bool:
        """Return whether the CPU multiplies the weights as bfloat16, not as float32."""
        return self.operands[0].dim() == 4

    @property
    def can_gate(self) -> bool:
        """Return whether each half of the outputs fills whole panels."""
        return self.num_outputs % (2 * PANEL) == 0

    @property
    def is_grouped(self) -> bool:
        """Return whether the weight lies in groups."""
        return self.operands[0].dim() == 1

    def rows(self, ids: Tensor) -> Tensor:
        """The weights [n, in] of the outputs `ids` [n], float32."""
        packed, factors, _ = self.operands
        rows = ids.to(torch.int64).contiguous()
        found: Tensor = torch.ops.aioengine_cpu.read_outputs(
            packed, factors, self.num_outputs, rows
        )
        return found


def _check_built() -> None:
    if not is_available():
        raise RuntimeError("the C++ kernels were not built")


def _copied(numbers: Tensor | None) -> Tensor | None:
    return None if numbers is None else numbers.to(torch.float32, copy=True).contiguous()


def _rows(x: Tensor) -> Tensor:
    """`x` [..., in] as [rows, in], with a row's numbers side by side."""
    # A view gives the interpreter's lock up, as any operator of PyTorch's does.
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _is_for_pairs(weight: Tensor) -> bool:
    return weight.dtype is torch.bfloat16 and has_bfloat16()


def native_way(weight: Tensor, bias: Tensor | None) -> NativeLinear | None:
    """Choose the operators for all they read, where they are the faster ones."""
    if not is_available():
        return None
    if instruction_set() == "generic":
        return None  # without wide vectors, PyTorch's own
    if _is_for_pairs(weight) and weight.shape[1] % PAIRED_INPUTS:
        return None  # oneDNN's
    return NativeLinear(weight.detach(), None if bias is None else bias.detach())
