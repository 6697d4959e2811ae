"""Cost of reading an image file: files whose cost is out of proportion to their size.

Pixels and bytes are limited elsewhere. But a JPEG of 300 kilobytes may hold thousands of scans that
each pass over all 64 million pixels, a TIFF of 64 by 64 pixels may be one tile of 20000 by 20000,
and a reader written in Python takes as long for a million empty blocks as for a thousand images.
"""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
from PIL import ImageFile

__all__ = ["EffortError", "excess_before_opening", "excess_when_opened", "make_reader"]

# Ordinary files take some hundred reads, or one for a few kilobytes.
FREE_READS = 50_000
BYTES_PER_READ = 256
# One pass over 64 million pixels takes a tenth of a second. A progressive JPEG has about ten.
MAX_SCANNED_PIXELS = 1_000_000_000
MAX_PLAIN_SCANS = 4
# Pillow decodes these in Python. They are decades old and small.
MAX_RUN_LENGTH_COST = 4 << 20
MAX_EXIF_SEGMENTS = 100
MAX_SEGMENTS = 10_000
# The strips of the thinnest image that passes are fewer.
MAX_TIFF_VALUES = 120_000
PIECE_BYTES = 1 << 20

_TOO_MANY_BLOCKS = "it has too many blocks for its size"
_FORMATS = {"PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF"}
_SCAN = b"\xff\xda"
_WITHOUT_LENGTH = {0x00, 0x01, *range(0xD0, 0xDA), 0xFF}
_JPEG_FORMATS = {"JPEG", "MPO"}
_JPEG_IN_TIFF = {"jpeg", "tiff_jpeg"}
_BYTE_TYPES = {1, 2, 6, 7}
_ROWS_PER_STRIP, _TILE_WIDTH, _TILE_LENGTH = 278, 322, 323


class EffortError(Exception):
    """The file costs too much to read; the text is safe to show.

    No kind of OSError, ValueError or SyntaxError: readers catch those and go on.
    """


def make_reader(data: bytes, format: str) -> io.BytesIO:
    """The file as its reader is to see it.

    Bounded for the formats that are allowed by default. What else Pillow knows it reads byte by
    byte in places, so who allows it allows that.
    """
    return _BoundedReader(data) if format in _FORMATS else io.BytesIO(data)


class _BoundedReader(io.BytesIO):
    """A file in memory that lets itself be read so many times, and no more."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._reads_left = FREE_READS + len(data) // BYTES_PER_READ

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most `size` bytes; raise EffortError where the file has too many blocks."""
        self._reads_left -= 1
        if self._reads_left < 0:
            raise EffortError(_TOO_MANY_BLOCKS)
        return super().read(size)

    def lift(self) -> None:
        """Count no more: the cost is bounded otherwise."""
        self._reads_left = 1 << 62


def excess_before_opening(data: bytes, format: str) -> str:
    """Explain why its header alone takes too long, or too much memory, to read; "" if it does
    not."""
    # Pillow joins them one by one.
    if format == "JPEG" and _exif_segments(data) > MAX_EXIF_SEGMENTS:
        return _TOO_MANY_BLOCKS
    if format == "TIFF" and _most_values(data) > MAX_TIFF_VALUES:
        return _TOO_MANY_BLOCKS
    return ""


def _exif_segments(data: bytes) -> int:
    """Segments of a JPEG file's header that claim to be EXIF; more than allowed is enough."""
    position, found = 2, 0
    for _ in range(MAX_SEGMENTS):
        position = data.find(b"\xff", position)  # Pillow too skips what lies between
        if position < 0 or position + 4 > len(data) or data[position + 1] == _SCAN[1]:
            return found
        kind = data[position + 1]
        if kind in _WITHOUT_LENGTH:
            position += 1 if kind == 0xFF else 2
            continue
        found += kind == 0xE1 and data.startswith(b"Exif", position + 4)
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return MAX_EXIF_SEGMENTS + 1


def _count_scans(data: bytes) -> int:
    """Count the markers of scans in a JPEG file. numpy lets other threads run."""
    count = 0
    numbers = np.frombuffer(data, np.uint8)
    for start in range(0, len(data) - 1, PIECE_BYTES):
        piece = numbers[start : start + PIECE_BYTES + 1]
        count += int(np.count_nonzero((piece[:-1] == _SCAN[0]) & (piece[1:] == _SCAN[1])))
    return count


def _most_values(data: bytes) -> int:
    """Values in the longest list of numbers of a TIFF file's first directory."""
    order = "<" if data[:2] == b"II" else ">"
    is_big = data[2:4] in (b"+\0", b"\0+")
    place = struct.Struct(order + ("8xQ" if is_big else "4xL"))
    length = struct.Struct(order + ("Q" if is_big else "H"))
    entry = struct.Struct(order + ("HHQ8x" if is_big else "HHL4x"))
    most = 0
    try:
        (start,) = place.unpack_from(data)
        (num_entries,) = length.unpack_from(data, start)
        for index in range(min(num_entries, 1 << 16)):
            _, kind, count = entry.unpack_from(data, start + length.size + index * entry.size)
            most = max(most, 0 if kind in _BYTE_TYPES else count)
    except (struct.error, OverflowError):
        pass  # cut short; not worth more words than Pillow's
    return most


def excess_when_opened(image: ImageFile.ImageFile, data: bytes, max_pixels: int) -> str:
    """Explain why its pixels take too long, or too much memory, to decode; "" if they do not."""
    width, height = image.size
    part = width * height
    if image.format == "TIFF":
        tile_width, tile_length, part = _tiff_part(image)
        if tile_width * tile_length > max_pixels:
            return f"its tiles are larger than media.max_image_pixels ({max_pixels})"
    if image.format in _JPEG_FORMATS or image.info.get("compression") in _JPEG_IN_TIFF:
        num_scans = _count_scans(data)
        if num_scans > MAX_PLAIN_SCANS and num_scans * part > MAX_SCANNED_PIXELS:
            return f"it has too many scans ({num_scans}) for its size"
    if any(tile[0] == "bmp_rle" for tile in image.tile):
        if part + len(data) > MAX_RUN_LENGTH_COST:
            return (
                "it is run-length encoded, and has more pixels and bytes than are decoded of those "
                f"({MAX_RUN_LENGTH_COST})"
            )
        if isinstance(image.fp, _BoundedReader):
            image.fp.lift()
    return ""


def _tiff_part(image: Any) -> tuple[int, int, int]:
    """Width and height of a tile, 0 for strips, and the pixels that are decoded in one go."""
    width, height = image.size
    sizes = [image.tag_v2.get(tag) for tag in (_TILE_WIDTH, _TILE_LENGTH, _ROWS_PER_STRIP)]
    tile_width, tile_length, rows = (size if isinstance(size, int) else 0 for size in sizes)
    if tile_width and tile_length:
        return tile_width, tile_length, tile_width * tile_length
    return 0, 0, width * (min(rows, height) or height)
