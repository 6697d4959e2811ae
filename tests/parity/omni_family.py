"""Tiny Qwen-Omnis on disk: the thinker alone, or as a whole model's checkpoint has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from tests.parity.audio_families import finish
from tests.parity.families import QWEN_ROPE, id_of, qwen_text
from tests.processors import hf_processors
from tests.support.tiny import draw_weights
from tests.support.versions import skip_up_to

IMAGE = "<|vision_bos|><|IMAGE|><|vision_eos|>"
VIDEO = "<|vision_bos|><|VIDEO|><|vision_eos|>"
AUDIO = "<|audio_bos|><|AUDIO|><|audio_eos|>"

TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    f"{{% if part['type'] == 'image' %}}{IMAGE}{{% elif part['type'] == 'audio' %}}{AUDIO}"
    f"{{% elif part['type'] == 'video' %}}{VIDEO}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{% endfor %}{% endfor %}"
)
PROCESSOR = "processor_config.json"


def omni_tokenizer() -> Any:
    return hf_processors.tokenizer_with(
        image_token="<|IMAGE|>", video_token="<|VIDEO|>", audio_token="<|AUDIO|>",
        vision_bos_token="<|vision_bos|>", vision_eos_token="<|vision_eos|>",
        audio_bos_token="<|audio_bos|>", audio_eos_token="<|audio_eos|>",
    )  # fmt: skip


def thinker_config(tokenizer: Any) -> Any:
    return hf.Qwen2_5OmniThinkerConfig(
        audio_config={
            "num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64, "d_model": 32, "max_source_positions": 50, "n_window": 25,
            "output_dim": 48,
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "out_hidden_size": 48, "patch_size": 14, "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        text_config=qwen_text(tokenizer, QWEN_ROPE),
        image_token_index=id_of(tokenizer, "<|IMAGE|>"),
        video_token_index=id_of(tokenizer, "<|VIDEO|>"),
        audio_token_index=id_of(tokenizer, "<|AUDIO|>"),
        vision_start_token_id=id_of(tokenizer, "<|vision_bos|>"),
        vision_end_token_id=id_of(tokenizer, "<|vision_eos|>"),
        audio_start_token_id=id_of(tokenizer, "<|audio_bos|>"),
        audio_end_token_id=id_of(tokenizer, "<|audio_eos|>"),
    )  # fmt: skip


def qwen3_thinker_config(tokenizer: Any) -> Any:
    rope = {**QWEN_ROPE, "mrope_interleaved": True}
    return hf.Qwen3OmniMoeThinkerConfig(
        audio_config={
            "num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64, "d_model": 32, "max_source_positions": 50, "n_window": 50,
            "n_window_infer": 200, "output_dim": 48, "downsample_hidden_size": 16,
        },
        vision_config={
            "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "out_hidden_size": 48, "patch_size": 14, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        text_config={
            **qwen_text(tokenizer, rope), "head_dim": 12, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        },
        image_token_id=id_of(tokenizer, "<|IMAGE|>"),
        video_token_id=id_of(tokenizer, "<|VIDEO|>"),
        audio_token_id=id_of(tokenizer, "<|AUDIO|>"),
        vision_start_token_id=id_of(tokenizer, "<|vision_bos|>"),
        audio_start_token_id=id_of(tokenizer, "<|audio_bos|>"),
        position_id_per_seconds=13,
    )  # fmt: skip


KINDS: Mapping[str, Any] = {
    "Qwen2_5Omni": thinker_config,
    "Qwen3OmniMoe": qwen3_thinker_config,
}
"""What transformers' classes begin with -> the thinker's config."""


def save_thinker(folder: Path, kind: str = "Qwen2_5Omni") -> Any:
    """With audio windows of half a second; returns the HF model."""
    skip_up_to(5, 17, "its processor does not say what media become in a text")
    tokenizer = omni_tokenizer()
    with torch.random.fork_rng(devices=[]):
        model = getattr(hf, f"{kind}ThinkerForConditionalGeneration")(KINDS[kind](tokenizer))
    draw_weights(model)
    # The grouped matmul of experts has no float64.
    model = finish(model, folder, torch.float32 if "Moe" in kind else torch.float64)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    images = hf.Qwen2VLImageProcessorPil(
        size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16}
    )
    sounds = hf.WhisperFeatureExtractor(feature_size=8, chunk_length=4)
    # As on the hub: one file for both.
    settings = {**images.to_dict(), **sounds.to_dict(), "processor_class": f"{kind}Processor"}
    settings["image_processor_type"] = "Qwen2VLImageProcessor"
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / PROCESSOR).write_text(json.dumps({"processor_class": f"{kind}Processor"}))
    return model


def make_whole(thinker: Path, folder: Path, kind: str = "Qwen2_5Omni") -> None:
    """The same thinker in a folder of a whole model, beside a weight of its talker."""
    for path in thinker.iterdir():
        if path.suffix == ".json" and path.name != PROCESSOR:
            (folder / path.name).write_bytes(path.read_bytes())
    inner = json.loads((thinker / "config.json").read_text())
    # As on the hub.
    names = {"Qwen2_5Omni": "Model", "Qwen3OmniMoe": "ForConditionalGeneration"}
    config = {"architectures": [f"{kind}{names[kind]}"]}
    config["model_type"] = inner["model_type"].removesuffix("_thinker")
    config |= {"thinker_config": inner, "enable_audio_output": False, "dtype": inner["dtype"]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(thinker / "model.safetensors")
    renamed = {f"thinker.{name}": tensor for name, tensor in weights.items()}
    renamed["talker.codec_head.weight"] = torch.zeros(2, 2)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
