"""The GPU's queues against a driver whose device moves when the test says so."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from aioengine.streams import cuda
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
        self._local = threading.local()
        self.marks: dict[str, list[FakeMark]] = {DECODER: [], ENCODER: []}
        self.threads: dict[str, set[str]] = {DECODER: set(), ENCODER: set()}
        self.started: list[str] = []
        self.attached: list[str] = []
        self.stopped: list[str] = []
        self.launched = threading.Semaphore(0)
        self.failure: Exception | None = None
        self.attach_failure: Exception | None = None

    @property
    def current(self) -> str | None:
        """The queue that this thread launches into."""
        current: str | None = getattr(self._local, "current", None)
        return current

    def stop(self) -> None:
        self.stopped.append(thread_name())
        raise OSError("the device is gone")

    def start(self) -> None:
        self.started.append(thread_name())
        if self.failure is not None:
            raise self.failure

    def attach(self) -> None:
        self.attached.append(thread_name())
        if self.attach_failure is not None:
            raise self.attach_failure

    @contextlib.contextmanager
    def queue(self, name: str) -> Iterator[None]:
        assert self.current is None
        self._local.current = name
        try:
            yield
        finally:
            self._local.current = None

    def mark(self, name: str) -> FakeMark:
        self.threads[name].add(thread_name())
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


def thread_name() -> str:
    return threading.current_thread().name


def device_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("aioengine-")]


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


class Held:
    """A job that blocks its launch thread, as an encoder does that waits for the device."""

    def __init__(self) -> None:
        self.gate, self.is_running = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.is_running.set()
        assert self.gate.wait(WAIT_S)
        return "held"

    async def begins(self) -> None:
        assert await asyncio.to_thread(self.is_running.wait, WAIT_S)


async def test_each_queue_is_launched_by_a_thread_of_its_own(
    driver: FakeDriver, device: CudaDevice
) -> None:
    seen: list[tuple[str | None, str]] = []

    def job() -> None:
        seen.append((driver.current, thread_name()))

    submit = (device.submit_step, device.submit_encode)
    futures = [submit[number % 2](job) for number in range(6)]
    await driver.wait_for(6)
    driver.pass_all()
    await asyncio.gather(*futures)
    assert sorted(seen) == [
        *[(DECODER, "aioengine-device")] * 3,
        *[(ENCODER, "aioengine-encoder")] * 3,
    ]
    assert driver.threads == {DECODER: {"aioengine-device"}, ENCODER: {"aioengine-encoder"}}


async def test_an_encoder_job_that_blocks_delays_no_launch(
    driver: FakeDriver, device: CudaDevice
) -> None:
    held, log = Held(), list[object]()
    encode, behind = device.submit_encode(held), device.submit_encode(reading("behind", log))
    await held.begins()
    for number in range(5):
        step = device.submit_step(reading(number, log))
        await driver.wait_for(1)
        driver.marks[DECODER][number].passed.set()
        assert await step == number
    assert not encode.done() and not behind.done() and not driver.marks[ENCODER]
    held.gate.set()
    await driver.wait_for(2)
    driver.pass_all()
    assert await asyncio.gather(encode, behind) == ["held", "behind"]


async def test_a_step_that_blocks_delays_no_encoder_job(
    driver: FakeDriver, device: CudaDevice
) -> None:
    held = Held()
    step = device.submit_step(held)
    await held.begins()
    encode = device.submit_encode(lambda: "rows")
    await driver.wait_for(1)
    driver.marks[ENCODER][0].passed.set()
    assert await encode == "rows"
    assert not step.done()
    held.gate.set()
    await driver.wait_for(1)
    driver.pass_all()
    assert await step == "held"


async def test_each_queues_jobs_are_marked_in_their_order(
    driver: FakeDriver, device: CudaDevice
) -> None:
    log: list[object] = []
    steps = [device.submit_step(reading(f"s{n}", log)) for n in range(4)]
    encodes = [device.submit_encode(reading(f"e{n}", log)) for n in range(4)]
    await driver.wait_for(8)
    for mark in reversed(driver.marks[ENCODER]):
        mark.passed.set()
    await asyncio.gather(*encodes)
    assert log == ["e0", "e1", "e2", "e3"] and not any(step.done() for step in steps)
    for mark in reversed(driver.marks[DECODER]):
        mark.passed.set()
    await asyncio.gather(*steps)
    assert log[4:] == ["s0", "s1", "s2", "s3"]


@pytest.mark.parametrize(
    ("faulty", "sound"),
    [
        (CudaDevice.submit_encode, CudaDevice.submit_step),
        (CudaDevice.submit_step, CudaDevice.submit_encode),
    ],
)
async def test_a_fault_in_one_queue_leaves_the_other(
    driver: FakeDriver, device: CudaDevice, faulty: Any, sound: Any
) -> None:
    def fails() -> None:
        raise ValueError("at launch")

    running = sound(device, lambda: 1)
    await driver.wait_for(1)
    with pytest.raises(ValueError, match="at launch"):
        await faulty(device, fails)
    follows, again = sound(device, lambda: 2), faulty(device, lambda: 3)
    await driver.wait_for(2)
    driver.pass_all()
    assert await asyncio.gather(running, follows, again) == [1, 2, 3]


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
    for submit in (device.submit_step, device.submit_encode):
        with pytest.raises(OSError, match="no device"):
            await submit(lambda: 1)
    await device.aclose()
    assert device_threads() == []


async def test_other_threads_are_on_the_device_first(
    driver: FakeDriver, device: CudaDevice
) -> None:
    jobs = [device.submit_step(lambda: 1), device.submit_encode(lambda: 2)]
    await driver.wait_for(2)
    driver.pass_all()
    assert await asyncio.gather(*jobs) == [1, 2]
    assert driver.started == ["aioengine-device"]
    waiting = ["aioengine-wait-decoder", "aioengine-wait-encoder"]
    assert sorted(driver.attached) == ["aioengine-encoder", *waiting]


async def test_the_driver_is_stopped_behind_the_last_job_of_both_queues(
    driver: FakeDriver,
) -> None:
    """And whatever that raises, the device is closed, and no thread is left."""
    device = CudaDevice(asyncio.get_running_loop(), driver)
    held = Held()
    step, encode = device.submit_step(lambda: 1), device.submit_encode(held)
    await driver.wait_for(1)
    await held.begins()
    closing = asyncio.create_task(device.aclose())
    driver.marks[DECODER][0].passed.set()
    assert await step == 1
    await turns()
    assert not driver.stopped and not closing.done()
    held.gate.set()
    await driver.wait_for(1)
    await turns()
    assert not driver.stopped and not encode.done()
    driver.pass_all()
    assert await encode == "held"
    await closing
    assert driver.stopped == ["aioengine-device"] and device_threads() == []


async def test_a_thread_that_cannot_wait_says_so() -> None:
    driver = FakeDriver()
    driver.attach_failure = OSError("no context")
    device = CudaDevice(asyncio.get_running_loop(), driver)
    for submit in (device.submit_step, device.submit_encode):
        with pytest.raises(OSError, match="no context"):
            await submit(lambda: 1)
    await device.aclose()
    assert len(driver.marks[DECODER]) == 1 and not driver.marks[ENCODER]


class Bindings(ModuleType):
    """Stands for `cuda.bindings.driver`; `status` is what its calls return."""

    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, failure: Exception | None) -> None:
        super().__init__("cuda.bindings.driver")
        self.failure = failure
        self.context = 0

    def cuDevicePrimaryCtxRetain(self, number: int) -> tuple[int, int]:
        return 0, 100 + number

    def cuCtxSetCurrent(self, context: int) -> tuple[int]:
        self.context = context
        return (0,)

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[int, int]:
        assert flags == 1 and priority in (0, -3) and self.context == 101
        if isinstance(self.failure, OSError):
            raise self.failure
        return (3, 0) if self.failure is not None else (0, 77)


@pytest.mark.parametrize("failure", [None, RuntimeError("status"), OSError("no libcuda"), "absent"])
def test_torchs_streams_where_the_bindings_fail(
    failure: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What cuda-python says where it does not fit the driver is no error of an engine's."""
    bindings = None if failure == "absent" else Bindings(failure)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", ModuleType("cuda.bindings"))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings)
    monkeypatch.setattr(cuda, "_UNUSED", defaultdict(list))
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
    assert not driver._streams
    warned = [record.message for record in caplog.records]
    assert len(warned) == (1 if isinstance(failure, Exception) else 0), warned


