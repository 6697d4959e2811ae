"""Norms computed by one operator of ours, where that is the same norm.

A module is taken for an RMS norm by its name and what it holds, and for one of two kinds by trial:
its weight multiplies, or its weight plus 1 does, in float32 (Gemma's). Layer norms are PyTorch's
own. What an operator makes of random rows must be as close to the norm in float64 as what the
module makes of them. On a CPU ours is taken where it was built. In 16 bits PyTorch's RMS norm is
six operators again there, and ours rounds once where most modules round twice; in float32, which
ours adds up in another order, it may be two units of the largest number off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from aioengine.kernels.cpu import norm as native
from aioengine.kernels.cpu.library import instruction_set, is_available
from aioengine.kernels.layer_plan import NormPlan, normalize
from aioengine.models.fusion.swap import is_hooked, swap
from aioengine.models.fusion.trial import agree, largest_error, random_rows

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "fuse_norms"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_EPSILONS = ("variance_epsilon", "eps")


Compute = Callable[[Tensor, NormPlan], Tensor]


class FusedRMSNorm(nn.Module):
    """Made of a module by `fuse_norms`, never by itself."""

    weight: Tensor
    fused: tuple[Compute, NormPlan]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`hidden_states` [..., dim] -> [..., dim]."""
        compute, norm = self.fused
        return compute(hidden_states, norm)


class FusedLayerNorm(nn.LayerNorm):
    """The same of a layer norm."""

    fused: tuple[Compute, NormPlan]

    def forward(self, input: Tensor) -> Tensor:
        """`input` [..., dim] -> [..., dim]."""
        compute, norm = self.fused
        return compute(input, norm)


def fuse_norms(model: nn.Module) -> int:
    """Make the norms of `model` fused ones, in place; how many were.

    float64 is left alone: it is for parity, and transformers' own norms compute in float32 then.
    """
    count = 0
    with torch.no_grad():
        for module in list(model.modules()):
            epsilon, found = _epsilon(module), None
            kind: type[nn.Module] = FusedRMSNorm
            if isinstance(module, nn.LayerNorm):
                found, kind = _fused_layer_norm(module), FusedLayerNorm
            elif epsilon is not None:
                found = _fused(module, epsilon)
            if found is not None:
                swap(module, kind, fused=found)
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
    if len(list(module.parameters())) != 1 or is_hooked(module):
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
    return _best(module, rows, exact, NormPlan(factor, epsilon))


def _fused_layer_norm(module: nn.LayerNorm) -> tuple[Compute, NormPlan] | None:
    """The best operator for PyTorch's own layer norm of one dimension, with weight and bias."""
    weight, bias = module.weight, module.bias
    if type(module) is not nn.LayerNorm or is_hooked(module):
        return None
    if any(each is None or each.dtype not in _DTYPES or each.is_meta for each in (weight, bias)):
        return None
    if weight.dim() != 1:
        return None
    rows = random_rows(8, len(weight)) + random_rows(8, 1, seed=1)
    rows = rows * torch.logspace(-3, 2, 8, dtype=torch.float32)[:, None]
    rows = rows.to(weight.device, weight.dtype)
    exact = layer_norm(rows.double(), weight.shape, weight.double(), bias.double(), module.eps)
    return _best(module, rows, exact, NormPlan(weight, module.eps, bias))


def _best(
    module: nn.Module, rows: Tensor, exact: Tensor, norm: NormPlan
) -> tuple[Compute, NormPlan] | None:
    """The operator that is as close to the `exact` norm of `rows` as the module is."""
    error = largest_error(module(rows), exact)
    if rows.dtype == torch.float32:
        error = max(error, 2 * torch.finfo(torch.float32).eps * float(exact.abs().max()))
    for compute in (*([native.compute_norm] if _takes(norm.weight) else []), normalize):
        if largest_error(compute(rows, norm), exact) <= error:
            return compute, norm
    return None


def _takes(weight: Tensor) -> bool:
    """Return whether our operator is for rows of this dtype and device."""
    if weight.device.type != "cpu" or not weight.is_contiguous() or not is_available():
        return False
    has_half = instruction_set() != "generic"
    return weight.dtype != torch.float16 or has_half
