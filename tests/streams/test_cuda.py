"""The GPU's queues against a driver whose device moves when the test says so."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from aioengine.streams.cuda import CudaDevice, TorchDriver
from aioengine.streams.device import DECODER, ENCODER
from aioengine.types import Launched

WAIT_S = 20


class FakeMark:
    """Passed when the test says so."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.error: Exception | None = None

    def synchronize(self) -> None:
        assert self.passed.wait(WAIT_S)
        if self.error is not None:
            raise self.error


class FakeDriver:
    """Remembers what was launched into which queue, and on which thread."""

    def __init__(self) -> None:
        self.current: str | None = None
        self.marks: dict[str, list[FakeMark]] = {DECODER: [], ENCODER: []}
        self.threads: set[int] = set()
        self.attached: set[int] = set()
        self.launched = threading.Semaphore(0)
        self.failure: Exception | None = None
        self.attach_failure: Exception | None = None
        self.num_stops = 0

    def stop(self) -> None:
        self.threads.add(threading.get_ident())
        self.num_stops += 1
        raise OSError("the device is gone")

    def start(self) -> None:
        self.threads.add(threading.get_ident())
        if self.failure is not None:
            raise self.failure

    def attach(self) -> None:
        self.attached.add(threading.get_ident())
        if self.attach_failure is not None:
            raise self.attach_failure

    @contextlib.contextmanager
    def queue(self, name: str) -> Iterator[None]:
        assert self.current is None
        self.current = name
        try:
            yield
        finally:
            self.current = None

    def mark(self, name: str) -> FakeMark:
        self.threads.add(threading.get_ident())
        mark = FakeMark()
        self.marks[name].append(mark)
        self.launched.release()
        return mark

    async def wait_for(self, count: int) -> None:
        """Until so many more jobs are launched."""
        for _ in range(count):
            assert await asyncio.to_thread(self.launched.acquire, True, WAIT_S)

    def pass_all(self) -> None:
        for marks in self.marks.values():
            for mark in marks:
                mark.passed.set()


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest_asyncio.fixture
async def device(driver: FakeDriver) -> AsyncIterator[CudaDevice]:
    device = CudaDevice(asyncio.get_running_loop(), driver)
    async with asyncio.timeout(WAIT_S):
        yield device
        driver.pass_all()
        await device.aclose()


def reading(value: object, log: list[object]) -> Callable[[], Launched[object]]:
    """A job whose result is read later; `log` says when."""

    def read() -> object:
        log.append(value)
        return value

    return lambda: Launched(read)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0.001)


async def test_a_second_step_is_launched_while_the_first_runs(
    driver: FakeDriver, device: CudaDevice
) -> None:
    log: list[object] = []
    first, second = (device.submit_step(reading(name, log)) for name in "ab")
    await driver.wait_for(2)
    await turns()
    assert not first.done() and not second.done() and log == []
    driver.marks[DECODER][1].passed.set()
    await turns()
    assert not second.done(), "a queue's jobs end in their order"
    driver.marks[DECODER][0].passed.set()
    assert await asyncio.gather(first, second) == ["a", "b"] == log


async def test_an_encoder_run_holds_up_no_step(driver: FakeDriver, device: CudaDevice) -> None:
    log: list[object] = []
    encode = device.submit_encode(reading("rows", log))
    await driver.wait_for(1)
    for number in range(3):
        step = device.submit_step(reading(number, log))
        await driver.wait_for(1)
        driver.marks[DECODER][number].passed.set()
        assert await step == number
    assert not encode.done()
    driver.marks[ENCODER][0].passed.set()
    assert await encode == "rows"
    assert log == [0, 1, 2, "rows"]


async def test_jobs_run_in_their_queue_on_one_thread(
    driver: FakeDriver, device: CudaDevice
) -> None:
    seen: list[tuple[str | None, int]] = []

    def job() -> None:
        seen.append((driver.current, threading.get_ident()))

    futures = [device.submit_step(job), device.submit_encode(job), device.submit_step(job)]
    await driver.wait_for(3)
    driver.pass_all()
    await asyncio.gather(*futures)
    assert sorted(str(queue) for queue, _ in seen) == [DECODER, DECODER, ENCODER]
    assert {thread for _, thread in seen} == driver.threads
    assert len(driver.threads) == 1 and threading.get_ident() not in driver.threads


async def test_steps_are_launched_before_encoder_runs(
    driver: FakeDriver, device: CudaDevice
) -> None:
    gate, order = threading.Event(), []
    held = device.submit_step(lambda: gate.wait(WAIT_S))
    encode = device.submit_encode(lambda: order.append("encode"))
    step = device.submit_step(lambda: order.append("step"))
    gate.set()
    await driver.wait_for(3)
    driver.pass_all()
    await asyncio.gather(held, encode, step)
    assert order == ["step", "encode"]


async def test_an_encoder_run_has_its_turn(driver: FakeDriver, device: CudaDevice) -> None:
    """However many steps follow each other."""
    gate, order = threading.Event(), []
    held = device.submit_step(lambda: gate.wait(WAIT_S))
    futures = [device.submit_encode(lambda: order.append("encode"))]
    futures += [device.submit_step(lambda: order.append("step")) for _ in range(20)]
    gate.set()
    await driver.wait_for(22)
    driver.pass_all()
    await asyncio.gather(held, *futures)
    assert order.index("encode") <= 4


