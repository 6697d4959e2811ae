"""Greedy tokens of the engine equal transformers' `generate`, in float64, whatever the company.

Tiny random models, drawn wide, so that each image and each prompt gives different tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from tests.support.engines import settled
from tests.support.tiny import save_tiny_llava, tiny_image

MAX_TOKENS = 10
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)

QUESTIONS = (
    "USER: <image>\nWhat is it? ASSISTANT:",
    "USER: Look closely. <image>\nHow many are there, and where? ASSISTANT:",
    "<image>",
    "USER: First <image> then <image> now compare. ASSISTANT:",
    "USER: no picture here, tell a story. ASSISTANT:",
)


@dataclass(frozen=True)
class Case:
    """A prompt, its images (by seed) and what transformers makes of it."""

    text: str
    images: tuple[int, ...]
    expected: tuple[int, ...]

    async def run(self, engine: AsyncEngine, **options: Any) -> RequestOutput:
        images = [tiny_image(seed) for seed in self.images]
        return await engine.generate(self.text, PARAMS, images=images, **options)


@dataclass(frozen=True)
class Model:
    folder: Path
    cases: tuple[Case, ...]


def _prompts() -> list[tuple[str, tuple[int, ...]]]:
    """Sixteen prompts: each question with different, equal and shared images."""
    prompts: list[tuple[str, tuple[int, ...]]] = []
    for seed in range(4):
        for text in QUESTIONS[: 4 if seed else 5]:
            count = text.count("<image>")
            seeds = (seed, seed) if count == 2 and seed == 1 else (seed, seed + 1)
            prompts.append((text, seeds[:count]))
    return prompts[:16]


def _expect(model: Any, processor: Any, text: str, seeds: tuple[int, ...]) -> tuple[int, ...]:
    images = [tiny_image(seed) for seed in seeds]
    inputs = processor(text=text, images=images or None, return_tensors="pt")
    inputs = {
        name: value.double() if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_TOKENS)
    return tuple(output[0, inputs["input_ids"].shape[1] :].tolist())


@pytest.fixture(scope="module", params=["clip", "siglip"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    hf = save_tiny_llava(folder, torch.float64, tower=request.param)
    processor = AutoProcessor.from_pretrained(folder)
    cases = tuple(
        Case(text, seeds, _expect(hf, processor, text, seeds)) for text, seeds in _prompts()
    )
    return Model(folder, cases)


def engine_for(model: Model, **options: Any) -> AsyncEngine:
    """Small blocks, so that few tokens make many."""
    settings = {"dtype": "float64", "block_size": 4, "kv_cache_bytes": 1 << 21, **options}
    return AsyncEngine.from_pretrained(model.folder, **settings)


async def check_all(engine: AsyncEngine, cases: tuple[Case, ...]) -> None:
    """All cases at once."""
    outputs = await asyncio.gather(*(case.run(engine) for case in cases))
    for case, output in zip(cases, outputs, strict=True):
        assert output.token_ids == case.expected, case.text


def test_the_cases_differ(model: Model) -> None:
    """Else equal tokens would prove nothing."""
    assert len({case.expected for case in model.cases}) > 12
    assert len({token for case in model.cases for token in case.expected}) > 20


async def test_alone(model: Model) -> None:
    async with engine_for(model) as engine:
        for case in model.cases:
            assert (await case.run(engine)).token_ids == case.expected
        await settled(engine)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("budget", [1, 7, 64, 4096])
async def test_sixteen_together(model: Model, budget: int, prefix_caching: bool) -> None:
    async with engine_for(
        model, max_num_batched_tokens=budget, enable_prefix_caching=prefix_caching
    ) as engine:
        await check_all(engine, model.cases)
        await check_all(engine, model.cases)  # with warm caches
        assert (engine.statistics().prefix_hit_tokens > 0) == prefix_caching
        await settled(engine)


@pytest.mark.parametrize("budget", [7, 64])
async def test_an_encoder_cache_too_small_for_all(model: Model, budget: int) -> None:
    async with engine_for(
        model,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
        encoder_cache_bytes=2 * 16 * 48 * 8,  # two images of 16 rows, 48 wide, 8 bytes each
    ) as engine:
        await check_all(engine, model.cases)
        assert engine.statistics().encoder_cache_evictions > 0
        await settled(engine)


@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_forced_preemption(model: Model, prefix_caching: bool) -> None:
    async with engine_for(
        model,
        max_num_batched_tokens=64,
        max_model_len=72,  # the longest case; two requests at once do not fit to their ends
        kv_cache_bytes=18 * 4 * 2 * 2 * (2 * 12) * 8,
        enable_prefix_caching=prefix_caching,
    ) as engine:
        await check_all(engine, model.cases)
        assert engine.statistics().preemptions > 0
        await settled(engine)


@pytest.mark.parametrize("budget", [24, 64])
async def test_images_kept_whole(model: Model, budget: int) -> None:
    async with engine_for(
        model, max_num_batched_tokens=budget, disable_chunked_mm_input=True
    ) as engine:
        await check_all(engine, model.cases)
        await settled(engine)


async def test_run_ahead_of_one_step(model: Model) -> None:
    """What a GPU will do, on the CPU: steps are planned before the tokens before them are known."""
    async with engine_for(model, max_num_batched_tokens=64) as engine:
        engine._core.device.run_ahead = 1
        await check_all(engine, model.cases)
        await settled(engine)


async def test_the_same_text_with_three_images_in_a_row(model: Model) -> None:
    """Placeholder ids are equal, so nothing but the images tells the prompts apart."""
    async with engine_for(model) as engine:
        cases = [case for case in model.cases if case.text == QUESTIONS[0]][:3]
        assert len({case.expected for case in cases}) == 3
        for case in [*cases, *reversed(cases)]:
            assert (await case.run(engine)).token_ids == case.expected


async def test_the_same_image_twice_is_encoded_once(model: Model) -> None:
    case = next(c for c in model.cases if len(c.images) == 2 and len(set(c.images)) == 1)
    async with engine_for(model) as engine:
        output = await case.run(engine)
        assert output.token_ids == case.expected
        assert engine.statistics().encoder_items_run == 1
        assert (output.usage.encoder_items, output.usage.encoder_cached_items) == (2, 1)


async def test_token_ids_and_chat_messages_are_the_same_prompt(model: Model) -> None:
    processor = AutoProcessor.from_pretrained(model.folder)
    case = model.cases[0]
    image = tiny_image(case.images[0])
    ids = processor.tokenizer(case.text)["input_ids"]
    content = [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]
    async with engine_for(model) as engine:
        by_ids = await engine.generate(ids, PARAMS, images=[image])
        assert by_ids.token_ids == case.expected
        by_chat = await engine.generate([{"role": "user", "content": content}], PARAMS)
        assert by_chat.prompt_token_ids == by_ids.prompt_token_ids
        assert by_chat.token_ids == case.expected


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with torch.inference_mode():
        yield
