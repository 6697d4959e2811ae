"""Overlapping crops of an image, as Molmo and Molmo 2 look at it: how many, and their patches.

An image is resized to a canvas of crops that overlap by a margin. Of the patches that two crops
share, one of them keeps each, so that the windows that are left lie side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from aioengine.errors import InvalidRequestError

__all__ = ["CropGeometry", "as_channels", "refused", "resize", "select_tiling", "to_patches"]

MAX_CROPS = 64
"""Tilings are tried one by one, and a request may ask for another number."""


@dataclass(frozen=True, kw_only=True)
class CropGeometry:
    """`crop_size`: a crop's edge in pixels; `margins`: patches of it that its neighbours keep, to
    the left and top, and to the right and bottom. Raises InvalidRequestError for what cannot be.
    """

    crop_size: int
    patch_size: int
    margins: tuple[int, int]
    max_crops: int

    def __post_init__(self) -> None:
        numbers = (self.crop_size, self.patch_size, *self.margins, self.max_crops)
        if not all(type(number) is int for number in numbers):
            raise refused("crop sizes, margins and numbers must be integers")
        if not 1 <= self.max_crops <= MAX_CROPS:
            raise refused(f"max_crops must be from 1 to {MAX_CROPS}, not {self.max_crops}")
        if self.patch_size < 1 or self.crop_size % self.patch_size:
            raise refused(f"crops of {self.crop_size} pixels hold no whole patches")
        if min(self.margins) < 0 or self.window_patches < 1:
            raise refused(f"margins of {list(self.margins)} patches leave nothing of a crop")

    @property
    def crop_patches(self) -> int:
        """Patches along a crop's edge."""
        return self.crop_size // self.patch_size

    @property
    def window_patches(self) -> int:
        """Patches along the edge of what a crop in the middle keeps."""
        return self.crop_patches - sum(self.margins)

    @property
    def window_size(self) -> int:
        """The same in pixels, which is how far crops are apart."""
        return self.window_patches * self.patch_size

    def tiling(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of crops for an image of that size."""
        margin = sum(self.margins) * self.patch_size
        return select_tiling(height - margin, width - margin, self.window_size, self.max_crops)

    def canvas(self, tiling: tuple[int, int]) -> tuple[int, int]:
        """Height and width in patches of that many crops together."""
        rows, columns = (count * self.window_patches + sum(self.margins) for count in tiling)
        return rows, columns

    def canvases(self) -> list[tuple[int, int]]:
        """List all numbers of crops that there may be."""
        most = self.max_crops
        return [self.canvas((n, m)) for n in range(1, most + 1) for m in range(1, most // n + 1)]

    def cut(self, canvas: Tensor, tiling: tuple[int, int]) -> Tensor:
        """[channels, height, width] -> the crops [n, channels, edge, edge], row by row."""
        size, step = self.crop_size, self.window_size
        crops = canvas.unfold(-2, size, step).unfold(-2, size, step)
        assert crops.shape[-4:-2] == tiling
        return crops.movedim((-4, -3), (0, 1)).flatten(0, 1)

    def kept(self, index: int, count: int) -> slice:
        """The patches that the crop at `index` of `count` in a row keeps."""
        first = 0 if index == 0 else self.margins[0]
        return slice(first, self.crop_patches - (0 if index == count - 1 else self.margins[1]))


def select_tiling(height: int, width: int, size: int, max_tiles: int) -> tuple[int, int]:
    """Rows and columns of tiles of `size` pixels into which an image fits best.

    Those that enlarge it least, or, if all shrink it, those that do so least; of equals the fewest
    tiles, then the fewest rows. In float32, as in the published processors: it decides ties.
    """
    shapes = [(n, m) for n in range(1, max_tiles + 1) for m in range(1, max_tiles // n + 1)]
    shapes.sort(key=lambda shape: (shape[0] * shape[1], shape[0]))
    edges = np.asarray(shapes, np.int32) * size
    # An image within the margins has edges of nothing, or less.
    with np.errstate(divide="ignore"):
        scales = (edges.astype(np.float32) / np.array([height, width], np.float32)).min(-1)
    if (scales < 1).all():
        return shapes[int(scales.argmax())]
    return shapes[int(np.where(scales < 1, np.float32(10e9), scales).argmin())]


def resize(
    pixels: Tensor, height: int, width: int, *, antialias: bool, divisor: float = 1
) -> Tensor:
    """[channels, height, width], divided, to another size: bilinear, corners not aligned, float32.

    All channels in one call: PyTorch's ways for one and for several round differently.
    """
    if antialias and width == 1 < height:
        # PyTorch's kernel for CPUs gives all of a column one pixel wide the same value; a row is
        # as it should be.
        row = resize(pixels.transpose(1, 2), width, height, antialias=antialias, divisor=divisor)
        return row.transpose(1, 2)
    return interpolate(
        pixels[None].to(torch.float32, copy=True).div_(divisor),
        (height, width),
        mode="bilinear",
        align_corners=False,
        antialias=antialias,
    )[0]


def to_patches(crops: Tensor, size: int) -> Tensor:
    """[n, channels, edge, edge] -> [n, patches, size * size * channels], row by row."""
    n, channels, height, width = crops.shape
    parted = crops.reshape(n, channels, height // size, size, width // size, size)
    return parted.permute(0, 2, 4, 3, 5, 1).reshape(n, -1, size * size * channels)


def as_channels(image: Any) -> Tensor:
    """uint8 [3, height, width] of an image from Pillow, or of pixels [height, width, 3]."""
    if isinstance(image, Image.Image) and image.mode != "RGB":
        image = image.convert("RGB")
    return torch.from_numpy(np.array(image, np.uint8)).movedim(-1, 0).contiguous()


def refused(reason: str) -> InvalidRequestError:
    """The error for options that a request must not ask for."""
    return InvalidRequestError(reason, parameter="mm_processor_kwargs")
