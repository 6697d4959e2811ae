"""Qwen-VL's tokenizer and images, which transformers reads only with a checkpoint's code.

The published tokenizer is a file of byte sequences and their ranks (`qwen.tiktoken`); the fast
tokenizer made of it here gives the same ids. A folder with a `tokenizer.json` is read as it is.
Bai et al., "Qwen-VL: A Versatile Vision-Language Model for Understanding, Localization, Text
Reading, and Beyond" (2023).
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AddedToken, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import (
    BPE,
    Regex,
    Tokenizer,
    bytes_to_unicode,
    decoders,
    normalizers,
    pre_tokenizers,
)
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from aioengine.processors.hf.files import find_file
from aioengine.processors.media.pixels import Array

__all__ = ["IMAGE_TOKENS", "QwenVLProcessor", "load_qwen_tokenizer", "tokenizer_from_ranks"]

_END = "<|endoftext|>"
_TEXT_TOKENS = (_END, "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
IMAGE_TOKENS = (
    *("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>"),
    *("<img>", "</img>", "<imgpad>"),
)
"""In the order of their ids, which follow those of the ranks."""
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What a text is cut into before bytes are merged."""

_CHAT_TEMPLATE = (
    "{%- set count = namespace(images=0) -%}"
    "{%- if messages[0]['role'] != 'system' -%}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string -%}"
    "{{ message['content'] }}"
    "{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'text' -%}"
    "{{ part['text'] }}"
    "{%- else -%}"
    "{%- set count.images = count.images + 1 -%}"
    "{{ 'Picture ' ~ count.images ~ ': <img></img>\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def tokenizer_from_ranks(ranks: Mapping[bytes, int], special_tokens: Sequence[str]) -> Any:
    """A fast tokenizer that merges bytes as tiktoken does: the pair of the lowest rank first.

    `ranks`: each token's bytes and its id, which together count up from 0; `special_tokens` get the
    ids that follow. Raises ValueError where the ids do not.
    """
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("the ranks do not count up from 0")
    # A letter for each byte, as byte-level tokenizers have them.
    letters = bytes_to_unicode()
    vocab = {token.decode("latin-1").translate(letters): rank for token, rank in ranks.items()}
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(vocab, key=vocab.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special_tokens]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_END,
        clean_up_tokenization_spaces=False,
    )


def load_qwen_tokenizer(source: str, revision: str | None, *, with_images: bool) -> Any:
    """The tokenizer of a folder or hub id, in a chat model with its chat template.

    `with_images`: whether the model's tokens for images and boxes follow those of its texts.
    Raises OSError or ValueError where there is no tokenizer that can be read.
    """
    if find_file(source, "tokenizer.json", revision) is not None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(source, revision=revision)
        if tokenizer.eos_token is None:
            tokenizer.add_special_tokens({"eos_token": _END, "pad_token": _END})
    else:
        path = find_file(source, "qwen.tiktoken", revision)
        if path is None:
            raise OSError("there is neither a tokenizer.json nor a qwen.tiktoken")
        pairs = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {b64decode(token): int(rank) for token, rank in pairs}
        more = IMAGE_TOKENS if with_images else ()
        tokenizer = tokenizer_from_ranks(ranks, (*_TEXT_TOKENS, *more))
    if tokenizer.chat_template is None and _is_chat_model(source, revision):
        tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _is_chat_model(source: str, revision: str | None) -> bool:
    path = find_file(source, "generation_config.json", revision)
    settings = {} if path is None else json.loads(path.read_bytes())
    return bool(settings.get("chat_format") == "chatml")


class QwenVLProcessor:
    """Substitute for the HF processor that was never published.

    Images are stretched to a square of `image_size` pixels; the text is left to the tokenizer.
    """

    def __init__(self, tokenizer: Any, image_size: int) -> None:
        self.tokenizer = tokenizer
        self.image_size = image_size
        self.chat_template = tokenizer.chat_template

    def __call__(
        self,
        text: str | None = None,
        images: Sequence[Image.Image] = (),
        return_tensors: str = "pt",
    ) -> dict[str, Any]:
        """`input_ids` [1, T] of the text, `pixel_values` float32 [n, 3, S, S] of RGB images."""
        outputs: dict[str, Any] = {}
        if text is not None:
            outputs["input_ids"] = torch.tensor([self.tokenizer(text)["input_ids"]])
        if images:
            pixels = np.stack([self._pixels(image) for image in images])
            outputs["pixel_values"] = torch.from_numpy(pixels)
        return outputs

    def _pixels(self, image: Image.Image) -> Array:
        size = (self.image_size, self.image_size)
        small = image.resize(size, Image.Resampling.BICUBIC)
        pixels = np.asarray(small, np.float32) / np.float32(255)
        mean, std = (np.asarray(each, np.float32) for each in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
        return np.ascontiguousarray(((pixels - mean) / std).transpose(2, 0, 1))

    def to_json_string(self) -> str:
        """Settings that its outputs depend on."""
        scale = {"image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD}
        return json.dumps({"image_size": self.image_size, **scale})
