"""RMS norms in C++."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., dim] over the root of its mean square plus `eps`, times `weight` [dim].

    Of float32, bfloat16 or (with F16C) float16, the weight of the same or of float32; summed in
    float32 and rounded once. Where the operators are loaded (`aioengine.kernels.cpu.library`).
    Raises RuntimeError if `weight` is of another width or dtype.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    found: Tensor = torch.ops.aioengine_cpu.rms_norm(rows, weight, eps)
    return found.view(x.shape)
