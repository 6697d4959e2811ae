"""DeepSeek-VL2's tokenizer and images, which transformers reads only with other people's code.

Wu et al., "DeepSeek-VL2: Mixture-of-Experts Vision-Language Models for Advanced Multimodal
Understanding" (2024), section 2: an image is seen whole in one tile, and once more in as many
tiles as fit it best. With more than two images in a prompt each is seen in two tiles only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import processors

from aioengine.errors import MediaError
from aioengine.processors.hf.files import find_file
from aioengine.processors.media.pixels import Array

__all__ = [
    "DeepseekVL2Processor",
    "load_deepseek_settings",
    "load_deepseek_tokenizer",
    "select_best_resolution",
]

_PAD = "<｜▁pad▁｜>"
_MARKS = (
    "<|ref|>",
    "<|/ref|>",
    "<|det|>",
    "<|/det|>",
    "<|grounding|>",
    "<|User|>",
    "<|Assistant|>",
)
"""Tokens that the published processor adds where the tokenizer has none of the name, in order."""

_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['content'] is string -%}"
    "{%- set found = namespace(text=message['content']) -%}"
    "{%- else -%}"
    "{%- set found = namespace(text='') -%}"
    "{%- for part in message['content'] -%}"
    "{%- set found.text = found.text + (part['text'] if part['type'] == 'text' "
    "else '<image>\n') -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{%- if message['role'] == 'user' -%}"
    "{{ '<|User|>: ' + found.text.strip() + '\n\n<|Assistant|>:' }}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{{ found.text.strip() + eos_token }}"
    "{%- else -%}"
    "{{ found.text.strip() }}"
    "{%- endif -%}"
    "{%- endfor -%}"
)


def select_best_resolution(
    size: tuple[int, int], candidates: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """The candidate (width, height) that keeps most of an image's pixels, and wastes fewest.

    What an image has beyond its own pixels does not count; the first of equal ones is taken. Raises
    MediaError for an image of which none keeps a pixel.
    """

    def rank(candidate: Sequence[int]) -> tuple[int, int]:
        scale = min(candidate[0] / size[0], candidate[1] / size[1])
        shrunk = int(size[0] * scale) * int(size[1] * scale)
        kept = min(shrunk, size[0] * size[1])
        return kept, kept - candidate[0] * candidate[1]

    width, height = best = max(candidates, key=rank)
    if rank(best)[0] == 0:
        raise MediaError(
            f"an image of {size[0]} x {size[1]} pixels is too narrow: scaled into {width} x "
            f"{height}, nothing is left of it",
            parameter="images",
        )
    return width, height


def load_deepseek_settings(source: str, revision: str | None) -> dict[str, Any]:
    """Read what the folder or hub id says of its processor; nothing where it has no such file."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        path = find_file(source, name, revision)
        if path is not None:
            settings: dict[str, Any] = json.loads(path.read_bytes())
            return settings
    return {}


def load_deepseek_tokenizer(source: str, revision: str | None, image_token: str) -> Any:
    """The tokenizer of a folder or hub id, with all tokens of the published processor.

    A text begins with `bos_token`, as the published processor has it. Raises OSError or ValueError
    where there is none.
    """
    # As the file says: the class that the checkpoint names would build another one.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source, revision=revision)
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": _PAD})
    tokenizer.add_tokens([image_token, *_MARKS], special_tokens=True)
    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    if bos is not None and tokenizer("a")["input_ids"][:1] != [bos_id]:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, bos_id)]
        )
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _CHAT_TEMPLATE.replace("<image>", image_token)
    return tokenizer


class DeepseekVL2Processor:
    """Substitute for the published processor; its settings have the published names."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        candidate_resolutions: Sequence[Sequence[int]],
        patch_size: int,
        downsample_ratio: int,
        image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5),
        normalize: bool = True,
        image_token: str = "<image>",
        **_: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template
        self.candidate_resolutions = [(int(w), int(h)) for w, h in candidate_resolutions]
        self.image_size = self.candidate_resolutions[0][0]
        self.patch_size = patch_size
        self.downsample_ratio = downsample_ratio
        self.image_mean, self.image_std, self.normalize = image_mean, image_std, normalize
        self.image_token = image_token
        self.image_token_id = int(tokenizer.convert_tokens_to_ids(image_token))

    @property
    def tile_side(self) -> int:
        """Rows of the encoder along one side of a tile."""
        return math.ceil(self.image_size // self.patch_size / self.downsample_ratio)

    def count_tiles(self, size: tuple[int, int], *, cropping: bool) -> tuple[int, int]:
        """Columns and rows of the tiles in which an image is seen closely."""
        if not cropping:
            return 1, 1
        width, height = select_best_resolution(size, self.candidate_resolutions)
        return width // self.image_size, height // self.image_size

    def __call__(
        self,
        text: str | None = None,
        images: Sequence[Image.Image] = (),
        cropping: bool = True,
        return_tensors: str = "pt",
    ) -> dict[str, Any]:
        """`pixel_values` float32 [tiles, 3, S, S] of RGB images, `images_spatial_crop` [n, 2].

        Of each image the tile that shows it whole, then the others row by row; the crop tells
        their columns and rows. `input_ids` [1, T]: the text as it is.
        """
        outputs: dict[str, Any] = {}
        if text is not None:
            outputs["input_ids"] = torch.tensor([self.tokenizer(text)["input_ids"]])
        if images:
            crops = [self.count_tiles(image.size, cropping=cropping) for image in images]
            tiles = [
                tile for image, crop in zip(images, crops, strict=True)
                for tile in self._tiles(image, *crop)
            ]  # fmt: skip
            outputs["pixel_values"] = torch.from_numpy(np.stack(tiles))
            outputs["images_spatial_crop"] = torch.tensor(crops)
        return outputs

    def _tiles(self, image: Image.Image, num_columns: int, num_rows: int) -> list[Array]:
        side = self.image_size
        close = self._fitted(image, num_columns * side, num_rows * side)
        whole = self._fitted(image, side, side)
        pixels = [np.asarray(whole)] + [
            np.asarray(close)[y : y + side, x : x + side]
            for y in range(0, num_rows * side, side)
            for x in range(0, num_columns * side, side)
        ]
        return [self._scaled(each) for each in pixels]

    def _fitted(self, image: Image.Image, width: int, height: int) -> Image.Image:
        """Shrunk or grown to fit, in the middle of the mean colour."""
        color = tuple(int(mean * 255) for mean in self.image_mean)
        return ImageOps.pad(image, (width, height), Image.Resampling.BICUBIC, color)

    def _scaled(self, pixels: Array) -> Array:
        scaled: Array = pixels.astype(np.float32) / np.float32(255)
        if self.normalize:
            mean, std = (np.asarray(each, np.float32) for each in (self.image_mean, self.image_std))
            scaled = (scaled - mean) / std
        return np.ascontiguousarray(scaled.transpose(2, 0, 1))

    def to_json_string(self) -> str:
        """Settings that its outputs depend on."""
        settings = {name: value for name, value in vars(self).items() if name != "tokenizer"}
        return json.dumps(settings, sort_keys=True)
