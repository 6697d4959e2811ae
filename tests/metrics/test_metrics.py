"""Prometheus metrics: what they say is what the engine says, and they can break nothing."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from prometheus_client import REGISTRY, CollectorRegistry, Gauge, generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from aioengine import AsyncEngine, EngineState, EngineStatistics, errors
from aioengine.instruments import PROCESSORS, STAGES, RequestEvent, StageSpan
from aioengine.metrics import Metrics, families
from aioengine.metrics.families import FIELDS, FIGURES, HISTOGRAMS, OUTCOMES
from aioengine.metrics.loop_lag import TICK_S, LoopLag
from aioengine.types import CompletionOutput, RequestOutput, Timings, Usage
from tests.architecture.source import ROOT
from tests.support.engines import greedy, running_engine, settled, until
from tests.support.tiny import save_tiny_llava, tiny_image

PROMPT = "<image> what is this"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llava(path)
    return path


@pytest.fixture
def engine(folder: Path) -> AsyncEngine:
    """One that has not been started."""
    return AsyncEngine.from_pretrained(folder, device="cpu", max_model_len=512)


def samples(text: str, parse: Callable[[str], Any] = text_string_to_metric_families) -> Samples:
    """Every line of a scrape; a line may come only once."""
    found: Samples = {}
    for family in parse(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


class Scrape:
    """One scrape of what concerns one model."""

    def __init__(self, metrics: Metrics, model: str = "tiny") -> None:
        self.all = samples(metrics.render()[0].decode())
        self._model = model

    def __call__(self, name: str, **labels: str) -> float:
        labels["model"] = self._model
        return self.all[f"aioengine_{name}", frozenset(labels.items())]

    def names(self) -> set[str]:
        return {name for name, labels in self.all if ("model", self._model) in labels}


def bookkeeping(metrics: Metrics) -> dict[str, Any]:
    """What is kept of live requests."""
    assert metrics._collector is not None
    (meter,) = metrics._collector.meters.values()
    return {**meter._lives, **meter._queued}


async def load(engine: AsyncEngine) -> list[RequestOutput]:
    """Requests of every kind: text, images new and known, two completions, rejected, aborted."""
    outputs = await asyncio.gather(
        engine.generate("a text", greedy(6)),
        *(engine.generate(PROMPT, greedy(5), images=[tiny_image(i % 2)]) for i in range(4)),
        engine.generate(PROMPT, greedy(4, n=2), images=[tiny_image(2)]),
    )
    with pytest.raises(errors.MediaError):
        await engine.generate(PROMPT, images=[b"no image"])
    async with engine.stream("a text", greedy(200)) as stream:
        await stream.receive()
    await settled(engine)
    return list(outputs)


# ---- what they say


async def test_figures_are_the_engines_own(folder: Path) -> None:
    async with running_engine(folder) as engine:
        metrics = Metrics(engine, model_name="tiny")
        await load(engine)
        statistics, scrape = engine.statistics(), Scrape(metrics)
        for name, field in FIELDS.items():
            assert scrape(name) == getattr(statistics, field), name
        for outcome in OUTCOMES:
            assert scrape("requests_total", outcome=outcome) == getattr(statistics, outcome)
        for stage, measured in statistics.stages.items():
            assert scrape("stage_runs_total", stage=stage) == measured.count
            assert scrape("stage_seconds_total", stage=stage) == measured.total_s
            assert scrape("stage_duration_seconds_count", stage=stage) == measured.count
            assert scrape("stage_duration_seconds_sum", stage=stage) == measured.total_s
        assert scrape("engine_state", state="running") == 1
        assert sum(scrape("engine_state", state=state) for state in EngineState) == 1
        assert statistics.rejected == statistics.aborted == 1 < statistics.encoder_cache_hits
        assert statistics.failed == 0, "the caller's mistake is not the engine's"
        assert statistics.stages["encode"].count


def test_nothing_of_the_statistics_is_left_out() -> None:
    shown = {*FIELDS.values()} | {*OUTCOMES, "stages", "model_impl"}
    assert shown | {"device", "dtype"} == {field.name for field in fields(EngineStatistics)}


async def test_histograms_count_every_request(folder: Path) -> None:
    async with running_engine(folder) as engine:
        metrics = Metrics(engine, model_name="tiny")
        outputs = await load(engine)
        statistics, scrape = engine.statistics(), Scrape(metrics)
        assert not bookkeeping(metrics)
    assert statistics.finished == len(outputs)
    for outcome in OUTCOMES:
        count = scrape("request_duration_seconds_count", outcome=outcome)
        assert count == getattr(statistics, outcome)
    begun = len(outputs) + 1  # the one that failed never got that far
    assert scrape("intake_duration_seconds_count") == begun
    assert scrape("queue_duration_seconds_count") == begun
    assert scrape("time_to_first_token_seconds_count") == begun
    usages = [output.usage for output in outputs]
    assert scrape("request_prompt_tokens_count") == len(outputs)
    assert scrape("request_prompt_tokens_sum") == sum(usage.prompt_tokens for usage in usages)
    generated = sum(usage.completion_tokens for usage in usages)
    assert scrape("request_generated_tokens_sum") == generated
    assert scrape("generated_tokens_total") > generated, "tokens of the aborted one count, too"
    # Between two tokens of a completion lies one gap.
    num_completions = sum(len(output.outputs) for output in outputs) + 1
    gaps = scrape("inter_token_latency_seconds_count")
    assert gaps == scrape("generated_tokens_total") - num_completions


async def test_times_are_those_of_the_outputs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that goes on by one for every step."""
    async with running_engine(folder) as engine:
        metrics = Metrics(engine, model_name="tiny")
        steps: list[StageSpan] = []
        engine.instruments.listeners.append(
            lambda span: steps.append(span) if span.stage == "step" else None
        )
        clock = SimpleNamespace(perf_counter=lambda: float(len(steps)))
        for module in ("aioengine.engine.request_state", "aioengine.engine.request_tracker"):
            monkeypatch.setattr(f"{module}.time", clock)
        outputs = await asyncio.gather(
            *(
                engine.generate(PROMPT, greedy(3 + i, n=1 + i % 2), images=[tiny_image(i)])
                for i in range(4)
            )
        )
        scrape = Scrape(metrics)
        timings = [output.timings for output in outputs]
        for name, total in {
            "time_to_first_token_seconds_sum": sum(each.first_token or 0 for each in timings),
            "request_duration_seconds_sum": sum(each.finished or 0 for each in timings),
            "intake_duration_seconds_sum": sum(each.admitted or 0 for each in timings),
        }.items():
            labels = {"outcome": "finished"} if name.startswith("request") else {}
            assert scrape(name, **labels) == total, name
        assert scrape("time_to_first_token_seconds_sum") >= len(outputs)