def test_streams_serve_one_engine_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two engines at a time each has its own, and a GPU's serve no other GPU."""
    monkeypatch.setattr(cuda, "_UNUSED", defaultdict(list))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    made = []

    def new_stream(device: object, priority: int) -> str:
        made.append(device)
        return f"stream {len(made)}"

    new_stream.priority_range = lambda: (0, -3)  # type: ignore[attr-defined]

    def driver_of(device: str) -> TorchDriver:
        driver = TorchDriver(device)
        driver._cuda = SimpleNamespace(
            set_device=lambda device: None,
            Stream=new_stream,
            synchronize=lambda device: None,
            empty_cache=lambda: None,
        )
        return driver

    first, second, other = driver_of("cuda:0"), driver_of("cuda:0"), driver_of("cuda:1")
    first.start()
    of_first = dict(first._streams)
    second.start()
    assert not set(second._streams.values()) & set(of_first.values())
    first.stop()
    first.stop()
    other.start()
    assert not set(other._streams.values()) & set(of_first.values())
    third, fourth = driver_of("cuda:0"), driver_of("cuda:0")
    third.start()
    assert third._streams == of_first
    fourth.start()
    assert made == ["cuda:0"] * 4 + ["cuda:1"] * 2 + ["cuda:0"] * 2


async def test_closing_waits_for_what_is_launched_and_cancels_the_rest(
    driver: FakeDriver, device: CudaDevice
) -> None:
    """While both queues run: one job each is launched, one is being launched, one has not begun."""
    submit = (device.submit_step, device.submit_encode)
    launched = [each(lambda: 1) for each in submit]
    await driver.wait_for(2)
    jobs = [Held(), Held()]
    running = [each(job) for each, job in zip(submit, jobs, strict=True)]
    for job in jobs:
        await job.begins()
    queued = [each(lambda: 3) for each in submit]
    closing = [asyncio.ensure_future(device.aclose()) for _ in range(2)]
    await turns()
    assert all(future.cancelled() for future in queued)
    for job in jobs:
        job.gate.set()
    await driver.wait_for(2)
    await turns()
    assert not any(future.done() for future in [*closing, *launched, *running])
    driver.pass_all()
    await asyncio.gather(*closing)
    assert await asyncio.gather(*launched, *running) == [1, 1, "held", "held"]
    assert all(each(lambda: 5).cancelled() for each in submit)
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
