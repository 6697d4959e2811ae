"""Rows beside tokens that are not known yet, on a GPU or on the simulated one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.parity.audio_families import RATE, sound
from tests.parity.test_voxtral_realtime import ALL, expect, save
from tests.support.engines import running_engine


@pytest.mark.encoders_may_wait  # transformers looks whether positions are of several sequences
@pytest.mark.parametrize("budget", [5, 64])
async def test_tokens_equal_generate(budget: int, tmp_path: Path) -> None:
    """A step is planned before the one before it has given the token that a row is added to."""
    reference = await asyncio.to_thread(save, tmp_path)
    sounds = [sound(seed, seconds) for seed, seconds in enumerate((0.5, 0.161, 1.3))]
    expected = [expect(reference, tmp_path, each).expected for each in sounds]
    sizes = {"block_size": 4, "kv_cache_bytes": 4 << 20, "max_model_len": 128}
    options = {**sizes, "dtype": "auto", "max_num_batched_tokens": budget}
    async with running_engine(tmp_path, device="cuda", **options) as engine:
        for _ in range(2):
            outputs = await asyncio.gather(
                *(engine.generate("", ALL, audios=[(each, RATE)]) for each in sounds)
            )
            assert [output.token_ids for output in outputs] == expected
