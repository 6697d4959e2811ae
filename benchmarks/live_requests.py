"""Event-loop time of the engine with 100 and with 10,000 live requests.

Half have an image of their own. 64 are served at a time, and the oldest leave and new ones come all
the while. Measured is processor time of the loop's thread, by kind of callback and of call: other
processes hardly count into it. The collector is off meanwhile, as what a full collection takes is
another question, and the model is tiny, so that the loop has most to do. `measure()` is a part of
growth.py; by itself (half a minute):

    python benchmarks/live_requests.py [--live 100 10000] [--rounds 100]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_model import make_model
from PIL import Image

from aioengine import AsyncEngine, SamplingParams
from aioengine.asgi.status_model import StatusBoard
from aioengine.instruments import StageSpan
from aioengine.streams.tokens import TokenStream

LIVE = (100, 10_000)
PARAMS = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
SIZES: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 64,
    "max_model_len": 4400,
    "kv_cache_bytes": 256 << 20,
    "encoder_cache_bytes": 64 << 20,
}
MAX_S = 10.0
Times = dict[str, list[float]]

_RUN = asyncio.events.Handle._run


def kind_of(callback: Any) -> str:
    """What runs: a task's coroutine, or a function."""
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        coroutine: Any = task.get_coro()
        work = coroutine.cr_frame and coroutine.cr_frame.f_locals.get("work")
        callback = work or coroutine
    if isinstance(callback, partial):
        callback = callback.func
    return str(getattr(callback, "__qualname__", type(callback).__qualname__))


@contextmanager
def callbacks_timed(times: Times) -> Iterator[None]:
    """Note the milliseconds of processor time of each callback of the loop, by kind."""

    def run(handle: asyncio.events.Handle) -> None:
        kind = kind_of(handle._callback)
        begin = time.thread_time()
        _RUN(handle)
        times[kind].append((time.thread_time() - begin) * 1e3)

    asyncio.events.Handle._run = run
    try:
        yield
    finally:
        asyncio.events.Handle._run = _RUN


def timed(times: Times, kind: str, function: Callable[[], Any]) -> Any:
    """A call's result; its time goes to `times`."""
    begin = time.thread_time()
    result = function()
    times[kind].append((time.thread_time() - begin) * 1e3)
    return result


def open_stream(engine: AsyncEngine, number: int) -> TokenStream:
    """Every other request has an image, whose colour no other one has."""
    if number % 2:
        colour = tuple(number.to_bytes(3, "little"))
        image = Image.new("RGB", (8, 8), colour)
        return engine.stream(f"<image>What is {number}?", PARAMS, images=[image])
    return engine.stream([5 + number % 1000, 7 + number // 1000] * 16, PARAMS)


async def fill(engine: AsyncEngine, live: int, times: Times) -> list[TokenStream]:
    """Submit so many requests and wait until all are laid out."""
    streams = []
    for number in range(live):
        streams.append(timed(times, "stream()", partial(open_stream, engine, number)))
        await asyncio.sleep(0)
    assert engine._core.tracker is not None
    while engine._core.tracker.num_preparing:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.01)
    return streams


async def churn(
    engine: AsyncEngine, streams: list[TokenStream], board: StatusBoard, rounds: int, times: Times
) -> None:
    """In each round two leave, two come, somebody looks at the figures, and a step is made.

    Ends early after MAX_S, on a machine that is busy with other things.
    """
    stepped, end = asyncio.Event(), time.perf_counter() + MAX_S

    def hear(span: StageSpan) -> None:
        if span.stage == "step":
            stepped.set()

    engine.instruments.listeners.append(hear)
    for number in range(len(streams), len(streams) + 2 * rounds, 2):
        for stream in streams[:2]:
            timed(times, "TokenStream.close()", stream.close)
        del streams[:2]
        streams += [
            timed(times, "stream()", partial(open_stream, engine, each))
            for each in (number, number + 1)
        ]
        now = timed(times, "statistics()", engine.statistics)
        look = partial(board.snapshot, time.perf_counter(), engine.state, now)
        timed(times, "status page", look)
        stepped.clear()
        await stepped.wait()
        if time.perf_counter() > end:
            break
    engine.instruments.listeners.remove(hear)


async def measure_live(folder: Path, live: int, rounds: int) -> Times:
    """Milliseconds by kind, with so many live requests."""
    times: Times = defaultdict(list)
    board = StatusBoard("growth", time.perf_counter())
    async with AsyncEngine.from_pretrained(folder, **SIZES) as engine:
        engine.instruments.watchers.append(board.note_event)
        streams = await fill(engine, live, defaultdict(list))
        await churn(engine, streams, board, rounds // 4, defaultdict(list))  # to warm up
        with callbacks_timed(times):
            await churn(engine, streams, board, rounds, times)
            for name in ("schedule", "schedule_media"):
                function = getattr(engine._core.scheduler, name)
                setattr(
                    engine._core.scheduler,
                    name,
                    partial(timed, times, f"Scheduler.{name}()", function),
                )
            await churn(engine, streams, board, rounds, times)
            await engine.aclose()
        for stream in streams:
            stream.close()
    return times


def summary(found: list[float]) -> dict[str, float]:
    return {
        "count": len(found),
        "median": round(float(np.median(found)), 4),
        "p99": round(float(np.percentile(found, 99)), 3),
        "worst": round(max(found), 3),
    }


def measure(live: tuple[int, ...] = LIVE, rounds: int = 100) -> dict[str, Any]:
    """Milliseconds of the loop by number of live requests and kind; the last to the first."""
    found: dict[int, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), dtype=torch.float32, is_tiny=True)
        for count in live:
            gc.collect()
            gc.disable()
            try:
                times = asyncio.run(measure_live(Path(name), count, rounds))
            finally:
                gc.enable()
            del times["measure_live"]  # the benchmark's own task
            found[count] = {kind: summary(each) for kind, each in sorted(times.items())}
    few, many = found[live[0]], found[live[-1]]
    ratios = {
        kind: {
            name: round(many[kind][name] / max(few[kind][name], 1e-3), 2)
            for name in ("median", "p99", "worst")
        }
        for kind in few.keys() & many.keys()
        if few[kind]["count"] >= 20
    }
    return {"ms": found, "ratio": ratios}


def report(result: dict[str, Any]) -> None:
    """A line for each kind that takes a tenth of a millisecond at times."""
    few, many = list(result["ms"].values())[:: max(1, len(result["ms"]) - 1)]
    print(f"{'milliseconds of the loop':44s} {list(result['ms'])}")
    for kind, each in sorted(many.items(), key=lambda pair: -pair[1]["p99"]):
        if each["p99"] >= 0.1 and kind in few:
            shown = [
                f"{row['median']} / {row['p99']} / {row['worst']}" for row in (few[kind], each)
            ]
            print(f"{kind:44s} {shown[0]:>24s}   {shown[1]:>24s}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--live", type=int, nargs=2, default=LIVE)
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    result = measure(tuple(args.live), args.rounds)
    report(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
