"""The queue protocol between the event loop and a device.

The engine submits jobs to two queues, decoder and encoder, and awaits their handles. All jobs of a
device run on its launch thread, in each queue in the order of submission. A job only launches its
work where the device has a queue of its own; what it then has to read from the device comes back
as a `Launched`, and a handle ends when the device has done the work and the result is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Device", "failure_of", "settle"]


class Device(Protocol):
    """Where jobs run. Methods are called on the loop that the device was made for.

    `run_ahead` is how many steps may be planned before the oldest has committed.
    """

    run_ahead: int

    def submit_step(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        """Queue a job of the decoder. The future ends with its (read) result or its exception."""
        ...

    def submit_encode(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        """Queue a job of the encoder."""
        ...

    def rest(self) -> None:
        """Say that no step follows for now, so that nothing is held back for one."""
        ...

    async def aclose(self) -> None:
        """Cancel what has not begun, wait for what runs, end the threads. Idempotent."""
        ...


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
