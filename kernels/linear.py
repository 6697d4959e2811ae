"""Linear layers, on a CPU with weights laid out once for the way they are multiplied.

A way is a function from a weight [out, in] and a bias [out] or None to a `PackedLinear`, or to None
where it has none for this dtype, shape or CPU. `WAYS` lists them, the best first; `pack_linear`
asks one after the other. What a way returns keeps its own copy of the weight: the caller frees the
plain one.

`native_way` is ours, in C++ (`kernels/cpu/`), and the faster one. `onednn_way` goes through
PyTorch's own operators, whose layout depends on a number of rows given as a hint. Given one row
it is the plain layout; from some rows on it is blocks of 64 outputs by 16 inputs, in which any
number of rows is multiplied without another copy, and never slower than in the plain one. So one
packing serves all.

On other devices a weight stays as PyTorch has it (`TorchLinear`); what packing gives there is one
matmul for layers of one input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from aioengine.kernels.cpu.linear import native_way
from aioengine.kernels.matmul import TorchLinear

__all__ = ["WAYS", "PackedLinear", "onednn_way", "pack_linear"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PACKED_ROWS = 64
"""The rows given to oneDNN as a hint: many enough for the blocked layout."""
RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Of the largest output of a trial, which a way may differ by from the plain matmul."""


class PackedLinear(Protocol):
    """A weight [out, in] and a bias [out], ready to be multiplied with. Inference only."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes, without the padding of blocks."""

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [..., in] -> [..., out], of the weight's dtype, contiguous."""


Way = Callable[[Tensor, Tensor | None], PackedLinear | None]


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | None:
    """The best packing of `weight` [out, in] and `bias` [out], None where no way takes it.

    Of float32, bfloat16 and float16. Neither is changed; on a CPU neither is kept.
    """
    if weight.is_meta or weight.dtype not in DTYPES or not weight.numel():
        return None
    if weight.device.type != "cpu":
        return TorchLinear(weight, bias)
    for way in WAYS:
        packed = way(weight, bias)
        if packed is not None:
            return packed
    return None


class _OneDnnLinear:
    """A weight in oneDNN's blocks."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = _operators()._reorder_linear_weight(weight.contiguous(), PACKED_ROWS)
        self._bias = None if bias is None else bias.contiguous().clone()
        self._multiply = _operators()._linear_pointwise.default
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        found: Tensor = self._multiply(x, self._weight, self._bias, "none", [], "")
        return found


def onednn_way(weight: Tensor, bias: Tensor | None) -> PackedLinear | None:
    """Through oneDNN: float32 everywhere, narrower types where the CPU multiplies them."""
    if not _onednn_takes(weight.dtype):
        return None
    return _OneDnnLinear(weight.detach(), None if bias is None else bias.detach())


WAYS: tuple[Way, ...] = (native_way, onednn_way)


def _operators() -> Any:
    return torch.ops.mkldnn


@cache
def _onednn_takes(dtype: torch.dtype) -> bool:
    """Return whether oneDNN's matmul of this type is there and right: found by a trial.

    The operators are not public ones: a build may lack them, and what a CPU lacks they tell in
    several ways.
    """
    if not _is_native(dtype):
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
        for shape in ((5, 48), (96, 48), (96,))
    )
    wanted = linear(x.double(), weight.double(), bias.double())
    try:
        found = _OneDnnLinear(weight, bias)(x)
    except (RuntimeError, AttributeError, TypeError):
        return False
    error = (found.double() - wanted).abs().max()
    return bool(error <= RELATIVE_ERROR[dtype] * wanted.abs().max())


def _is_native(dtype: torch.dtype) -> bool:
    """Return whether the CPU multiplies this type itself: emulated, oneDNN refuses it or is
    slow."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if dtype not in name:
        return True
    ask = getattr(_operators(), name[dtype], None)
    return ask is not None and bool(ask())
