"""One HTTP exchange: the work of an answer, which ends when the client leaves, and its events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Send

from aioengine.asgi.error_responses import ApiError, api_error, forget_frames
from aioengine.streams.loop_bridge import run_apart

__all__ = ["EventStream", "JsonAnswer", "LongEvent", "Reply", "attend", "failures_in", "long_json"]

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects a stream makes it none
]
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
MANY = 4096
"""Texts that are joined at once, which holds the GIL."""
DONE = b"data: [DONE]\n\n"


class Reply:
    """A `send` that knows whether the response has begun, and that a client has gone.

    ASGI 2.4 has `send` raise OSError for the latter; here it raises ClientDisconnect.
    """

    def __init__(self, send: Send) -> None:
        self.has_begun = False
        self._send = send

    async def __call__(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError as error:
            raise ClientDisconnect from error
        self.has_begun = True


async def attend(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, and cancel it if the client leaves before it is done. Raises what it raises,
    and ClientDisconnect.

    `receive` is read from here on; the request's body has to be complete.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_client_leaves(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))
        error = ClientDisconnect() if working.cancelled() else working.exception()
    if error is not None:
        raise error


async def _client_leaves(receive: Receive) -> None:
    try:
        message = await receive()
    except Exception:  # a host's own, which knows no more; the work goes on
        message = {"type": "unknown"}
    if message["type"] != "http.disconnect":
        # Some hosts play the body again and again. They will not tell that anybody leaves.
        await asyncio.Event().wait()


@asynccontextmanager
async def failures_in(
    events: EventStream, translate: Callable[[Exception], Exception] = lambda error: error
) -> AsyncIterator[None]:
    """Report an error: once events have begun it is the last of them; before, it is raised."""
    try:
        yield
    except ClientDisconnect:
        raise
    except Exception as error:
        own = translate(error)
        if events.has_begun:
            await events.fail(api_error(own))
            forget_frames(error)
        elif own is error:
            raise
        else:
            raise own from error


class JsonAnswer(JSONResponse):
    """A JSON response of any texts that JSON has, halves of surrogate pairs among them."""

    def render(self, content: Any) -> bytes:
        """See `Response`."""
        return json.dumps(content).encode()


def long_json(value: Any) -> bytes:
    """Write JSON in Python and in pieces, for a thread: faster ways would hold the GIL."""
    texts = json.JSONEncoder().iterencode(value)
    return b"".join(iter(lambda: "".join(islice(texts, MANY)).encode(), b""))


class LongEvent(dict[str, Any]):
    """An event that takes long to write as JSON: a thread does it."""


class EventStream:
    """Server-sent events, which begin with the first of them.

    What goes wrong before it can still have a status of its own. A client that reads slowly makes
    `send` wait, and nobody else.
    """

    def __init__(
        self,
        send: Send,
        headers: list[tuple[bytes, bytes]] | None = None,
        *,
        failure: Callable[[ApiError], Iterable[Any]] = lambda error: (error.body,),
        are_named: bool = False,
    ) -> None:
        """`failure`: makes the last events of a stream that cannot go on. `are_named`: events have
        their `type` as a name, and nothing else ends them."""
        self.has_begun = False
        self._failure = failure
        self._are_named = are_named
        self._send = send
        self._headers = [*HEADERS, *(headers or [])]
        self._turn = asyncio.Lock()

    async def send(self, *events: Any) -> None:
        """Send some JSON values, one event each."""
        written = [
            await run_apart(self._event, event)
            if isinstance(event, LongEvent)
            else self._event(event)
            for event in events
        ]
        if written:
            await self._write(b"".join(written))

    async def done(self) -> None:
        """End as OpenAI's streams do."""
        if not self._are_named:
            await self._write(DONE)
        await self._end()

    async def fail(self, error: ApiError) -> None:
        """End a stream that has begun with an error."""
        await self.send(*self._failure(error))
        await self._end()

    async def _write(self, data: bytes) -> None:
        async with self._turn:
            if not self.has_begun:
                start = {"type": "http.response.start", "status": 200, "headers": self._headers}
                await self._send(start)
                self.has_begun = True
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _event(self, value: Any) -> bytes:
        if isinstance(value, LongEvent):  # in Python, which lets go of the GIL
            text = "".join(ENCODER.iterencode(value))
        else:
            text = ENCODER.encode(value)
        name = f"event: {value['type']}\n" if self._are_named else ""
        # Half of a surrogate pair, which no UTF-8 has, as JSON escapes it.
        return f"{name}data: {text}\n\n".encode(errors="backslashreplace")
