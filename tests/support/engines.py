"""Engines over tiny models for tests: starting one, and seeing that nothing is left in it."""

from __future__ import annotations

import asyncio
import io
import itertools
import threading
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from PIL import Image

from aioengine import AsyncEngine, EngineStatistics, SamplingParams
from aioengine.instruments import StageSpan

DEADLINE_S = 30.0
"""Bounds every wait of a test, so that a hang is a failure with a stack."""


def greedy(max_tokens: int = 8, **options: Any) -> SamplingParams:
    """Greedy sampling of exactly `max_tokens` tokens."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def encoded(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    """An image file's bytes."""
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


@asynccontextmanager
async def running_engine(folder: Path, **options: Any) -> AsyncIterator[AsyncEngine]:
    """A started engine of small sizes; at the end it has to be at rest."""
    sizes = {
        "device": "cpu",
        "dtype": "float64",  # so that company changes no rounding, and equal means equal
        "max_model_len": 512,
        "kv_cache_bytes": 8 << 20,
        "block_size": 16,
    }
    async with AsyncEngine.from_pretrained(folder, **{**sizes, **options}) as engine:
        yield engine
        await settled(engine)


def is_at_rest(statistics: EngineStatistics) -> bool:
    """Whether every counter of things held is where it was at the start."""
    return (
        statistics.running == statistics.waiting == 0
        and statistics.kv_blocks_free == statistics.kv_blocks_total
        and statistics.states_free == statistics.states_total
        and statistics.encoder_cache_referenced == 0
    )


def assert_at_rest(engine: AsyncEngine) -> None:
    """Nothing is running, waiting or held."""
    statistics = engine.statistics()
    assert is_at_rest(statistics), statistics
    core = engine._core
    assert core is None or core.is_released or core.input_processor.media.held.num_bytes == 0


async def settled(engine: AsyncEngine) -> None:
    """Wait until the steps and encoder runs in flight have committed; then all must be at rest."""
    with suppress(TimeoutError):
        await until(lambda: is_at_rest(engine.statistics()), timeout_s=10)
    assert_at_rest(engine)


async def until(condition: Any, timeout_s: float = DEADLINE_S) -> None:
    """Wait until `condition()` is true, for states that nothing announces."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.001)


class Spans:
    """A listener that keeps an engine's spans and lets a test wait for the next one."""

    def __init__(self, engine: AsyncEngine, stage: str = "step") -> None:
        self.spans: list[StageSpan] = []
        self._stage = stage
        self._changed = asyncio.Event()
        engine.instruments.listeners.append(self._keep)

    def _keep(self, span: StageSpan) -> None:
        if span.stage == self._stage:
            self.spans.append(span)
            self._changed.set()

    def of(self, request_id: str) -> list[StageSpan]:
        """The spans that a request had a part in."""
        return [span for span in self.spans if request_id in span.requests]

    async def wait_for(self, request_id: str, count: int = 1) -> None:
        """Wait until a request has had its part in `count` spans."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.of(request_id)) < count:
                self._changed.clear()
                await self._changed.wait()


@types.coroutine
def cancelled_at(coroutine: Coroutine[Any, Any, Any], index: int) -> Generator[Any, Any, Any]:
    """Await `coroutine`, cancelling the current task when it waits for the `index`-th time."""
    resume: Callable[[Any], Any] = coroutine.send
    value: Any = None
    for number in itertools.count():
        try:
            waited_for = resume(value)
        except StopIteration as end:
            return end.value
        if number == index:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        try:
            resume, value = coroutine.send, (yield waited_for)
        except BaseException as error:
            resume, value = coroutine.throw, error
    raise AssertionError


def engine_threads() -> list[str]:
    """The names of the engines' own threads that are alive."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("aioengine")]


def other_tasks() -> set[asyncio.Task[Any]]:
    """The running loop's tasks beside the current one."""
    return asyncio.all_tasks() - {asyncio.current_task()}
