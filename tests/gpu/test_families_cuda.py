"""Every family on a GPU, or on the simulated one: tokens equal those of its reference.

Each row of tests/parity/measured_rows.py is a tiny model and what transformers, or where it has no
class for it a plain forward, makes of its prompts. One of them, with media where it takes any, is
asked in small chunks. On the simulated GPU its steps make nobody wait, and what makes encoders wait
is printed.

SIMULATED_PART, as "2/5", chooses every fifth row from the third on.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from pathlib import Path

import pytest

from aioengine import AsyncEngine, SamplingParams
from tests.parity.measure import asks_of
from tests.parity.measured_rows import ROWS, Ask, Row

PART, NUM_PARTS = map(int, os.environ.get("SIMULATED_PART", "0/1").split("/"))


def chosen(asked: list[Ask]) -> Ask:
    """The first with the most kinds of media, and with more than one token to compare."""
    told = [ask for ask in asked if len(ask.expected) > 1]
    return max(told, key=lambda ask: sum(map(bool, ask.media.values())))


@pytest.mark.encoders_may_wait
@pytest.mark.parametrize("row", ROWS[PART::NUM_PARTS], ids=lambda row: row.name)
async def test_tokens_are_those_of_the_reference(row: Row, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ask = chosen(await asyncio.to_thread(asks_of, row, tmp_path))
    sizes = {"block_size": 4, "kv_cache_bytes": 8 << 20, "check_model": False}
    options = {**sizes, "max_num_batched_tokens": row.budget, **row.options}
    params = SamplingParams(temperature=0, max_tokens=len(ask.expected), ignore_eos=True)
    async with AsyncEngine.from_pretrained(tmp_path, device="cuda", **options) as engine:
        output = await engine.generate(ask.prompt, params, **ask.media)
        assert list(output.token_ids) == list(ask.expected)
