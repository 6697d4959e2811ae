"""Pooling of a prompt's hidden states: what each step adds to the vector that becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aioengine.core.plan import SequencePlan
from aioengine.kernels.transfer import StepBuffer, to_host
from aioengine.sampling.sampler import Sampling

__all__ = [
    "POOLINGS",
    "PooledRows",
    "Pooling",
    "find_pooled",
    "pooled_fields",
    "sampled_fields",
    "stage_pooling",
]

POOLINGS = ("last", "mean", "cls")
"""Of the hidden states of a prompt: the last, all in the mean, or the first."""

Classify = Callable[[Tensor], Tensor]
Pooled = tuple[int, Any]
"""The first position that a step has pooled, and a sum of hidden states, or a head's scores: a
float array [width], or [labels]."""


@dataclass(frozen=True, slots=True, eq=False)
class Pooling:
    """Pooling of one request: `kind`, one of POOLINGS, over a prompt of `num_tokens`.

    `is_scored`: the head of a classifier follows, in the step that computes the last position.
    `second_text`: the position at which the second of two texts begins; 0 of one text.
    """

    kind: str
    num_tokens: int = 0
    is_scored: bool = False
    second_text: int = 0

    @property
    def needs_all(self) -> bool:
        """Return whether it reads more than the last position."""
        return self.kind != "last"

    def whole(self, pooled: Any) -> Any:
        """The vector [width] that the sum of what all steps have pooled stands for."""
        return pooled / self.num_tokens if self.kind == "mean" and not self.is_scored else pooled

    def positions(self, start: int, end: int) -> range:
        """The positions of [start, end) that it reads."""
        first = self.num_tokens - 1 if self.kind == "last" else 0
        stop = 1 if self.kind == "cls" else self.num_tokens
        return range(max(start, first), max(start, first, min(end, stop)))


def pooled_fields(pooling: Pooling, num_tokens: int, *, is_causal: bool) -> dict[str, Any]:
    """Fields of a core request of so many tokens that ends with its prompt.

    It finds no prefix where it reads more than the last position, nor among an encoder's blocks,
    which do not tell types of tokens.
    """
    reads_prefix = is_causal and not pooling.needs_all
    return {"pooling": replace(pooling, num_tokens=num_tokens), "reads_prefix": reads_prefix}


def sampled_fields(sampling: Sampling) -> dict[str, Any]:
    """Fields of a core request that samples tokens."""
    return {
        "sampling": sampling,
        "reads_prefix": sampling.prompt_logprobs is None,
        "awaits_tokens": sampling.awaits_tokens,
        "has_form": sampling.constraint is not None,
    }


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows of a step's hidden states that are pooled: by themselves, or runs [first, stop) that are
    summed. `rows` [n] belong to `singles` [n]."""

    singles: Sequence[SequencePlan]
    rows: Sequence[int]
    runs: Sequence[tuple[SequencePlan, int, int]]


def find_pooled(sequences: Sequence[SequencePlan]) -> PooledRows:
    """Find what a step's sequences pool, in the order in which their tokens lie."""
    singles: list[SequencePlan] = []
    rows: list[int] = []
    runs: list[tuple[SequencePlan, int, int]] = []
    base = 0
    for s in sequences:
        if s.pooling is not None:
            positions = s.pooling.positions(s.start, s.end)
            first = base + positions.start - s.start
            if s.pooling.kind == "mean":
                runs.append((s, first, first + len(positions)))
            elif positions:
                singles.append(s)
                rows.append(first)
        base += s.end - s.start
    return PooledRows(singles, rows, runs)


def stage_pooling(
    buffer: StepBuffer, found: PooledRows, classify: Classify
) -> Callable[[Tensor], Callable[[], Mapping[str, Pooled]]]:
    """Stage what a step pools; what is returned computes it of hidden states [T, hidden], and sends
    it to the host, where what that returns reads it.

    `classify`: pooled states [n, hidden] to scores [n, labels], for those that are scored.
    """
    staged = buffer.put(found.rows) if found.rows else None

    def pool(hidden: Tensor) -> Callable[[], Mapping[str, Pooled]]:
        parts: list[tuple[SequencePlan, Tensor]] = []
        if staged is not None:
            parts += zip(found.singles, hidden[staged.tensor], strict=True)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        parts += [(s, hidden[first:stop].sum(0, dtype=wide)) for s, first, stop in found.runs]
        scored = [index for index, (s, _) in enumerate(parts) if s.pooling.is_scored]
        if scored:
            means = [_mean(*parts[index]) for index in scored]
            scores = classify(torch.stack(means).to(hidden.dtype))
            for index, row in zip(scored, scores, strict=True):
                parts[index] = parts[index][0], row
        on_their_way = to_host([vector.to(wide) for _, vector in parts])

        def read() -> Mapping[str, Pooled]:
            pairs = zip(parts, on_their_way, strict=True)
            return {s.request_id: (s.start, vector.numpy()) for (s, _), vector in pairs}

        return read

    return pool


def _mean(sequence: SequencePlan, total: Tensor) -> Tensor:
    return total / (sequence.pooling.num_tokens if sequence.pooling.kind == "mean" else 1)
