"""Writes the models of the family benchmark: random weights of 0.2 to 0.5 billion parameters.

    python benchmarks/family_models.py FAMILY FOLDER [--speech-model FOLDER]

Each has the layers and widths of a small real checkpoint of its family, with a vocabulary of 8000
and fewer layers where the original is larger. The tokenizer, the chat template and the processors'
settings are written beside the weights, so that every contender loads the folder. Whisper takes its
tokenizer from the folder of a real one. Seeded, bfloat16.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from make_model import SPECIAL, make_model, make_tokenizer

SIGLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
COMMON: dict[str, Any] = {
    "vocab_size": 8000,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
LINE_ENDS = tuple("\n" * count for count in range(1, 6))
"""Tokens that Gemma's processor in vLLM looks for."""
QWEN_MARKS = ("<|vision_start|>", "<|vision_end|>")
QWEN_NAMED = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": QWEN_MARKS[0],
    "vision_eos_token": QWEN_MARKS[1],
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family: `place` stands for an image in a prompt, `model` is made from the tokens' ids.

    `named` and `marks` are the tokenizer's special tokens, with and without a name; `settings` are
    those of the image processor, the video processor and the processor around them.
    """

    place: str
    model: Callable[[Callable[[str], int]], Any] | None = None
    named: Mapping[str, str] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    processor: str = ""
    images: Mapping[str, Any] = field(default_factory=dict)
    videos: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def qwen_ids(id_of: Callable[[str], int]) -> dict[str, int]:
    """Ids of the tokens that the configurations of Qwen-VL name."""
    return {
        "image_token_id": id_of("<|image_pad|>"),
        "video_token_id": id_of("<|video_pad|>"),
        "vision_start_token_id": id_of(QWEN_MARKS[0]),
        "vision_end_token_id": id_of(QWEN_MARKS[1]),
    }


def qwen_text(**more: Any) -> dict[str, Any]:
    """A decoder of Qwen2-VL, of the shape of Qwen2-0.5B."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    return {**COMMON, **QWEN, "rope_parameters": rope, "tie_word_embeddings": True, **more}


def qwen2_vl(id_of: Callable[[str], int]) -> Any:
    """A Qwen2-VL of 0.46 billion parameters."""
    vision = {"depth": 12, "embed_dim": 768, "hidden_size": 896, "num_heads": 12}
    return hf.Qwen2VLForConditionalGeneration(
        hf.Qwen2VLConfig(
            vision_config=vision,
            text_config=qwen_text(),
            tie_word_embeddings=True,
            **qwen_ids(id_of),
        )
    )


def qwen2_5_vl(id_of: Callable[[str], int]) -> Any:
    """A Qwen2.5-VL of 0.46 billion parameters, a third of its tower's layers without windows."""
    vision = {
        "depth": 12, "hidden_size": 768, "intermediate_size": 2048, "num_heads": 12,
        "out_hidden_size": 896, "fullatt_block_indexes": [2, 5, 8, 11], "window_size": 112,
    }  # fmt: skip
    return hf.Qwen2_5_VLForConditionalGeneration(
        hf.Qwen2_5_VLConfig(
            vision_config=vision,
            text_config=qwen_text(),
            tie_word_embeddings=True,
            **qwen_ids(id_of),
        )
    )


