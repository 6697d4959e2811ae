"""Everything at once, on an engine that has too little of everything."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine
from aioengine.errors import MediaError
from tests.support.engines import encoded, greedy, running_engine, settled
from tests.support.grids import rest_is_slow
from tests.support.tiny import NUM_IMAGE_TOKENS, save_tiny_llava, tiny_image

ITEM_BYTES = NUM_IMAGE_TOKENS * 48 * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_llava")
    save_tiny_llava(path)
    return path


@pytest.mark.parametrize("seed", rest_is_slow(range(2), [0]))
async def test_random_comings_and_goings(folder: Path, seed: int) -> None:
    """Scarce memory, shared images, broken ones, and readers that leave at any moment: those who
    stay get the tokens that they get alone, and nothing is left."""
    chance = random.Random(seed)
    good = [encoded(tiny_image(n)) for n in range(5)]
    broken = [data[: len(data) // 2] for data in good[:2]]
    block_bytes = 2 * 16 * 2 * (12 + 12) * 8
    scarce = {
        "max_model_len": 160,
        "kv_cache_bytes": 11 * block_bytes,
        "encoder_cache_bytes": 2 * ITEM_BYTES,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 5,
        "mm_processor_cache_bytes": 40_000,
    }
    prompts: list[tuple[str, list[Any]]] = [
        (f"{n % 7} " + "<image> and " * (n % 3), [good[(n + k) % 5] for k in range(n % 3)])
        for n in range(21)
    ]

    async def request(engine: AsyncEngine, number: int) -> tuple[int, ...]:
        text, images = prompts[number % len(prompts)]
        return (await engine.generate(text, greedy(20 + number % 17), images=images)).token_ids

    async def leave(engine: AsyncEngine, number: int, after: int) -> None:
        task = asyncio.create_task(request(engine, number))
        for _ in range(after):
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])

    async def fail(engine: AsyncEngine, number: int) -> None:
        images = [good[number % 5], broken[number % 2]]
        with pytest.raises(MediaError) as caught:
            await engine.generate("<image> <image>", greedy(), images=images)
        assert caught.value.parameter == "images[1]"

    async with running_engine(folder) as engine:
        expected = [await request(engine, number) for number in range(40)]
    async with running_engine(folder, **scarce) as engine:
        stays = [(number, request(engine, number)) for number in range(40)]
        others = [leave(engine, chance.randrange(40), chance.randrange(1, 200)) for _ in range(40)]
        others += [fail(engine, number) for number in range(12)]
        work = [*(coroutine for _, coroutine in stays), *others]
        order = list(range(len(work)))
        chance.shuffle(order)
        tasks: dict[int, asyncio.Task[Any]] = {}
        for index in order:
            tasks[index] = asyncio.create_task(work[index])
            if chance.random() < 0.3:
                await asyncio.sleep(0.002)
        await asyncio.gather(*tasks.values())
        assert [tasks[number].result() for number in range(40)] == expected
        await settled(engine)
        statistics = engine.statistics()
        assert statistics.preemptions > 0
        assert statistics.encoder_cache_evictions > 0
        assert (statistics.rejected, statistics.failed) == (12, 0)
        assert statistics.finished + statistics.aborted == 80
        assert engine._core.encoder_jobs._jobs == {} and engine._core.encoder_jobs._features == {}
