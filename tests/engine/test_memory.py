"""Memory stays bounded, however many images come."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from aioengine import AsyncEngine, demo_model
from tests.support.engines import greedy, settled

NUM_IMAGES = 2000
WARM_IMAGES = 800
"""By then the processor cache, the encoder cache and the prefix cache are full."""


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells")
async def test_many_images_through_small_caches() -> None:
    options = {
        "device": "cpu",
        "mm_processor_cache_bytes": 64 << 20,
        "encoder_cache_bytes": 4 << 20,
        "kv_cache_bytes": 16 << 20,
    }
    generator = np.random.default_rng(0)
    resident: list[int] = []
    async with AsyncEngine.from_pretrained(demo_model(), **options) as engine:
        for first in range(0, NUM_IMAGES, 40):
            pil_images = generator.integers(0, 256, (40, 300, 400, 3), dtype=np.uint8)
            await asyncio.gather(
                *(
                    engine.generate("USER: <image> ASSISTANT:", greedy(1), images=[image])
                    for image in pil_images
                )
            )
            if first >= WARM_IMAGES:
                resident.append(resident_bytes())
        await settled(engine)
        found = engine.statistics()
    assert found.processor_cache_misses == NUM_IMAGES
    assert 0.9 * (64 << 20) < found.processor_cache_used_bytes <= 64 << 20
    assert found.encoder_cache_evictions > 0
    assert max(resident) < 1.1 * min(resident), [size >> 20 for size in resident]
