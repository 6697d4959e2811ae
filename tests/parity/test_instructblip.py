"""InstructBLIP over T5, and an image that becomes other rows beside each text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine import AsyncEngine, Prompt
from aioengine.errors import InvalidRequestError
from tests.parity.families import id_of, vocabulary
from tests.parity.test_blip2_t5 import ASKED, PARAMS, Saved, check_all, expect, images
from tests.parity.test_encdec import T5, draw
from tests.parity.unnamed_families import instructblip, instructblip_processor


def over_t5(tokenizer: Any) -> Any:
    text = {"model_type": "t5", "vocab_size": vocabulary(tokenizer), **T5}
    return instructblip(tokenizer, text)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("instructblip")
    processor = instructblip_processor()
    with torch.random.fork_rng(devices=[]):
        model = over_t5(processor.tokenizer)
    draw(model)
    with torch.no_grad():
        model.language_projection.weight *= 4  # else images weigh little beside words
    model = model.double().eval().requires_grad_(False)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    asked = ((text, *images(index)) if index is not None else (text, None) for text, index in ASKED)
    expected = [expect(model, processor, *each) for each in asked]
    return Saved(folder, expected, torch.empty(0), [id_of(processor.tokenizer, "<image>")])


def engine_for(folder: Path, **more: Any) -> AsyncEngine:
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 8 << 20, "max_model_len": 60}
    return AsyncEngine.from_pretrained(folder, **{**sizes, **more})


def test_the_cases_differ(saved: Saved) -> None:
    """Else equal tokens would prove nothing."""
    assert len(set(saved.expected)) > len(saved.expected) / 2


@pytest.mark.parametrize("budget", [512, 5, 1])
async def test_tokens_equal_generate(saved: Saved, budget: int) -> None:
    async with engine_for(saved.folder, max_num_batched_tokens=budget) as engine:
        assert engine.statistics().model_impl == "transformers"
        for (text, index), expected in zip(ASKED, saved.expected, strict=True):
            output = await engine.generate(text, PARAMS, images=images(index))
            assert output.token_ids == expected, text
        await engine.reset_caches()
        await check_all(engine, saved)
        before = engine.statistics().encoder_items_run
        await check_all(engine, saved)
        assert engine.statistics().encoder_items_run == before


async def test_the_text_that_is_read_may_be_given_by_name(saved: Saved) -> None:
    async with engine_for(saved.folder) as engine:
        (text, index), expected = ASKED[0], saved.expected[0]
        named = Prompt(encoder_text=text, media={"image": images(index)})
        plain = Prompt(text=text, media={"image": images(index)})
        outputs = await asyncio.gather(*(engine.generate(each, PARAMS) for each in (named, plain)))
        assert [output.token_ids for output in outputs] == [expected] * 2


async def test_what_the_q_former_cannot_read_is_refused(saved: Saved) -> None:
    async with engine_for(saved.folder, max_model_len=200) as engine:
        with pytest.raises(InvalidRequestError, match="give text instead of token ids"):
            await engine.generate(Prompt(token_ids=[5, 6], media={"image": images(0)}), PARAMS)
        model = engine._core.loaded.runner.model
        most = model.hf_config.qformer_config.max_position_embeddings
        with pytest.raises(InvalidRequestError, match=f"reads {most} at most"):
            await engine.generate("?" * (most + 1), PARAMS, images=images(0))
        output = await engine.generate(ASKED[0][0], PARAMS, images=images(ASKED[0][1]))
        assert output.token_ids == saved.expected[0]
