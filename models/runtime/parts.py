"""Pieces that several models defined here are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

__all__ = ["RMSNorm", "rotary_table", "rotate_halves"]


class RMSNorm(nn.Module):
    """Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), in float32 at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden` [..., size] -> the same shape and dtype."""
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        normed = rms_norm(wide, wide.shape[-1:], eps=self.eps)
        return self.weight * normed.to(hidden.dtype)


def rotary_table(
    positions: Tensor, frequencies: Tensor, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines float32 [T, 1, n], `factor` times, of `positions` [T] and n frequencies.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
    """
    angles = positions[:, None].to(torch.float32) * frequencies.to(torch.float32)
    return factor * angles.cos()[:, None], factor * angles.sin()[:, None]


def rotate_halves(vectors: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """`vectors` [T, heads, size] with their first 2 n entries turned, i together with n + i.

    Computed in float32 at least; shape and dtype stay.
    """
    cosines, sines = table
    size = cosines.shape[-1]
    first, second = vectors[..., :size], vectors[..., size : 2 * size]
    turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    return torch.cat([turned.to(vectors.dtype), vectors[..., 2 * size :]], dim=-1)
