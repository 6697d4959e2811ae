"""Pages of latents, on a GPU or on the simulated one: tokens equal transformers'."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.parity.families import save_text
from tests.parity.test_text_families import PARAMS, PROMPTS, UNNAMED
from tests.support.engines import running_engine


@pytest.mark.parametrize("budget", [5, 64])
async def test_tokens_equal_generate(budget: int, tmp_path: Path) -> None:
    expected = await asyncio.to_thread(save_text, UNNAMED["deepseek-v3"], tmp_path, PROMPTS)
    sizes = {"block_size": 4, "kv_cache_bytes": 4 << 20, "max_model_len": 256}
    options = {**sizes, "max_num_batched_tokens": budget, "check_model": False}
    async with running_engine(tmp_path, device="cuda", **options) as engine:
        for prompts in (PROMPTS, PROMPTS * 2):
            outputs = await asyncio.gather(*(engine.generate(text, PARAMS) for text in prompts))
            found = [output.token_ids for output in outputs]
            assert found == expected * (len(prompts) // len(PROMPTS))
        assert engine.statistics().prefix_hit_tokens > 0
