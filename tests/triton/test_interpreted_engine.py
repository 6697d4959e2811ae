"""Engines on Triton's kernels: tokens are those of attention in plain PyTorch."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aioengine import Prompt
from aioengine.kernels.attention import list_backends
from tests.parity.audio_families import RATE, sound
from tests.parity.listener_families import save_listener, tokenizer_for
from tests.support.engines import greedy, running_engine
from tests.support.tiny import save_tiny_llava, tiny_image

SIZES = {"dtype": "float32", "max_num_batched_tokens": 24, "max_num_seqs": 4}


async def tokens(
    folder: Path, prompts: list[Prompt], backend: str, **options: object
) -> list[object]:
    async with running_engine(folder, attention_backend=backend, **options) as engine:
        asked = (engine.generate(each, greedy(6)) for each in prompts)
        return [output.token_ids for output in await asyncio.gather(*asked)]


async def test_images_and_text_in_chunks(tmp_path: Path) -> None:
    save_tiny_llava(tmp_path)
    images = [tiny_image(seed) for seed in range(2)]
    prompts = [
        Prompt(text="a b c <image> d", media={"image": images[:1]}),
        Prompt(text="<image> and <image>", media={"image": images}),
        Prompt(text="a text of some length, and no more"),
    ]
    expected = await tokens(tmp_path, prompts, "gather", **SIZES)
    assert await tokens(tmp_path, prompts, "triton", **SIZES) == expected


async def test_cross_attention_to_audio(tmp_path: Path) -> None:
    save_listener("whisper", tmp_path, tokenizer_for("whisper"))
    prompts = [
        Prompt(text="<|startoftranscript|>", media={"audio": [(sound(seed, 0.4), RATE)]})
        for seed in range(2)
    ]
    sizes = {"dtype": "float32", "max_model_len": None}
    expected = await tokens(tmp_path, prompts, "gather", **sizes)
    assert await tokens(tmp_path, prompts, "triton", **sizes) == expected


def test_it_is_listed() -> None:
    assert "triton" in list_backends()
