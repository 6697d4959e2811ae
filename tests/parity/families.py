"""A tiny model of each family, whole on disk, and what transformers itself makes of prompts.

A row of `FAMILIES` builds the HF processor and the HF model. Weights are drawn wide (why:
tests/support/tiny.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image

from aioengine.models.runtime.checkpoint import read_config
from aioengine.models.runtime.registry import choose
from aioengine.processors.hf.pixtral import PixtralProcessor
from aioengine.processors.info import load_context
from aioengine.processors.registry import MULTIMODAL_REGISTRY
from tests.processors import hf_processors
from tests.processors.conftest import make_tokenizer
from tests.support.tiny import draw_weights, tiny_image
from tests.support.versions import skip_up_to

MAX_TOKENS = 8
CLOSE_CALL = 1e-3
"""A difference between the two best logits at which rounding may decide."""
TEXT = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


# With as many images as places, "*" being one.
TEXTS = (
    "USER: *\nWhat is it? ASSISTANT:",
    "USER: *\nWhat is it? ASSISTANT:",
    "*",
    "First * then * now compare.",
    "** same?",
    "no picture here, tell a story",
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """`processor()`: the HF processor; `model(tokenizer)`: the HF model, weights to be drawn.

    `place`: what stands for an image in a text; `sizes`: of the images that are tried.
    """

    processor: Callable[[], Any]
    model: Callable[[Any], Any]
    place: str
    sizes: tuple[tuple[int, int], ...] = ((40, 30), (30, 60), (56, 56))
    least_budget: int = 1
    """Tokens that one step has to be able to take."""
    texts: Sequence[str] = TEXTS
    video_place: str = ""
    """What stands for a video; nothing where the family takes none."""
    num_frames: tuple[int, int] = (6, 4)
    """Of the videos that are tried; some HF processors take equally long ones only."""
    dtype: torch.dtype = torch.float64
    """Float32 where the family runs in nothing wider: then close calls are not compared."""
    num_encoded: int = 3
    """Of the images in the texts; more where an image becomes other rows beside other texts."""
    lacking: str = ""
    """What does not work for this family in transformers 5.17, under which it is skipped."""


def vocabulary(tokenizer: Any) -> int:
    """Rows of the embedding table."""
    return len(tokenizer) + 5


def id_of(tokenizer: Any, token: str) -> int:
    """The id of a token that must be there."""
    found = tokenizer.convert_tokens_to_ids(token)
    assert found is not None and found != tokenizer.unk_token_id, token
    return int(found)


def clip_tower(side: int = 28) -> Any:
    return hf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        image_size=side, patch_size=14,
    )  # fmt: skip


def llama(tokenizer: Any) -> Any:
    return hf.LlamaConfig(vocab_size=vocabulary(tokenizer), **TEXT)


def llava_next(tokenizer: Any) -> Any:
    config = hf.LlavaNextConfig(
        vision_config=clip_tower(),
        text_config=llama(tokenizer),
        image_token_index=id_of(tokenizer, "<image>"),
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
        tie_word_embeddings=False,
    )
    return hf.LlavaNextForConditionalGeneration(config)


def idefics3(tokenizer: Any) -> Any:
    config = hf.Idefics3Config(
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
        },
        text_config=llama(tokenizer),
        image_token_id=id_of(tokenizer, "<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    return hf.Idefics3ForConditionalGeneration(config)


def internvl(tokenizer: Any) -> Any:
    config = hf.InternVLConfig(
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": [56, 56], "patch_size": [14, 14],
        },
        text_config=hf.Qwen2Config(vocab_size=vocabulary(tokenizer), **TEXT),
        image_token_id=id_of(tokenizer, "<IMG_CONTEXT>"),
        downsample_ratio=0.5,
        image_seq_length=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    return hf.InternVLForConditionalGeneration(config)


def internvl_processor() -> Any:
    processor = hf_processors.internvl()
    processor.image_processor.size = hf.image_utils.SizeDict(height=56, width=56)
    return processor


def qwen_text(tokenizer: Any, rope: Mapping[str, Any]) -> dict[str, Any]:
    return {"vocab_size": vocabulary(tokenizer), **TEXT, "rope_parameters": dict(rope)}


def qwen_ids(tokenizer: Any) -> dict[str, int]:
    return {
        "image_token_id": id_of(tokenizer, "<|image_pad|>"),
        "video_token_id": id_of(tokenizer, "<|video_pad|>"),
    }


QWEN_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
QWEN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}


def qwen2_vl(tokenizer: Any) -> Any:
    config = hf.Qwen2VLConfig(
        vision_config={
            "depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2,
            "patch_size": 14,
        },
        text_config=qwen_text(tokenizer, QWEN_ROPE),
        tie_word_embeddings=False,
        **qwen_ids(tokenizer),
    )  # fmt: skip
    return hf.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl(tokenizer: Any) -> Any:
    config = hf.Qwen2_5_VLConfig(
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "out_hidden_size": 48, "patch_size": 14, "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        text_config=qwen_text(tokenizer, QWEN_ROPE),
        tie_word_embeddings=False,
        **qwen_ids(tokenizer),
    )  # fmt: skip
    return hf.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl_processor() -> Any:
    tokenizer = hf_processors.tokenizer_with(
        "<|vision_start|>", "<|vision_end|>",
        image_token="<|image_pad|>", video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>", vision_end_token="<|vision_end|>",
    )  # fmt: skip
    image_processor = hf.Qwen2VLImageProcessorPil(
        patch_size=16, size={"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 16}
    )
    return hf_processors.without_video(hf.Qwen3VLProcessor)(image_processor, tokenizer, None)


def qwen3_vl(tokenizer: Any) -> Any:
    rope = {**QWEN_ROPE, "mrope_interleaved": True}
    config = hf.Qwen3VLConfig(
        vision_config={
            "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "out_hidden_size": 48, "patch_size": 16, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        text_config={**qwen_text(tokenizer, rope), "head_dim": 12},
        tie_word_embeddings=False,
        vision_start_token_id=id_of(tokenizer, "<|vision_start|>"),
        vision_end_token_id=id_of(tokenizer, "<|vision_end|>"),
        **qwen_ids(tokenizer),
    )  # fmt: skip
    return hf.Qwen3VLForConditionalGeneration(config)


def gemma3(tokenizer: Any) -> Any:
    text = {
        **TEXT,
        "vocab_size": vocabulary(tokenizer),
        "head_dim": 12,
        "sliding_window": 6,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    config = hf.Gemma3Config(
        text_config=text,
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
        },
        mm_tokens_per_image=4,
        image_token_id=id_of(tokenizer, "<image_soft_token>"),
        boi_token_id=id_of(tokenizer, "<start_of_image>"),
        eoi_token_id=id_of(tokenizer, "<end_of_image>"),
        tie_word_embeddings=False,
    )  # fmt: skip
    return hf.Gemma3ForConditionalGeneration(config)


def gemma3_processor() -> Any:
    processor = hf_processors.gemma3()
    processor.image_processor.size = hf.image_utils.SizeDict(height=56, width=56)
    return processor


def paligemma(tokenizer: Any) -> Any:
    text = {**TEXT, "model_type": "gemma", "vocab_size": vocabulary(tokenizer), "head_dim": 12}
    config = hf.PaliGemmaConfig(
        text_config=text,
        projection_dim=48,
        vision_config={
            "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
            "projection_dim": 48,
        },
        image_token_index=id_of(tokenizer, "<image>"),
        tie_word_embeddings=False,
    )  # fmt: skip
    return hf.PaliGemmaForConditionalGeneration(config)


def aria(tokenizer: Any) -> Any:
    config = hf.AriaConfig(
        vision_config={
            "model_type": "idefics3_vision", "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 490,
            "patch_size": 70,
        },
        text_config={
            **TEXT, "model_type": "aria_text", "vocab_size": vocabulary(tokenizer),
            "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1,
        },
        projector_patch_to_query_dict={49: 3, 196: 6},
        image_token_index=id_of(tokenizer, "<|img|>"),
        tie_word_embeddings=False,
    )  # fmt: skip
    return hf.AriaForConditionalGeneration(config)


def aria_processor() -> Any:
    processor = hf_processors.aria()
    processor.image_processor.max_image_size = 490
    return processor


def llava_onevision_processor() -> Any:
    tokenizer = hf_processors.tokenizer_with(image_token="<image>", video_token="<video>")
    image_processor = hf.LlavaOnevisionImageProcessorPil(
        size={"height": 28, "width": 28}, image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]]
    )
    return hf_processors.without_video(hf.LlavaOnevisionProcessor)(
        image_processor, tokenizer, None, num_image_tokens=4, vision_feature_select_strategy="full"
    )


def llava_onevision(tokenizer: Any) -> Any:
    config = hf.LlavaOnevisionConfig(
        vision_config={
            "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
            "vision_use_head": False,
        },
        text_config=hf.Qwen2Config(vocab_size=vocabulary(tokenizer), **TEXT),
        image_token_index=id_of(tokenizer, "<image>"),
        video_token_index=id_of(tokenizer, "<video>"),
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
        tie_word_embeddings=False,
    )  # fmt: skip
    return hf.LlavaOnevisionForConditionalGeneration(config)


def deepseek_vl(tokenizer: Any) -> Any:
    config = hf.DeepseekVLConfig(
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
        text_config=llama(tokenizer),
        image_token_id=id_of(tokenizer, "<image_placeholder>"),
        tie_word_embeddings=False,
    )  # fmt: skip
    return hf.DeepseekVLForConditionalGeneration(config)


def deepseek_vl_processor() -> Any:
    processor = hf_processors.deepseek_vl()
    processor.num_image_tokens = 4
    return processor


def glm4v_processor() -> Any:
    tokenizer = hf_processors.tokenizer_with(
        "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
        image_token="<|image|>", video_token="<|video|>",
    )  # fmt: skip
    image_processor = hf.Glm4vImageProcessorPil(
        size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16 * 2}
    )
    return hf_processors.without_video(hf.Glm4vProcessor)(image_processor, tokenizer, None)


def glm4v(tokenizer: Any) -> Any:
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 2, 2],
        "partial_rotary_factor": 1.0,
    }
    names = ("image_start", "image_end", "video_start", "video_end")
    marks = ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>")
    config = hf.Glm4vConfig(
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "out_hidden_size": 48, "patch_size": 14, "image_size": 56,
        },
        text_config={**qwen_text(tokenizer, rope), "head_dim": 12},
        image_token_id=id_of(tokenizer, "<|image|>"),
        video_token_id=id_of(tokenizer, "<|video|>"),
        tie_word_embeddings=False,
        **{f"{n}_token_id": id_of(tokenizer, m) for n, m in zip(names, marks, strict=True)},
    )  # fmt: skip
    return hf.Glm4vForConditionalGeneration(config)


def chameleon_processor() -> Any:
    processor = hf_processors.chameleon()
    processor.image_processor.size = hf.image_utils.SizeDict(shortest_edge=16)
    processor.image_processor.crop_size = hf.image_utils.SizeDict(height=16, width=16)
    processor.image_seq_length = 16
    return processor


def chameleon(tokenizer: Any) -> Any:
    num_codes = 12
    letters = "ABCDEFGHIJ"
    names = [f"IMGIMG{letters[i // 10]}{letters[i % 10]}Z" for i in range(num_codes)]
    codes = {name: 300 + i for i, name in enumerate(names)}
    config = hf.ChameleonConfig(
        vocab_size=vocabulary(tokenizer),
        **TEXT,
        vq_config={
            "embed_dim": 16, "num_embeddings": num_codes, "latent_channels": 16, "resolution": 16,
            "base_channels": 32, "channel_multiplier": [1, 1, 1], "num_res_blocks": 1,
            "attn_resolutions": [],
        },
        vocabulary_map={"<image>": id_of(tokenizer, "<image>"), **codes},
    )  # fmt: skip
    return hf.ChameleonForConditionalGeneration(config)


def blip2_processor() -> Any:
    tokenizer = hf_processors.tokenizer_with()
    image_processor = hf.BlipImageProcessorPil(size={"height": 28, "width": 28})
    return hf.Blip2Processor(image_processor, tokenizer, num_query_tokens=4)


def blip2(tokenizer: Any) -> Any:
    config = hf.Blip2Config(
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
        qformer_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "encoder_hidden_size": 32, "vocab_size": 32,
        },
        text_config={
            "model_type": "opt", "vocab_size": vocabulary(tokenizer), "hidden_size": 48,
            "word_embed_proj_dim": 48, "ffn_dim": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 1024, "bos_token_id": 1,
            "eos_token_id": 2, "pad_token_id": 0,
        },
        num_query_tokens=4,
        image_token_index=id_of(tokenizer, "<image>"),
    )  # fmt: skip
    return hf.Blip2ForConditionalGeneration(config)


def pixtral_processor(merge: int) -> Any:
    tokenizer = hf_processors.tokenizer_with("[IMG_BREAK]", "[IMG_END]", image_token="[IMG]")
    image_processor = hf.PixtralImageProcessorPil(
        size={"longest_edge": 80}, patch_size={"height": 8, "width": 8}
    )
    return PixtralProcessor(image_processor, tokenizer, patch_size=8, spatial_merge_size=merge)


PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 96, "patch_size": 8, "head_dim": 16,
}  # fmt: skip


def llava_pixtral(tokenizer: Any) -> Any:
    config = hf.LlavaConfig(
        vision_config=PIXTRAL,
        text_config=llama(tokenizer),
        image_token_index=id_of(tokenizer, "[IMG]"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    return hf.LlavaForConditionalGeneration(config)


def mistral3(tokenizer: Any) -> Any:
    config = hf.Mistral3Config(
        vision_config=PIXTRAL,
        text_config={
            **TEXT, "model_type": "mistral", "vocab_size": vocabulary(tokenizer),
            "sliding_window": None, "head_dim": 12,
        },
        image_token_index=id_of(tokenizer, "[IMG]"),
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )  # fmt: skip
    return hf.Mistral3ForConditionalGeneration(config)


FAMILIES: Mapping[str, Family] = {
    "llava-next": Family(
        processor=hf_processors.llava_next, model=llava_next, place="<image>"
    ),
    "aria": Family(
        processor=aria_processor, model=aria, place="<|img|>",
        sizes=((80, 60), (60, 120), (90, 90)), dtype=torch.float32,
        lacking="its experts read the router's counts on the host",
    ),
    "blip2": Family(
        processor=blip2_processor, model=blip2, place="",
        texts=("*tell me what it is", "*tell me what it is", "*a", "*USER: why? ASSISTANT:", "*no"),
    ),
    "chameleon": Family(processor=chameleon_processor, model=chameleon, place="<image>"),
    "deepseek-vl": Family(
        processor=deepseek_vl_processor, model=deepseek_vl, place="<image_placeholder>"
    ),
    "glm4v": Family(
        processor=glm4v_processor, model=glm4v,
        place="<|begin_of_image|><|image|><|end_of_image|>",
        sizes=((60, 60), (56, 112), (120, 60)),
    ),
    "llava-onevision": Family(
        processor=llava_onevision_processor, video_place="<video>", model=llava_onevision,
        place="<image>", num_frames=(4, 4),
    ),
    "idefics3": Family(
        processor=hf_processors.idefics3, model=idefics3, place="<image>",
        lacking="its image processor cannot do without torchvision",
    ),
    "internvl": Family(
        processor=internvl_processor, video_place="<video>", model=internvl,
        place="<IMG_CONTEXT>", num_frames=(4, 4),
    ),
    "gemma3": Family(
        processor=gemma3_processor, model=gemma3, place="<start_of_image>", least_budget=4
    ),
    "llava-pixtral": Family(
        processor=lambda: pixtral_processor(1), model=llava_pixtral, place="[IMG]",
        sizes=((64, 48), (48, 96), (80, 80)),
    ),
    "mistral3": Family(
        processor=lambda: pixtral_processor(2), model=mistral3, place="[IMG]",
        sizes=((64, 48), (48, 96), (80, 80)),
    ),
    "paligemma": Family(
        processor=hf_processors.paligemma, model=paligemma, place="<image>", least_budget=64,
        texts=("*caption en", "*caption en", "*", "**compare them", "**same?", "*what is it?"),
    ),
    "qwen2-vl": Family(
        processor=hf_processors.qwen2_vl, video_place=QWEN_VIDEO, model=qwen2_vl,
        place="<|vision_start|><|image_pad|><|vision_end|>",
        sizes=((60, 60), (56, 112), (120, 60)),
    ),
    "qwen2.5-vl": Family(
        processor=hf_processors.qwen2_vl, video_place=QWEN_VIDEO, model=qwen2_5_vl,
        place="<|vision_start|><|image_pad|><|vision_end|>",
        sizes=((60, 60), (56, 112), (120, 60)),
    ),
    "qwen3-vl": Family(
        processor=qwen3_vl_processor, video_place=QWEN_VIDEO, model=qwen3_vl,
        place="<|vision_start|><|image_pad|><|vision_end|>",
        sizes=((60, 60), (64, 128), (120, 60)),
    ),
}  # fmt: skip


def save_text(
    build: Callable[[Mapping[str, Any]], Any], folder: Path, texts: Sequence[str]
) -> list[tuple[int, ...]]:
    """A text model's folder, its weights to be drawn; returns the tokens that it generates."""
    tokenizer = make_tokenizer("bytes")
    with torch.random.fork_rng(devices=[]):
        model = build({**TEXT, "vocab_size": vocabulary(tokenizer)})
    draw_weights(model)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    # PyTorch's grouped matmul of experts has no float64.
    has_experts = any("experts" in name for name, _ in model.named_modules())
    model = model.to(torch.float32 if has_experts else torch.float64).eval().requires_grad_(False)
    model.config.architectures = [type(model).__name__]
    found = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt")
        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        with torch.inference_mode():
            output = model.generate(**given, do_sample=False, max_new_tokens=MAX_TOKENS)
        found.append(tuple(output[0, given["input_ids"].shape[1] :].tolist()))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return found


