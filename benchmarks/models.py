"""Whisper tiny.en on real speech: clips per second of many at once, against transformers.

Baselines, in the same process and in turns with the engine: `generate` on one clip after the other
in a worker thread, and on all of them as one batch. All start from samples in memory and end with
text. `make real-test` fetches the weights and the audio files. Last line: JSON, with medians over
the rounds and ratios within rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import transformers

from aioengine import AsyncEngine, SamplingParams

RATE = 16_000
MAX_TOKENS = 224
CACHE = Path(__file__).parents[1] / ".cache" / "real"

Samples = np.ndarray[Any, np.dtype[np.float32]]


def read_clips(folder: Path, count: int) -> list[Samples]:
    """So many different ones: the audio files, then the same with their first words cut off."""
    paths = sorted(folder.glob("*.wav"))
    audio = [soundfile.read(path, dtype="float32")[0] for path in paths]
    turns = range(-(-count // len(audio)))
    return [each[turn * RATE :] for turn in turns for each in audio][:count]


class Baseline:
    """transformers by itself."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.processor = transformers.AutoProcessor.from_pretrained(folder)
        self.model = transformers.WhisperForConditionalGeneration.from_pretrained(
            folder, dtype=dtype
        ).eval()

    @torch.inference_mode()
    def batched(self, clips: list[Samples]) -> list[str]:
        inputs = self.processor.feature_extractor(clips, sampling_rate=RATE, return_tensors="pt")
        features = inputs["input_features"].to(self.model.dtype)
        output = self.model.generate(features, do_sample=False, max_new_tokens=MAX_TOKENS)
        texts: list[str] = self.processor.batch_decode(output, skip_special_tokens=True)
        return texts

    def one_by_one(self, clips: list[Samples]) -> list[str]:
        return [text for clip in clips for text in self.batched([clip])]


async def ours(engine: AsyncEngine, clips: list[Samples]) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    outputs = await asyncio.gather(
        *(engine.generate("", params, audios=[(clip, RATE)]) for clip in clips)
    )
    return [output.text for output in outputs]


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    clips = read_clips(options.speech, options.clips)
    baseline = Baseline(options.model, getattr(torch, options.dtype))
    seconds: dict[str, list[float]] = {"engine": [], "one_by_one": [], "batched": []}
    texts: dict[str, list[str]] = {}
    stages: dict[str, float] = {}
    async with AsyncEngine.from_pretrained(options.model, dtype=options.dtype) as engine:
        for index in range(options.rounds + 1):
            await engine.reset_caches()
            for name in seconds:
                before = engine.statistics().stages
                begin = time.perf_counter()
                if name == "engine":
                    texts[name] = await ours(engine, clips)
                else:
                    texts[name] = await asyncio.to_thread(getattr(baseline, name), clips)
                if index:  # the first round warms up
                    seconds[name].append(time.perf_counter() - begin)
                if name == "engine":
                    now = engine.statistics().stages
                    stages = {
                        stage: now[stage].total_s - (before[stage].total_s if before else 0)
                        for stage in now
                    }
    return report(seconds, texts, stages, options)


def report(
    seconds: dict[str, list[float]],
    texts: dict[str, list[str]],
    stages: dict[str, float],
    options: argparse.Namespace,
) -> dict[str, Any]:
    def ratio(other: str) -> float:
        pairs = zip(seconds["engine"], seconds[other], strict=True)
        return round(statistics.median(theirs / mine for mine, theirs in pairs), 2)

    same = zip(texts["engine"], texts["one_by_one"], strict=True)
    return {
        "clips": options.clips,
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "clips_per_s": {
            name: round(options.clips / statistics.median(taken), 2)
            for name, taken in seconds.items()
        },
        "engine_over_one_by_one": ratio("one_by_one"),
        "engine_over_batched": ratio("batched"),
        "texts_equal_to_one_by_one": sum(mine == theirs for mine, theirs in same),
        "stages_s": {stage: round(total, 2) for stage, total in stages.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=CACHE / "whisper-tiny.en")
    parser.add_argument("--speech", type=Path, default=CACHE / "speech")
    parser.add_argument("--clips", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    if not options.model.exists() or not options.speech.exists():
        sys.exit("there are no weights or audio files; `make real-test` fetches them")
    print(json.dumps(asyncio.run(measure(options))))


if __name__ == "__main__":
    main()
