"""The queue protocol between the event loop and a device.

The engine submits jobs to two queues, decoder and encoder, and awaits their handles. All jobs of a
device run on its launch thread, in each queue in the order of submission.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

__all__ = ["Device"]

Result = TypeVar("Result")


class Device(Protocol):
    """Where jobs run. Methods are called on the loop that the device was made for.

    `run_ahead` is how many steps may be planned before the oldest has committed.
    """

    run_ahead: int

    def submit_step(self, job: Callable[[], Result]) -> asyncio.Future[Result]:
        """Queue a job of the decoder. The future ends with its result or its exception."""
        ...

    def submit_encode(self, job: Callable[[], Result]) -> asyncio.Future[Result]:
        """Queue a job of the encoder."""
        ...

    def rest(self) -> None:
        """Say that no step follows for now, so that nothing is held back for one."""
        ...

    async def aclose(self) -> None:
        """Cancel what has not begun, wait for what runs, end the threads. Idempotent."""
        ...
