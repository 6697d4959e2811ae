"""The queue protocol between the event loop and a device.

The engine submits jobs to two queues, decoder and encoder, and awaits their handles. A queue's jobs
run on its launch thread, in the order of submission; a device may have one such thread for both
queues. A job only launches its work where the device has a queue of its own; what it then has to
read from the device comes back as a `Launched`, and a handle ends when the device has done the work
and the result is read.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from aioengine.streams.loop_bridge import LoopBridge

__all__ = ["DECODER", "ENCODER", "Device", "Job", "StepQueue", "failure_of", "settle"]

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


class StepQueue(Protocol):
    """Interface of steps that one call on the launch thread does one after the other, while the
    loop adds more. They have numbers, from 0 on.

    `event`: a file that can be read when steps are done, until `see`. `num_put`: steps there are.
    """

    event: int
    num_put: int

    def let(self, limit: int | None = None) -> None:
        """Let them be done up to the step `limit`, at which `run` returns; None: all, and those
        that come."""

    def see(self) -> int:
        """Take note of what is done; how many steps are."""

    def run(self, patience_s: float) -> int:
        """Do them, and wait so long for more. Returns how many are done."""


class Job(NamedTuple):
    """A function that waits in a queue, and its handle."""

    function: Callable[[], Any]
    future: asyncio.Future[Any]
    patience: int | None = None


class Device(ABC):
    """The two queues, and the threads that take jobs from them.

    Methods are called on the loop that it was made for. `run_ahead` is how many steps may be
    planned before the oldest has committed. `takes_queued`: whether `submit_queued` may be called
    now. `gather_s` is how long an item that is ready for the
    encoder waits for others that are being made ready.
    """

    run_ahead: int
    gather_s: float
    takes_queued: bool = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """A subclass that needs more than this in `_launch_all` makes it first: it begins here."""
        self._bridge = LoopBridge(loop)
        self._waiting: dict[str, deque[Job]] = {DECODER: deque(), ENCODER: deque()}
        self._is_closed = False
        self._changed = threading.Condition()
        self._ended = loop.create_future()
        self._thread = threading.Thread(target=self._run, name="aioengine-device", daemon=True)
        self._thread.start()

    def has_room(self, num_in_flight: int) -> bool:
        """Return whether a step may be planned while so many have not ended."""
        return num_in_flight <= self.run_ahead

    def submit_step(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        """Queue a job of the decoder. The future ends with its (read) result or its exception."""
        return self._submit(DECODER, job)

    def submit_queued(
        self, queue: StepQueue, number: int, read: Callable[[], Any]
    ) -> asyncio.Future[Any]:
        """Have a step that was put into the queue done, after the steps before it.

        The future ends with what `read` gives: a result, and when the step began and ended. A
        device has one queue.
        """
        raise NotImplementedError

    def submit_encode(
        self, job: Callable[[], Any], *, patience: int | None = None
    ) -> asyncio.Future[Any]:
        """Queue a job of the encoder.

        Where both queues share a thread, it lets so many steps in a row go before it.
        """
        return self._submit(ENCODER, job, patience)

    def rest(self) -> None:  # noqa: B027 - only a thread that both queues share holds jobs back
        """Say that no step follows for now, so that nothing is held back for one."""

    def release(self, let_go: Callable[[], None]) -> asyncio.Future[Any]:
        """Let go of all that jobs have brought here, on the launch thread, and call `let_go` there.

        Gigabytes take a second to be given back to the system.
        """
        return self.submit_step(let_go)

    async def aclose(self) -> None:
        """Cancel what has not begun, wait for what runs, end the threads. Idempotent."""
        with self._changed:
            self._is_closed = True
            for queue in self._waiting.values():
                while queue:
                    queue.popleft().future.cancel()
            self._changed.notify_all()
        # The waiter's own cancellation must not cancel the future that other waiters share.
        await asyncio.shield(self._ended)
        self._thread.join()
        self._bridge.close()

    def _submit(
        self, name: str, job: Callable[[], Any], patience: int | None = None
    ) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._bridge.loop.create_future()
        with self._changed:
            if self._is_closed:
                future.cancel()
                return future
            self._waiting[name].append(Job(job, future, patience))
            self._changed.notify_all()
        return future

    def _run(self) -> None:
        self._launch_all()
        self._bridge.call(settle, self._ended, None, None)

    @abstractmethod
    def _launch_all(self) -> None:
        """Run on the device's thread: take the jobs of both queues and settle each, until the
        device is closed and every thread that was started here has ended."""
