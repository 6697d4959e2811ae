"""Gemma 4 with videos: greedy tokens equal transformers'.

A frame's tokens stand between an image's markers, behind the time at which it was taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from aioengine import AsyncEngine, SamplingParams
from aioengine.processors.hf.substitutes import lenient
from aioengine.processors.hf.video_processors import Gemma4VideoProcessor
from aioengine.processors.inputs import MultiModalKwargs
from aioengine.processors.items import (
    PROCESSOR_ITEMS,
    ImageSize,
    MultiModalDataItems,
    VideoClip,
    VideoHeader,
)
from tests.parity.families import MAX_TOKENS, Case, Family, save, video_cases
from tests.parity.test_gemma_n4 import (
    BIDIRECTIONAL,
    KEYS,
    LARGE,
    Saved,
    engine_for,
    gemma4_whole,
    processor,
)
from tests.processors.hf_processors import context_for, processor_for
from tests.support.versions import RELEASE

pytestmark = pytest.mark.skipif(RELEASE < (5, 19), reason="without torchvision it has no videos")

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SIZES = {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2}


def with_videos() -> Any:
    plain = processor()
    parts = plain.feature_extractor, plain.image_processor, plain.tokenizer
    return lenient(hf.Gemma4Processor)(*parts, Gemma4VideoProcessor(**SIZES))


MODELS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "small": (gemma4_whole(False), 1),
    "large": (gemma4_whole(False, **LARGE, **KEYS, **BIDIRECTIONAL), 70),
}


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    make, least = MODELS[request.param]
    family = Family(
        processor=with_videos, model=make, place="<|image|>", video_place="<|video|>",
        least_budget=least, num_frames=(3, 2),
    )  # fmt: skip
    folder = tmp_path_factory.mktemp(request.param)
    cases = video_cases(family, save(family, folder), with_videos())
    return Saved(request.param, folder, cases)


async def check(engine: AsyncEngine, cases: Sequence[Case]) -> None:
    """All at once."""
    jobs = (
        engine.generate(each.text, PARAMS, images=each.images, videos=each.videos) for each in cases
    )
    for case, output in zip(cases, await asyncio.gather(*jobs), strict=True):
        case.check(output.token_ids)


@pytest.mark.parametrize("shape", [(2, 3, 40, 3), (2, 1, 30, 3), (1, 30, 1, 3)])
def test_a_few_rows_of_pixels_are_no_channels(shape: tuple[int, ...]) -> None:
    film = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    num_frames, height, width, _ = shape
    header = VideoHeader(ImageSize(width, height), tuple(range(num_frames)), num_frames, fps=2.0)
    films = PROCESSOR_ITEMS["video"]([VideoClip(film, header)])
    mine = processor_for(context_for(with_videos())).apply(
        "see <|video|>", MultiModalDataItems({"video": films})
    )
    theirs = with_videos().video_processor(
        [film], do_sample_frames=False, input_data_format="channels_last", return_tensors="pt"
    )
    pixels: Any = MultiModalKwargs.reduce(mine.items["video"])["pixel_values_videos"]
    assert torch.equal(pixels.flatten(0, -3), theirs["pixel_values_videos"])


@pytest.mark.parametrize(
    ("saved", "budget"),
    [("small", 512), ("small", 13), ("small", 5), ("large", 512), ("large", 70)],
    indirect=["saved"],
)
async def test_videos(saved: Saved, budget: int) -> None:
    """Alone, all together, and once more with what is cached; a frame whose tokens see each other
    both ways is computed in one step."""
    cases = saved.cases
    assert len({case.expected for case in cases}) >= 3
    async with engine_for(saved.folder, max_num_batched_tokens=budget) as engine:
        await check(engine, cases[1:2])
        await engine.reset_caches()
        await check(engine, cases)
        await check(engine, cases)
        assert engine.statistics().prefix_hit_tokens > 0
