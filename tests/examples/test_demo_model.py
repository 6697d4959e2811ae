"""The shipped weights, through the engine, on freshly rendered scenes that training never saw.

Bounds leave room for chance: at the shares of `evaluation.json` (over 95 % each), fewer than 50 of
64 right answers come by chance less than once in a million runs. Exact figures are the business of
`examples/demo_model/evaluate.py`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from aioengine import AsyncEngine, SamplingParams, demo_images, demo_model
from tests.support.engines import settled

SCENES = Path(__file__).parents[2] / "examples" / "demo_model" / "scenes.py"
NUM_SCENES = 64
PARAMS = SamplingParams(temperature=0, max_tokens=96)


@pytest.fixture(scope="module")
def scenes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_scenes", SCENES)
    assert spec is not None and spec.loader is not None
    module = sys.modules["demo_scenes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def ask(engine: AsyncEngine, pil_image: object, text: str) -> str:
    content = [{"type": "image", "image": pil_image}, {"type": "text", "text": text}]
    output = await engine.generate([{"role": "user", "content": content}], PARAMS)
    return output.text.strip()


async def test_it_describes_scenes_and_answers_questions(scenes: ModuleType) -> None:
    first = scenes.HELD_OUT_SEEDS[90_000]
    made = [scenes.render_scene(first + i, 320 + 8 * i) for i in range(NUM_SCENES)]
    questions = [(s.image, q) for s in made for q in s.questions if q.kind in ("count", "colour")]
    questions = questions[:NUM_SCENES]
    async with AsyncEngine.from_pretrained(demo_model(), device="cpu") as engine:
        described = await asyncio.gather(
            *(ask(engine, s.image, "Describe the picture.") for s in made)
        )
        answered = await asyncio.gather(*(ask(engine, image, q.text) for image, q in questions))
        await settled(engine)
        now = engine.statistics()
    assert sum(d == s.description for d, s in zip(described, made, strict=True)) >= 50
    assert sum(a == q.answer for a, (_, q) in zip(answered, questions, strict=True)) >= 50
    assert now.kv_blocks_free == now.kv_blocks_total
    assert now.encoder_cache_hits > 0


async def test_it_describes_the_shipped_images() -> None:
    async with AsyncEngine.from_pretrained(demo_model(), device="cpu") as engine:
        images = demo_images()
        assert len(images) == 8
        for text in await asyncio.gather(
            *(ask(engine, path, "Describe the picture.") for path in images)
        ):
            assert text.startswith("A ") and text.endswith(".")
