"""Request bodies: bounded in bytes and in time, and parsed without holding the loop or the GIL.

A body may be one image of many megabytes in a JSON string, and `json.loads` keeps the GIL for 3 ms
a megabyte, in whatever thread it runs. So long strings, as base64 is, are cut out first by looking
for their ends, and only what is left is parsed. A large body is kept once: received into pages of
its own, which go back to the system as soon as its strings are read.
"""

from __future__ import annotations

import asyncio
import binascii
import codecs
import json
import mmap
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from math import isfinite
from typing import Any, TypeVar
from uuid import uuid4

from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from aioengine.asgi.error_responses import ApiError, api_error
from aioengine.errors import OverloadedError
from aioengine.streams.loop_bridge import run_apart

__all__ = ["BodyBudget", "BoundedBody", "parse_object", "read_object"]

LONG = 1 << 16
"""Bytes of a string that is cut out; of a body that is not read on the loop."""
PIECE = 1 << 18
"""Bytes of one that are decoded at once."""
PAUSE_S = 0.0005
"""Between pieces, about as long as one takes: else a loop waits 5 ms for the GIL each time."""
MAX_REST = 1 << 20
"""Bytes of a body without its long strings: 3 ms of parsing for text, 20 ms for token ids."""
MAX_CONTAINERS = 1 << 16
"""Brackets and braces that open in it, also in its texts: 13 ms, were they all empty lists."""
MAX_DEPTH = 128
"""Of lists and objects in each other: they are walked by functions that call themselves."""
CONTAINERS = (dict, list)
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
INVALID = "invalid_json"
ESCAPES = {rb"\/": b"/"} | {
    rb"\u00" + code % ord(letter): letter
    for letter in (b"/", b"+", b"=")
    for code in (b"%02x", b"%02X")
}
"""What some writers of JSON make of base64's own letters."""
MEDIA_KEY = re.compile(
    rb'"(url|data|image|audio|video|(image|audio|video)_url)"[ \t\r\n]*:[ \t\r\n]*$'
)
DATA_URL = re.compile(rb"data:[^,]*;base64,", re.IGNORECASE)
MEDIA_FIELDS = ("messages", "input")
"""The fields that have media."""
MAX_KEY = MAX_DATA_HEAD = 256

Read = TypeVar("Read")


class BodyBudget:
    """Bytes of all bodies under way in one service: received, or announced by their length.

    Small bodies (of `LONG` bytes at most) are not counted, so that large ones never keep them out.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.parsing = asyncio.Lock()
        """Held for a large body that is parsed, which takes as much memory again."""
        self.peak_bytes = 0
        """The most there were since somebody last set it to 0."""

    def take(self, num_bytes: int) -> None:
        """Count so many bytes more. Raises ApiError where there is no room for them."""
        if self.num_bytes + num_bytes > self.max_bytes:
            what = "the bodies of all requests under way have too many bytes together; try later"
            raise api_error(OverloadedError(what))
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def give_back(self, num_bytes: int) -> None:
        """Count so many bytes less."""
        self.num_bytes -= num_bytes


class BoundedBody:
    """A `receive` that raises ApiError for a body of too many bytes, or one that takes too long.

    Once the body is complete it only tells when the client leaves. What it has taken of a budget is
    given back by `close()`.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        max_bytes: int,
        timeout_s: float,
        budget: BodyBudget | None = None,
    ) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self.budget = budget or BodyBudget(max_bytes)
        self.num_announced = 0
        """Its length, where the client gives one."""
        self._num_bytes = 0
        self._num_taken = 0
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._is_complete = False
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and len(value) < 20:
                self.num_announced = int(value)

    async def __call__(self) -> Message:
        if self._is_complete:
            return await self._receive()
        self.admit()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, "the request body did not arrive in time", code="timeout") from None
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self.admit()
            self._is_complete = not message.get("more_body", False)
        return message

    def admit(self) -> None:
        """Let in a body of the length that the client gives, or that has come.

        Raises ApiError for one that is too long, or for which there is no room.
        """
        num_bytes = max(self.num_announced, self._num_bytes)
        if num_bytes > self._max_bytes:
            raise _too_large(f"{self._max_bytes} bytes; give large media as URLs")
        wanted = num_bytes - LONG - self._num_taken
        if wanted > 0:
            self.budget.take(wanted)
            self._num_taken += wanted

    def close(self) -> None:
        """Give back what it has taken of the budget. Idempotent."""
        self.budget.give_back(self._num_taken)
        self._num_taken = 0


async def read_object(receive: BoundedBody, read: Callable[[dict[str, Any]], Read]) -> Read:
    """Apply `read` to the JSON object that is the whole body; a large one in a thread.

    Base64 where media stand is `bytes` in a large one. Raises ApiError, ClientDisconnect, and what
    `read` raises.
    """
    receive.admit()
    pages = _Pages(receive.num_announced)
    async for data in Request({"type": "http"}, receive).stream():
        pages.add(data)
    if pages.num_bytes <= LONG:
        return read(parse_object(memoryview(pages.head)))
    async with receive.budget.parsing:
        return await run_apart(lambda: read(parse_object(pages.take(), decodes_media=True)))


