"""Decoders that run by their kind, beside transformers: rates of prompts and of decoding.

    python benchmarks/decoders.py [--models lfm2,qwen3.5,falcon-h1,qwen3-moe,...] [--rounds 3]
                                  [--prompt 256] [--device cuda]

Layers that keep a state: LFM2-350M's, Qwen3.5-0.8B's and Falcon-H1-0.5B's widths. Experts:
Qwen3-MoE, Mixtral, DeepSeek-V3 and GPT-OSS, of 32 or 8 small ones. All with fewer layers than
published, and random weights in bfloat16. Requests of so many tokens, 32 to come, alone and 16
together; transformers' `generate` on one, and on all as one batch, in turns with the engine in each
round. A prompt's rate is that of requests with one token. What is printed are medians; ratios are
within a round. Last line: JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers as hf
from make_model import make_tokenizer

from aioengine import AsyncEngine, SamplingParams

COMMON: dict[str, Any] = {
    "vocab_size": 8000,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
NEW_TOKENS = 32
REQUESTS = (1, 16)


def lfm2() -> Any:
    kinds = ["conv", "conv", "full_attention"] * 4
    sizes = {"hidden_size": 1024, "intermediate_size": 6656, "num_hidden_layers": len(kinds)}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    return hf.Lfm2ForCausalLM(hf.Lfm2Config(**COMMON, **sizes, **heads, layer_types=kinds))


def qwen35() -> Any:
    sizes = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256}
    states = {"linear_num_value_heads": 16, "linear_num_key_heads": 16}
    return hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**COMMON, **sizes, **heads, **states))


def falcon_h1() -> Any:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    states = {"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128}
    return hf.FalconH1ForCausalLM(hf.FalconH1Config(**COMMON, **sizes, **heads, **states))


EXPERTS = {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16}


def qwen3_moe() -> Any:
    sizes = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    heads = {"num_key_value_heads": 4, "head_dim": 64}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**COMMON, **EXPERTS, **sizes, **heads))


def mixtral() -> Any:
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1792}
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(**COMMON, **EXPERTS, **sizes, num_key_value_heads=4)
    )


def deepseek_v3() -> Any:
    sizes = {"n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    groups = {"n_group": 4, "topk_group": 2, "intermediate_size": 2048, "first_k_dense_replace": 1}
    latent = {
        "q_lora_rank": 384, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
        "v_head_dim": 64, "num_key_value_heads": 16,
    }  # fmt: skip
    config = hf.DeepseekV3Config(**{**COMMON, **EXPERTS, **sizes, **groups, **latent})
    return hf.DeepseekV3ForCausalLM(config)


def gpt_oss() -> Any:
    sizes = {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 512}
    heads = {"num_key_value_heads": 4, "head_dim": 64}
    return hf.GptOssForCausalLM(hf.GptOssConfig(**COMMON, **EXPERTS, **sizes, **heads))


def bloom() -> Any:
    return hf.BloomForCausalLM(hf.BloomConfig(**COMMON, hidden_size=1024, n_layer=8, n_head=16))


def gpt_j() -> Any:
    sizes = {"n_embd": 1024, "n_layer": 8, "n_head": 16, "n_positions": 8192}
    shared = {name: COMMON[name] for name in COMMON if name != "max_position_embeddings"}
    return hf.GPTJForCausalLM(hf.GPTJConfig(**shared, **sizes))


MODELS: dict[str, Callable[[], Any]] = {
    "lfm2": lfm2,
    "qwen3.5": qwen35,
    "falcon-h1": falcon_h1,
    "qwen3-moe": qwen3_moe,
    "mixtral": mixtral,
    "deepseek-v3": deepseek_v3,
    "gpt-oss": gpt_oss,
    "bloom": bloom,
    "gpt-j": gpt_j,
}


class Contenders:
    """The engine, and transformers with the same weights."""

    def __init__(self, folder: Path, engine: AsyncEngine, length: int, device: str) -> None:
        self.engine = engine
        model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.model = model.to(device).eval()
        self.ids = torch.randint(10, 8000, (max(REQUESTS), length)).to(device)

    async def ours(self, count: int, tokens: int) -> float:
        """Seconds that the engine takes for so many requests."""
        await self.engine.reset_caches()
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        prompts = [row.tolist() for row in self.ids[:count]]
        begin = time.perf_counter()
        await asyncio.gather(*(self.engine.generate(each, params) for each in prompts))
        return time.perf_counter() - begin

    def theirs(self, count: int, tokens: int) -> float:
        """Seconds that transformers takes for them as one batch."""
        options = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens}
        rows = self.ids[:count]
        begin = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(rows, attention_mask=torch.ones_like(rows), **options)
        return time.perf_counter() - begin


async def measure(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one model."""
    model = MODELS[name]().to(torch.bfloat16)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    num_parameters = sum(each.numel() for each in model.parameters())
    del model
    found: dict[str, Any] = {"model": name, "parameters_m": round(num_parameters / 1e6)}
    device = options.device
    async with AsyncEngine.from_pretrained(folder, device=device, dtype="bfloat16") as engine:
        pair = Contenders(folder, engine, options.prompt, device)
        for count in REQUESTS:
            rounds: list[tuple[float, float, float, float]] = []
            for number in range(options.rounds + 1):
                times = [await pair.ours(count, 1), await asyncio.to_thread(pair.theirs, count, 1)]
                times.append(await pair.ours(count, NEW_TOKENS + 1) - times[0])
                whole = await asyncio.to_thread(pair.theirs, count, NEW_TOKENS + 1)
                times.append(whole - times[1])
                if number:
                    rounds.append((times[0], times[1], times[2], times[3]))
            first, first_hf, later, later_hf = (median(each) for each in zip(*rounds, strict=True))
            row = {
                "prompt_tokens_per_s": round(count * options.prompt / first),
                "prompt_ratio": round(median(b / a for a, b, _, _ in rounds), 2),
                "decode_tokens_per_s": round(count * NEW_TOKENS / later, 1),
                "decode_ratio": round(median(d / c for _, _, c, d in rounds), 2),
                "theirs_ms": [round(first_hf * 1e3), round(later_hf / NEW_TOKENS * 1e3, 1)],
            }
            found[str(count)] = row
            print(name, count, row, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    results = []
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            results.append(asyncio.run(measure(name, Path(scratch), options)))
    print(json.dumps({"prompt": options.prompt, "models": results}))


if __name__ == "__main__":
    main()
