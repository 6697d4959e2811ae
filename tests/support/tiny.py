"""Tiny models with random weights, whole on disk or in memory, for tests of any floor.

Weights are drawn wide: at the usual standard deviation of 0.02 a random model repeats one token
whatever it sees, and comparing tokens would prove nothing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

PAD, BOS, EOS, IMAGE = 0, 1, 2, 3
VOCAB_SIZE = 320
IMAGE_SIZE = 32
PATCH_SIZE = 8
NUM_IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
"""Encoder rows of one image, whichever tower."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'].upper() }}: "
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ '<image>\n' }}{% endif %}"
    "{% endfor %}"
    "{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% endif %}"
    "{{ ' ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
_CORPUS = (
    "What is in the picture? There is a red circle above a blue square.",
    "Describe the image in one sentence, please. USER: ASSISTANT:",
    "The quick brown fox jumps over the lazy dog; how many colours are there?",
)


def draw_weights(model: torch.nn.Module, *, seed: int = 0, std: float = 0.15) -> None:
    """Overwrite all parameters: the same values in any dtype, up to its rounding."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std
            is_norm_scale = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(noise + 1 if is_norm_scale else noise)


def text_config(**changes: Any) -> LlamaConfig:
    """A two-layer Llama, 48 wide, with grouped heads."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**settings, **changes})


def llava_config(*, tower: str = "clip", **text_changes: Any) -> LlavaConfig:
    """LLaVA over a CLIP tower (its class row dropped) or a SigLIP tower (all rows kept)."""
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
    }
    is_clip = tower == "clip"
    config = LlavaConfig(
        vision_config=(CLIPVisionConfig if is_clip else SiglipVisionConfig)(**settings),
        text_config=text_config(**text_changes),
        image_token_index=IMAGE,
        image_seq_length=NUM_IMAGE_TOKENS,
        vision_feature_layer=-2 if is_clip else -1,
        vision_feature_select_strategy="default" if is_clip else "full",
        tie_word_embeddings=False,
    )
    config.architectures = ["LlavaForConditionalGeneration"]
    return config


def tiny_llava(
    dtype: torch.dtype = torch.float64,
    *,
    tower: str = "clip",
    seed: int = 0,
    std: float = 0.15,
    **text_changes: Any,
) -> Any:
    """A LlavaForConditionalGeneration in eval mode; `text_changes` go to its LlamaConfig."""
    with torch.random.fork_rng(devices=[]):
        model = LlavaForConditionalGeneration(llava_config(tower=tower, **text_changes))
    return _finish(model, dtype, seed, std)


def tiny_llama(
    dtype: torch.dtype = torch.float64, *, seed: int = 0, std: float = 0.15, **changes: Any
) -> Any:
    """A LlamaForCausalLM in eval mode."""
    config = text_config(**changes)
    config.architectures = ["LlamaForCausalLM"]
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    return _finish(model, dtype, seed, std)


def _finish(model: Any, dtype: torch.dtype, seed: int, std: float) -> Any:
    draw_weights(model, seed=seed, std=std)
    # A model's own sampling defaults would warn when a test asks for greedy tokens.
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = PAD
    return model.to(dtype).eval().requires_grad_(False)


@cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<s>", "</s>", "<image>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    text: str = tokenizer.to_str()
    return text


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `VOCAB_SIZE` tokens that puts `<s>` first."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json()),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={"image_token": "<image>"},
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def tiny_processor(*, tower: str = "clip") -> LlavaProcessor:
    """A LlavaProcessor with a Pillow image processor that fits `tiny_llava(tower=tower)`."""
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    if tower == "clip":
        images = CLIPImageProcessorPil(size={"shortest_edge": IMAGE_SIZE}, crop_size=size)
    else:
        images = SiglipImageProcessorPil(size=size)
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tiny_tokenizer(),
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default" if tower == "clip" else "full",
        num_additional_image_tokens=1 if tower == "clip" else 0,
        chat_template=CHAT_TEMPLATE,
    )


def save_tiny_llava(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    *,
    tower: str = "clip",
    seed: int = 0,
    **text_changes: Any,
) -> Any:
    """Write model, tokenizer, processor and chat template to `folder`; returns the model."""
    model = tiny_llava(dtype, tower=tower, seed=seed, **text_changes)
    model.save_pretrained(folder)
    tiny_processor(tower=tower).save_pretrained(folder)
    return model


def tiny_image(seed: int = 0, width: int = 40, height: int = 36) -> Image.Image:
    """An image that no other seed gives."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def tiny_pixels(num_images: int = 1, *, seed: int = 0) -> torch.Tensor:
    """Processed images, float32 [num_images, 3, IMAGE_SIZE, IMAGE_SIZE]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_images, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
