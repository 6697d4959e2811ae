"""Prompts of embeddings: the tokens of the ids that they are the rows of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch.nested import nested_tensor

from aioengine import Prompt, SamplingParams
from aioengine.errors import InvalidRequestError, PromptTooLongError
from tests.parity.listener_families import save_listener, tokenizer_for
from tests.support.engines import greedy, running_engine
from tests.support.tiny import (
    VOCAB_SIZE,
    draw_weights,
    save_tiny_llava,
    tiny_image,
    tiny_llama,
    tiny_tokenizer,
)

ROOM = {"encoder_cache_bytes": 1 << 20}
LONG = [5 + i * 7 % 300 for i in range(300)]
"""More than one piece, and many blocks."""


def save_llama(folder: Path) -> Any:
    model = tiny_llama()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def save_gemma(folder: Path, kind: str) -> Any:
    """A family that multiplies its embeddings by the root of their width."""
    sizes = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 12, "max_position_embeddings": 512, "sliding_window": 64,
    }  # fmt: skip
    config, model_class = {
        "gemma2": (hf.Gemma2Config, hf.Gemma2ForCausalLM),
        "gemma3": (hf.Gemma3TextConfig, hf.Gemma3ForCausalLM),
    }[kind]
    with torch.random.fork_rng(devices=[]):
        model = model_class(config(**sizes))
    draw_weights(model)
    model.eval().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


SAVE: dict[str, Callable[[Path], Any]] = {
    "llama": save_llama,
    "llava": save_tiny_llava,
    "gemma2": lambda folder: save_gemma(folder, "gemma2"),
    "gemma3": lambda folder: save_gemma(folder, "gemma3"),
}


@torch.no_grad()
def rows_of(model: Any, ids: list[int]) -> torch.Tensor:
    """What transformers takes as `inputs_embeds`, in float64."""
    table: torch.Tensor = model.double().get_input_embeddings()(torch.tensor(ids))
    return table


@pytest.mark.parametrize("name", SAVE)
async def test_tokens_are_those_of_the_ids(tmp_path: Path, name: str) -> None:
    model = SAVE[name](tmp_path)
    rows = rows_of(model, LONG)
    options = ROOM if name != "llava" else {"encoder_cache_bytes": 1 << 18}
    async with running_engine(tmp_path, **options) as engine:
        expected = (await engine.generate(LONG, greedy(12))).token_ids
        await engine.reset_caches()
        for given in (rows, rows.numpy(), rows.clone().requires_grad_()):
            found = await engine.generate(Prompt(embeds=given), greedy(12))
            assert found.token_ids == expected
            assert found.usage.prompt_tokens == len(LONG)
        assert found.usage.cached_tokens >= 256
        other = rows_of(model, [*LONG[:-1], 4])
        assert (await engine.generate({"prompt_embeds": other}, greedy(12))).token_ids != expected


async def test_in_chunks_beside_others_and_preempted(tmp_path: Path) -> None:
    model = save_llama(tmp_path)
    prompts = [LONG[i : i + 60] for i in range(0, 240, 60)]
    async with running_engine(tmp_path) as engine:
        alone = [(await engine.generate(ids, greedy(36))).token_ids for ids in prompts]
    scarce = {"kv_cache_bytes": 13 * 16 * 2 * 2 * 2 * 12 * 8, "max_model_len": 96}
    num_preemptions = 0
    rows = [rows_of(model, ids) for ids in prompts]
    for budget, caching in ((7, True), (4096, False)):
        options = {"max_num_batched_tokens": budget, "enable_prefix_caching": caching}
        async with running_engine(tmp_path, **ROOM, **scarce, **options) as engine:
            found = await asyncio.gather(
                *(engine.generate(Prompt(embeds=each), greedy(36)) for each in rows)
            )
            assert [each.token_ids for each in found] == alone
            num_preemptions += engine.statistics().preemptions
    assert num_preemptions > 0


async def test_several_completions_and_penalties(tmp_path: Path) -> None:
    """No token of the prompt is penalised, as none is known."""
    model = save_llama(tmp_path)
    ids = LONG[:40]
    async with running_engine(tmp_path, **ROOM) as engine:
        rows = rows_of(model, ids)
        for params in (
            SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True),
            greedy(8, frequency_penalty=0.5),
        ):
            wanted = await engine.generate(ids, params)
            found = await engine.generate(Prompt(embeds=rows), params)
            assert [o.token_ids for o in found.outputs] == [o.token_ids for o in wanted.outputs]
        # The ids that stand for the rows are no prompt: banning what repeats bans none of them.
        stand_in = found.prompt_token_ids[0]
        only = greedy(1, repetition_penalty=1.9, allowed_token_ids=[stand_in], logprobs=1)
        plain = greedy(1, allowed_token_ids=[stand_in], logprobs=1)
        outputs = [await engine.generate(Prompt(embeds=rows), each) for each in (only, plain)]
        assert outputs[0].outputs[0].logprobs == outputs[1].outputs[0].logprobs


async def test_tenants_share_nothing(tmp_path: Path) -> None:
    rows = rows_of(save_llama(tmp_path), LONG)
    async with running_engine(tmp_path, **ROOM) as engine:
        for salt, cached in (("a", False), ("b", False), ("a", True)):
            prompt = Prompt(embeds=rows, cache_salt=salt)
            usage = (await engine.generate(prompt, greedy(2))).usage
            assert bool(usage.cached_tokens) is cached


BAD: dict[str, tuple[Any, str]] = {
    "list": ([[0.0] * 48], "tensor or a numpy array"),
    "wrong width": (torch.zeros(3, 47), r"shape \(rows, 48\)"),
    "one row": (torch.zeros(48), r"shape \(rows, 48\)"),
    "none": (torch.zeros(0, 48), r"shape \(rows, 48\)"),
    "integers": (torch.zeros(3, 48, dtype=torch.int64), "floating"),
    "not a number": (torch.full((3, 48), torch.nan), "finite"),
    "too large for the dtype": (np.full((3, 48), 1e300), "finite"),
    "nested": (nested_tensor([torch.zeros(3, 48)], layout=torch.jagged), "dense"),
    "sparse": (torch.zeros(3, 48).to_sparse(), "dense"),
}


async def test_rows_that_are_none(tmp_path: Path) -> None:
    save_tiny_llava(tmp_path)
    async with running_engine(tmp_path, dtype="float32") as engine:
        for given, words in BAD.values():
            with pytest.raises(InvalidRequestError, match=words) as caught:
                await engine.generate(Prompt(embeds=given), greedy(2))
            assert caught.value.parameter == "prompt"
        with pytest.raises(PromptTooLongError):
            await engine.generate(Prompt(embeds=torch.zeros(1, 48).expand(10**9, 48)), greedy(2))
        with pytest.raises(InvalidRequestError, match="media among them"):
            prompt = Prompt(embeds=torch.zeros(3, 48))
            await engine.generate(prompt, greedy(2), images=tiny_image(1))
        with pytest.raises(InvalidRequestError, match="exactly one of"):
            await engine.generate(Prompt(embeds=torch.zeros(3, 48), text="a"), greedy(2))


async def test_models_that_take_none(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("whisper", "llama")]
    save_listener("whisper", folders[0], tokenizer_for("whisper"))
    save_llama(folders[1])
    for folder, words in zip(folders, ("encoder-decoder", "encoder_cache_bytes"), strict=True):
        async with running_engine(folder, max_model_len=64) as engine:
            with pytest.raises(InvalidRequestError, match=words) as caught:
                await engine.generate(Prompt(embeds=torch.zeros(3, 48)), greedy(2))
            assert caught.value.parameter == "prompt"
