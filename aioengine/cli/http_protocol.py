"""uvicorn's HTTP/1.1 protocol with bounds on request heads, on their time, and on connections.

uvicorn's own keeps whatever a client calls a header, for as long as that takes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from aioengine.asgi.error_responses import error_text, protocol_error

try:
    from resource import RLIMIT_NOFILE, getrlimit
except ImportError:  # Windows
    getrlimit = None  # type: ignore[assignment]

__all__ = ["BoundedHttpProtocol", "HttpBounds", "protocol_factory"]

DROP_EVERY_S = 0.005
"""Between reads of what is ignored."""
FRAMING = (b"content-length", b"transfer-encoding")
"""Headers that say where a body ends."""
PIECES = 4
"""Of `max_head_bytes`: so much is parsed at a time, and a head may begin anywhere in it."""


def _max_connections() -> int:
    """Allow 1,024, or half of the files that the process may have open."""
    most = -1 if getrlimit is None else getrlimit(RLIMIT_NOFILE)[0]
    return 1024 if most < 0 else min(1024, most // 2)  # below 0: any number


@dataclass(frozen=True, kw_only=True)
class HttpBounds:
    """Limits of one server's connections."""

    max_head_bytes: int = 1 << 16
    """Request line and headers of one request; as much again for a chunked body's trailers."""
    head_timeout_s: float = 10.0
    """For a complete head, from the connection's opening or the next request's first byte."""
    max_connections: int = field(default_factory=_max_connections)
    """Open at once. At the bound, the one that has waited longest for a head makes room; else the
    one that has not read its answer for longest."""
    linger_s: float = 2.0
    """For a client that is still sending to read its answer, before the connection is closed."""


class _Connections:
    """The open connections of one server.

    `waiting`: those without a complete head; `stalled`: those whose answers nobody reads, beyond
    what the system takes of them. The one that has been so for longest comes first.
    """

    def __init__(self) -> None:
        self.open: set[BoundedHttpProtocol] = set()
        self.waiting: dict[BoundedHttpProtocol, None] = {}
        self.stalled: dict[BoundedHttpProtocol, None] = {}

    def next_to_go(self) -> BoundedHttpProtocol | None:
        """Name the connection that makes room for another; None: all have work under way."""
        return next(iter(self.waiting or self.stalled), None)


def protocol_factory(bounds: HttpBounds) -> Any:
    """A factory of protocols that share `bounds`, for `uvicorn.Config(http=...)`."""
    return partial(BoundedHttpProtocol, bounds, _Connections())


