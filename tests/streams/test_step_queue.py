"""Steps in a queue: one call does them while the loop adds more; the encoder has its turn."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from aioengine.streams.cpu import CpuDevice
from aioengine.streams.pace import Pace
from tests.support.engines import until


class FakeQueue:
    """Steps that take no time; `gate` holds up the thread before each, if it is closed."""

    def __init__(self) -> None:
        self.event = os.eventfd(0, os.EFD_NONBLOCK)
        self.num_put = self.num_done = self.num_runs = 0
        self.limit = 0
        self.fault: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.log: list[str] = []
        self._changed = threading.Condition()

    def put(self) -> int:
        self.num_put += 1
        return self.num_put - 1

    def let(self, limit: int | None = None) -> None:
        with self._changed:
            self.limit = sys.maxsize if limit is None else limit
            self._changed.notify_all()

    def see(self) -> int:
        with suppress(BlockingIOError):
            os.eventfd_read(self.event)
        return self.num_done

    def run(self, patience_s: float) -> int:
        self.num_runs += 1
        while True:
            while self.num_done < min(self.num_put, self.limit):
                assert self.gate.wait(20)
                if self.fault is not None:
                    raise self.fault
                self.log.append(f"q{self.num_done}")
                self.num_done += 1
                os.eventfd_write(self.event, 1)
            with self._changed:
                is_due = self._changed.wait_for(
                    lambda: self.num_done < self.num_put or self.limit <= self.num_done,
                    patience_s,
                )
                if not is_due or self.limit <= self.num_done:
                    return self.num_done

    def read(self, number: int) -> tuple[str, float, float]:
        return f"q{number}", 0.0, 1.0


@pytest.fixture
def queue() -> Any:
    queue = FakeQueue()
    yield queue
    os.close(queue.event)


@pytest_asyncio.fixture
async def device(queue: FakeQueue) -> AsyncIterator[CpuDevice]:
    device = CpuDevice(asyncio.get_running_loop(), max_streak=4, linger_s=60)
    async with asyncio.timeout(20):
        yield device
        await device.aclose()


def submit(device: CpuDevice, queue: FakeQueue) -> asyncio.Future[Any]:
    number = queue.put()
    return device.submit_queued(queue, number, partial(queue.read, number))


def noted(queue: FakeQueue, name: str) -> Callable[[], None]:
    return partial(queue.log.append, name)


async def test_many_steps_take_one_call(device: CpuDevice, queue: FakeQueue) -> None:
    for first in range(0, 40, 4):
        found = await asyncio.gather(*(submit(device, queue) for _ in range(4)))
        assert [name for name, _, _ in found] == [f"q{first + i}" for i in range(4)]
    assert queue.num_runs < 40, "the thread came out for more again and again"


async def test_another_step_comes_after_those_in_the_queue(
    device: CpuDevice, queue: FakeQueue
) -> None:
    queue.gate.clear()
    queued = [submit(device, queue) for _ in range(3)]
    other = device.submit_step(noted(queue, "step"))
    assert not device.takes_queued, "it would come before that step"
    queue.gate.set()
    await asyncio.gather(*queued, other)
    assert queue.log == ["q0", "q1", "q2", "step"]
    await asyncio.sleep(0)
    assert device.takes_queued
    await submit(device, queue)


async def test_an_encoder_job_has_its_turn(device: CpuDevice, queue: FakeQueue) -> None:
    queue.gate.clear()
    queued = [submit(device, queue) for _ in range(10)]
    await until(lambda: queue.num_runs == 1)
    encode = device.submit_encode(noted(queue, "encode"), patience=2)
    queue.gate.set()
    await asyncio.gather(*queued, encode)
    assert queue.log.index("encode") == 2, "after as many steps as it has patience for"
    assert [name for name in queue.log if name != "encode"] == [f"q{i}" for i in range(10)]


async def test_an_encoder_job_waits_for_the_next_step_while_one_may_follow(
    device: CpuDevice, queue: FakeQueue
) -> None:
    await submit(device, queue)
    encode = device.submit_encode(noted(queue, "encode"))
    await submit(device, queue)
    assert queue.log == ["q0", "q1"]
    device.rest()
    await encode


async def test_a_queue_that_fails_tells_every_waiter(device: CpuDevice, queue: FakeQueue) -> None:
    queue.gate.clear()
    queued = [submit(device, queue) for _ in range(3)]
    queue.fault = RuntimeError("the queue is broken")
    queue.gate.set()
    for future in queued:
        with pytest.raises(RuntimeError, match="the queue is broken"):
            await future
    assert await device.submit_step(lambda: 7) == 7, "the thread lives"


@pytest.mark.parametrize("is_released", [False, True])
async def test_closing_cancels_what_has_not_begun(queue: FakeQueue, is_released: bool) -> None:
    device = CpuDevice(asyncio.get_running_loop())
    queue.gate.clear()
    queued = [submit(device, queue) for _ in range(3)]
    await until(lambda: queue.num_runs == 1)
    kept = [object()]
    closing = [device.release(kept.clear)] if is_released else []
    closing.append(asyncio.ensure_future(device.aclose()))
    await asyncio.sleep(0)
    queue.gate.set()
    await asyncio.gather(*closing, return_exceptions=True)
    assert all(future.cancelled() for future in queued)
    assert queue.log == ["q0"], "the one that ran is done, the others are not begun"
    assert device._queue is None
    if is_released:
        assert kept == [] or closing[0].cancelled()


def test_it_works_on_uvloop(queue: FakeQueue) -> None:
    async def main() -> None:
        device = CpuDevice(asyncio.get_running_loop())
        for _ in range(5):
            await submit(device, queue)
        await device.aclose()

    uvloop.run(main())
    assert queue.log == [f"q{i}" for i in range(5)]


async def test_a_rest_is_no_slow_turn(device: CpuDevice, queue: FakeQueue) -> None:
    await submit(device, queue)
    device.rest()
    assert device._ended_s is None
    await submit(device, queue)
    assert device.has_room(0) and not device.has_room(1)


# ---- how far ahead


def test_a_quick_loop_plans_no_step_ahead() -> None:
    pace = Pace()
    assert pace.ahead == 0
    for _ in range(50):
        pace.note_step(0.020)
        pace.note_turn(0.0008)
    assert pace.ahead == 0


@pytest.mark.parametrize(("step_s", "turn_s"), [(0.020, 0.015), (0.002, 0.015), (0.010, 0.010)])
def test_a_slow_loop_plans_as_far_ahead_as_it_is_slow(step_s: float, turn_s: float) -> None:
    pace = Pace()
    for _ in range(50):
        pace.note_step(step_s)
        pace.note_turn(turn_s)
    assert pace.ahead == min(Pace.MOST_AHEAD, -(-1.5 * turn_s // step_s))
    assert pace.ahead * step_s >= min(turn_s, Pace.MOST_AHEAD * step_s)


def test_one_slow_turn_is_believed_and_forgotten() -> None:
    pace = Pace()
    pace.note_step(0.010)
    pace.note_turn(0.030)
    assert pace.ahead > 1
    for _ in range(40):
        pace.note_turn(0.0001)
    assert pace.ahead == 0
