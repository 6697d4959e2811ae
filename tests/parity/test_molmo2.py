"""Molmo 2: tokens equal transformers' `generate`, images are processed as transformers would."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from tokenizers import processors
from torch.nn.functional import interpolate
from transformers.image_utils import SizeDict

from aioengine import AsyncEngine, Embeddings, Prompt, SamplingParams
from aioengine.errors import (
    InvalidRequestError,
    MediaError,
    ModelLoadError,
    UnsupportedModalityError,
)
from aioengine.media_pipeline.worker_main import _make_processor
from aioengine.media_pipeline.worker_pool import _describe_setup
from aioengine.models.molmo.molmo2 import Molmo2ProcessingInfo
from aioengine.processors.info import load_context
from aioengine.processors.items import ImageProcessorItems, MultiModalDataItems
from tests.parity.families import MAX_TOKENS, TEXT, Case, Family, cases, id_of, save
from tests.processors.conftest import make_tokenizer
from tests.support.tiny import tiny_image

pytest.importorskip("transformers.models.molmo2", reason="this transformers has no Molmo 2")
from aioengine.processors.hf.molmo2 import Molmo2ImageProcessor, Molmo2Processor

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
MARKS = (
    "<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<|image|>",
    "<im_low>", "<frame_start>", "<frame_end>", "<|video|>",
)  # fmt: skip
LEAST_BUDGET = 200
"""Two images, and the text between them, are computed in one step."""


def tiny_processor() -> Molmo2Processor:
    """Crops of 32 pixels, patches of 4; a tokenizer that puts nothing before a text."""
    base = make_tokenizer("bytes")._tokenizer
    base.post_processor = processors.ByteLevel()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=base,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
    )
    tokenizer.add_tokens(list(MARKS), special_tokens=True)
    images = Molmo2ImageProcessor(
        size={"height": 32, "width": 32}, patch_size=4, overlap_margins=[2, 2], max_crops=4
    )
    return Molmo2Processor(images, None, tokenizer)


def tiny_model(tokenizer: Any) -> Any:
    first = min(id_of(tokenizer, mark) for mark in MARKS)
    config = hf.Molmo2Config(
        text_config={
            **TEXT, "vocab_size": first, "additional_vocab_size": 16, "head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 16,
            "num_attention_heads": 2, "num_key_value_heads": 2, "image_size": [32, 32],
            "patch_size": 4,
        },
        adapter_config={
            "vision_feature_layer": [2, 0], "hidden_size": 32, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
            "text_hidden_size": 48,
        },
        image_start_token_id=id_of(tokenizer, "<im_start>"),
        low_res_image_start_token_id=id_of(tokenizer, "<low_res_im_start>"),
        image_end_token_id=id_of(tokenizer, "<im_end>"),
        image_patch_id=id_of(tokenizer, "<im_patch>"),
        frame_start_token_id=id_of(tokenizer, "<frame_start>"),
        frame_end_token_id=id_of(tokenizer, "<frame_end>"),
        tie_word_embeddings=False,
    )  # fmt: skip
    return hf.Molmo2ForConditionalGeneration(config)


FAMILY = Family(processor=tiny_processor, model=tiny_model, place="<|image|>")


@dataclass(frozen=True)
class Model:
    folder: Path
    cases: tuple[Case, ...]


def engine_for(folder: Path, **options: Any) -> AsyncEngine:
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 8 << 20, "max_model_len": 1024}
    return AsyncEngine.from_pretrained(folder, **{**sizes, **options})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("molmo2")
    reference = save(FAMILY, folder)
    return Model(folder, cases(FAMILY, reference, tiny_processor()))


async def check_all(engine: AsyncEngine, cases: Sequence[Case]) -> None:
    outputs = await asyncio.gather(
        *(engine.generate(case.text, PARAMS, images=case.images) for case in cases)
    )
    for case, output in zip(cases, outputs, strict=True):
        case.check(output.token_ids)


def test_the_cases_differ(model: Model) -> None:
    assert len({case.expected for case in model.cases}) >= 5
    assert len({token for case in model.cases for token in case.expected}) > 6


@pytest.mark.parametrize("budget", [1024, LEAST_BUDGET])
async def test_tokens_equal_generate(model: Model, budget: int) -> None:
    async with engine_for(model.folder, max_num_batched_tokens=budget) as engine:
        for case in model.cases[:2]:
            output = await engine.generate(case.text, PARAMS, images=case.images)
            case.check(output.token_ids)
        await engine.reset_caches()
        await check_all(engine, model.cases)
        await check_all(engine, model.cases)
        now = engine.statistics()
        assert now.prefix_hit_tokens > 0
        assert now.kv_blocks_free == now.kv_blocks_total


@pytest.mark.parametrize("budget", [13, 5, 1])
async def test_what_no_step_can_compute_is_refused(model: Model, budget: int) -> None:
    async with engine_for(model.folder, max_num_batched_tokens=budget) as engine:
        with pytest.raises(InvalidRequestError, match="max_num_batched_tokens"):
            case = model.cases[0]
            await engine.generate(case.text, PARAMS, images=case.images)
        await check_all(engine, model.cases[-1:])


async def test_without_a_prefix_cache(model: Model) -> None:
    options = {"max_num_batched_tokens": LEAST_BUDGET + 31, "enable_prefix_caching": False}
    async with engine_for(model.folder, **options) as engine:
        await check_all(engine, model.cases)
        await check_all(engine, model.cases)
        assert engine.statistics().encoder_items_run == 3


async def test_a_worker_process_makes_the_same_processor(model: Model) -> None:
    async with engine_for(model.folder) as engine:
        own = engine.processor
        setup = json.loads(json.dumps(_describe_setup(model.folder, engine.config, own, 1)))
        made = _make_processor(setup)
        assert type(made) is type(own)
        images = MultiModalDataItems({"image": ImageProcessorItems(list(model.cases[0].images))})
        ((item,), (expected,)) = (each.process(images, {})["image"] for each in (made, own))
        assert all(torch.equal(item[name], expected[name]) for name in expected)


async def test_what_is_refused(model: Model) -> None:
    async with engine_for(model.folder) as engine:

        async def ask(**options: Any) -> Any:
            media = {"image": [tiny_image().resize((90, 90))]}
            prompt = Prompt(text="<|image|>", media=media, mm_processor_kwargs=options)
            return await engine.generate(prompt, PARAMS)

        for options in (
            {"max_crops": 0},
            {"max_crops": 65},
            {"max_crops": True},
            {"max_crops": "2"},
            {"overlap_margins": [4, 4]},
            {"overlap_margins": 2},
            {"overlap_margins": [-1, 1]},
            {"pooling_size": [0, 1]},
            {"pooling_size": [9, 9]},
            {"patch_size": 8},
            {"patch_size": 0},
            {"size": {"height": 32, "width": 64}},
            {"size": {"height": 64, "width": 64}},
            {"size": 64},
            {"resample": 3},
        ):
            with pytest.raises((InvalidRequestError, MediaError)):
                await ask(**options)
        few, many = await ask(max_crops=1), await ask(max_crops=4)
        assert len(few.prompt_token_ids) < len(many.prompt_token_ids)
        with pytest.raises(UnsupportedModalityError, match="embeddings"):
            rows = Embeddings(torch.zeros(3, 48))
            await engine.generate("<|image|>", PARAMS, images=[rows])
        with pytest.raises((MediaError, UnsupportedModalityError)):
            film = np.zeros((4, 60, 60, 3), np.uint8)
            await engine.generate("<|video|>", PARAMS, videos=[film])
        now = engine.statistics()
        assert now.kv_blocks_free == now.kv_blocks_total


def test_a_processor_that_is_another_model_s(model: Model) -> None:
    config = hf.AutoConfig.from_pretrained(model.folder)
    context = load_context(model.folder, hf_config=config, info=Molmo2ProcessingInfo)
    Molmo2ProcessingInfo(context)
    config.vision_config.image_size = [64, 64]
    with pytest.raises(ModelLoadError, match="are not the tower's"):
        Molmo2ProcessingInfo(context)


def transformers_own() -> Any:
    """transformers' image processor, whose file needs torchvision for two steps only.

    These are what torchvision does for tensors.
    """
    name = "transformers.models.molmo2._image_processing_molmo2"
    path = Path(hf.__file__).parent / "models" / "molmo2" / "image_processing_molmo2.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]

    class Own(module.Molmo2ImageProcessor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:  # transformers' asks for torchvision
            pass

        def resize(self, image: Any, size: Any, **_: Any) -> Any:
            to = (size.height, size.width)
            return interpolate(image, to, mode="bilinear", align_corners=False, antialias=False)

        def rescale_and_normalize(
            self, images: Any, do_rescale: bool, factor: float, do_normalize: bool, *parts: Any
        ) -> Any:
            mean, std, _ = self._fuse_mean_std_and_rescale_factor(
                do_normalize=do_normalize, image_mean=parts[0], image_std=parts[1],
                do_rescale=do_rescale, rescale_factor=factor,
            )  # fmt: skip
            return (images.float() - mean[:, None, None]) / std[:, None, None]

    return Own()


SIZES = ((32, 32), (40, 30), (30, 60), (5, 300), (300, 5), (1, 1), (161, 97), (400, 64), (99, 400))


@pytest.mark.parametrize("pooling", [(2, 2), (3, 2)])
@pytest.mark.parametrize(("crop", "margins"), [(32, (2, 2)), (36, (2, 2)), (36, (3, 1))])
def test_images_become_what_transformers_makes_of_them(
    crop: int, margins: tuple[int, int], pooling: tuple[int, int]
) -> None:
    mine = Molmo2ImageProcessor(
        size={"height": crop, "width": crop}, patch_size=4, overlap_margins=list(margins),
        max_crops=5, pooling_size=list(pooling),
    )  # fmt: skip
    pil_images = [tiny_image(i).resize(size) for i, size in enumerate(SIZES)]
    expected = transformers_own()._preprocess(
        [torch.tensor(np.asarray(each)).movedim(-1, 0).contiguous() for each in pil_images],
        do_resize=True, size=SizeDict(height=crop, width=crop), resample=2, do_rescale=True,
        rescale_factor=1 / 255, do_normalize=True, image_mean=(0.5, 0.4, 0.6),
        image_std=(0.5, 0.6, 0.4), do_convert_rgb=True, max_crops=5,
        overlap_margins=list(margins), patch_size=4, pooling_size=list(pooling),
        disable_grouping=True, return_tensors="pt",
    )  # fmt: skip
    found = mine(
        pil_images, image_mean=[0.5, 0.4, 0.6], image_std=[0.5, 0.6, 0.4], return_tensors="pt"
    )
    assert set(found) == set(expected)
    for name in expected:
        assert torch.equal(found[name], expected[name].to(found[name].dtype)), name
    for pil_image, grid, count in zip(
        pil_images, found["image_grids"], found["image_num_crops"], strict=True
    ):
        said = mine.get_image_grid_and_crops(pil_image.height, pil_image.width)
        assert said == (grid.tolist(), int(count))


def test_tilings_are_those_of_transformers() -> None:
    own, mine = transformers_own(), Molmo2ImageProcessor()
    own.__dict__.update(
        max_crops=8, overlap_margins=[4, 4], patch_size=14, pooling_size=[2, 2],
        size={"height": 378, "width": 378},
    )  # fmt: skip
    edges = (1, 111, 112, 113, 378, 500, 644, 1000, 3024)
    for height, width in itertools.product(edges, edges):
        assert mine.get_image_grid_and_crops(height, width) == own.get_image_grid_and_crops(
            height, width
        ), (height, width)


def test_other_modes_and_shapes() -> None:
    mine = tiny_processor().image_processor
    plain = mine([Image.new("RGB", (40, 40), (7, 7, 7))], return_tensors="pt")["pixel_values"]
    grey = mine([Image.new("L", (40, 40), 7)], return_tensors="pt")["pixel_values"]
    assert torch.equal(plain, grey)
