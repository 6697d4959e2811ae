"""Bound on the tokens that a model thinks, before it is made to end its thinking."""

from __future__ import annotations

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
        self._start: int | None = None  # output index of the first token of the end under way

    def mask(self, token_ids: Sequence[int], output_index: int) -> Tensor | None:
        """Return what may come; see `Constraint`."""
        allowed = None if self._grammar is None else self._grammar.mask(token_ids, output_index)
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
        elif self._start is None and self._reader.is_thinking:
            is_spent = self._reader.num_thought >= self._budget
            # A grammar wants a character that has begun to be finished first.
            may_end = allowed is None or bool(allowed[self._end[0] // 32] >> self._end[0] % 32 & 1)
            self._start = output_index if is_spent and may_end else None
        place = len(self._end) if self._start is None else output_index - self._start
        return self._end[place] if place < len(self._end) else None


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
