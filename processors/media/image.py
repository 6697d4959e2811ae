"""Images, hostile until decoded: recognised, measured and bounded before a pixel is touched."""

from __future__ import annotations

import struct
import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageFile

from aioengine.config import MediaConfig
from aioengine.errors import MediaError
from aioengine.processors.cache.hasher import ContentHasher
from aioengine.processors.items import ImageHeader, ImageSize
from aioengine.processors.media import effort
from aioengine.processors.media.pixels import (
    Array,
    PixelError,
    array_to_image,
    blank,
    hash_pixels,
    orient,
    to_rgb,
)
from aioengine.processors.media.source import Encoded, MediaSource, to_numpy

__all__ = ["ImageSource", "load_formats", "open_image"]

ACCEPTED = (
    "encoded bytes, a PIL.Image, or a numpy array or torch tensor of shape (height, width), "
    "(height, width, channels) or (channels, height, width) holding uint8 or floats in [0, 1]"
)

# Processors scale the short side to the model's size and the long side with it, then crop: at 8000
# pixels by 1 that would be gigabytes.
MAX_ASPECT_RATIO = 200

# Of a PNG, looked through for EXIF data behind the pixels.
MAX_CHUNKS = 50_000

# Pillow decodes a lazily opened image on first use, and not safely from two threads at once. The
# same object may be part of two requests, so its loading is guarded by one of a few locks.
_LOAD_LOCKS = tuple(threading.Lock() for _ in range(64))


# Their readers decode an image in one go into the memory that they find.
_PLAIN_FORMATS = {"JPEG", "MPO", "PNG", "BMP", "WEBP"}
_PLAIN_MODES = {"RGB", "RGBA", "L", "CMYK"}


class ImageSource(MediaSource[ImageHeader, Image.Image]):
    """One image of a request, not decoded yet. Its header tells size, mode and format.

    Encoded images are identified by their bytes; pixels by mode, shape, type and bytes.
    """

    _noun = "image"
    _own_errors = (PixelError, effort.EffortError)

    @abstractmethod
    def _pixels(self, header: ImageHeader) -> Image.Image:
        """The decoded image, in any mode, as stored."""

    def decode(self) -> Image.Image:
        """The image in RGB as it is to be shown, of exactly the size that the header gives.

        EXIF orientation applied, transparency over white, first frame of an animation. Pixels that
        were RGB in memory already are not copied.
        """
        header = self.header()
        image = self._guarded(
            f"the {header.format or 'pixel'} data",
            lambda: to_rgb(orient(self._pixels(header), header.orientation)),
        )
        if image.size != header.size:
            raise self._error("its header and its pixels differ in size")
        return image

    def _check_size(self, width: int, height: int) -> ImageSize:
        limit = self._config.max_image_pixels
        if width < 1 or height < 1:
            raise self._error(f"it is empty ({width} x {height} pixels)", value=(width, height))
        if width * height > limit:
            raise self._error(
                f"its {width} x {height} pixels are more than media.max_image_pixels ({limit})",
                value=(width, height),
            )
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise self._error(
                f"one side of its {width} x {height} pixels is more than {MAX_ASPECT_RATIO} times "
                "the other",
                value=(width, height),
            )
        return ImageSize(width, height)


def open_image(item: object, config: MediaConfig, *, parameter: str) -> ImageSource:
    """The source for one image as the caller gave it, or as it was fetched.

    Reads headers only. Raises MediaError for other types, formats that are not allowed, and
    images over the limits of `config`.
    """
    source: ImageSource
    if isinstance(item, Encoded):
        source = _EncodedImage(item, config, parameter)
    elif isinstance(item, Image.Image):
        source = _PillowImage(item, config, parameter)
    elif isinstance(item, np.ndarray | torch.Tensor):
        source = _ArrayImage(item, config, parameter)
    else:
        raise ImageSource.not_accepted(parameter, ACCEPTED, type(item).__name__)
    source.header()
    return source


def load_formats(config: MediaConfig) -> list[str]:
    """Pillow's names of the formats that are allowed, whose readers are there afterwards."""
    names = [name.upper() for name in config.image_formats]
    if any(name not in Image.OPEN for name in names):
        Image.init()
    return names


