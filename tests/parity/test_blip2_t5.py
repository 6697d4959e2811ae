"""BLIP-2 over T5: greedy tokens equal transformers' `generate`, in float64."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from PIL import Image

from aioengine import AsyncEngine, Embeddings, Prompt, SamplingParams
from aioengine.errors import (
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    PlaceholderMismatchError,
    PromptTooLongError,
    UnsupportedModalityError,
)
from tests.parity.families import MAX_TOKENS, blip2_processor, id_of, vocabulary
from tests.parity.test_encdec import T5, draw
from tests.support.engines import settled
from tests.support.tiny import tiny_image

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
ROWS = 4
IMAGES = tuple(tiny_image(i).resize(size) for i, size in enumerate(((40, 30), (30, 60), (9, 9))))
ASKED: tuple[tuple[str, int | None], ...] = (
    ("Question: what is it? Answer:", 0),
    ("Question: what is it? Answer:", 1),
    ("tell a story", 0),
    ("tell a story", 2),
    ("", 1),
    ("tell a story", None),
)
"""Texts, and the image of each."""
NUM_READ = len(ASKED)
KINDS: Mapping[str, Mapping[str, Any]] = {
    "t5": {},
    "flan-t5": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}


@dataclass(frozen=True)
class Saved:
    """A model's folder, what transformers makes of what is asked, and an image's rows."""

    folder: Path
    expected: list[tuple[int, ...]]
    rows: torch.Tensor
    token_ids: list[int]


def build(kind: str) -> tuple[Any, Any]:
    processor = blip2_processor()
    config = hf.Blip2Config(
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
        qformer_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "encoder_hidden_size": 32, "vocab_size": 32,
        },
        text_config={
            "model_type": "t5", "vocab_size": vocabulary(processor.tokenizer), **T5, **KINDS[kind],
        },
        num_query_tokens=ROWS,
        image_token_index=id_of(processor.tokenizer, "<image>"),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        model = hf.Blip2ForConditionalGeneration(config)
    draw(model)
    with torch.no_grad():
        model.language_projection.weight *= 4  # else images weigh little beside words
    return model, processor


@torch.inference_mode()
def expect(model: Any, processor: Any, text: str, image: Image.Image | None) -> tuple[int, ...]:
    options = {"do_sample": False, "max_new_tokens": MAX_TOKENS}
    if image is None:
        inputs = processor.tokenizer(text, return_tensors="pt")
        output = model.language_model.generate(input_ids=inputs["input_ids"], **options)
    else:
        inputs = processor(text=text, images=image, return_tensors="pt")
        inputs["pixel_values"] = inputs["pixel_values"].double()
        output = model.generate(**inputs, **options)
    assert output[0, 0] == 0
    return tuple(output[0, 1:].tolist())


@pytest.fixture(scope="module", params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param)
    model, processor = build(request.param)
    model = model.double().eval().requires_grad_(False)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    asked = ((text, None if index is None else IMAGES[index]) for text, index in ASKED)
    expected = [expect(model, processor, text, image) for text, image in asked]
    inputs = processor(text=ASKED[0][0], images=IMAGES[0], return_tensors="pt")
    rows = model.get_image_features(inputs["pixel_values"].double()).pooler_output[0]
    return Saved(folder, expected, rows, inputs["input_ids"][0].tolist())


def engine_for(saved: Saved, **more: Any) -> AsyncEngine:
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 8 << 20, "max_model_len": 60}
    return AsyncEngine.from_pretrained(saved.folder, **{**sizes, **more})


def images(index: int | None) -> list[Image.Image]:
    return [] if index is None else [IMAGES[index]]


async def check_all(engine: AsyncEngine, saved: Saved) -> None:
    outputs = await asyncio.gather(
        *(engine.generate(text, PARAMS, images=images(index)) for text, index in ASKED)
    )
    assert [output.token_ids for output in outputs] == saved.expected


def test_the_cases_differ(saved: Saved) -> None:
    """Else equal tokens would prove nothing."""
    assert len(set(saved.expected)) == len(saved.expected)
    assert len({token for tokens in saved.expected for token in tokens}) >= 5


@pytest.mark.parametrize("budget", [512, 5, 1])
async def test_tokens_equal_generate(saved: Saved, budget: int) -> None:
    async with engine_for(saved, max_num_batched_tokens=budget) as engine:
        for (text, index), expected in zip(ASKED, saved.expected, strict=True):
            output = await engine.generate(text, PARAMS, images=images(index))
            assert output.token_ids == expected, text
        await engine.reset_caches()
        await check_all(engine, saved)
        before = engine.statistics()
        assert before.encoder_items_run == 2 * NUM_READ
        await check_all(engine, saved)
        await settled(engine)
        now = engine.statistics()
        assert now.encoder_items_run == before.encoder_items_run
        assert now.kv_blocks_free == now.kv_blocks_total and not now.encoder_cache_referenced


@pytest.mark.parametrize("saved", ["flan-t5"], indirect=True)
async def test_without_a_prefix_cache(saved: Saved) -> None:
    async with engine_for(saved, enable_prefix_caching=False) as engine:
        await check_all(engine, saved)
        await check_all(engine, saved)
        assert engine.statistics().encoder_items_run == NUM_READ


@pytest.mark.parametrize("saved", ["flan-t5"], indirect=True)
async def test_other_forms_of_a_prompt(saved: Saved) -> None:
    (text, index), expected = ASKED[0], saved.expected[0]
    plain = saved.token_ids[ROWS:]
    media: dict[str, Sequence[Any]] = {"image": images(index)}
    async with engine_for(saved) as engine:
        for prompt in (
            Prompt(text=text, media=media),
            Prompt(encoder_text=text, media=media),
            Prompt(token_ids=saved.token_ids, media=media),
            Prompt(encoder_token_ids=plain, media=media),
            Prompt(text=text, decoder_token_ids=[0], media=media),
        ):
            assert (await engine.generate(prompt, PARAMS)).token_ids == expected
        assert engine.statistics().encoder_items_run == 1
        output = await engine.generate(text, PARAMS, images=[Embeddings(saved.rows)])
        assert output.token_ids == expected
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, n=2)
        output = await engine.generate(text, params, images=images(index))
        assert {each.token_ids for each in output.outputs} == {expected}


@pytest.mark.parametrize("saved", ["flan-t5"], indirect=True)
async def test_what_makes_no_prompt_is_refused(saved: Saved) -> None:
    image = IMAGES[0]
    async with engine_for(saved) as engine:
        cases: list[tuple[str | Prompt, list[Any], type[InvalidRequestError]]] = [
            ("a <image> b", [image], PlaceholderMismatchError),
            ("a <image> b", [], PlaceholderMismatchError),
            (Prompt(token_ids=saved.token_ids), [], PlaceholderMismatchError),
            ("a", [image, image], UnsupportedModalityError),
            (Prompt(decoder_text="a"), [], InvalidRequestError),
            (Prompt(token_ids=[5] * 58, media={"image": [image]}), [], PromptTooLongError),
        ]
        for prompt, pil_images, kind in cases:
            with pytest.raises(kind):
                await engine.generate(prompt, PARAMS, images=pil_images)
        output = await engine.generate(ASKED[0][0], PARAMS, images=[image])
        assert output.token_ids == saved.expected[0]


@pytest.mark.parametrize("saved", ["t5"], indirect=True)
async def test_other_language_models_are_refused(saved: Saved, tmp_path: Path) -> None:
    config = json.loads((saved.folder / "config.json").read_text())
    config["text_config"] = {"model_type": "pegasus", "d_model": 48}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="'pegasus' is not supported"):
        async with AsyncEngine.from_pretrained(tmp_path, device="cpu"):
            pass


async def test_a_config_that_names_no_token_for_images(saved: Saved, tmp_path: Path) -> None:
    """Texts are answered; an image is refused in words."""
    folder = shutil.copytree(saved.folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["image_token_index"]
    (folder / "config.json").write_text(json.dumps(config))
    sizes = {"device": "cpu", "kv_cache_bytes": 8 << 20, "encoder_cache_bytes": 1 << 20}
    async with AsyncEngine.from_pretrained(folder, max_model_len=60, **sizes) as engine:
        text, index = ASKED[-1]
        assert index is None
        assert (await engine.generate(text, PARAMS)).token_ids == saved.expected[-1]
        with pytest.raises(EngineError, match="image_token_index"):
            await engine.generate(ASKED[0][0], PARAMS, images=images(0))
        assert (await engine.generate(text, PARAMS)).token_ids == saved.expected[-1]
