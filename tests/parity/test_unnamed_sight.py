"""Models that read one image and write: as `generate`, or refused in words."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine import AsyncEngine, Embeddings, SamplingParams
from aioengine.errors import InvalidRequestError, ModelLoadError, UnsupportedModalityError
from aioengine.models.encdec.image_to_text import memory_of
from tests.parity.families import MAX_TOKENS, Family
from tests.parity.sweep import make
from tests.parity.sweep_models import SIZES, Prompt, answer, draw, save_folder
from tests.parity.unnamed_sight import UNNAMED, bert_decoder, trocr_decoder, vit_processor
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
    draw(model, 0.3)
    save_folder(model, processor, folder)
    asked = [
        Prompt(text.replace("*", ""), {"images": (IMAGES[index % 3],)})
        for index, text in enumerate(texts)
    ]
    prompts = answer(model, processor, asked, type(model).__name__)
    assert len(prompts) == len(asked)
    features = processor.image_processor([IMAGES[0]], return_tensors="pt")
    with torch.inference_mode():
        mask = features.pop("attention_mask", torch.ones(1, 0))[0].bool()
        placed = {name: torch.as_tensor(value).double() for name, value in features.items()}
        (rows,) = memory_of(model, placed)
    return Saved(folder, prompts, rows[mask] if len(mask) else rows)


def engine_for(folder: Path, **more: Any) -> AsyncEngine:
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 8 << 20, "max_model_len": 60}
    return AsyncEngine.from_pretrained(folder, **{**sizes, **more})


async def check_all(engine: AsyncEngine, saved: Saved) -> None:
    outputs = await asyncio.gather(
        *(engine.generate(each.text, PARAMS, **each.media) for each in saved.prompts)
    )
    assert [output.token_ids for output in outputs] == [each.expected for each in saved.prompts]


def test_the_cases_differ(saved: Saved) -> None:
    """Else equal tokens would prove nothing."""
    assert len({each.expected for each in saved.prompts}) > len(saved.prompts) / 2
    assert saved.prompts[0].expected != saved.prompts[1].expected  # for the image alone


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
        with pytest.raises(UnsupportedModalityError, match="more than 1"):
            await engine.generate("a", PARAMS, images=IMAGES[:2])


@pytest.mark.parametrize(
    ("build_decoder", "words"),
    [
        (bert_decoder, "does not compute what the checkpoint's own module"),
        (trocr_decoder, "does not route attention"),
    ],
)
async def test_decoders_that_are_refused(build_decoder: Any, words: str, tmp_path: Path) -> None:
    processor = vit_processor()
    model = build_decoder(processor.tokenizer)
    draw(model, 0.3)
    save_folder(model, processor, tmp_path)
    with pytest.raises(ModelLoadError, match=words):
        await engine_for(tmp_path).start()
