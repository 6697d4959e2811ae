"""Objects that hold a media item, unwrapped: files, uploads, Arrow values, buffers, mappings.

They are known by what they can do, so that none of the libraries that make them is imported.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from PIL import Image

from aioengine.processors.media.source import Encoded
from aioengine.types import Embeddings

__all__ = ["ObjectError", "TooLargeError", "is_wrapped", "read_all", "unwrap"]

PLAIN = (
    *(str, PurePath, bytes, bytearray, memoryview, Image.Image, torch.Tensor),
    *(Embeddings, list, tuple, type(None)),
)
"""What is an item itself, or the name of a file."""
CHUNK_BYTES = 1 << 20
MAPPING = "a mapping must hold bytes, a path, or an array and its sampling_rate"


class ObjectError(ValueError):
    """An object that holds no item; the text is safe to show, after the parameter's name."""


class TooLargeError(ObjectError):
    """A file of more bytes than may be read."""


def is_wrapped(item: object) -> bool:
    """Return whether `unwrap` is needed. Looks at the type only."""
    return item.ndim == 0 if isinstance(item, np.ndarray) else not isinstance(item, PLAIN)


def unwrap(item: Any, max_bytes: int, is_unwanted: Callable[[], bool]) -> object:
    """Return the item in an object, with a file read; the object itself if it is of no known kind.

    A file is read from where it stands, `max_bytes` at most, and put back there if it can seek; no
    further once `is_unwanted()`. A str or path that is returned names a file. Raises ObjectError,
    and whatever the object's own methods raise.
    """
    if isinstance(item, np.ndarray):
        item = item.tobytes() if item.dtype.kind == "S" else item.item()
    if callable(getattr(item, "as_py", None)):
        is_text = "string" in str(getattr(item, "type", ""))
        has_buffer = callable(getattr(item, "as_buffer", None)) and not is_text
        item = item.as_buffer() if has_buffer else item.as_py()
    if isinstance(item, Mapping):
        item = _in_mapping(item)
    file = getattr(item, "file", None)  # an upload's, of Starlette, Django, Litestar or aiohttp
    file = file if callable(getattr(file, "read", None)) else item
    if callable(getattr(file, "read", None)):
        return read_all(file, max_bytes, is_unwanted)
    if is_wrapped(item) and (buffer := _buffer(item)) is not None:
        return buffer
    if callable(getattr(item, "get_all_samples", None)):  # torchcodec's and datasets' decoder
        samples = item.get_all_samples()
        return samples.data, samples.sample_rate
    if is_wrapped(item) and (picture := _displayed(item, max_bytes)) is not None:
        return picture
    return item


def read_all(file: Any, max_bytes: int, is_unwanted: Callable[[], bool]) -> bytes:
    """The rest of a binary file, whose position is as before if it can seek.

    Raises TooLargeError for more than `max_bytes`.
    """
    if getattr(file, "closed", False) is True:
        raise ObjectError("is a closed file; keep it open until the request has begun")
    start = file.tell() if _can_seek(file) else None
    try:
        data = _read(file, max_bytes, is_unwanted)
    finally:
        if start is not None:
            file.seek(start)
    if not data and start:
        raise ObjectError("is a file at its end; seek(0) before it is given")
    return data


def _can_seek(file: Any) -> bool:
    seekable = getattr(file, "seekable", None)
    return seekable() is True if callable(seekable) else callable(getattr(file, "seek", None))


def _read(file: Any, max_bytes: int, is_unwanted: Callable[[], bool]) -> bytes:
    num_bytes, pieces, piece = 0, [], bytearray()
    while not is_unwanted():
        part = file.read(min(CHUNK_BYTES, max_bytes - num_bytes + 1))
        if not isinstance(part, Encoded):
            kind = type(part).__name__
            if isinstance(part, str):
                raise ObjectError("is a file of text; open it with mode 'rb'")
            if hasattr(part, "close") and hasattr(part, "__await__"):
                part.close()
                kind = "a coroutine"
            raise ObjectError(f"is a file whose read() returned {kind}, not bytes")
        if not len(part):
            break
        num_bytes += memoryview(part).nbytes
        if num_bytes > max_bytes:
            raise TooLargeError(f"has more than {max_bytes} bytes")
        piece += part
        # Pieces are joined without the GIL; what grows by single bytes is not moved as a whole.
        if len(piece) >= CHUNK_BYTES:
            pieces.append(bytes(piece))
            piece.clear()
    return b"".join([*pieces, bytes(piece)])


def _displayed(item: Any, max_bytes: int) -> bytes | None:
    """The image file that a notebook's cell would show of an object; None where it shows none."""
    for name in ("_repr_png_", "_repr_jpeg_"):
        shows = getattr(item, name, None)
        found = shows() if callable(shows) else None
        found = found[0] if isinstance(found, tuple) else found  # with its metadata
        if isinstance(found, bytes | str):
            if len(found) > 2 * max_bytes:
                raise TooLargeError(f"has more than {max_bytes} bytes")
            return found if isinstance(found, bytes) else base64.b64decode(found)
    if callable(getattr(item, "savefig", None)):  # matplotlib's figures
        drawn = io.BytesIO()
        item.savefig(drawn, format="png")
        return drawn.getvalue()
    return None


def _in_mapping(item: Mapping[Any, Any]) -> Any:
    """Return what datasets' `{"bytes", "path"}` or `{"array", "sampling_rate"}` holds."""
    data, path = item.get("bytes"), item.get("path")
    if data is not None:
        if not isinstance(data, Encoded) and _buffer(data) is None:
            raise ObjectError(f"has {type(data).__name__} under 'bytes', not bytes")
        return data
    if item.get("array") is not None and item.get("sampling_rate") is not None:
        return item["array"], item["sampling_rate"]
    if path is None:
        raise ObjectError(f"holds nothing: {MAPPING}")
    if not isinstance(path, str | PurePath):
        raise ObjectError(f"has {type(path).__name__} under 'path', not a path")
    return path


def _buffer(item: Any) -> memoryview | None:
    """The bytes that an object of another library's shares; None for other numbers, and none."""
    try:
        view = memoryview(item)
    except TypeError:
        return None
    return view if view.itemsize == 1 and not isinstance(item, np.generic) else None
