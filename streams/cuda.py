"""The device queues of a GPU: two CUDA streams, each fed by a launch thread of its own.

A job launches kernels, in the order of its queue, and the queues run side by side on the device. An
encoder may make its thread wait (code that reads a size back from the device does) or launch
thousands of operators; no step waits for it, since steps are launched by another thread. The
decoder's stream has the higher priority. Behind each job an event is recorded in its stream, and a
thread for each queue waits for it with the interpreter's lock released, so that a long encoder run
holds up no token. No Python runs as a host function of the driver: that would deadlock with the
interpreter's lock.

Memory: tensors that a job makes belong to its stream, and are freed into it, whichever thread does
that. What one stream makes and the other reads (encoder rows) is kept by the runner until the last
step that reads it has committed, so the allocator needs no hint.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from typing import Any, Protocol

from aioengine.streams.device import DECODER, ENCODER, Device, Job, failure_of, settle
from aioengine.types import read

__all__ = ["CudaDevice", "Driver", "Mark", "TorchDriver"]

logger = logging.getLogger(__name__)

Sent = tuple["Mark", Any, "asyncio.Future[Any]"]

_UNUSED: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
"""Streams of a GPU, by queue, that no engine of this process has at the moment."""


class Mark(Protocol):
    """A point in a queue's work."""

    def synchronize(self) -> None:
        """Block until the device has come here; raises what has gone wrong before."""


class Driver(Protocol):
    """Interface that a `CudaDevice` needs of the device."""

    def start(self) -> None:
        """Make the queues. Called on the device's thread, before all others."""

    def attach(self) -> None:
        """Prepare a further thread, which launches or waits. Called on it, before its first job."""

    def queue(self, name: str) -> AbstractContextManager[Any]:
        """Inside, what the thread launches goes to this queue. Called on its launch thread."""

    def mark(self, name: str) -> Mark:
        """The end of what has been launched into this queue. Called on its launch thread."""

    def stop(self) -> None:
        """Give back what the device keeps for the queues. Called when no other thread is left."""


class CudaDevice(Device):
    """A launching and a waiting thread for each queue. A step may be launched while another runs.

    No encoder job waits for a step, and no step for an encoder job: the device does both.
    """

    run_ahead = 1
    gather_s = 0.0

    def __init__(self, loop: asyncio.AbstractEventLoop, driver: Driver) -> None:
        """See `Device`."""
        self._driver = driver
        self._sent: dict[str, SimpleQueue[Sent | None]] = {
            DECODER: SimpleQueue(),
            ENCODER: SimpleQueue(),
        }
        super().__init__(loop)

    def _launch_all(self) -> None:
        broken = _failure(self._driver.start)
        targets = {
            "aioengine-encoder": partial(self._launch_encodes, broken),
            **{f"aioengine-wait-{name}": partial(self._wait_all, name) for name in self._sent},
        }
        others = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in targets.items()
        ]
        for each in others:
            each.start()
        self._launch(DECODER, broken)
        for each in others:
            each.join()
        try:
            self._driver.stop()
        except Exception as error:  # of a device that has failed, there is nothing to give back
            logger.debug("the queues of a GPU were not closed: %s", error)

    def _launch_encodes(self, broken: Exception | None) -> None:
        self._launch(ENCODER, broken or _failure(self._driver.attach))

    def _launch(self, name: str, broken: Exception | None) -> None:
        """Launch a queue's jobs until the device is closed; with `broken`, fail them with that."""
        while (job := self._next(name)) is not None:
            try:
                if broken is not None:
                    raise broken
                with self._driver.queue(name):
                    result = job.function()
                mark = self._driver.mark(name)
            except BaseException as caught:  # whatever it is, the waiter has to know
                self._bridge.call(settle, job.future, None, failure_of(caught))
            else:
                self._sent[name].put((mark, result, job.future))
                del result, mark
            del job
        self._sent[name].put(None)

    def _next(self, name: str) -> Job | None:
        """Wait for a queue's next job. None: the device has been closed."""
        queue = self._waiting[name]
        with self._changed:
            self._changed.wait_for(lambda: queue or self._is_closed)
            return queue.popleft() if queue else None

    def _wait_all(self, name: str) -> None:
        attached = _failure(self._driver.attach)
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


def _failure(prepare: Callable[[], None]) -> Exception | None:
    """Prepare a thread; return what goes wrong, which its jobs have to say."""
    try:
        prepare()
    except BaseException as caught:
        return failure_of(caught)
    return None


class TorchDriver:
    """The queues of a GPU, through cuda-python, or torch's streams without it.

    Streams are made once and serve one engine after the other, and none is ever destroyed: what
    PyTorch has used in one it keeps for it, a matmul's workspace of 32 MiB among it, and pinned
    memory that is freed late, by a garbage collection say, marks the streams that have read it.
    """

    def __init__(self, device: Any) -> None:
        """`device`: a `torch.device` of type "cuda", with its number."""
        import torch

        self._cuda: Any = torch.cuda
        self._device = device
        self._streams: dict[str, Any] = {}

    def start(self) -> None:
        """See `Driver`."""
        self._cuda.set_device(self._device)
        try:
            self._streams = _UNUSED[str(self._device)].pop()
        except IndexError:
            self._streams = self._new_streams()

    def _new_streams(self) -> dict[str, Any]:
        lowest, highest = self._cuda.Stream.priority_range()
        priorities = {DECODER: highest, ENCODER: lowest}
        try:
            return {name: self._borrowed(each) for name, each in priorities.items()}
        except ImportError:
            pass
        except Exception as error:  # bindings that do not fit the driver raise errors of their own
            logger.warning("cuda-python cannot be used, torch's streams are taken: %s", error)
        return {
            name: self._cuda.Stream(self._device, priority=each)
            for name, each in priorities.items()
        }

    def _borrowed(self, priority: int) -> Any:
        """A stream of the driver's own, which nothing destroys. Raises ImportError where its
        bindings are not installed, or whatever."""
        driver = import_module("cuda.bindings.driver")

        def call(name: str, *args: Any) -> Any:
            status, *found = getattr(driver, name)(*args)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"{name}: {status}")
            return found[0] if found else None

        # The context that PyTorch has for a GPU, which a new thread need not have yet.
        call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", self._cuda.current_device()))
        flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        stream = call("cuStreamCreateWithPriority", flags, priority)
        return self._cuda.ExternalStream(int(stream), device=self._device)

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
        # What the allocator keeps free belongs to these streams, and is of no use to any other.
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        if self._streams:
            _UNUSED[str(self._device)].append(self._streams)
            self._streams = {}

    def mark(self, name: str) -> Mark:
        """See `Driver`."""
        # Blocking: the thread that waits sleeps in the driver, and spins on nothing.
        mark: Mark = self._streams[name].record_event(self._cuda.Event(blocking=True))
        return mark
