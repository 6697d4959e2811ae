"""Tokens from logits, greedily or at random: the kernel.

A program has a row of logits and goes over it in tiles, several times. Weights are not sorted: the
least one that top-k or top-p keeps is found by its bits, which for positive numbers are in order,
four in each pass, as in a radix select. Then a token is drawn by inverse transform sampling.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["draw"]

BLOCK = 2048
"""Numbers of a tile: the sums of sixteen steps of each fill the registers of a core."""
FIELDS = tl.constexpr(5)
"""Of a `Choice`."""


@triton.jit
def _ban(row: tl.tensor, Bans: tl.tensor, begin: tl.tensor, end: tl.tensor) -> None:
    """Bar the tokens `Bans` [begin:end] from a row."""
    while begin < end:
        at = begin + tl.arange(0, 128)
        token = tl.load(Bans + at, mask=at < end, other=0)
        tl.store(row + token, float("-inf"), mask=at < end)
        begin += 128
    tl.debug_barrier()


@triton.jit
def _largest(row: tl.tensor, vocab: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The largest of a row, and the first place of it."""
    most, place = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        place, most = tl.where(x > most, at, place), tl.maximum(most, x)
    top = tl.max(most, 0)
    return top, tl.min(tl.where(most == top, place, vocab - 1), 0)


@triton.jit
def _weights(
    row: tl.tensor, begin: tl.tensor, vocab: tl.tensor, top: tl.tensor, cold: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Weights of a tile, of which the largest of the row is 1."""
    at = begin + tl.arange(0, BLOCK)
    x = tl.load(row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    return tl.exp((x - top) * cold)


@triton.jit
def _least(
    row: tl.tensor, vocab: tl.tensor, top: tl.tensor, cold: tl.tensor, floor: tl.tensor,
    wanted: tl.tensor, BLOCK: tl.constexpr, COUNTS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Bits of the largest weight which, with all that are not smaller, comes to `wanted`.

    That is their sum, or number where it `COUNTS`; of weights whose bits are at least `floor`.
    """
    least, digits = floor * 0, tl.arange(0, 16)
    for step in range(8):
        steps = least + (digits << (28 - 4 * step))
        found = tl.zeros([16, BLOCK], tl.float32)
        for begin in range(0, vocab, BLOCK):
            w = _weights(row, begin, vocab, top, cold, BLOCK)
            bits = w.to(tl.int32, bitcast=True)
            share = tl.where(bits >= floor, 1.0 if COUNTS else w, 0.0)
            found += tl.where(bits[None, :] >= steps[:, None], share[None, :], 0.0)
        is_enough = tl.sum(found, 1) >= wanted
        # The steps of a sign are none, and lie below all others.
        is_enough = is_enough & (steps >= least)
        least = tl.max(tl.where(is_enough, steps, least), 0)
    return least


@triton.jit
def _total(
    row: tl.tensor, vocab: tl.tensor, top: tl.tensor, cold: tl.tensor, floor: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Sum and number of the weights whose bits are at least `floor`."""
    total, count = floor.to(tl.float64) * 0.0, floor * 0
    for begin in range(0, vocab, BLOCK):
        w = _weights(row, begin, vocab, top, cold, BLOCK)
        is_kept = w.to(tl.int32, bitcast=True) >= floor
        total += tl.sum(tl.where(is_kept, w, 0.0).to(tl.float64), 0)
        count += tl.sum(is_kept.to(tl.int32), 0)
    return total, count


@triton.jit
def _place(
    row: tl.tensor, vocab: tl.tensor, top: tl.tensor, cold: tl.tensor, floor: tl.tensor,
    target: tl.tensor, place: tl.tensor, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The place at which the sum of the weights that are kept passes `target`; else `place`."""
    before, is_found = target * 0.0, target < 0.0
    for begin in range(0, vocab, BLOCK):
        w = _weights(row, begin, vocab, top, cold, BLOCK)
        w = tl.where(w.to(tl.int32, bitcast=True) >= floor, w, 0.0).to(tl.float64)
        after = before + tl.sum(w, 0)
        if (after > target) & (is_found == 0):
            at = begin + tl.arange(0, BLOCK)
            passed = tl.where((before + tl.cumsum(w, 0) > target) & (w > 0.0), at, vocab)
            # Sums of another order may not pass it after all: then the last that is kept does.
            last = tl.max(tl.where(w > 0.0, at, 0), 0)
            place, is_found = tl.minimum(tl.min(passed, 0), last), after > target
        before = after
    return place


@triton.jit(
    do_not_specialize=("vocab",),
    do_not_specialize_on_alignment=("Choices", "Bans", "BanStarts"),
)
def sample(
    Logits: tl.tensor, Choices: tl.tensor, Bans: tl.tensor, BanStarts: tl.tensor, Out: tl.tensor,
    row_step: tl.tensor, vocab: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Choose a row's token by its `Choices`: temperature, top-k, top-p, min-p and pick."""
    number = tl.program_id(0)
    row, choice = Logits + number.to(tl.int64) * row_step, Choices + number * FIELDS
    _ban(row, Bans, tl.load(BanStarts + number), tl.load(BanStarts + number + 1))
    top, place = _largest(row, vocab, BLOCK)
    temperature = tl.load(choice)
    if temperature > 0:
        cold, top_k = (1.0 / temperature).to(tl.float32), tl.load(choice + 1).to(tl.int32)
        top_p, min_p = tl.load(choice + 2), tl.load(choice + 3).to(tl.float32)
        floor = tl.where(min_p > 0, min_p, 0.0).to(tl.int32, bitcast=True)
        kept = floor * 0
        if (top_k > 0) & (top_k < vocab):
            kept = _least(row, vocab, top, cold, kept, top_k.to(tl.float32), BLOCK, COUNTS=True)
        if top_p < 1:
            total, count = _total(row, vocab, top, cold, kept, BLOCK)
            # Of those that are as probable as the last, no more count than top-k has places for.
            extra = tl.where(top_k > 0, tl.maximum(count - top_k, 0), 0)
            total -= extra * kept.to(tl.float32, bitcast=True).to(tl.float64)
            wanted = (top_p * total).to(tl.float32)
            kept = tl.maximum(
                kept, _least(row, vocab, top, cold, kept, wanted, BLOCK, COUNTS=False)
            )
        floor = tl.maximum(floor, kept)
        total, count = _total(row, vocab, top, cold, floor, BLOCK)
        target = tl.load(choice + 4) * total
        place = _place(row, vocab, top, cold, floor, target, place, BLOCK)
    tl.store(Out + number, place.to(tl.int64))


def draw(
    logits: Tensor, choices: Tensor, bans: Tensor | None = None, ban_starts: Tensor | None = None
) -> Tensor:
    """See `kernels.logits.draw`; `ban_starts` [n + 1] int32: where a row's tokens of `bans` lie."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if bans is None or ban_starts is None:
        # A program for none would be compiled when one first comes.
        ban_starts = bans = torch.zeros(len(logits) + 1, dtype=torch.int32, device=logits.device)
    if len(logits):
        sample[(len(logits),)](
            logits, choices, bans, ban_starts, out, logits.stride(0), logits.shape[1],
            BLOCK=BLOCK, num_warps=16,
        )  # fmt: skip
    return out
