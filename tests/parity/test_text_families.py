"""Decoders without media: greedy tokens equal transformers' `generate`, in float64."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from aioengine import AsyncEngine, SamplingParams
from tests.parity.families import MAX_TOKENS, TEXT, vocabulary
from tests.processors.conftest import make_tokenizer
from tests.support.tiny import draw_weights

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
PROMPTS = ("tell a story", "What is in the picture? There is", "a", "tell a story about colours")
WINDOWS = {
    "head_dim": 12,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

Settings = Mapping[str, Any]
FAMILIES: Mapping[str, Callable[[Settings], Any]] = {
    "gemma": lambda s: hf.GemmaForCausalLM(hf.GemmaConfig(**s, head_dim=12)),
    "gemma2": lambda s: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(
            **s, **WINDOWS, query_pre_attn_scalar=12, attn_implementation="eager"
        )
    ),
    "gemma3": lambda s: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**s, **WINDOWS, query_pre_attn_scalar=12)
    ),
    "gpt2": lambda s: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=s["vocab_size"], n_embd=48, n_layer=2, n_head=4, n_positions=512,
            bos_token_id=1, eos_token_id=2,
        )
    ),
    "llama": lambda s: hf.LlamaForCausalLM(hf.LlamaConfig(**s)),
    "mistral": lambda s: hf.MistralForCausalLM(hf.MistralConfig(**s, sliding_window=6)),
    "opt": lambda s: hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=s["vocab_size"], hidden_size=48, word_embed_proj_dim=48, ffn_dim=96,
            num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=512,
            bos_token_id=1, eos_token_id=2, pad_token_id=0, do_layer_norm_before=True,
        )
    ),
    "phi": lambda s: hf.PhiForCausalLM(hf.PhiConfig(**s, partial_rotary_factor=0.5)),
    "phi3": lambda s: hf.Phi3ForCausalLM(hf.Phi3Config(**s)),
    "qwen2": lambda s: hf.Qwen2ForCausalLM(hf.Qwen2Config(**s)),
    "qwen3": lambda s: hf.Qwen3ForCausalLM(hf.Qwen3Config(**s, head_dim=12)),
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[tuple[int, ...]]]:
    """The family's folder, and what transformers makes of the prompts."""
    tokenizer = make_tokenizer("bytes")
    with torch.random.fork_rng(devices=[]):
        model = FAMILIES[request.param]({**TEXT, "vocab_size": vocabulary(tokenizer)})
    draw_weights(model)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    model = model.double().eval().requires_grad_(False)
    model.config.architectures = [type(model).__name__]
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    expected = []
    for text in PROMPTS:
        inputs = tokenizer(text, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
                do_sample=False, max_new_tokens=MAX_TOKENS,
            )  # fmt: skip
        expected.append(tuple(output[0, inputs["input_ids"].shape[1] :].tolist()))
    return folder, expected


@pytest.mark.parametrize("budget", [512, 5])
async def test_tokens_equal_generate(
    saved: tuple[Path, list[tuple[int, ...]]], budget: int
) -> None:
    folder, expected = saved
    assert len(set(expected)) >= 3
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 4 << 20, "max_model_len": 256}
    options = {**sizes, "max_num_batched_tokens": budget}
    async with AsyncEngine.from_pretrained(folder, **options) as engine:
        for _ in range(2):  # with a cold and with a warm prefix cache
            outputs = await asyncio.gather(*(engine.generate(text, PARAMS) for text in PROMPTS))
            assert [output.token_ids for output in outputs] == expected
        assert engine.statistics().prefix_hit_tokens > 0
