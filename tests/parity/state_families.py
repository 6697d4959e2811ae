"""Tiny models whose layers keep a state beside attention: none of them has a class here.

`TEXTS`: of text, by the settings that all share. `FAMILIES`: with images and videos.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers as hf

from tests.parity import families
from tests.parity.families import QWEN_VIDEO, Family, id_of

__all__ = ["FAMILIES", "TEXTS"]

Settings = dict[str, Any]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {
    "num_hidden_layers": 4, "head_dim": 12, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
MAMBA2 = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}


def nemotron_h(s: Settings) -> Any:
    kept = {name: value for name, value in s.items() if name != "num_hidden_layers"}
    mixers = {"mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 8, "chunk_size": 8}
    experts = {
        "n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
        "moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    kinds = ["mamba", "attention", "mlp", "mamba", "moe"]
    config = hf.NemotronHConfig(
        **kept, **mixers, **experts, layers_block_type=kinds, n_groups=1, head_dim=12
    )
    return hf.NemotronHForCausalLM(config)


TEXTS: Mapping[str, Callable[[Settings], Any]] = {
    "bamba": lambda s: hf.BambaForCausalLM(hf.BambaConfig(**s, **MAMBA2, attn_layer_indices=[1])),
    "falcon-h1": lambda s: hf.FalconH1ForCausalLM(
        hf.FalconH1Config(**s, **MAMBA2, mamba_d_ssm=96)
    ),
    "granite-hybrid": lambda s: hf.GraniteMoeHybridForCausalLM(
        hf.GraniteMoeHybridConfig(
            **s, **MAMBA2, layer_types=["mamba", "attention", "mamba"], num_local_experts=4,
            num_experts_per_tok=2, shared_intermediate_size=64, position_embedding_type="rope",
        )
    ),
    "jamba": lambda s: hf.JambaForCausalLM(
        hf.JambaConfig(
            **{**s, "num_hidden_layers": 4}, attn_layer_period=2, attn_layer_offset=1,
            num_experts=2, num_experts_per_tok=1, mamba_d_state=4,
        )
    ),
    "lfm2": lambda s: hf.Lfm2ForCausalLM(hf.Lfm2Config(**{**s, **CONV})),
    "lfm2-moe": lambda s: hf.Lfm2MoeForCausalLM(
        hf.Lfm2MoeConfig(**{**s, **CONV, **EXPERTS}, num_dense_layers=1)
    ),
    "nemotron-h": nemotron_h,
    "olmo-hybrid": lambda s: hf.OlmoHybridForCausalLM(
        hf.OlmoHybridConfig(**{**s, **DELTA, "linear_num_key_heads": 4})
    ),
    "qwen3-next": lambda s: hf.Qwen3NextForCausalLM(
        hf.Qwen3NextConfig(**{**s, **DELTA, **EXPERTS}, shared_expert_intermediate_size=32)
    ),
    "qwen3.5": lambda s: hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**{**s, **DELTA})),
    "zaya": lambda s: hf.ZayaForCausalLM(hf.ZayaConfig(**s)),
}  # fmt: skip


def qwen35(tokenizer: Any, model: str = "Qwen3_5", **text: Any) -> Any:
    rope = {**families.QWEN_ROPE, "mrope_interleaved": True}
    settings = families.qwen_text(tokenizer, rope)
    config = getattr(hf, f"{model}Config")(
        vision_config={
            "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "out_hidden_size": 48, "patch_size": 16, "num_position_embeddings": 64,
        },
        text_config={**settings, **DELTA, **text},
        tie_word_embeddings=False,
        vision_start_token_id=id_of(tokenizer, "<|vision_start|>"),
        vision_end_token_id=id_of(tokenizer, "<|vision_end|>"),
        **families.qwen_ids(tokenizer),
    )  # fmt: skip
    return getattr(hf, f"{model}ForConditionalGeneration")(config)


def qwen35_moe(tokenizer: Any) -> Any:
    return qwen35(tokenizer, "Qwen3_5Moe", **EXPERTS, shared_expert_intermediate_size=32)


PLACE = {
    "place": "<|vision_start|><|image_pad|><|vision_end|>", "video_place": QWEN_VIDEO,
    "sizes": ((60, 60), (64, 128), (120, 60)),
}  # fmt: skip
FAMILIES: Mapping[str, Family] = {
    "qwen3.5-moe-vl": Family(
        processor=families.qwen3_vl_processor, model=qwen35_moe, dtype=torch.float32, **PLACE
    ),
    "qwen3.5-vl": Family(processor=families.qwen3_vl_processor, model=qwen35, **PLACE),
}