def output_of(name: str, prompt_tokens: int, completion_tokens: int) -> RequestOutput:
    usage = Usage(prompt_tokens, completion_tokens, 0, 0, 0)
    return RequestOutput(name, (), [CompletionOutput(0, "", ())], usage, Timings())


def test_durations_are_measured_from_the_right_moments(engine: AsyncEngine) -> None:
    metrics = Metrics(engine, model_name="tiny")
    instruments = engine.instruments
    for stage, start, end in (("encode", 10.0, 10.25), ("unheard of", 0.0, 1.0)):
        instruments.record(StageSpan(stage, start, end, ("a",)))

    async def live() -> None:  # on a loop, for the first request begins the clock
        instruments.note(RequestEvent("submitted", "a", 10.0))
        instruments.note(RequestEvent("admitted", "a", 10.5))
        for start in (11.0, 12.0):
            instruments.record(StageSpan("step", start, start + 0.5, ("a", "b")))
        for index, moment in ((0, 12.5), (1, 12.75), (0, 12.625), (1, 14.25), (0, 12.75)):
            instruments.note(RequestEvent("token", "a", moment, index=index))
        instruments.note(RequestEvent("finished", "a", 15.0, output=output_of("a", 3, 5)))

    asyncio.run(live())
    scrape = Scrape(metrics)
    assert scrape("intake_duration_seconds_sum") == 0.5
    assert scrape("queue_duration_seconds_sum") == 0.5
    assert scrape("queue_duration_seconds_count") == 1
    assert scrape("time_to_first_token_seconds_sum") == 2.5
    assert scrape("time_to_first_token_seconds_count") == 1
    assert scrape("time_to_first_token_seconds_bucket", le="2.5") == 1
    assert scrape("time_to_first_token_seconds_bucket", le="1.0") == 0
    assert scrape("inter_token_latency_seconds_sum") == 0.125 + 0.125 + 1.5
    assert scrape("inter_token_latency_seconds_bucket", le="0.15") == 2
    assert scrape("inter_token_latency_seconds_bucket", le="+Inf") == 3
    assert scrape("request_duration_seconds_sum", outcome="finished") == 5.0
    assert scrape("request_prompt_tokens_bucket", le="4.0") == 1
    assert scrape("request_prompt_tokens_bucket", le="2.0") == 0
    assert scrape("request_generated_tokens_sum") == 5
    assert scrape("generated_tokens_total") == 5
    assert scrape("stage_duration_seconds_sum", stage="encode") == 0.25
    assert scrape("stage_duration_seconds_sum", stage="step") == 1.0
    assert not bookkeeping(metrics)