class _EncodedImage(ImageSource):
    """An image file in memory."""

    _data: bytes

    def __init__(self, data: Encoded, config: MediaConfig, parameter: str) -> None:
        super().__init__(config, parameter)
        self._check_num_bytes(data, "image")
        # Pillow's readers share these: of anything else they would make a copy each.
        self._data = bytes(data)

    def identity(self) -> bytes:
        return ContentHasher("encoded image", self._data).digest()

    def _pixels(self, header: ImageHeader) -> Image.Image:
        image = self._open()
        if image.tile and image.format in _PLAIN_FORMATS and image.mode in _PLAIN_MODES:
            # Pillow's reader would make room itself, and hold the GIL while it clears it. Without
            # any pixels to read it would take this for the image.
            image.im = blank(image.mode, image.size).im
        image.load()
        return image

    def _read_header(self) -> ImageHeader:
        if not self._data:
            raise self._error("it is empty (0 bytes)", value=0)
        canvas = _webp_canvas(self._data)
        if canvas is not None:
            # Pillow's WebP reader makes room for the whole canvas when it opens the file.
            self._check_size(*canvas)
        image = self._open()
        orientation = _orientation(image, self._data)
        return ImageHeader(_shown(image, orientation), image.mode, image.format, orientation)

    def _open(self) -> ImageFile.ImageFile:
        # Not Image.open: its size limit is a global of the process that warns or raises by itself.
        names = load_formats(self._config)
        prefix = self._data[:16]
        unmarked = []
        for name in names:
            factory, accepts = Image.OPEN.get(name, (None, None))
            if factory is None:
                continue
            if accepts is None:
                unmarked.append(factory)
            elif _accepts(accepts, prefix):
                return self._checked(self._read_with(factory, name))
        # Formats without a mark to know them by: whoever can read it.
        for factory in unmarked:
            try:
                image = self._read_with(factory, "")
            except MediaError:
                continue
            return self._checked(image)
        raise self._error(f"it is in none of the allowed formats ({', '.join(names)})")

    def _read_with(self, factory: Callable[..., Any], name: str) -> ImageFile.ImageFile:
        """The image with its header read."""
        if reason := effort.excess_before_opening(self._data, name):
            raise self._error(reason)
        reader = effort.make_reader(self._data, name)
        image: ImageFile.ImageFile = self._guarded(f"its {name} header", factory, reader, "")
        return image

    def _checked(self, image: ImageFile.ImageFile) -> ImageFile.ImageFile:
        self._check_size(*image.size)
        limit = self._config.max_image_pixels
        if reason := effort.excess_when_opened(image, self._data, limit):
            raise self._error(reason)
        return image


class _PillowImage(ImageSource):
    """An image of Pillow's, possibly opened and not loaded yet."""

    may_change = True

    def __init__(self, image: Image.Image, config: MediaConfig, parameter: str) -> None:
        super().__init__(config, parameter)
        self._image = image
        self._identity: bytes | None = None

    def identity(self) -> bytes:
        hasher = ContentHasher("pixels in memory", self._image.mode)
        # As shown: palette, transparency and orientation are in the pixels then.
        hash_pixels(hasher, self.decode())
        self._identity = hasher.digest()
        return self._identity

    def verify(self) -> None:
        # The application may draw on its image; a copy would cost more than looking again.
        before = self._identity
        if before is not None and self.identity() != before:
            raise self._error("it was changed while the request was using it")

    def _read_header(self) -> ImageHeader:
        # Before it is loaded: that may apply the orientation, but must not change the layout.
        image, formats = self._image, self._config.image_formats
        is_lazy = isinstance(image, ImageFile.ImageFile) and bool(image.tile)
        if is_lazy and image.format not in {*(name.upper() for name in formats), "MPO"}:
            raise self._error(
                f"the format {image.format} is none of the allowed ones ({', '.join(formats)})",
                value=image.format,
            )
        self._check_size(*image.size)
        orientation = _orientation(image, b"")
        return ImageHeader(_shown(image, orientation), image.mode, None, orientation)

    def _pixels(self, header: ImageHeader) -> Image.Image:
        with _LOAD_LOCKS[(id(self._image) >> 4) % len(_LOAD_LOCKS)]:
            self._image.load()
        return self._image


