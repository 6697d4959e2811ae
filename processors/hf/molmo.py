"""Molmo's processor, which transformers does not have: a small view of an image, and its crops.

Deitke et al., "Molmo and PixMo" (2024), section 3 and the processor that is published with the
weights: an image keeps its proportions and is padded, once to a single crop and once to ones that
overlap; of each crop, two by two patches become one token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from aioengine.errors import InvalidRequestError, MediaError, ModelLoadError
from aioengine.processors.hf.crops import CropGeometry, as_channels, refused, resize, to_patches

__all__ = ["MolmoImageProcessor", "MolmoProcessor"]

PATCH, COLUMN, START, END = "<im_patch>", "<im_col>", "<im_start>", "<im_end>"
NO_TOKEN = -100
"""Of a patch that another crop keeps; also in the published processor."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate: user, assistant, user, ...') }}"
    "{% endif %}"
    "{{ ' User: ' if message['role'] == 'user' else ' Assistant: ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ ' Assistant:' }}{% endif %}"
)
"""How the model was trained; the template that comes with its tokenizer is the base model's."""


class MolmoImageProcessor:
    """Images to patches. The settings are those of the published preprocessor_config.json."""

    def __init__(
        self,
        *,
        max_crops: int = 12,
        overlap_margins: Sequence[int] = (4, 4),
        base_image_input_size: Sequence[int] = (336, 336),
        image_patch_size: int = 14,
        image_mean: Sequence[float] = (0.48145466, 0.4578275, 0.40821073),
        image_std: Sequence[float] = (0.26862954, 0.26130258, 0.27577711),
        **_: Any,
    ) -> None:
        try:
            size, other = base_image_input_size
            left, right = overlap_margins
            self.geometry = CropGeometry(
                crop_size=size,
                patch_size=image_patch_size,
                margins=(left, right),
                max_crops=max_crops,
            )
        except (TypeError, ValueError, InvalidRequestError) as error:
            raise ModelLoadError(f"preprocessor_config.json: {error}") from error
        if size != other or self.geometry.window_patches % 2 or left % 2 or right % 2:
            raise ModelLoadError(
                "preprocessor_config.json: crops must be square, and margins of an even number of "
                "patches must leave an even number"
            )
        self.image_mean, self.image_std = tuple(image_mean), tuple(image_std)

    def to_dict(self) -> dict[str, Any]:
        """The settings."""
        return {
            "max_crops": self.geometry.max_crops,
            "overlap_margins": list(self.geometry.margins),
            "base_image_input_size": [self.geometry.crop_size] * 2,
            "image_patch_size": self.geometry.patch_size,
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
        }

    def with_options(self, options: Mapping[str, Any]) -> CropGeometry:
        """The crops that a request asks for. Raises InvalidRequestError for other options."""
        asked = {**options, **(options.get("images_kwargs") or {})}
        asked.pop("images_kwargs", None)
        unknown = sorted(set(asked) - {"max_crops"})
        if unknown:
            raise refused(f"mm_processor_kwargs takes max_crops only, not {unknown[:5]}")
        return replace(self.geometry, **asked)

    @property
    def side(self) -> int:
        """Tokens along a crop's edge."""
        return (self.geometry.crop_patches + 1) // 2

    def grid(self, height: int, width: int, options: Mapping[str, Any]) -> tuple[int, int]:
        """Rows and columns of the tokens of an image's crops together.

        Raises MediaError for an image of which scaling would leave nothing.
        """
        geometry = self.with_options(options)
        tiling = geometry.tiling(height, width)
        rows, columns = geometry.canvas(tiling)
        for edges in ((rows, columns), (geometry.crop_patches,) * 2):
            target = edges[0] * geometry.patch_size, edges[1] * geometry.patch_size
            if min(_scaled(height, width, *target)) < 1:
                raise MediaError(
                    f"an image of {width} x {height} pixels is too narrow: scaled into "
                    f"{target[1]} x {target[0]}, nothing is left of it",
                    parameter="images",
                )
        return (rows + 1) // 2, (columns + 1) // 2

    def __call__(self, image: Any, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """One image: `pixel_values` float32 [n, patches, 3 * patch size squared], the small view
        first; `image_masks` float32 [n, patches], how much of a patch is image; `image_input_idx`
        int64 [n, tokens of a crop], the place of each token among the image's, else NO_TOKEN.
        """
        geometry, pixels = self.with_options(options), as_channels(image)
        height, width = pixels.shape[1:]
        grid, tiling = self.grid(height, width, options), geometry.tiling(height, width)
        rows, columns = geometry.canvas(tiling)
        size = geometry.patch_size
        canvas, mask = self._fit(pixels, rows * size, columns * size)
        small, _ = self._fit(pixels, geometry.crop_size, geometry.crop_size)
        crops = torch.cat([small[None], geometry.cut(canvas, tiling)])
        masks = to_patches(geometry.cut(mask, tiling), size).mean(-1)
        # As published, and trained: the masks are one crop early, and the last crop has none.
        masks = pad(masks, (0, 0, 0, 1), value=-1)
        return {
            "pixel_values": to_patches(crops, size),
            "image_masks": masks,
            "image_input_idx": self._places(geometry, tiling, grid),
        }

    def _fit(self, pixels: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        """The image in the middle of black, normalised, and where it is: [1, height, width]."""
        inner_height, inner_width = _scaled(pixels.shape[1], pixels.shape[2], height, width)
        fitted = resize(pixels, inner_height, inner_width, divisor=255, antialias=True).clamp(0, 1)
        top, left = (height - inner_height) // 2, (width - inner_width) // 2
        around = (left, width - inner_width - left, top, height - inner_height - top)
        mean, std = (
            torch.tensor(each, dtype=torch.float32)[:, None, None]
            for each in (self.image_mean, self.image_std)
        )
        return (pad(fitted, around) - mean) / std, pad(torch.ones_like(fitted[:1]), around)

    def _places(
        self, geometry: CropGeometry, tiling: tuple[int, int], grid: tuple[int, int]
    ) -> Tensor:
        """Locate each crop's tokens in the text, as `layout_tokens` writes it."""
        side = self.side
        # After the start, a row's end behind every row.
        small = 1 + torch.arange(side)[:, None] * (side + 1) + torch.arange(side)
        begin = side * (side + 1) + 3
        places = [small]
        for i in range(tiling[0]):
            for j in range(tiling[1]):
                crop = torch.full((side, side), NO_TOKEN)
                tops, lefts = (
                    slice(kept.start // 2, (kept.stop + 1) // 2)
                    for kept in (geometry.kept(i, tiling[0]), geometry.kept(j, tiling[1]))
                )
                down, right = (n * geometry.window_patches // 2 for n in (i, j))
                row = torch.arange(tops.start, tops.stop)[:, None] + down
                column = torch.arange(lefts.start, lefts.stop) + right
                crop[tops, lefts] = begin + row * (grid[1] + 1) + column
                places.append(crop)
        return torch.stack(places).flatten(1)


class MolmoProcessor:
    """Substitute for transformers' processors: called like one, and copied like one."""

    chat_template = CHAT_TEMPLATE

    def __init__(self, image_processor: MolmoImageProcessor, tokenizer: Any) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        ids = tokenizer.convert_tokens_to_ids([PATCH, COLUMN, START, END])
        if None in ids or tokenizer.unk_token_id in ids:
            raise ModelLoadError(f"the tokenizer has no {PATCH}, {COLUMN}, {START} or {END}")
        self.patch_id, self.column_id, self.start_id, self.end_id = ids
        # Neither base model has a first token; both end, and begin, with the same one.
        found = tokenizer.bos_token_id
        self.bos_id: int = tokenizer.eos_token_id if found is None else found
        if self.bos_id is None:
            raise ModelLoadError("the tokenizer has neither a first nor a last token")

    def layout_tokens(self, height: int, width: int, options: Mapping[str, Any]) -> list[int]:
        """The tokens of an image: the small view's rows, and those of the crops."""
        side, found = self.image_processor.side, []
        for rows, columns in ((side, side), self.image_processor.grid(height, width, options)):
            row = [*[self.patch_id] * columns, self.column_id]
            found += [self.start_id, *row * rows, self.end_id]
        return found

    def __call__(
        self,
        text: str | None = None,
        images: Any = None,
        return_tensors: Any = None,
        **options: Any,
    ) -> dict[str, Tensor]:
        """Encoder inputs of all images, crop after crop, with `num_crops` int64 [images]; with
        a text, the prompt's `input_ids` [1, tokens]: first token, images, text.
        """
        found: dict[str, Tensor] = {}
        given = list(images) if isinstance(images, list | tuple) else [images]
        given_images = given if images is not None else []
        if text is not None:
            ids = [self.bos_id]
            for image in given_images:
                height, width = as_channels(image).shape[1:]
                ids += self.layout_tokens(height, width, options)
            # The published processor's text begins with a space, always.
            ids += self.tokenizer.encode(f" {text}", add_special_tokens=False)
            found["input_ids"] = torch.tensor([ids])
        if given_images:
            made = [self.image_processor(image, options) for image in given_images]
            found |= {name: torch.cat([each[name] for each in made]) for name in made[0]}
            found["num_crops"] = torch.tensor([len(each["pixel_values"]) for each in made])
        return found

    def to_json_string(self) -> str:
        """Settings that its outputs depend on beside the tokenizer."""
        return json.dumps(self.image_processor.to_dict(), sort_keys=True)


def _scaled(height: int, width: int, most_height: int, most_width: int) -> tuple[int, int]:
    """An image's size when it just fits, in float32 as the published processor computes it."""
    scale = min(
        np.float32(most_height) / np.float32(height), np.float32(most_width) / np.float32(width)
    )
    return int(np.float32(height) * scale), int(np.float32(width) * scale)
