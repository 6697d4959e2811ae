"""Spans of requests: whose children they are, what they say, and that they can break nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler
from opentelemetry.trace import StatusCode

from aioengine import AsyncEngine, errors
from aioengine.instruments import RequestEvent, StageSpan
from aioengine.processors.item_work import Worked, WorkItem
from aioengine.tracing import RequestTracer, trace_requests
from tests.support.engines import greedy, running_engine, settled
from tests.support.tiny import save_tiny_llava, tiny_image

PROMPT = "<image> what is this"
MEDIA = ("media.fetch", "media.decode", "media.process", "encode")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llava(path)
    return path


class Collected:
    """A provider, and the spans that have ended."""

    def __init__(
        self, exporter: SpanExporter | None = None, sampler: Sampler | None = None
    ) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(exporter or self._exporter))
        self.tracer = self.provider.get_tracer("host")

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def request(self, request_id: str) -> ReadableSpan:
        (found,) = [
            span
            for span in self.spans
            if span.name == "aioengine.request" and about(span)["gen_ai.response.id"] == request_id
        ]
        return found

    def children(self, parent: ReadableSpan) -> dict[str, ReadableSpan]:
        """By name; each comes once."""
        assert parent.context is not None
        own = [s for s in self.spans if s.parent and s.parent.span_id == parent.context.span_id]
        assert all(s.context and s.context.trace_id == parent.context.trace_id for s in own)
        found = {span.name: span for span in own}
        assert len(found) == len(own)
        return found


def about(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time, span.end_time


@pytest.fixture
def collected() -> Iterator[Collected]:
    found = Collected()
    yield found
    found.provider.shutdown()


async def test_a_request_with_a_image(folder: Path, tmp_path: Path, collected: Collected) -> None:
    image = tmp_path / "image.png"
    tiny_image(0).save(image)
    async with running_engine(folder) as engine:
        tracer = trace_requests(engine, collected.provider, model_name="tiny")
        before = time.time_ns()
        with collected.tracer.start_as_current_span("of the host") as host:
            output = await engine.generate(PROMPT, greedy(4, n=2), images=[image], request_id="r")
        assert not tracer._live
    span = collected.request("r")
    assert span.parent is not None and span.parent.span_id == host.get_span_context().span_id
    assert span.status.status_code is StatusCode.UNSET
    attributes = about(span)
    waited = attributes.pop("aioengine.time_to_first_token")
    assert 0 < waited <= (output.timings.finished or 0)
    assert attributes == {
        "gen_ai.operation.name": "generate_content",
        "gen_ai.provider.name": "aioengine",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": "r",
        "gen_ai.usage.input_tokens": output.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": output.usage.cached_tokens,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "aioengine.encoder_items": 1,
        "aioengine.encoder_cached_items": output.usage.encoder_cached_items,
        "aioengine.outcome": "finished",
    }
    children = collected.children(span)
    assert children.keys() == {*MEDIA, "prefill", "decode"}
    # Real time, in the order of the work, and within the request.
    start, end = times(span)
    assert before <= start < end <= time.time_ns()
    order = [times(children[name]) for name in (*MEDIA, "decode")]
    assert order == sorted(order)
    for child in children.values():
        assert start <= times(child)[0] <= times(child)[1] <= end
    assert times(children["media.decode"])[1] == times(children["media.process"])[0]
    assert times(children["prefill"])[1] == times(children["decode"])[0]
    assert times(children["decode"])[1] == end
    assert about(children["encode"])["aioengine.detail"].endswith(" rows")


async def test_what_was_current_at_submission_is_the_parent(
    folder: Path, collected: Collected
) -> None:
    async def call(engine: AsyncEngine, name: str) -> int:
        with collected.tracer.start_as_current_span(name) as host:
            await engine.generate("a", greedy(3), request_id=name)
            return host.get_span_context().span_id

    async with running_engine(folder) as engine:
        trace_requests(engine, collected.provider)
        hosts = await asyncio.gather(*(call(engine, name) for name in ("r0", "r1", "r2")))
        await engine.generate("a", greedy(3), request_id="alone")
    parents = [collected.request(f"r{i}").parent for i in range(3)]
    assert [parent and parent.span_id for parent in parents] == hosts
    assert collected.request("alone").parent is None
    assert about(collected.request("alone"))["gen_ai.request.model"] == folder.name
    assert collected.children(collected.request("alone")).keys() == {"prefill", "decode"}


async def test_an_item_that_many_share_is_encoded_in_the_sight_of_all(
    folder: Path, collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine(folder) as engine:
        trace_requests(engine, collected.provider)
        workers, both_admitted = engine._core.input_processor.media._workers, asyncio.Barrier(3)
        work = workers.run

        async def wait_and_work(item: WorkItem) -> Worked:
            await both_admitted.wait()
            return await work(item)

        monkeypatch.setattr(workers, "run", wait_and_work)

        async def call(name: str) -> None:
            async with engine.stream(
                PROMPT, greedy(3), images=[tiny_image(0)], request_id=name
            ) as stream:
                await both_admitted.wait()
                await stream.result()

        await asyncio.gather(call("one"), call("two"))
    found = [collected.children(collected.request(name)) for name in ("one", "two")]
    encodes = [children["encode"] for children in found]
    assert times(encodes[0])[1] - times(encodes[0])[0] == pytest.approx(
        times(encodes[1])[1] - times(encodes[1])[0], abs=1000
    )
    assert [about(span)["aioengine.num_requests"] for span in encodes] == [2, 2]
    assert sum("media.decode" in children for children in found) == 1


async def test_requests_that_end_badly(folder: Path, collected: Collected) -> None:
    async with running_engine(folder) as engine:
        tracer = trace_requests(engine, collected.provider)
        with pytest.raises(errors.MediaError):
            await engine.generate(PROMPT, images=[b"secret"], request_id="rejected")
        async with engine.stream("a", greedy(200), request_id="aborted") as stream:
            await stream.receive()
        with pytest.raises(errors.RequestAbortedError):
            async with engine.stream("a", greedy(200), request_id="early") as stream:
                await engine.abort("early")
                await stream.result()
        await settled(engine)
        assert not tracer._live
    rejected = collected.request("rejected")
    assert rejected.status.status_code is StatusCode.UNSET
    assert about(rejected)["error.type"] == "MediaError"
    assert about(rejected)["aioengine.outcome"] == "rejected"
    assert not collected.children(rejected).keys() & {"prefill", "decode"}
    assert not rejected.events
    aborted = collected.request("aborted")
    assert aborted.status.status_code is StatusCode.UNSET
    assert about(aborted)["aioengine.outcome"] == "aborted"
    assert "gen_ai.usage.output_tokens" not in about(aborted)
    assert collected.children(aborted).keys() == {"prefill", "decode"}
    early = collected.request("early")
    assert about(early)["aioengine.outcome"] == "aborted"
    assert "prefill" in collected.children(early)
    assert "secret" not in "".join(span.to_json() for span in collected.spans)


async def test_nothing_is_kept_of_what_is_not_sampled(folder: Path) -> None:
    collected = Collected(sampler=ALWAYS_OFF)
    async with running_engine(folder) as engine:
        tracer = trace_requests(engine, collected.provider)
        async with engine.stream(PROMPT, greedy(3), images=[tiny_image(0)]) as stream:
            assert not tracer._live
            await stream.result()
    assert not collected.spans


async def test_without_an_sdk_nothing_happens(folder: Path) -> None:
    async with running_engine(folder) as engine:
        tracer = trace_requests(engine, trace.NoOpTracerProvider())
        await engine.generate("a", greedy(3))
        assert not tracer._live and engine.instruments.watchers


async def test_late_work_is_nobodys(folder: Path, collected: Collected) -> None:
    engine = AsyncEngine.from_pretrained(folder)
    trace_requests(engine, collected.provider)
    instruments = engine.instruments
    instruments.note(RequestEvent("submitted", "r", 10.0))
    instruments.note(RequestEvent("aborted", "r", 11.0, error=errors.RequestAbortedError()))
    instruments.record(StageSpan("decode", 10.5, 12.0, ("r",)))
    instruments.note(RequestEvent("submitted", "r", 12.0))  # the name's next owner
    instruments.record(StageSpan("encode", 11.5, 12.5, ("r", "unknown")))
    instruments.record(StageSpan("encode", 12.5, 13.0, ("r", "unknown")))
    instruments.record(StageSpan("step", 12.5, 13.0, ("r",)))
    instruments.note(RequestEvent("admitted", "r", 12.25))
    instruments.note(RequestEvent("failed", "r", 14.0, error=errors.EngineError()))
    first, second = [span for span in collected.spans if span.name == "aioengine.request"]
    assert not collected.children(first)
    assert collected.children(second).keys() == {"encode", "prefill"}
    assert second.status.status_code is StatusCode.ERROR
    assert second.status.description == about(second)["error.type"] == "EngineError"
    assert about(second)["aioengine.outcome"] == "failed"
    start, end = times(second)
    assert end - start == 2_000_000_000
    for name, (began, ended) in {"encode": (0.5, 1.0), "prefill": (0.25, 2.0)}.items():
        expected = start + round(began * 1e9), start + round(ended * 1e9)
        assert times(collected.children(second)[name]) == expected
    assert instruments.watchers and instruments.listeners


class BrokenExporter(SpanExporter):
    """Raises for every span."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise RuntimeError("broken")


