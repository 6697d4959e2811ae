"""Real speech: what was said is written down, with the tokens that transformers' `generate` gives.

The words of the five LibriVox clips are known; of their 71, transformers itself has three wrong, of
which one is a word that the reference says twice.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers

from aioengine import AsyncEngine, SamplingParams
from tests.real.conftest import asset

RATE = 16_000
MAX_TOKENS = 224
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
MAX_WORD_ERRORS = 0.05
KENNEDY = (
    "And so my fellow Americans ask not what your country can do for you, "
    "ask what you can do for your country."
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "transcribe.py"

Samples = np.ndarray[Any, np.dtype[np.float32]]


def read(path: Path) -> Samples:
    """One channel of samples, float32."""
    samples, rate = soundfile.read(path, dtype="float32")
    assert rate == RATE and samples.ndim == 1
    return samples  # type: ignore[no-any-return]


def words(text: str) -> list[str]:
    """Without case and punctuation, as the reference has them."""
    return re.findall(r"[a-z']+", text.lower().replace("mr.", "mister"))


def word_errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """The fewest words to insert, leave out or replace (Levenshtein's distance)."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            cost = min(row[j] + 1, row[j - 1] + 1, before + (word != other))
            before, row[j] = row[j], cost
    return row[-1]


@pytest.fixture(scope="module")
def folder() -> Path:
    return asset("whisper-tiny.en")


@pytest.fixture(scope="module")
def kennedy() -> Samples:
    """Eleven seconds."""
    return read(asset("speech") / "jfk.wav")


@pytest.fixture(scope="module")
def clips() -> dict[str, Samples]:
    """What was said, in words -> how it sounds."""
    texts = sorted(asset("speech").glob("librivox_*.txt"))
    assert len(texts) == 5
    return {path.read_text().strip(): read(path.with_suffix(".wav")) for path in texts}


@pytest.fixture(scope="module")
def eight(kennedy: Samples, clips: dict[str, Samples]) -> list[Samples]:
    """Different ones, of three to eighteen seconds."""
    first, *_ = clips.values()
    return [kennedy, *clips.values(), kennedy[: 5 * RATE], np.concatenate([kennedy, first])]


def generate(folder: Path, clips: Sequence[Samples]) -> list[tuple[int, ...]]:
    """What transformers hears, one clip at a time; without the end token."""
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    extract = transformers.AutoProcessor.from_pretrained(folder).feature_extractor
    heard = []
    for samples in clips:
        inputs = extract(samples, sampling_rate=RATE, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_TOKENS)
        end = model.generation_config.eos_token_id
        heard.append(tuple(token for token in output[0].tolist() if token != end))
    return heard


async def transcribe(engine: AsyncEngine, samples: Samples) -> Any:
    return await engine.generate("", PARAMS, audios=[(samples, RATE)])


async def test_kennedys_sentence(folder: Path, kennedy: Samples) -> None:
    async with AsyncEngine.from_pretrained(folder, dtype="float32", device="cpu") as engine:
        output = await transcribe(engine, kennedy)
    assert output.text.strip() == KENNEDY
    assert output.outputs[0].finish_reason == "stop"


async def test_word_errors_are_few(folder: Path, clips: dict[str, Samples]) -> None:
    async with AsyncEngine.from_pretrained(folder, dtype="float32", device="cpu") as engine:
        outputs = await asyncio.gather(*(transcribe(engine, each) for each in clips.values()))
    pairs = [(words(said), words(out.text)) for said, out in zip(clips, outputs, strict=True)]
    wrong = sum(word_errors(said, heard) for said, heard in pairs)
    spoken = sum(len(said) for said, _ in pairs)
    assert spoken == 71
    assert wrong <= MAX_WORD_ERRORS * spoken, pairs


async def test_eight_at_once_as_transformers_one_by_one(folder: Path, eight: list[Samples]) -> None:
    expected = generate(folder, eight)
    assert len(set(expected)) == len(eight) == 8
    async with AsyncEngine.from_pretrained(folder, dtype="float32", device="cpu") as engine:
        end = engine.tokenizer.eos_token_id
        for _ in range(2):  # with nothing and with everything in the caches
            outputs = await asyncio.gather(*(transcribe(engine, each) for each in eight))
            heard = [tuple(token for token in out.token_ids if token != end) for out in outputs]
            assert heard == expected
        now = engine.statistics()
    assert now.kv_blocks_free == now.kv_blocks_total
    assert now.encoder_cache_referenced == 0


def test_the_example(folder: Path) -> None:
    """From a shell, in the model's own precision."""
    files = [str(asset("speech") / name) for name in ("jfk.wav", "librivox_930.wav")]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(folder), *files],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f"{files[0]}: {KENNEDY}"
    assert second == f"{files[1]}: He might even have been made amiable himself."
