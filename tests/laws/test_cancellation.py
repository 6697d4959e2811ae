"""Law 6 on the real engine: cancel `generate` at every point where anything of it is awaited.

The points are counted as they come: every trip to a worker thread, every fetch, every job of the
device. For each of them, the request is cancelled just before it, and just after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine import AsyncEngine, MediaConfig, RequestOutput, SamplingParams
from aioengine.engine import input_processor as input_processor_module
from aioengine.media_pipeline import pipeline as pipeline_module
from aioengine.streams.loop_bridge import run_in
from tests.support.tiny import save_tiny_llava, tiny_image

PROMPT = "USER: <image>\nand <image>\nWhat is it? ASSISTANT:"
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
URL = "https://images.example/one.png"


async def fetcher(url: str) -> bytes:
    import io

    buffer = io.BytesIO()
    tiny_image(7).save(buffer, "PNG")
    await asyncio.sleep(0)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cancel")
    save_tiny_llava(path, torch.float32)
    return path


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine.from_pretrained(
        folder,
        block_size=4,
        kv_cache_bytes=1 << 20,
        max_num_batched_tokens=16,
        media=MediaConfig(fetcher=fetcher),
    ) as engine:
        yield engine


def ask(engine: AsyncEngine) -> asyncio.Task[RequestOutput]:
    return asyncio.ensure_future(engine.generate(PROMPT, PARAMS, images=[URL, tiny_image(1)]))


class Points:
    """Counts the engine's waits, and calls `strike` at the `number`-th of them."""

    def __init__(self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen = 0
        self.number = -1
        self.after = False
        self.strike: Callable[[], object] = lambda: None
        device, input_processor = engine._core.device, engine._core.input_processor
        monkeypatch.setattr(device, "submit_step", self._watch_future(device.submit_step))
        monkeypatch.setattr(device, "submit_queued", self._watch_future(device.submit_queued))
        monkeypatch.setattr(device, "submit_encode", self._watch_future(device.submit_encode))
        monkeypatch.setattr(input_processor_module, "run_in", self._watch_coroutine(run_in))
        pipeline = input_processor.media
        monkeypatch.setattr(pipeline, "_fetch", self._watch_coroutine(pipeline._fetch))
        monkeypatch.setattr(pipeline_module, "run_in", self._watch_coroutine(run_in))
        workers = pipeline._workers
        monkeypatch.setattr(workers, "run", self._watch_coroutine(workers.run))

    def arm(self, number: int, after: bool, strike: Callable[[], object]) -> None:
        self.seen, self.number, self.after, self.strike = 0, number, after, strike

    def _hit(self) -> bool:
        self.seen += 1
        return self.seen - 1 == self.number

    def _watch_future(self, submit: Any) -> Any:
        def watched(*job: Any, **options: Any) -> Any:
            hit = self._hit()
            if hit and not self.after:
                self.strike()
            future = submit(*job, **options)
            if hit and self.after:
                future.add_done_callback(lambda _: self.strike())
            return future

        return watched

    def _watch_coroutine(self, function: Any) -> Any:
        async def watched(*args: Any) -> Any:
            hit = self._hit()
            if hit and not self.after:
                self.strike()
            result = await function(*args)
            if hit and self.after:
                self.strike()
            return result

        return watched


async def settle(engine: AsyncEngine) -> None:
    """Wait until the steps and jobs in flight have committed."""
    for _ in range(10_000):
        now = engine.statistics()
        if not (engine._core.scheduler.num_in_flight or now.encoder_cache_referenced):
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the engine does not come to rest")


def assert_at_rest(engine: AsyncEngine) -> None:
    now = engine.statistics()
    assert (now.running, now.waiting) == (0, 0)
    assert now.kv_blocks_free == now.kv_blocks_total
    assert now.encoder_cache_referenced == 0
    assert engine._core.tracker is not None and not engine._core.tracker.states
    assert not engine._core.encoder_jobs._features and not engine._core.encoder_jobs._jobs
    assert not engine._core.scheduler.media._users and not engine._core.scheduler.media._decoded
    assert (
        not engine._core.input_processor.media._fetches._jobs
        and not engine._core.input_processor.media._works._jobs
    )
    assert engine._core.input_processor.media.held.num_bytes == 0
    engine._core.scheduler.pool.check()
    engine._core.scheduler.media.cache.check()


@pytest.mark.parametrize("with_company", [False, True])
@pytest.mark.parametrize("after", [False, True])
async def test_cancelled_at_every_point(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, after: bool, with_company: bool
) -> None:
    expected = (await ask(engine)).token_ids
    points = Points(engine, monkeypatch)
    number = num_cancelled = num_ended = 0
    while True:
        await engine.reset_caches()
        tasks: list[asyncio.Task[RequestOutput]] = []
        struck: list[bool] = []
        points.arm(number, after, lambda ts=tasks, of=struck: of.append(ts[0].cancel()))
        tasks.append(ask(engine))
        if with_company:
            tasks.append(ask(engine))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await settle(engine)
        assert_at_rest(engine)
        if isinstance(outcomes[0], asyncio.CancelledError):
            num_cancelled += 1
        # Its company goes on behind it, for longer where the machine is busy.
        num_ended += struck == [False]
        for outcome in outcomes[0 if points.seen <= number else 1 :]:
            assert isinstance(outcome, RequestOutput)
            assert outcome.token_ids == expected
        if points.seen <= number:
            break
        number += 1
    # Seven trips to threads, two fetches, two encoder runs and at least six steps.
    assert num_cancelled == number - num_ended >= 15


async def test_cancelled_at_every_tick(engine: AsyncEngine) -> None:
    """After any number of turns of the event loop, too."""
    expected = (await ask(engine)).token_ids
    for ticks in range(0, 60, 2):
        await engine.reset_caches()
        task = ask(engine)
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await settle(engine)
        assert_at_rest(engine)
    assert (await ask(engine)).token_ids == expected


async def test_a_timeout_around_generate(engine: AsyncEngine) -> None:
    """The usual way to cancel."""
    expected = (await ask(engine)).token_ids
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await ask(engine)
    await settle(engine)
    assert_at_rest(engine)
    assert (await ask(engine)).token_ids == expected
