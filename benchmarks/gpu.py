"""What a GPU does with the engine: decode steps against the floor of their bytes, streams, memory.

    python benchmarks/gpu.py [--stages machine,steps,...] [--tiny]

Models have real shapes and random weights, so nothing is fetched. Each stage prints its figures as
it ends, and one that fails says so and leaves the others alone. `make gpu` runs each in a process
of its own, with a deadline (gpu_report.py).

- machine: chip and versions; the rate of a large copy (read and written) and of a large matmul;
  the host's time for an operator that does next to nothing.
- kernels: attention in Triton beside the reference on the device, and the rate at which it reads
  keys and values (gpu_kernels.py).
- steps: decode steps of the runner, from the plan to the tokens read back: captured, and launched
  one kernel after the other, with the kernels' own time; `floor` is the weights and the context's
  keys and values at the rate of the copy.
- shapes: attention over contexts that grow: the first call of each shape beside later ones, and
  the kernels that are taken.
- engine: requests with an image each through the engine, beside transformers' `generate`.
- encoder: gaps between tokens of 16 streams, alone and while 32 images are encoded.
- soak: requests that come and are cancelled; what the allocator has given out before and after.

`--tiny` is for trying the script where there is no GPU. Last line: JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_kernels import measure_kernels
from make_model import make_model
from null_device import BLOCK, MODELS, milliseconds, plan_of
from PIL import Image
from throughput import Baseline, messages
from transformers import AutoConfig

from aioengine import AsyncEngine, SamplingParams
from aioengine.core.plan import Limits
from aioengine.execution.graphs import capture_on
from aioengine.execution.model_runner import ModelRunner
from aioengine.kernels.dense import dense_attention, padded_length
from aioengine.models.runtime.registry import resolve

REQUESTS = (1, 8, 32, 128)
CONTEXTS = (300, 4000)
STEPS = 20
PROMPT = "A long story of a lighthouse and the people who kept it, told from the beginning."


class Report:
    """What has been found, and what the stages share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.is_tiny = options.tiny
        self.found: dict[str, Any] = {}

    @cached_property
    def bytes_per_s(self) -> float:
        """The rate of a large copy, of what it reads and writes."""
        size = 1 << (20 if self.is_tiny else 32)
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=self.device)
        place = torch.empty_like(source)
        return 2 * size / self.timed(lambda: place.copy_(source))

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, function: Callable[[], Any], count: int = STEPS) -> float:
        """The median of a call's seconds, each waited for."""

        def call() -> None:
            function()
            self.wait()

        for _ in range(3):
            call()
        return milliseconds(call, count) / 1e3


def machine(report: Report) -> None:
    edge = 256 if report.is_tiny else 8192
    matrix = torch.randn(edge, edge, device=report.device, dtype=torch.bfloat16)
    flops = 2 * edge**3 / report.timed(lambda: matrix @ matrix)
    small = torch.zeros(8, device=report.device)

    def launch() -> None:
        for _ in range(1000):
            small.add_(1)

    launch()
    report.wait()
    launch_us = milliseconds(launch, 5)
    is_cuda = report.device.type == "cuda"
    report.found["machine"] = {
        "chip": torch.cuda.get_device_name() if is_cuda else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "copy_tb_per_s": round(report.bytes_per_s / 1e12, 2),
        "matmul_tflops": round(flops / 1e12),
        "launch_us": round(launch_us, 1),
    }
    print(report.found["machine"], flush=True)


def runner_of(report: Report, name: str, requests: int, context: int) -> ModelRunner:
    """A runner of a model with random weights and pages for so many requests."""
    architecture, kind, sizes = MODELS[name]
    if report.is_tiny:
        small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        sizes = {**sizes, **small, "vocab_size": 512, "head_dim": 16}
    config = AutoConfig.for_model(kind, architectures=[architecture], **sizes)
    config.dtype = torch.bfloat16
    family = resolve([architecture])
    specs = family.probe(config)
    with torch.device(report.device):
        module = family.hf_class(config)._from_config(config, dtype=torch.bfloat16).eval()
    model = family(module, specs=specs)
    with torch.inference_mode():
        model.pack()
    width = context // BLOCK + 2
    limits = Limits(
        max_num_seqs=requests,
        max_num_batched_tokens=2048,
        max_model_len=8192,
        block_size=BLOCK,
        num_blocks=requests * width * len(model.kv_groups),
        num_groups=len(model.kv_groups),
    )
    runner = ModelRunner(model, limits, capture=capture_on(report.device))
    runner.find_decode_steps()
    return runner


