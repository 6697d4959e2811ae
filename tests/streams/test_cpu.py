"""The CPU's queues: steps first, the encoder in its turn, every job's end told to its waiter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from aioengine.streams.cpu import CpuDevice

FOREVER_S = 60.0
"""Linger so long that a test would fail if the device's clock decided anything."""


@pytest_asyncio.fixture
async def device() -> AsyncIterator[CpuDevice]:
    device = CpuDevice(asyncio.get_running_loop(), max_streak=4, linger_s=FOREVER_S)
    async with asyncio.timeout(20):
        yield device
        await device.aclose()


class Log:
    """What ran, in order; `gate` holds up the job that waits for it."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.gate = threading.Event()
        self.is_held = threading.Event()

    def job(self, name: str) -> Callable[[], str]:
        return partial(self._run, name)

    def _run(self, name: str) -> str:
        self.names.append(name)
        return name

    def held(self) -> None:
        self.is_held.set()
        assert self.gate.wait(20)

    async def hold(self, device: CpuDevice) -> asyncio.Future[None]:
        """Have the device's thread wait for the gate."""
        future = device.submit_encode(self.held)
        await asyncio.to_thread(self.is_held.wait, 20)
        return future


async def test_jobs_run_in_the_order_of_their_queue_on_one_thread(device: CpuDevice) -> None:
    threads = await asyncio.gather(*(device.submit_step(threading.get_ident) for _ in range(5)))
    assert len(set(threads)) == 1 and threads[0] != threading.get_ident()
    log = Log()
    results = await asyncio.gather(*(device.submit_step(log.job(f"s{n}")) for n in range(20)))
    assert results == log.names == [f"s{n}" for n in range(20)]


async def test_steps_go_before_encoder_jobs_that_came_first(device: CpuDevice) -> None:
    log = Log()
    await log.hold(device)
    jobs = [device.submit_encode(log.job("e0"))]
    jobs += [device.submit_step(log.job(f"s{n}")) for n in range(3)]
    log.gate.set()
    await asyncio.gather(*jobs[1:])
    assert log.names == ["s0", "s1", "s2"]
    device.rest()
    await jobs[0]


async def test_an_encoder_job_gets_its_turn_after_a_streak_of_steps(device: CpuDevice) -> None:
    log = Log()
    await log.hold(device)
    jobs = [device.submit_step(log.job("s")) for _ in range(10)]
    jobs += [device.submit_encode(log.job("e")) for _ in range(3)]
    log.gate.set()
    await asyncio.gather(*jobs[:-1])
    device.rest()
    await jobs[-1]
    assert log.names == [*"ssssessssesse"]


async def test_an_encoder_job_may_have_less_patience(device: CpuDevice) -> None:
    log = Log()
    await log.hold(device)
    jobs = [device.submit_step(log.job("s")) for _ in range(10)]
    jobs += [device.submit_encode(log.job("e"), patience=n) for n in (1, 2, 9)]
    log.gate.set()
    await asyncio.gather(*jobs)
    assert "".join(log.names) == "sessessssesss"


async def test_no_encoder_job_slips_between_a_step_and_the_next(device: CpuDevice) -> None:
    """The loop plans each step when the one before it has committed, as the engine does."""
    log = Log()
    await device.submit_step(log.job("s"))
    encodes = [device.submit_encode(log.job("e")) for _ in range(3)]
    for _ in range(9):
        await asyncio.sleep(0.001)  # a slow commit
        await device.submit_step(log.job("s"))
    device.rest()
    await asyncio.gather(*encodes)
    assert "".join(log.names) == "ssssessssesse"


async def test_rest_lets_the_encoder_begin(device: CpuDevice) -> None:
    log = Log()
    await device.submit_step(log.job("s"))
    encode = device.submit_encode(log.job("e"))
    await asyncio.wait([encode], timeout=0.05)
    assert not encode.done()
    device.rest()
    device.rest()
    assert await encode == "e"


async def test_waiting_for_a_next_step_has_an_end() -> None:
    device = CpuDevice(asyncio.get_running_loop(), linger_s=0.01)
    log = Log()
    await device.submit_step(log.job("s"))
    async with asyncio.timeout(10):
        assert await device.submit_encode(log.job("e")) == "e"
    await device.aclose()


class Odd(BaseException):
    """Neither an Exception nor one of Python's own."""


@pytest.mark.parametrize("submit", [CpuDevice.submit_step, CpuDevice.submit_encode])
@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ValueError, ValueError),
        (StopIteration, RuntimeError),
        (SystemExit, RuntimeError),
        (KeyboardInterrupt, RuntimeError),
        (asyncio.CancelledError, RuntimeError),
        (Odd, RuntimeError),
    ],
)
async def test_a_jobs_exception_is_its_waiters(
    device: CpuDevice, submit: Any, raised: type[BaseException], told: type[Exception]
) -> None:
    error = raised()

    def fail() -> None:
        raise error

    with pytest.raises(told) as caught:
        await submit(device, fail)
    assert caught.value is error or caught.value.__cause__ is error
    device.rest()
    assert await submit(device, lambda: "alive") == "alive"


async def test_a_cancelled_waiter_disturbs_nobody(device: CpuDevice) -> None:
    log = Log()
    held = await log.hold(device)
    first, second = (device.submit_step(log.job(f"s{n}")) for n in range(2))
    held.cancel()
    first.cancel()
    log.gate.set()
    assert await second == "s1"
    assert log.names == ["s0", "s1"], "what was handed in is done"


async def test_closing_cancels_what_has_not_begun() -> None:
    device = CpuDevice(asyncio.get_running_loop())
    log = Log()
    held = await log.hold(device)
    queued = [device.submit_step(log.job("s")), device.submit_encode(log.job("e"))]
    closing = [asyncio.create_task(device.aclose()) for _ in range(2)]
    await asyncio.sleep(0)
    assert device.submit_step(log.job("late")).cancelled()
    log.gate.set()
    await asyncio.gather(*closing)
    assert await held is None
    assert all(future.cancelled() for future in queued)
    assert log.names == []
    assert not any(thread.name == "aioengine-device" for thread in threading.enumerate())
    await device.aclose()


async def test_a_cancelled_closing_can_be_repeated() -> None:
    device = CpuDevice(asyncio.get_running_loop())
    log = Log()
    await log.hold(device)
    closing = asyncio.create_task(device.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    log.gate.set()
    await device.aclose()


def test_the_thread_ends_when_the_loop_has_gone() -> None:
    loop = asyncio.new_event_loop()

    async def start() -> tuple[CpuDevice, Log]:
        device, log = CpuDevice(loop), Log()
        await log.hold(device)
        return device, log

    device, log = loop.run_until_complete(start())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    log.gate.set()
    device._thread.join(20)
    assert not device._thread.is_alive()


def test_it_works_on_uvloop() -> None:
    async def main() -> list[int]:
        device = CpuDevice(asyncio.get_running_loop())
        jobs = [partial(pow, n, 2) for n in range(50)]
        results = await asyncio.gather(*(device.submit_step(job) for job in jobs))
        await device.aclose()
        return results

    assert uvloop.run(main()) == [n * n for n in range(50)]
