"""Pixels to RGB, in tiles small enough that no step holds the GIL for long.

Pillow composites and numpy converts a whole 4K image in one call that may hold the GIL for a
fifth of a second. Cut into tiles, the same operations give the same pixels, and the interpreter can
serve other threads between any two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from aioengine.processors.cache.hasher import ContentHasher
from aioengine.processors.items import ImageSize

__all__ = ["PixelError", "array_to_image", "blank", "hash_pixels", "orient", "tiles", "to_rgb"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Box: TypeAlias = tuple[int, int, int, int]

TILE_PIXELS = 1 << 16

_ALPHA_MODES = {"RGBA", "LA", "PA", "La", "RGBa"}
_DEEP_MODES = {"I", "F", "I;16", "I;16L", "I;16B", "I;16N"}
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class PixelError(ValueError):
    """Pixels that no rule turns into RGB; the text is safe to show."""


def tiles(size: tuple[int, int]) -> Iterator[Box]:
    """Boxes (left, upper, right, lower) of at most TILE_PIXELS that cover the image by rows.

    Their pixels one after the other are the image's: whole rows, or parts of a single one.
    """
    width, height = size
    tile_width = min(width, TILE_PIXELS)
    tile_height = max(1, TILE_PIXELS // tile_width)
    for upper in range(0, height, tile_height):
        for left in range(0, width, tile_width):
            yield (left, upper, min(left + tile_width, width), min(upper + tile_height, height))


def blank(mode: str, size: tuple[int, int]) -> Image.Image:
    """A black image, made without holding the GIL while its memory is cleared.

    `Image.new` clears it with the GIL held: up to 18 ms for 3840 x 2160 pixels, measured.
    """
    return Image.new(mode, (size[0], 1)).resize(size, Image.Resampling.NEAREST)


def orient(image: Image.Image, orientation: int) -> Image.Image:
    """The image as EXIF orientation 1 to 8 says it is to be shown."""
    method = _TRANSPOSITIONS.get(orientation)
    return image if method is None else image.transpose(method)


def to_rgb(image: Image.Image) -> Image.Image:
    """The image in mode RGB without transparency; itself, not a copy, if it is that already.

    Transparency is composed over white; pixels of more than eight bits keep their upper eight.
    Raises PixelError for pixels out of every known range.
    """
    has_alpha = image.mode in _ALPHA_MODES or image.info.get("transparency") is not None
    if image.mode == "RGB" and not has_alpha:
        return image
    if image.mode in _DEEP_MODES:
        return _map_tiles(image, _deep_converter(image))
    return _map_tiles(image, _over_white if has_alpha else _convert)


def _map_tiles(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    rgb = blank("RGB", image.size)
    for box in tiles(image.size):
        rgb.paste(convert(image.crop(box)), box)
    return rgb


def _convert(tile: Image.Image) -> Image.Image:
    return tile.convert("RGB")


def _over_white(tile: Image.Image) -> Image.Image:
    # Pillow knows no direct way from grey with its alpha multiplied in.
    rgba = (tile.convert("LA") if tile.mode == "La" else tile).convert("RGBA")
    white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, rgba).convert("RGB")


def _deep_converter(image: Image.Image) -> Callable[[Image.Image], Image.Image]:
    clear = image.info.get("transparency")
    if image.mode.startswith("I;16"):
        return lambda tile: _upper_eight_bits(np.asarray(tile), clear)
    factor = _deep_factor(*_extrema(image), is_float=image.mode == "F")

    def convert(tile: Image.Image) -> Image.Image:
        scaled = np.asarray(tile).astype(np.float64) * factor
        return Image.fromarray(np.minimum(scaled, 255).astype(np.uint8))

    return convert


def _upper_eight_bits(tile: Array, clear: object) -> Image.Image:
    """`clear`: the one value that is transparent, if any."""
    pixels = (tile >> 8).astype(np.uint8)
    if isinstance(clear, int):
        pixels = np.where(tile == clear, np.uint8(255), pixels)
    return Image.fromarray(pixels)


def _extrema(image: Image.Image) -> tuple[float, float]:
    low, high = np.inf, -np.inf
    for box in tiles(image.size):
        values = np.asarray(image.crop(box))
        low, high = min(low, float(values.min())), max(high, float(values.max()))
    return low, high


def _deep_factor(low: float, high: float, *, is_float: bool) -> float:
    # A file says how wide its numbers are, not what white is: the smallest usual range that holds.
    # The comparison also fails where either end is not a number.
    if not (low >= 0 and high <= 65535):
        raise PixelError("its pixel values are outside 0 to 65535")
    if is_float and high <= 1:
        return 255.0
    return 1.0 if high <= 255 else 1 / 256


def array_to_image(array: Array) -> Image.Image:
    """An image from an array `[height, width, channels]`, uint8 or floating in [0, 1].

    1 channel is grey, 3 are RGB, 4 are RGB and alpha. Floats are rounded to the nearest of 256
    levels. Raises PixelError for floats outside [0, 1].
    """
    height, width, channels = array.shape
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
    image = blank(mode, (width, height))
    for box in tiles((width, height)):
        left, upper, right, lower = box
        tile = _to_bytes(array[upper:lower, left:right])
        image.paste(Image.fromarray(tile[..., 0] if channels == 1 else tile), box)
    return image


def _to_bytes(tile: Array) -> Array:
    if tile.dtype == np.uint8:
        return np.ascontiguousarray(tile)
    values = tile.astype(np.float64)
    if not (values.min() >= 0 and values.max() <= 1):
        raise PixelError("its floating-point pixels are not all in [0, 1]")
    return np.rint(values * 255).astype(np.uint8)


def hash_pixels(hasher: ContentHasher, pixels: Image.Image | Array) -> None:
    """Adds shape, type and every pixel to the hash, tile by tile."""
    if isinstance(pixels, Image.Image):
        size = ImageSize(*pixels.size)
        hasher.update(["pixels", pixels.mode, size.width, size.height])
        hasher.begin("data", size.width * size.height * len(pixels.getbands()))
        for box in tiles(size):
            hasher.fill(pixels.crop(box).tobytes())
        return
    # With the byte order: the same bytes may be other numbers.
    hasher.update(["array", pixels.dtype.newbyteorder("=").str, list(pixels.shape)])
    hasher.update(pixels.dtype.isnative)
    hasher.begin("data", pixels.nbytes)
    rows = max(1, TILE_PIXELS // max(1, pixels[0].size))
    for start in range(0, len(pixels), rows):
        # A copy only where the array is not contiguous, and then of these rows alone.
        part = np.ascontiguousarray(pixels[start : start + rows])
        hasher.fill(part.reshape(-1).view(np.uint8).data)
