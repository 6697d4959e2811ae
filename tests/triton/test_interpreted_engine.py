"""Engines on Triton's kernels: tokens are those of attention in plain PyTorch."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from aioengine import Prompt, SamplingParams
from aioengine.kernels.attention import list_backends
from aioengine.kernels.matmul import TorchLinear
from aioengine.kernels.triton.backend import TritonBackend
from aioengine.kernels.triton.operators import TritonOperators
from aioengine.models import fusion
from aioengine.models.fusion import decoder_plan, fuse_activations, fuse_norms
from aioengine.models.fusion.decoder_plan import ROUNDINGS
from aioengine.models.fusion.packed_linear import pack_layers
from tests.parity.audio_families import RATE, sound
from tests.parity.listener_families import save_listener, tokenizer_for
from tests.support.engines import greedy, running_engine
from tests.support.tiny import save_tiny_llava, tiny_image, tiny_tokenizer
from tests.triton.recording import Recording

SIZES = {"dtype": "float32", "max_num_batched_tokens": 24, "max_num_seqs": 4}


def tiny_qwen3() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, eos_token_id=None))


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


@pytest.mark.parametrize("name", ["llava", "qwen3"])
async def test_layers_by_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A model's plan, which a GPU would have: keys and values are stored by the rotation."""
    if name == "llava":
        save_tiny_llava(tmp_path)
    else:
        tiny_qwen3().save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
    prompts = [Prompt(text="a b c d e"), Prompt(text="a text of some length, and no more")]
    expected = await tokens(tmp_path, prompts, "gather", **SIZES)
    stored: list[bool] = []
    attend = TritonBackend.attend

    def attended(self: TritonBackend, *args: Any, new: Any = None) -> torch.Tensor:
        stored.append(new is None)
        return attend(self, *args, new=new)

    monkeypatch.setattr(TritonBackend, "attend", attended)
    device = TorchLinear, TritonOperators, ROUNDINGS
    monkeypatch.setattr(decoder_plan, "_device", lambda _: device)
    passes = partial(pack_layers, pack=TorchLinear), fuse_activations, fuse_norms
    monkeypatch.setattr(fusion, "PASSES", passes)
    assert await tokens(tmp_path, prompts, "triton", **SIZES) == expected
    assert any(stored)


async def test_cross_attention_to_audio(tmp_path: Path) -> None:
    save_listener("whisper", tmp_path, tokenizer_for("whisper"))
    prompts = [
        Prompt(text="<|startoftranscript|>", media={"audio": [(sound(seed, 0.4), RATE)]})
        for seed in range(2)
    ]
    sizes = {"dtype": "float32", "max_model_len": None}
    expected = await tokens(tmp_path, prompts, "gather", **sizes)
    assert await tokens(tmp_path, prompts, "triton", **sizes) == expected


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("name", ["llava", "qwen3", "whisper"])
async def test_kernels_are_compiled_before_the_first_request(
    tmp_path: Path, recording: Recording, programs: set[Any], name: str, is_eager: bool
) -> None:
    prompts = [Prompt(text="a b c d e"), Prompt(text="a text of some length, and no more")]
    if name == "whisper":
        save_listener(name, tmp_path, tokenizer_for(name))
        media = [{"audio": [(sound(seed, 0.4), RATE)]} for seed in range(2)]
        prompts = [Prompt(text="<|startoftranscript|>", media=each) for each in media]
    elif name == "llava":
        save_tiny_llava(tmp_path)
        prompts.append(Prompt(text="a <image> b", media={"image": [tiny_image(1)]}))
    else:
        tiny_qwen3().save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
    sizes: dict[str, Any] = {"max_num_seqs": 3, "enforce_eager": is_eager, "dtype": "float32"}
    sizes |= {"max_model_len": None} if name == "whisper" else {"max_num_batched_tokens": 24}
    async with running_engine(
        tmp_path, attention_backend="triton", check_model=False, **sizes
    ) as engine:
        compiled = {*programs}
        drawn = SamplingParams(temperature=0.7, max_tokens=4, logprobs=2, seed=1)
        params = (greedy(6), drawn, greedy(4))
        asked = zip((*prompts, prompts[0]), params, strict=False)
        await asyncio.gather(*(engine.generate(*each) for each in asked))
    assert len(compiled) > 5 and not programs - compiled


def test_it_is_listed() -> None:
    assert "triton" in list_backends()
