"""Tiny HF processors of many families, without weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers as hf

from aioengine.processors.generic import (
    GenericDummyInputsBuilder,
    GenericMultiModalProcessor,
    GenericProcessingInfo,
)
from aioengine.processors.info import ProcessingContext
from tests.processors.conftest import make_tokenizer

SQUARE = {"height": 28, "width": 28}
EDGE = {"size": {"shortest_edge": 28}, "crop_size": SQUARE}
PATCHES = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """`make()`: the HF processor. `embed`: the token at which rows stand. `config`: its settings in
    the model's config; `options`: the engine's `mm_processor_kwargs`."""

    make: Callable[[], Any]
    embed: str
    modality: str = "image"
    config: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def tokenizer_with(*more: str, style: str = "bytes", **special: str) -> Any:
    """A tiny tokenizer with special tokens, those in `special` under their names."""
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(style)._tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=special,
    )
    tokenizer.add_tokens([*more, *special.values()], special_tokens=True)
    return tokenizer


def merging_line_ends(tokenizer: Any, how: str) -> Any:
    """The tokenizer with tokens for runs of line ends, learnt or (as some models do) added."""
    if how == "learnt":
        text = ["a\n\nb\n\n\nc\n\n\n\nd .\n\n e" * 9]
        return tokenizer.train_new_from_iterator(text, 420, show_progress=False)
    runs = [hf.AddedToken("\n" * count, normalized=False, special=False) for count in range(1, 6)]
    tokenizer.add_tokens(runs)
    return tokenizer


def without_video(cls: type[Any]) -> type[Any]:
    """The class of an HF processor, made without its video processor, which wants torchvision."""

    class WithoutVideo(cls):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is not None:
                return super().check_argument_for_proper_class(argument_name, argument)
            return None

    return WithoutVideo


def llava(tower: str, style: str = "bytes") -> Any:
    images = (
        hf.CLIPImageProcessorPil(**EDGE)
        if tower == "clip"
        else hf.SiglipImageProcessorPil(size=SQUARE)
    )
    tokenizer = tokenizer_with(style=style, image_token="<image>")
    return hf.LlavaProcessor(images, tokenizer, **PATCHES)


def llava_next() -> Any:
    images = hf.LlavaNextImageProcessorPil(
        **EDGE, image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]]
    )
    return hf.LlavaNextProcessor(images, tokenizer_with(image_token="<image>"), **PATCHES)


def idefics3() -> Any:
    more = [f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5)]
    tokenizer = tokenizer_with(
        *more, "<global-img>", "<fake_token_around_image>", image_token="<image>"
    )
    images = hf.Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    return hf.Idefics3Processor(images, tokenizer, image_seq_len=4)


def chameleon() -> Any:
    tokenizer = tokenizer_with(image_token="<image>", boi_token="<racm3:break>", eoi_token="<eoss>")
    tokenizer.add_special_tokens({"sep_token": "<sep>"})
    return hf.ChameleonProcessor(
        hf.ChameleonImageProcessorPil(**EDGE), tokenizer, image_seq_length=5
    )


def aria() -> Any:
    return hf.AriaProcessor(
        hf.AriaImageProcessorPil(),
        tokenizer_with(image_token="<|img|>"),
        size_conversion={490: 3, 980: 6},
    )


def deepseek_vl() -> Any:
    images = hf.DeepseekVLImageProcessorPil(size=SQUARE)
    tokenizer = tokenizer_with(image_token="<image_placeholder>")
    return hf.DeepseekVLProcessor(images, tokenizer, num_image_tokens=7)


def internvl() -> Any:
    tokenizer = tokenizer_with(
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    images = hf.GotOcr2ImageProcessorPil(size=SQUARE, min_patches=1, max_patches=6)
    return without_video(hf.InternVLProcessor)(images, tokenizer, None, image_seq_length=4)


def qwen2_vl() -> Any:
    tokenizer = tokenizer_with(image_token="<|image_pad|>", video_token="<|video_pad|>")
    images = hf.Qwen2VLImageProcessorPil(
        size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16}
    )
    return without_video(hf.Qwen2VLProcessor)(images, tokenizer, None)


def gemma3(line_ends: str = "learnt") -> Any:
    tokenizer = tokenizer_with(
        image_token="<image_soft_token>",
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
    )
    tokenizer = merging_line_ends(tokenizer, line_ends)
    images = hf.Gemma3ImageProcessorPil(size=SQUARE)
    return hf.Gemma3Processor(images, tokenizer, image_seq_length=4)


def paligemma() -> Any:
    images = hf.SiglipImageProcessorPil(size=SQUARE)
    images.image_seq_length = 4
    return hf.PaliGemmaProcessor(images, tokenizer_with(image_token="<image>"))


def qwen2_audio() -> Any:
    extractor = hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    return hf.Qwen2AudioProcessor(extractor, tokenizer_with(audio_token="<|AUDIO|>"))


def audioflamingo3() -> Any:
    extractor = hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    return hf.AudioFlamingo3Processor(extractor, tokenizer_with(audio_token="<sound>"))


PAN_AND_SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 10,
    "pan_and_scan_max_num_crops": 3,
    "pan_and_scan_min_ratio_to_activate": 1.5,
}
SOFT = {"image_token_id": "<image_soft_token>"}
FAMILIES: Mapping[str, Family] = {
    "llava-clip": Family(make=lambda: llava("clip"), embed="<image>"),
    "llava-siglip-words": Family(make=lambda: llava("siglip", "words"), embed="<image>"),
    "llava-next": Family(make=llava_next, embed="<image>"),
    "idefics3": Family(make=idefics3, embed="<image>"),
    "chameleon": Family(make=chameleon, embed="<image>"),
    "aria": Family(make=aria, embed="<|img|>", options={"images_kwargs": {"max_image_size": 490}}),
    "deepseek-vl": Family(make=deepseek_vl, embed="<image_placeholder>"),
    "internvl": Family(make=internvl, embed="<IMG_CONTEXT>"),
    "qwen2-vl": Family(make=qwen2_vl, embed="<|image_pad|>"),
    "gemma3": Family(make=gemma3, embed="<image_soft_token>", config=SOFT),
    "gemma3-pan-and-scan": Family(
        make=gemma3, embed="<image_soft_token>", config=SOFT, options=PAN_AND_SCAN
    ),
    "paligemma": Family(make=paligemma, embed="<image>"),
    "qwen2-audio": Family(make=qwen2_audio, embed="<|AUDIO|>", modality="audio"),
}


def context_for(
    hf_processor: Any,
    config: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> ProcessingContext:
    """A context with an HF processor that was made here; `config`: names -> tokens of their ids."""
    tokenizer = hf_processor.tokenizer
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in (config or {}).items()}
    return ProcessingContext(
        "a tiny model",
        hf_config=hf.PreTrainedConfig(vocab_size=len(tokenizer), **ids),
        tokenizer_factory=lambda: tokenizer,
        processor_factory=lambda **kwargs: hf_processor,
        mm_processor_kwargs=options,
    )


def processor_for(
    context: ProcessingContext,
    cls: type[GenericMultiModalProcessor] = GenericMultiModalProcessor,
) -> GenericMultiModalProcessor:
    """The generic processor of a context, as the registry makes it."""
    info = GenericProcessingInfo(context)
    return cls(info, GenericDummyInputsBuilder(info))
