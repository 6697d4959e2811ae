"""Attention in chunks, on a GPU or on the simulated one: tokens equal transformers'."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.parity.families import save_text
from tests.parity.test_text_families import CHUNKED, PARAMS, build_chunked
from tests.support.engines import running_engine


@pytest.mark.parametrize("budget", [5, 64])
async def test_tokens_equal_generate(budget: int, tmp_path: Path) -> None:
    expected = await asyncio.to_thread(save_text, build_chunked, tmp_path, CHUNKED)
    sizes = {"block_size": 4, "kv_cache_bytes": 4 << 20, "max_model_len": 256}
    options = {**sizes, "dtype": "auto", "max_num_batched_tokens": budget}
    async with running_engine(tmp_path, device="cuda", **options) as engine:
        for _ in range(2):
            outputs = await asyncio.gather(*(engine.generate(text, PARAMS) for text in CHUNKED))
            assert [output.token_ids for output in outputs] == expected
