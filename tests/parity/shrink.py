"""Tiny configs of any class, by rule: its own settings, but for sizes.

A config and its parts are walked, and numbers are made small by what they are called. What no rule
gets right is in `OVERRIDES`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from transformers import PreTrainedConfig

__all__ = ["NUM_LAYERS", "WIDTH", "shrink"]

WIDTH, NUM_LAYERS = 64, 3
SIDE_IN_PATCHES = 4
HEADS, HEAD_DIM = 4, 16
Size = int | Callable[[Any], Any]
USUAL = {"head_dim": HEAD_DIM, "num_experts_per_tok": 2}
"""Of what checkpoints say and a class's own settings may not."""
NOT_SETTINGS = ("transformers_version", "ignore_keys_at_rope_validation")


def _first_layers(old: Any) -> Any:
    return [0, 1] if isinstance(old, list | tuple) else old


RULES: tuple[tuple[str, Size], ...] = tuple(
    (rf"(?:{pattern})\Z", size)
    for pattern, size in (
        (r"(.*_)?(vocab_size|vocab_size_per_layer_input)", lambda old: old),  # by its owner
        (
            r"head_dim|v_head_dim|attention_head_dim|head_width|key_length|d_kv|.*_head_dim",
            HEAD_DIM,
        ),
        (r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim|index_head_dim|global_head_dim", HEAD_DIM),
        (r"(kv|o)_lora_rank|lora_rank", 16),
        (r"q_lora_rank", 32),
        (r"index_topk", 6),
        (r"index_kpool", 2),  # a part of it
        (r"index_n_heads", 16),  # a key that no head looks for is one of many with a score of 0
        (r"moe.*intermediate_size|.*expert.*intermediate_size|expert_ffn.*|moe_ffn.*", 32),
        (r"(.*_)?(intermediate_size|ffn_dim|d_ff|ffn_hidden_size|n_inner|inner_dim|mlp_dim)", 96),
        (r"num_shared_experts|n_shared_experts|moe_num_shared_experts|n_group|topk_group", 1),
        (
            r"(.*_)?(experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|router_top_k)",
            2,
        ),
        (r"(.*_)?(num_experts|n_routed_experts|num_local_experts|moe_num_experts)", 4),
        (r"num_zero_experts|zero_expert_num|first_k_dense_replace", 1),
        (r"hidden_size_per_layer_input", 16),
        (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|embedding_size|word_embed_proj_dim)", WIDTH),
        (
            r"(.*_)?(projection_dim|projector_hidden_size|hidden_dim|output_dim|embedding_dim)",
            WIDTH,
        ),
        (r"(.*_)?(mm_hidden_size|width|embd_dim|merger_hidden_size|feature_size|n_embed)", WIDTH),
        (r"adapter_(in|out)_dim|adapter_input_size", WIDTH),
        (r"mlp_ratio", lambda old: type(old)(2)),
        (
            r"(.*_)?(num_(hidden_)?layers|n_layers?|depth|num_blocks|(en|de)coder_layers)",
            NUM_LAYERS,
        ),
        (r"(.*_)?(num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num)", HEADS // 2),
        (r"(.*_)?(attention_heads|num_heads|n_heads?|num_attn_heads)", HEADS),
        (r"sliding_window|local_window|attention_chunk_size|local_attention", 6),
        (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length", 2048),
        (r"base_channels|output_channels|vision_output_channels|subsampling_conv_channels", 32),
        (r"num_embeddings|codebook_size", 12),
        (r"channel_multiplier", lambda _: [1, 1]),
        (r"(full_?att.*|deepstack_.*|.*_block_indexes|global_attn_indexes)", _first_layers),
        (r"num_query_tokens|query_length|num_queries|num_latents|resampler_n_latents", 4),
        (r"pad_token_id", 0),
        (r"bos_token_id|decoder_start_token_id", 1),
        (r"eos_token_id", 2),
        (r"tie_word_embeddings", lambda _: False),
        (r"dtype", lambda _: None),
    )
)
"""Names of settings, the first that fits -> what they become."""

_WINDOWED = {
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": 32,
    "kv_lora_rank": 16, "head_dim": 2 * HEAD_DIM, "qk_nope_head_dim": HEAD_DIM,
    "qk_rope_head_dim": HEAD_DIM, "v_head_dim": HEAD_DIM,
}  # fmt: skip

_INDEXED = {
    "indexer_n_heads": HEADS, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM,
    "indexer_budget": 6, "indexer_compress_ratio": 2,
}  # fmt: skip

# By architecture: path in the config -> value; what is not there is added.
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "BigBirdForCausalLM": {"attention_type": "original_full"},
    # transformers' cache has as many layers as the encoder.
    "BlenderbotForCausalLM": {"max_position_embeddings": 2048, "encoder_layers": NUM_LAYERS},
    "CohereCompassForConditionalGeneration": {
        "text_config.rope_parameters": {
            "full_attention": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2],
            }
        },
    },
    "DeepseekOcr2ForConditionalGeneration": {
        "vision_config.sam_config.downsample_channels": [32, WIDTH],
        "text_config.mlp_layer_types": ["dense", "sparse", "sparse"],
        "text_config.num_experts_per_tok": 2,
    },
    "Granite4VisionForConditionalGeneration": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 0], [1, 1]], "spatial_target_layers": [1, 2],
    },
    "CohereCompassForCausalLM": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2],
            }
        },
    },
    "DbrxForCausalLM": {"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8},
    "Dots1ForCausalLM": {
        "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
    },
    # Both parts of a head.
    "LongcatFlashForCausalLM": {"qk_head_dim": 2 * HEAD_DIM},
    # Adapters are by language.
    "XmodForCausalLM": {"default_language": "en_XX"},
    # Attention is twice as wide as the rest.
    "ZambaForCausalLM": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD_DIM},
    "Zamba2ForCausalLM": {
        "attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD_DIM,
        "mamba_headdim": HEAD_DIM, "hybrid_layer_ids": [1],
    },
    "NemotronForCausalLM": {"num_key_value_heads": HEADS // 2},
    # A few chunks; positions that matter to layers without rotation.
    "Llama4ForCausalLM": {
        "attention_chunk_size": 16, "floor_scale": 8, "no_rope_layers": [1, 0, 1],
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    },
    "Llama4ForConditionalGeneration": {
        "text_config.attention_chunk_size": 16, "text_config.floor_scale": 8,
        "text_config.no_rope_layers": [1, 0, 1],
        "text_config.layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        # Four patches make one.
        "vision_config.intermediate_size": 4 * WIDTH, "vision_config.projector_input_dim": 32,
        "vision_config.projector_output_dim": 32, "vision_config.vision_output_dim": 32,
    },
    # Its processor knows how many rows a tile of this size has.
    "Phi4MultimodalForCausalLM": {
        "vision_config.image_size": 448, "vision_config.patch_size": 14,
        "vision_config.crop_size": 448, "audio_config.ext_pw_out_channel": WIDTH,
        "audio_config.depthwise_separable_out_channel": WIDTH,
        "audio_config.nemo_conv_channels": WIDTH,
    },
    # Of images that its processor cuts as another family's.
    "MistralLarge4ForConditionalGeneration": {
        "vision_config.patch_size": 8, "vision_config.image_size": 96,
    },
    # Of both parts of a head.
    "Mistral4ForCausalLM": {"head_dim": 2 * HEAD_DIM, "text_config.head_dim": 2 * HEAD_DIM},
    "MllamaForConditionalGeneration": {
        "text_config.cross_attention_layers": [1], "vision_config.num_global_layers": 2,
        # Of the last layer and of two before it.
        "vision_config.intermediate_layers_indices": [0, 2], "vision_config.vision_output_dim": 192,
    },
    # Of three colours in a patch.
    "Pix2StructForConditionalGeneration": {"vision_config.patch_embed_hidden_size": 768},
    "HunYuanVLForConditionalGeneration": {"text_config.head_dim": HEAD_DIM},
    # Its own settings have attention only, its checkpoints have not.
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention", "conv"]},
    "Emu3ForConditionalGeneration": {
        # Of its last stage; there are as many as an image's sides are halved, and one.
        "vq_config.hidden_size": 32, "vq_config.channel_multiplier": [1, 1, 1, 1],
        "vocabulary_map": {
            "<image>": 4, "<|extra_200|>": 200,
            **{f"<|visual token {i:06d}|>": 300 + i for i in range(12)},
        },
    },
    # Heads of windows and their ranks are by layer.
    "Dots3NoteForCausalLM": {"per_layer_config": {1: _WINDOWED}},
    "Dots3NoteForConditionalGeneration": {
        "text_config.per_layer_config": {1: _WINDOWED}, "vision_config.per_layer_config": {},
        "vision_config.mlp_layer_types": ["dense", "dense", "dense"],
    },
    "Ernie4_5_VLMoeForConditionalGeneration": {
        # Height and width are interleaved, time comes last.
        "text_config.rope_parameters": {
            "rope_type": "default", "rope_theta": 5e5, "mrope_section": [3, 3, 2],
        },
    },
    "MoonshineStreamingForConditionalGeneration": {
        "num_key_value_heads": 4, "encoder_config.sliding_windows": [[16, 4], [16, 0], [16, 4]],
        "decoder_start_token_id": 1,
    },
    "SpeechEncoderDecoderModel": {"decoder.max_position_embeddings": 1024},
    # Its checkpoints have an indexer, its own settings do not.
    "Qwen4ExpForCausalLM": _INDEXED,
    "Qwen4ExpForConditionalGeneration": {
        f"text_config.{name}": value for name, value in _INDEXED.items()
    },
    "VipLlavaForConditionalGeneration": {"vision_feature_layers": [-1, -2]},
    "UnlimitedOcrForConditionalGeneration": {
        "vision_config.sam_config.downsample_channels": [32, WIDTH],
        "text_config.mlp_layer_types": ["dense", "sparse", "sparse"],
        "text_config.num_experts_per_tok": 2,
    },
    # Of the patches that it merges.
    "MuseGlimmerForConditionalGeneration": {"out_hidden_size": 4 * WIDTH},
    "MuseSparkForConditionalGeneration": {"out_hidden_size": 4 * WIDTH},
    "NemotronH_Omni_Reasoning_V3": {"text_config.n_groups": 2},
    "Nemotron3_5TranscribeForConditionalGeneration": {"text_config.n_groups": 2},
    "FunAsrNanoForConditionalGeneration": {"adaptor_config.intermediate_size": WIDTH // 4},
    # Its own settings have no windows, its checkpoints have.
    "Step3p7ForConditionalGeneration": {
        "vision_config.image_size": 112, "text_config.sliding_window": 6,
        "text_config.layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "text_config.mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "Gemma4UnifiedForConditionalGeneration": {"vision_config.output_proj_dims": WIDTH},
    "GotOcr2ForConditionalGeneration": {
        # Its processor always writes 256 tokens.
        "vision_config.image_size": 128, "vision_config.patch_size": 2,
        "vision_config.global_attn_indexes": [], "vision_config.window_size": 8,
    },
}  # fmt: skip


def shrink(model_class: Any, config: Any, vocab_size: int, ids: Mapping[str, int]) -> Any:
    """The same config with small sizes. `ids`: of special tokens, by setting."""
    special = dict(OVERRIDES.get(model_class.__name__, {}))
    text = config.get_text_config()
    path = next((f"{n}." for n, v in vars(config).items() if v is text), "")
    rope = getattr(text, "rope_parameters", None)
    names = (each.__module__ for each in (type(text), model_class))
    modules = [import_module(name.replace(".configuration_", ".modeling_")) for name in names]
    if rope and any("mrope_section" in inspect.getsource(each) for each in modules):
        # A checkpoint says them, the class's own settings often do not.
        special.setdefault(f"{path}rope_parameters", {**_rope({"mrope_section": [1] * 3, **rope})})
    if getattr(config, "is_encoder_decoder", False):
        special.setdefault("decoder_start_token_id", 1)
    if "is_decoder=True" in inspect.getsource(model_class):
        special.setdefault("is_decoder", True)  # else it warns that it generates nothing
    found = _shrunk(config, vocab_size, ids, special, "")
    assert isinstance(found, PreTrainedConfig)
    return found


def _shrunk(
    config: Any, vocab_size: int, ids: Mapping[str, int], special: Mapping[str, Any], path: str
) -> Any:
    settings = {n: v for n, v in vars(config).items() if not n.startswith("_")}
    num_layers = next(
        (settings[n] for n in ("num_hidden_layers", "num_layers", "n_layer") if n in settings), None
    )
    found: dict[str, Any] = {}
    for name, old in settings.items():
        here = f"{path}{name}"
        if here in special:
            found[name] = special[here]
        elif isinstance(old, PreTrainedConfig):
            found[name] = _shrunk(old, vocab_size, ids, special, f"{here}.")
        elif old is None and name in USUAL:
            found[name] = USUAL[name]
        elif old is not None or name in ids:
            found[name] = _size(name, old, vocab_size, ids, num_layers)
    found |= {
        name.removeprefix(path): value
        for name, value in special.items()
        if name.startswith(path) and "." not in name.removeprefix(path)
    }
    _fit_parts(found, {n for n in settings if f"{path}{n}" in special})
    known = {n: v for n, v in found.items() if v is not None or settings.get(n) is not None}
    return type(config)(**{n: v for n, v in known.items() if n not in NOT_SETTINGS})


def _size(
    name: str, old: Any, vocab_size: int, ids: Mapping[str, int], num_layers: int | None
) -> Any:
    """What one setting becomes."""
    if name in ids:
        return ids[name]
    if name == "vocab_size" and isinstance(old, int):
        return vocab_size
    if isinstance(old, list | tuple) and len(old) == num_layers and len(old) > NUM_LAYERS:
        kinds = [*dict.fromkeys(old)]
        return kinds[:NUM_LAYERS] if len(kinds) >= NUM_LAYERS else (kinds * NUM_LAYERS)[:NUM_LAYERS]
    if name == "patch_size" and isinstance(old, int):
        return min(old, 16)
    if name == "image_size":
        return old  # by its patches
    if isinstance(old, Mapping) and "rope" in name:
        return _rope(old)
    for pattern, size in RULES:
        if not re.match(pattern, name):
            continue
        if not isinstance(size, int):
            return size(old)
        if isinstance(old, list | tuple) and all(type(each) is int for each in old):
            return [min(each, size) for each in old]
        if isinstance(old, int) and not isinstance(old, bool):
            return size if name.endswith("_id") else min(old, size)
        return size if name.endswith("_id") else old
    return old


def _rope(old: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of a head's positions that are as long as a small head is."""
    if any(isinstance(each, Mapping) for each in old.values()):
        return {n: _rope(v) if isinstance(v, Mapping) else v for n, v in old.items()}
    found = dict(old)
    if "mrope_section" in found:
        half = int(HEAD_DIM // 2 * found.get("partial_rotary_factor", 1.0))
        count = len(found["mrope_section"])
        rest = half // count if count > 1 else 0
        found["mrope_section"] = [half - rest * (count - 1), *[rest] * (count - 1)]
    return found


def _fit_parts(found: dict[str, Any], fixed: set[str]) -> None:
    """Make settings of one config agree: image by patch, key heads by heads."""
    patch, image = found.get("patch_size"), found.get("image_size")
    if isinstance(patch, list | tuple):
        patch = patch[0]
    if isinstance(patch, int) and image is not None and "image_size" not in fixed:
        side = patch * SIDE_IN_PATCHES
        found["image_size"] = [side, side] if isinstance(image, list | tuple) else side
    if "kv_lora_rank" in found and "num_key_value_heads" in found:
        found["num_key_value_heads"] = found.get("num_attention_heads", HEADS)
