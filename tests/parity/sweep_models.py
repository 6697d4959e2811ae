"""Prompts, weights and folders of the sweep's tiny models; what rules do not get right."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import numpy as np
import torch
import transformers as hf

from tests.parity.families import FAMILIES, MAX_TOKENS, Family, greedy, pixtral_processor
from tests.parity.unnamed_sight import UNNAMED as SIGHT
from tests.support.tiny import draw_weights, tiny_image

__all__ = [
    "OPTIONS",
    "OWN_TESTS",
    "RECIPES",
    "Prompt",
    "Unproven",
    "answer",
    "draw",
    "media_of",
    "prompts_of",
]

TEXTS: Mapping[str, Sequence[str]] = {
    "text": ("tell a story", "What is in it? There is", "a", "tell a story about colours"),
    "media": (
        "USER: *\nWhat is it? ASSISTANT:", "USER: *\nWhat is it? ASSISTANT:",
        "USER: *\nWhat is it? ASSISTANT:", "*:", "First * then * now", "no picture, tell a story",
    ),
    "heard": ("*", "*", "*", "*tell a", "*tell a story"),  # of a decoder
}  # fmt: skip
FLOAT32 = ("XGLMForCausalLM",)  # bounds scores by a number that is none of float32
GLM = "<|begin_of_image|><|image|><|end_of_image|>"
QWEN = "<|vision_start|><|image|><|vision_end|>"
SIZES = ((80, 60), (60, 120), (112, 112))

# By architecture. "place": what stands for an item; "tokens": of the tokenizer, by attribute;
# "words": token of each `*_token_id` in the config; "sizes": of images; "images", "processor":
# arguments of their classes; "config": of the config's class.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    # A tile has as many tokens as the processor's patch has pixels.
    "Cohere2VisionForConditionalGeneration": {
        "images": {"size": {"height": 64, "width": 64}, "patch_size": 2, "max_patches": 4},
    },
    # It draws times with a font that is a file of its checkpoints.
    "Ernie4_5_VLMoeForConditionalGeneration": {"videos": {"draw_on_frames": False}},
    "UnlimitedOcrForConditionalGeneration": {
        "images": {"size": {"height": 128, "width": 128}, "tile_size": 64},
        "sizes": ((60, 120), (120, 60), (50, 50)),
        "processor": {"patch_size": 16},
    },
    # Its own settings see nothing, its checkpoints see.
    "Gemma4UnifiedForConditionalGeneration": {
        "config": {"vision_config": {"patch_size": 4, "pooling_kernel_size": 2}},
        "images": {"max_soft_tokens": 70, "pooling_kernel_size": 2},
    },
    "MiniMaxM3SparseForConditionalGeneration": {
        "tokens": {
            "image_token": "]<]image[>[", "video_token": "]<]video[>[",
            "vision_start_token": "]<]start of image[>[", "vision_end_token": "]<]end of image[>[",
        },
    },
    # Of a few tokens that an image becomes, the rule takes one of its markers.
    "MuseGlimmerForConditionalGeneration": {"words": {"image": "<|patch|>"}},
    "MuseSparkForConditionalGeneration": {"words": {"image": "<|image|>"}},
    "PerceptionLMForConditionalGeneration": {
        "config": {
            "projector_pooling_ratio": 2,
            "vision_config": {
                "model_type": "timm_wrapper", "architecture": "vit_pe_core_large_patch14_336",
                "model_args": {
                    "embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": 56,
                    "global_pool": "", "use_post_transformer_norm": False, "init_values": 0.1,
                    "ref_feat_shape": (4, 4),
                },
            },
        },
        "images": {"tile_size": 56, "max_num_tiles": 4},
    },
    "Step3p7ForConditionalGeneration": {
        "images": {
            "size": {"height": 112, "width": 112}, "patch_size": 56, "max_image_size": 224,
        },
        "sizes": ((80, 60), (60, 200), (130, 112)),
    },
    # 144 queries to a tile, whatever it is.
    "DeepseekOcr2ForConditionalGeneration": {
        "images": {"size": {"height": 64, "width": 64}, "tile_size": 64},
        "sizes": ((60, 120), (120, 60), (50, 50)),
        "processor": {"patch_size": 1, "downsample_ratio": 5.5},
    },
    "Dots3NoteForConditionalGeneration": {"images": {"temporal_patch_size": 1}},
    "Emu3ForConditionalGeneration": {"tokens": {"image_token": "<image>"}},
    "HunYuanVLForConditionalGeneration": {
        "place": "<|image_start|><|image|><|image_end|>",
        "tokens": {"image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"},
    },
    "GotOcr2ForConditionalGeneration": {
        "images": {"size": {"height": 128, "width": 128}, "patch_size": 2}
    },
    "Granite4VisionForConditionalGeneration": {"processor": {"downsample_rate": "1/2"}},
    "AyaVisionForConditionalGeneration": {"processor": {"downsample_factor": 2}},
    "IdeficsForVisionText2Text": {"place": "<image>", "tokens": {"image_token": "<image>"}},
    "Idefics2ForConditionalGeneration": {"processor": {"image_seq_len": 4}},
    "Ovis2ForConditionalGeneration": {
        "images": {"crop_to_patches": True, "max_patches": 4},
        "tokens": {"image_start_token": "<IMG_START>", "image_grid_token": "<IMG_GRID>"},
        "words": {
            "visual_indicator_token_ids": [
                "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"
            ]
        }
    },
    "Glm4vForConditionalGeneration": {"place": GLM},
    "Glm46VForConditionalGeneration": {"place": GLM},
    "Glm4vMoeForConditionalGeneration": {
        "place": GLM, "image_processor": "glm4v",
    },
    "Qwen2_5_VLForConditionalGeneration": {"place": QWEN},
    "Qwen2VLForConditionalGeneration": {"place": QWEN},
    "Qwen3VLForConditionalGeneration": {"place": QWEN},
    # Else the layer that merges patches is one of those that are left out.
    "MiniCPMV4_6ForConditionalGeneration": {"config": {"insert_layer_id": 1}},
    "MiniCPMV4_7ForConditionalGeneration": {"config": {"insert_layer_id": 1}},
    "MistralLarge4ForConditionalGeneration": {"make": lambda: pixtral_processor(2)},
    "Mistral4ForCausalLM": {"make": lambda: pixtral_processor(2)},
    "Phi4MultimodalForCausalLM": {
        "images": {"size": {"height": 448, "width": 448}, "patch_size": 14},
        "sizes": ((40, 200), (200, 40), (50, 200)),
    },
    "Pix2StructForConditionalGeneration": {
        "images": {"max_patches": 14, "patch_size": {"height": 16, "width": 16}}
    },
    "Qwen3VLMoeForConditionalGeneration": {"place": QWEN, "image_processor": "qwen2_vl"},
    "GlmOcrForConditionalGeneration": {
        "place": GLM, "model_type": "glm46v", "image_processor": "glm46v",
    },
    "MoonshineStreamingForConditionalGeneration": {"extractor": "moonshine"},
    "SeamlessM4Tv2ForSpeechToText": {"model_type": "seamless_m4t", "extractor": "seamless_m4t"},
    "SpeechEncoderDecoderModel": {"model_type": "wav2vec2", "extractor": "wav2vec2"},
    # Else two layers are too few to have experts.
    "NllbMoeForConditionalGeneration": {
        "config": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    },
}  # fmt: skip

RECIPES: Mapping[str, Family] = {
    "AriaForConditionalGeneration": FAMILIES["aria"],
    "Blip2ForConditionalGeneration": FAMILIES["blip2"],
    "ChameleonForConditionalGeneration": FAMILIES["chameleon"],
    "Gemma3ForConditionalGeneration": FAMILIES["gemma3"],
    "LlavaOnevisionForConditionalGeneration": FAMILIES["llava-onevision"],
    "Mistral3ForConditionalGeneration": FAMILIES["mistral3"],
    "PaliGemmaForConditionalGeneration": FAMILIES["paligemma"],
    "PPFormulaNetForConditionalGeneration": SIGHT["pp-formula"],
    "VisionEncoderDecoderModel": SIGHT["donut"],
}
"""Tiny models of other tests, where rules make none."""
OWN_TESTS: Mapping[str, str] = {
    "AudioFlamingo3ForConditionalGeneration": "test_unnamed_audio",
    "BambaForCausalLM": "test_state_families",
    "BartForConditionalGeneration": "test_encdec",
    "BlenderbotForConditionalGeneration": "test_unnamed_encdec",
    "FalconH1ForCausalLM": "test_state_families",
    "Florence2ForConditionalGeneration": "test_florence2",
    "FuyuForCausalLM": "test_fuyu",
    "Gemma3nForCausalLM": "test_gemma_n4",
    "Gemma3nForConditionalGeneration": "test_gemma_n4",
    "Gemma4ForCausalLM": "test_gemma_n4",
    "Gemma4ForConditionalGeneration": "test_gemma_n4",
    "GlmAsrForConditionalGeneration": "test_unnamed_audio",
    "GraniteMoeHybridForCausalLM": "test_state_families",
    "InstructBlipForConditionalGeneration": "test_instructblip",
    "JambaForCausalLM": "test_state_families",
    "Lfm2MoeForCausalLM": "test_state_families",
    "MBartForConditionalGeneration": "test_encdec",
    "Molmo2ForConditionalGeneration": "test_molmo2",
    "MoonshineForConditionalGeneration": "test_listeners",
    "NemotronHForCausalLM": "test_state_families",
    "Qwen2AudioForConditionalGeneration": "test_audio_families",
    "Qwen2_5OmniForConditionalGeneration": "test_omni",
    "Qwen2_5OmniThinkerForConditionalGeneration": "test_omni",
    "Qwen3OmniMoeForConditionalGeneration": "test_omni",
    "Qwen3OmniMoeThinkerForConditionalGeneration": "test_omni",
    "SeamlessM4TForTextToText": "test_unnamed_encdec",
    "SmolVLMForConditionalGeneration": "test_smolvlm",
    "T5ForConditionalGeneration": "test_encdec",
    "VoxtralForConditionalGeneration": "test_audio_families",
    "VoxtralRealtimeForConditionalGeneration": "test_voxtral_realtime",
    "WhisperForConditionalGeneration": "test_listeners",
}
"""Architectures that the sweep leaves to a test of their own."""


RATE = 16000


class Unproven(Exception):
    """Equal tokens would say nothing."""


@dataclass(frozen=True)
class Prompt:
    """A text, what stands in it, and transformers' tokens."""

    text: str
    media: Mapping[str, Any] = field(default_factory=dict)
    expected: tuple[int, ...] = ()


