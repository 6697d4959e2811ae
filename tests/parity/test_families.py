"""Every family's greedy tokens equal transformers' `generate`, however its prompts are cut."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, Embeddings, SamplingParams
from aioengine.errors import InvalidRequestError, MediaError
from tests.parity.families import (
    FAMILIES,
    MAX_TOKENS,
    Case,
    Family,
    cases,
    hf_processor,
    save,
    video_cases,
)
from tests.parity.state_families import FAMILIES as STATE_FAMILIES
from tests.parity.unnamed_families import UNNAMED
from tests.support.grids import rest_is_slow
from tests.support.versions import NO_VIDEOS, RELEASE, skip_up_to

ALL = {**FAMILIES, **STATE_FAMILIES, **UNNAMED}
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
VIDEO_FAMILIES = [name for name, family in FAMILIES.items() if family.video_place]
FIRST = [next(iter(each)) for each in (FAMILIES, STATE_FAMILIES, UNNAMED)]
ENCODED_ANEW = [name for name, family in ALL.items() if family.num_encoded != Family.num_encoded]


@dataclass(frozen=True)
class Model:
    name: str
    folder: Path
    cases: tuple[Case, ...]
    videos: tuple[Case, ...]


def engine_for(folder: Path, **options: Any) -> AsyncEngine:
    """Small blocks, so that few tokens make many."""
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 8 << 20, "max_model_len": 1024}
    return AsyncEngine.from_pretrained(folder, **{**sizes, **options})


@pytest.fixture(scope="module", params=ALL)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family: Family = ALL[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    reference = save(family, folder)

    processor = hf_processor(folder)
    has_films = family.video_place and RELEASE > (5, 18)
    films = video_cases(family, reference, processor) if has_films else ()
    return Model(request.param, folder, cases(family, reference, processor), films)


async def check_all(engine: AsyncEngine, cases: tuple[Case, ...]) -> None:
    """All at once."""
    outputs = await asyncio.gather(
        *(
            engine.generate(case.text, PARAMS, images=case.images, videos=case.videos)
            for case in cases
        )
    )
    for case, output in zip(cases, outputs, strict=True):
        case.check(output.token_ids)


def test_the_cases_differ(model: Model) -> None:
    """Else equal tokens would prove nothing."""
    assert len({case.expected for case in model.cases}) >= 5
    assert len({token for case in model.cases for token in case.expected}) > 6
    assert sum(len(case.expected) for case in model.cases) > 4 * len(model.cases)


@pytest.mark.parametrize("budget", [1024, 13, 5, 1])
async def test_tokens_equal_generate(model: Model, budget: int) -> None:
    budget = max(budget, ALL[model.name].least_budget)
    async with engine_for(model.folder, max_num_batched_tokens=budget) as engine:
        for case in model.cases[:2]:
            output = await engine.generate(case.text, PARAMS, images=case.images)
            case.check(output.token_ids)
        await engine.reset_caches()
        await check_all(engine, model.cases)
        await check_all(engine, model.cases)  # with prefix and encoder caches warm
        now = engine.statistics()
        assert now.model_impl == ("native" if model.name in FAMILIES else "transformers")
        assert now.prefix_hit_tokens > 0 and now.kv_blocks_free == now.kv_blocks_total


@pytest.mark.parametrize("model", rest_is_slow(ALL, [*FIRST, *ENCODED_ANEW]), indirect=True)
async def test_tokens_equal_generate_without_a_prefix_cache(model: Model) -> None:
    budget = max(31, ALL[model.name].least_budget)
    options = {"max_num_batched_tokens": budget, "enable_prefix_caching": False}
    async with engine_for(model.folder, **options) as engine:
        await check_all(engine, model.cases)
        await check_all(engine, model.cases)  # with the encoder cache warm
        assert engine.statistics().encoder_items_run == ALL[model.name].num_encoded


@pytest.mark.parametrize("model", VIDEO_FAMILIES, indirect=True)
@pytest.mark.parametrize("budget", [1024, 13, 5])
async def test_videos(model: Model, budget: int) -> None:
    skip_up_to(5, 18, NO_VIDEOS)
    async with engine_for(model.folder, max_num_batched_tokens=budget) as engine:
        assert len({case.expected for case in model.videos}) >= 3
        await check_all(engine, model.videos)
        await check_all(engine, model.videos)


@pytest.mark.parametrize("model", ["qwen2-vl", "qwen3-vl"], indirect=True)
async def test_rows_that_were_computed_elsewhere(model: Model) -> None:
    """The encoder's own rows, with their grid, in an image's place: the image's tokens."""
    case = model.cases[0]
    async with engine_for(model.folder) as engine:
        await engine.generate(case.text, PARAMS, images=case.images)
        (rows,) = engine._core.loaded.runner._rows.values()
        (features,) = engine._core.input_processor.media.cache._items.values()
        grid = features["image_grid_thw"]
    async with engine_for(model.folder) as engine:
        item = Embeddings(rows, image_grid_thw=grid)
        output = await engine.generate(case.text, PARAMS, images=[item])
        assert output.token_ids == case.expected
        with pytest.raises(InvalidRequestError, match="image_grid_thw"):
            await engine.generate(case.text, PARAMS, images=[Embeddings(rows)])
        with pytest.raises(MediaError, match="must have the shape"):
            narrow = Embeddings(rows[:, :-1], image_grid_thw=grid)
            await engine.generate(case.text, PARAMS, images=[narrow])
