"""Prompts that are too long by orders of magnitude are refused without the work that they ask for.

One thread lays out all prompts, so whatever a hopeless one costs there is paid by those behind it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aioengine import Prompt
from aioengine.errors import PromptTooLongError
from tests.support.engines import greedy, running_engine
from tests.support.tiny import save_tiny_llava

MAX_MODEL_LEN = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_llava")
    save_tiny_llava(path)
    return path


class Untouched(list[int]):
    """Token ids that nobody may go through."""

    def __iter__(self) -> Any:
        raise AssertionError("every id was looked at")


ASKED = {"role": "user", "content": "Hello"}


def called(text: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}


@pytest.mark.parametrize(
    "prompt",
    [
        "hello world, how are you? " * 40_000,
        Prompt(text="x" * 1_000_000),
        Prompt(token_ids=Untouched([20] * 1_000_000)),
        [{"role": "user", "content": "hello world, how are you? " * 40_000}],
        [ASKED, {"role": "assistant", "content": "", "reasoning_content": "hm " * 400_000}],
        [ASKED, {"role": "assistant", "tool_calls": [called("hm " * 400_000)]}],
        [ASKED, {"role": "assistant", "tool_calls": [called("hm " * 10_000)] * 40}],
    ],
    ids=["text", "text in a prompt", "ids", "chat", "thought", "call", "calls"],
)
async def test_a_hopeless_prompt_is_not_tokenised(
    folder: Path, monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    async with running_engine(folder, max_model_len=MAX_MODEL_LEN) as engine:
        lengths: list[int] = []
        front = engine._core.loaded.layout_processor
        tokenize = front.tokenize

        def watch(text: str, **options: Any) -> list[int]:
            lengths.append(len(text))
            return tokenize(text, **options)

        monkeypatch.setattr(front, "tokenize", watch)
        with pytest.raises(PromptTooLongError) as caught:
            await engine.generate(prompt, greedy())
        assert caught.value.parameter == "prompt"
        assert max(lengths, default=0) < 1_000_000