def media_of(model_class: Any, config: Any, processor_class: Any) -> str:
    """The kind of medium that a model is tried with."""
    taken = inspect.signature(model_class.forward).parameters
    is_media = [
        name.startswith(("pixel_", "input_f", "input_v", "audio", "image")) for name in taken
    ]
    if model_class.__name__.endswith("ForCausalLM") and not any(is_media):
        return "text"  # it may be the decoder of something that takes more
    takes_images = any(getattr(config, name, None) for name in ("vision_config", "vq_config"))
    if processor_class is None:
        if takes_images or getattr(config, "audio_config", None):
            raise LookupError(f"transformers names no processor for {config.model_type}")
        return "text"
    if takes_images:
        return "image"
    if getattr(config, "audio_config", None) or getattr(config, "encoder_config", None):
        return "audio"
    source = processor_class.__init__.__code__.co_varnames
    return "image" if "image_processor" in source else "audio"


def draw(model: Any, spread: float) -> None:
    """Weights anew, in the widest dtype that runs: experts' grouped matmul has no float64."""
    draw_weights(model, std=spread)
    settings = model.generation_config
    settings.eos_token_id, settings.pad_token_id, settings.forced_eos_token_id = 2, 0, None
    is_narrow = any("experts" in name for name, _ in model.named_modules())
    is_narrow |= type(model).__name__ in FLOAT32
    # PyTorch would make complex numbers real.
    tables = [
        (module._buffers, name, table)
        for module in model.modules()
        for name, table in module._buffers.items()
        if table is not None and table.is_complex()
    ]
    model.to(torch.float32 if is_narrow else torch.float64).eval().requires_grad_(False)
    for buffers, name, table in tables:
        buffers[name] = table


