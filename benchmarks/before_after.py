"""Two checkouts of the engine, one against the other, in interleaved pairs.

    python benchmarks/before_after.py BEFORE [AFTER] [--only load,W1,W2,W4,one,W6,startup,growth]
    python benchmarks/before_after.py BEFORE [AFTER] --only qwen2-vl,gemma3

BEFORE and AFTER (this checkout, unless it is given) are folders with the C++ kernels built, as an
editable install leaves them; both run in this Python's environment. Each measurement is made of
both, one right after the other, and in the next round in the other order; what is compared is the
ratio of a pair's times. Processes are new every three rounds, as two processes of the same code
differ by a lasting percent or two. Images are new in every round.

load     from `import aioengine` to ready, benchmarks/make_model.py's model, a fresh process
W1       16 images of 640 x 480 at once, 64 tokens each, cold;  W2: the same again, caches warm
W4       one prompt with eight images of 1920 x 1080, cold, to the first token
one      a single request of text, 64 tokens
W6       Whisper tiny.en on 16 clips (`make real-test` fetches it)
startup  a fresh process to the first token, demo model
FAMILY   families.py's of that name: 16 images of 480 x 360 at once, 64 tokens each, cold
growth   growth.py's steps and queues of each checkout, 2 layers: geometric mean of all points

Printed are the medians of the times and of the ratios after / before (below 1: faster), with the
interval that holds the ratio's median with 95 % (order statistics, so of no assumed shape).
Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import startup
from contenders import prepare, report, workloads
from contenders.crew import Settings, Worker
from families import FAMILIES, SIZE
from family_models import FAMILIES as BUILT
from family_models import write
from peers import cpu_flags

from aioengine import demo_model

ROOT = Path(__file__).parents[1]
SIDES = ("before", "after")
LLAVA = ("load", "W1", "W2", "W4", "one")
NAMES = (*LLAVA, "W6", "startup", "growth")
OTHERS = tuple(name for name in FAMILIES if name not in ("llava", "whisper"))
"""Families that are measured only where they are named."""
ROUNDS_A_PROCESS = 3
Pair = dict[str, float]  # side -> seconds

GROWTH = """
import argparse, contextlib, inspect, json, sys
sys.path.insert(0, sys.argv[1])
import growth
with contextlib.redirect_stdout(sys.stderr):
    options = argparse.Namespace(layers=2, dtype=sys.argv[2], rounds=7)
    curves = [*growth.measure_steps(options)]
    flag = [*inspect.signature(growth.measure_queue).parameters][-1]  # have_images, in any words
    for has in (False, True):
        curves.append(growth.measure_queue(growth.RUNNING, 35, **{flag: has}))
