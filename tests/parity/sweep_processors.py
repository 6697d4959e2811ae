"""HF processors of any architecture, made by rule for a tiny model, without files.

The tokenizer has every special token that the processor's source names; an image processor is what
transformers takes here, with small sizes: the Pillow variant where torchvision is missing.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import transformers as hf
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES
from transformers.utils import is_torchvision_available

from aioengine.models.runtime.encoding import parts_of, place
from tests.processors.hf_processors import tokenizer_with, without_video
from tests.support.tiny import tiny_image

__all__ = ["NeedsTorchvision", "build_processor", "fit_counts", "ids_of", "processor_class_of"]

_WORD = re.compile(r"""["'](<[^<>"'\s{}]{1,40}>|\[[A-Z_]{2,20}\])["']""")
_NAMED = re.compile(r"""tokenizer(?:\.|,\s*["'])(\w+_token)\b""")
_USUAL = {"bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token"}
_PIXELS = 4096
SIDE = 4
"""Patches along an image."""


class NeedsTorchvision(LookupError):
    """What processes the media cannot be made here."""


def processor_class_of(model_type: str) -> Any:
    """The class of the model type's processor; None where it has none."""
    name = PROCESSOR_MAPPING_NAMES.get(model_type)
    return getattr(hf, name, None) if name else None


def tokenizer_for(processor_class: Any, more: Mapping[str, str]) -> Any:
    """A tokenizer with what the processor's module names; `more`: attribute -> token."""
    source = inspect.getsource(sys.modules[processor_class.__module__])
    words = dict.fromkeys(_WORD.findall(source))
    names = [each for each in dict.fromkeys(_NAMED.findall(source)) if each not in _USUAL]
    special = {each: f"<|{each.removesuffix('_token')}|>" for each in names}
    special |= more
    return tokenizer_with(*(w for w in words if w not in special.values()), **special)


def image_processor_for(model_type: str, patch: int, options: Mapping[str, Any]) -> Any:
    """One with small images. Raises NeedsTorchvision where there is none."""
    entry = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type)
    backend = "torchvision" if is_torchvision_available() else "pil"
    name = entry.get(backend, entry.get("pil")) if isinstance(entry, Mapping) else entry
    if not name or not hasattr(hf, name):
        raise NeedsTorchvision(f"no image processor without torchvision for {model_type}")
    return small(getattr(hf, name), patch, options)


def small(made: Any, patch: int, options: Mapping[str, Any]) -> Any:
    """An image or video processor of the class, with small sizes."""
    usual = made()
    merge = getattr(usual, "merge_size", getattr(usual, "spatial_merge_size", 1)) or 1
    unit, side = patch * merge, patch * SIDE
    found: dict[str, Any] = {}
    if isinstance(getattr(usual, "patch_size", None), int):
        found["patch_size"] = patch
    for field in ("size", "crop_size", "max_image_size", "high_res_size"):
        old = getattr(usual, field, None)
        if isinstance(old, int):
            found[field] = side
        elif old:
            edges = {n: v for n, v in dict(old).items() if v}
            counts = max(edges.values()) > _PIXELS
            limits = {"shortest_edge": unit * unit * 2, "longest_edge": unit * unit * 16}
            found[field] = limits if counts else dict.fromkeys(edges, side)
    if getattr(usual, "min_pixels", None) and getattr(usual, "max_pixels", None):
        found |= {"min_pixels": unit * unit * 2, "max_pixels": unit * unit * 16}
        found.pop("size", None)
    if getattr(usual, "image_grid_pinpoints", None):
        found["image_grid_pinpoints"] = [[side, 2 * side], [2 * side, side], [2 * side, 2 * side]]
    return made(**{**found, **options})


def build_processor(
    processor_class: Any, config: Any, patch: int, options: Mapping[str, Any]
) -> Any:
    """The processor. `options`: "tokens", "images", and what its class takes by name."""
    tokenizer = tokenizer_for(processor_class, options.get("tokens", {}))
    parts: dict[str, Any] = {"tokenizer": tokenizer}
    known = inspect.signature(processor_class.__init__).parameters
    if "image_processor" in known:
        kind = options.get("image_processor", config.model_type)
        parts["image_processor"] = image_processor_for(kind, patch, options.get("images", {}))
    for name in ("feature_extractor", "audio_processor"):
        if name in known:
            listening = (getattr(config, f"{part}_config", None) for part in ("audio", "encoder"))
            mels = next((each.num_mel_bins for each in listening if _has_mels(each)), None)
            parts[name] = feature_extractor_for(options.get("extractor", config.model_type), mels)
    if "video_processor" in known:
        parts["video_processor"] = video_processor_for(config.model_type, patch, options)
        if (
            len(parts) == 2 and parts["video_processor"] is None
        ):  # the tokenizer's companion, and no other medium's
            kind = config.model_type
            raise NeedsTorchvision(f"no video processor without torchvision for {kind}")
    parts |= {
        name: size
        for name, size in (("patch_size", patch), ("img_size", SIDE * patch))
        if name in known
    }
    parts |= {name: tokenizer for name in known if name.endswith("_tokenizer")}
    try:
        made = processor_class if is_torchvision_available() else without_video(processor_class)
        return made(**{**parts, **options.get("processor", {})})
    except AttributeError as error:
        if error.obj is not None or "video_processor" not in known:
            raise
        raise NeedsTorchvision(f"no video processor without torchvision: {error}") from error


