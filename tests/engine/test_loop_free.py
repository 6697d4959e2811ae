"""The caller's loop stays free while large images are decoded and streams run.

Two measures, because a test machine is noisy. *Held*: CPU time of the loop's thread within one
callback; other processes hardly count into it, but a garbage collection, a core that the
machine's host takes away and a wait for the interpreter's lock do, which wakes the thread every
switch interval. *Stall*: how late a short sleep ends, which also sees other threads
that hold the interpreter's lock. From it is taken the time for which the kernel let one of our
threads, ready to run, wait for a core (Linux tells): it may be the loop's thread or the one that
holds the lock, and on a machine with cores to spare it is next to nothing. What is left can still
be noise, so the best of a few attempts counts. Decoders that block, on the loop or with the lock
held, are as bad in each attempt, and are caught below.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest
from PIL import Image

from aioengine import AsyncEngine
from tests.support.engines import greedy, running_engine, settled
from tests.support.tiny import save_tiny_llava

NUM_IMAGES = 32
NUM_STREAMS = 4
MAX_STALL_S = 0.020
MAX_HELD_S = 0.010
ATTEMPTS = 5
TICK_S = 0.001

# As it is before the session's own detector wraps it, which need not judge the blocking variant.
_RUN = asyncio.events.Handle._run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_llava")
    save_tiny_llava(path, max_position_embeddings=8192)
    return path


@pytest.fixture(scope="module")
def images() -> list[bytes]:
    """JPEGs of 3840 x 2160 that differ in a comment: equal work, but none is another's equal."""
    small = np.random.default_rng(0).integers(0, 256, (9, 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((3840, 2160), Image.Resampling.BICUBIC).save(
        buffer, "JPEG", quality=80
    )
    data = buffer.getvalue()
    comments = [b"\xff\xfe\x00\x04%02d" % number for number in range(NUM_IMAGES)]
    return [data[:2] + comment + data[2:] for comment in comments]


class RunQueue:
    """For how long each thread of this process has waited, ready to run, for a core."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._num_looks = 0

    def delays_s(self) -> dict[str, float]:
        """Thread -> seconds so far; nothing where the system does not tell."""
        if self._num_looks % 32 == 0:
            self._open_new()
        self._num_looks += 1
        delays = {}
        for thread, file in list(self._files.items()):
            try:
                delays[thread] = int(os.pread(file, 100, 0).split()[1]) / 1e9
            except (OSError, IndexError):  # the thread has ended
                os.close(self._files.pop(thread))
        return delays

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _open_new(self) -> None:
        with contextlib.suppress(OSError):
            for thread in set(os.listdir("/proc/self/task")) - self._files.keys():
                path = f"/proc/self/task/{thread}/schedstat"
                self._files[thread] = os.open(path, os.O_RDONLY)


@dataclass
class LoopProbe:
    """Watches the running loop while it is entered. Seconds."""

    longest_held: float = 0.0
    longest_stall: float = 0.0
    longest_lag: float = 0.0
    num_ticks: int = 0
    _queue: RunQueue = field(default_factory=RunQueue, repr=False)
    _patch: pytest.MonkeyPatch = field(default_factory=pytest.MonkeyPatch, repr=False)

    @property
    def is_free(self) -> bool:
        return self.longest_held < MAX_HELD_S and self.longest_stall < MAX_STALL_S

    async def __aenter__(self) -> Self:
        self._patch.setattr(asyncio.events.Handle, "_run", self._timed_run())
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._patch.undo()
        self._task.cancel()
        await asyncio.wait([self._task])
        self._queue.close()

    def _timed_run(self) -> Callable[[asyncio.events.Handle], None]:
        def timed_run(handle: asyncio.events.Handle) -> None:
            begin = time.thread_time()
            _RUN(handle)
            self.longest_held = max(self.longest_held, time.thread_time() - begin)

        return timed_run

    async def _tick(self) -> None:
        while True:
            due, before = time.perf_counter() + TICK_S, self._queue.delays_s()
            await asyncio.sleep(TICK_S)
            lag = time.perf_counter() - due
            if lag > self.longest_stall:
                after = self._queue.delays_s()
                waited = [after[thread] - before[thread] for thread in before.keys() & after]
                self.longest_stall = max(self.longest_stall, lag - max(waited, default=0.0))
            self.longest_lag = max(self.longest_lag, lag)
            self.num_ticks += 1


async def measure(engine: AsyncEngine, images: list[bytes]) -> LoopProbe:
    """All images at once beside running streams; the streams must get on meanwhile."""
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(engine.stream([5 + n, 20], greedy(4000)))
            for n in range(NUM_STREAMS)
        ]
        for stream in streams:
            await stream.receive()
        before = [stream.statistics().deltas_pushed for stream in streams]
        async with LoopProbe() as probe:
            outputs = await asyncio.gather(
                *(engine.generate("<image>", greedy(2), images=[data]) for data in images)
            )
        assert all(len(output.token_ids) == 2 for output in outputs)
        for stream, count in zip(streams, before, strict=True):
            assert stream.statistics().deltas_pushed > count + len(images)
    return probe


async def test_many_large_images_do_not_hold_the_loop(folder: Path, images: list[bytes]) -> None:
    async with running_engine(folder, max_model_len=5000, kv_cache_bytes=64 << 20) as engine:
        probes = []
        for _ in range(ATTEMPTS):
            probes.append(await measure(engine, images))
            assert probes[-1].num_ticks > 100
            if probes[-1].is_free:
                break
            await settled(engine)
            await engine.reset_caches()
        assert probes[-1].is_free, probes
        assert engine.statistics().stages["decode"].count >= NUM_IMAGES


def decode_by(workers: Any, around: Callable[[Callable[[], Any]], Awaitable[Any]]) -> Any:
    """A stand-in for a worker thread: `around` runs the decoding its own way."""
    return lambda work: around(lambda: workers._work(work))


async def test_a_decoder_on_the_loop_is_caught(
    folder: Path, images: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def decode_inline(decode: Callable[[], Any]) -> Any:
        return decode()

    async with running_engine(folder, max_model_len=5000, kv_cache_bytes=64 << 20) as engine:
        workers: Any = engine._core.input_processor.media._workers
        monkeypatch.setattr(workers, "run", decode_by(workers, decode_inline))
        probe = await measure(engine, images[:2])
    assert probe.longest_held > MAX_STALL_S
    assert probe.longest_stall > MAX_STALL_S


async def test_a_decoder_that_keeps_the_interpreters_lock_is_caught(
    folder: Path, images: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    number, took = 3, 0.0
    while took < 0.1:  # one multiplication, which lets no other thread run
        number, begin = number * number, time.thread_time()
        number * number
        took = time.thread_time() - begin

    switch_interval_s = sys.getswitchinterval()

    def hold_the_lock() -> None:
        # Nobody else runs meanwhile, so the interval only tells how often those who wait wake.
        sys.setswitchinterval(10)
        number * number
        sys.setswitchinterval(switch_interval_s)

    async def decode_locked(decode: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(lambda: (hold_the_lock(), decode())[1])

    async with running_engine(folder, max_model_len=5000, kv_cache_bytes=64 << 20) as engine:
        workers: Any = engine._core.input_processor.media._workers
        monkeypatch.setattr(workers, "run", decode_by(workers, decode_locked))
        probe = await measure(engine, images[:2])
    assert probe.longest_held < MAX_HELD_S
    assert probe.longest_stall > MAX_STALL_S