def save(family: Family, folder: Path) -> Any:
    """The family's folder, as a user would have it; returns the HF model."""
    if family.lacking:
        skip_up_to(5, 17, family.lacking)
    processor = family.processor()
    with torch.random.fork_rng(devices=[]):
        model = family.model(processor.tokenizer)
    draw_weights(model)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model = model.to(family.dtype).eval().requires_grad_(False)
    save_folder(model, processor, folder)
    return model


def save_folder(model: Any, processor: Any, folder: Path) -> None:
    """Write the folder as a user would have it."""
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    tokenizer = getattr(processor, "tokenizer", processor)
    tokenizer.save_pretrained(folder)
    if tokenizer is processor:
        return
    saved: dict[str, Any] = {}  # one file is of both
    for name in ("feature_extractor", "image_processor"):
        part = getattr(processor, name, None)
        saved |= json.loads(part.to_json_string()) if part is not None else {}
    (folder / "preprocessor_config.json").write_text(json.dumps(saved))
    frames = getattr(processor, "video_processor", None)
    if frames is not None:
        (folder / "video_preprocessor_config.json").write_text(frames.to_json_string())
    settings = {
        name: value
        for name, value in processor.to_dict().items()
        if isinstance(value, str | int | bool | float | dict)
        and name not in ("image_processor", "video_processor", "feature_extractor")
    }
    settings["processor_class"] = next(
        each.__name__
        for each in type(processor).__mro__
        if each.__module__.startswith(("transformers.", "aioengine."))
    )
    (folder / "processor_config.json").write_text(json.dumps(settings))


