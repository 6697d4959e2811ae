"""What metrics and traces cost, and what they cost where nobody has asked for them.

Events: microseconds for one token of a request, and for the record of one step of 64 requests, with
no watcher, with Metrics, with the tracer, and with both. Requests: the same ones to a model so
small that everything around it takes the time (make_model.py --tiny), so that the share is the
largest there can be: tokens per second, and microseconds of the event loop's thread per token; in
turns, ratios within rounds to the run without hooks, and of two runs without, which is the noise.
The tracer's spans are recorded and thrown away. A scrape is timed, too. All but tokens per second
is processor time, which others on the machine disturb least. Last line: JSON, medians.

    python benchmarks/observability.py [--rounds 9] [--requests 32] [--max-tokens 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from make_model import make_model
from opentelemetry.sdk.trace import TracerProvider

from aioengine import AsyncEngine, SamplingParams
from aioengine.engine.request_tracker import RequestTracker
from aioengine.instruments import StageSpan
from aioengine.metrics import Metrics
from aioengine.tracing import trace_requests

NUM_EVENTS, NUM_LIVE = 6400, 64
OFF, METRICS, TRACING, BOTH, OFF_AGAIN = "off", "metrics", "tracing", "both", "off again"
MODES = (OFF, METRICS, TRACING, BOTH)


def attach(engine: AsyncEngine, mode: str, provider: TracerProvider) -> list[Any]:
    """What is to be closed afterwards."""
    hooks: list[Any] = []
    if mode in (METRICS, BOTH):
        hooks.append(Metrics(engine))
    if mode in (TRACING, BOTH):
        hooks.append(trace_requests(engine, provider))
    return hooks


class Request:
    """As much of a state as its events need."""

    def __init__(self, name: str) -> None:
        self.request_id = name


def event_costs(engine: AsyncEngine, mode: str, provider: TracerProvider) -> dict[str, float]:
    """Microseconds for a token and for the record of a step."""
    hooks = attach(engine, mode, provider)
    nothing: Any = None
    tracker = RequestTracker(nothing, nothing, engine.instruments, forget=nothing, changed=nothing)
    states: list[Any] = [Request(str(index)) for index in range(NUM_LIVE)]
    for state in states:
        tracker._note("submitted", state)
        tracker._note("admitted", state)
    found = {}
    begin = time.thread_time()
    for _ in range(NUM_EVENTS // NUM_LIVE):
        for state in states:
            tracker._note("token", state, index=0)
    found["token_us"] = (time.thread_time() - begin) / NUM_EVENTS * 1e6
    step = StageSpan("step", 0.0, 0.01, tuple(state.request_id for state in states))
    engine.instruments.record(step)  # the first one ends their time in the queue
    begin = time.thread_time()
    for _ in range(NUM_EVENTS):
        engine.instruments.record(step)
    found["step_us"] = (time.thread_time() - begin) / NUM_EVENTS * 1e6
    for state in states:
        tracker._note("aborted", state)
    for hook in hooks:
        hook.close()
    return found


async def run(
    engine: AsyncEngine, mode: str, provider: TracerProvider, options: argparse.Namespace
) -> dict[str, float]:
    """Tokens per second, and microseconds of the loop's thread for each."""
    hooks = attach(engine, mode, provider)
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    begin, used = time.perf_counter(), time.thread_time()
    outputs = await asyncio.gather(
        *(engine.generate(f"number {index}", params) for index in range(options.requests))
    )
    seconds, used = time.perf_counter() - begin, time.thread_time() - used
    for hook in hooks:
        hook.close()
    num_tokens = sum(len(output.token_ids) for output in outputs)
    return {"tokens_per_s": num_tokens / seconds, "loop_us_per_token": used / num_tokens * 1e6}


def scrape_ms(engine: AsyncEngine) -> float:
    metrics = Metrics(engine)
    begin = time.thread_time()
    metrics.render()
    took = time.thread_time() - begin
    metrics.close()
    return took * 1e3


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    provider = TracerProvider(shutdown_on_exit=False)
    events: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in (*MODES, OFF_AGAIN)}
    scrapes = []
    async with AsyncEngine.from_pretrained(folder, max_num_seqs=options.requests) as engine:
        for number in range(options.rounds + 1):
            shift = number % len(runs)
            for mode in [*runs][shift:] + [*runs][:shift]:
                kind = OFF if mode == OFF_AGAIN else mode
                ran = await run(engine, kind, provider, options)
                if number:  # the first round warms up
                    runs[mode].append(ran)
            for mode in MODES:
                events[mode].append(event_costs(engine, mode, provider))
            scrapes.append(scrape_ms(engine))
    return {**medians(events), **medians(runs), **ratios(runs), "scrape_ms": median(scrapes)}


def medians(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    names = found[OFF][0]
    return {
        name: {mode: median([each[name] for each in values]) for mode, values in found.items()}
        for name in names
    }


def ratios(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Of each mode to the run without hooks in the same round."""
    return {
        f"{name}_over_off": {
            mode: median([a[name] / b[name] for a, b in zip(values, found[OFF], strict=True)])
            for mode, values in found.items()
            if mode != OFF
        }
        for name in found[OFF][0]
    }


def median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), dtype=torch.float32, is_tiny=True)
        result = asyncio.run(measure(Path(folder), options))
    print(json.dumps({"settings": vars(options), **result}))


if __name__ == "__main__":
    main()
