"""Tokens per second of many requests at once, against what an application would do without us.

Baselines, in the same process and in turns with the engine: transformers' `generate` on one request
after the other in a worker thread, and on all of them as one padded batch, which is what one can do
when all requests come at the same moment. The model is the demo model unless a folder is given.
Last line: JSON, with medians over the rounds and ratios within rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from aioengine import AsyncEngine, SamplingParams, demo_images, demo_model

QUESTION = "Describe the picture."


def messages(image: Any) -> list[dict[str, Any]]:
    content = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": content}]


class Baseline:
    """transformers by itself."""

    def __init__(self, folder: Path, max_tokens: int, device: torch.device | str = "cpu") -> None:
        self.processor = AutoProcessor.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForImageTextToText.from_pretrained(folder).to(device).eval()
        self.options = {
            "do_sample": False,
            "max_new_tokens": max_tokens,
            "min_new_tokens": max_tokens,
        }

    def generate(self, paths: list[Path]) -> int:
        """All images as one padded batch; the number of tokens."""
        return self.generate_images([Image.open(path).convert("RGB") for path in paths])

    @torch.inference_mode()
    def generate_images(self, images: list[Image.Image]) -> int:
        """The same, of images in memory."""
        text = self.processor.apply_chat_template(
            messages(images[0]), add_generation_prompt=True, tokenize=False
        )
        inputs = self.processor(
            text=[text] * len(images),
            images=[[image] for image in images],
            return_tensors="pt",
            padding=True,
        )
        output = self.model.generate(**inputs.to(self.model.device), **self.options)
        return int(output.shape[0] * (output.shape[1] - inputs["input_ids"].shape[1]))

    def one_by_one(self, paths: list[Path]) -> int:
        return sum(self.generate([path]) for path in paths)


async def ours(engine: AsyncEngine, paths: list[Path], max_tokens: int) -> int:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = await asyncio.gather(*(engine.generate(messages(path), params) for path in paths))
    return sum(len(output.token_ids) for output in outputs)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    baseline = Baseline(options.model, options.max_tokens)
    demo_paths = demo_images()
    paths = [demo_paths[i % len(demo_paths)] for i in range(options.requests)]
    rates: dict[str, list[float]] = {"engine": [], "one_by_one": [], "padded_batch": []}
    async with AsyncEngine.from_pretrained(options.model) as engine:
        for index in range(options.rounds + 1):
            await engine.reset_caches()
            for name in rates:
                begin = time.perf_counter()
                if name == "engine":
                    num_tokens = await ours(engine, paths, options.max_tokens)
                elif name == "one_by_one":
                    num_tokens = await asyncio.to_thread(baseline.one_by_one, paths)
                else:
                    num_tokens = await asyncio.to_thread(baseline.generate, paths)
                if index:  # the first round warms up
                    rates[name].append(num_tokens / (time.perf_counter() - begin))
    return report(rates, options)


def report(rates: dict[str, list[float]], options: argparse.Namespace) -> dict[str, Any]:
    def ratio(other: str) -> float:
        return statistics.median(
            mine / theirs for mine, theirs in zip(rates["engine"], rates[other], strict=True)
        )

    return {
        "requests": options.requests,
        "max_tokens": options.max_tokens,
        "threads": torch.get_num_threads(),
        "tokens_per_s": {name: round(statistics.median(r), 1) for name, r in rates.items()},
        "engine_over_one_by_one": round(ratio("one_by_one"), 2),
        "engine_over_padded_batch": round(ratio("padded_batch"), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=demo_model())
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    print(json.dumps(asyncio.run(measure(options))))


if __name__ == "__main__":
    main()
