"""RMS norms computed by one operator instead of six, where that is the same norm.

A module is taken for such a norm by its name and what it holds, and for one of two kinds by trial:
its weight multiplies, or its weight plus 1 does, in float32 (Gemma's). What an operator makes of
random rows must be as close to the norm in float64 as what the module makes of them. On a CPU ours
is taken where it was built. In 16 bits PyTorch's is six operators again there, and ours rounds once
where most modules round twice; in float32, which ours adds up in another order, it may be two units
of the largest number off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from aioengine.kernels.cpu import norm as native
from aioengine.kernels.cpu.library import instruction_set, is_available
from aioengine.kernels.layer_plan import NormPlan, normalize
from aioengine.models.fusion.swap import swap
from aioengine.models.fusion.trial import agree, largest_error, random_rows

__all__ = ["FusedRMSNorm", "fuse_norms"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_EPSILONS = ("variance_epsilon", "eps")


Compute = Callable[[Tensor, NormPlan], Tensor]


def _native(x: Tensor, norm: NormPlan) -> Tensor:
    return native.rms_norm(x, norm.weight, norm.epsilon)


class FusedRMSNorm(nn.Module):
    """Made of a module by `fuse_norms`, never by itself."""

    weight: Tensor
    fused: tuple[Compute, NormPlan]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`hidden_states` [..., dim] -> [..., dim]."""
        compute, norm = self.fused
        return compute(hidden_states, norm)


def fuse_norms(model: nn.Module) -> int:
    """Make the RMS norms of `model` fused ones, in place; how many were.

    float64 is left alone: it is for parity, and transformers' own norms compute in float32 then.
    """
    count = 0
    with torch.no_grad():
        for module in list(model.modules()):
            epsilon = _epsilon(module)
            found = None if epsilon is None else _fused(module, epsilon)
            if found is None:
                continue
            swap(module, FusedRMSNorm, fused=found)
            count += 1
    return count


def _epsilon(module: nn.Module) -> float | None:
    """Find what a module that looks like an RMS norm adds to the mean square."""
    weight = getattr(module, "weight", None)
    is_norm = type(module).__name__.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm)
    if not is_norm or not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    if weight.dtype not in _DTYPES or weight.is_meta:
        return None
    if len(list(module.parameters())) != 1 or module._forward_hooks:
        return None
    found = [getattr(module, name) for name in _EPSILONS if hasattr(module, name)]
    return float(found[0]) if len(found) == 1 and isinstance(found[0], float) else None


def _fused(module: nn.Module, epsilon: float) -> tuple[Compute, NormPlan] | None:
    """The best operator that computes what the module does, None where it is another norm."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    rows = random_rows(2, 8, len(weight)) * torch.logspace(-3, 2, 8, dtype=torch.float32)[:, None]
    rows = rows.to(weight.device, weight.dtype)
    for factor in (weight, weight.float() + 1):
        exact = rms_norm(rows.double(), factor.shape, factor.double(), epsilon)
        if agree(lambda: module(rows), partial(Tensor.clone, exact)):
            break
    else:
        return None
    error = largest_error(module(rows), exact)
    if weight.dtype == torch.float32:
        error = max(error, 2 * torch.finfo(torch.float32).eps * float(exact.abs().max()))
    norm = NormPlan(factor, epsilon)
    for compute in (*([_native] if _takes(weight) else []), normalize):
        if largest_error(compute(rows, norm), exact) <= error:
            return compute, norm
    return None


def _takes(weight: Tensor) -> bool:
    """Return whether our operator is for rows of this dtype and device."""
    if weight.device.type != "cpu" or not weight.is_contiguous() or not is_available():
        return False
    has_half = instruction_set() != "generic"
    return weight.dtype != torch.float16 or has_half
