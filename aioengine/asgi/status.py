"""A page at `/` that shows what the engine is doing, live over server-sent events.

Nothing of a payload is shown. The figures are shaped only while somebody looks, once a tick for
all who do.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from aioengine.asgi.status_model import StatusBoard
from aioengine.engine.async_engine import AsyncEngine
from aioengine.errors import EngineError
from aioengine.instruments import TraceRecorder
from aioengine.metrics.loop_lag import LoopLag
from aioengine.streams.loop_bridge import run_apart
from aioengine.types import EngineState, EngineStatistics

__all__ = ["StatusPage"]

PAGE = Path(__file__).with_name("status.html")
TICK_S = 0.25
MAX_SPANS_PER_EVENT = 400
MAX_BACKLOG_SPANS = 2000
MAX_RESPONSE_S = 5.0
"""A server that stops waits for its responses, and ASGI has no word to tell them. So none is long,
and the browser comes back by itself."""
LASTING = {EngineState.NEW, EngineState.STARTING, EngineState.RUNNING}
"""In any other state somebody may be stopping the server: a response is one event."""
RETRY_MS, IDLE_RETRY_MS = 200, 1000
"""After which the browser comes back, also from a response of one event."""
EVENT_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class StatusPage:
    """The routes of one engine's status page. Make it before the engine starts, to miss nothing."""

    def __init__(self, engine: AsyncEngine, model: str = "") -> None:
        """`model`: the name to show; by default the hub id, or the folder's name."""
        self._board = StatusBoard(model or engine.model_name, time.perf_counter())
        self._feed = _Feed(engine, self._board)
        self._page = PAGE.read_text("utf-8")
        self._policy = _content_security_policy(self._page)
        engine.instruments.follow(self._board.note_event, self._board.note_span)

    def routes(self) -> list[Route]:
        """The page, its feed, and the latest spans as a Chrome trace."""
        return [
            Route("/", self._show),
            Route("/status/events", self._events),
            Route("/status/trace", self._trace),
        ]

    async def _show(self, _request: Request) -> Response:
        return HTMLResponse(
            self._page,
            headers={
                "Content-Security-Policy": self._policy,
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
                "Cache-Control": "no-cache",
            },
        )

    async def _events(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(headers=EVENT_HEADERS, media_type=_EventStream.media_type)
        return _EventStream(self._feed, _last_seen(request))

    async def _trace(self, _request: Request) -> Response:
        spans = TraceRecorder()
        spans.spans.extend(self._board.recorder.spans)
        return Response(
            await run_apart(_trace_json, spans),
            media_type="application/json",
            headers={
                "Content-Disposition": 'attachment; filename="aioengine-trace.json"',
                "X-Content-Type-Options": "nosniff",
                "Cache-Control": "no-store",
            },
        )


@dataclass(frozen=True, slots=True)
class _Tick:
    """One event, the same for all viewers, with the spans numbered [first, end)."""

    first: int
    end: int
    data: bytes
    is_last: bool


class _Feed:
    """Ticks, for as long as there are viewers."""

    def __init__(self, engine: AsyncEngine, board: StatusBoard) -> None:
        self._engine = engine
        self._board = board
        self._num_viewers = 0
        self._ticking: asyncio.Task[None] | None = None
        self._tick: _Tick | None = None
        self._changed = asyncio.Event()
        self._lag = LoopLag(self._note_lag)

    @contextmanager
    def viewer(self) -> Iterator[None]:
        """Somebody looks."""
        self._num_viewers += 1
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._run(), name="aioengine-status")
            self._lag.begin()
        try:
            yield
        finally:
            self._num_viewers -= 1
            if not self._num_viewers:
                self._ticking.cancel()
                self._ticking = self._tick = None

    async def events(self, seen: int) -> AsyncIterator[bytes]:
        """Yield updates for a viewer who has the spans before number `seen`. A slow one skips
        ticks."""
        clock = asyncio.get_running_loop().time
        end = clock() + MAX_RESPONSE_S
        tick = self._tick or await self._next()
        while True:
            oldest = max(seen, tick.first - MAX_BACKLOG_SPANS)
            for first in range(oldest, tick.first, MAX_SPANS_PER_EVENT):
                yield self._backlog(first, min(first + MAX_SPANS_PER_EVENT, tick.first))
                await asyncio.sleep(0)
            yield tick.data
            if tick.is_last or clock() >= end:
                return
            seen = tick.end
            tick = await self._next()

    async def _run(self) -> None:
        while True:
            self._publish()
            await asyncio.sleep(TICK_S)

    def _note_lag(self, seconds: float) -> bool:
        self._board.note_loop_lag(time.perf_counter(), seconds)
        return self._num_viewers > 0

    def _publish(self) -> None:
        state, now = self._engine.state, time.perf_counter()
        # Of a flood of spans the tick has the last; who wants the others gets them as backlog.
        end = self._board.num_spans
        first = max(self._tick.end if self._tick else end, end - MAX_SPANS_PER_EVENT)
        is_last = state not in LASTING
        status = self._board.snapshot(now, state, self._statistics())
        message = {"now_ms": self._board.clock(now), "status": status}
        data = _event(
            message | self._board.spans(first, end), end, IDLE_RETRY_MS if is_last else RETRY_MS
        )
        self._tick = _Tick(first, end, data, is_last)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _next(self) -> _Tick:
        await self._changed.wait()
        assert self._tick is not None
        return self._tick

    def _backlog(self, first: int, end: int) -> bytes:
        message = {"now_ms": self._board.clock(time.perf_counter())}
        return _event(message | self._board.spans(first, end), end, RETRY_MS)

    def _statistics(self) -> EngineStatistics | None:
        try:
            return self._engine.statistics()
        except EngineError:  # it has not started yet
            return None


class _EventStream(StreamingResponse):
    """Counts its viewer for as long as the server sends, however that ends."""

    media_type = "text/event-stream"

    def __init__(self, feed: _Feed, seen: int) -> None:
        super().__init__(feed.events(seen), headers=EVENT_HEADERS)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.viewer():
            await super().__call__(scope, receive, send)


def _event(message: dict[str, object], number: int, retry_ms: int) -> bytes:
    text = json.dumps(message, separators=(",", ":"), allow_nan=False)
    return f"retry: {retry_ms}\nid: {number}\ndata: {text}\n\n".encode()


def _last_seen(request: Request) -> int:
    """The number of spans that a viewer has who comes back."""
    text = request.headers.get("last-event-id", "")
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else 0


def _content_security_policy(page: str) -> str:
    """Nothing but the page's own style and script, and requests to where it came from."""
    style, script = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for tag in ("style", "script")
        for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    )
    return (
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def _trace_json(recorder: TraceRecorder) -> str:
    """Event by event, as the whole at once would hold the GIL for long."""
    trace = recorder.trace()
    events = trace.pop("traceEvents")
    assert isinstance(events, list)
    rows = ",\n".join(json.dumps(event) for event in events)
    return json.dumps(trace)[:-1] + f',"traceEvents":[\n{rows}\n]}}'