async def test_a_broken_exporter_breaks_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_engine(folder) as engine:
        tracer = trace_requests(engine, Collected(BrokenExporter()).provider)
        output = await engine.generate(PROMPT, greedy(4), images=[tiny_image(0)])
        assert len(output.token_ids) == 4
        assert not tracer._live
    assert "broken" in caplog.text


@pytest.mark.parametrize("call", ["start", "start a child", "end", "attribute"])
async def test_a_broken_tracer_breaks_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    collected = Collected()
    async with running_engine(folder) as engine:
        tracer = trace_requests(engine, collected.provider)
        begin = tracer._tracer.start_span

        def start_span(name: str, *args: Any, **options: Any) -> Any:
            span: Any = begin(name, *args, **options)
            is_request = name == "aioengine.request"
            if call == ("start" if is_request else "start a child"):
                raise RuntimeError("broken")
            if is_request and call in ("end", "attribute"):
                name = "end" if call == "end" else "set_attribute"
                monkeypatch.setattr(span, name, fail)
            return span

        def fail(*args: Any, **options: Any) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(tracer._tracer, "start_span", start_span)
        outputs = await asyncio.gather(
            *(
                engine.generate(PROMPT, greedy(4), images=[tiny_image(i)], request_id=f"r{i}")
                for i in range(3)
            )
        )
        assert [len(output.token_ids) for output in outputs] == [4, 4, 4]
        assert not engine.instruments.watchers, "it was removed"
        assert not tracer._live
        assert "a listener failed and was removed" in caplog.text
        tracer.close()
        assert not engine.instruments.listeners