def weight_bytes(runner: ModelRunner) -> int:
    """What a step reads of the weights: all but the table of embeddings, unless it is the head."""
    module = runner.model.model
    table = module.get_input_embeddings().weight
    sizes = {each.data_ptr(): each.nbytes for each in module.parameters()}
    if module.get_output_embeddings().weight is not table:
        sizes.pop(table.data_ptr(), None)
    return sum(sizes.values())


def kernels_of(report: Report, step: Callable[[], Any]) -> dict[str, Any]:
    """Kernels of one call: how many, their own milliseconds, and which take most."""
    if report.device.type != "cuda":
        return {"kernels": 0, "device_ms": 0.0, "most": []}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        report.wait()
    events = [each for each in profile.key_averages() if each.self_device_time_total > 0]
    events.sort(key=lambda each: -each.self_device_time_total)
    return {
        "kernels": sum(each.count for each in events),
        "device_ms": round(sum(each.self_device_time_total for each in events) / 1e3, 3),
        "most": [
            (each.key[:70], each.count, round(each.self_device_time_total / 1e3, 3))
            for each in events[:8]
        ],
    }


def steps(report: Report) -> None:
    rows = report.found["steps"] = []
    names = ("qwen2-0.5b",) if report.is_tiny else ("qwen2-0.5b", "qwen2-1.5b", "qwen2-7b")
    print(
        f"{'model':12}{'context':>8}{'requests':>9}{'captured':>9}{'launched':>9}{'kernels':>9}"
        f"{'own ms':>8}{'floor':>7}"
    )
    for name, context in itertools.product(names, CONTEXTS):
        most = 2 if report.is_tiny else max(REQUESTS) if context < 1000 else 32
        runner = runner_of(report, name, most, context)
        bytes_read = weight_bytes(runner)
        per_token = sum(
            2 * spec.num_kv_heads * (spec.key_dim + spec.value_dim) for spec in runner.model.specs
        )
        for requests in (each for each in REQUESTS if each <= most):
            plan = plan_of(runner, requests, {}, context)

            def step(runner: ModelRunner = runner, plan: Any = plan) -> None:
                runner.step(plan).read()

            captured, runner._captured = runner._captured, None
            launched, found = report.timed(step), kernels_of(report, step)
            runner._captured = captured
            seconds = report.timed(step)
            floor = (bytes_read + requests * context * per_token) / report.bytes_per_s
            row = {"model": name, "context": context, "requests": requests}
            row |= {"ms": round(seconds * 1e3, 2), "launched_ms": round(launched * 1e3, 2)}
            row |= {"is_captured": captured is not None and captured.counts.replayed > 0}
            row |= {"floor_ms": round(floor * 1e3, 3), **found}
            rows.append(row)
            print(
                f"{name:12}{context:8}{requests:9}{row['ms']:9.2f}{row['launched_ms']:9.2f}"
                f"{row['kernels']:9}{row['device_ms']:8.2f}{row['floor_ms']:7.2f}",
                flush=True,
            )
        print("  " + "\n  ".join(map(str, row["most"])))
        del runner, plan, step
        if report.device.type == "cuda":
            torch.cuda.empty_cache()
    if not any(row["is_captured"] for row in rows):
        print("  NOTHING WAS CAPTURED: all of these are launched steps", flush=True)


def shapes(report: Report) -> None:
    first: list[float] = []
    later: list[float] = []
    dtype = torch.bfloat16
    for length in range(300, 1500, 60):
        padded = padded_length(length, report.device)
        query = torch.randn(8, 4, 7, 64, dtype=dtype, device=report.device)
        key, value = torch.randn(2, 8, 4, padded, 64, dtype=dtype, device=report.device)
        mask = torch.zeros(8, 1, 1, padded, dtype=dtype, device=report.device)
        for place in (first, later):
            report.wait()
            begin = time.perf_counter()
            dense_attention(query, key, value, mask)
            report.wait()
            place.append((time.perf_counter() - begin) * 1e3)
    found = kernels_of(report, lambda: dense_attention(query, key, value, mask))
    report.found["shapes"] = {
        "first_ms": round(statistics.median(first), 3),
        "first_worst_ms": round(max(first[1:]), 3),
        "later_ms": round(statistics.median(later), 3),
        "kernels": found["most"],
    }
    print(report.found["shapes"], flush=True)


def image(number: int) -> Image.Image:
    """An image that no other number has."""
    return Image.effect_noise((224, 224), 40 + number).convert("RGB")


def engine_of(folder: Path, report: Report) -> Any:
    sizes = {"kv_cache_bytes": 64 << 20} if report.is_tiny else {}
    return AsyncEngine.from_pretrained(folder, device=str(report.device), **sizes)


