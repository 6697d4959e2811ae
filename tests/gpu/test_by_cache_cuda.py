"""Decoders that are run by their cache, on a GPU or on the simulated one: transformers' tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.parity.test_by_cache import MODELS, PROMPTS, SIZES, ask, save
from tests.support.engines import running_engine


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("name", MODELS)
async def test_tokens_equal_generate(name: str, budget: int, tmp_path: Path) -> None:
    folder, expected = await asyncio.to_thread(save, name, tmp_path)
    options = {**SIZES, "dtype": "auto", "max_num_batched_tokens": budget}
    async with running_engine(folder, device="cuda", **options) as engine:
        for _ in range(2):
            assert await ask(engine) == expected
        assert await ask(engine, PROMPTS * 3) == expected * 3
