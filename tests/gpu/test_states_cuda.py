"""Layers that keep a state, on a GPU or on the simulated one: tokens equal transformers'."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.parity.test_state_families import PROMPTS, SIZES, ask, save
from tests.support.engines import running_engine

NAMES = ("falcon-h1", "lfm2", "olmo-hybrid", "qwen3.5")
"""Those that run in float64: on a GPU, PyTorch rounds the inputs of convolutions in float32."""


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("name", NAMES)
async def test_tokens_equal_generate(name: str, budget: int, tmp_path: Path) -> None:
    folder, expected = await asyncio.to_thread(save, name, tmp_path)
    options = {**SIZES, "max_num_batched_tokens": budget, "check_model": False}
    async with running_engine(folder, device="cuda", **options) as engine:
        for _ in range(2):
            assert await ask(engine) == expected
        assert await ask(engine, PROMPTS * 3) == expected * 3
        assert engine.statistics().prefix_hit_tokens > 0
