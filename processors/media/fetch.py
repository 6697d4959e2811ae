"""Getting a media item's bytes, wherever the caller says they are. The only async file here."""

from __future__ import annotations

import asyncio
import base64
import binascii
from pathlib import Path, PurePath
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

import anyio
import anyio.to_thread

from aioengine.config import MediaConfig
from aioengine.errors import MediaError

__all__ = ["fetch"]

# Up to this, decoding base64 takes less time than a trip to a worker thread. A multiple of four.
INLINE_CHARACTERS = 1 << 16
MAX_DATA_HEAD = 256


async def fetch(item: object, config: MediaConfig, *, parameter: str, trusted: bool) -> object:
    """The item's encoded bytes, or the item itself where it is an object with the data in it.

    Strings are `data:`, `file:` or http(s) URLs, or, if `trusted` (given by the application, not
    found in a chat message), local paths. Nothing is decoded here, and no more than
    `config.max_image_bytes` is read. Every failure is a MediaError naming `parameter`, with its
    cause; cancellation passes through.
    """
    if isinstance(item, PurePath):
        if not trusted:
            raise _refuse_path(parameter)
        return await anyio.to_thread.run_sync(_read_file, Path(item), config, parameter)
    if not isinstance(item, str):
        return item
    scheme = item[: item.find(":")].lower() if ":" in item[:32] else ""
    if scheme == "data":
        return await _fetch_data(item, config, parameter)
    if scheme == "file":
        return await anyio.to_thread.run_sync(_read_url, item, config, parameter)
    if scheme in ("http", "https"):
        return await _fetch_http(item, config, parameter)
    if not trusted:
        raise _refuse_path(parameter)
    return await anyio.to_thread.run_sync(_read_file, Path(item), config, parameter)


def _refuse_path(parameter: str) -> MediaError:
    return MediaError(
        f"{parameter} must be a data:, file: or http(s) URL; local paths are taken from the "
        "application only, not from chat messages",
        parameter=parameter,
    )


def _check_bytes(num_bytes: int, config: MediaConfig, parameter: str) -> None:
    if num_bytes > config.max_image_bytes:
        raise MediaError(
            f"{parameter} has {num_bytes} bytes, more than media.max_image_bytes "
            f"({config.max_image_bytes})",
            parameter=parameter,
            value=num_bytes,
        )


async def _fetch_data(url: str, config: MediaConfig, parameter: str) -> bytes:
    comma = url.find(",", 0, MAX_DATA_HEAD)
    if comma < 0 or not url[:comma].lower().endswith(";base64"):
        raise MediaError(
            f"{parameter} must be a data: URL in base64 (data:<type>;base64,<data>)",
            parameter=parameter,
        )
    # Four characters are at most three bytes; the exact number is checked after decoding.
    _check_bytes((len(url) - comma - 1) * 3 // 4 - 2, config, parameter)
    if len(url) <= INLINE_CHARACTERS:
        data = _decode_base64(url, comma + 1, parameter)
    else:
        data = await anyio.to_thread.run_sync(_decode_base64, url, comma + 1, parameter)
    _check_bytes(len(data), config, parameter)
    return data


def _decode_base64(url: str, start: int, parameter: str) -> bytes:
    decoded = bytearray()
    try:
        if url.find("%", start) >= 0:
            url, start = unquote(url[start:]), 0
        if (len(url) - start) % 4:
            raise binascii.Error("the length is not a multiple of four")
        # binascii holds the GIL while it decodes, so a large payload is decoded piece by piece.
        for position in range(start, len(url), INLINE_CHARACTERS):
            piece = url[position : position + INLINE_CHARACTERS]
            if piece.endswith("=") and position + INLINE_CHARACTERS < len(url):
                raise binascii.Error("padding before the end")
            decoded += base64.b64decode(piece, validate=True)
    except ValueError as error:
        raise MediaError(f"{parameter} is not valid base64", parameter=parameter) from error
    return bytes(decoded)


def _read_url(url: str, config: MediaConfig, parameter: str) -> bytes:
    if not config.local_roots:
        raise MediaError(
            f"{parameter} is a file: URL, and no folder is open to those; name some in "
            "media.local_roots",
            parameter=parameter,
        )
    try:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise ValueError("not a plain local file URL")
        path = Path(url2pathname(parts.path)).resolve(strict=True)
        roots = [Path(root).resolve() for root in config.local_roots]
        if not any(path.is_relative_to(root) for root in roots):
            raise ValueError("outside the allowed folders")
    except (OSError, ValueError, RuntimeError) as error:
        # One message for all cases: which files exist is nobody's business.
        raise MediaError(
            f"{parameter} is not a readable file under media.local_roots", parameter=parameter
        ) from error
    return _read_file(path, config, parameter)


def _read_file(path: Path, config: MediaConfig, parameter: str) -> bytes:
    try:
        if not path.is_file():
            raise FileNotFoundError("not a regular file")
        _check_bytes(path.stat().st_size, config, parameter)
        with path.open("rb") as file:
            data = file.read(config.max_image_bytes + 1)
    except (OSError, ValueError) as error:
        raise MediaError(
            f"{parameter} could not be read: {type(error).__name__}", parameter=parameter
        ) from error
    _check_bytes(len(data), config, parameter)
    return data


async def _fetch_http(url: str, config: MediaConfig, parameter: str) -> bytes:
    if config.fetcher is None:
        raise MediaError(
            f"{parameter} is an http(s) URL, and fetching is off; pass "
            "media=MediaConfig(fetcher=...), an async function from URL to bytes, to allow it",
            parameter=parameter,
        )
    try:
        async with asyncio.timeout(config.fetch_timeout_s):
            body = await config.fetcher(url)
    except TimeoutError as error:
        raise MediaError(
            f"{parameter} was not fetched within media.fetch_timeout_s "
            f"({config.fetch_timeout_s:g} s)",
            parameter=parameter,
        ) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Nobody cancelled this task: the fetcher let some inner cancellation of its own escape.
        raise MediaError(f"{parameter} could not be fetched", parameter=parameter) from error
    except MediaError as error:
        raise error.for_parameter(parameter) from error
    # The fetcher is the application's: whatever it raises is this one item's failure.
    except Exception as error:
        raise MediaError(
            f"{parameter} could not be fetched: {type(error).__name__}", parameter=parameter
        ) from error
    if not isinstance(body, bytes | bytearray | memoryview):
        raise MediaError(
            f"{parameter} could not be fetched: media.fetcher returned {type(body).__name__}, "
            "not bytes",
            parameter=parameter,
        ) from TypeError(type(body).__name__)
    _check_bytes(memoryview(body).nbytes, config, parameter)
    return bytes(body)
