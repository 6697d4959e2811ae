"""Log probabilities of a prompt's tokens, kept as arrays and shown as mappings.

A long prompt has millions of numbers; as objects they would keep the garbage collector, and with it
the event loop, busy for long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from aioengine.types import Logprob, TokenLogprobs

__all__ = ["PromptLogprobs", "ScoreColumns"]

Array = np.ndarray[Any, Any]


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
        token_id, logprob, rank, top_ids, top_logprobs = (
            column[index].tolist() for column in self._columns
        )
        found = {token_id: Logprob(logprob, rank)}
        for place, (other, value) in enumerate(zip(top_ids, top_logprobs, strict=True), 1):
            found.setdefault(other, Logprob(value, place))
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(
            mine == theirs for mine, theirs in zip(self, other, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PromptLogprobs({int(self._is_known.sum())} of {len(self)} positions)"
