"""Equal work in flight, done once for all who wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["SharedJobs"]

Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class _Job:
    task: asyncio.Task[Any]
    num_waiters: int = 0

    @property
    def has_failed(self) -> bool:
        task = self.task
        return task.done() and (task.cancelled() or task.exception() is not None)


class SharedJobs:
    """Jobs by key. A waiter may leave; the last one's leaving cancels the job.

    One that has failed is for those who wait for it; who comes later begins another.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._ending: set[asyncio.Task[Any]] = set()

    def __contains__(self, key: str) -> bool:
        """Return whether `join` would wait for a job that is there already."""
        return key in self._jobs and not self._jobs[key].has_failed

    async def aclose(self) -> None:
        """Wait for cancelled jobs to clean up after themselves."""
        if self._ending:
            await asyncio.wait(self._ending)

    async def join(self, key: str, make: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """The result of the job under this key, which `make` begins where there is none."""
        if key not in self:
            self._jobs[key] = _Job(asyncio.create_task(make()))
        job = self._jobs[key]
        job.num_waiters += 1
        try:
            result: Result = await asyncio.shield(job.task)
            return result
        finally:
            job.num_waiters -= 1
            if not job.num_waiters:
                if self._jobs.get(key) is job:
                    del self._jobs[key]
                if job.task.cancel():
                    self._ending.add(job.task)
                    job.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._ending.discard(task)
        if not task.cancelled():
            task.exception()  # nobody is left to hear of it, and asyncio would log what it holds
