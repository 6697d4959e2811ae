"""Getting a media item's bytes, wherever the caller says they are."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import os
import re
import stat
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

import anyio
import anyio.to_thread

from aioengine.config import MediaConfig
from aioengine.errors import MediaError, MediaUnavailableError, shown
from aioengine.processors.media.objects import ObjectError, TooLargeError, is_wrapped, unwrap

__all__ = ["fetch"]

Result = TypeVar("Result")

# Up to this, decoding base64 takes less time than a trip to a worker thread. A multiple of four.
_ESCAPES = (("%2B", "+"), ("%2b", "+"), ("%2F", "/"), ("%2f", "/"), ("%3D", "="), ("%3d", "="))
INLINE_CHARACTERS = 1 << 16
MAX_DATA_HEAD = 256
MAX_SHOWN_PATH = 200
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{60,}={0,2}")
_HINT = "looks like base64; write data:<type>;base64, before it, or give its bytes"
_UNTRUSTED = (
    "must be a data:, file: or http(s) URL; local paths are taken only from the application that "
    "runs the engine (as Path objects, or beside the prompt), not from messages or JSON"
)


@dataclass(frozen=True)
class _Order:
    """Target of a fetch: an item of this modality, which the caller knows under this name."""

    config: MediaConfig
    parameter: str
    modality: str
    threads: anyio.CapacityLimiter | None

    async def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run in a worker thread of the engine's own count: the application's may all be held by
        handlers that wait for this very fetch."""
        limiter = self.threads or anyio.CapacityLimiter(1)
        return await anyio.to_thread.run_sync(function, *args, limiter=limiter)

    @property
    def max_bytes(self) -> int:
        return self.config.max_bytes(self.modality)

    @property
    def limit_name(self) -> str:
        return f"media.max_{self.modality}_bytes"

    def error(
        self, reason: str, kind: type[MediaError] = MediaError, value: object = None
    ) -> MediaError:
        return kind(f"{self.parameter} {reason}", parameter=self.parameter, value=value)

    def check_bytes(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            limit = f"{self.limit_name} ({self.max_bytes})"
            raise self.error(f"has {num_bytes} bytes, more than {limit}", value=num_bytes)


async def fetch(
    item: object,
    config: MediaConfig,
    *,
    parameter: str,
    trusted: bool,
    modality: str = "image",
    threads: anyio.CapacityLimiter | None = None,
) -> object:
    """The item's encoded bytes, or the item itself where it is an object with the data in it.

    Strings are `data:`, `file:` or http(s) URLs, or, if `trusted` (given by the application, not
    found in a chat message), local paths; so are those in mappings, while a path object in one is
    the application's own. What `unwrap` knows is read in a worker thread. http(s) needs
    `config.fetcher` or, for the engine's own client, `config.allowed_hosts`. Nothing is decoded
    here, and no more than `config.max_bytes(modality)` is read. `threads`: how many may be used at
    once. Every failure is a MediaError naming `parameter`, and a MediaUnavailableError where the
    same fetch may succeed later; cancellation passes through.
    """
    order = _Order(config, parameter, modality, threads)
    if is_wrapped(item):
        item = await _unwrap(item, order)
        trusted = trusted or isinstance(item, PurePath)
    if isinstance(item, PurePath):
        return await _read_path(item, order, trusted=trusted)
    if not isinstance(item, str):
        return item
    scheme = item[: item.find(":")].lower() if ":" in item[:32] else ""
    if scheme == "data":
        return await _fetch_data(item, order)
    if scheme == "file":
        return await order.run(_read_url, item, order)
    if scheme in ("http", "https"):
        return await _fetch_http(item, order)
    return await _read_path(item, order, trusted=trusted)


async def _unwrap(item: object, order: _Order) -> object:
    """The item in an object of another library's. A read that never returns holds up nobody."""
    left = threading.Event()
    limiter = order.threads or anyio.CapacityLimiter(1)
    call = partial(unwrap, item, order.max_bytes, left.is_set)
    try:
        found = await anyio.to_thread.run_sync(call, limiter=limiter, abandon_on_cancel=True)
    except TooLargeError:
        limit = f"{order.limit_name} ({order.max_bytes})"
        raise order.error(f"has more bytes than {limit}") from None
    except ObjectError as error:
        raise order.error(str(error)) from None
    except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    # Whatever else the object's methods raise is this one item's failure.
    except BaseException as error:
        raise order.error(f"could not be read: {type(error).__name__}") from error
    finally:
        left.set()
    return found


async def _read_path(path: str | PurePath, order: _Order, *, trusted: bool) -> bytes:
    if not trusted:
        raise order.error(_HINT if _is_base64(path) else _UNTRUSTED)
    return await order.run(_read_named, path, order)


def _is_base64(path: str | PurePath) -> bool:
    """Return whether it begins as somebody's base64 without its head does, and as no path does."""
    return _BASE64.fullmatch(str(path)[:MAX_DATA_HEAD]) is not None


def _read_named(path: str | PurePath, order: _Order) -> bytes:
    """The file at a path that the application gave, by which its errors name it."""
    try:
        return _read_file(Path(path), order)
    except MediaError as error:
        if error.__cause__ is None:
            raise
        name, cause = shown(str(path), MAX_SHOWN_PATH), error.__cause__
    if _is_base64(path):
        raise order.error(_HINT) from cause
    if isinstance(path, str) and "://" in path[:32]:
        raise order.error("must be a path, or a data:, file: or http(s) URL") from cause
    match cause:
        case IsADirectoryError():
            reason = f"{name} is a folder, not a file"
        case io.UnsupportedOperation():
            reason = f"{name} is a device or a pipe, not a file"
        case FileNotFoundError() | NotADirectoryError():
            reason = f"there is no file {name}"
        case PermissionError():
            reason = f"the file {name} may not be read (permission denied)"
        case _:
            reason = f"the file {name} could not be read: {type(cause).__name__}"
    text = f"{order.parameter}: {reason}"
    raise MediaError(text, parameter=order.parameter) from cause


async def _fetch_data(url: str, order: _Order) -> bytes:
    comma = url.find(",", 0, MAX_DATA_HEAD)
    if comma < 0 or not url[:comma].lower().endswith(";base64"):
        raise order.error("must be a data: URL in base64 (data:<type>;base64,<data>)")
    # Four characters are at most three bytes; the exact number is checked after decoding.
    order.check_bytes((len(url) - comma - 1) * 3 // 4 - 2)
    if len(url) <= INLINE_CHARACTERS:
        data = _decode_base64(url, comma + 1, order)
    else:
        data = await order.run(_decode_base64, url, comma + 1, order)
    order.check_bytes(len(data))
    return data


def _decode_base64(url: str, start: int, order: _Order) -> bytes:
    # Piece by piece, as each call holds the GIL; joining the pieces lets go of it.
    decoded = [b""]
    rest = ""
    try:
        for piece in _unescaped(url, start):
            rest += piece
            end = len(rest) // 4 * 4
            whole, rest = rest[:end], rest[end:]
            if whole and len(decoded[-1]) % 3:
                raise binascii.Error("padding before the end")
            decoded.append(base64.b64decode(whole, validate=True))
        if rest:
            raise binascii.Error("the length is not a multiple of four")
    except ValueError as error:
        raise order.error("is not valid base64") from error
    return b"".join(decoded)


def _unescaped(url: str, start: int) -> Iterator[str]:
    """The URL from `start` on, in pieces, without the escapes of characters that base64 has.

    Anything else that is escaped stays, and is no base64: a full decoder would hold the GIL for
    seconds.
    """
    rest = ""
    for position in range(start, len(url), INLINE_CHARACTERS):
        piece, rest = rest + url[position : position + INLINE_CHARACTERS], ""
        cut = piece.find("%", len(piece) - 2)
        if cut >= 0:  # it may go on in the next piece
            piece, rest = piece[:cut], piece[cut:]
        for escape, character in _ESCAPES:
            piece = piece.replace(escape, character)
        yield piece
    yield rest


def _read_url(url: str, order: _Order) -> bytes:
    if not order.config.local_roots:
        raise order.error(
            "is a file: URL, and no folder is open to those; name some in media.local_roots"
        )
    try:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise ValueError("not a plain local file URL")
        path = Path(url2pathname(parts.path)).resolve(strict=True)
        roots = [Path(root).resolve() for root in order.config.local_roots]
        if not any(path.is_relative_to(root) for root in roots):
            raise ValueError("outside the allowed folders")
    except (OSError, ValueError, RuntimeError) as error:
        # One message for all cases: which files exist is nobody's business.
        raise order.error("is not a readable file under media.local_roots") from error
    return _read_file(path, order, os.O_NOFOLLOW)  # what it was resolved to is no link


def _read_file(path: Path, order: _Order, flags: int = 0) -> bytes:
    try:
        # Looked at when it is open, and without waiting for a pipe: names may change in between.
        with open(os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                is_folder = stat.S_ISDIR(status.st_mode)
                raise (IsADirectoryError if is_folder else io.UnsupportedOperation)
            order.check_bytes(status.st_size)
            data = file.read(order.max_bytes + 1)
    except (OSError, ValueError) as error:
        raise order.error(f"could not be read: {type(error).__name__}") from error
    order.check_bytes(len(data))
    return data


async def _fetch_http(url: str, order: _Order) -> bytes:
    config = order.config
    if config.fetcher is not None:
        return await _call_fetcher(config.fetcher, url, order)
    if not config.allowed_hosts:
        raise order.error(
            "is an http(s) URL, and fetching is off: give a data: URL, or have the engine's "
            'MediaConfig name its host in allowed_hosts ("*": any public one), or a fetcher, which '
            "is an async function from URL to bytes"
        )
    try:
        # In a thread, as httpx takes a fifth of a second to import.
        fetch_url = await order.run(_import_client)
    except ModuleNotFoundError as error:
        raise order.error(
            "is an http(s) URL, and fetching needs httpx where the engine runs: pip install "
            "'aioengine[fetch]', or set fetcher of its MediaConfig"
        ) from error
    return await fetch_url(
        url,
        config,
        max_bytes=order.max_bytes,
        parameter=order.parameter,
        limit_name=order.limit_name,
    )


def _import_client() -> Callable[..., Awaitable[bytes]]:
    from aioengine.processors.media.http import fetch_url

    return fetch_url


async def _call_fetcher(
    fetcher: Callable[[str], Awaitable[bytes]], url: str, order: _Order
) -> bytes:
    timeout_s = order.config.fetch_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            body = await fetcher(url)
    except TimeoutError as error:
        reason = f"was not fetched within media.fetch_timeout_s ({timeout_s:g} s)"
        raise order.error(reason, MediaUnavailableError) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Nobody cancelled this task: the fetcher let some inner cancellation of its own escape.
        raise order.error("could not be fetched") from error
    except MediaError as error:
        raise error.for_parameter(order.parameter) from error
    except (KeyboardInterrupt, SystemExit, GeneratorExit):  # the process ends, or this coroutine
        raise
    # The fetcher is the application's: whatever else it raises is this one item's failure. Some
    # libraries' own errors are no Exception, and would end the engine's task group.
    except BaseException as error:
        kind = MediaUnavailableError if isinstance(error, ConnectionError) else MediaError
        raise order.error(f"could not be fetched: {type(error).__name__}", kind) from error
    name = type(body).__name__
    if not isinstance(body, bytes | bytearray | memoryview):
        raise order.error(
            f"could not be fetched: media.fetcher returned {name}, not bytes"
        ) from TypeError(name)
    order.check_bytes(memoryview(body).nbytes)
    # A copy of what may still change, made where it holds up nobody.
    return body if isinstance(body, bytes) else await order.run(bytes, body)


def check_image_file(path: Path, config: MediaConfig, *, parameter: str) -> None:
    """Raise MediaError for a file that by its header is no image; nothing is decoded."""
    from PIL import Image  # not at the top: nothing else here needs it

    formats = [name.upper() for name in config.image_formats]
    try:
        Image.open(path, formats=formats).close()
    except OSError as error:
        reason = f"it is not one of {', '.join(formats)}" if error.errno is None else error.strerror
    except Exception as error:  # whatever a reader meets in broken data
        reason = f"its header is corrupt or cut short ({type(error).__name__})"
    else:
        return
    raise MediaError(f"{parameter} is not a usable image: {reason}", parameter=parameter)