async def test_what_goes_wrong_reaches_its_waiter_alone(
    driver: FakeDriver, device: CudaDevice
) -> None:
    def fails() -> None:
        raise ValueError("at launch")

    def fails_later() -> Launched[None]:
        def read() -> None:
            raise KeyError("when read")

        return Launched(read)

    with pytest.raises(ValueError, match="at launch"):
        await device.submit_step(fails)
    broken, unread, fine = (
        device.submit_step(lambda: 1),
        device.submit_step(fails_later),
        device.submit_step(lambda: 2),
    )
    await driver.wait_for(3)
    driver.marks[DECODER][0].error = RuntimeError("on the device")
    driver.pass_all()
    results = await asyncio.gather(broken, unread, fine, return_exceptions=True)
    assert [type(result) for result in results] == [RuntimeError, KeyError, int]


async def test_a_driver_that_does_not_start() -> None:
    driver = FakeDriver()
    driver.failure = OSError("no device")
    device = CudaDevice(asyncio.get_running_loop(), driver)
    for _ in range(2):
        with pytest.raises(OSError, match="no device"):
            await device.submit_step(lambda: 1)
    await device.aclose()


async def test_threads_that_wait_are_on_the_device_first(
    driver: FakeDriver, device: CudaDevice
) -> None:
    jobs = [device.submit_step(lambda: 1), device.submit_encode(lambda: 2)]
    await driver.wait_for(2)
    driver.pass_all()
    assert await asyncio.gather(*jobs) == [1, 2]
    assert len(driver.attached) == 2 and not driver.attached & driver.threads


async def test_the_driver_is_stopped_behind_the_last_job(driver: FakeDriver) -> None:
    """And whatever that raises, the device is closed."""
    device = CudaDevice(asyncio.get_running_loop(), driver)
    job = device.submit_step(lambda: 1)
    await driver.wait_for(1)
    closing = asyncio.create_task(device.aclose())
    await turns()
    assert not driver.num_stops
    driver.pass_all()
    assert await job == 1
    await closing
    assert driver.num_stops == 1 and len(driver.threads) == 1


async def test_a_thread_that_cannot_wait_says_so() -> None:
    driver = FakeDriver()
    driver.attach_failure = OSError("no context")
    device = CudaDevice(asyncio.get_running_loop(), driver)
    with pytest.raises(OSError, match="no context"):
        await device.submit_step(lambda: 1)
    await device.aclose()


class Bindings(ModuleType):
    """Stands for `cuda.core`; `failure` is raised by what asks for the device."""

    class StreamOptions:
        def __init__(self, **options: object) -> None:
            self.options = options

    def __init__(self, failure: Exception | None) -> None:
        super().__init__("cuda.core")
        self.failure = failure

    def Device(self, _number: int) -> Any:
        if self.failure is not None:
            raise self.failure
        stream = SimpleNamespace(handle=77)
        return SimpleNamespace(set_current=lambda: None, create_stream=lambda options: stream)


@pytest.mark.parametrize("failure", [None, RuntimeError("driver too old"), ImportError("none")])
def test_torchs_streams_where_the_bindings_fail(
    failure: Exception | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What cuda.core raises where it does not fit the driver is no error of an engine's."""
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.core", Bindings(failure))
    driver = TorchDriver("cuda:1")

    def new_stream(device: object, priority: int) -> tuple[str, object, int]:
        return "torch's", device, priority

    new_stream.priority_range = lambda: (0, -3)  # type: ignore[attr-defined]
    chosen: list[object] = []
    driver._cuda = SimpleNamespace(
        set_device=chosen.append,
        current_device=lambda: 1,
        Stream=new_stream,
        ExternalStream=lambda handle, device: ("borrowed", device, handle),
        synchronize=lambda device: chosen.append(f"{device} is waited for"),
        empty_cache=lambda: chosen.append("its memory is given back"),
    )
    driver.start()
    driver.attach()
    assert chosen == ["cuda:1", "cuda:1"]
    if failure is None:
        expected = {DECODER: ("borrowed", "cuda:1", 77), ENCODER: ("borrowed", "cuda:1", 77)}
    else:
        expected = {DECODER: ("torch's", "cuda:1", -3), ENCODER: ("torch's", "cuda:1", 0)}
    assert driver._streams == expected
    driver.stop()
    assert chosen[2:] == ["cuda:1 is waited for", "its memory is given back"]
    assert not driver._streams and not driver._kept
    warned = [record.message for record in caplog.records]
    assert len(warned) == (1 if isinstance(failure, RuntimeError) else 0), warned


async def test_closing_waits_for_what_is_launched_and_cancels_the_rest(
    driver: FakeDriver, device: CudaDevice
) -> None:
    gate, is_running = threading.Event(), threading.Event()
    launched = device.submit_step(lambda: 1)
    await driver.wait_for(1)

    def runs() -> bool:
        is_running.set()
        return gate.wait(WAIT_S)

    running = device.submit_step(runs)
    assert await asyncio.to_thread(is_running.wait, WAIT_S)
    queued = [device.submit_step(lambda: 3), device.submit_encode(lambda: 4)]
    closing = asyncio.ensure_future(device.aclose())
    await turns()
    gate.set()
    await driver.wait_for(1)
    await turns()
    assert not closing.done() and not launched.done()
    driver.pass_all()
    await closing
    assert await launched == 1 and await running is True
    assert all(future.cancelled() for future in queued)
    assert device.submit_step(lambda: 5).cancelled()
    await device.aclose()


async def test_a_waiter_that_has_left(driver: FakeDriver, device: CudaDevice) -> None:
    left = device.submit_step(lambda: 1)
    await driver.wait_for(1)
    left.cancel()
    stays = device.submit_step(lambda: 2)
    await driver.wait_for(1)
    driver.pass_all()
    assert await stays == 2
    assert left.cancelled()
