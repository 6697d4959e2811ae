"""Each request as an OpenTelemetry span, with its stages below it.

A request's span is a child of what was current where it was submitted. Nothing is kept for a
request that is not sampled, nor for one that has ended.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioengine import __version__
from aioengine.instruments import RequestEvent, StageSpan
from aioengine.types import RequestOutput

try:
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        Span,
        StatusCode,
        TracerProvider,
        get_tracer,
        set_span_in_context,
    )
    from opentelemetry.util.types import AttributeValue
except ImportError as error:
    raise ImportError(
        "aioengine.tracing needs opentelemetry-api: pip install 'aioengine[telemetry]'"
    ) from error

if TYPE_CHECKING:
    from aioengine.engine.async_engine import AsyncEngine

__all__ = ["RequestTracer", "trace_requests"]

REQUEST = "aioengine.request"
SPANS = {
    "fetch": "media.fetch",
    "decode": "media.decode",  # not to be taken for the decoding of tokens
    "process": "media.process",
    "encode": "encode",
}
"""The spans of stages; those of steps are not a request's own."""


def trace_requests(
    engine: AsyncEngine,
    tracer_provider: TracerProvider | None = None,
    *,
    model_name: str | None = None,
) -> RequestTracer:
    """Trace the requests that are submitted from now on, until the tracer's `close()`.

    By default the process's own provider takes the spans, and they name the model's hub id or the
    name of its folder.
    """
    return RequestTracer(engine, tracer_provider, model_name or engine.model_name)


@dataclass(slots=True)
class _Traced:
    """A live request's span. Moments are in seconds of `time.perf_counter()`."""

    span: Span
    context: Context
    submitted: float
    submitted_ns: int
    """The same moment, in nanoseconds since 1970."""
    admitted: float | None = None
    first_token: float | None = None

    def clock(self, moment: float) -> int:
        """A moment in nanoseconds since 1970."""
        return self.submitted_ns + round((moment - self.submitted) * 1e9)


class RequestTracer:
    """The spans of one engine's live requests; for the loop's thread."""

    def __init__(
        self, engine: AsyncEngine, tracer_provider: TracerProvider | None, model_name: str
    ) -> None:
        self._tracer = get_tracer("aioengine", __version__, tracer_provider)
        self._model_name = model_name
        self._live: dict[str, _Traced] = {}
        self._leave = engine.instruments.follow(self._hear_event, self._hear_span)

    def close(self) -> None:
        """Trace nothing more; the spans of live requests end here. Idempotent."""
        self._leave()
        live, self._live = self._live, {}
        now = time.perf_counter()
        for traced in live.values():
            traced.span.end(traced.clock(now))

    def _hear_event(self, event: RequestEvent) -> None:
        try:
            self._follow(event)
        except Exception:
            self._live.clear()  # this hook is removed, and nobody will tell of their ends
            raise

    def _follow(self, event: RequestEvent) -> None:
        if event.kind == "submitted":
            self._begin(event)
            return
        traced = self._live.get(event.request_id)
        if traced is None:
            return
        if event.kind == "admitted":
            traced.admitted = event.time
        elif event.kind != "token":
            del self._live[event.request_id]
            self._end(traced, event)
        elif traced.first_token is None:
            traced.first_token = event.time
            self._add(traced, "prefill", traced.admitted, event.time)

    def _begin(self, event: RequestEvent) -> None:
        """Begin on the caller's task, so that the current span is the caller's."""
        now_ns = time.time_ns()
        attributes = {
            "gen_ai.operation.name": "generate_content",
            "gen_ai.provider.name": "aioengine",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.id": event.request_id,
        }
        span = self._tracer.start_span(REQUEST, attributes=attributes, start_time=now_ns)
        if span.is_recording():
            context = set_span_in_context(span)
            self._live[event.request_id] = _Traced(span, context, event.time, now_ns)

    def _end(self, traced: _Traced, event: RequestEvent) -> None:
        span = traced.span
        span.set_attribute("aioengine.outcome", event.kind)
        if traced.first_token is None:
            self._add(traced, "prefill", traced.admitted, event.time)
        else:
            self._add(traced, "decode", traced.first_token, event.time)
            waited = traced.first_token - traced.submitted
            span.set_attribute("aioengine.time_to_first_token", waited)
        if event.output is not None:
            span.set_attributes(_usage(event.output))
        if event.kind in ("rejected", "failed"):
            kind = type(event.error).__name__  # its text may hold anything
            span.set_attribute("error.type", kind)
            if event.kind == "failed":
                span.set_status(StatusCode.ERROR, kind)
        span.end(traced.clock(event.time))

    def _hear_span(self, span: StageSpan) -> None:
        name = SPANS.get(span.stage)
        if name is None:
            return
        attributes: dict[str, AttributeValue] = {"aioengine.num_requests": len(span.requests)}
        if span.detail:
            attributes["aioengine.detail"] = span.detail
        for request_id in span.requests:
            traced = self._live.get(request_id)
            # The name may have a new owner since the work began.
            if traced is not None and span.start >= traced.submitted:
                self._add(traced, name, span.start, span.end, attributes)

    def _add(
        self,
        traced: _Traced,
        name: str,
        start: float | None,
        end: float,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        """A child that has ended already; none where nothing began."""
        if start is not None:
            child = self._tracer.start_span(
                name, traced.context, attributes=attributes, start_time=traced.clock(start)
            )
            child.end(traced.clock(end))


def _usage(output: RequestOutput) -> dict[str, AttributeValue]:
    usage = output.usage
    reasons = [each.finish_reason.value for each in output.outputs if each.finish_reason]
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.response.finish_reasons": reasons,
        "aioengine.encoder_items": usage.encoder_items,
        "aioengine.encoder_cached_items": usage.encoder_cached_items,
    }
