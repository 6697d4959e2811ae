"""Norms of rows: the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["norm"]


@triton.jit
def norm(
    X: tl.tensor, Weight: tl.tensor, Bias: tl.tensor, Out: tl.tensor, x_row: tl.tensor,
    epsilon: tl.tensor,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr,
) -> None:  # fmt: skip
    """Normalise a row [DIM] in float32, a program: an RMS norm, or with a bias a layer norm.

    Where it `ADDS`, the row's numbers are added to those of `Out`.
    """
    row, dims = tl.program_id(0).to(tl.int64), tl.arange(0, DIM_PADDED)
    is_dim = dims < DIM
    x = tl.load(X + row * x_row + dims, mask=is_dim, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x = tl.where(is_dim, x - tl.sum(x, 0) / DIM, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / DIM + epsilon)
    x = x * tl.load(Weight + dims, mask=is_dim, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x = x + tl.load(Bias + dims, mask=is_dim, other=0.0).to(tl.float32)
    x = x.to(Out.dtype.element_ty)
    if ADDS:
        before = tl.load(Out + row * DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
        x = (before + x.to(tl.float32)).to(Out.dtype.element_ty)
    tl.store(Out + row * DIM + dims, x, mask=is_dim)