class _Pages:
    """A body, which grows in memory that is nobody else's once it is large."""

    def __init__(self, num_announced: int) -> None:
        self.num_bytes = 0
        self.head = bytearray()
        """All of a body of `LONG` bytes at most, for which it would take longer to map pages."""
        self._num_announced = num_announced
        self._pages: mmap.mmap | None = None

    def add(self, data: bytes) -> None:
        """Add bytes at the end."""
        end = self.num_bytes + len(data)
        if end <= LONG:
            self.head += data
        else:
            self._with_room(end)[self.num_bytes : end] = data
        self.num_bytes = end

    def _with_room(self, end: int) -> mmap.mmap:
        if self._pages is None:
            self._pages = _map(max(self._num_announced, end))
            self._pages[: self.num_bytes] = bytes(self.head)
        elif end > len(self._pages):  # its length was not announced
            size = max(end, 2 * len(self._pages))
            try:
                self._pages.resize(size)
            except SystemError:  # no such call on this system
                grown = _map(size)
                grown[: self.num_bytes] = self._pages[: self.num_bytes]
                self._pages = grown
        return self._pages

    def take(self) -> memoryview:
        """Hand over a large body: the only reference to it is the caller's from now on."""
        assert self._pages is not None
        view = memoryview(self._pages)[: self.num_bytes]
        self._pages = None
        return view


