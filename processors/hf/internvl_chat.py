"""The HF processor that the original InternVL checkpoints lack: theirs is code beside the weights.

An image is resized to the grid of square tiles whose shape is closest to its own, cut up, and
followed by itself as one more tile, as in Chen et al., "How Far Are We to GPT-4V? Closing the Gap
to Commercial Multimodal Models with Open-Source Suites" (2024), section 3.2. Text and tensors are
those of the loading code that the checkpoints' pages show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    PILImageResampling,
    SizeDict,
)
from transformers.processing_utils import ImagesKwargs, ProcessorMixin

from aioengine.processors.media.pixels import Array

__all__ = ["InternVLChatImageProcessor", "InternVLChatProcessor", "choose_grid", "grids"]


@lru_cache(maxsize=64)
def grids(fewest: int, most: int) -> tuple[tuple[int, int], ...]:
    """All (columns, rows) with from `fewest` to `most` tiles, those with few first."""
    found = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if columns * rows >= fewest
    ]
    return tuple(sorted(found, key=lambda grid: grid[0] * grid[1]))


def choose_grid(width: int, height: int, *, side: int, fewest: int, most: int) -> tuple[int, int]:
    """Columns and rows of tiles for an image: of the grids the one closest to its shape.

    Of grids equally close the largest of which the image would fill more than half; one tile if
    there is no grid.
    """
    best, least = (1, 1), float("inf")
    for columns, rows in grids(fewest, most):
        difference = abs(width / height - columns / rows)
        is_filled = width * height > 0.5 * side * side * columns * rows
        if difference < least or (difference == least and is_filled):
            best, least = (columns, rows), difference
    return best


class _ImagesKwargs(ImagesKwargs, total=False):  # type: ignore[misc, call-arg]
    dynamic_image_size: bool
    use_thumbnail: bool
    min_dynamic_patch: int
    max_dynamic_patch: int


class InternVLChatImageProcessor(PilBackend):  # type: ignore[misc]
    """Images to tiles: `pixel_values` float32 [num_tiles, 3, side, side] of all images.

    `num_patches`: tiles of each image. Settings have the names that they have in the config.
    """

    resample = PILImageResampling.BICUBIC
    image_mean, image_std = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    size: Any = {"height": 448, "width": 448}  # noqa: RUF012 - as transformers has it
    do_resize = do_rescale = do_normalize = do_convert_rgb = True
    dynamic_image_size, use_thumbnail = True, False
    min_dynamic_patch, max_dynamic_patch = 1, 12
    valid_kwargs = _ImagesKwargs
    model_input_names = ("pixel_values",)

    def count_tiles(self, width: int, height: int, options: Mapping[str, Any]) -> int:
        """Count the tiles of an image of this size; `options`: those that differ from the
        settings."""
        columns, rows = self._grid(width, height, {**vars(self), **options})
        has_thumbnail = options.get("use_thumbnail", self.use_thumbnail)
        return columns * rows + bool(has_thumbnail and columns * rows > 1)

    def _grid(self, width: int, height: int, options: Mapping[str, Any]) -> tuple[int, int]:
        def option(name: str) -> Any:
            return options.get(name, getattr(self, name))

        if not option("dynamic_image_size"):
            return 1, 1
        fewest, most = option("min_dynamic_patch"), option("max_dynamic_patch")
        side = option("size")["height"]
        return choose_grid(width, height, side=side, fewest=fewest, most=most)

    def _preprocess(
        self,
        images: Sequence[Array],
        *,
        size: SizeDict,
        resample: Any,
        return_tensors: Any = None,
        **options: Any,
    ) -> Any:
        counts, tiles = [], []
        for image in images:
            height, width = image.shape[-2:]
            columns, rows = self._grid(width, height, {**options, "size": size})
            shape = SizeDict(height=size.height * rows, width=size.width * columns)
            whole = self.resize(image, shape, resample)
            parts = [
                part
                for row in np.split(whole, rows, axis=-2)
                for part in np.split(row, columns, axis=-1)
            ]
            if options["use_thumbnail"] and len(parts) > 1:
                parts.append(self.resize(image, size, resample))
            counts.append(len(parts))
            tiles += [self._scaled(part, options) for part in parts]
        return BatchFeature(
            {"pixel_values": tiles, "num_patches": counts}, tensor_type=return_tensors
        )

    def _scaled(self, tile: Array, options: Mapping[str, Any]) -> Array:
        if options["do_rescale"]:
            tile = self.rescale(tile, options["rescale_factor"])
        if options["do_normalize"]:
            tile = self.normalize(tile, options["image_mean"], options["image_std"])
        return tile


class InternVLChatProcessor(ProcessorMixin):  # type: ignore[misc]
    """`<image>`, which is ordinary text, becomes `num_image_token` rows for each of its tiles."""

    images_kwargs: Any = {}  # noqa: RUF012 - as transformers has it

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        num_image_token: int = 256,
        chat_template: Any = None,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.num_image_token = num_image_token
        self.image_token = "<image>"
        self.row_token = "<IMG_CONTEXT>"

    @property
    def unused_input_names(self) -> list[str]:
        """Names of outputs that no model takes."""
        return ["num_patches"]

    def expand(self, num_tiles: int) -> str:
        """Build what stands in a prompt for an image of so many tiles."""
        return f"<img>{self.row_token * (self.num_image_token * num_tiles)}</img>"

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        """Build what stands in a prompt for one image."""
        return self.expand(int(image_inputs["num_patches"][image_idx]))