def prompts_of(processor: Any, architecture: str, medium: str, *, heard: bool) -> list[Prompt]:
    """Texts with their media. `heard`: the texts are a decoder's, beside the media."""
    if medium == "text":
        return [Prompt(text) for text in TEXTS["text"]]
    family, options = RECIPES.get(architecture), OPTIONS.get(architecture, {})
    usual = options.get("sizes", SIZES), TEXTS["heard" if heard else "media"]
    sizes, texts = (family.sizes, family.texts) if family else usual
    named = (options.get("place"), family and family.place)
    found_in = (getattr(processor, f"{medium}_{n}", None) for n in ("placeholder_token", "token"))
    place = next((each for each in (*named, *found_in) if each is not None), "")
    if medium == "image":
        items: list[Any] = [tiny_image(i).resize(size) for i, size in enumerate(sizes)]
    else:
        generator = np.random.default_rng(0)
        clips = [generator.standard_normal(n).astype(np.float32) for n in (16000, 12000, 9000)]
        items = [(each, RATE) for each in clips]
    name = {"image": "images", "audio": "audios"}[medium]
    first = cycle(items)
    found = []
    for text in texts:
        chosen = tuple(next(first) for _ in range(text.count("*")))
        media = {name: chosen} if chosen else {}
        found.append(Prompt(text.replace("*", place), media))
    return found


