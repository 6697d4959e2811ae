"""Pages of latents, on a GPU or on the simulated one: tokens equal transformers'."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.parity.families import TEXT, save_text, vocabulary
from tests.parity.test_text_families import PARAMS, PROMPTS, UNNAMED
from tests.processors.conftest import make_tokenizer
from tests.support.engines import running_engine


def save(folder: Path) -> list[tuple[int, ...]]:
    """A tiny DeepSeek-V3 in float64, and what transformers makes of the prompts."""
    tokenizer = make_tokenizer("bytes")
    with torch.random.fork_rng(devices=[]):
        model = UNNAMED["deepseek-v3"]({**TEXT, "vocab_size": vocabulary(tokenizer)})
    return save_text(model, tokenizer, folder, PROMPTS)


@pytest.mark.parametrize("budget", [5, 64])
async def test_tokens_equal_generate(budget: int, tmp_path: Path) -> None:
    expected = await asyncio.to_thread(save, tmp_path)
    sizes = {"block_size": 4, "kv_cache_bytes": 4 << 20, "max_model_len": 256}
    options = {**sizes, "max_num_batched_tokens": budget, "check_model": False}
    async with running_engine(tmp_path, device="cuda", **options) as engine:
        for prompts in (PROMPTS, PROMPTS * 2):
            outputs = await asyncio.gather(*(engine.generate(text, PARAMS) for text in prompts))
            found = [output.token_ids for output in outputs]
            assert found == expected * (len(prompts) // len(PROMPTS))
        assert engine.statistics().prefix_hit_tokens > 0