def hf_processor(folder: Path) -> Any:
    """The HF processor of a saved folder, as an engine loads it."""
    config = read_config(folder, revision=None, trust_remote_code=False)
    info = MULTIMODAL_REGISTRY.find_info(choose(config).model_class)
    return info(load_context(folder, hf_config=config, info=info)).get_hf_processor()


@dataclass(frozen=True)
class Case:
    """A prompt, its images, and what transformers makes of them.

    `expected`: its greedy tokens, as far as none was a close call in a narrow type.
    """

    text: str
    images: tuple[Image.Image, ...]
    expected: tuple[int, ...]
    videos: tuple[Any, ...] = ()

    def check(self, token_ids: Sequence[int]) -> None:
        """Assert that these are the tokens that transformers has found."""
        assert len(token_ids) == MAX_TOKENS or 2 in token_ids
        assert tuple(token_ids[: len(self.expected)]) == self.expected, self.text


def cases(family: Family, model: Any, processor: Any) -> tuple[Case, ...]:
    """Prompts with one, two and no images."""
    a, b, c = (tiny_image(i).resize(size) for i, size in enumerate(family.sizes))
    pil_images = {0: iter([()]), 1: iter([(a,), (b,), (c,), (a,), (b,)]), 2: iter([(a, b), (c, c)])}
    found = []
    for text in family.texts:
        images = next(pil_images[text.count("*")])
        text = text.replace("*", family.place)
        found.append(Case(text, images, _expect(model, processor, text, images)))
    return tuple(found)


