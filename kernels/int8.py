"""Linear layers of 8-bit weights on a CPU.

A weight is quantised once, symmetrically, with a scale for each output. The operators in C++ turn
it back while they multiply (`weight_only`): inputs stay what they are, and one row, which is bound
by the memory that weights are read from, is the quicker for it.

Where these operators were not built, inputs are quantised too (`dynamic`), at each call with a
scale for each row, never one for a batch: what company a row has changes nothing of its output. The
integer matmul is exact: where the CPU adds pairs of 8-bit products in 16 bits, and so would
saturate, rows are given 7 bits, which leave room. PyTorch's own dynamic operators
(`quantized::linear_dynamic`) have one scale for all rows of a call.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from aioengine.kernels.cpu.library import instruction_set, is_available
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.kernels.linear import PackedLinear

__all__ = ["can_quantize", "dynamic", "quantize_linear", "weight_only"]

_SMALLEST = torch.finfo(torch.float32).tiny


class _Int8Linear:
    """A weight [out, in] in 8 bits, with a scale for each output."""

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: int) -> None:
        rounded, scales = _rounded(weight)
        self._weight = _operators().qlinear_prepack(rounded, None)
        self._scales = scales
        self._zeros = torch.zeros(len(scales), dtype=torch.int32)
        self._bias = None if bias is None else bias.detach().clone()
        self._most = 2 ** (bits - 1) - 1
        self._zero = 2 ** (bits - 1)
        self.nbytes = rounded.nbytes + scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scales = rows.abs().amax(1, keepdim=True).float().div_(self._most).clamp_min_(_SMALLEST)
        quantized = rows.div(scales).round_().add_(self._zero).to(torch.uint8)
        found: Tensor = _multiply(quantized, self._zero, self._weight, self._scales, self._zeros)
        found = found.mul_(scales).to(x.dtype)
        if self._bias is not None:
            found += self._bias
        return found.view(*x.shape[:-1], found.shape[-1])


def can_quantize(dtype: torch.dtype) -> bool:
    """Return whether layers of `dtype` can have 8-bit weights here."""
    is_known = dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_known and (_is_native() or _exact_bits() is not None)


def quantize_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | None:
    """`weight` [out, in] in 8 bits with `bias` [out]; None where that cannot be multiplied.

    Neither is changed or kept. Outputs are of the input's dtype.
    """
    if weight.device.type != "cpu" or not can_quantize(weight.dtype) or not weight.numel():
        return None
    return weight_only(weight, bias) if _is_native() else dynamic(weight, bias)


def weight_only(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """See `quantize_linear`: inputs stay as they are. For where the operators in C++ were built."""
    rounded, scales = _rounded(weight)
    return NativeLinear(rounded, None if bias is None else bias.detach(), scales)


def dynamic(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | None:
    """See `quantize_linear`: inputs are quantised too. None without an exact integer matmul."""
    bits = _exact_bits()
    return None if bits is None else _Int8Linear(weight, bias, bits)


def _is_native() -> bool:
    return is_available() and instruction_set() != "generic"


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [out, in] as int8, and the scale of each output [out]."""
    weight = weight.detach()
    scales = weight.abs().amax(1).float().div_(127).clamp_min_(_SMALLEST)
    return weight.float().div(scales[:, None]).round_().to(torch.int8), scales


def _operators() -> Any:
    return torch.ops.onednn


def _multiply(x: Tensor, zero: int, weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """(x - zero) [n, in] uint8 times the packed weight and its scales: [n, out] float32."""
    found: Tensor = _operators().qlinear_pointwise(
        *(x, 1.0, zero, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    )
    return found


@cache
def _exact_bits() -> int | None:
    """Return the bits of an activation that the integer matmul is exact with: 8, 7, or None for
    none."""
    for bits in (8, 7):
        zero = 2 ** (bits - 1)
        try:
            if all(_is_exact(rows, value, zero) for rows in (1, 5, 70) for value in (127, -127)):
                return bits
        except (RuntimeError, AttributeError, TypeError):
            return None
    return None


def _is_exact(rows: int, value: int, zero: int) -> bool:
    """Return whether the largest sums that there can be come out right."""
    x = torch.full((rows, 512), 2 * zero - 1, dtype=torch.uint8)
    weight = torch.full((128, 512), value, dtype=torch.int8)
    packed = _operators().qlinear_prepack(weight, None)
    found = _multiply(
        x, zero, packed, torch.ones(128, dtype=torch.float32), torch.zeros(128, dtype=torch.int32)
    )
    return bool((found == (zero - 1) * value * 512).all())
