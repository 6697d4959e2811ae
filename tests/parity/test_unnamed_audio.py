"""Models that hear and that no class here names: their tokens equal those of `generate`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from aioengine import AsyncEngine, SamplingParams
from aioengine.engine.loading.loader import Loaded
from aioengine.processors.items import AudioClip, AudioProcessorItems, MultiModalDataItems
from tests.parity.audio_families import RATE, Case, Family, cases, sound
from tests.parity.families import MAX_TOKENS
from tests.parity.unnamed_audio import UNNAMED

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module", params=UNNAMED)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Family, Path, tuple[Case, ...]]:
    """A family, its folder, and what transformers makes of the clips."""
    family, folder = UNNAMED[request.param], tmp_path_factory.mktemp(request.param)
    return family, folder, cases(family, *family.save(folder))


@pytest.mark.parametrize("budget", [1024, 5])
async def test_tokens_equal_generate(
    saved: tuple[Family, Path, tuple[Case, ...]], budget: int
) -> None:
    family, folder, found = saved
    assert len({case.expected for case in found}) == len(found)  # else they would prove nothing
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 8 << 20, "max_model_len": 1024}
    async with AsyncEngine.from_pretrained(
        folder, **sizes, max_num_batched_tokens=budget
    ) as engine:
        assert engine.statistics().model_impl == "transformers"
        output = await engine.generate(found[0].text, PARAMS, **found[0].media)
        found[0].check(output.token_ids)
        await engine.reset_caches()
        for _ in range(2):  # the second time with prefix and encoder caches warm
            outputs = await asyncio.gather(
                *(engine.generate(case.text, PARAMS, **case.media) for case in found)
            )
            for case, output in zip(found, outputs, strict=True):
                case.check(output.token_ids)
        assert engine.statistics().prefix_hit_tokens > 0
        check_encoder_batches(engine._core.loaded, family.window_s)


@torch.inference_mode()
def check_encoder_batches(loaded: Loaded, window_s: float) -> None:
    """Assert that what else is heard at the same time changes nothing."""
    parts = (0.3, 0.9, 0.9, 1.0, 1.0, 2.2)
    clips = [AudioClip(sound(n, window_s * part), RATE) for n, part in enumerate(parts)]
    items = [
        loaded.loop_processor.process(
            MultiModalDataItems({"audio": AudioProcessorItems([clip])}), {}
        )["audio"][0]
        for clip in clips
    ]
    model = loaded.runner.model
    for item, rows in zip(items, model.encode("audio", items), strict=True):
        (alone,) = model.encode("audio", [item])
        torch.testing.assert_close(rows, alone, rtol=1e-12, atol=1e-12)
