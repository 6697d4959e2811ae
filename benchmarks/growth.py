"""How a step's time grows with the batch, the context and the queue: it should be linear.

Batch and context: decode steps of the benchmark model (benchmarks/make_model.py), through the
runner. Queue: what the scheduler does for a step with 256 running requests while up to 10,000 wait,
with text, and with images whose pixels are not there; and, as its share, how long that takes
beside the step itself. A line is fitted to each curve by least relative squares; "worst_deviation"
is the largest distance of a point from it, as a share of the line. Live requests: what one callback
or call of the whole engine takes of its event loop with 10,000 of them, beside 100
(live_requests.py). Last line: JSON.

    python benchmarks/growth.py [--layers 16] [--dtype float32] [--plot docs/growth.png]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import live_requests
import numpy as np
import torch
from make_model import make_model
from transformers import AutoConfig

from aioengine.core.plan import Limits, SequencePlan, StepPlan
from aioengine.core.request import Item, Request, StopRule
from aioengine.core.scheduler import Scheduler
from aioengine.execution.memory_budget import ENCODER_STEPS
from aioengine.execution.model_runner import ModelRunner
from aioengine.models.runtime.registry import resolve
from aioengine.sampling.sampler import Sampling
from aioengine.types import Span

BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
QUEUES = (0, 1000, 2000, 4000, 6000, 8000, 10_000)
BLOCK_SIZE = 32
BATCH_CONTEXT, CONTEXT_BATCH, RUNNING = 300, 8, 256
Curve = dict[int, float]


# ---- the model's steps


def decode_plan(number: int, count: int, context: int) -> StepPlan:
    """Each sequence decodes the last token of its context."""
    width = -(-context // BLOCK_SIZE)
    sequences = [
        SequencePlan(
            request_id=str(i),
            epoch=0,
            start=context - 1,
            end=context,
            token_ids=(i % 1000 + 10,),
            block_tables=(tuple(range(i * width, (i + 1) * width)),),
            rows=(),
            samples=True,
            output_index=0,
            sampling=Sampling(),
        )
        for i in range(count)
    ]
    return StepPlan(number, tuple(sequences))


def measure_steps(args: argparse.Namespace) -> tuple[Curve, Curve]:
    """Milliseconds of a decode step by batch and by context."""
    widest = max(
        max(BATCHES) * -(-BATCH_CONTEXT // BLOCK_SIZE), CONTEXT_BATCH * max(CONTEXTS) // BLOCK_SIZE
    )
    limits = Limits(
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=max(BATCHES),
        max_model_len=max(CONTEXTS),
        block_size=BLOCK_SIZE,
        num_blocks=widest,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dtype = getattr(torch, args.dtype)
        make_model(folder, args.layers, dtype)
        config = AutoConfig.from_pretrained(folder)
        model = resolve(config.architectures).load(
            folder, hf_config=config, dtype=dtype, device=torch.device("cpu")
        )
        model.pack()
    runner = ModelRunner(model, limits)
    for cache in itertools.chain.from_iterable(model._caches):
        cache.fill_(0.01)  # pages that nobody has written are all one, in the CPU's cache

    def step(count: int, context: int) -> Callable[[], object]:
        plan = decode_plan(0, count, context)
        return lambda: runner.step(plan).read()

    by_batch = in_turns({count: step(count, BATCH_CONTEXT) for count in BATCHES}, args.rounds)
    by_context = in_turns({each: step(CONTEXT_BATCH, each) for each in CONTEXTS}, args.rounds)
    return by_batch, by_context


def in_turns(works: dict[int, Callable[[], object]], rounds: int) -> Curve:
    """Milliseconds of each, the medians over rounds; the first round is not counted."""
    times: dict[int, list[float]] = {key: [] for key in works}
    for number in range(rounds + 1):
        for key, work in works.items():
            begin = time.perf_counter()
            work()
            if number:
                times[key].append((time.perf_counter() - begin) * 1e3)
    return {key: round(statistics.median(found), 4) for key, found in times.items()}


# ---- the scheduler


def make_request(number: int, *, has_image: bool) -> Request:
    prompt = tuple((number * 7 + i * 13) % 7000 + 10 for i in range(BATCH_CONTEXT))
    items = ()
    if has_image:
        items = (Item(f"image-{number}", "image", Span(4, 256), 256 * 4096),)
    return Request(
        request_id=str(number),
        prompt_token_ids=prompt,
        stop=StopRule(max_tokens=4096),
        items=items,
        sampling=Sampling(),
    )


def crowded(num_running: int, num_waiting: int, *, have_images: bool) -> Scheduler:
    """A scheduler in the midst of its work: so many decode, so many wait."""
    scheduler = Scheduler(
        Limits(
            max_num_seqs=RUNNING,
            max_num_batched_tokens=2048,
            max_model_len=8192,
            block_size=BLOCK_SIZE,
            num_blocks=64 * RUNNING,
            encoder_cache_bytes=256 << 20,
            max_num_encoder_input_tokens=2048,
            max_media_rows=ENCODER_STEPS * 2048,  # as an engine has them
        )
    )
    for number in range(num_running):
        scheduler.submit(make_request(number, has_image=False))
    while any(not request.has_computed_prompt for request in scheduler._running) or (
        scheduler.num_running < num_running
    ):
        one_step(scheduler)
    for number in range(num_waiting):
        scheduler.submit(make_request(num_running + number, has_image=have_images))
    return scheduler


def one_step(scheduler: Scheduler) -> None:
    """What the engine asks of the scheduler for one step."""
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.schedule_media()
    scheduler.commit(plan, [7] * sum(sequence.samples for sequence in plan.sequences))


def measure_queue(num_running: int, rounds: int, *, have_images: bool) -> Curve:
    """Milliseconds of the scheduler's work for a step, by the length of the queue."""
    works = {}
    for length in QUEUES:
        scheduler = crowded(num_running, length, have_images=have_images)
        works[length] = lambda scheduler=scheduler: one_step(scheduler)
    return in_turns(works, rounds)


