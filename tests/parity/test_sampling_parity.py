"""Greedy tokens under penalties, biases and bans equal transformers' `generate`, in float64; log
probabilities equal those of transformers' own forward pass."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from aioengine import AsyncEngine, Prompt, RequestOutput, SamplingParams
from tests.support.tiny import save_tiny_llava, tiny_image

MAX_TOKENS = 12
TEXT = "USER: <image>\nWhat is it, what is it, what is it? ASSISTANT:"

PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "encouraged repetition": ({"repetition_penalty": 0.6}, {"repetition_penalty": 0.6}),
    "bias": (
        {"logit_bias": {7: 4.0, 9: -3.0, 11: 3.5}},
        {"sequence_bias": [[[7], 4.0], [[9], -3.0], [[11], 3.5]]},
    ),
    "bias and repetition": (
        {"logit_bias": {7: 4.0}, "repetition_penalty": 1.3},
        {"sequence_bias": [[[7], 4.0]], "repetition_penalty": 1.3},
    ),
}


@dataclass(frozen=True)
class Model:
    folder: Path
    hf: Any
    processor: Any

    def inputs(self, image: int) -> dict[str, torch.Tensor]:
        made = self.processor(text=TEXT, images=[tiny_image(image)], return_tensors="pt")
        return {k: v.double() if v.is_floating_point() else v for k, v in made.items()}

    def generate(self, image: int, **options: Any) -> tuple[int, ...]:
        inputs = self.inputs(image)
        settings = {"do_sample": False, "max_new_tokens": MAX_TOKENS, **options}
        found = self.hf.generate(**inputs, **settings)
        return tuple(found[0, inputs["input_ids"].shape[1] :].tolist())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("sampling")
    hf = save_tiny_llava(folder, torch.float64)
    return Model(folder, hf, AutoProcessor.from_pretrained(folder))


def engine_for(model: Model, **options: Any) -> AsyncEngine:
    settings = {"dtype": "float64", "block_size": 4, "kv_cache_bytes": 1 << 21, **options}
    return AsyncEngine.from_pretrained(model.folder, **settings)


def params(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, **options)


async def ask(engine: AsyncEngine, image: int, **options: Any) -> RequestOutput:
    return await engine.generate(TEXT, params(**options), images=[tiny_image(image)])


@pytest.mark.parametrize("run_ahead", [0, 1])
async def test_all_at_once(model: Model, run_ahead: int) -> None:
    """With run-ahead the host does not know the last token that a penalty counts."""
    async with engine_for(model) as engine:
        engine._core.device.run_ahead = run_ahead
        jobs = [(name, image) for name in PAIRS for image in range(3)]
        outputs = await asyncio.gather(*(ask(engine, p, **PAIRS[name][0]) for name, p in jobs))
    plain = {image: model.generate(image) for image in range(3)}
    changed = 0
    for (name, image), output in zip(jobs, outputs, strict=True):
        expected = model.generate(image, **PAIRS[name][1])
        assert output.token_ids == expected, name
        changed += expected != plain[image]
    assert changed > len(jobs) / 2, "parameters that change nothing prove nothing"


@pytest.mark.parametrize("budget", [1, 7, 64])
async def test_penalties_in_little_room(model: Model, budget: int) -> None:
    """Room for three prompts, but not for what follows them: of three at once, one is preempted."""
    options, hf_options = PAIRS["bias and repetition"]
    num_blocks = 3 * (model.inputs(0)["input_ids"].shape[1] // 4 + 1) + 1
    async with engine_for(model) as engine:
        block_bytes = (1 << 21) // engine.statistics().kv_blocks_total
    settings = {
        "max_num_batched_tokens": budget,
        "max_model_len": 64,
        "kv_cache_bytes": block_bytes * num_blocks,
        "enable_prefix_caching": False,
    }
    async with engine_for(model, **settings) as engine:
        for image in range(3):  # so that the three begin together
            await ask(engine, image)
        outputs = await asyncio.gather(*(ask(engine, p, **options) for p in range(3)))
        assert engine.statistics().preemptions > 0 or budget < 64
    for image, output in enumerate(outputs):
        assert output.token_ids == model.generate(image, **hf_options)


async def test_bad_words_and_allowed_tokens(model: Model) -> None:
    free = model.generate(0)
    async with engine_for(model) as engine:
        tokenizer = engine.tokenizer
        word = tokenizer.decode([free[0]])
        barred = await ask(engine, 0, bad_words=[word])
        pair = tokenizer.decode(list(free[1:3]))
        barred_pair = await ask(engine, 0, bad_words=[pair])
        only = await ask(engine, 0, allowed_token_ids=[20, 21, 22], ignore_eos=True)
    assert free[0] not in barred.token_ids
    pairs = list(zip(barred_pair.token_ids, barred_pair.token_ids[1:], strict=False))
    assert tuple(tokenizer.encode(pair, add_special_tokens=False)) not in pairs
    assert set(only.token_ids) <= {20, 21, 22} and len(only.token_ids) == MAX_TOKENS


@pytest.mark.parametrize("budget", [5, 64, 4096])
async def test_log_probabilities(model: Model, budget: int) -> None:
    async with engine_for(model, max_num_batched_tokens=budget) as engine:
        await ask(engine, 0)  # so that there is a prefix that must not be used
        output = await ask(engine, 0, logprobs=3, prompt_logprobs=2, repetition_penalty=1.3)
        again = await engine.generate(
            Prompt(text=TEXT, media={"image": [tiny_image(0)]}), params(logprobs=0)
        )
    inputs = model.inputs(0)
    ids = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
    assert tuple(inputs["input_ids"][0].tolist()) == output.prompt_token_ids
    mask = torch.ones_like(ids)
    with torch.no_grad():
        logits = model.hf(**{**inputs, "input_ids": ids, "attention_mask": mask}).logits[0]
    logprobs = logits.log_softmax(-1)
    start = len(output.prompt_token_ids)
    (completion,) = output.outputs
    assert completion.logprobs is not None and output.prompt_logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    scored = dict(enumerate(completion.logprobs, start))
    scored |= {i: found for i, found in enumerate(output.prompt_logprobs) if found is not None}
    image_id = model.hf.config.image_token_id
    assert set(scored) == {i for i in range(1, ids.shape[1]) if ids[0, i] != image_id}
    for position, found in scored.items():
        row, token_id = logprobs[position - 1], int(ids[0, position])
        assert next(iter(found)) == token_id
        most = row.topk(3 if position >= start else 2).indices.tolist()
        assert set(found) == {token_id, *most}
        for other, (logprob, rank) in found.items():
            assert logprob == pytest.approx(row[other].item(), abs=1e-5)
            assert rank == (row > row[other]).sum() + 1
    assert again.prompt_logprobs is None
    assert again.outputs[0].logprobs is not None
    assert all(len(found) == 1 for found in again.outputs[0].logprobs)
