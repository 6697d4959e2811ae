"""examples/reference_app with the engine in its process, and with a server of the model beside it.

    PYTHONPATH=. HF_HUB_OFFLINE=1 python benchmarks/application.py FOLDER [--rounds 3]
        [--against llama.cpp,transformers,transformers-batched]
        [--llama BIN --gguf FILE [--mmproj FILE]]

FOLDER holds a model that knows ChatML's marks: that of `make real-test`, or one that takes images
(contenders/seeing_model.py). Its chat template is replaced by one with tools. BIN holds
`llama-server` (docs/benchmarks.md says how llama.cpp is built); `transformers serve` needs
accelerate.

Users each send one request after the other: two questions of three turns, then an upload of one
turn; or, where the model takes images, an upload that it is shown, then a question. Every turn
makes the same number of tokens everywhere, from the same prompt: what the model writes is streamed,
and then replaced by calls that were written before, so that conversations go on in the same way
(`Rehearsed`). Meanwhile the application recomputes its report each second, in plain Python, and is
asked for its health twenty times a second.

In each round every contender is started once, one after the other: start until healthy and until
the first answer, one user, eight users, memory (PSS of all its processes, the application's too).
Processor time of all these processes is noted, which tells more than times where others compute.
Medians of rounds, 99th percentiles of all rounds together; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import io
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
from contenders import report
from contenders.crew import alone
from contenders.desk import (
    BATCHED,
    LLAMA,
    MERCHANTS,
    OURS,
    SERVE,
    contender_of,
    cpu_s,
    free_port,
    memory_mb,
    num_lines,
    prepare,
    running,
    serve,
)
from PIL import Image

READY_WITHIN_S = 240.0
PING_EVERY_S = 0.05
Act = Callable[[Any, int, "Times"], Awaitable[None]]


# ---- users


@cache
def make_receipt(number: int) -> bytes:
    """A photograph's worth of detail, another for each number."""
    small = np.random.default_rng(number).integers(0, 256, (150, 100, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    image = Image.fromarray(small).resize((1800, 2700), Image.Resampling.BICUBIC)
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


@dataclass
class Times:
    """Seconds, each measurement of a load."""

    question: list[float] = field(default_factory=list)
    first_text: list[float] = field(default_factory=list)
    upload: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    whole: float = 0.0
    cpu: float = 0.0


async def ask(session: Any, number: int, times: Times) -> None:
    begin, is_first = time.perf_counter(), True
    text = f"What did we spend at {MERCHANTS[number % len(MERCHANTS)]}, and this year? {number:04}"
    async with session.post("/questions", json={"text": text}) as response:
        response.raise_for_status()
        last = b""
        async for line in response.content:
            last = line if line.strip() else last
            if is_first and line.startswith(b'data: {"text"'):
                times.first_text.append(time.perf_counter() - begin)
                is_first = False
    if last.strip() != b"data: [DONE]":
        raise RuntimeError(f"an answer broke off: {last[:200]!r}")
    times.question.append(time.perf_counter() - begin)


async def upload(session: Any, number: int, times: Times) -> None:
    begin = time.perf_counter()
    form = aiohttp.FormData()
    form.add_field("image", make_receipt(number), filename="receipt.jpg", content_type="image/jpeg")
    form.add_field("note", f"Taxi, {number:04}, 12.50, 2020-01-01")
    async with session.post("/receipts", data=form) as response:
        response.raise_for_status()
        if (await response.json())["expense"] is None:
            raise RuntimeError("a receipt was not filed")
    times.upload.append(time.perf_counter() - begin)


ACTS = {False: (ask, ask, upload), True: (upload, ask)}
"""What users do in turns, by whether the model takes images."""


async def ping(session: Any, times: Times) -> None:
    while True:
        begin = time.perf_counter()
        async with session.get("/health") as response:
            await response.read()
        times.health.append(time.perf_counter() - begin)
        await asyncio.sleep(PING_EVERY_S)


async def load(
    port: int, users: int, requests: int, first: int, acts: Sequence[Act]
) -> tuple[Times, dict[str, int]]:
    """So many users, each with so many requests; and the tokens that these took."""
    times = Times()
    plan = [
        [(acts[i % len(acts)], first + place * requests + i) for i in range(requests)]
        for place in range(users)
    ]
    for act, number in chain(*plan):
        if act is upload:
            make_receipt(number)  # and keep it
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) as session:

        async def user(visits: list[tuple[Act, int]]) -> None:
            for act, number in visits:
                await act(session, number, times)

        async def counts() -> Counter[str]:
            async with session.get("/counts") as response:
                return Counter(await response.json())

        before = await counts()
        pinger = asyncio.create_task(ping(session, times))
        begin = time.perf_counter()
        await asyncio.gather(*map(user, plan))
        times.whole = time.perf_counter() - begin
        pinger.cancel()
        return times, dict(await counts() - before)


async def healthy(port: int, pids: list[int]) -> None:
    """Return when the application answers. Raises RuntimeError where a process has ended."""
    end = time.perf_counter() + READY_WITHIN_S
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        while time.perf_counter() < end:
            with suppress(aiohttp.ClientError):
                async with session.get("/health") as response:
                    if response.ok:
                        return
            if any(has_ended(pid) for pid in pids):
                break
            await asyncio.sleep(0.02)
    raise RuntimeError("it does not start")


def has_ended(pid: int) -> bool:
    return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()


# ---- rounds


def measure(
    name: str, models: tuple[Path, Path], work: Path, options: argparse.Namespace
) -> dict[Any, Any]:
    """One round of one contender."""
    app_port, port, acts = free_port(), free_port(), ACTS[options.sees_images]
    contender = contender_of(name, models[name in (SERVE, BATCHED)], port, options)
    found: dict[Any, Any] = {"load_before": os.getloadavg()[0]}
    begin = time.perf_counter()
    with running(contender, app_port, work) as pids:
        asyncio.run(healthy(app_port, pids))
        found["ready_s"] = time.perf_counter() - begin
        asyncio.run(load(app_port, 1, 1, 9000, acts))
        found["first_answer_s"] = time.perf_counter() - begin
        asyncio.run(load(app_port, 1, 3, 9100, acts))
        asyncio.run(load(app_port, options.most_users, 1, 9200, acts))  # warms all slots
        for users in options.users:
            requests = options.requests if users > 1 else options.requests + 3
            used_s = cpu_s(pids)
            times, counts = asyncio.run(load(app_port, users, requests, 1000 * users, acts))
            times.cpu = cpu_s(pids) - used_s
            if counts["completion_tokens"] != counts["turns"] * options.tokens:
                raise RuntimeError(f"not {options.tokens} tokens a turn: {counts}")
            found[users] = (times, counts)
        found["memory_mb"] = memory_mb(pids)
    return found


def summarize(rounds: list[dict[Any, Any]], numbers: list[int]) -> dict[str, Any]:
    """Figures of one contender over all rounds; times in milliseconds."""
    found: dict[str, Any] = {
        key: round(median(each[key] for each in rounds), 1)
        for key in ("ready_s", "first_answer_s", "memory_mb", "load_before")
    }
    for users in numbers:
        loads = [each[users] for each in rounds]
        row: dict[str, Any] = {}
        for kind in ("question", "first_text", "upload", "health"):
            values = [1e3 * value for times, _ in loads for value in getattr(times, kind)]
            row |= {
                f"{kind}_p50_ms": round(
                    median(1e3 * median(getattr(times, kind)) for times, _ in loads), 1
                ),
                f"{kind}_p99_ms": round(float(np.percentile(values, 99)), 1),
                f"{kind}_worst_ms": round(max(values), 1),
                f"num_{kind}": len(values),
            }
        rates = [counts["completion_tokens"] / times.whole for times, counts in loads]
        used = [1e3 * times.cpu / counts["completion_tokens"] for times, counts in loads]
        row |= {"cpu_ms_a_token": round(median(used), 2)}
        row |= {"tokens_per_s": round(median(rates), 1), "tokens_a_round": loads[0][1]}
        found[f"users_{users}"] = row
    return found


def ratios(
    ours: list[dict[Any, Any]], theirs: list[dict[Any, Any]], numbers: list[int]
) -> dict[str, float]:
    """Medians of a contender's figures over ours, round by round."""
    pairs = list(zip(ours, theirs, strict=True))
    found = {"memory": median(b["memory_mb"] / a["memory_mb"] for a, b in pairs)}
    for users in numbers:
        for kind in ("question", "first_text", "upload"):
            medians = [[median(getattr(each[users][0], kind)) for each in pair] for pair in pairs]
            found[f"{kind}_{users}"] = median(their / our for our, their in medians)
        used = [(a[users][0].cpu, b[users][0].cpu) for a, b in pairs]
        found[f"cpu_{users}"] = median(their / our for our, their in used)
    return {key: round(value, 2) for key, value in found.items()}


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    listed = parser.add_argument
    listed("model", type=Path, nargs="?", metavar="FOLDER")
    listed("--against", default=None, help="peers, by comma")
    listed("--rounds", type=int, default=3)
    listed("--users", type=lambda text: [*map(int, text.split(","))], default=[1, 8])
    listed("--requests", type=int, default=6, help="of each user; a single one has 3 more")
    listed("--tokens", type=int, default=32, help="of each turn")
    listed("--threads", type=int, default=len(os.sched_getaffinity(0)))
    listed("--llama", type=Path, default=None, metavar="BIN")
    listed("--gguf", type=Path, default=None, help="the model in bfloat16, for llama.cpp")
    listed("--mmproj", type=Path, default=None, help="its vision tower, for llama.cpp")
    listed("--lock", type=Path, default=None, help="held while something is measured")
    listed("--role", choices=("users", "app"), default="users", help=argparse.SUPPRESS)
    listed("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "users":
        check(options, parser)
    return options


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Complete the users' options; end the program where some are missing."""
    if options.model is None:
        parser.error("FOLDER is missing")
    options.most_users = max(options.users)
    config = json.loads((options.model / "config.json").read_text())
    options.sees_images = "vision_config" in config
    if options.requests < len(ACTS[options.sees_images]):
        parser.error("--requests: each user has to upload and to ask")
    # Batches are of text only: with images, `transformers serve` answers one after the other.
    peers = [LLAMA, SERVE] if options.sees_images else [LLAMA, SERVE, BATCHED]
    given = ",".join(peers) if options.against is None else options.against
    options.against = [name for name in given.split(",") if name]
    needs = {"--llama": options.llama, "--gguf": options.gguf}
    if options.sees_images:
        needs["--mmproj"] = options.mmproj
    if LLAMA in options.against and None in needs.values():
        parser.error(f"llama.cpp needs {', '.join(needs)}, or leave it out of --against")


def main() -> None:
    options = options_of()
    if options.role == "app":
        serve(options.port)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers end too
    names, failures = [OURS, *options.against], {}
    measured: dict[str, list[dict[Any, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        models = prepare(options.model, work)
        for number in range(options.rounds):
            shift = number % len(names)
            for name in [*names[shift:], *names[:shift]]:
                if name in failures:
                    continue
                with alone(options.lock):
                    try:
                        measured[name].append(measure(name, models, work, options))
                    except Exception as error:
                        log = (work / f"{name}.log").read_text(errors="replace")
                        print(log[-3000:], file=sys.stderr)
                        failures[name] = f"{type(error).__name__}: {error}"
                        continue
                print(
                    f"round {number} {name}: {summarize(measured[name][-1:], options.users)}",
                    file=sys.stderr,
                )
    about: dict[str, Any] = {
        "benchmark": "application",
        "sees_images": options.sees_images,
        "machine": report.machine("bfloat16", options.threads),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "lines": num_lines(),
        "failures": failures,
    }
    whole = {name: rounds for name, rounds in measured.items() if name not in failures}
    for name, rounds in whole.items():
        about[name] = summarize(rounds, options.users)
        if name != OURS and OURS in whole:
            about[name]["ratios_to_ours"] = ratios(whole[OURS], rounds, options.users)
    print(json.dumps(about))


if __name__ == "__main__":
    main()
