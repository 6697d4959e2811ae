"""Molmo 2's processor without torchvision, which transformers' own needs for its images.

An image is stretched to a square and, beside that, to a canvas of overlapping crops; tokens stand
for windows of patches, given by their numbers. The settings, names and results are transformers'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import BatchFeature
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import (
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    PILImageResampling,
)
from transformers.models.molmo2.processing_molmo2 import Molmo2Processor as HFMolmo2Processor
from transformers.processing_utils import ImagesKwargs

from aioengine.processors.hf.crops import CropGeometry, refused, resize, to_patches

__all__ = ["Molmo2ImageProcessor", "Molmo2Processor"]

MAX_POOLING = 8


class Molmo2ImagesKwargs(ImagesKwargs, total=False):  # type: ignore[call-arg, misc]
    """Options that an image may be processed with, beside what all processors know."""

    max_crops: int
    overlap_margins: list[int]
    patch_size: int
    pooling_size: list[int]


class Molmo2ImageProcessor(PilBackend):  # type: ignore[misc]
    """transformers' class of this name, its arithmetic done by PyTorch alone."""

    valid_kwargs = Molmo2ImagesKwargs
    model_input_names = ("pixel_values", "image_token_pooling", "image_grids", "image_num_crops")
    resample = PILImageResampling.BILINEAR
    image_mean, image_std = IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD
    size: ClassVar[Any] = {"height": 378, "width": 378}
    do_resize = do_rescale = do_normalize = do_convert_rgb = True
    max_crops = 8
    overlap_margins = (4, 4)
    patch_size = 14
    pooling_size = (2, 2)

    def geometry(self, options: Mapping[str, Any]) -> CropGeometry:
        """The crops by these options, or else by the settings. Raises InvalidRequestError.

        Of the size of a crop and of a patch there is one only, which the tower was made for.
        """
        height, width = _edges(self.size)
        patch_size = options.get("patch_size", self.patch_size)
        if height != width or _edges(options.get("size") or self.size) != (height, width):
            raise refused(f"crops are squares of {height} pixels, and cannot be of another size")
        if patch_size != self.patch_size:
            raise refused(f"patches are of {self.patch_size} pixels, and cannot be of another size")
        margins = options.get("overlap_margins", self.overlap_margins)
        if not isinstance(margins, Sequence) or len(margins) != 2:
            raise refused("overlap_margins must be two numbers")
        return CropGeometry(
            crop_size=height,
            patch_size=patch_size,
            margins=(margins[0], margins[1]),
            max_crops=options.get("max_crops", self.max_crops),
        )

    def get_image_grid_and_crops(
        self, height: int, width: int, images_kwargs: Mapping[str, Any] | None = None
    ) -> tuple[list[int], int]:
        """Rows and columns of tokens of the small view, and of the crops; the number of crops."""
        options = images_kwargs or {}
        geometry, (down, across) = self.geometry(options), self._pooling(options)
        tiling = geometry.tiling(height, width)
        rows, columns = geometry.canvas(tiling)
        side = geometry.crop_patches
        edges = ((side, down), (side, across), (rows, down), (columns, across))
        return [math.ceil(edge / step) for edge, step in edges], 1 + tiling[0] * tiling[1]

    def largest_size(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """Return height and width of an image that fills its crops and takes the most tokens."""
        geometry = self.geometry(options)
        size = geometry.patch_size
        canvases = [(rows * size, columns * size) for rows, columns in geometry.canvases()]

        def num_tokens(canvas: tuple[int, int]) -> int:
            (low, across, rows, columns), _ = self.get_image_grid_and_crops(*canvas, options)
            return low * across + rows * columns

        return max(canvases, key=num_tokens)

    def _preprocess(self, images: list[Any], return_tensors: Any = None, **options: Any) -> Any:
        made = [self._one(torch.from_numpy(np.ascontiguousarray(each)), options) for each in images]
        first = 0
        for patches, pooling, _ in made:
            pooling[pooling >= 0] += first
            first += patches.shape[0] * patches.shape[1]
        data = {
            "pixel_values": torch.cat([patches for patches, _, _ in made]),
            "image_token_pooling": torch.cat([pooling for _, pooling, _ in made]),
            "image_grids": torch.tensor([grid for _, _, grid in made]),
            "image_num_crops": torch.tensor([len(patches) for patches, _, _ in made]),
        }
        return BatchFeature(data=data, tensor_type=return_tensors)

    def _one(self, pixels: Tensor, options: Mapping[str, Any]) -> tuple[Tensor, Tensor, list[int]]:
        """An image [3, height, width]: its crops' patches [n, patches, pixels], the small view
        first; for each token the patches in its window, -1 where there are fewer; its grid."""
        if options["resample"] not in (PILImageResampling.BILINEAR, int(self.resample)):
            raise refused("images are resized bilinearly only")
        geometry, pooling = self.geometry(options), self._pooling(options)
        height, width = pixels.shape[1:]
        tiling = geometry.tiling(height, width)
        rows, columns = geometry.canvas(tiling)
        size = geometry.patch_size
        canvas = self._fit(pixels, rows * size, columns * size, options)
        small = self._fit(pixels, geometry.crop_size, geometry.crop_size, options)
        crops = torch.cat([small[None], geometry.cut(canvas, tiling)])
        side = geometry.crop_patches
        whole, parts = torch.arange(side**2).view(side, side), _numbers(geometry, tiling) + side**2
        windows = [_windows(whole, pooling), _windows(parts, pooling)]
        grid, _ = self.get_image_grid_and_crops(height, width, options)
        return to_patches(crops, size), torch.cat(windows).to(torch.int32), grid

    def _fit(self, pixels: Tensor, height: int, width: int, options: Mapping[str, Any]) -> Tensor:
        """Stretched, rounded to whole values again, and normalised: float32."""
        fitted = resize(pixels, height, width, antialias=False)
        if not pixels.is_floating_point():
            fitted = fitted.round_().clamp_(0, 255)
        factor = options["rescale_factor"] if options["do_rescale"] else 1.0
        if not options["do_normalize"]:
            return fitted * factor
        # As transformers does: not the pixels are scaled, but what is taken from them.
        mean, std = (
            (torch.tensor(each, dtype=torch.float32) * (1.0 / factor))[:, None, None]
            for each in (options["image_mean"], options["image_std"])
        )
        return (fitted - mean) / std

    def _pooling(self, options: Mapping[str, Any]) -> tuple[int, int]:
        steps = options.get("pooling_size", self.pooling_size)
        if not isinstance(steps, Sequence) or len(steps) != 2:
            raise refused("pooling_size must be two numbers")
        if not all(type(step) is int and 1 <= step <= MAX_POOLING for step in steps):
            raise refused(f"pooling_size must be two integers from 1 to {MAX_POOLING}")
        return steps[0], steps[1]


class Molmo2Processor(HFMolmo2Processor):  # type: ignore[misc]
    """transformers' own, content with the image processor here, and with none for videos."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """Anything goes: transformers would look for classes that need torchvision."""
        return None


def _edges(size: Any) -> tuple[Any, Any]:
    """Height and width, in a mapping or in what transformers makes of one."""
    known = size if isinstance(size, Mapping) else vars(size) if hasattr(size, "__dict__") else {}
    return known.get("height"), known.get("width")


def _numbers(geometry: CropGeometry, tiling: tuple[int, int]) -> Tensor:
    """The canvas's patches, each by its number in the crop that keeps it: [rows, columns]."""
    side, (rows, columns), kept = geometry.crop_patches, tiling, geometry.kept
    every = torch.arange(rows * columns * side**2).view(rows, columns, side, side)
    lines = [
        torch.cat([every[i, j, kept(i, rows), kept(j, columns)] for j in range(columns)], 1)
        for i in range(rows)
    ]
    return torch.cat(lines)


def _windows(numbers: Tensor, pooling: tuple[int, int]) -> Tensor:
    """[rows, columns] -> the numbers in each window [windows, down * across], padded with -1."""
    (rows, columns), (down, across) = numbers.shape, pooling
    high, wide = -rows % down, -columns % across
    around = (wide // 2, (wide + 1) // 2, high // 2, (high + 1) // 2)
    padded = pad(numbers, around, value=-1)
    parted = padded.view(padded.shape[0] // down, down, padded.shape[1] // across, across)
    return parted.transpose(1, 2).reshape(-1, down * across)