def test_requests_from_before_the_metrics_are_left_alone(engine: AsyncEngine) -> None:
    metrics = Metrics(engine, model_name="tiny")
    for kind in ("admitted", "token", "finished"):
        output = output_of("old", 1, 1) if kind == "finished" else None
        engine.instruments.note(RequestEvent(kind, "old", 1.0, output=output))  # type: ignore[arg-type]
    assert engine.instruments.watchers, "it has not failed"
    scrape = Scrape(metrics)
    assert scrape("generated_tokens_total") == 1
    assert scrape("time_to_first_token_seconds_count") == 0
    assert scrape("request_duration_seconds_count", outcome="finished") == 0


# ---- when, and for whom


async def test_an_engine_that_is_not_open_shows_its_state(engine: AsyncEngine) -> None:
    metrics = Metrics(engine, model_name="tiny")
    beside = {"aioengine_generated_tokens_total", "aioengine_engine_state"}
    beside |= {
        f"{each.name}_{suffix}" for each in HISTOGRAMS for suffix in ("bucket", "count", "sum")
    }
    before = Scrape(metrics)
    assert before.names() == beside
    assert before("engine_state", state="new") == 1
    async with engine:
        await engine.generate("a", greedy(3))
        during = Scrape(metrics)
        assert during.names() == beside | {figure.name for figure in FIGURES}
    after = Scrape(metrics)
    assert after.names() == beside
    assert after("engine_state", state="closed") == 1
    assert after("engine_state", state="running") == 0
    assert after("generated_tokens_total") == 3


async def test_an_engine_that_has_died_shows_what_it_came_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = AsyncEngine.from_pretrained(folder, device="cpu", max_model_len=512)
    metrics = Metrics(engine, model_name="tiny")

    def fail(*args: Any) -> Any:
        raise RuntimeError("the device is gone")

    async with engine:
        monkeypatch.setattr(engine._core.loaded.runner, "step", fail)
        with pytest.raises(errors.EngineDeadError):
            await engine.generate("a", greedy(3))
        scrape = Scrape(metrics)
    assert scrape("engine_state", state="dead") == 1
    assert scrape("requests_total", outcome="failed") == 1
    assert scrape("request_duration_seconds_count", outcome="failed") == 1
    assert not bookkeeping(metrics)


@pytest.mark.parametrize(
    ("accept", "is_openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/html, text/plain;version=0.0.4", False),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5", True),
        ("application/openmetrics-text; version=\udcff.x; escaping=none", True),
        ("text/plain; version=one", False),
    ],
)
async def test_both_formats_are_valid(folder: Path, accept: str, is_openmetrics: bool) -> None:
    engine = AsyncEngine.from_pretrained(folder, device="cpu", max_model_len=512)
    metrics = Metrics(engine, model_name='a "name"\\\nof two lines')
    async with engine:
        await engine.generate("a", greedy(3))
        body, content_type = metrics.render(accept)
        plain = metrics.render()[0]
    text = body.decode()
    assert content_type.startswith(
        "application/openmetrics-text; version=1.0.0" if is_openmetrics else "text/plain; version="
    )
    assert text.endswith("# EOF\n") is is_openmetrics
    parse = openmetrics.text_string_to_metric_families if is_openmetrics else None
    found = samples(text, parse or text_string_to_metric_families)
    steady = {key for key in found if "lag" not in key[0]}
    assert steady == {key for key in samples(plain.decode()) if "lag" not in key[0]}
    assert len({labels for _, labels in found}) > len(STAGES)


