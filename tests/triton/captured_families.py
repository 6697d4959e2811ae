"""Every family with captured steps: tokens are those of steps that are launched, by kernels that
were compiled when the model was loaded.

Rows of tests/parity/measured_rows.py are tiny models. What GPUs have runs on the CPU here: layers'
plans by our kernels, in Triton's interpreter, and captures that are replayed over the same memory
(recording.py). It takes half an hour: `make triton-families`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, SamplingParams
from tests.parity.measure import make
from tests.parity.measured_rows import ROWS, Ask, Row
from tests.simulated.decode_steps import LATENTS
from tests.triton.recording import Recording

MAX_TOKENS = 4
LAUNCHED = {
    "test_text_families[deepseek-v3]": "lengths are not known on the host",
    "test_deepseek_vl2[small]": "lengths are not known on the host",
    "test_deepseek_vl2[base]": "lengths are not known on the host",
    "test_deepseek_vl2[tiny]": "reads numbers on the host",  # of its experts, in float32
}
"""Families whose steps are launched: what they do depends on numbers."""
pytestmark = [
    pytest.mark.timeout(900),
    # Masked logits times a temperature; a GPU does not warn.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


async def answer(
    row: Row, folder: Path, ask: Ask, programs: set[Any], **more: Any
) -> tuple[list[Any], Any]:
    """Tokens of two requests, greedily and at random, and the counts of captured steps.

    They want no kernels but those compiled before.
    """
    sizes = {"block_size": 4, "kv_cache_bytes": 8 << 20, "max_num_seqs": 2, "check_model": False}
    options: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": row.budget}
    options |= {**sizes, **row.options, "attention_backend": "triton", **more}
    params = (
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=1, max_tokens=MAX_TOKENS - 1, ignore_eos=True),
    )
    async with AsyncEngine.from_pretrained(folder, **options) as engine:
        compiled = {*programs}
        outputs = await asyncio.gather(
            *(engine.generate(ask.prompt, each, **ask.media) for each in params)
        )
        assert not programs - compiled
        captured = engine._core.loaded.runner._captured
        return [output.token_ids for output in outputs], captured and captured.counts


@pytest.mark.parametrize("row", [LATENTS, *ROWS], ids=lambda row: row.name)
async def test_tokens_are_those_of_launched_steps(
    row: Row,
    tmp_path: Path,
    recording: Recording,
    programs: set[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asked = [ask for ask, _ in await asyncio.to_thread(lambda: [*make(row, tmp_path)])]
    ask = max(asked, key=lambda ask: sum(map(bool, ask.media.values())))
    expected, _ = await answer(row, tmp_path, ask, programs, enforce_eager=True)
    with caplog.at_level(logging.WARNING):
        found, counts = await answer(row, tmp_path, ask, programs)
    reasons = [x.getMessage() for x in caplog.records if "not captured" in x.getMessage()]
    sys.stdout.write(f"\nFAMILY {row.name}: {counts} {len(recording.graphs)} {reasons}\n")
    assert found == expected
    if row.name in LAUNCHED:
        assert reasons and all(LAUNCHED[row.name] in reason for reason in reasons)
    else:
        assert counts.replayed and not counts.launched and not reasons