# ---- the report


def fit(curve: Curve) -> dict[str, float]:
    """The line that is relatively nearest, and how far the worst point lies from it."""
    x, y = np.array(list(curve)), np.array(list(curve.values()))
    columns = np.stack([np.ones_like(x, dtype=float), x], 1)
    (base, slope), *_ = np.linalg.lstsq(columns / y[:, None], np.ones_like(y), rcond=None)
    line = base + slope * x
    return {
        "base_ms": round(float(base), 4),
        "slope_ms": round(float(slope), 6),
        "worst_deviation": round(float(np.abs(y / line - 1).max()), 3),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    curves: dict[str, Curve] = {}
    curves["queue of text"] = measure_queue(RUNNING, args.rounds * 5, have_images=False)
    curves["queue of images"] = measure_queue(RUNNING, args.rounds * 5, have_images=True)
    curves["queue of images, a slot free"] = measure_queue(
        RUNNING - 1, args.rounds * 2, have_images=True
    )
    live = live_requests.measure()
    curves["batch"], curves["context"] = measure_steps(args)
    step_ms = curves["batch"][RUNNING]
    return {
        "settings": {"layers": args.layers, "dtype": args.dtype, "rounds": args.rounds},
        "threads": torch.get_num_threads(),
        "ms": curves,
        "fit": {name: fit(curve) for name, curve in curves.items()},
        "scheduler_share_of_step_at_256": {
            name: {length: round(curve[length] / step_ms, 4) for length in (0, max(QUEUES))}
            for name, curve in curves.items()
            if name.startswith("queue")
        },
        "live_requests": live,
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Three panels: batch, context, queue."""
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(13, 4.2))
    queues = [name for name in result["ms"] if name.startswith("queue")]
    titles = {
        "batch": (f"requests in the batch, {BATCH_CONTEXT} tokens each", ["batch"]),
        "context": (f"tokens of context, {CONTEXT_BATCH} requests", ["context"]),
        "queue": (f"requests waiting, {RUNNING} running", queues),
    }
    colours = ("#1b6ca8", "#d1701f", "#6a8f3c")
    for axes, (title, (label, names)) in zip(panels, titles.items(), strict=True):
        for colour, name in zip(colours, names, strict=False):
            curve, line = result["ms"][name], result["fit"][name]
            x = np.array(list(curve), dtype=float)
            what = f"{name.removeprefix('queue of ')}, " if len(names) > 1 else ""
            text = f"{what}at most {line['worst_deviation']:.0%} off the line"
            axes.plot(x, list(curve.values()), "o", color=colour, markersize=5, label=text)
            ends = np.array([x.min(), x.max()])
            axes.plot(ends, line["base_ms"] + line["slope_ms"] * ends, color=colour, linewidth=1)
        axes.set_title("Scheduler" if title == "queue" else "Decode step", loc="left", fontsize=12)
        axes.set_xlabel(label, fontsize=10.5)
        axes.set_ylabel("milliseconds for a step", fontsize=10.5)
        highest = max(max(result["ms"][name].values()) for name in names)
        axes.set_ylim(0, highest * (1.5 if len(names) > 1 else 1.25))
        axes.set_xlim(0)
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.legend(frameon=False, fontsize=9, loc="upper left")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", type=Path, default=None)
    args = parser.parse_args()
    result = measure(args)
    if args.plot is not None:
        draw(result, args.plot)
    for name, curve in result["ms"].items():
        print(f"{name:32s} {curve} {result['fit'][name]}")
    live_requests.report(result["live_requests"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
