"""Instruments of the engine: how long stages take, spans and moments for whoever listens.

Costs next to nothing without listeners, and a listener that raises is removed: no hook can break
the loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from aioengine.streams.loop_bridge import LoopBridge
from aioengine.types import Launched, RequestOutput, StageStatistics, read

__all__ = [
    "PROCESSORS",
    "STAGES",
    "Instruments",
    "RequestEvent",
    "StageSpan",
    "TraceRecorder",
    "heard_on",
    "timed",
]

Heard = TypeVar("Heard")
Kind = Literal["submitted", "admitted", "token", "finished", "aborted", "rejected", "failed"]

STAGES = ("fetch", "decode", "process", "encode", "step")
PROCESSORS = "logits_processors"
"""A part of steps that is counted as stages are: functions of the callers' own."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageSpan:
    """One piece of work: `start` and `end` in seconds of `time.perf_counter()`.

    `requests` are those it was done for; `detail` says what it was (tokens, rows).
    """

    stage: str
    start: float
    end: float
    requests: tuple[str, ...] = ()
    detail: str = ""


@dataclass(slots=True)  # not frozen, which would take three times as long, for each token
class RequestEvent:
    """A moment in a request's life, at `time` in seconds of `time.perf_counter()`.

    "submitted" comes on the caller's task, inside `stream()`; "admitted" when the request is laid
    out and queued, with its `prompt_tokens` and the number of its `media` by modality; "token" for
    each token of completion `index`, with the prompt tokens that were found in the prefix cache;
    the last of a request is "finished" with its `output`, or "aborted", "rejected" (the caller's
    mistake) or "failed" with its `error`.
    """

    kind: Kind
    request_id: str
    time: float
    index: int = 0
    output: RequestOutput | None = None
    error: BaseException | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    media: Mapping[str, int] | None = None


def timed(function: Callable[..., Any], *args: Any) -> Launched[tuple[Any, float, float]]:
    """A job's result, and when it began and ended."""
    start = time.perf_counter()
    launched = function(*args)
    return Launched(lambda: (read(launched), start, time.perf_counter()))


class Instruments:
    """One engine's; for the loop's thread. `listeners` hear of stages, `watchers` of requests."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[StageSpan], object]] = []
        self.watchers: list[Callable[[RequestEvent], object]] = []
        self._stages = {stage: StageStatistics() for stage in (*STAGES, PROCESSORS)}
        self._news: deque[RequestEvent] = deque()

    def follow(
        self, watcher: Callable[[RequestEvent], object], listener: Callable[[StageSpan], object]
    ) -> Callable[[], None]:
        """Add both; what is returned removes them. Idempotent."""
        self.watchers.append(watcher)
        self.listeners.append(listener)

        def leave() -> None:
            with suppress(ValueError):  # one that has failed was removed
                self.watchers.remove(watcher)
            with suppress(ValueError):
                self.listeners.remove(listener)

        return leave

    def record(self, span: StageSpan) -> None:
        """Count a finished piece of work, and tell the listeners."""
        took = span.end - span.start
        old = self._stages.get(span.stage)
        if old is not None:
            self._stages[span.stage] = StageStatistics(
                old.count + 1, old.total_s + took, max(old.max_s, took)
            )
        _tell(self.listeners, span)

    def note(self, event: RequestEvent) -> None:
        """Tell the watchers. Who makes many events asks first whether there are any.

        A watcher may make news itself, by ending a request: those events come after these.
        """
        self._news.append(event)
        if len(self._news) > 1:
            return
        try:
            while self._news:
                _tell(self.watchers, self._news[0])
                self._news.popleft()
        finally:
            self._news.clear()

    def stages(self) -> dict[str, StageStatistics]:
        """Stage -> what it took so far."""
        return dict(self._stages)


def _tell(listeners: list[Callable[[Heard], object]], news: Heard) -> None:
    for listener in list(listeners):
        try:
            listener(news)
        except (Exception, CancelledError):
            with suppress(ValueError):  # it may have removed itself
                listeners.remove(listener)
            logger.exception("a listener failed and was removed")


def heard_on(
    loop: asyncio.AbstractEventLoop, listener: Callable[[Heard], object]
) -> Callable[[Heard], object]:
    """Forward from any thread: what it is called with goes to `listener` on the loop, until that
    raises."""
    return partial(LoopBridge(loop).call, _tell, [listener])


class TraceRecorder:
    """A listener that keeps spans, the last `max_spans` of them or all, and writes them in Chrome's
    trace format (for Perfetto)."""

    def __init__(self, max_spans: int | None = None) -> None:
        self.spans: deque[StageSpan] = deque(maxlen=max_spans)

    def __call__(self, span: StageSpan) -> None:
        self.spans.append(span)

    def trace(self) -> dict[str, object]:
        """Complete events, one row a stage, in microseconds from the first span on; as JSON's
        objects."""
        zero = min((span.start for span in self.spans), default=0.0)
        names = list(dict.fromkeys([*STAGES, *(span.stage for span in self.spans)]))
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": 1, "tid": row, "name": "thread_name", "args": {"name": name}}
            for row, name in enumerate(names)
        ]
        events += [
            {
                "ph": "X",
                "pid": 1,
                "tid": names.index(span.stage),
                "name": f"{span.stage} {span.detail}".strip(),
                "ts": (span.start - zero) * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {"requests": list(span.requests)},
            }
            for span in self.spans
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write(self, path: Path) -> None:
        """A JSON file of `trace()`."""
        path.write_text(json.dumps(self.trace()))
