"""Answers written in advance, which a tiny model is made to give, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from aioengine import AsyncEngine
from aioengine.engine.input_processor import InputProcessor
from aioengine.processors.chat.renderer import ChatPrompt
from tests.support.tiny import EOS


class Script:
    """A constraint that leaves one token each time: the next of an answer, and the end."""

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self._token_ids = [*token_ids, EOS]
        self._num_words = -(-vocab_size // 32)

    def mask(self, token_ids: Sequence[int], output_index: int) -> torch.Tensor:
        token_id = self._token_ids[output_index]
        words = np.zeros(self._num_words, dtype=np.uint32)
        words[token_id // 32] = 1 << token_id % 32
        return torch.from_numpy(words.view(np.int32))


def script(engine: AsyncEngine, answer: str) -> int:
    """Have the engine's answers be this text; returns its number of tokens, the end among them."""
    token_ids = engine.tokenizer.encode(answer, add_special_tokens=False)
    size = engine._core.loaded.runner.model.vocab_size

    async def compiled(*_: object) -> list[Script]:
        return [Script(token_ids, size)]

    engine._core.input_processor._compile = compiled
    return len(token_ids) + 1


def script_by(engine: AsyncEngine, choose: Callable[[str], str]) -> None:
    """Have each of the engine's answers be what `choose` makes of its prompt."""
    processor = engine._core.input_processor
    processor._compile = partial(_chosen, processor, choose)


def script_all(patch: pytest.MonkeyPatch, choose: Callable[[str], str]) -> None:
    """Do the same for all engines."""

    async def compiled(processor: InputProcessor, *given: Any) -> list[Script]:
        return await _chosen(processor, choose, *given)

    patch.setattr(InputProcessor, "_compile", compiled)


async def _chosen(
    processor: InputProcessor,
    choose: Callable[[str], str],
    _params: object,
    chat: ChatPrompt | None = None,
) -> list[Script]:
    assert chat is not None
    tokenizer = processor._loaded.loop_processor.info.get_tokenizer()
    answer = choose(tokenizer.decode(chat.token_ids))
    size = processor._loaded.runner.model.vocab_size
    return [Script(tokenizer.encode(answer, add_special_tokens=False), size)]