async def test_two_engines_share_a_registry(folder: Path) -> None:
    registry = CollectorRegistry()
    Gauge("of_the_host", "Not ours.", registry=registry).set(7)
    one = AsyncEngine.from_pretrained(folder, device="cpu", max_model_len=512)
    async with one, running_engine(folder) as two:
        first = Metrics(one, model_name="one", registry=registry)
        second = Metrics(two, model_name="two", registry=registry)
        await asyncio.gather(one.generate("a", greedy(3)), two.generate("a", greedy(5)))
        with pytest.raises(errors.InvalidRequestError, match="'two' is in the registry") as caught:
            Metrics(one, model_name="two", registry=registry)
        assert caught.value.parameter == "model_name"
        body = generate_latest(registry).decode()
        assert body.count("# TYPE aioengine_requests_total ") == 1
        text = first.render("application/openmetrics-text")[0].decode()
        assert samples(text, openmetrics.text_string_to_metric_families)
        assert Scrape(first, "one")("generated_tokens_total") == 3
        assert Scrape(first, "two")("generated_tokens_total") == 5
        first.close()
        first.close()
        assert not one.instruments.watchers and two.instruments.watchers
        assert Scrape(second, "one").names() == set()
        assert Scrape(second, "two")("generated_tokens_total") == 5
        third = Metrics(one, model_name="one", registry=registry)
        first.close()  # its name belongs to another now
        assert Scrape(third, "one")("generated_tokens_total") == 0
        for metrics in (second, third):
            metrics.close()
        assert samples(generate_latest(registry).decode()) == {("of_the_host", frozenset()): 7}


async def test_names(folder: Path, tmp_path: Path) -> None:
    for model, name in ((folder, folder.name), ("somebody/a-model", "somebody/a-model")):
        own = Metrics(AsyncEngine.from_pretrained(model))
        assert Scrape(own, name)("engine_state", state="new") == 1
    for bad in ("", "x" * 1000, "\udc80", 7):
        with pytest.raises(errors.InvalidRequestError, match="model_name must be"):
            Metrics(AsyncEngine.from_pretrained(folder), model_name=bad)  # type: ignore[arg-type]
    assert not any("aioengine" in metric.name for metric in REGISTRY.collect())


async def test_close_leaves_nothing(folder: Path) -> None:
    async with running_engine(folder) as engine:
        metrics = Metrics(engine, model_name="tiny")
        await engine.generate("a", greedy(3))
        metrics.close()
        assert not engine.instruments.watchers and not engine.instruments.listeners
        await engine.generate("a", greedy(3))
        assert metrics.render()[0] == b""


def test_metrics_do_not_keep_an_engine_alive(folder: Path) -> None:
    engine = AsyncEngine.from_pretrained(folder)
    metrics = Metrics(engine)
    gone = [weakref.ref(engine), weakref.ref(metrics.registry)]
    del engine, metrics
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


async def test_another_thread_sees_the_last_tick(folder: Path) -> None:
    async with running_engine(folder) as engine:
        metrics = Metrics(engine, model_name="tiny")
        (meter,) = metrics._collector.meters.values()  # type: ignore[union-attr]
        ticks = meter.buckets[families.LAG.name][""]
        await engine.generate("a", greedy(3))
        num_ticks = sum(ticks.counts)
        await until(lambda: sum(ticks.counts) > num_ticks)
        scrape = await asyncio.to_thread(Scrape, metrics)
        assert scrape("requests_total", outcome="finished") == 1
        assert scrape("engine_state", state="running") == 1


