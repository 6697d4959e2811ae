"""RMS norms computed by one operator instead of six, where that is the same norm.

A module is taken for such a norm by its name and what it holds, and for the usual one by a trial:
what an operator makes of random rows must be as close to the norm in float64 as what the module
makes of them. In float32 PyTorch's operator gives the module's bits. In 16 bits ours is taken where
it was built (PyTorch's is six operators again there), and rounds once where most modules round
twice. A norm that adds 1 to its weight, say, fails the trial and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from aioengine.kernels.cpu import norm
from aioengine.kernels.cpu.library import is_available
from aioengine.models.fusion.swap import swap
from aioengine.models.fusion.trial import agree, largest_error, random_rows

__all__ = ["FusedRMSNorm", "fuse_norms"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_EPSILONS = ("variance_epsilon", "eps")


Norm = Callable[[Tensor, Tensor, float], Tensor]


def _plain(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return rms_norm(x, weight.shape, weight, epsilon)


class FusedRMSNorm(nn.Module):
    """Made of a module by `fuse_norms`, never by itself."""

    weight: Tensor
    fused: tuple[Norm, float]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`hidden_states` [..., dim] -> [..., dim]."""
        compute, epsilon = self.fused
        return compute(hidden_states, self.weight, epsilon)


def fuse_norms(model: nn.Module) -> int:
    """Make the RMS norms of `model` on a CPU fused ones, in place; how many were.

    float64 is left alone: it is for parity, and transformers' own norms compute in float32 then.
    """
    count = 0
    with torch.no_grad():
        for module in list(model.modules()):
            epsilon = _epsilon(module)
            found = None if epsilon is None else _operator(module, epsilon)
            if found is None:
                continue
            swap(module, FusedRMSNorm, fused=(found, epsilon))
            count += 1
    return count


def _epsilon(module: nn.Module) -> float | None:
    """Find what a module that looks like an RMS norm adds to the mean square."""
    weight = getattr(module, "weight", None)
    is_norm = type(module).__name__.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm)
    if not is_norm or not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    if weight.dtype not in _DTYPES or weight.device.type != "cpu":
        return None
    if len(list(module.parameters())) != 1 or module._forward_hooks:
        return None
    found = [getattr(module, name) for name in _EPSILONS if hasattr(module, name)]
    return float(found[0]) if len(found) == 1 and isinstance(found[0], float) else None


def _operator(module: nn.Module, epsilon: float) -> Norm | None:
    """The best operator that computes what the module does, None where it is another norm."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    rows = random_rows(2, 8, len(weight), dtype=torch.float32)
    rows = (rows * torch.logspace(-3, 2, 8)[:, None]).to(weight.dtype)
    exact = rms_norm(rows.double(), weight.shape, weight.double(), epsilon)
    if not agree(lambda: module(rows), lambda: exact):
        return None
    error = largest_error(module(rows), exact)
    is_narrow = weight.dtype != torch.float32 and weight.is_contiguous()
    for operator in (*([norm.rms_norm] if is_narrow and is_available() else []), _plain):
        if largest_error(operator(rows, weight, epsilon), exact) <= error:
            return operator
    return None
