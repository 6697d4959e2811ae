"""A bound on reasoning, by itself: what it lets come at each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from aioengine.errors import InvalidRequestError
from aioengine.sampling.thinking_budget import ThinkingBudget, end_tokens
from tests.support.tiny import tiny_tokenizer

VOCAB = 100


@dataclass
class Reader:
    """A reader that is told what it has read."""

    is_thinking: bool = False
    num_thought: int = 0


class Grammar:
    """Lets some tokens come."""

    def __init__(self, *allowed: int) -> None:
        self.allowed = allowed
        self.asked: list[int] = []

    def mask(self, token_ids: Sequence[int], output_index: int) -> Tensor:
        self.asked.append(output_index)
        bits = np.zeros(128, dtype=np.uint8)
        bits[[*self.allowed]] = 1
        return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))


def tokens(mask: Tensor | None) -> list[int] | None:
    """The tokens that a mask lets come; None: all."""
    if mask is None:
        return None
    assert mask.dtype == torch.int32 and len(mask) == -(-VOCAB // 32)
    bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
    return [*map(int, np.flatnonzero(bits))]


@pytest.mark.parametrize("end", [[31], [63, 64], [0, 32, 99]])
def test_the_end_comes_once_the_bound_is_reached(end: list[int]) -> None:
    reader = Reader()
    budget = ThinkingBudget(3, end, reader, VOCAB)
    index = 0
    for _ in range(4):
        assert budget.mask((), index) is None  # it may also never think
        index += 1
    reader.is_thinking = True
    for reader.num_thought in range(3):
        assert budget.mask((), index) is None
        index += 1
    reader.num_thought = 3
    for token_id in end:
        for _ in range(2):  # a step may be planned again
            assert tokens(budget.mask((), index)) == [token_id]
        index += 1
    # Read late, it is not said again; a thought that comes later is ended at once.
    assert budget.mask((), index) is None
    reader.is_thinking = False
    assert budget.mask((), index + 1) is None
    reader.is_thinking = True
    assert tokens(budget.mask((), index + 2)) == end[:1]


def test_a_grammar_holds_beside_it() -> None:
    reader = Reader(is_thinking=True)
    grammar = Grammar(1, 2, 33)
    budget = ThinkingBudget(1, [33, 2, 5], reader, VOCAB, grammar)
    assert tokens(budget.mask((), 0)) == [1, 2, 33]
    reader.num_thought, grammar.allowed = 1, (1, 2)
    assert tokens(budget.mask((), 1)) == [1, 2]  # a character has begun
    grammar.allowed = (1, 2, 33)
    assert tokens(budget.mask((), 2)) == [33]
    assert tokens(budget.mask((), 3)) == [2]
    assert tokens(budget.mask((), 4)) == []
    assert grammar.asked == [*range(5)]  # each time: it follows the tokens


def test_the_tokens_of_a_mark() -> None:
    tokenizer = tiny_tokenizer()
    for mark in ("</think>", "[/THINK]", "<｜end｜>"):
        found = end_tokens(tokenizer, mark, len(tokenizer))
        assert tokenizer.decode(found) == mark
        assert found == tokenizer.encode(mark, add_special_tokens=False)
    tokenizer.add_tokens(["</think>"])
    assert end_tokens(tokenizer, "</think>", len(tokenizer)) == [len(tokenizer) - 1]
    with pytest.raises(InvalidRequestError, match="cannot write </think>"):
        end_tokens(tokenizer, "</think>", len(tokenizer) - 1)