class _ArrayImage(ImageSource):
    """Pixels in a numpy array or a torch tensor."""

    _data: Array

    def __init__(self, pixels: Array | torch.Tensor, config: MediaConfig, parameter: str) -> None:
        super().__init__(config, parameter)
        self._check_dense(pixels, "pixels")
        self._check_numbers(pixels)
        prefers_chw = isinstance(pixels, torch.Tensor)
        # Before they are converted: a few numbers may be repeated for ever.
        shape_only = np.broadcast_to(np.uint8(0), tuple(pixels.shape))
        height, width, _ = self._channels_last(shape_only, prefers_chw=prefers_chw).shape
        self._check_size(width, height)
        self._data = self._channels_last(to_numpy(pixels), prefers_chw=prefers_chw)

    def identity(self) -> bytes:
        self._data = self._data.copy()  # the application may write to its own later
        hasher = ContentHasher("array")
        hash_pixels(hasher, self._data)
        return hasher.digest()

    def _read_header(self) -> ImageHeader:
        height, width, channels = self._data.shape
        return ImageHeader(ImageSize(width, height), {1: "L", 3: "RGB", 4: "RGBA"}[channels])

    def _pixels(self, header: ImageHeader) -> Image.Image:
        return array_to_image(self._data)

    def _channels_last(self, array: Array, *, prefers_chw: bool) -> Array:
        if array.ndim == 2:
            return array[..., None]
        if array.ndim == 3:
            first, last = array.shape[0] in (1, 3, 4), array.shape[2] in (1, 3, 4)
            # Where both ends could be the channels, each library's own habit decides.
            if first and (prefers_chw or not last):
                return np.moveaxis(array, 0, -1)
            if last:
                return array
        raise self._error(f"its shape is {array.shape}; accepted: {ACCEPTED}", value=array.shape)


def _accepts(accepts: Callable[[bytes], bool | str], prefix: bytes) -> bool:
    try:
        return accepts(prefix) is True
    except Exception:  # of a file shorter than the mark that it looks for
        return False


def _shown(image: Image.Image, orientation: int) -> ImageSize:
    """The size that an image has once its orientation is applied."""
    width, height = image.size
    return ImageSize(height, width) if orientation >= 5 else ImageSize(width, height)


def _orientation(image: Image.Image, data: bytes) -> int:
    """The EXIF orientation, 1 to 8, still to be applied after loading."""
    if image.format == "TIFF":
        return 1  # Pillow applies it itself, in the size from the start, in the pixels on loading.
    try:
        # The base class's method: a PNG's own would decode the image to look behind its pixels.
        exif = Image.Image.getexif(image)
        if image.format == "PNG" and "exif" not in image.info and (late := _late_exif(data)):
            exif.load(late)
        value: Any = exif.get(ExifTags.Base.Orientation, 1)
    # Metadata is as hostile as pixels, but an image without it is still an image.
    except Exception:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _late_exif(data: bytes) -> bytes:
    """The EXIF block of a PNG wherever it lies, found by walking the chunks; b"" without one."""
    position = 8
    for _ in range(MAX_CHUNKS):
        if position + 8 > len(data):
            break
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind == b"eXIf":
            return b"Exif\0\0" + data[position + 8 : position + 8 + length]
        position += 12 + length
    return b""


def _webp_canvas(data: bytes) -> tuple[int, int] | None:
    """Width and height from a WebP header, None for anything else."""
    if len(data) < 30 or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    kind = data[12:16]
    if kind == b"VP8X":
        width, height = data[24:27], data[27:30]
        return int.from_bytes(width, "little") + 1, int.from_bytes(height, "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width_bits, height_bits = struct.unpack_from("<HH", data, 26)
    return width_bits & 0x3FFF, height_bits & 0x3FFF
