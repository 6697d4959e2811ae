"""Rotary positions, pair by pair as complex numbers, in float64.

RoFormer (arXiv:2104.09864) turns pair i of a head at position p by the angle p * base**(-2i / D).
Families differ in which components make a pair, in the base, and in what happens to long prompts.
"""

from __future__ import annotations

import math

import numpy as np

from tests.originals.arithmetic import Array


def turned(x: Array, positions: Array, base: float, *, neighbours: bool) -> Array:
    """Turn the last axis of [T, D] by each row's position.

    A pair is (2i, 2i + 1) for `neighbours`, else (i, i + D / 2), as in LLaMA's published weights.
    """
    half = x.shape[-1] // 2
    speeds = base ** (-np.arange(half) / half)
    return turned_by(x, positions, speeds, neighbours=neighbours)


def turned_by(x: Array, positions: Array, speeds: Array, *, neighbours: bool) -> Array:
    """Turn the last axis of [T, D] by position times speed, pairs as in `turned`."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * positions[:, None] * speeds)
    y = np.empty_like(x)
    if neighbours:
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        y[..., 0::2], y[..., 1::2] = pairs.real, pairs.imag
    else:
        pairs = (x[..., :half] + 1j * x[..., half:]) * turn
        y[..., :half], y[..., half:] = pairs.real, pairs.imag
    return y


def turned_in_heads(
    x: Array, positions: Array, base: float, heads: int, *, neighbours: bool
) -> Array:
    """Turn heads that lie side by side in [T, heads * D]."""
    parts = np.split(x, heads, axis=-1)
    return np.concatenate(
        [turned(part, positions, base, neighbours=neighbours) for part in parts], axis=-1
    )


def ntk_base(base: float, width: int, prompt: int, trained: int) -> float:
    """Return Qwen's base for a prompt: "dynamic NTK", by powers of two of the trained length.

    A prompt of up to `trained` tokens keeps the base. Beyond, up to 2 and 4 times it, the factor
    alpha is 3 and 7: 2**k - 1 with the k that log2(prompt / trained) + 1 is rounded up to.
    """
    alpha = max(2 ** math.ceil(math.log(prompt / trained, 2) + 1) - 1, 1)
    return float(base * alpha ** (width / (width - 2)))


def logn(positions: Array, trained: int) -> Array:
    """Return Qwen's factors of queries: the logarithm of how many keys there are.

    The query that sees n keys, itself among them, is multiplied by log(n) / log(trained), from the
    first n beyond `trained` on.
    """
    seen = positions + 1
    return np.where(seen > trained, np.log(seen) / math.log(trained), 1.0)


def yarn_speeds(
    width: int, base: float, factor: float, original: int, turns: tuple[float, float]
) -> Array:
    """Return YaRN's speeds (arXiv:2309.00071): slow pairs divided by `factor`, fast ones kept.

    `turns`: how often a pair turns within `original` positions to be kept, and to be divided; pairs
    between are mixed, by their index.
    """
    speeds = base ** (-np.arange(width // 2) / (width // 2))

    def index(often: float) -> float:
        return width * math.log(original / (2 * math.pi * often)) / (2 * math.log(base))

    first = max(math.floor(index(turns[0])), 0)
    last = min(math.ceil(index(turns[1])), width - 1)
    divided = np.clip((np.arange(width // 2) - first) / max(last - first, 0.001), 0, 1)
    return speeds * (divided / factor + 1 - divided)