def video_cases(family: Family, model: Any, processor: Any) -> tuple[Case, ...]:
    """Prompts with a video, with two, and with an image beside one."""
    video, place = family.video_place, family.place
    generator = np.random.default_rng(0)
    films = [
        generator.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
        for count, (width, height) in zip(family.num_frames, family.sizes, strict=False)
    ]
    image = tiny_image(7).resize(family.sizes[0])
    prompts: Sequence[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = (
        (f"USER: {video}\nWhat happens? ASSISTANT:", (), (films[0],)),
        (f"USER: {video}\nWhat happens? ASSISTANT:", (), (films[1],)),
        (f"First {video} then {video} compare", (), (films[1], films[0])),
        (f"Is {place} in {video} ?", (image,), (films[1],)),
    )
    return tuple(
        Case(text, images, _expect(model, processor, text, images, videos), videos)
        for text, images, videos in prompts
    )


def _expect(
    model: Any, processor: Any, text: str, images: Sequence[Any], videos: Sequence[Any] = ()
) -> tuple[int, ...]:
    given: dict[str, Any] = {"images": list(images)} if images else {}
    if videos:
        metadata = [
            hf.video_utils.VideoMetadata(
                total_num_frames=len(each), frames_indices=list(range(len(each)))
            )
            for each in videos
        ]
        given |= {"videos": list(videos), "video_metadata": metadata, "do_sample_frames": False}
    inputs = processor(text=text, **given, return_tensors="pt")
    return greedy(model, inputs)


@torch.inference_mode()
def greedy(model: Any, inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """The greedy tokens of transformers; in a narrow type, up to the first close call."""
    dtype = model.dtype
    given = {
        name: each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point()
        else each
        for name, each in inputs.items()
    }  # fmt: skip
    output = model.generate(
        **given,
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        output_scores=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[0, -len(output.scores) :].tolist()
    margins = [float(scores[0].topk(2).values.diff().abs()) for scores in output.scores]
    close = (i for i, margin in enumerate(margins) if margin < CLOSE_CALL)
    return tuple(tokens if dtype == torch.float64 else tokens[: next(close, MAX_TOKENS)])
