"""How fast prompts with images get in, beside an application that calls the HF processor itself.

Throughput: prompts with 1, 4 and 8 JPEGs of 1920 x 1080 to a model so small that intake takes the
time. The baseline, in the same run and with the same engine, decodes and processes each image
inline, in the coroutine that asks, as an application without this engine would: Pillow's decoder,
then the HF processor. Then the same prompts again, with their images cached. torch is given one
core less than there are, as the README advises where other work runs beside it.

Features: how long one image takes from its bytes to the encoder's input, cold and cached.

First token: the prompt with 8 images to the benchmark model (make_model.py), beside the same
stages one after the other: decode, process, encode, prefill. Last line: JSON.

    python benchmarks/intake.py [--prompts 24] [--rounds 3] [--layers 16] [--skip-model]
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_model import make_model
from PIL import Image

from aioengine import AsyncEngine, Embeddings, SamplingParams
from aioengine.media_pipeline.items import MediaInput, MediaOwner
from aioengine.processors.inputs import MultiModalKwargs
from aioengine.processors.item_work import Worked, WorkItem

SIZE = (1920, 1080)
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class Images:
    """JPEGs with a photograph's worth of detail; each is new, but all are equal work."""

    def __init__(self) -> None:
        small = np.random.default_rng(0).integers(0, 256, (135, 240, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        image = Image.fromarray(small).resize(SIZE, Image.Resampling.BICUBIC)
        image.save(buffer, "JPEG", quality=90)
        self._data = buffer.getvalue()
        self._number = 0

    def take(self, count: int) -> list[bytes]:
        """So many that nobody has seen."""
        found = []
        for _ in range(count):
            self._number += 1
            comment = b"\xff\xfe\x00\x0a%08d" % self._number
            found.append(self._data[:2] + comment + self._data[2:])
        return found


def prompt_of(count: int) -> str:
    return "Compare: " + "<image>" * count + " Which one?"


def process_inline(engine: AsyncEngine, data: bytes) -> tuple[Any, float, float, float]:
    """One image as an application would do it; the item, and when its stages were done."""
    processor = engine.processor
    began = time.perf_counter()
    image = Image.open(io.BytesIO(data)).convert("RGB")
    decoded = time.perf_counter()
    outputs = processor.info.get_hf_processor()(text="<image>", images=[image], return_tensors="pt")
    config = processor._get_mm_fields_config(outputs, {})
    (item,) = MultiModalKwargs.build(dict(outputs), config)["image"]
    return item, began, decoded, time.perf_counter()


def inline_workers(engine: AsyncEngine) -> Callable[[WorkItem], Awaitable[Worked]]:
    """Takes the place of the engine's workers: everything happens on the event loop."""

    async def work(work: WorkItem) -> Worked:
        item, began, decoded, processed = process_inline(engine, work.source.undecoded)
        return Worked(item=item, began=began, decoded=decoded, processed=processed)

    return work


async def requests_per_s(engine: AsyncEngine, prompts: Sequence[list[bytes]]) -> float:
    begin = time.perf_counter()
    await asyncio.gather(
        *(engine.generate(prompt_of(len(images)), ONE, images=images) for images in prompts)
    )
    return len(prompts) / (time.perf_counter() - begin)


async def throughput(
    engine: AsyncEngine, jpegs: Images, num_images: int, num_prompts: int, rounds: int
) -> dict[str, float]:
    """Requests per second: inline, cold and cached. In turns, medians."""
    workers: Any = engine._core.input_processor.media._workers
    own = workers.work
    found: dict[str, list[float]] = {"inline": [], "cold": [], "cached": []}
    for _ in range(rounds):
        prompts = [jpegs.take(num_images) for _ in range(num_prompts)]
        workers.work = inline_workers(engine)
        found["inline"].append(await requests_per_s(engine, prompts))
        workers.work = own
        prompts = [jpegs.take(num_images) for _ in range(num_prompts)]
        found["cold"].append(await requests_per_s(engine, prompts))
        engine._core.scheduler.pool.clear()
        found["cached"].append(await requests_per_s(engine, prompts))
        await engine.reset_caches()
    medians = {name: statistics.median(values) for name, values in found.items()}
    ratios = [cold / inline for cold, inline in zip(found["cold"], found["inline"], strict=True)]
    return {**medians, "speedup": statistics.median(ratios)}


async def features_s(engine: AsyncEngine, data: bytes) -> float:
    """From an image's bytes to what the encoder is given."""
    pipeline = engine._core.input_processor.media
    media = [MediaInput("image", 0, data, "images[0]", True)]
    begin = time.perf_counter()
    options = await pipeline.read_options(media, {})
    owner = MediaOwner("features", options, pipeline.lease(), None)
    (identified,), _ = await pipeline.identify(media, owner)
    await pipeline.features(identified, None, owner.request_id)
    return time.perf_counter() - begin


async def features(engine: AsyncEngine, jpegs: Images, rounds: int) -> dict[str, float]:
    """Milliseconds, cold and cached."""
    cold, cached = [], []
    for data in jpegs.take(rounds):
        cold.append(await features_s(engine, data))
        cached.append(min([await features_s(engine, data) for _ in range(3)]))
    ratios = [a / b for a, b in zip(cold, cached, strict=True)]
    return {
        "cold_ms": statistics.median(cold) * 1e3,
        "cached_ms": statistics.median(cached) * 1e3,
        "speedup": statistics.median(ratios),
    }


async def first_token(
    engine: AsyncEngine, jpegs: Images, num_images: int, rounds: int
) -> dict[str, Any]:
    """Seconds to the first token of one prompt, beside its stages one after the other."""
    together, apart, stages = [], [], []
    for _ in range(rounds):
        images = jpegs.take(num_images)
        spans: list[Any] = []
        engine.instruments.listeners.append(spans.append)
        begin = time.perf_counter()
        await engine.generate(prompt_of(num_images), ONE, images=images)
        together.append(time.perf_counter() - begin)
        engine.instruments.listeners.remove(spans.append)
        stages.append(
            {
                stage: sum(span.end - span.start for span in spans if span.stage == stage)
                for stage in ("decode", "process", "encode", "step")
            }
        )
        await engine.reset_caches()
        apart.append(await one_after_the_other(engine, jpegs.take(num_images)))
        await engine.reset_caches()
    sums = [sum(stage.values()) for stage in apart]
    return {
        "num_images": num_images,
        "together_s": statistics.median(together),
        "in_sequence_s": statistics.median(sums),
        "speedup": statistics.median([b / a for a, b in zip(together, sums, strict=True)]),
        "stages_in_sequence_s": medians_of(apart),
        "stages_together_s": medians_of(stages),
    }


async def one_after_the_other(engine: AsyncEngine, images: Sequence[bytes]) -> dict[str, float]:
    """Each stage as a whole before the next begins: the seconds of each."""
    decode = process = encode = 0.0
    runner = engine._core.loaded.runner
    items = []
    for data in images:
        item, began, decoded, processed = process_inline(engine, data)
        decode, process = decode + decoded - began, process + processed - decoded
        items.append(item)
    rows = []
    for item in items:
        begin = time.perf_counter()
        rows += await asyncio.to_thread(encode_one, runner, item)
        encode += time.perf_counter() - begin
    begin = time.perf_counter()
    embeddings = [Embeddings(row.float()) for row in rows]
    await engine.generate(prompt_of(len(images)), ONE, images=embeddings)
    return {
        "decode": decode,
        "process": process,
        "encode": encode,
        "prefill": time.perf_counter() - begin,
    }


@torch.inference_mode()
def encode_one(runner: Any, item: Any) -> list[torch.Tensor]:
    return list(runner.model.encode("image", [item]))


def medians_of(stages: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median([stage[name] for stage in stages]) for name in stages[0]}


async def run(args: argparse.Namespace) -> dict[str, Any]:
    jpegs = Images()
    all_threads = torch.get_num_threads()
    torch.set_num_threads(args.threads or max(1, all_threads - 1))
    result: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), dtype=torch.float32, is_tiny=True)
        options = {"device": "cpu", "kv_cache_bytes": 64 << 20, "max_model_len": 4096}
        async with AsyncEngine.from_pretrained(folder, **options) as engine:
            await engine.generate(prompt_of(1), ONE, images=jpegs.take(1))
            result["requests_per_s"] = {
                count: await throughput(
                    engine, jpegs, count, max(2, args.prompts // count), args.rounds
                )
                for count in (1, 4, 8)
            }
            for count, found in result["requests_per_s"].items():
                shown = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
                print(f"{count} images: requests/s {shown}")
            result["features"] = await features(engine, jpegs, 10 * args.rounds)
            print("features:", {name: round(v, 2) for name, v in result["features"].items()})
    if not args.skip_model:
        torch.set_num_threads(all_threads)  # threads that are made from here on
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), args.layers, getattr(torch, args.dtype))
            options["kv_cache_bytes"] = 512 << 20
            async with AsyncEngine.from_pretrained(folder, **options) as engine:
                await engine.generate(prompt_of(1), ONE, images=jpegs.take(1))
                found = await first_token(engine, jpegs, 8, args.rounds)
                result["first_token"] = found
                print("first token:", json.dumps(found, indent=1))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=24, help="images in a round, at least")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="torch's, beside the workers")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--skip-model", action="store_true")
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
