"""Log probabilities of tokens as the model gives them, before adjustments and temperature.

Those of a prompt are kept as arrays and shown as mappings: a long prompt has millions of numbers,
which as objects would keep the garbage collector, and with it the event loop, busy for long.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from aioengine.types import Logprob, TokenLogprobs

__all__ = ["PromptLogprobs", "ScoreColumns", "Scores", "chunk_rows", "score"]

Array = np.ndarray[Any, Any]

CHUNK_NUMBERS_CPU, CHUNK_NUMBERS_DEVICE = 1 << 22, 1 << 26
"""Logits that are worked on at a time, here and in sampling, which bounds the memory taken. A
device's are many: each chunk is some thirty launches."""


class Scores(NamedTuple):
    """Log probabilities at m positions: the given tokens and the `k` most probable ones.

    `token_ids`, `ranks` int64 [m] and `logprobs` float32 [m]; `top_ids` int64 and `top_logprobs`
    float32 [m, k].
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def columns(self) -> ScoreColumns:
        """The same as arrays, of the host; shares their memory."""
        return ScoreColumns(*(column.numpy() for column in self))

    def read(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """List for each position the given token, then so many (`counts`) of the most probable
        ones."""
        columns = (column.tolist() for column in self)
        return [_ranked(*row) for row in zip(*columns, counts, strict=True)]


def _ranked(
    token_id: int,
    logprob: float,
    rank: int,
    top_ids: Sequence[int],
    top_logprobs: Sequence[float],
    count: int | None = None,
) -> TokenLogprobs:
    """The given token, then `count` of the most probable ones, or all."""
    found = {token_id: Logprob(logprob, rank)}
    others = zip(top_ids[:count], top_logprobs[:count], strict=True)
    for place, (other, value) in enumerate(others, 1):
        found.setdefault(other, Logprob(value, place))
    return found


def chunk_rows(device: torch.device, vocab_size: int) -> int:
    """Number of rows of logits [m, vocab] that are worked on at a time."""
    most = CHUNK_NUMBERS_CPU if device.type == "cpu" else CHUNK_NUMBERS_DEVICE
    return max(1, most // vocab_size)


def score(logits: Tensor, token_ids: Tensor, count: int) -> Scores:
    """Scores of `token_ids` [m] and of the `count` most probable tokens, from `logits` [m, vocab].

    The rank of a token is one more than the number of tokens that are more probable.
    """
    size = chunk_rows(logits.device, logits.shape[-1])
    count = min(count, logits.shape[-1])
    parts = []
    for first in range(0, len(logits), size):
        logprobs = logits[first : first + size].float().log_softmax(-1)
        given = token_ids[first : first + size, None]
        chosen = logprobs.gather(-1, given)
        ranks = (logprobs > chosen).sum(-1) + 1
        top = logprobs.topk(count, dim=-1)
        parts.append((given[:, 0], chosen[:, 0], ranks, top.indices, top.values))
    return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))


class ScoreColumns(NamedTuple):
    """Log probabilities at m positions: the given tokens and the k most probable ones.

    `token_ids`, `ranks` int64 [m] and `logprobs` float32 [m]; `top_ids` int64 and `top_logprobs`
    float32 [m, k].
    """

    token_ids: Array
    logprobs: Array
    ranks: Array
    top_ids: Array
    top_logprobs: Array

    def blank(self, length: int) -> PromptLogprobs:
        """Make one for a prompt of `length` tokens, with nothing in it yet."""
        return PromptLogprobs(length, self.top_ids.shape[1])


class PromptLogprobs(Sequence[TokenLogprobs | None]):
    """Log probabilities by position; None where no token was predicted, or where encoder rows
    stand."""

    def __init__(self, length: int, width: int) -> None:
        """Allocate for a prompt of `length` tokens, with `width` of the most probable ones at
        each."""
        self._columns = ScoreColumns(
            np.zeros(length, np.int64),
            np.zeros(length, np.float32),
            np.zeros(length, np.int64),
            np.zeros((length, width), np.int64),
            np.zeros((length, width), np.float32),
        )
        self._is_known = np.zeros(length, np.bool_)

    def put(self, first: int, columns: ScoreColumns) -> None:
        """Take the scores of positions from `first` on."""
        end = first + len(columns.token_ids)
        for mine, new in zip(self._columns, columns, strict=True):
            mine[first:end] = new
        self._is_known[first:end] = True

    def hide(self, first: int, count: int) -> None:
        """Forget those of `count` positions from `first` on."""
        self._is_known[first : first + count] = False

    def __len__(self) -> int:
        return len(self._is_known)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs | None]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs | None] | None:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        if not self._is_known[index]:  # raises IndexError
            return None
        return _ranked(*(column[index].tolist() for column in self._columns))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PromptLogprobs({int(self._is_known.sum())} of {len(self)} positions)"