async def test_close_ends_what_is_open(folder: Path, collected: Collected) -> None:
    async with running_engine(folder) as engine:
        tracer = trace_requests(engine, collected.provider)
        async with engine.stream("a", greedy(200), request_id="open") as stream:
            await stream.receive()
            assert isinstance(tracer, RequestTracer) and tracer._live
            tracer.close()
            tracer.close()
            assert "aioengine.outcome" not in about(collected.request("open"))
            await stream.receive()
        assert not engine.instruments.watchers and not engine.instruments.listeners
        await engine.generate("a", greedy(3))
        assert len(collected.spans) == 2, "the request and its prefill"


async def test_two_engines_trace_each_its_own(folder: Path, collected: Collected) -> None:
    async with running_engine(folder) as one, running_engine(folder) as two:
        for engine, name in ((one, "first"), (two, "second")):
            trace_requests(engine, collected.provider, model_name=name)
        await asyncio.gather(
            one.generate("a", greedy(3), request_id="1"),
            two.generate("a", greedy(3), request_id="2"),
        )
    models = [about(collected.request(name))["gen_ai.request.model"] for name in ("1", "2")]
    assert models == ["first", "second"]


async def test_the_processes_own_provider_is_the_default(
    folder: Path, collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", collected.provider)
    async with running_engine(folder) as engine:
        trace_requests(engine)
        await engine.generate("a", greedy(3), request_id="r")
    assert collected.request("r")
