"""How long the event loop is held up while images are decoded and processed on worker threads.

32 JPEGs of 3840 x 2160 go through the engine's own stages (header, identity, decode, HF processor)
on two worker threads, while a probe on the main thread's asyncio loop sleeps a millisecond at a
time and notes how late it wakes. On a busy machine much of that is waiting for a processor, which
the kernel counts for each thread (Linux). "Held" lags are without that time, and no longer than the
processor time that this process used meanwhile: they bound from above what its own threads did to
the loop. The garbage collector's longest pass is reported apart: a full one over
torch's and transformers' objects holds the GIL for a quarter of a second, whoever triggers it. The
last line is JSON: milliseconds, and images per second.

    python benchmarks/loop_lag.py [--images 32] [--workers 2] [--stage all]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from contenders.lag_probe import Lag, probe
from PIL import Image

from aioengine.config import MediaConfig
from aioengine.processors.info import load_context
from aioengine.processors.items import ImageProcessorItems, MultiModalDataItems
from aioengine.processors.media.image import open_image
from aioengine.processors.registry import MULTIMODAL_REGISTRY


def make_jpeg(seed: int, size: tuple[int, int] = (3840, 2160)) -> bytes:
    """A photograph's worth of detail: smooth noise in several octaves."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (135, 240, 3), dtype=np.uint8))
    pil_image = small.resize(size, Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    pil_image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def save_model(folder: Path, image_size: int) -> None:
    """The processing files of a LLaVA with a full-size tower, without weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    tokenizer_object = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer_object.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_object, unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=image_size, patch_size=14),
        text_config=LlamaConfig(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        architectures=["LlavaForConditionalGeneration"],
    )
    side = {"height": image_size, "width": image_size}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": image_size}, crop_size=side),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    config.save_pretrained(folder)
    processor.save_pretrained(folder)


def make_worker(folder: Path) -> Any:
    """One worker's own processor."""
    from transformers import AutoConfig

    from aioengine.models.llava import Llava

    context = load_context(folder, hf_config=AutoConfig.from_pretrained(folder))
    return MULTIMODAL_REGISTRY.create_processor(Llava, context)


def run_stages(data: bytes, stage: str, processor: Any) -> None:
    """One image through the stages; "hf" calls the HF processor on Pillow's own decoding."""
    if stage == "hf":
        image = Image.open(io.BytesIO(data))
        hf_processor = processor.info.get_hf_processor()
        hf_processor(text="<image>", images=[image], return_tensors="pt")
        return
    source = open_image(data, MediaConfig(), parameter="images[0]")
    source.identity()
    if stage == "header":
        return
    pil_image = source.decode()
    if stage == "decode":
        return
    processor.process(MultiModalDataItems({"image": ImageProcessorItems([pil_image])}), {})


async def measure(jobs: list[Callable[[], None]], workers: int) -> tuple[list[Lag], float]:
    """Runs the jobs on the workers; the probe's lags and the seconds that all took."""
    loop = asyncio.get_running_loop()
    lags: list[Lag] = []
    with ThreadPoolExecutor(workers) as pool:
        task = asyncio.create_task(probe(lags))
        await asyncio.sleep(0.05)
        lags.clear()
        start = time.perf_counter()
        await asyncio.gather(*(loop.run_in_executor(pool, job) for job in jobs))
        seconds = time.perf_counter() - start
        task.cancel()
    return lags, seconds


class CollectorWatch:
    """The longest pass of the garbage collector, in seconds."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._start = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start = time.perf_counter()
        else:
            self.longest_s = max(self.longest_s, time.perf_counter() - self._start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--image-size", type=int, default=336)
    parser.add_argument("--stage", choices=["all", "header", "decode", "hf", "idle"], default="all")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder, arguments.image_size)
        idle_workers = [make_worker(folder) for _ in range(arguments.workers)]
    jpegs = [make_jpeg(seed) for seed in range(min(arguments.images, 8))]

    def job(index: int) -> Callable[[], None]:
        def run() -> None:
            worker = idle_workers.pop()
            try:
                if arguments.stage == "idle":
                    time.sleep(0.1)
                else:
                    run_stages(jpegs[index % len(jpegs)], arguments.stage, worker)
            finally:
                idle_workers.append(worker)

        return run

    warm_up = [job(index) for index in range(arguments.workers)]
    asyncio.run(measure(warm_up, arguments.workers))
    jobs = [job(index) for index in range(arguments.images)]
    collector = CollectorWatch()
    gc.callbacks.append(collector)
    lags, seconds = asyncio.run(measure(jobs, arguments.workers))
    gc.callbacks.remove(collector)
    lags_ms = np.array([late for late, _ in lags]) * 1e3
    held_ms = np.array([held for _, held in lags]) * 1e3
    result = {
        "benchmark": "loop_lag",
        "stage": arguments.stage,
        "images": arguments.images,
        "workers": arguments.workers,
        "lag_ms_p99": round(float(np.percentile(lags_ms, 99)), 2),
        "lag_ms_max": round(float(lags_ms.max()), 2),
        "held_ms_p50": round(float(np.percentile(held_ms, 50)), 2),
        "held_ms_p99": round(float(np.percentile(held_ms, 99)), 2),
        "held_ms_max": round(float(held_ms.max()), 2),
        "collector_ms_max": round(collector.longest_s * 1e3, 2),
        "images_per_s": round(arguments.images / seconds, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