def video_processor_for(model_type: str, patch: int, options: Mapping[str, Any]) -> Any:
    """One with small frames; None where torchvision is missing."""
    entry = VIDEO_PROCESSOR_MAPPING_NAMES.get(options.get("image_processor", model_type), {})
    name = entry.get("torchvision") or getattr(options.get("video_processor"), "__name__", "")
    found = getattr(hf, name, None) if is_torchvision_available() else None
    return found and small(found, patch, options.get("videos", {}))


def feature_extractor_for(model_type: str, num_mel_bins: int | None) -> Any:
    """With the class's own settings, but for a window. Raises LookupError where there is none."""
    name = FEATURE_EXTRACTOR_MAPPING_NAMES.get(model_type)
    if name is None or not hasattr(hf, name):
        raise LookupError(f"no feature extractor for {model_type}")
    if name != "WhisperFeatureExtractor":
        return getattr(hf, name)(**({"feature_size": num_mel_bins} if num_mel_bins else {}))
    return hf.WhisperFeatureExtractor(chunk_length=1, feature_size=num_mel_bins or 80)


def _has_mels(config: Any) -> bool:
    return hasattr(config, "num_mel_bins")


def fit_counts(model: Any, processor: Any) -> None:
    """Tell a processor that is told how many rows an image has how many it has here."""
    names = ("num_image_tokens", "image_seq_length", "image_seq_len")
    told = [name for name in names if isinstance(getattr(processor, name, None), int)]
    encoder = next(
        (each for each in (model, getattr(model, "model", None)) if _encodes(each)), None
    )
    if not told or encoder is None:
        return
    options = processor._merge_kwargs(processor.valid_processor_kwargs, return_tensors="pt")
    images = processor.image_processor([tiny_image(0)], **options["images_kwargs"])
    taken = inspect.signature(encoder.get_image_features).parameters
    given = {
        name: place(images[name], model.dtype, model.device) for name in taken if name in images
    }
    with torch.inference_mode():
        num_rows = sum(map(len, parts_of(encoder.get_image_features(**given))))
    word, text = _replacement(processor)
    if word is None:
        return
    num_words = processor.tokenizer.tokenize(text).count(word)
    for name in told:
        setattr(processor, name, getattr(processor, name) * num_rows // num_words)


def _encodes(module: Any) -> bool:
    return hasattr(module, "get_image_features")


def _replacement(processor: Any) -> tuple[str | None, str]:
    """The token at which an image's rows stand, where the processor says it, and the whole text."""
    try:
        options = processor._merge_kwargs(processor.valid_processor_kwargs, return_tensors="pt")
        _, (text,) = processor._process_images([tiny_image(0)], **options["images_kwargs"])
    except Exception:  # it does not, or needs what is not there
        return None, ""
    counts = Counter(processor.tokenizer.tokenize(text))
    named = getattr(processor, "image_token", None)
    return named if counts[named] > 1 else counts.most_common(1)[0][0], text


def ids_of(config: Any, processor: Any, more: Mapping[str, Any] = {}) -> dict[str, Any]:
    """What config and processor have to agree upon: grids of tiles, ids of special tokens."""
    tokenizer = processor.tokenizer
    found: dict[str, Any] = {}
    grids = getattr(getattr(processor, "image_processor", None), "image_grid_pinpoints", None)
    if grids:
        found["image_grid_pinpoints"] = grids
    word, _ = _replacement(processor)
    more = more if word is None else {"image": word, **more}
    spare = len(tokenizer) + 4
    for name, words in more.items():
        if isinstance(words, list):
            found[name] = tokenizer.convert_tokens_to_ids(words)
    for part in (config, *(each for each in vars(config).values() if hasattr(each, "to_dict"))):
        for name, old in vars(part).items():
            match = re.match(r"(\w+?)_token_(?:id|index)\Z", name)
            if not match or match[1] in ("pad", "bos", "eos", "decoder_start", "sep"):
                continue
            token = more.get(match[1])
            for owner in (processor, tokenizer):
                token = token or getattr(owner, f"{match[1]}_token", None)
            if token is not None:
                found[name] = tokenizer.convert_tokens_to_ids(token)
            elif isinstance(old, int) and old >= len(tokenizer):
                found[name], spare = spare, spare - 1
    return found
