"""Laws of design on the simulated device, with a step in flight: run by run.py, in any order.

Cancellation at every point is that of tests/laws, on this device; here too are streams left after
each delta, and random company in scarce memory.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aioengine import AsyncEngine, MediaConfig, SamplingParams
from tests.gpu.test_engine_cuda import ROW_BYTES, TEXT, ask, greedy
from tests.gpu.test_engine_cuda import folder as wide_folder
from tests.laws.test_cancellation import (
    fetcher,
    folder,
    test_cancelled_at_every_point,
    test_cancelled_at_every_tick,
)
from tests.support.engines import running_engine, settled
from tests.support.tiny import tiny_image

__all__ = ["folder", "test_cancelled_at_every_point", "test_cancelled_at_every_tick", "wide_folder"]

NUM_TOKENS = 12
SCARCE = {
    "block_size": 4,
    "max_model_len": 96,
    "kv_cache_bytes": 30 * 4 * 2 * 2 * (2 * 12) * 8,
    "encoder_cache_bytes": 2 * 16 * ROW_BYTES,
    "enable_prefix_caching": False,
}
"""Thirty blocks, where a request takes ten, and an encoder cache of two images."""


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine.from_pretrained(
        folder,
        device="cuda",
        block_size=4,
        kv_cache_bytes=1 << 20,
        max_num_batched_tokens=16,
        media=MediaConfig(fetcher=fetcher),
    ) as engine:
        assert engine._core.device.run_ahead == 1
        yield engine


async def left_after(
    engine: AsyncEngine, seed: int, num_deltas: int, params: SamplingParams
) -> None:
    """Begin a request, and leave its stream after so many deltas."""
    async with engine.stream(TEXT, params, images=[tiny_image(seed)]) as stream:
        for _ in range(num_deltas):
            await anext(stream, None)


@pytest.mark.parametrize("seed", range(2))
async def test_random_company_in_scarce_memory(wide_folder: Path, seed: int) -> None:
    """Every request ends, with the tokens that it has alone; and nothing stays held."""
    rng = random.Random(seed)
    async with running_engine(wide_folder, device="cuda", **SCARCE) as engine:
        seeds = (None, *range(4))
        alone = {each: (await ask(engine, each)).token_ids for each in seeds}
        for _ in range(3):
            asked = [rng.choice(seeds) for _ in range(9)]
            tasks = [asyncio.create_task(ask(engine, each)) for each in asked]
            leaving = [
                left_after(engine, rng.randrange(4), rng.randrange(1, 6), greedy(NUM_TOKENS))
                for _ in range(3)
            ]
            cancelled = asyncio.create_task(ask(engine, rng.randrange(4)))
            for _ in range(rng.randrange(300)):
                await asyncio.sleep(0)
            cancelled.cancel()
            outputs, *_ = await asyncio.gather(asyncio.gather(*tasks), *leaving)
            assert [output.token_ids for output in outputs] == [alone[each] for each in asked]
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await settled(engine)
        now = engine.statistics()
        assert now.preemptions > 0 and now.encoder_cache_evictions > 0


async def test_left_after_each_delta(wide_folder: Path) -> None:
    """Another request that runs all the while gets its tokens, and counters go back."""
    params = greedy(NUM_TOKENS)
    async with running_engine(wide_folder, device="cuda") as engine:
        alone = (await ask(engine, 5, greedy(2 * NUM_TOKENS))).token_ids
        for num_deltas in range(NUM_TOKENS + 1):
            await engine.reset_caches()
            stays = asyncio.create_task(ask(engine, 5, greedy(2 * NUM_TOKENS)))
            await left_after(engine, num_deltas % 4, num_deltas, params)
            assert (await stays).token_ids == alone
            await settled(engine)
