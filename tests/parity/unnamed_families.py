"""Tiny models of architectures that no class here names: chosen by their kind, and tried.

Rows as those of `families.FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import transformers as hf

from tests.parity import families
from tests.parity.families import Family, id_of, vocabulary
from tests.parity.sweep import make
from tests.parity.sweep_processors import fit_counts
from tests.processors import hf_processors
from tests.support.tiny import draw_weights

__all__ = ["UNNAMED", "instructblip", "instructblip_processor"]

TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip


def aya_vision_processor() -> Any:
    names = (
        "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL",
        *(f"TILE_{i}" for i in range(1, 5)),
    )  # fmt: skip
    tokenizer = hf_processors.tokenizer_with("<image>", "<|IMG_PATCH|>", *names)
    images = hf.GotOcr2ImageProcessorPil(
        size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=4
    )
    return hf.AyaVisionProcessor(images, tokenizer, patch_size=14, img_size=56, downsample_factor=2)


def aya_vision(tokenizer: Any) -> Any:
    config = hf.AyaVisionConfig(
        vision_config={**TOWER, "model_type": "siglip_vision_model", "image_size": 56},
        text_config={
            **families.TEXT, "model_type": "cohere2", "vocab_size": vocabulary(tokenizer),
            "sliding_window": 6, "logit_scale": 0.25,
        },
        image_token_index=id_of(tokenizer, "<|IMG_PATCH|>"),
        alignment_intermediate_size=64,
        tie_word_embeddings=False,
    )  # fmt: skip
    return hf.AyaVisionForConditionalGeneration(config)


def vip_llava(tokenizer: Any) -> Any:
    config = hf.VipLlavaConfig(
        vision_config={**TOWER, "model_type": "clip_vision_model", "num_hidden_layers": 3},
        text_config=families.llama(tokenizer),
        vision_feature_layers=[-2, -1],
        image_token_index=id_of(tokenizer, "<image>"),
        tie_word_embeddings=False,
    )
    return hf.VipLlavaForConditionalGeneration(config)


def glm46v(tokenizer: Any) -> Any:
    named = families.glm4v(tokenizer).config.to_dict()
    parts = ("vision_config", "text_config", "image_token_id", "video_token_id")
    marks = ("image_start", "image_end", "video_start", "video_end")
    kept = {name: named[name] for name in (*parts, *(f"{each}_token_id" for each in marks))}
    return hf.Glm46VForConditionalGeneration(hf.Glm46VConfig(**kept, tie_word_embeddings=False))


def glm46v_processor() -> Any:
    plain = families.glm4v_processor()
    images = hf.Glm46VImageProcessorPil(**{"size": dict(plain.image_processor.size)})
    return hf_processors.without_video(hf.Glm46VProcessor)(images, plain.tokenizer, None)


def qwen3_vl_moe(tokenizer: Any) -> Any:
    named = families.qwen3_vl(tokenizer).config.to_dict()
    experts = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
    }  # fmt: skip
    text = {n: v for n, v in named["text_config"].items() if n != "model_type"}
    vision = {n: v for n, v in named["vision_config"].items() if n != "model_type"}
    config = hf.Qwen3VLMoeConfig(
        vision_config=vision,
        text_config={**text, **experts},
        tie_word_embeddings=False,
        **{n: v for n, v in named.items() if n.endswith("_token_id") and v is not None},
    )
    return hf.Qwen3VLMoeForConditionalGeneration(config)


def instructblip_processor() -> Any:
    plain = families.blip2_processor()
    return hf.InstructBlipProcessor(
        plain.image_processor, plain.tokenizer, hf_processors.tokenizer_with(), num_query_tokens=4
    )


def instructblip(tokenizer: Any, text: Any = None) -> Any:
    """Over a Llama, as Vicuna is one, or over what `text` says."""
    named = families.blip2(tokenizer).config.to_dict()
    qformer = {**named["qformer_config"], "vocab_size": vocabulary(tokenizer)}
    vision = {n: v for n, v in named["vision_config"].items() if n != "model_type"}
    qformer |= {"model_type": "instructblip_qformer", "max_position_embeddings": 90}
    config = hf.InstructBlipConfig(
        vision_config=vision,
        qformer_config=qformer,
        text_config=text or families.llama(tokenizer),
        num_query_tokens=4,
        image_token_index=id_of(tokenizer, "<image>"),
    )
    return hf.InstructBlipForConditionalGeneration(config)


@cache
def _made(architecture: str) -> tuple[Any, Any]:
    model, processor, _ = make(architecture)
    draw_weights(model)
    fit_counts(model, processor)
    return model, processor


def by_rule(architecture: str, place: str, dtype: torch.dtype = torch.float64) -> Family:
    """A row that the sweep's rules make."""
    return Family(
        processor=lambda: _made(architecture)[1],
        model=lambda _: _made(architecture)[0],
        place=place,
        sizes=((80, 60), (60, 120), (112, 112)),
        dtype=dtype,
    )


def idefics2_in_tiles() -> Any:
    processor = deepcopy(_made("Idefics2ForConditionalGeneration")[1])
    processor.image_processor.do_image_splitting = True
    return processor


UNNAMED: Mapping[str, Family] = {
    "aya-vision": Family(processor=aya_vision_processor, model=aya_vision, place="<image>"),
    "ernie-4.5-vl-moe": by_rule(
        "Ernie4_5_VLMoeForConditionalGeneration", "<|image_start|><|image|><|image_end|>",
        torch.float32,
    ),
    "glm-4.6v": Family(
        processor=glm46v_processor, model=glm46v,
        place="<|begin_of_image|><|image|><|end_of_image|>",
        sizes=((60, 60), (56, 112), (120, 60)),
    ),
    "granite4-vision": by_rule("Granite4VisionForConditionalGeneration", "<|image|>"),
    "hunyuan-vl": by_rule(
        "HunYuanVLForConditionalGeneration", "<|image_start|><|image|><|image_end|>"
    ),
    "idefics2": by_rule("Idefics2ForConditionalGeneration", "<|image|>"),
    "idefics2 in tiles": replace(
        by_rule("Idefics2ForConditionalGeneration", "<|image|>"), processor=idefics2_in_tiles
    ),
    "instructblip": Family(
        processor=instructblip_processor, model=instructblip, place="",
        texts=families.FAMILIES["blip2"].texts, num_encoded=5,
    ),
    "janus": by_rule("JanusForConditionalGeneration", "<|image|>"),
    "lighton-ocr": by_rule("LightOnOcrForConditionalGeneration", "<|image|>"),
    "ovis2": by_rule("Ovis2ForConditionalGeneration", "<image>"),
    "paddleocr-vl": by_rule(
        "PaddleOCRVLForConditionalGeneration", "<|IMAGE_START|><|image|><|IMAGE_END|>"
    ),
    "video-llama3": by_rule("VideoLlama3ForConditionalGeneration", "<|image|>"),
    "qwen3-vl-moe": Family(
        processor=families.qwen3_vl_processor, model=qwen3_vl_moe,
        place="<|vision_start|><|image_pad|><|vision_end|>",
        sizes=((60, 60), (64, 128), (120, 60)), dtype=torch.float32,
    ),
    "vip-llava": Family(
        processor=lambda: hf_processors.llava("clip"), model=vip_llava, place="<image>"
    ),
}  # fmt: skip
