"""Equal work in flight, done once for all who wait for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["SharedJobs"]

Result = TypeVar("Result")


class SharedJobs:
    """Jobs by key. A waiter may leave; the last one's leaving cancels the job."""

    def __init__(self) -> None:
        self._jobs: dict[str, asyncio.Task[Any]] = {}
        self._num_waiters: Counter[str] = Counter()
        self._ending: set[asyncio.Task[Any]] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._jobs

    async def aclose(self) -> None:
        """Wait for cancelled jobs to clean up after themselves."""
        if self._ending:
            await asyncio.wait(self._ending)

    async def join(self, key: str, make: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """The result of the job under this key, which `make` begins where there is none."""
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = asyncio.create_task(make())
        self._num_waiters[key] += 1
        try:
            result: Result = await asyncio.shield(job)
            return result
        finally:
            self._num_waiters[key] -= 1
            if not self._num_waiters[key]:
                del self._num_waiters[key], self._jobs[key]
                if job.cancel():
                    self._ending.add(job)
                    job.add_done_callback(self._ended)

    def _ended(self, job: asyncio.Task[Any]) -> None:
        self._ending.discard(job)
        if not job.cancelled():
            job.exception()  # nobody is left to hear of it, and asyncio would log what it holds
