"""Pages of one engine: what it is doing at `/`, live over server-sent events, and trials at `/try`.

Nothing of a payload is shown. The figures are shaped only while somebody looks, once a tick for
all who do.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from aioengine.asgi.model_facts import model_facts
from aioengine.asgi.pages import Page
from aioengine.asgi.status_model import StatusBoard
from aioengine.engine.async_engine import AsyncEngine
from aioengine.errors import EngineError
from aioengine.instruments import TraceRecorder
from aioengine.metrics.loop_lag import LoopLag
from aioengine.streams.loop_bridge import run_apart
from aioengine.types import EngineState, EngineStatistics

__all__ = ["StatusPage"]

MEMORY = Path("/proc/self/statm")
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
NOT_STORED = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
EVENT_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class StatusPage:
    """The routes of one engine's status page. Make it before the engine starts, to miss nothing."""

    def __init__(self, engine: AsyncEngine, model: str = "", **service: Any) -> None:
        """`model`: the name to show; by default the hub id, or the folder's name. `service`: what
        else the page for trials has to know of the service."""
        self._engine = engine
        self._service = {"model": model or engine.model_name, **service}
        self._board = StatusBoard(model or engine.model_name, time.perf_counter())
        self._feed = _Feed(engine, self._board)
        engine.instruments.follow(self._board.note_event, self._board.note_span)

    def routes(self) -> list[Route]:
        """The pages, what they ask for, and the latest spans as a Chrome trace."""
        return [
            Route("/", Page("status.html").show),
            Route("/try", Page("try.html", shows_media=True).show),
            Route("/status/events", self._events),
            Route("/status/model", self._model),
            Route("/status/requests/{name}", self._request),
            Route("/status/trace", self._trace),
        ]

    async def _model(self, _request: Request) -> Response:
        facts = {**self._service, **model_facts(self._engine)}
        return JSONResponse(facts, headers=NOT_STORED)

    async def _request(self, request: Request) -> Response:
        """One request's life, without anything of its payload."""
        name = request.path_params["name"]
        known = self._board.find(name)
        if known is None:
            raise HTTPException(404, "no such request is live, or among the last to end")
        spans = tuple(self._board.recorder.spans)
        return JSONResponse(await run_apart(known.report, name, spans), headers=NOT_STORED)

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
                **NOT_STORED,
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
        status = self._board.snapshot(now, state, self._statistics(), _resident_bytes())
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


def _resident_bytes() -> int | None:
    """Resident memory of the process; None where the system does not report it as Linux does."""
    try:
        return int(MEMORY.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _trace_json(recorder: TraceRecorder) -> str:
    """Event by event, as the whole at once would hold the GIL for long."""
    trace = recorder.trace()
    events = trace.pop("traceEvents")
    assert isinstance(events, list)
    rows = ",\n".join(json.dumps(event) for event in events)
    return json.dumps(trace)[:-1] + f',"traceEvents":[\n{rows}\n]}}'
