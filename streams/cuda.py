"""The device queues of a GPU: two CUDA streams, fed by one launch thread.

The launch thread runs jobs one after the other, steps first, but an encoder run has its turn after
a few of them; a job only launches kernels, so a step and an encoder run that follow each other run
side by side on the device. The decoder's stream has the higher priority. Behind each job an event
is recorded in its stream, and a thread for each queue waits for it with the interpreter's lock
released, so that a long encoder run holds up no token. No Python runs as a host function of the
driver: that would deadlock with the interpreter's lock.

Memory: tensors that a job makes belong to its stream, and are freed into it. What one stream makes
and the other reads (encoder rows) is kept by the runner until the last step that reads it has
committed, so nothing has to be told to the allocator.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, Protocol

from aioengine.streams.bridge import LoopBridge
from aioengine.streams.device import failure_of, settle
from aioengine.types import read

__all__ = ["DECODER", "ENCODER", "CudaDevice", "Driver", "Mark", "TorchDriver"]

Job = tuple[str, Callable[[], Any], "asyncio.Future[Any]"]
Sent = tuple["Mark", Any, "asyncio.Future[Any]"]

DECODER, ENCODER = "decoder", "encoder"


class Mark(Protocol):
    """A point in a queue's work."""

    def wait(self) -> None:
        """Block until the device has come here; raises what has gone wrong before."""
        ...


class Driver(Protocol):
    """What a `CudaDevice` needs of the device. Called on the launch thread."""

    def start(self) -> None:
        """Before the first job."""
        ...

    def queue(self, name: str) -> AbstractContextManager[Any]:
        """Inside, work that is launched goes to this queue."""
        ...

    def mark(self, name: str) -> Mark:
        """The end of what has been launched into this queue."""
        ...


class CudaDevice:
    """A launch thread and two threads that wait. One step may be launched while another runs."""

    run_ahead = 1

    def __init__(
        self, loop: asyncio.AbstractEventLoop, driver: Driver, *, max_streak: int = 4
    ) -> None:
        """After `max_streak` steps in a row an encoder run that waits is launched."""
        self._bridge = LoopBridge(loop)
        self._driver = driver
        self._steps: deque[Job] = deque()
        self._encodes: deque[Job] = deque()
        self._max_streak = max_streak
        self._streak = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._ended = loop.create_future()
        self._sent: dict[str, SimpleQueue[Sent | None]] = {
            DECODER: SimpleQueue(),
            ENCODER: SimpleQueue(),
        }
        self._waiters = [self._thread(f"wait-{name}", self._wait, name) for name in self._sent]
        self._launcher = self._thread("launch", self._launch)

    def submit_step(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        """See `Device`."""
        return self._submit(self._steps, DECODER, job)

    def submit_encode(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        """See `Device`."""
        return self._submit(self._encodes, ENCODER, job)

    def rest(self) -> None:
        """See `Device`: here nothing is held back."""

    async def aclose(self) -> None:
        """See `Device`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        # The waiter's own cancellation must not cancel the future that other waiters share.
        await asyncio.shield(self._ended)
        self._launcher.join()
        self._bridge.close()

    def _submit(self, queue: deque[Job], name: str, job: Callable[[], Any]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._bridge.loop.create_future()
        with self._changed:
            if self._is_closed:
                future.cancel()
                return future
            queue.append((name, job, future))
            self._changed.notify()
        return future

    def _thread(self, name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name=f"aioengine-{name}", daemon=True)
        thread.start()
        return thread

    # ---- the launch thread

    def _launch(self) -> None:
        broken: Exception | None = None
        try:
            self._driver.start()
        except BaseException as caught:
            broken = failure_of(caught)
        while (job := self._next()) is not None:
            name, function, future = job
            try:
                if broken is not None:
                    raise broken
                with self._driver.queue(name):
                    result = function()
                mark = self._driver.mark(name)
            except BaseException as caught:  # whatever it is, the waiter has to know
                self._bridge.call(settle, future, None, failure_of(caught))
            else:
                self._sent[name].put((mark, result, future))
                del result, mark
            del job, function, future
        for sent in self._sent.values():
            sent.put(None)
        for waiter in self._waiters:
            waiter.join()
        self._bridge.call(settle, self._ended, None, None)

    def _next(self) -> Job | None:
        with self._changed:
            while True:
                if self._is_closed:
                    for _, _, future in [*self._steps, *self._encodes]:
                        self._bridge.call(future.cancel)
                    return None
                encode_is_due = self._encodes and self._streak >= self._max_streak
                if self._steps and not encode_is_due:
                    self._streak += 1
                    return self._steps.popleft()
                if self._encodes:
                    self._streak = 0
                    return self._encodes.popleft()
                self._changed.wait()

    # ---- the threads that wait

    def _wait(self, name: str) -> None:
        while (sent := self._sent[name].get()) is not None:
            mark, launched, future = sent
            try:
                mark.wait()
                result, error = read(launched), None
            except BaseException as caught:
                result, error = None, failure_of(caught)
            self._bridge.call(settle, future, result, error)
            del sent, mark, launched, future, result, error


class TorchDriver:
    """The queues of a GPU, through cuda-python's `cuda.core`, or torch's streams without it."""

    def __init__(self, device: Any) -> None:
        """`device`: a `torch.device` of type "cuda"."""
        import torch

        self._cuda: Any = torch.cuda
        self._device = device
        self._streams: dict[str, Any] = {}
        self._kept: list[Any] = []

    def start(self) -> None:
        """See `Driver`."""
        self._cuda.set_device(self._device)
        lowest, highest = self._cuda.Stream.priority_range()
        for name, priority in ((DECODER, highest), (ENCODER, lowest)):
            self._streams[name] = self._make_stream(priority)

    def _make_stream(self, priority: int) -> Any:
        try:
            from cuda.core import Device, StreamOptions
        except ImportError:
            return self._cuda.Stream(self._device, priority=priority)
        device = Device(self._cuda.current_device())
        device.set_current()
        stream = device.create_stream(options=StreamOptions(nonblocking=True, priority=priority))
        self._kept.append(stream)  # torch only borrows it
        return self._cuda.ExternalStream(int(stream.handle), device=self._device)

    def queue(self, name: str) -> AbstractContextManager[Any]:
        """See `Driver`."""
        context: AbstractContextManager[Any] = self._cuda.stream(self._streams[name])
        return context

    def mark(self, name: str) -> Mark:
        """See `Driver`."""
        # Blocking: the thread that waits sleeps in the driver, and spins on nothing.
        event = self._cuda.Event(blocking=True)
        event.record(self._streams[name])
        return _EventMark(event)


class _EventMark:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()