class _Transport:
    """A transport whose end is the protocol's to decide."""

    def __init__(self, transport: asyncio.Transport, **own: Callable[[], object]) -> None:
        self._transport = transport
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, bounds: HttpBounds, connections: _Connections, **options: Any) -> None:
        super().__init__(**options)
        self._bounds = bounds
        self._connections = connections
        self._socket: asyncio.Transport = None  # type: ignore[assignment]  # set when connected
        self._ignores_input = False
        """The last answer is under way."""
        self._lingers = False
        """The last answer is written, and the client may be still sending."""
        self._is_head = True
        """The head of the next request is incomplete."""
        self._has_begun = False
        """The parser has seen a part of that head."""
        self._has_advanced = False
        self._num_bytes = 0
        """Parsed since a head or a request was complete, or a part of a body came."""
        self._unread: bytes | memoryview = b""
        self._timer: asyncio.TimerHandle | None = None
        """To a complete head, or to the end of lingering."""

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, in another one's place where there are too many."""
        self._socket = transport
        proxy: Any = _Transport(transport, close=self._close, is_closing=self._is_closing)
        super().connection_made(proxy)
        connections, most = self._connections, self._bounds.max_connections
        while len(connections.open) >= most and (oldest := connections.next_to_go()) is not None:
            oldest.drop()
        is_full = len(connections.open) >= most
        connections.open.add(self)
        connections.waiting[self] = None
        if is_full:
            self._refuse(503, "all connections are in use; try later", "overloaded")
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._leave()
        super().connection_lost(exc)

    def drop(self) -> None:
        """End the connection at once, without an answer."""
        self._leave()
        self._socket.abort()

    def pause_writing(self) -> None:
        """The client does not read what is written."""
        self._connections.stalled[self] = None
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client has read."""
        self._connections.stalled.pop(self, None)
        super().resume_writing()

    def shutdown(self) -> None:
        """End the connection as the server stops, after the answer that is under way.

        A request whose body is incomplete comes too late, and may take long.
        """
        cycle = self.cycle
        if cycle is None or self.pipeline or not cycle.more_body or cycle.response_started:
            super().shutdown()
        else:
            self._refuse(503, "the server is stopping")

    def _leave(self) -> None:
        self._stop_reading()
        self._connections.open.discard(self)
        self._connections.waiting.pop(self, None)
        self._connections.stalled.pop(self, None)

    def _is_closing(self) -> bool:
        return self._lingers or self._socket.is_closing()

    def _close(self) -> None:
        """Close the connection, once a client that is still sending has had time to read.

        Input that is unread when a socket is closed takes the last answer with it.
        """
        if self._is_closing():
            return
        is_sending = self._ignores_input or (self.cycle is not None and self.cycle.more_body)
        if not is_sending or not self._socket.can_write_eof():
            self._socket.close()
            return
        self._stop_reading()
        self._lingers = True
        self._connections.waiting[self] = None
        self._socket.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(self._bounds.linger_s, self._socket.abort)

    def _stop_reading(self) -> None:
        self._ignores_input = True
        self._unread = b""
        self._stop_timer()
        self._unset_keepalive_if_required()

    # ---- what comes in

    def data_received(self, data: bytes) -> None:
        """Parse it, piece by piece; what follows a request that has to wait, waits too."""
        if self._ignores_input:
            # Not at full speed: a loop reads from one socket many times before it goes on.
            self._socket.pause_reading()
            self.loop.call_later(DROP_EVERY_S, self._drop_more)
            return
        self._unread = b"".join((self._unread, data)) if self._unread else data
        self._parse()

    def _drop_more(self) -> None:
        if not self._socket.is_closing():
            self._socket.resume_reading()

    def _parse(self) -> None:
        while self._unread and not self.pipeline and not self._is_closing():
            if self._is_head and self._timer is None:
                self._start_timer()
            most = self._bounds.max_head_bytes
            unread, size = memoryview(self._unread), min(most // PIECES, most - self._num_bytes)
            piece, self._unread = unread[:size], unread[size:]
            self._has_advanced = False
            self._feed(piece)
            if not self._ignores_input:
                self._count(len(piece))

    def _feed(self, piece: bytes | memoryview) -> None:
        self._unset_keepalive_if_required()
        while piece:
            try:
                self.parser.feed_data(piece)
                return
            except HttpParserUpgrade as upgrade:
                piece = self._head_without_upgrade() + piece[upgrade.args[0] :]
            except HttpParserError:
                self._refuse(400, "Invalid HTTP request received.")
                return

    def _head_without_upgrade(self) -> bytes:
        """Have a new parser read what follows, and return a head for it that ends as this one did.

        A server that does not speak what the client asks for goes on in HTTP/1.1. The old parser
        takes what follows (the JDK's HttpClient asks for HTTP/2 in every first request) for another
        protocol.
        """
        self.parser = HttpRequestParser(_BehindHead(self))
        framing = [b"%s: %s\r\n" % each for each in self.headers if each[0] in FRAMING]
        return b"".join((b"POST / HTTP/1.1\r\n", *framing, b"\r\n"))

    def _count(self, num_bytes: int) -> None:
        """Count a piece; if there was progress in it, what follows that may be all of it."""
        if self._is_head and not self._has_begun:
            return  # nothing, or empty lines between requests, which are not kept
        if self._has_advanced:
            self._num_bytes = 0
        if self._is_head or not self._has_advanced:
            self._num_bytes += num_bytes
        if self._num_bytes >= self._bounds.max_head_bytes:
            self._refuse(431, f"the head of the request has {self._num_bytes} bytes or more")

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._has_begun = True
        if self._timer is None:  # behind another request in one piece
            self._start_timer()

    def on_headers_complete(self) -> None:
        """A head is complete."""
        _take_authority(self.url, self.headers)
        super().on_headers_complete()
        self._is_head, self._has_advanced = False, True
        self._stop_timer()
        self._connections.waiting.pop(self, None)
        _close_where_body_is_left(self.cycle)

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        super().on_body(body)
        self._has_advanced = True

    def on_message_complete(self) -> None:
        """A request is complete; a head that asks for another protocol is only said to be."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._is_head, self._has_begun, self._has_advanced = True, False, True
        self._num_bytes = 0

    def on_response_complete(self) -> None:
        """An answer is complete: go on with what has waited, or wait for the next request."""
        super().on_response_complete()
        if self._is_closing():
            return
        if self.cycle.response_complete:
            if self.cycle.more_body:
                self._close()  # what is left of the body is not worth reading
                return
            self._connections.waiting[self] = None
        self._parse()
        if self._unread or self.pipeline:
            self.flow.pause_reading()

    # ---- what is refused

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._bounds.head_timeout_s, self._is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_late(self) -> None:
        self._timer = None
        if self._unread or self.pipeline:  # it is not the client that keeps it waiting
            self._start_timer()
        elif self._has_begun:
            self._refuse(408, "the head of the request did not arrive in time")
        elif self.cycle is None or self.cycle.response_complete:
            self.drop()

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        """Answer, and close the connection; where an answer is under way, close it after that.

        `code`: of the error, where it is not the status's own.
        """
        if self._is_closing():
            return
        self._stop_reading()
        cycle, path = self.cycle, ""
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or not cycle.more_body:
                cycle.keep_alive = False
                return
            cycle.disconnected = True  # the rest of its body will not come
            cycle.message_event.set()
            path = cycle.scope["path"]
        self.logger.info("%s - refused with %d: %s", self.client, status, message)
        error = protocol_error(status, message, code)
        body = error_text(error, path).encode()
        headers = (
            *self.server_state.default_headers,
            *((name.encode(), value.encode()) for name, value in error.headers.items()),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        )
        lines = [STATUS_LINE[status], *(b"%s: %s\r\n" % each for each in headers), b"\r\n", body]
        self._socket.write(b"".join(lines))
        self._close()


def _take_authority(target: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Put the host of an absolute target in the place of the Host header, as RFC 9112 has it."""
    if target.startswith((b"/", b"*")):
        return
    authority = re.match(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)", target)
    if authority is not None:
        headers[:] = [each for each in headers if each[0] != b"host"]
        headers.append((b"host", authority[1]))


def _close_where_body_is_left(cycle: RequestResponseCycle) -> None:
    """Have an answer that begins before its request is complete say that it is the last."""
    send = cycle.send

    async def send_last(message: Any) -> None:
        if cycle.more_body and not cycle.response_started:
            cycle.keep_alive = False
        await send(message)

    cycle.send = send_last  # type: ignore[method-assign]


class _BehindHead:
    """Callbacks of a parser once a first head is complete."""

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        self._protocol = protocol
        self._is_head = True

    def on_headers_complete(self) -> None:
        if not self._is_head:
            self._protocol.on_headers_complete()
        self._is_head = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        heard = getattr(self._protocol, name)

        def hear(*args: Any) -> None:
            if not self._is_head:
                heard(*args)

        return hear