print(json.dumps({"ms": [ms for curve in curves for ms in curve.values()]}))
"""


def interval(ratios: list[float]) -> tuple[float, float]:
    """The two order statistics between which the median lies with at least 95 %."""
    n = len(ratios)
    below = 0.0
    for rank in range(n // 2 + 1):
        below += math.comb(n, rank) / 2**n  # at most `rank` of them are under the median
        if below > 0.025:
            break
    ordered = sorted(ratios)
    return ordered[max(0, rank - 1)], ordered[min(n - 1, n - rank)]


def summarize(pairs: list[Pair]) -> dict[str, Any]:
    ratios = [pair["after"] / pair["before"] for pair in pairs]
    low, high = interval(ratios)
    return {
        "rounds": len(pairs),
        **{f"{side}_s": round(statistics.median(p[side] for p in pairs), 4) for side in SIDES},
        "ratio": round(statistics.median(ratios), 4),
        "interval": [round(low, 4), round(high, 4)],
    }


class Bench:
    def __init__(self, checkouts: dict[str, Path], options: argparse.Namespace) -> None:
        self.options = options
        self.found: dict[str, list[Pair]] = {}
        self.images = options.folder / "images"
        self.images.mkdir(parents=True, exist_ok=True)
        models = prepare.models(options.folder, ["aioengine"], options.dtype, Path(sys.executable))
        self.settings = {}
        for side, checkout in checkouts.items():
            logs = options.folder / side
            logs.mkdir(exist_ok=True)
            self.settings[side] = Settings(
                names=["aioengine"],
                pythons={"aioengine": Path(sys.executable)},
                models={**models, "whisper": options.whisper},
                dtype=options.dtype,
                threads=len(os.sched_getaffinity(0)),
                logs=logs,
                environment={"PYTHONPATH": str(checkout)},
            )

    def run(self) -> None:
        rounds = range(self.options.rounds)
        for begin in rounds[::ROUNDS_A_PROCESS]:
            some = rounds[begin : begin + ROUNDS_A_PROCESS]
            if set(LLAVA) & self.options.only:
                self.llava(some)
            if "W6" in self.options.only:
                self.whisper(some)
            for name in OTHERS:
                if name in self.options.only:
                    self.family(name, some)
            for number in some:
                if "startup" in self.options.only:
                    self.pair("startup", number, self.startup)
                if "growth" in self.options.only:
                    self.pair("growth", number, self.growth)

    def pair(self, name: str, number: int, measure: Callable[[str], float]) -> None:
        """Measure both sides, another one first in each round; below 0: warm-ups."""
        pair = {side: measure(side) for side in SIDES[:: -1 if number % 2 else 1]}
        if number < 0 or name not in self.options.only:
            return
        self.found.setdefault(name, []).append(pair)
        ratio = pair["after"] / pair["before"]
        print(f"round {number} {name}: {pair['after']:.3f} s, {ratio:.3f}", file=sys.stderr)

    @contextmanager
    def both(
        self, kind: str, number: int, model: Path | None = None
    ) -> Iterator[dict[str, Worker]]:
        """A loaded process of each, of its own model or this one; their loading is a pair of its
        own."""
        workers: dict[str, Worker] = {}

        def load(side: str) -> float:
            settings = self.settings[side]
            if model is not None:
                settings = replace(settings, models={"aioengine": model})
            workers[side] = Worker("aioengine", settings)
            return float(workers[side].load(settings, kind)["ready_s"])

        try:
            self.pair("load" if kind == "llava" else "", number, load)
            yield workers
        finally:
            for worker in workers.values():
                worker.close()

    def llava(self, some: range) -> None:
        with self.both("llava", some.start // ROUNDS_A_PROCESS) as workers:

            def batch(
                requests: list[dict[str, Any]], max_tokens: int, *, is_cold: bool
            ) -> Callable[[str], float]:
                job = {"requests": requests, "max_tokens": max_tokens, "is_cold": is_cold}
                return lambda side: float(workers[side].ask("batch", **job)["seconds"])

            for number in [-1, *some]:
                fresh = number if number >= 0 else 1000 + some.start
                small = workloads.many_small(self.images, fresh, workloads.NUM_REQUESTS)
                large = workloads.eight_large(self.images, fresh)
                text = [{"text": workloads.prompt(0), "images": []}]
                tokens = workloads.MAX_TOKENS
                if {"W1", "W2"} & self.options.only:
                    self.pair("W1", number, batch(small, tokens, is_cold=True))
                    self.pair("W2", number, batch(small, tokens, is_cold=False))
                if "W4" in self.options.only:
                    self.pair("W4", number, batch(large, 1, is_cold=True))
                if "one" in self.options.only:
                    self.pair("one", number, batch(text, tokens, is_cold=True))

    def whisper(self, some: range) -> None:
        folder = self.options.folder
        paths = workloads.clips(folder, self.options.speech, workloads.NUM_REQUESTS)
        job = {"paths": paths, "rate": workloads.RATE, "max_tokens": workloads.CLIP_TOKENS}
        with self.both("whisper", some.start) as workers:
            for number in [-1, *some]:
                self.pair("W6", number, lambda side: workers[side].ask("clips", **job)["seconds"])

    def family(self, name: str, some: range) -> None:
        folder = self.options.folder / name
        if not (folder / "config.json").exists():
            write(name, folder, self.options.whisper)
        text = f"user: {BUILT[name].place}{workloads.QUESTION}\nassistant:"
        with self.both("family", some.start, folder) as workers:
            for number in [-1, *some]:
                first = 1000 + 100 * (number + 1)
                requests = [
                    {"text": text, "images": [workloads.image(self.images, first + i, SIZE)]}
                    for i in range(workloads.NUM_REQUESTS)
                ]
                job = {"requests": requests, "max_tokens": workloads.MAX_TOKENS, "is_cold": True}
                self.pair(name, number, lambda side: workers[side].ask("batch", **job)["seconds"])  # noqa: B023

    def startup(self, side: str) -> float:
        environment = self.settings[side].environment
        found = startup.run(startup.FIRST_TOKEN, str(demo_model()), **environment)
        return float(found["ms"]) / 1e3

    def growth(self, side: str) -> float:
        environment = self.settings[side].environment
        folder = str(Path(environment["PYTHONPATH"]) / "benchmarks")
        found = startup.run(GROWTH, folder, self.options.dtype, **environment)
        return statistics.geometric_mean(ms / 1e3 for ms in found["ms"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cache = ROOT / ".cache"
    listed = parser.add_argument
    listed("before", type=Path)
    listed("after", type=Path, nargs="?", default=ROOT)
    listed("--only", default=",".join(NAMES), type=lambda text: set(text.split(",")))
    listed("--rounds", type=int, default=12)
    listed("--dtype", default="bfloat16" if "avx512_bf16" in cpu_flags() else "float32")
    listed("--folder", type=Path, default=cache / "peers", help="models, images and logs")
    listed("--whisper", type=Path, default=cache / "real" / "whisper-tiny.en")
    listed("--speech", type=Path, default=cache / "real" / "speech")
    options = parser.parse_args()
    known = (*NAMES, *OTHERS)
    if unknown := options.only - set(known):
        parser.error(f"--only: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    bench = Bench({"before": options.before.resolve(), "after": options.after.resolve()}, options)
    bench.run()
    results = {name: summarize(pairs) for name, pairs in bench.found.items()}
    for name, each in results.items():
        low, high = each["interval"]
        times = f"{each['before_s']:8.3f} s -> {each['after_s']:8.3f} s"
        print(f"{name:8} {times}   {each['ratio']:.3f} [{low:.3f}, {high:.3f}]")
    machine = report.machine(options.dtype, len(os.sched_getaffinity(0)))
    print(json.dumps({"benchmark": "before_after", "machine": machine, "results": results}))


if __name__ == "__main__":
    main()
