"""The device queues of a GPU: two CUDA streams, fed by one launch thread.

The launch thread runs jobs one after the other, steps first, but an encoder run has its turn after
a few of them; a job only launches kernels, so a step and an encoder run that follow each other run
side by side on the device. The decoder's stream has the higher priority. Behind each job an event
is recorded in its stream, and a thread for each queue waits for it with the interpreter's lock
released, so that a long encoder run holds up no token. No Python runs as a host function of the
driver: that would deadlock with the interpreter's lock.

Memory: tensors that a job makes belong to its stream, and are freed into it. What one stream makes
and the other reads (encoder rows) is kept by the runner until the last step that reads it has
committed, so the allocator needs no hint.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, Protocol

from aioengine.streams.device import DECODER, ENCODER, Device, failure_of, settle
from aioengine.types import read

__all__ = ["CudaDevice", "Driver", "Mark", "TorchDriver"]

logger = logging.getLogger(__name__)

Sent = tuple["Mark", Any, "asyncio.Future[Any]"]


class Mark(Protocol):
    """A point in a queue's work."""

    def synchronize(self) -> None:
        """Block until the device has come here; raises what has gone wrong before."""


class Driver(Protocol):
    """Interface that a `CudaDevice` needs of the device.

    Called on the launch thread, but for `attach`.
    """

    def start(self) -> None:
        """Before the first job."""

    def attach(self) -> None:
        """Prepare a thread that waits for marks. Called on it, before the first."""

    def queue(self, name: str) -> AbstractContextManager[Any]:
        """Inside, work that is launched goes to this queue."""

    def mark(self, name: str) -> Mark:
        """The end of what has been launched into this queue."""

    def stop(self) -> None:
        """Give back what the device keeps for the queues. Called behind the last job."""


class CudaDevice(Device):
    """A launch thread and two threads that wait. One step may be launched while another runs.

    No encoder job lingers for a step: launching it takes a moment, and the device does both.
    """

    run_ahead = 1
    gather_s = 0.0

    def __init__(
        self, loop: asyncio.AbstractEventLoop, driver: Driver, *, max_streak: int = 4
    ) -> None:
        """See `Device`."""
        self._driver = driver
        self._sent: dict[str, SimpleQueue[Sent | None]] = {
            DECODER: SimpleQueue(),
            ENCODER: SimpleQueue(),
        }
        super().__init__(loop, max_streak=max_streak)

    def _launch_all(self) -> None:
        waiters = [
            threading.Thread(
                target=self._wait_all, args=(name,), name=f"aioengine-wait-{name}", daemon=True
            )
            for name in self._sent
        ]
        for waiter in waiters:
            waiter.start()
        broken: Exception | None = None
        try:
            self._driver.start()
        except BaseException as caught:
            broken = failure_of(caught)
        while (job := self._next()) is not None:
            try:
                if broken is not None:
                    raise broken
                with self._driver.queue(job.queue):
                    result = job.function()
                mark = self._driver.mark(job.queue)
            except BaseException as caught:  # whatever it is, the waiter has to know
                self._bridge.call(settle, job.future, None, failure_of(caught))
            else:
                self._sent[job.queue].put((mark, result, job.future))
                del result, mark
            del job
        for sent in self._sent.values():
            sent.put(None)
        for waiter in waiters:
            waiter.join()
        try:
            self._driver.stop()
        except Exception as error:  # of a device that has failed, there is nothing to give back
            logger.debug("the queues of a GPU were not closed: %s", error)

    def _wait_all(self, name: str) -> None:
        attached: Exception | None = None
        try:
            self._driver.attach()
        except BaseException as caught:
            attached = failure_of(caught)
        while (sent := self._sent[name].get()) is not None:
            mark, launched, future = sent
            try:
                if attached is not None:
                    raise attached
                mark.synchronize()
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
        priorities = {DECODER: highest, ENCODER: lowest}
        try:
            self._streams = {name: self._borrowed(each) for name, each in priorities.items()}
            return
        except ImportError:
            pass
        except Exception as error:  # bindings that do not fit the driver raise errors of their own
            logger.warning("cuda.core cannot be used, torch's streams are taken: %s", error)
        self._kept.clear()
        self._streams = {
            name: self._cuda.Stream(self._device, priority=each)
            for name, each in priorities.items()
        }

    def _borrowed(self, priority: int) -> Any:
        """A stream of cuda.core's. Raises ImportError where it is not installed, or whatever."""
        from cuda.core import Device as Gpu
        from cuda.core import StreamOptions

        gpu = Gpu(self._cuda.current_device())
        gpu.set_current()
        stream = gpu.create_stream(options=StreamOptions(nonblocking=True, priority=priority))
        self._kept.append(stream)  # torch only borrows it
        return self._cuda.ExternalStream(int(stream.handle), device=self._device)

    def attach(self) -> None:
        """See `Driver`."""
        # Else a new thread's first call would be one to the first GPU, and make a context there.
        self._cuda.set_device(self._device)

    def queue(self, name: str) -> AbstractContextManager[Any]:
        """See `Driver`."""
        context: AbstractContextManager[Any] = self._cuda.stream(self._streams[name])
        return context

    def stop(self) -> None:
        """See `Driver`. By now the engine has let go of its tensors."""
        # What the allocator keeps free belongs to these streams, and is of no use to any other; a
        # new stream may even get the handle of one that is gone.
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        self._streams.clear()
        self._kept.clear()

    def mark(self, name: str) -> Mark:
        """See `Driver`."""
        # Blocking: the thread that waits sleeps in the driver, and spins on nothing.
        mark: Mark = self._streams[name].record_event(self._cuda.Event(blocking=True))
        return mark