async def engine_stage(report: Report, folder: Path) -> None:
    baseline = Baseline(folder, 64, report.device)
    rows = report.found["engine"] = []
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    async with engine_of(folder, report) as engine:
        for requests in (1, 16, 64):
            ratios, rates = [], []
            for turn in range(4):
                await engine.reset_caches()
                images = [image(number) for number in range(requests)]
                begin = time.perf_counter()
                await asyncio.gather(*(engine.generate(messages(x), params) for x in images))
                ours = time.perf_counter() - begin
                begin = time.perf_counter()
                await asyncio.to_thread(baseline.generate_images, images)
                theirs = time.perf_counter() - begin
                if turn:
                    ratios.append(theirs / ours)
                    rates.append(requests * 64 / ours)
            row = {
                "requests": requests,
                "tokens_per_s": round(statistics.median(rates)),
                "over_padded_batch": round(statistics.median(ratios), 2),
            }
            captured = engine._core.loaded.runner._captured
            if captured is not None:
                counts = captured.counts
                row |= {"replayed": counts.replayed, "launched": counts.launched}
            rows.append(row)
            print(row, flush=True)


async def encoder_stage(report: Report, folder: Path) -> None:
    tokens = 64 if report.is_tiny else 400
    stream_params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    async def stream(engine: AsyncEngine, gaps: list[float]) -> None:
        last = 0.0
        async for _ in engine.stream(PROMPT, stream_params):
            now = time.perf_counter()
            if last:
                gaps.append((now - last) * 1e3)
            last = now

    async with engine_of(folder, report) as engine:
        found: dict[str, Any] = {}
        for name in ("warm", "alone", "beside"):
            gaps: list[float] = []
            streams = [asyncio.create_task(stream(engine, gaps)) for _ in range(16)]
            await asyncio.sleep(0.3)
            if name != "alone":
                begin = time.perf_counter()
                images = [image(100 + number) for number in range(32)]
                await asyncio.gather(*(engine.generate(messages(x), short) for x in images))
                found["images_s"] = round(time.perf_counter() - begin, 3)
                await engine.reset_caches()
            await asyncio.gather(*streams)
            parts = statistics.quantiles(gaps, n=100)
            found[name] = {
                "p50_ms": round(parts[49], 2),
                "p99_ms": round(parts[98], 2),
                "most_ms": round(max(gaps), 2),
            }
        report.found["encoder"] = found
        print(found, flush=True)


async def soak_stage(report: Report, folder: Path) -> None:
    rng = random.Random(3)
    is_cuda = report.device.type == "cuda"
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=60, ignore_eos=True)
    used: list[int] = []
    async with engine_of(folder, report) as engine:
        for _ in range(2 if report.is_tiny else 4):
            deadline = time.perf_counter() + (0.5 if report.is_tiny else 4)
            while time.perf_counter() < deadline:
                images = [image(rng.randrange(40)) for _ in range(16)]
                tasks = [
                    asyncio.create_task(engine.generate(messages(each), params)) for each in images
                ]
                await asyncio.sleep(rng.random() * 0.3)
                for task in tasks[::2]:
                    task.cancel()
                for task in tasks:
                    with suppress(asyncio.CancelledError):
                        await task
            await engine.reset_caches()
            used.append(torch.cuda.memory_allocated() if is_cuda else 0)
        now = engine.statistics()
        report.found["soak"] = {
            "allocated_mb": [round(each / 1e6, 2) for each in used],
            "blocks_free": f"{now.kv_blocks_free} of {now.kv_blocks_total}",
        }
        print(report.found["soak"], flush=True)


PLAIN: dict[str, Callable[[Report], None]] = {
    "machine": machine,
    "kernels": measure_kernels,
    "shapes": shapes,
    "steps": steps,
}
WITH_ENGINE = {"engine": engine_stage, "encoder": encoder_stage, "soak": soak_stage}


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Another stream than the default one, in which nothing can be captured."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", default=",".join([*PLAIN, *WITH_ENGINE]))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    report = Report(options)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in options.stages.split(","):
            begin = time.perf_counter()
            try:
                if name in PLAIN:
                    with own_stream(report.device):
                        PLAIN[name](report)
                else:
                    if not any(folder.iterdir()):
                        make_model(folder, is_tiny=options.tiny)
                    asyncio.run(WITH_ENGINE[name](report, folder))
            except Exception as error:
                traceback.print_exc()
                report.found[name] = repr(error)
            print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    print(json.dumps(report.found))


if __name__ == "__main__":
    main()
