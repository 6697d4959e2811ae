"""The parts of splits, added up by their shares of the softmax: the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from aioengine.kernels.triton.scores import NEVER

__all__ = ["combine"]


@triton.jit(
    do_not_specialize=("num_splits", "part_split", "sum_split"),
    do_not_specialize_on_alignment=("QueryStart",),
)
def combine(
    Parts: tl.tensor, Sums: tl.tensor, Out: tl.tensor, QueryStart: tl.tensor, num_splits: tl.tensor,
    part_split: tl.tensor, sum_split: tl.tensor, out_token: tl.tensor, out_head: tl.tensor,
    DV: tl.constexpr, DV_PADDED: tl.constexpr, MOST_SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """Add up the parts [splits, sequences, heads, DV] of single tokens by their sums.

    Grid: sequences, heads.
    """
    token = tl.load(QueryStart + tl.program_id(0)).to(tl.int64)
    if tl.load(QueryStart + tl.program_id(0) + 1) - token != 1:
        return
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    splits, dims = tl.arange(0, MOST_SPLITS).to(tl.int64), tl.arange(0, DV_PADDED)
    is_split, is_dim = splits < num_splits, dims < DV
    sums = tl.load(Sums + splits * sum_split + row, mask=is_split, other=NEVER)
    shares = tl.exp2(sums - tl.max(sums, 0))
    parts = tl.load(
        Parts + splits[:, None] * part_split + row * DV + dims[None, :],
        mask=is_split[:, None] & is_dim[None, :], other=0.0,
    )  # fmt: skip
    found = tl.sum(parts * shares[:, None], 0) / tl.sum(shares, 0)
    out_at = token * out_token + tl.program_id(1) * out_head
    tl.store(Out + out_at + dims, found.to(Out.dtype.element_ty), mask=is_dim)
