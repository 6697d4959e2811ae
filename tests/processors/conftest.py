"""A tiny LLaVA's processing side: configuration, tokenizer and HF processor, without weights."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from aioengine.models.llava import Llava
from aioengine.processors.info import ProcessingContext, load_context
from aioengine.processors.registry import MULTIMODAL_REGISTRY

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | upper }}: "
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>\n{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %} {% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
CORPUS = [
    "USER: What is in the picture? ASSISTANT: a cat and a dog, on the red mat.",
    "two pictures, one word; describe the first picture and then the second",
]


def make_tokenizer(style: str) -> Any:
    """ "bytes": byte-level BPE, as GPT-2's; "words": spaces marked at word starts, as Llama's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<pad>", "<image>"]
    if style == "bytes":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace()
        alphabet = [chr(code) for code in range(32, 127)] + ["\n", "▁"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )


def save_llava(
    folder: Path,
    *,
    style: str = "bytes",
    strategy: str = "default",
    tower: str = "clip",
    pads: bool | None = None,
) -> Path:
    """The folder of a LLaVA with images of 28 x 28 pixels in patches of 14.

    `pads`: with LLaVA's own image processor instead of CLIP's, which pads to a square or not.
    """
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaImageProcessorPil,
        LlavaProcessor,
        SiglipImageProcessorPil,
        SiglipVisionConfig,
    )

    tokenizer = make_tokenizer(style)
    sizes = {
        "image_size": 28,
        "patch_size": 14,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
    }
    vision = CLIPVisionConfig(**sizes) if tower == "clip" else SiglipVisionConfig(**sizes)
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(vocab_size=512, hidden_size=32, num_attention_heads=2),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy=strategy,
        architectures=["LlavaForConditionalGeneration"],
    )
    image_processor = (
        CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
        if tower == "clip"
        else SiglipImageProcessorPil(size={"height": 28, "width": 28})
    )
    if pads is not None:
        image_processor = LlavaImageProcessorPil(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, do_pad=pads
        )
    processor = LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=1 if tower == "clip" else 0,
        chat_template=CHAT_TEMPLATE,
    )
    config.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def context_of(folder: Path, **options: Any) -> ProcessingContext:
    """The processing context of a saved folder."""
    from transformers import AutoConfig

    return load_context(folder, hf_config=AutoConfig.from_pretrained(folder), **options)


@pytest.fixture(scope="session", params=["bytes", "words"])
def llava_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA with a CLIP tower, under each kind of tokenizer."""
    return save_llava(tmp_path_factory.mktemp("llava"), style=request.param)


@pytest.fixture(scope="session")
def llava(llava_folder: Path) -> Any:
    """Its processor."""
    return MULTIMODAL_REGISTRY.create_processor(Llava, context_of(llava_folder))


@pytest.fixture(scope="session")
def encode() -> Callable[..., bytes]:
    """Writes an image to bytes in a format."""

    def encode(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, format, **options)
        return buffer.getvalue()

    return encode


@pytest.fixture(scope="session")
def noise() -> Callable[..., Image.Image]:
    """An image of random pixels, the same for the same size, mode and seed."""

    def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
        channels = len(Image.new(mode, (1, 1)).getbands())
        shape = (height, width, channels) if channels > 1 else (height, width)
        pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        return (
            Image.fromarray(pixels)
            if mode in ("L", "RGB", "RGBA")
            else (Image.fromarray(pixels[..., :3] if channels > 1 else pixels).convert(mode))
        )

    return noise
