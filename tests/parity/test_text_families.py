"""Decoders without media: greedy tokens equal transformers' `generate`, in float64."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from aioengine import AsyncEngine, SamplingParams
from aioengine.errors import ModelLoadError
from aioengine.models.runtime.registry import known_architectures
from tests.parity.families import MAX_TOKENS, save_text
from tests.support.grids import rest_is_slow

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
PROMPTS = ("tell a story", "What is in the picture? There is", "a", "tell a story about colours")
WINDOWS = {
    "head_dim": 12,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

NAMED = {*known_architectures()}

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
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
UNNAMED: Mapping[str, Callable[[Settings], Any]] = {
    "cohere2": lambda s: hf.Cohere2ForCausalLM(
        hf.Cohere2Config(**s, sliding_window=6, logit_scale=0.25)
    ),
    "dbrx": lambda s: hf.DbrxForCausalLM(
        hf.DbrxConfig(
            vocab_size=s["vocab_size"], d_model=48, n_heads=4, n_layers=2,
            attn_config={"rope_theta": 1e4, "clip_qkv": 8, "kv_n_heads": 2},
            ffn_config={"ffn_hidden_size": 64, "hidden_size": 48, "moe_top_k": 2},
        )
    ),
    "deepseek-v3": lambda s: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(**{**s, **EXPERTS, **LATENT})
    ),
    "glm4": lambda s: hf.Glm4ForCausalLM(hf.Glm4Config(**s, head_dim=12)),
    "gpt-neox": lambda s: hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(**{n: v for n, v in s.items() if n != "num_key_value_heads"})
    ),
    "granite": lambda s: hf.GraniteForCausalLM(
        hf.GraniteConfig(
            **s, logits_scaling=8.0, embedding_multiplier=12.0, residual_multiplier=0.22
        )
    ),
    "hyperclovax": lambda s: hf.HyperCLOVAXForCausalLM(
        hf.HyperCLOVAXConfig(**s, logits_scaling=0.3)
    ),
    "llama4": lambda s: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(
            **s, head_dim=12, num_local_experts=4, intermediate_size_mlp=96,
            attention_chunk_size=16, floor_scale=8, no_rope_layers=[1, 0, 1],
        )
    ),
    "mixtral": lambda s: hf.MixtralForCausalLM(hf.MixtralConfig(**s, num_local_experts=4)),
    "modernbert-decoder": lambda s: hf.ModernBertDecoderForCausalLM(
        hf.ModernBertDecoderConfig(
            **{n: v for n, v in s.items() if n != "num_key_value_heads"}, local_attention=12,
            global_attn_every_n_layers=2,
        )
    ),
    "olmo3": lambda s: hf.Olmo3ForCausalLM(hf.Olmo3Config(**s, sliding_window=6)),
    "qwen3-moe": lambda s: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**s, **EXPERTS, head_dim=12, num_experts=4)
    ),
    "smollm3": lambda s: hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**s)),
}  # fmt: skip
"""Architectures that no class here names."""


@pytest.fixture(scope="module", params=[*FAMILIES, *UNNAMED])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[tuple[int, ...]]]:
    """The family's folder, and what transformers makes of the prompts."""
    folder, build = tmp_path_factory.mktemp(request.param), {**FAMILIES, **UNNAMED}[request.param]
    return folder, save_text(build, folder, PROMPTS)


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
        now = engine.statistics()
        assert now.prefix_hit_tokens > 0
        is_named = {*json.loads((folder / "config.json").read_text())["architectures"]} & NAMED
        assert now.model_impl == ("native" if is_named else "transformers")


def build_chunked(settings: Settings) -> Any:
    """A model without experts, which float64 runs, and with chunks that prompts are longer than."""
    config = hf.Llama4TextConfig(
        **settings, head_dim=12, intermediate_size_mlp=96, moe_layers=[], floor_scale=8,
        attention_chunk_size=16, no_rope_layers=[1, 0, 1],
    )  # fmt: skip
    return hf.Llama4ForCausalLM(config)


LENGTHS = (1, 14, 16, 31, 32, 50)
"""Of prompts that end on both sides of where a chunk does."""
CHUNKED = [("tell a story about colours, " * 3)[:length] for length in LENGTHS]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("budget", [512, 64, 13, 5])
async def test_chunked_attention_sees_its_chunk_alone(
    tmp_path: Path, budget: int, backend: str
) -> None:
    expected = save_text(build_chunked, tmp_path, CHUNKED)
    assert len(set(expected)) == len(CHUNKED)
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 4 << 20, "max_model_len": 256}
    options = {**sizes, "max_num_batched_tokens": budget, "attention_backend": backend}
    async with AsyncEngine.from_pretrained(tmp_path, **options) as engine:
        for _ in range(2):  # with a cold and with a warm prefix cache
            outputs = await asyncio.gather(*(engine.generate(text, PARAMS) for text in CHUNKED))
            assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize("dtype", rest_is_slow(["float32", "bfloat16"], ["float32"]))
async def test_chunks_in_fewer_bits(tmp_path: Path, dtype: str) -> None:
    """What else runs changes nothing, of keys and values in pages of bytes too."""
    save_text(build_chunked, tmp_path, [])
    sizes = {"device": "cpu", "block_size": 8, "kv_cache_bytes": 4 << 20, "max_model_len": 256}
    params = replace(PARAMS, max_tokens=40, ignore_eos=True)
    options = {**sizes, "dtype": dtype, "enable_prefix_caching": False}
    for kv_cache_dtype in ("auto", "int8"):
        async with AsyncEngine.from_pretrained(
            tmp_path, **options, kv_cache_dtype=kv_cache_dtype
        ) as engine:
            alone = [await engine.generate(text, params) for text in CHUNKED]
            both = await asyncio.gather(*(engine.generate(text, params) for text in CHUNKED))
        same = [one.token_ids == two.token_ids for one, two in zip(alone, both, strict=True)]
        assert sum(same) >= (len(same) if dtype == "float32" else 3)  # as rounding may differ


async def test_a_block_lies_in_one_chunk(tmp_path: Path) -> None:
    save_text(build_chunked, tmp_path, [])
    with pytest.raises(ModelLoadError, match="block_size is 32, and must divide the 16 tokens"):
        async with AsyncEngine.from_pretrained(tmp_path, device="cpu"):
            pass
