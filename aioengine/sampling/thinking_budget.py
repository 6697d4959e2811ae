"""Bound on the tokens that a model thinks, before it is made to end its thinking."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from aioengine.errors import InvalidRequestError
from aioengine.sampling.sampler import Constraint

__all__ = ["AnswerReader", "ThinkingBudget", "end_tokens"]

PARAMETER = "thinking_budget"


class AnswerReader(Protocol):
    """Reader of the answer that a completion writes, up to its last token."""

    @property
    def is_thinking(self) -> bool:
        """Return whether what comes next is thought."""

    @property
    def num_thought(self) -> int:
        """Tokens that were thought."""


class ThinkingBudget:
    """One completion's constraint: behind so many tokens of thought come those that end it.

    Between the marks of a thought each token counts, its blanks too.

    A thought that comes later is ended at once. What the reader says is read on the thread that
    launches a step: the request awaits its tokens, so nobody adds one meanwhile.
    """

    def __init__(
        self,
        budget: int,
        end: Sequence[int],
        reader: AnswerReader,
        vocab_size: int,
        grammar: Constraint | None = None,
    ) -> None:
        """`end`: the tokens that end a thought; `grammar`: holds beside it."""
        self._budget = budget
        self._end = tuple(end)
        self._reader = reader
        self._num_words = -(-vocab_size // 32)
        self._grammar = grammar
        self._last: deque[int] = deque(maxlen=len(self._end))  # tokens of the output
        self._num_taken = 0
        self._start: int | None = None  # output index of the first token of the end under way

    def mask(self, token_ids: Sequence[int], output_index: int) -> Tensor | None:
        """Return what may come; see `Constraint`."""
        allowed = None if self._grammar is None else self._grammar.mask(token_ids, output_index)
        num_new, self._num_taken = output_index - self._num_taken, output_index
        self._last.extend(token_ids[len(token_ids) - num_new :])
        forced = self._forced(output_index, allowed)
        if forced is None:
            return allowed
        only = torch.zeros(self._num_words, dtype=torch.int32)
        bit = 1 << forced % 32
        only[forced // 32] = bit - (1 << 32) if bit >> 31 else bit
        return only if allowed is None else only & allowed

    def _forced(self, output_index: int, allowed: Tensor | None) -> int | None:
        """Return the one token that may come, if there is but one."""
        if self._start is not None and output_index >= self._start + len(self._end):
            # The reader may hold back the last letters of the mark, for a stop string.
            self._start = self._start if self._reader.is_thinking else None
        elif self._start is None and self._is_spent:
            num_written = self._num_written()
            # A grammar wants a character that has begun to be finished first.
            if allowed is None or _has(allowed, self._end[num_written:]):
                self._start = output_index - num_written
        place = len(self._end) if self._start is None else output_index - self._start
        return self._end[place] if place < len(self._end) else None

    @property
    def _is_spent(self) -> bool:
        return self._reader.is_thinking and self._reader.num_thought >= self._budget

    def _num_written(self) -> int:
        """Count the tokens of the end that are the last that the model has written."""
        last = tuple(self._last)
        sizes = range(len(last), 0, -1)
        return next((size for size in sizes if last[-size:] == self._end[:size]), 0)


def _has(allowed: Tensor, token_ids: Sequence[int]) -> bool:
    """Return whether a mask has the first of these tokens; true of none."""
    return all(bool(allowed[each // 32] >> each % 32 & 1) for each in token_ids[:1])


def end_tokens(tokenizer: Any, mark: str, vocab_size: int) -> list[int]:
    """Return the tokens that write `mark`, behind other text.

    Raises InvalidRequestError where there are none.
    """
    lead = list(tokenizer.encode("\n", add_special_tokens=False))
    found = list(tokenizer.encode("\n" + mark, add_special_tokens=False))
    if found[: len(lead)] != lead:
        lead, found = [], list(tokenizer.encode(mark, add_special_tokens=False))
    token_ids = found[len(lead) :]
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    if not token_ids or max(token_ids) >= vocab_size or mark not in text:
        message = f"{PARAMETER} must be None: the model's tokenizer cannot write {mark}"
        raise InvalidRequestError(message, parameter=PARAMETER)
    return token_ids
