"""Request bodies: bounded in bytes and in time, and parsed without holding the loop or the GIL.

A body may be one picture of many megabytes in a JSON string, and `json.loads` keeps the GIL for
3 ms a megabyte, in whatever thread it runs. So long strings, as base64 is, are cut out first by
looking for their ends, and only what is left is parsed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar
from uuid import uuid4

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from aioengine.asgi.faults import ApiError
from aioengine.streams.bridge import run_apart

__all__ = ["BoundedBody", "parse_object", "read_object"]

LONG = 1 << 16
"""Bytes of a string that is cut out; of a body that is not read on the loop."""
PIECE = 1 << 20
"""Bytes of one that are decoded at once."""
MAX_REST = 1 << 20
"""Bytes of a body without its long strings: 3 ms of parsing for text, 20 ms for token ids."""
MAX_CONTAINERS = 1 << 16
"""Brackets and braces that open in it, also in its texts: 13 ms, were they all empty lists."""
ESCAPES = (
    (b"\\/", b"/"),
    (b"\\u002f", b"/"),
    (b"\\u002F", b"/"),
    (b"\\u002b", b"+"),
    (b"\\u002B", b"+"),
    (b"\\u003d", b"="),
    (b"\\u003D", b"="),
)
"""What some writers of JSON make of base64's own letters."""

Read = TypeVar("Read")


class BoundedBody:
    """A `receive` that raises ApiError for a body of too many bytes, or one that takes too long.

    Once the body is complete it only tells when the client leaves.
    """

    def __init__(self, scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._is_complete = False
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and len(value) < 20:
                self._check(int(value))

    async def __call__(self) -> Message:
        if self._is_complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, "the request body did not arrive in time", code="timeout") from None
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._check(self._num_bytes)
            self._is_complete = not message.get("more_body", False)
        return message

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise ApiError(
                413,
                f"the request body has more than {self._max_bytes} bytes; give large media as URLs",
                code="request_too_large",
            )


async def read_object(receive: Receive, read: Callable[[dict[str, Any]], Read]) -> Read:
    """What `read` makes of the JSON object that is the whole body; a large one is read in a thread.

    Raises ApiError, ClientDisconnect, and what `read` raises.
    """
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    if sum(map(len, pieces)) <= LONG:
        return read(parse_object(b"".join(pieces)))
    return await run_apart(lambda: read(parse_object(b"".join(pieces))))


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object that `body` is. Raises ApiError."""
    mark = f"\0{uuid4().hex} "  # not to be guessed, and known to this body alone
    try:
        rest, cut = _cut(body, mark)
        parsed = json.loads(rest, parse_constant=_refuse_constant)
        if cut:
            parsed = _put_back(parsed, mark, cut)
    except (ValueError, RecursionError):
        raise ApiError(400, "the request body is not valid JSON", code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise ApiError(400, "the request body must be a JSON object", code="invalid_json")
    return parsed


def _cut(body: bytes, mark: str) -> tuple[bytes, list[str]]:
    """The body with a mark for each long string, and these strings."""
    if len(body) <= LONG:
        return body, []
    kept: list[bytes] = []
    cut: list[str] = []
    start = position = num_kept = 0
    while (opening := body.find(b'"', position)) >= 0:
        closing = _closing(body, opening)
        if closing < 0:
            break
        position = closing + 1
        text = _long_text(body, opening + 1, closing)
        if text is not None:
            kept += body[start : opening + 1], json.dumps(mark + str(len(cut))).encode()[1:-1]
            cut.append(text)
            num_kept += opening - start
            start = closing
        if num_kept + position - start > MAX_REST:
            break
    kept.append(body[start:])
    if num_kept + len(kept[-1]) > MAX_REST:
        raise _too_much(f"{MAX_REST} bytes")
    rest = b"".join(kept)
    if rest.count(b"[") + rest.count(b"{") > MAX_CONTAINERS:
        raise _too_much(f"{MAX_CONTAINERS} lists and objects")
    return rest, cut


def _too_much(what: str) -> ApiError:
    message = f"the request body has more than {what} beside its media"
    return ApiError(413, message, code="request_too_large")


def _closing(body: bytes, opening: int) -> int:
    """Where the string that begins with the quote at `opening` has its other quote; -1: nowhere."""
    start = opening + 1
    while (closing := body.find(b'"', start)) >= 0:
        if body[closing - 1] != ord("\\"):
            return closing
        before = body[max(start, closing - LONG) : closing]
        num_backslashes = len(before) - len(before.rstrip(b"\\"))
        if num_backslashes == LONG:
            return -1  # no text is like that
        if num_backslashes % 2 == 0:
            return closing
        start = closing + 1
    return -1


def _long_text(body: bytes, start: int, end: int) -> str | None:
    """The string between two quotes, if it is long and has no escapes but those of base64."""
    if end - start <= LONG:
        return None
    has_escapes = body.find(b"\\", start, end) >= 0
    if has_escapes:
        body = body[start:end]
        for escape, letter in ESCAPES:
            body = body.replace(escape, letter)
        if b"\\" in body:
            return None
        start, end = 0, len(body)
    view = memoryview(body)[start:end]
    starts = range(0, len(view), PIECE)
    try:
        return "".join(str(view[first : first + PIECE], "ascii") for first in starts)
    except UnicodeDecodeError:
        return str(view, "utf-8")


def _put_back(value: Any, mark: str, cut: list[str]) -> Any:
    if isinstance(value, dict):
        return {
            _put_back(key, mark, cut): _put_back(child, mark, cut) for key, child in value.items()
        }
    if isinstance(value, list):
        return [_put_back(child, mark, cut) for child in value]
    if isinstance(value, str) and value.startswith(mark):
        return cut[int(value[len(mark) :])]
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
