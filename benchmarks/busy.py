"""Tokens per second on a busy machine, as a share of those on an idle one.

Streams decode for a while at a time: alone, beside other processes that spin (in this scheduling
group or in one of their own), beside one that reads memory, and beside threads of this process that
run pure Python. Each share is that of the idle turns before and after; the last line is JSON. The
fair share of a team of two threads on two cores beside 1, 2, 4 such processes is 0.67, 0.5, 0.33.

    python benchmarks/busy.py [--model FOLDER] [--requests 1,8,32] [--seconds 4] [--rounds 2]

With `--family`, of models that `family_models.py` writes, a turn is an answer of 48 tokens for
each stream (for a single one two), each about an image that is new (for Whisper 20 s of audio), so
that decoding media, encoders and prompts are in the figures too; how long all of it takes counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from bare_loop import BareLoop, Probe
from contenders import workloads
from family_models import FAMILIES
from neighbours import READ_MEMORY, processes, python_threads

from aioengine import AsyncEngine, SamplingParams, demo_model

PROMPT = "The history of the lighthouse begins with fires on hills, and goes on with "
IDLE = "idle"
ANSWER, CLIP_S, SIZE = 48, 20, (480, 360)
"""Tokens of an answer about media, seconds of audio, an image's size."""

NEIGHBOURS: dict[str, Any] = {
    "1 process": lambda: processes(1),
    "2 processes": lambda: processes(2),
    "4 processes": lambda: processes(4),
    "1 process, own group": lambda: processes(1, own_group=True),
    "2 processes, own group": lambda: processes(2, own_group=True),
    "4 processes, own group": lambda: processes(4, own_group=True),
    "1 that reads memory": lambda: processes(1, READ_MEMORY),
    "1 Python thread": lambda: python_threads(1),
    "2 Python threads": lambda: python_threads(2),
}


class Questions:
    """What streams ask for: a text that goes on, or a family's media, which are new each time."""

    def __init__(self, family: str) -> None:
        self.family = family
        self._numbers = count(1)
        self._folder = tempfile.TemporaryDirectory()

    def next(self) -> tuple[str, SamplingParams, dict[str, Any]]:
        """Prompt, parameters and media of the next answer."""
        number = next(self._numbers)
        tokens = ANSWER if self.family else 100_000
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        if not self.family:
            return f"{PROMPT} {number}", params, {}
        if self.family == "whisper":
            rng = np.random.default_rng(number)
            samples = rng.normal(0, 0.1, CLIP_S * workloads.RATE).astype(np.float32)
            return "", params, {"audios": [(samples, workloads.RATE)]}
        text = f"user: {FAMILIES[self.family].place}{workloads.QUESTION}\nassistant:"
        path = Path(workloads.image(Path(self._folder.name), number, SIZE))
        data = path.read_bytes()
        path.unlink()
        return text, params, {"images": [data]}


async def decode(
    engine: AsyncEngine, bare: BareLoop, questions: Questions, requests: int, seconds: float
) -> tuple[float, dict[str, float]]:
    """Tokens per second of so many streams; how late this loop and the bare one woke, in ms."""
    counts = [0] * requests
    begun = asyncio.Event()
    answers = 2 if questions.family and requests == 1 else 1
    asked = [[questions.next() for _ in range(answers)] for _ in counts]

    async def read(index: int) -> None:
        for text, params, media in asked[index]:
            async with engine.stream(text, params, **media) as stream:
                async for delta in stream:
                    counts[index] += len(delta.token_ids)
                    if all(counts):
                        begun.set()

    began = time.perf_counter()
    tasks = [asyncio.create_task(read(index)) for index in range(requests)]
    try:
        if not questions.family:
            await asyncio.wait_for(begun.wait(), 120)
        probe = Probe(has_stalls=False)
        bare.begin()
        watching = asyncio.create_task(probe.run())
        before, since = sum(counts), time.perf_counter()
        if questions.family:
            await asyncio.gather(*tasks)
            since = began
        else:
            await asyncio.sleep(seconds)
        rate = (sum(counts) - before) / (time.perf_counter() - since)
        watching.cancel()
        lags = {**probe.summary("loop"), **await bare.end()}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return rate, {name: lags[name] for name in ("loop_lag_p99", "bare_lag_p99")}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    names = [name for name in NEIGHBOURS if options.only in name]
    rates: dict[str, list[float]] = {}
    shares: dict[str, dict[str, list[float]]] = {}
    lags: dict[str, dict[str, list[dict[str, float]]]] = {}
    bare, questions = await BareLoop.spawn(), Questions(options.family)
    async with AsyncEngine.from_pretrained(
        options.model, dtype=options.dtype, max_model_len=options.max_model_len
    ) as engine:
        for requests in options.requests:
            key = f"{requests} requests"
            shares[key] = {name: [] for name in names}
            lags[key] = {name: [] for name in (IDLE, *names)}
            turn = partial(decode, engine, bare, questions, requests)
            await turn(0.5)
            idle, lag = await turn(options.seconds)
            rates[key], lags[key][IDLE] = [idle], [lag]
            for name in names * options.rounds:
                with NEIGHBOURS[name]():
                    busy, lag_beside = await turn(options.seconds)
                after, lag = await turn(options.seconds)
                rates[key].append(after)
                lags[key][IDLE].append(lag)
                lags[key][name].append(lag_beside)
                shares[key][name].append(2 * busy / (idle + after))
                shown = f"{busy:.1f} of {idle:.1f} and {after:.1f}: {shares[key][name][-1]:.3f}"
                print(f"{key}, {name}: {shown}, {lag_beside}", file=sys.stderr)
                idle = after
    await bare.aclose()
    return {
        "benchmark": "busy",
        "model": options.family or Path(options.model).name,
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "idle_tokens_per_s": {key: round(median(each), 1) for key, each in rates.items()},
        "share_of_idle": {
            key: {name: round(median(each), 3) for name, each in found.items()}
            for key, found in shares.items()
        },
        "lag_ms": {
            key: {
                name: {kind: round(median(lag[kind] for lag in each), 1) for kind in each[0]}
                for name, each in found.items()
                if each
            }
            for key, found in lags.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=demo_model())
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument(
        "--requests", type=lambda text: [*map(int, text.split(","))], default=[1, 8, 32]
    )
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--family", default="", choices=["", *FAMILIES], help="of the model")
    parser.add_argument("--only", default="", help="neighbours whose name has this in it")
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