def answer(
    model: Any, processor: Any, prompts: Sequence[Prompt], architecture: str
) -> list[Prompt]:
    """The prompts that transformers answers, with its greedy tokens. Raises where that are few."""
    found, errors = [], []
    for prompt in prompts:
        try:
            found.append(replace(prompt, expected=_generate(model, processor, prompt)))
        except Exception as error:  # one that takes one image in a prompt, or none without
            errors.append(error)
    if len(found) < 3:
        raise errors[0]
    return found


def _continue(model: Any, ids: torch.Tensor) -> tuple[int, ...]:
    """Greedy tokens by the model's own forward over all before each.

    `generate` counts positions from 0, the forward of RoBERTa and its like from behind padding's.
    """
    assert model.dtype == torch.float64
    start = ids.shape[1]
    while ids.shape[1] < start + MAX_TOKENS and int(ids[0, -1]) != model.config.eos_token_id:
        logits = model(ids, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return tuple(ids[0, start:].tolist())


def _is_encdec(model: Any) -> bool:
    return bool(model.config.is_encoder_decoder)


def _write(model: Any, processor: Any, prompt: Prompt) -> tuple[int, ...]:
    """Transformers' tokens where the prompt is the decoder's and an image all that is read."""
    tokenizer = getattr(processor, "tokenizer", processor)
    (image,) = prompt.media["images"]
    features = processor.image_processor([image], return_tensors="pt")
    start = tokenizer(prompt.text, add_special_tokens=False, return_tensors="pt").input_ids
    given = {name: torch.as_tensor(value) for name, value in features.items()}
    return greedy(model, {**given, "decoder_input_ids": start if prompt.text else None})


@torch.inference_mode()
def _generate(model: Any, processor: Any, prompt: Prompt) -> tuple[int, ...]:
    if model.config.is_encoder_decoder and "audios" in prompt.media:
        return _transcribe(model, processor, prompt)
    media: dict[str, Any] = {name: list(values) for name, values in prompt.media.items()}
    if "audios" in media:
        media["audio"] = [samples for samples, _ in media.pop("audios")]
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters and media:
        media["return_mm_token_type_ids"] = True
    if model.main_input_name in ("pixel_values", "flattened_patches") and _is_encdec(model):
        return _write(model, processor, prompt)
    if type(processor).__name__.startswith("IdeficsProcessor"):
        inputs = processor(text=[in_turns(prompt)], return_tensors="pt")
    else:
        inputs = processor(text=prompt.text, **media, return_tensors="pt")
    names = [*inputs] if hasattr(processor, "tokenizer") else ["input_ids", "attention_mask"]
    given = {name: inputs[name] for name in names}
    counts = any(hasattr(each, "create_position_ids_from_input_ids") for each in model.modules())
    counts &= not model.config.is_encoder_decoder
    return _continue(model, given["input_ids"]) if counts else greedy(model, given)


def in_turns(prompt: Prompt) -> list[Any]:
    """A text and the images in it, one after the other."""
    first, *others = prompt.text.split("<image>")
    images = iter(prompt.media.get("images", ()))
    found = [first, *(each for text in others for each in (next(images), text))]
    return [each for each in found if not isinstance(each, str) or each]


def _transcribe(model: Any, processor: Any, prompt: Prompt) -> tuple[int, ...]:
    """With the text as what the decoder begins with."""
    ((samples, rate),) = prompt.media["audios"]
    heard = {"audio": samples, "sampling_rate": rate, "return_tensors": "pt"}
    try:
        inputs = processor(**heard)
    except TypeError:  # it wants to know the language, too
        inputs = hf.ProcessorMixin.__call__(processor, **heard)
    names = inspect.signature(model.forward).parameters
    given = {name: each for name, each in inputs.items() if name in names}
    start = model.generation_config.decoder_start_token_id
    ids = [start, *processor.tokenizer.encode(prompt.text, add_special_tokens=False)]
    return greedy(model, {**given, "decoder_input_ids": torch.tensor([ids])})
