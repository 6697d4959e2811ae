"""RMS norms and layer norms in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.layer_plan import NormPlan

__all__ = ["compute_norm"]


def compute_norm(x: Tensor, norm: NormPlan) -> Tensor:
    """`x` [..., dim] with a norm, whose weight is of its dtype or of float32.

    Of float32, bfloat16 or (with F16C) float16; summed in float32 and rounded once. Where the
    operators are loaded (`aioengine.kernels.cpu.library`). Raises RuntimeError if the weight is of
    another width or dtype.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    ops = torch.ops.aioengine_cpu
    if norm.bias is None:
        found: Tensor = ops.rms_norm(rows, norm.weight, norm.epsilon)
    else:
        found = ops.layer_norm(rows, norm.weight, norm.bias, norm.epsilon)
    return found.view(x.shape)
