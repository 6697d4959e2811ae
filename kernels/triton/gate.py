"""Activated gates times what they gate: the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gate"]

SILU, GELU_TANH, QUICK_GELU = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""As `kernels.matmul.Activation` numbers them; GELU is what is left."""


@triton.jit
def gate(
    Both: tl.tensor, Out: tl.tensor, both_row: tl.tensor,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply the numbers of a row [gates, numbers] by the activated gates. Grid: rows, parts."""
    row, dims = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_dim = dims < DIM
    x = tl.load(Both + row * both_row + dims, mask=is_dim, other=0.0).to(tl.float32)
    up = tl.load(Both + row * both_row + DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
    if ACTIVATION == SILU:
        x = x * tl.sigmoid(x)
    elif ACTIVATION == GELU_TANH:
        # (1 + tanh(y)) / 2 is sigmoid(2 y).
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == QUICK_GELU:
        x = x * tl.sigmoid(1.702 * x)
    else:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(Out + row * DIM + dims, (x * up).to(Out.dtype.element_ty), mask=is_dim)
