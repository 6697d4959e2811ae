"""How many of an engine's steps a GPU would replay: those that fit a bucket of captured steps.

    python benchmarks/captured_share.py [--requests 120]

Plans are the scheduler's, on a CPU with a small model: requests come at random, a half with one
image or two, greedy, at random, with penalties and log probabilities, some of prompts. Each plan is
asked for its bucket, as a GPU's runner does; nothing is captured. Printed beside the share of steps
that fit: how full the buckets are. Last line: JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from make_model import make_model
from PIL import Image

from aioengine import AsyncEngine, SamplingParams
from aioengine.core.plan import StepPlan
from aioengine.execution.captured_steps import CapturedSteps
from aioengine.execution.model_runner import ModelRunner

WORDS = "A story of a lighthouse and of the people who kept it, told from the beginning. "
KINDS: list[dict[str, Any]] = [
    *[{"temperature": 0}] * 10,
    *[{"temperature": 0.8, "top_p": 0.9}] * 5,
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0, "presence_penalty": 0.5},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0, "prompt_logprobs": 1},
]


def prompt(source: random.Random, number: int) -> Any:
    """A text of some length, with images in a half of them."""
    text = WORDS * source.choice([1, 3, 10, 30])
    images = [
        Image.effect_noise((224, 224), 30 + number).convert("RGB")
        for _ in range(source.choice([0, 0, 0, 1, 1, 2]))
    ]
    content: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]


async def run(folder: Path, count: int) -> dict[str, Any]:
    source, found, tokens = random.Random(0), Counter[str](), Counter[str]()
    asked: list[CapturedSteps] = []

    def note(runner: ModelRunner, plan: StepPlan) -> None:
        if not asked:
            asked.append(CapturedSteps(None, runner._limits, runner.model))  # type: ignore[arg-type]
            asked[0]._graphs[None] = None  # type: ignore[assignment]
        filled = asked[0].fill(plan.sequences)
        kind = "launched" if filled is None else "any" if filled.bucket.is_open else "single"
        found[kind] += 1
        if filled is not None:
            tokens[f"{kind} wanted"] += plan.num_tokens
            tokens[f"{kind} computed"] += filled.bucket.num_tokens

    step, put = ModelRunner.step, ModelRunner.put

    def stepped(runner: ModelRunner, plan: StepPlan) -> Any:
        note(runner, plan)
        return step(runner, plan)

    def not_put(runner: ModelRunner, plan: StepPlan) -> None:
        return None

    ModelRunner.step, ModelRunner.put = stepped, not_put  # type: ignore[method-assign, assignment]
    try:
        async with AsyncEngine.from_pretrained(folder, device="cpu") as engine:

            async def ask(number: int) -> None:
                await asyncio.sleep(source.random() * count * 0.05)
                params = SamplingParams(
                    **source.choice(KINDS), max_tokens=source.choice([8, 60, 200]), ignore_eos=True
                )
                await engine.generate(prompt(source, number), params)

            await asyncio.gather(*map(ask, range(count)))
    finally:
        ModelRunner.step, ModelRunner.put = step, put  # type: ignore[method-assign]
    steps = sum(found.values())
    return {
        "steps": steps,
        **found,
        "launched_share": round(found["launched"] / steps, 4),
        "fill": {
            kind: round(tokens[f"{kind} wanted"] / max(1, tokens[f"{kind} computed"]), 2)
            for kind in ("single", "any")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=120)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder, is_tiny=True)
        print(json.dumps(asyncio.run(run(folder, options.requests))))


if __name__ == "__main__":
    main()
