"""Steps of every family on the simulated device: a decode step makes nobody wait.

Each row of tests/parity/measured_rows.py is a tiny model. It is loaded on the device, which tries
it against its own module there, and answers some of its prompts together, greedily and at random.
"""

from __future__ import annotations

import asyncio
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, SamplingParams
from aioengine.execution.model_runner import ModelRunner
from tests.parity.measure import make
from tests.parity.measured_rows import ROWS, Ask, Row
from tests.simulated.device import DEVICE

MAX_TOKENS = 5
Waits = dict[str, Counter[tuple[str, str]]]


@contextmanager
def waits_by_job() -> Iterator[Waits]:
    """What made the launch thread wait in decode steps, in steps with prompts, and in encoders."""
    found: Waits = {"decode": Counter(), "prompt": Counter(), "encode": Counter()}
    originals = {"step": ModelRunner.step, "encode": ModelRunner.encode}

    def noting(name: str) -> Callable[..., Any]:
        def run(runner: ModelRunner, plan: Any, *others: Any) -> Any:
            before = DEVICE.waits.copy()
            done = originals[name](runner, plan, *others)
            kind = name
            if name == "step":
                is_decode = all(s.output_index and s.end - s.start == 1 for s in plan.sequences)
                kind = "decode" if is_decode else "prompt"
                found.setdefault("steps", Counter())[kind, ""] += 1
            found[kind] += DEVICE.waits - before
            return done

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in originals:
            patch.setattr(ModelRunner, name, noting(name))
        yield found


async def answer(folder: Path, row: Row, asked: list[Ask]) -> None:
    """Every prompt greedily and at random, all at once."""
    sizes = {"device": "cuda", "dtype": "float32", "block_size": 4, "kv_cache_bytes": 8 << 20}
    params = (
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=MAX_TOKENS, ignore_eos=True),
    )
    options = {**sizes, "max_num_batched_tokens": 1024, **row.options}
    async with AsyncEngine.from_pretrained(folder, **options) as engine:
        await asyncio.gather(
            *(engine.generate(ask.prompt, each, **ask.media) for ask in asked for each in params)
        )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_decode_steps_wait_for_nothing(row: Row, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asked = [ask for ask, _ in make(row, tmp_path)]
    with waits_by_job() as found:
        asyncio.run(answer(tmp_path, row, [asked[0], asked[-1]]))
    print({k: dict(v) for k, v in found.items()})
    assert found["steps"]["decode", ""] >= MAX_TOKENS - 1
    DEVICE.waits.clear()
    assert not found["decode"] and not found["prompt"]
