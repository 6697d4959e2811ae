"""Calls from the front to the router and to a replica, and an ASGI application's answer to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Scope

from aioengine.ray_serve.affinity import Affinity

__all__ = ["HttpRequest", "Route", "answer"]


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One HTTP request with its whole body. `headers` are as ASGI has them, in lower case."""

    method: str
    path: str
    query_string: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""

    @property
    def scope(self) -> Scope:
        """The same for an ASGI application, without its body."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "root_path": "",
            "path": self.path,
            "query_string": self.query_string,
            "headers": self.headers,
        }


@dataclass(frozen=True, slots=True)
class Route:
    """Routing hint of a request, and `tried`: the replicas that had it before.

    The router adds to `tried` in the process that sends the request. Replicas have no use for it.
    """

    affinity: Affinity = field(default_factory=Affinity)
    tried: list[str] = field(default_factory=list)


async def answer(
    app: ASGIApp, request: HttpRequest, *, interval_s: float = 0
) -> AsyncGenerator[Message, None]:
    """The messages that the application sends. Closing this generator cancels the application.

    After the first ones, parts of a body that come within `interval_s` are joined.
    """
    sent: list[Message] = []
    news = asyncio.Event()
    bodies = [request.body]

    async def receive() -> Message:
        if not bodies:
            await asyncio.Event().wait()  # a client that leaves closes the generator
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)
        news.set()

    call = asyncio.ensure_future(app(request.scope, receive, send))
    call.add_done_callback(lambda _: news.set())
    try:
        is_over = False
        while not is_over:
            await news.wait()
            news.clear()
            is_over = call.done()
            ready = _joined(sent)
            sent.clear()
            for message in ready:
                yield message
            await asyncio.wait([call], timeout=interval_s)
        call.result()
    finally:
        call.cancel()
        await asyncio.wait([call])


def _joined(messages: Iterable[Message]) -> list[Message]:
    """The same with one part of a body in the place of several."""
    joined: list[Message] = []
    for message in messages:
        if joined and joined[-1]["type"] == message["type"] == "http.response.body":
            begun = joined.pop()
            message = {**message, "body": begun.get("body", b"") + message.get("body", b"")}
        joined.append(message)
    return joined