def qwen3_vl(id_of: Callable[[str], int]) -> Any:
    """A Qwen3-VL of 0.46 billion parameters, its decoder as wide as Qwen3-0.6B's."""
    vision = {
        "depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12,
        "out_hidden_size": 1024, "deepstack_visual_indexes": [3, 6, 9],
    }  # fmt: skip
    rope = {
        "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    }  # fmt: skip
    text = {
        **COMMON, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 20,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "rope_parameters": rope, "tie_word_embeddings": True,
    }  # fmt: skip
    return hf.Qwen3VLForConditionalGeneration(
        hf.Qwen3VLConfig(
            vision_config=vision, text_config=text, tie_word_embeddings=True, **qwen_ids(id_of)
        )
    )


def gemma3(id_of: Callable[[str], int]) -> Any:
    """A Gemma 3 of 0.37 billion parameters; five of six layers see 512 tokens back."""
    text = {
        **COMMON, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "query_pre_attn_scalar": 256, "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    }  # fmt: skip
    return hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(
            text_config=text,
            vision_config={
                **SIGLIP,
                "image_size": 448,
                "patch_size": 14,
                "vision_use_head": False,
            },
            mm_tokens_per_image=256,
            image_token_id=id_of("<image_soft_token>"),
            boi_token_id=id_of("<start_of_image>"),
            eoi_token_id=id_of("<end_of_image>"),
        )
    )


def smolvlm(id_of: Callable[[str], int]) -> Any:
    """A SmolVLM of 0.2 billion parameters: SmolLM2-135M's decoder behind SigLIP's tower."""
    text = hf.LlamaConfig(
        **COMMON, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3,
    )  # fmt: skip
    return hf.SmolVLMForConditionalGeneration(
        hf.SmolVLMConfig(
            vision_config={**SIGLIP, "image_size": 384, "patch_size": 16},
            text_config=text,
            image_token_id=id_of("<image>"),
            scale_factor=3,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    )


def internvl(id_of: Callable[[str], int]) -> Any:
    """An InternVL of 0.47 billion parameters, with a third of InternViT-300M's layers."""
    vision = {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8,
        "num_attention_heads": 16, "image_size": [448, 448], "patch_size": [14, 14],
    }  # fmt: skip
    return hf.InternVLForConditionalGeneration(
        hf.InternVLConfig(
            vision_config=vision,
            text_config=hf.Qwen2Config(**COMMON, **QWEN),
            image_token_id=id_of("<IMG_CONTEXT>"),
            image_seq_length=256,
            tie_word_embeddings=False,
        )
    )


def qwen_family(model: Callable[..., Any], generation: str, patch: int) -> Family:
    """The tokens and processors that the generations of Qwen-VL share."""
    older = "2" if generation != "3" else "3"
    mean = {} if older == "2" else {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    pixels = {"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28}
    patches = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, **mean}
    name = {"2": "Qwen2VL", "2.5": "Qwen2_5_VL", "3": "Qwen3VL"}[generation]
    return Family(
        place="<|vision_start|><|image_pad|><|vision_end|>",
        model=model,
        named=QWEN_NAMED if older == "2" else QWEN_NAMED | {
            "vision_start_token": QWEN_MARKS[0], "vision_end_token": QWEN_MARKS[1],
        },
        processor=f"{name}Processor",
        images={"image_processor_type": "Qwen2VLImageProcessor", "size": pixels, **patches},
        videos={"video_processor_type": f"Qwen{older}VLVideoProcessor", **patches},
    )  # fmt: skip


FAMILIES: Mapping[str, Family] = {
    "llava": Family(place="<image>"),
    "qwen2-vl": qwen_family(qwen2_vl, "2", 14),
    "qwen2.5-vl": qwen_family(qwen2_5_vl, "2.5", 14),
    "qwen3-vl": qwen_family(qwen3_vl, "3", 16),
    "gemma3": Family(
        place="<start_of_image>",
        model=gemma3,
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        processor="Gemma3Processor",
        images={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 448, "width": 448},
        },
        settings={"image_seq_length": 256},
    ),
    "smolvlm": Family(
        place="<image>",
        model=smolvlm,
        named={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
            "video_token": "<video>",
        },
        marks=tuple(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)),
        processor="SmolVLMProcessor",
        images={
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 768},
            "max_image_size": {"longest_edge": 384},
        },
        videos={
            "video_processor_type": "SmolVLMVideoProcessor",
            "size": {"longest_edge": 384},
            "max_image_size": {"longest_edge": 384},
            "video_sampling": {"fps": 1, "max_frames": 8, "video_size": {"longest_edge": 384}},
        },
        settings={"image_seq_len": 64},
    ),
    "internvl": Family(
        place="<IMG_CONTEXT>",
        model=internvl,
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        processor="InternVLProcessor",
        images={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 448, "width": 448},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
        },
        videos={
            "video_processor_type": "InternVLVideoProcessor",
            "size": {"height": 448, "width": 448},
        },
        settings={"image_seq_length": 256},
    ),
    "whisper": Family(place=""),
}


def template_of(place: str) -> str:
    """A chat template that writes a name before each message and `place` for an image."""
    return (
        "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: "
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}" + place + ""
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}assistant:"
    )


def write_whisper(folder: Path, real: Path) -> None:
    """Write a Whisper of the size of small.en (0.24 billion parameters) with a real tokenizer."""
    skipped = shutil.ignore_patterns("*.safetensors", "config.json")
    shutil.copytree(real, folder, ignore=skipped, dirs_exist_ok=True)
    config = hf.WhisperConfig.from_pretrained(real)
    config.update({
        "d_model": 768, "encoder_layers": 12, "decoder_layers": 12,
        "encoder_attention_heads": 12, "decoder_attention_heads": 12,
        "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "num_hidden_layers": 12,
    })  # fmt: skip
    model = hf.WhisperForConditionalGeneration(config).to(torch.bfloat16)
    model.generation_config = hf.GenerationConfig.from_pretrained(real)
    model.save_pretrained(folder)


def draw_zeros(model: torch.nn.Module) -> None:
    """Draw the matrices that transformers begins with zeros.

    Through Gemma 3's projection all images would be the same rows, and who keeps a prefix by its
    embeddings would compute none of them again.
    """
    for weight in model.parameters():
        if weight.dim() > 1 and not weight.any():
            torch.nn.init.normal_(weight, std=0.02)


def write(name: str, folder: Path, speech_model: Path) -> None:
    """Write weights, configuration, tokenizer and processor settings of a family to `folder`."""
    family = FAMILIES[name]
    if name == "llava":
        make_model(folder)
        return
    torch.manual_seed(0)
    if family.model is None:
        write_whisper(folder, speech_model)
        return
    more = dict.fromkeys([*SPECIAL, *family.named.values(), *family.marks, *LINE_ENDS])
    tokenizer = make_tokenizer(tuple(more), dict(family.named), template_of(family.place))
    model = family.model(tokenizer.convert_tokens_to_ids).to(torch.bfloat16)
    draw_zeros(model)
    model.generation_config.update(eos_token_id=2, pad_token_id=0, bos_token_id=1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    files: dict[str, Mapping[str, Any]] = {
        "preprocessor_config.json": {**family.images, "processor_class": family.processor},
        "processor_config.json": {**family.settings, "processor_class": family.processor},
    }
    if family.videos:
        files["video_preprocessor_config.json"] = family.videos
    for file, settings in files.items():
        (folder / file).write_text(json.dumps(settings, indent=2) + "\n")
    count = sum(weight.numel() for weight in model.parameters())
    print(f"{name}: {count / 1e9:.2f} billion parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("family", choices=list(FAMILIES))
    parser.add_argument("folder", type=Path)
    default = Path(__file__).parents[1] / ".cache" / "real" / "whisper-tiny.en"
    parser.add_argument("--speech-model", type=Path, default=default)
    args = parser.parse_args()
    write(args.family, args.folder, args.speech_model)


if __name__ == "__main__":
    main()