def _map(size: int) -> mmap.mmap:
    """Memory that is taken page by page, as it is written to."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def parse_object(body: bytes | memoryview, *, decodes_media: bool = False) -> dict[str, Any]:
    """The JSON object that `body` is. Raises ApiError.

    `decodes_media`: long base64, in `data:` URLs or bare, becomes bytes where media stand, and the
    memory of `body` may be given back.
    """
    mark = ""
    cut: list[str | bytes] = []
    try:
        if len(body) <= LONG:
            rest = bytes(body)
        else:
            mark = f"\0{uuid4().hex} "  # not to be guessed, and known to this body alone
            rest, cut = _cut(body, mark, decodes_media)
        parsed = json.loads(rest, parse_float=_read_float, parse_constant=_refuse_constant)
        if not isinstance(parsed, dict):
            raise ApiError(400, "the request body must be a JSON object", code=INVALID)
        if _may_be_deep(rest):
            _check_depth(parsed)
        return _put_all_back(parsed, mark, cut) if cut else parsed
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        raise ApiError(400, "the request body is not valid JSON", code=INVALID) from None


def _cut(
    body: bytes | memoryview, mark: str, decodes_media: bool
) -> tuple[bytes, list[str | bytes]]:
    """The body with a mark for each long string, and these strings."""
    found = _Long(memoryview(body), decodes_media)
    kept: list[bytes] = []
    cut: list[str | bytes] = []
    start = position = num_kept = 0
    while (opening := found.find(b'"', position)) >= 0:
        closing = found.closing(opening)
        if closing < 0:
            break
        position = closing + 1
        if closing - opening - 1 > LONG:
            head = bytes(body[start : opening + 1])  # before its pages go
            text = found.text(opening + 1, closing)
            if text is not None:
                kept += head, json.dumps(mark + str(len(cut))).encode()[1:-1]
                cut.append(text)
                num_kept += opening - start
                start = closing
        if num_kept + position - start > MAX_REST:
            break
    if num_kept + len(body) - start > MAX_REST:
        raise _too_large(f"{MAX_REST} bytes beside its media")
    rest = b"".join([*kept, body[start:]])
    if rest.count(b"[") + rest.count(b"{") > MAX_CONTAINERS:
        raise _too_large(f"{MAX_CONTAINERS} lists and objects beside its media")
    return rest, cut


def _too_large(most: str) -> ApiError:
    return ApiError(413, f"the request body has more than {most}", code="request_too_large")


class _Long:
    """A large body, read through windows: a search through all of it would hold the GIL."""

    def __init__(self, body: memoryview, decodes_media: bool) -> None:
        self._body = body
        self._decodes_media = decodes_media
        self._window = b""
        self._begin = 0
        """Of the window, in the body."""

    def find(self, letter: bytes, start: int) -> int:
        """Find the first such letter from `start` on; -1: there is none."""
        while start < len(self._body):
            if not self._begin <= start < self._begin + len(self._window):
                self._begin, self._window = start, self._read(start, start + PIECE)
            place = self._window.find(letter, start - self._begin)
            if place >= 0:
                return self._begin + place
            start = self._begin + len(self._window)
        return -1

    def closing(self, opening: int) -> int:
        """Find the quote that ends the string begun by the one at `opening`; -1: there is none."""
        body, start = self._body, opening + 1
        while (closing := self.find(b'"', start)) >= 0:
            if body[closing - 1] != ord("\\"):
                return closing
            before = bytes(body[max(start, closing - LONG) : closing])
            num_backslashes = len(before) - len(before.rstrip(b"\\"))
            if num_backslashes == LONG:
                return -1  # no text is like that
            if num_backslashes % 2 == 0:
                return closing
            start = closing + 1
        return -1

    def text(self, start: int, end: int) -> str | bytes | None:
        """Read the string between two quotes; None if it has other escapes than those of base64.

        Raises ValueError for what is no UTF-8.
        """
        data = self._media(start, end) if self._decodes_media else None
        if data is not None:
            return data
        decoder = codecs.getincrementaldecoder("utf-8")()
        texts = []
        for piece in self._pieces(start, end):
            if b"\\" in piece:
                return None
            texts.append(decoder.decode(piece))
        texts.append(decoder.decode(b"", final=True))
        self._forget(start, end)
        return "".join(texts)

    def _media(self, start: int, end: int) -> bytes | None:
        """Decode a media item's base64; None for anything else."""
        key = MEDIA_KEY.search(bytes(self._body[max(0, start - 1 - MAX_KEY) : start - 1]))
        head = DATA_URL.match(bytes(self._body[start : start + MAX_DATA_HEAD]))
        if key is None or (head is None) != (key[1] == b"data"):
            return None
        decoded = [b""]
        rest = b""
        try:
            for piece in self._pieces(start if head is None else start + head.end(), end):
                data = rest + piece
                whole = len(data) // 4 * 4
                if whole and len(decoded[-1]) % 3:
                    return None  # padding before the end
                decoded.append(binascii.a2b_base64(data[:whole], strict_mode=True))
                rest = data[whole:]
        except ValueError:
            return None
        if rest:
            return None
        self._forget(start, end)
        return b"".join(decoded)  # which lets go of the GIL

    def _pieces(self, start: int, end: int) -> Iterator[bytes]:
        """Read the string without its escapes, in pieces that cut none of these."""
        while start < end:
            piece = self._read(start, min(start + PIECE, end))
            cut = piece.find(b"\\", len(piece) - 5) if start + len(piece) < end else -1
            piece = piece[:cut] if cut > 0 else piece
            start += len(piece)
            if b"\\" in piece:
                for escape, letter in ESCAPES.items():
                    piece = piece.replace(escape, letter)
            yield piece

    def _read(self, start: int, end: int) -> bytes:
        time.sleep(PAUSE_S)
        return bytes(self._body[start:end])

    def _forget(self, start: int, end: int) -> None:
        """Give the memory of what is read back to the system."""
        pages = self._body.obj
        if sys.platform == "win32" or not isinstance(pages, mmap.mmap):
            return
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (end - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if size > 0:
            with suppress(OSError):
                pages.madvise(mmap.MADV_DONTNEED, first, size)


def _put_all_back(parsed: dict[str, Any], mark: str, cut: list[str | bytes]) -> dict[str, Any]:
    texts = [text if isinstance(text, str) else None for text in cut]
    return {
        _put_back(name, mark, texts): _put_back(value, mark, cut if name in MEDIA_FIELDS else texts)
        for name, value in parsed.items()
    }


def _put_back(value: Any, mark: str, cut: Sequence[str | bytes | None]) -> Any:
    if isinstance(value, dict):
        return {
            _put_back(key, mark, cut): _put_back(child, mark, cut) for key, child in value.items()
        }
    if isinstance(value, list):
        return [_put_back(child, mark, cut) for child in value]
    if isinstance(value, str) and value.startswith(mark):
        found = cut[int(value[len(mark) :])]
        if found is None:
            fields = " and ".join(MEDIA_FIELDS)
            raise ApiError(400, f"only {fields} may have media in base64", code="invalid_value")
        return found
    return value


def _read_float(text: str) -> float:
    number = float(text)
    if not isfinite(number):  # it would be `Infinity` where an answer repeats it
        raise ApiError(400, "the request body has a number that no double holds", code=INVALID)
    return number


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _may_be_deep(text: bytes) -> bool:
    """Return whether it may have more than MAX_DEPTH of them, which takes a walk to know."""
    marks = text.translate(None, NO_BRACKETS)
    for _ in range(MAX_DEPTH // 2):
        if len(marks) <= MAX_DEPTH:  # a pair each
            return False
        marks = marks.replace(b"{}", b"").replace(b"[]", b"")
    return True


def _check_depth(parsed: dict[str, Any]) -> None:
    level: list[Any] = [parsed]
    for _ in range(MAX_DEPTH):
        children = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for each in chain.from_iterable(children) if isinstance(each, CONTAINERS)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ApiError:
    message = f"the request body has lists and objects more than {MAX_DEPTH} deep"
    return ApiError(400, message, code=INVALID)
