"""The queue protocol between the event loop and a device.

The engine submits jobs to two queues, decoder and encoder, and awaits their handles. All jobs of a
device run on its launch thread, in each queue in the order of submission. A job only launches its
work where the device has a queue of its own; what it then has to read from the device comes back
as a `Launched`, and a handle ends when the device has done the work and the result is read.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from aioengine.streams.loop_bridge import LoopBridge

__all__ = ["DECODER", "ENCODER", "Device", "Job", "failure_of", "settle"]

DECODER, ENCODER = "decoder", "encoder"


def failure_of(error: BaseException) -> Exception:
    """The error, or one in its place if it would not be a failure of the job to whoever awaits it:
    a future takes no StopIteration, and the others would cancel the waiter or end its loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = RuntimeError(f"a job ended with {type(error).__name__}")
    failure.__cause__ = error
    return failure


def settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    """End a job's handle, on the loop."""
    if future.done():  # its waiter has been cancelled
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class Job(NamedTuple):
    """A function that waits in a queue, and its handle."""

    queue: str
    function: Callable[[], Any]
    future: asyncio.Future[Any]
    patience: int | None = None


class Device(ABC):
    """The two queues, and the launch thread that takes jobs from them.

    Methods are called on the loop that it was made for. `run_ahead` is how many steps may be
    planned before the oldest has committed. `gather_s` is how long an item that is ready for the
    encoder waits for others that are being made ready.

    Steps go first, but after `max_streak` of them in a row, or as many as it has patience for, an
    encoder job gets its turn. Between two steps the loop needs a moment to commit one and plan the
    next: for up to `linger_s` the thread waits for that step rather than take an encoder job that
    would delay every stream.
    """

    run_ahead: int
    gather_s: float

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, max_streak: int = 4, linger_s: float = 0.0
    ) -> None:
        """A subclass that needs more than this in `_launch_all` makes it first: it begins here."""
        self._bridge = LoopBridge(loop)
        self._max_streak = max_streak
        self._linger_s = linger_s
        self._steps: deque[Job] = deque()
        self._encodes: deque[Job] = deque()
        self._streak = 0
        self._step_may_follow = False
        self._is_closed = False
        self._changed = threading.Condition()
        self._ended = loop.create_future()
        self._thread = threading.Thread(target=self._run, name="aioengine-device", daemon=True)
        self._thread.start()

    def submit_step(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        """Queue a job of the decoder. The future ends with its (read) result or its exception."""
        return self._submit(self._steps, DECODER, job)

    def submit_encode(
        self, job: Callable[[], Any], *, patience: int | None = None
    ) -> asyncio.Future[Any]:
        """Queue a job of the encoder, which lets so many steps in a row go before it."""
        return self._submit(self._encodes, ENCODER, job, patience)

    def rest(self) -> None:
        """Say that no step follows for now, so that nothing is held back for one."""
        with self._changed:
            if self._step_may_follow:
                self._step_may_follow = False
                self._changed.notify()

    async def aclose(self) -> None:
        """Cancel what has not begun, wait for what runs, end the threads. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        # The waiter's own cancellation must not cancel the future that other waiters share.
        await asyncio.shield(self._ended)
        self._thread.join()
        self._bridge.close()

    def _submit(
        self, queue: deque[Job], name: str, job: Callable[[], Any], patience: int | None = None
    ) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._bridge.loop.create_future()
        with self._changed:
            if self._is_closed:
                future.cancel()
                return future
            queue.append(Job(name, job, future, patience))
            self._changed.notify()
        return future

    def _run(self) -> None:
        self._launch_all()
        self._bridge.call(settle, self._ended, None, None)

    @abstractmethod
    def _launch_all(self) -> None:
        """Run on the launch thread: take jobs (`_next`) until there are none, and settle each."""

    def _longest_streak(self) -> int:
        patience = self._encodes[0].patience
        return self._max_streak if patience is None else min(patience, self._max_streak)

    def _next(self) -> Job | None:
        """Wait for the next job. None: the device has been closed."""
        with self._changed:
            while True:
                if self._is_closed:
                    for job in [*self._steps, *self._encodes]:
                        self._bridge.call(job.future.cancel)
                    return None
                encode_is_due = self._encodes and self._streak >= self._longest_streak()
                if self._steps and not encode_is_due:
                    self._streak += 1
                    self._step_may_follow = self._linger_s > 0
                    return self._steps.popleft()
                if self._encodes and (encode_is_due or not self._step_may_follow):
                    self._streak = 0
                    return self._encodes.popleft()
                lingers = bool(self._encodes)
                if not self._changed.wait(self._linger_s if lingers else None) and lingers:
                    self._step_may_follow = False
