"""What the engine measures: how long stages take, and spans for whoever listens.

Costs next to nothing without listeners, and a listener that raises is removed: no hook can break
the loop.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aioengine.types import Launched, StageStatistics, read

__all__ = ["STAGES", "Instruments", "StageSpan", "TraceRecorder", "timed"]

STAGES = ("fetch", "decode", "process", "encode", "step")

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


def timed(function: Callable[..., Any], *args: Any) -> Launched[tuple[Any, float, float]]:
    """A job's result, and when it began and ended."""
    start = time.perf_counter()
    launched = function(*args)
    return Launched(lambda: (read(launched), start, time.perf_counter()))


class Instruments:
    """One engine's. `record` is for the loop's thread."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[StageSpan], object]] = []
        self._stages = {stage: StageStatistics() for stage in STAGES}

    def record(self, span: StageSpan) -> None:
        """Count a finished piece of work, and tell the listeners."""
        took = span.end - span.start
        old = self._stages.get(span.stage)
        if old is not None:
            self._stages[span.stage] = StageStatistics(
                old.count + 1, old.total_s + took, max(old.max_s, took)
            )
        for listener in list(self.listeners):
            try:
                listener(span)
            except Exception:
                with suppress(ValueError):  # it may have removed itself
                    self.listeners.remove(listener)
                logger.exception("a listener failed and was removed")

    def stages(self) -> dict[str, StageStatistics]:
        """Stage -> what it took so far."""
        return dict(self._stages)


class TraceRecorder:
    """A listener that keeps every span, and writes them in Chrome's trace format (for Perfetto)."""

    def __init__(self) -> None:
        self.spans: list[StageSpan] = []

    def __call__(self, span: StageSpan) -> None:
        self.spans.append(span)

    def write(self, path: Path) -> None:
        """A JSON file of complete events: one row a stage, microseconds from the first span on."""
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
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
