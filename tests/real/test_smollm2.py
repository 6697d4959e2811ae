"""A real chat model: its answers are right, and are transformers' own, token by token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from aioengine import AsyncEngine, SamplingParams
from tests.real.conftest import asset

MAX_TOKENS = 48
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
FRANCE = "What is the capital of France?"
QUESTIONS = (
    FRANCE,
    "Name three primary colours.",
    "Write one sentence about the sea.",
    "How many days are there in a week?",
)


def messages(question: str) -> list[dict[str, Any]]:
    """A conversation that begins."""
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def folder() -> Path:
    return asset("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, tuple[int, ...]]:
    """What `generate` answers, one question at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    answers = {}
    for question in QUESTIONS:
        inputs = tokenizer.apply_chat_template(
            messages(question), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_TOKENS)
        answers[question] = tuple(output[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


async def test_it_knows_the_capital_of_france(
    folder: Path, expected: dict[str, tuple[int, ...]]
) -> None:
    async with AsyncEngine.from_pretrained(folder, dtype="float32", device="cpu") as engine:
        output = await engine.generate(messages(FRANCE), PARAMS)
    assert output.token_ids == expected[FRANCE]
    assert output.text.strip() == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"


async def test_answers_are_the_same_in_company(
    folder: Path, expected: dict[str, tuple[int, ...]]
) -> None:
    async with AsyncEngine.from_pretrained(folder, dtype="float32", device="cpu") as engine:
        for _ in range(2):  # with a cold and with a warm prefix cache
            outputs = await asyncio.gather(
                *(engine.generate(messages(question), PARAMS) for question in QUESTIONS)
            )
            answers = [output.token_ids for output in outputs]
            assert answers == [expected[question] for question in QUESTIONS]
        assert engine.statistics().prefix_hit_tokens > 0
