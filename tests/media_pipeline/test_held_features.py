"""Features that requests hold until they end: bounded, shared, given back, and made again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, Prompt
from aioengine.errors import MediaError
from aioengine.media_pipeline import pipeline
from aioengine.models.llava import LlavaMultiModalProcessor
from tests.support.engines import encoded, greedy, running_engine, settled, until
from tests.support.tiny import save_tiny_llava, tiny_image

TEXT = "USER: <image> tell ASSISTANT:"
NUM_IMAGES = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_llava")
    save_tiny_llava(path)
    return path


@pytest.fixture
def after_processing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The family's prompts are laid out from what its processor returned."""
    monkeypatch.setattr(LlavaMultiModalProcessor, "layout_needs_hf_outputs", True)
    yield


def encoded_images() -> list[bytes]:
    return [encoded(tiny_image(number)) for number in range(NUM_IMAGES)]


async def item_bytes(folder: Path) -> int:
    """Of one image's features."""
    async with running_engine(folder) as engine:
        await engine.generate(TEXT, greedy(1), images=encoded_images()[:1])
        return engine.statistics().processor_cache_used_bytes


async def ask(engine: AsyncEngine, image: bytes) -> tuple[int, ...]:
    return (await engine.generate(TEXT, greedy(6), images=[image])).token_ids


@pytest.mark.parametrize("num_held", [NUM_IMAGES, 3, 0])
async def test_requests_in_the_queue_hold_no_more_than_there_is_room_for(
    folder: Path, after_processing: None, monkeypatch: pytest.MonkeyPatch, num_held: int
) -> None:
    size = await item_bytes(folder)
    limit = num_held * size
    monkeypatch.setattr(pipeline, "MIN_HELD_BYTES", limit)
    async with running_engine(folder) as engine:
        expected = [await ask(engine, image) for image in encoded_images()]
    options = {"max_num_seqs": 1, "mm_processor_cache_bytes": 0}
    async with running_engine(folder, **options) as engine:
        held = engine._core.input_processor.media.held
        hold, sizes = held.hold, []

        def watched(*item: Any) -> bool:
            is_held = hold(*item)
            sizes.append(held.num_bytes)
            return is_held

        monkeypatch.setattr(held, "hold", watched)
        found = await asyncio.gather(*(ask(engine, image) for image in encoded_images()))
        assert found == expected
        # One alone may be larger than all the room.
        assert 0 < max(sizes) <= (limit or size)
        # What could not be held was processed a second time, for the encoder.
        num_processed = engine.statistics().stages["process"].count
        assert (
            num_processed == NUM_IMAGES
            if num_held == NUM_IMAGES
            else (NUM_IMAGES < num_processed <= 2 * NUM_IMAGES)
        )


async def test_one_image_of_many_requests_is_held_once(
    folder: Path, after_processing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = await item_bytes(folder)
    monkeypatch.setattr(pipeline, "MIN_HELD_BYTES", size)
    image = encoded_images()[0]
    async with running_engine(folder, max_num_seqs=1, mm_processor_cache_bytes=0) as engine:
        asked = [asyncio.create_task(ask(engine, image)) for _ in range(8)]
        await until(lambda: engine.statistics().waiting == 7)
        assert engine._core.input_processor.media.held.num_bytes == size
        assert len({await task for task in asked}) == 1
        assert engine.statistics().stages["process"].count == 1


async def test_a_name_stands_for_what_can_be_held(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nothing could make again is held; where there is no room, its name is unknown."""
    size = await item_bytes(folder)
    monkeypatch.setattr(pipeline, "MIN_HELD_BYTES", size)

    def prompt(number: int, *, known: bool) -> Prompt:
        item = None if known else encoded_images()[number]
        return Prompt(text=TEXT, media={"image": [item]}, uuids={"image": [str(number)]})

    options = {"max_num_seqs": 1, "mm_processor_cache_bytes": 2 * size}
    async with running_engine(folder, **options) as engine:
        expected = [(await engine.generate(prompt(n, known=False), greedy(6))).text for n in (0, 1)]
        monkeypatch.setattr(engine._core.input_processor.media.held, "_capacity_bytes", size)
        first = engine.stream(prompt(0, known=True), greedy(400))
        async with first:
            with pytest.raises(MediaError, match="nothing is cached under its uuid"):
                await engine.generate(prompt(1, known=True), greedy(6))
            # Held already, it needs no more room.
            async with engine.stream(prompt(0, known=True), greedy(6)) as again:
                engine._core.input_processor.media.cache.clear()
                first.close()
                assert (await again.result()).text == expected[0]
        await settled(engine)
        # Given back with its request, it is gone with the cache.
        with pytest.raises(MediaError, match="nothing is cached under its uuid"):
            await engine.generate(prompt(0, known=True), greedy(6))


async def test_a_request_keeps_its_own_items_in_the_cache(folder: Path) -> None:
    """Whether or not their features are asked for: here the encoder has the rows already."""
    size = await item_bytes(folder)
    first, second, third = encoded_images()[:3]
    async with running_engine(folder, mm_processor_cache_bytes=2 * size) as engine:
        for image in (first, second, first, third):
            await ask(engine, image)
        assert engine.statistics().stages["process"].count == 3
        assert engine.statistics().encoder_items_run == 3
        engine._core.scheduler.media.cache.clear()
        await ask(engine, first)
        assert engine.statistics().stages["process"].count == 3
        await ask(engine, second)
        assert engine.statistics().stages["process"].count == 4


async def test_cancelled_at_any_time_nothing_stays_held(
    folder: Path, after_processing: None
) -> None:
    async with running_engine(folder, mm_processor_cache_bytes=0) as engine:
        for turns in range(0, 60, 3):
            asked = [asyncio.create_task(ask(engine, image)) for image in encoded_images()[:3]]
            for _ in range(turns):
                await asyncio.sleep(0.0005)
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
        await settled(engine)
        assert engine._core.input_processor.media.held.num_bytes == 0
