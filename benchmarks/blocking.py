"""The blocking `Engine` beside `AsyncEngine`, in one process: what its thread and its portal cost.

Each of three kinds of work is done by both in turn, in an order that alternates, and the ratio of
their times is the median of the pairs: `map` over many short prompts (with images and without), one
`generate` after another, and a stream's deltas. Below 1 the blocking one is faster. `--busy N` has
N processes compute beside it. Last line: JSON.

    python benchmarks/blocking.py [--prompts 400] [--rounds 7] [--busy 0] [--model FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from aioengine import AsyncEngine, Engine, Prompt, SamplingParams, demo_images, demo_model

QUESTION = "USER: {}Describe picture {}. ASSISTANT:"
BUSY = "while True: sum(range(1000))"


def prompts(count: int, *, with_images: bool) -> list[Prompt]:
    """Prompts that differ, so that no prefix is shared beyond the first words."""
    images = demo_images()
    media = [{"image": [images[i % len(images)]]} if with_images else {} for i in range(count)]
    mark = "<image>\n" if with_images else ""
    return [Prompt(text=QUESTION.format(mark, i), media=media[i]) for i in range(count)]


class Work:
    """The same work, for either engine; `count` prompts."""

    def __init__(self, count: int) -> None:
        self.short = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        self.long = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
        self.text = prompts(count, with_images=False)
        self.images = prompts(count // 4, with_images=True)

    def blocking(self, engine: Engine) -> dict[str, Callable[[], Any]]:
        """Kind -> what the blocking engine does."""

        def stream() -> int:
            return sum(1 for _ in engine.stream(self.text[0], self.long))

        return {
            "map, text": lambda: list(engine.map(self.text, self.short)),
            "map, images": lambda: list(engine.map(self.images, self.short)),
            "one by one": lambda: [engine.generate(each, self.short) for each in self.text[:40]],
            "stream": stream,
        }

    def waiting(self, engine: AsyncEngine) -> dict[str, Callable[[], Awaitable[Any]]]:
        """Kind -> what the asynchronous engine does."""

        async def mapped(these: list[Prompt]) -> list[Any]:
            return [output async for output in engine.map(these, self.short)]

        async def one_by_one() -> list[Any]:
            return [await engine.generate(each, self.short) for each in self.text[:40]]

        async def stream() -> int:
            async with engine.stream(self.text[0], self.long) as deltas:
                return len([delta async for delta in deltas])

        return {
            "map, text": lambda: mapped(self.text),
            "map, images": lambda: mapped(self.images),
            "one by one": one_by_one,
            "stream": stream,
        }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Kind -> seconds of both, and the median of their ratios."""
    work = Work(arguments.prompts)
    options: dict[str, Any] = {"device": "cpu", "enable_prefix_caching": False}
    with ExitStack() as stack:
        runner = stack.enter_context(new_runner())
        engine = stack.enter_context(Engine.from_pretrained(arguments.model, **options))
        other = AsyncEngine.from_pretrained(arguments.model, **options)
        runner.run(other.start())
        stack.callback(lambda: runner.run(other.aclose()))
        for _ in range(arguments.busy):
            stack.callback(subprocess.Popen([sys.executable, "-c", BUSY]).kill)
        blocking, waiting = work.blocking(engine), work.waiting(other)
        sides: dict[str, Callable[[str], Any]] = {
            "blocking": lambda kind: blocking[kind](),
            "async": lambda kind: runner.run(waiting[kind]()),
        }
        return {kind: compare(kind, sides, arguments.rounds) for kind in blocking}


def new_runner() -> asyncio.Runner:
    """A runner with the loop that the blocking engine has."""
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def compare(kind: str, sides: dict[str, Callable[[str], Any]], rounds: int) -> dict[str, float]:
    """Medians of both sides, after a round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(rounds + 1):
        for name in sorted(sides, reverse=index % 2 == 0):
            begin = time.perf_counter()
            sides[name](kind)
            times[name].append(time.perf_counter() - begin)
    pairs = zip(times["blocking"][1:], times["async"][1:], strict=True)
    ratios = sorted(blocking / waiting for blocking, waiting in pairs)
    found = {
        "blocking_s": statistics.median(times["blocking"][1:]),
        "async_s": statistics.median(times["async"][1:]),
        "ratio": statistics.median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
    }
    print(kind, {name: round(value, 4) for name, value in found.items()}, flush=True)
    return found


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--model", type=Path, default=demo_model())
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
