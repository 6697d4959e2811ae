"""Florence-2: greedy tokens equal transformers' `generate`, in float64."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from PIL import Image

from aioengine import AsyncEngine, Embeddings, Prompt, SamplingParams
from aioengine.errors import (
    InvalidRequestError,
    ModelLoadError,
    PlaceholderMismatchError,
    UnsupportedModalityError,
)
from tests.parity.families import MAX_TOKENS, id_of, vocabulary
from tests.parity.test_encdec import draw
from tests.processors.hf_processors import tokenizer_with
from tests.support.tiny import tiny_image

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SIDE, ROWS = 32, 17
IMAGES = tuple(tiny_image(i).resize(size) for i, size in enumerate(((40, 30), (30, 60), (9, 9))))
ASKED: tuple[tuple[str, int | None], ...] = (
    ("<OD>", 0),
    ("<OD>", 1),
    ("<CAPTION>", 0),
    ("<CAPTION>", 2),
    ("<OPEN_VOCABULARY_DETECTION> a red circle", 1),
    ("What is above the blue square?", 2),
    ("", 0),
    ("tell a story", None),
    ("<OCR>", None),
)
"""Texts, and the image of each."""
NUM_READ = len(ASKED)


@dataclass(frozen=True)
class Saved:
    """A model's folder, what transformers makes of what is asked, and an image's rows."""

    folder: Path
    expected: list[tuple[int, ...]]
    rows: torch.Tensor
    token_ids: list[int]


def build() -> tuple[Any, Any]:
    tokenizer = tokenizer_with("<loc_0>", "<loc_1>", image_token="<image>")
    image_processor = hf.CLIPImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, do_center_crop=False, image_seq_length=ROWS
    )
    config = hf.Florence2Config(
        vision_config={
            "depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2],
            "patch_padding": [3, 1], "patch_prenorm": [False, True], "embed_dim": [8, 16],
            "num_heads": [2, 2], "num_groups": [2, 2], "window_size": 3, "projection_dim": 48,
        },
        text_config={
            "model_type": "bart", "vocab_size": vocabulary(tokenizer), "d_model": 48,
            "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
            "max_position_embeddings": 96, "scale_embedding": True, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
        },
        image_token_id=id_of(tokenizer, "<image>"),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        model = hf.Florence2ForConditionalGeneration(config)
    draw(model)
    model.generation_config.forced_eos_token_id = None
    model.generation_config.forced_bos_token_id = 1
    model.generation_config.decoder_start_token_id = 2
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    return model, hf.Florence2Processor(image_processor, tokenizer)


@torch.inference_mode()
def expect(model: Any, processor: Any, text: str, image: Image.Image | None) -> tuple[int, ...]:
    given = {} if image is None else {"images": [image]}
    inputs = processor(text=text, **given, return_tensors="pt")
    if image is not None:
        inputs["pixel_values"] = inputs["pixel_values"].double()
    output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_TOKENS + 1)
    assert output[0, :2].tolist() == [2, 1]
    return tuple(output[0, 2:].tolist()[:MAX_TOKENS])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("florence2")
    model, processor = build()
    model = model.double().eval().requires_grad_(False)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    asked = ((text, None if index is None else IMAGES[index]) for text, index in ASKED)
    expected = [expect(model, processor, text, image) for text, image in asked]
    inputs = processor(text=ASKED[0][0], images=[IMAGES[0]], return_tensors="pt")
    rows = model.get_image_features(inputs["pixel_values"].double()).pooler_output[0]
    return Saved(folder, expected, rows, inputs["input_ids"][0].tolist())


def engine_for(saved: Saved, **more: Any) -> AsyncEngine:
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 8 << 20}
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
        now = engine.statistics()
        assert now.encoder_items_run == before.encoder_items_run
        assert now.kv_blocks_free == now.kv_blocks_total and not now.encoder_cache_referenced


async def test_without_a_prefix_cache(saved: Saved) -> None:
    async with engine_for(saved, enable_prefix_caching=False) as engine:
        await check_all(engine, saved)
        await check_all(engine, saved)
        assert engine.statistics().encoder_items_run == NUM_READ


async def test_other_forms_of_a_prompt(saved: Saved) -> None:
    (text, index), expected = ASKED[0], saved.expected[0]
    image_token_id = saved.token_ids[0]
    plain = saved.token_ids[ROWS:]
    assert image_token_id not in plain
    media: dict[str, Sequence[Any]] = {"image": images(index)}
    async with engine_for(saved) as engine:
        for prompt in (
            Prompt(text=text, media=media),
            Prompt(encoder_text=text, media=media),
            Prompt(token_ids=saved.token_ids, media=media),
            Prompt(token_ids=[image_token_id, *plain], media=media),
            Prompt(encoder_token_ids=plain, media=media),
            Prompt(text=text, decoder_token_ids=[2, 1], media=media),
        ):
            assert (await engine.generate(prompt, PARAMS)).token_ids == expected
        assert engine.statistics().encoder_items_run == 1
        output = await engine.generate(text, PARAMS, images=[Embeddings(saved.rows)])
        assert output.token_ids == expected
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, n=2)
        output = await engine.generate(text, params, images=images(index))
        assert {each.token_ids for each in output.outputs} == {expected}


async def test_what_makes_no_prompt_is_refused(saved: Saved) -> None:
    image = IMAGES[0]
    async with engine_for(saved) as engine:
        for text, pil_images, kind in (
            ("<OD> of a cat", [image], InvalidRequestError),
            ("a <image> b", [image], PlaceholderMismatchError),
            ("a <image> b", [], PlaceholderMismatchError),
            ("<OD>", [image, image], UnsupportedModalityError),
            ("", [], InvalidRequestError),
        ):
            with pytest.raises(kind):
                await engine.generate(text, PARAMS, images=pil_images)
        # Only the encoder sees that the tower has not made the promised rows.
        small = {"size": {"height": 16, "width": 16}}
        with pytest.raises(InvalidRequestError, match="could not be encoded"):
            await engine.generate(
                Prompt(text="<OD>", media={"image": [image]}, mm_processor_kwargs=small), PARAMS
            )
        output = await engine.generate("<OD>", PARAMS, images=[image])
        assert output.token_ids == saved.expected[0]


async def test_a_checkpoint_of_the_first_release(saved: Saved, tmp_path: Path) -> None:
    config = json.loads((saved.folder / "config.json").read_text())
    config["text_config"]["model_type"] = "florence2_language"
    config["vision_config"] = {"model_type": "davit", "dim_embed": [8, 16]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="florence-community"):
        async with AsyncEngine.from_pretrained(tmp_path, device="cpu"):
            pass