async def test_another_thread_sees_the_state_before_the_first_request(folder: Path) -> None:
    engine = AsyncEngine.from_pretrained(folder, device="cpu", max_model_len=512)
    metrics = Metrics(engine, model_name="tiny")
    async with engine:
        scrape = await asyncio.to_thread(Scrape, metrics)
        assert scrape("engine_state", state="running") == 1
        assert "aioengine_kv_blocks" not in scrape.names()
        assert "aioengine_kv_blocks" in Scrape(metrics).names()


async def test_a_broken_metric_breaks_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_engine(folder) as engine:
        metrics = Metrics(engine, model_name="tiny")

        def fail(*args: Any) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr("aioengine.metrics._Buckets.observe", fail)
        outputs = await asyncio.gather(*(engine.generate("a", greedy(5)) for _ in range(3)))
        assert [len(output.token_ids) for output in outputs] == [5, 5, 5]
        assert not engine.instruments.watchers and not engine.instruments.listeners
        assert "a listener failed and was removed" in caplog.text
        assert Scrape(metrics)("requests_total", outcome="finished") == 3
        metrics.close()


# ---- the event loop's lag


class HandCrankedLoop:
    """A loop whose clock somebody else moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, Callable[[], object]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, due: float, callback: Callable[..., object], *args: object) -> None:
        self.timers.append((due, lambda: callback(*args)))

    def run_until(self, now: float) -> None:
        self.now = now
        timers, self.timers = self.timers, []
        for _, callback in timers:
            callback()


def test_lag_is_how_late_a_tick_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = HandCrankedLoop()
    monkeypatch.setattr("asyncio.get_running_loop", lambda: loop)
    late: list[float] = []

    def tick(seconds: float) -> bool:
        late.append(seconds)
        return len(late) < 3

    lag = LoopLag(tick)
    for _ in range(2):
        lag.begin()
    (timer,) = loop.timers
    assert timer[0] == 100.0 + TICK_S
    for now in (103.0, 103.0, 104.0):  # late by 2.9 s, early, late by 0.9 s
        loop.run_until(now)
    assert late == pytest.approx([3.0 - TICK_S, 0.0, 1.0 - TICK_S])
    assert not loop.timers, "it was told to end"
    lag.begin()
    assert len(loop.timers) == 1


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_ticks_go_on_for_as_long_as_the_engine_is_open(
    folder: Path, factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def run() -> None:
        engine = AsyncEngine.from_pretrained(folder, device="cpu", max_model_len=512)
        metrics = Metrics(engine, model_name="tiny")
        (meter,) = metrics._collector.meters.values()  # type: ignore[union-attr]
        async with engine:
            assert not meter._lag._is_ticking
            await engine.generate("a", greedy(3))
            assert meter._lag._is_ticking
            await until(lambda: Scrape(metrics)("event_loop_lag_seconds_count") >= 2)
        await until(lambda: not meter._lag._is_ticking)

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())


# ---- what is written of them


def test_the_page_lists_every_metric() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    rows = re.findall(r"^\| `(aioengine_\w+)` \| (\w+) \| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    listed = [
        (family.name, family.kind, ", ".join(f"`{name}`" for name in family.labels), family.meaning)
        for family in (*FIGURES, *HISTOGRAMS)
    ]
    assert rows == listed


def test_names_follow_the_conventions() -> None:
    names = [family.name for family in (*FIGURES, *HISTOGRAMS)]
    assert len(set(names)) == len(names)
    for figure in FIGURES:
        assert re.fullmatch(r"aioengine_[a-z_]+", figure.name)
        assert figure.meaning.endswith("."), figure.name
    for histogram in HISTOGRAMS:
        assert histogram.name.endswith(("_seconds", "_tokens"))
        assert list(histogram.bounds) == sorted(set(histogram.bounds))
    assert families.STAGE.values == (*STAGES, PROCESSORS)


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("aioengine.metrics", "prometheus_client", "serve"),
        ("aioengine.tracing", "opentelemetry", "telemetry"),
    ],
)
def test_a_missing_extra_is_named(module: str, missing: str, extra: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None\nimport {module}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert re.fullmatch(rf"ImportError: {module} needs .*pip install 'aioengine\[{extra}\]'", last)
