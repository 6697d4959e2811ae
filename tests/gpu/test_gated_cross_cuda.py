"""Gated cross-attention to images, on a GPU or on the simulated one: tokens equal transformers'."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aioengine import AsyncEngine
from tests.parity.test_gated_cross import MODELS, check_all, options, save


@pytest.mark.encoders_may_wait
@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("name", MODELS)
async def test_tokens_equal_generate(name: str, budget: int, tmp_path: Path) -> None:
    saved = await asyncio.to_thread(save, name, tmp_path)
    more = options(device="cuda", max_num_batched_tokens=budget, check_model=False)
    async with AsyncEngine.from_pretrained(tmp_path, **more) as engine:
        for _ in range(2):
            await check_all(engine, saved)
        assert engine.statistics().prefix_hit_tokens > 0
