"""Models that read one image and write: as `generate`, or refused in words."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioengine import AsyncEngine, Embeddings, SamplingParams
from aioengine.errors import InvalidRequestError, ModelLoadError, UnsupportedModalityError
from aioengine.models.encdec.decoder_memory import memory_of
from tests.parity.families import MAX_TOKENS, Family, save_folder
from tests.parity.sweep import SPREADS, make
from tests.parity.sweep_models import SIZES, Prompt, answer, draw
from tests.parity.unnamed_sight import UNNAMED
from tests.support.tiny import tiny_image

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
IMAGES = [tiny_image(index).resize(size) for index, size in enumerate(SIZES)]


@dataclass(frozen=True)
class Saved:
    """A model's folder, what transformers makes of each prompt, and the first image's rows."""

    folder: Path
    prompts: Sequence[Prompt]
    rows: torch.Tensor


def build(name: str) -> tuple[Any, Any, Sequence[str]]:
    if name == "pix2struct":
        model, processor, _ = make("Pix2StructForConditionalGeneration")
        return model, processor, UNNAMED["vit over gpt2"].texts
    family: Family = UNNAMED[name]
    processor = family.processor()
    with torch.random.fork_rng(devices=[]):
        return family.model(processor.tokenizer), processor, family.texts


@pytest.fixture(scope="module", params=[*UNNAMED, "pix2struct"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("sight")
    model, processor, texts = build(request.param)
    asked = [
        Prompt(text.replace("*", ""), {"images": (IMAGES[index % 3],)})
        for index, text in enumerate(texts)
    ]
    for spread in SPREADS:
        draw(model, spread)
        prompts = answer(model, processor, asked, type(model).__name__)
        if differ(prompts):
            break
    assert len(prompts) == len(asked)
    save_folder(model, processor, folder)
    features = processor.image_processor([IMAGES[0]], return_tensors="pt")
    with torch.inference_mode():
        mask = features.pop("attention_mask", torch.ones(1, 0))[0].bool()
        placed = {name: torch.as_tensor(value).double() for name, value in features.items()}
        (rows,), _ = memory_of(model, placed)
    return Saved(folder, prompts, rows[mask] if len(mask) else rows)


def engine_for(folder: Path, **more: Any) -> AsyncEngine:
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 8 << 20, "max_model_len": 60}
    return AsyncEngine.from_pretrained(folder, **{**sizes, **more})


async def check_all(engine: AsyncEngine, saved: Saved) -> None:
    outputs = await asyncio.gather(
        *(engine.generate(each.text, PARAMS, **each.media) for each in saved.prompts)
    )
    assert [output.token_ids for output in outputs] == [each.expected for each in saved.prompts]


def differ(prompts: Sequence[Prompt]) -> bool:
    """Whether most answers do, and the first two, for the image alone."""
    answers = [each.expected for each in prompts]
    return len({*answers}) > len(answers) / 2 and answers[0] != answers[1]


def test_the_cases_differ(saved: Saved) -> None:
    """Else equal tokens would prove nothing."""
    assert differ(saved.prompts)


@pytest.mark.parametrize("budget", [512, 5, 1])
async def test_tokens_equal_generate(saved: Saved, budget: int) -> None:
    async with engine_for(saved.folder, max_num_batched_tokens=budget) as engine:
        assert engine.statistics().model_impl == "transformers"
        for each in saved.prompts[:3]:
            output = await engine.generate(each.text, PARAMS, **each.media)
            assert output.token_ids == each.expected
        await engine.reset_caches()
        await check_all(engine, saved)
        before = engine.statistics()
        await check_all(engine, saved)  # with prefix, encoder and cross-attention caches warm
        now = engine.statistics()
        assert now.encoder_items_run == before.encoder_items_run
        assert now.kv_blocks_free == now.kv_blocks_total and not now.encoder_cache_referenced


async def test_rows_that_were_computed_elsewhere(saved: Saved) -> None:
    async with engine_for(saved.folder) as engine:
        (each, *_) = saved.prompts
        output = await engine.generate(each.text, PARAMS, images=[Embeddings(saved.rows)])
        assert output.token_ids == each.expected


async def test_wrong_requests(saved: Saved) -> None:
    async with engine_for(saved.folder) as engine:
        with pytest.raises(InvalidRequestError, match="give it an image"):
            await engine.generate("a", PARAMS)
        with pytest.raises(UnsupportedModalityError, match="at most 1 "):
            await engine.generate("a", PARAMS, images=IMAGES[:2])


async def test_an_image_into_which_text_is_drawn_is_refused(tmp_path: Path) -> None:
    model, processor, _ = make("Pix2StructForConditionalGeneration")
    processor.image_processor.is_vqa = True
    save_folder(model, processor, tmp_path)
    with pytest.raises(ModelLoadError, match="draws the prompt into the image"):
        await engine_for(tmp_path).start()


async def test_an_image_processor_and_a_tokenizer_are_enough(tmp_path: Path) -> None:
    model, processor, _ = build("vit over gpt2")
    draw(model, 0.3)
    save_folder(model, processor, tmp_path)
    (tmp_path / "processor_config.json").unlink()
    asked = [Prompt("", {"images": (image,)}) for image in IMAGES]
    async with engine_for(tmp_path) as engine:
        for each in answer(model, processor, asked, ""):
            output = await engine.generate(each.text, PARAMS, **each.media)
            assert output.token_ids == each.expected


@torch.inference_mode()
def test_a_whole_model_is_left_as_it_is() -> None:
    model, processor, _ = build("vit over mbart")
    decoder, images = model.get_decoder(), processor.image_processor(IMAGES[:1])
    pixels = torch.as_tensor(np.stack(images["pixel_values"]))
    rows, mask = memory_of(model, {"pixel_values": pixels})
    assert mask is None and model.get_decoder() is decoder
    expected = model.enc_to_dec_proj(model.encoder(pixels).last_hidden_state)
    torch.testing.assert_close(rows, expected, rtol=0, atol=0)
