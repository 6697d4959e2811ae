"""Captured steps on a GPU: tokens are those of steps that are launched, in any company.

Needs the kernels in Triton, which a simulated GPU has none of.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine import AsyncEngine, Prompt, SamplingParams
from aioengine.kernels.triton import are_right_on
from tests.support.engines import running_engine
from tests.support.tiny import save_tiny_llava, tiny_image

PROMPTS = [
    Prompt(text="a b c d e"),
    Prompt(text="a text of some length, and no more than that"),
    Prompt(text="a <image> b", media={"image": [tiny_image(1)]}),
    Prompt(text="<image> and <image>", media={"image": [tiny_image(2), tiny_image(3)]}),
]
CHOICES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "min_tokens": 6, "logit_bias": {3: -100.0}},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "seed": 1},
    {"temperature": 0.7, "min_p": 0.05, "seed": 2},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "logprobs": 2},
]


@pytest.fixture(autouse=True)
def _has_kernels() -> None:
    if not are_right_on(torch.device("cuda", 0)):
        pytest.skip("Triton's kernels do not run here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("captured")
    save_tiny_llava(path)
    return path


async def answers(engine: AsyncEngine, *, at_once: bool) -> list[tuple[int, ...]]:
    asked = [
        (prompt, SamplingParams(**choice, max_tokens=24, ignore_eos="min_tokens" not in choice))
        for prompt in PROMPTS
        for choice in CHOICES
    ]
    if at_once:
        outputs = await asyncio.gather(*(engine.generate(*each) for each in asked))
    else:
        outputs = [await engine.generate(*each) for each in asked]
    return [output.token_ids for output in outputs]


def options(dtype: str, **more: Any) -> dict[str, Any]:
    return {"device": "cuda", "dtype": dtype, "max_num_seqs": 13, "block_size": 16, **more}


async def test_tokens_are_those_of_launched_steps(folder: Path) -> None:
    async with running_engine(folder, **options("float32", enforce_eager=True)) as engine:
        expected = await answers(engine, at_once=False)
    async with running_engine(folder, **options("float32", max_num_batched_tokens=300)) as engine:
        captured = engine._core.loaded.runner._captured
        assert captured is not None and captured._graphs, "nothing was captured"
        for _ in range(3):
            assert await answers(engine, at_once=True) == expected
            await engine.reset_caches()
        assert await answers(engine, at_once=False) == expected
        counts = captured.counts
        assert counts.replayed > 100 and counts.launched < 0.05 * counts.replayed


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_half_precision_beside_cancellations(folder: Path, dtype: str) -> None:
    """What is left of many requests comes to the tokens that it comes to alone."""
    source = random.Random(0)
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    async with running_engine(folder, **options(dtype)) as engine:
        alone = (await engine.generate(PROMPTS[1], greedy)).token_ids
        allocated = None
        for _ in range(6):
            tasks = [
                asyncio.create_task(engine.generate(source.choice(PROMPTS), greedy))
                for _ in range(20)
            ]
            await asyncio.sleep(source.random() * 0.05)
            for task in tasks[::2]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await engine.reset_caches()
            torch.cuda.synchronize()
            now = torch.cuda.memory_allocated()
            allocated = allocated or now
            assert now <= allocated + (4 << 20)
        assert (await engine.generate(PROMPTS[1], greedy)).token_ids == alone
        captured = engine._core.loaded.runner._captured
        assert captured is not None and captured.counts.replayed
