"""Prometheus metrics of engines.

Counters and gauges are read from the engine's statistics when somebody scrapes, and cost nothing
in between. Durations are counted into buckets as they happen, by hand: the locks of the library's
own histograms take several times as long as the counting, and an engine lives on one thread.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from aioengine.errors import EngineError, InvalidRequestError, is_text, require
from aioengine.instruments import RequestEvent, StageSpan
from aioengine.metrics import families
from aioengine.metrics.families import FIGURES, HISTOGRAMS, Figure, Histogram, Reading
from aioengine.metrics.loop_lag import LoopLag
from aioengine.types import EngineState, EngineStatistics

try:
    from prometheus_client import CollectorRegistry, Metric
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
    from prometheus_client.utils import floatToGoString
except ImportError as error:
    raise ImportError(
        "aioengine.metrics needs prometheus-client: pip install 'aioengine[serve]'"
    ) from error

if TYPE_CHECKING:
    from aioengine.engine.async_engine import AsyncEngine

__all__ = ["Metrics"]

OPENMETRICS = "application/openmetrics-text"
MAX_NAME_CHARACTERS = 256
OPEN = (EngineState.RUNNING, EngineState.DRAINING)
KINDS: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
SILENT = (EngineState.NEW, EngineState.STARTING, EngineState.CLOSED)
"""States in which there is nothing to read but the state."""


class Metrics:
    """An engine's metrics in a registry, from now until `close()`.

    They go to a registry of their own, or to `registry`, which several engines may share under
    different names. Made before the engine starts, or later on its event loop.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        model_name: str | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`model_name` is the label `model` of all of them: by default the hub id, or the name of
        the model's folder.

        Raises InvalidRequestError if an engine of this name is in the registry already: their
        numbers could not be distinguished.
        """
        name = engine.model_name if model_name is None else model_name
        rule = f"text of 1 to {MAX_NAME_CHARACTERS} characters"
        require(is_text(name, MAX_NAME_CHARACTERS), "model_name", name, rule)
        self.registry = CollectorRegistry() if registry is None else registry
        self._model_name = name
        self._collector: _Collector | None = _join(self.registry, name, engine)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """All of the registry as text, and its content type.

        OpenMetrics where `accept`, the header of that name, asks for it, else Prometheus' format.
        """
        # The header stays here: choose_encoder raises for some versions that it may ask for.
        encode, content_type = choose_encoder(OPENMETRICS if OPENMETRICS in accept else "")
        return encode(self.registry), content_type

    def close(self) -> None:
        """Leave the engine and the registry. Idempotent."""
        if self._collector is not None:
            _leave(self.registry, self._collector, self._model_name)
            self._collector = None


class _Buckets:
    """One histogram's counts."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Buckets as Prometheus has them: bound, and how many values were no greater."""
        names = [*map(floatToGoString, self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


@dataclass(slots=True)
class _Life:
    """Record of a live request; times in seconds of `time.perf_counter()`."""

    submitted: float
    last_tokens: dict[int, float] = field(default_factory=dict)


class _Meter:
    """One engine's numbers: counted on its loop, read from any thread."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.buckets = {
            histogram.name: {value: _Buckets(histogram.bounds) for value in histogram.values}
            for histogram in HISTOGRAMS
        }
        self._engine = engine
        self._num_tokens = 0
        self._lives: dict[str, _Life] = {}
        self._queued: dict[str, float] = {}  # since when
        self._latest: EngineStatistics | None = None
        self._is_closed = False
        self._lag = LoopLag(self._tick)
        self._inter_token = self._of(families.INTER_TOKEN)
        self._stages = self.buckets[families.STAGE.name]
        self._leave = engine.instruments.follow(self.hear_event, self.hear_span)
        self.read()  # so that the clock begins, if the engine runs

    def close(self) -> None:
        """Hear nothing more."""
        self._is_closed = True
        self._leave()

    def read(self) -> Reading:
        """State of the engine: now, or on another thread than its own as of the last tick."""
        state = self._engine.state
        if state in SILENT:
            return Reading(state, self._num_tokens, None)
        with suppress(EngineError):
            self._latest = self._engine.statistics()
            self._lag.begin()
        return Reading(state, self._num_tokens, self._latest)

    def hear_event(self, event: RequestEvent) -> None:
        """Count a moment in a request's life."""
        if event.kind == "submitted":
            self._lives[event.request_id] = _Life(event.time)
            self._lag.begin()
            return
        life = self._lives.get(event.request_id)
        if event.kind == "token":
            self._num_tokens += 1
            if life is not None:
                self._count_token(life, event)
        elif life is None:
            pass  # submitted before anybody listened
        elif event.kind == "admitted":
            self._of(families.INTAKE).observe(event.time - life.submitted)
            self._queued[event.request_id] = event.time
        else:
            del self._lives[event.request_id]
            self._queued.pop(event.request_id, None)
            self._count_end(life, event)

    def _count_token(self, life: _Life, event: RequestEvent) -> None:
        before = life.last_tokens.get(event.index)
        if before is not None:
            self._inter_token.observe(event.time - before)
        elif not life.last_tokens:
            self._of(families.FIRST_TOKEN).observe(event.time - life.submitted)
        life.last_tokens[event.index] = event.time

    def _count_end(self, life: _Life, event: RequestEvent) -> None:
        self._of(families.DURATION, event.kind).observe(event.time - life.submitted)
        if event.output is not None:
            usage = event.output.usage
            self._of(families.PROMPT_TOKENS).observe(usage.prompt_tokens)
            self._of(families.OUTPUT_TOKENS).observe(usage.completion_tokens)

    def hear_span(self, span: StageSpan) -> None:
        """Count a finished piece of work."""
        if span.stage in self._stages:
            self._stages[span.stage].observe(span.end - span.start)
        if self._queued and span.stage == "step":
            for name in self._queued.keys() & span.requests:
                self._of(families.QUEUE).observe(max(0.0, span.start - self._queued.pop(name)))

    def _of(self, histogram: Histogram, value: str = "") -> _Buckets:
        return self.buckets[histogram.name][value]

    def _tick(self, late_s: float) -> bool:
        if self._is_closed or self._engine.state not in OPEN:
            return False
        self._of(families.LAG).observe(late_s)
        self._latest = self._engine.statistics()
        return True


class _Collector:
    """Collector for all engines in a registry: each metric may be listed only once."""

    def __init__(self) -> None:
        self.meters: dict[str, _Meter] = {}
        """By the engine's name."""

    def describe(self) -> Iterable[Metric]:
        """The metrics without numbers."""
        return [*map(_blank, FIGURES), *map(_blank, HISTOGRAMS)]

    def collect(self) -> Iterable[Metric]:
        """The metrics of all engines."""
        meters = dict(self.meters)  # another thread may add one
        readings = {model: meter.read() for model, meter in meters.items()}
        for figure in FIGURES:
            metric = _blank(figure)
            for model, reading in readings.items():
                for value, number in figure.read(reading).items():
                    metric.add_metric(_labels(model, value), number)
            yield metric
        for histogram in HISTOGRAMS:
            counted = _blank(histogram)
            for model, meter in meters.items():
                for value, buckets in meter.buckets[histogram.name].items():
                    counted.add_metric(_labels(model, value), buckets.cumulative(), buckets.total)
            yield counted


def _labels(model: str, value: str) -> list[str]:
    return [model, value] if value else [model]


def _blank(family: Figure | Histogram) -> Any:
    return KINDS[family.kind](family.name, family.meaning, labels=family.labels)


_COLLECTORS: WeakKeyDictionary[CollectorRegistry, _Collector] = WeakKeyDictionary()
"""Those of all registries: a registry does not tell what is in it."""
_LOCK = threading.Lock()


def _join(registry: CollectorRegistry, model_name: str, engine: AsyncEngine) -> _Collector:
    """The registry's collector, with one engine more."""
    with _LOCK:
        collector = _COLLECTORS.get(registry)
        if collector is None:
            collector = _COLLECTORS[registry] = _Collector()
            registry.register(collector)
        if model_name in collector.meters:
            message = f"model_name {model_name!r:.80} is in the registry already; give each its own"
            raise InvalidRequestError(message, parameter="model_name")
        collector.meters[model_name] = _Meter(engine)
        return collector


def _leave(registry: CollectorRegistry, collector: _Collector, model_name: str) -> None:
    """One engine less; the last one takes the collector with it."""
    with _LOCK:
        collector.meters.pop(model_name).close()
        if not collector.meters:
            del _COLLECTORS[registry]
            registry.unregister(collector)
