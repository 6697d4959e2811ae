"""What the engine says to every causal language model of transformers: a tiny one of each.

    HF_HUB_OFFLINE=1 PYTHONPATH=. python tests/parity/scan.py [ARCHITECTURE ...]

Without names, all that no class here is written for. Each line is JSON: the architecture, what came
of it, and why. `equal`: four prompts at once have the tokens of transformers' `generate`, in chunks
of 512 and of 5 tokens, twice; `differs`: they have not; `refused`: by a ModelLoadError; `unbuilt`:
a small config of this script's is none that transformers takes or runs, which says nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aioengine import AsyncEngine, SamplingParams
from aioengine.errors import ModelLoadError
from aioengine.models.runtime.registry import known_architectures
from tests.parity.families import MAX_TOKENS, TEXT, save_text, vocabulary
from tests.processors.conftest import make_tokenizer

PROMPTS = ("tell a story", "What is in the picture? There is", "a", "tell a story about colours")
MOST_WEIGHTS = 1 << 25
SIZES: dict[str, int] = {
    **dict.fromkeys(("n_embd", "d_model", "dim", "word_embed_proj_dim"), 48),
    **dict.fromkeys(("ffn_dim", "d_ff", "ffn_hidden_size", "n_inner", "inner_dim"), 96),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("n_positions", "n_ctx", "max_position_embeddings"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "index_n_heads"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("head_dim", "v_head_dim", "rotary_dim"), 12),
    "sliding_window": 6, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "index_head_dim": 16, "index_topk": 64,
}  # fmt: skip


def tiny_config(config_class: Any, vocab_size: int) -> Any:
    """A config with the class's own settings, but for sizes."""
    usual = config_class()
    wanted = {**TEXT, **SIZES, "vocab_size": vocab_size}
    found = {name: n for name, n in wanted.items() if getattr(usual, name, None) is not None}
    found |= {name: wanted[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    if hasattr(usual, "kv_lora_rank"):
        found = {**found, "num_key_value_heads": 4}
        found.pop("head_dim", None)
    kinds = [*dict.fromkeys(getattr(usual, "layer_types", None) or ())]
    if kinds:
        found["layer_types"] = kinds if len(kinds) > 3 else (kinds * 3)[:3]
        found["num_hidden_layers"] = len(found["layer_types"])
    return config_class(**found)


def build(architecture: str, folder: Path) -> list[tuple[int, ...]]:
    """Write the model's folder; the tokens that transformers generates."""
    tokenizer = make_tokenizer("bytes")
    model_class = getattr(transformers, architecture)
    config = tiny_config(model_class.config_class, vocabulary(tokenizer))
    with torch.device("meta"):
        if sum(each.numel() for each in model_class(config).parameters()) > MOST_WEIGHTS:
            raise ValueError("parts of it are not small")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config)
    return save_text(model, tokenizer, folder, PROMPTS)


async def serve(folder: Path, budget: int) -> list[tuple[int, ...]]:
    """The tokens that the engine generates, the second time that it is asked."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    sizes: dict[str, Any] = {"block_size": 4, "kv_cache_bytes": 4 << 20, "max_model_len": 256}
    options = {**sizes, "device": "cpu", "max_num_batched_tokens": budget}
    async with AsyncEngine.from_pretrained(folder, **options) as engine:
        for _ in range(2):
            outputs = await asyncio.gather(*(engine.generate(each, params) for each in PROMPTS))
    return [output.token_ids for output in outputs]


def judge(architecture: str) -> tuple[str, str]:
    """What came of an architecture, and why."""
    with tempfile.TemporaryDirectory() as name:
        try:
            expected = build(architecture, Path(name))
        except Exception as error:  # whatever a class raises that is given small sizes
            return "unbuilt", f"{type(error).__name__}: {error!s:.150}"
        try:
            found = [asyncio.run(serve(Path(name), budget)) for budget in (512, 5)]
        except ModelLoadError as error:
            return "refused", f"{error!s:.300}"
    if found != [expected] * 2:
        return "differs", f"{found} and not {expected}"
    return "equal", f"{len(set(expected))} different answers"


def main() -> None:
    """Print a line for each, and at last how many came to what."""
    groups = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    names = {name for group in groups for name in ([group] if isinstance(group, str) else group)}
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    counts: dict[str, int] = {}
    for name in sys.argv[1:] or sorted(names.difference(known_architectures())):
        verdict, reason = judge(name) if hasattr(transformers, name) else ("unbuilt", "no class")
        counts[verdict] = counts.get(verdict, 0) + 1
        print(json.dumps([name, verdict, reason]), flush=True)  # noqa: T201
    print(json.dumps(counts))  # noqa: T201


if __name__ == "__main__":
    main()
