"""Work that many wait for: begun once, ended with its last waiter, begun anew after a failure."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from aioengine.streams.single_flight import SharedJobs


class Work:
    """Counts how often it was begun, and waits for its gate."""

    def __init__(self) -> None:
        self.gates: list[asyncio.Future[int]] = []
        self.num_cancelled = 0

    async def __call__(self) -> int:
        self.gates.append(gate := asyncio.get_running_loop().create_future())
        try:
            return await gate
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_once_for_all_who_wait() -> None:
    jobs, work = SharedJobs(), Work()
    waiters = [asyncio.create_task(jobs.join("a", work)) for _ in range(3)]
    other = asyncio.create_task(jobs.join("b", work))
    await turns()
    assert len(work.gates) == 2 and "a" in jobs
    waiters[0].cancel()
    await turns()
    work.gates[0].set_result(7)
    assert await waiters[1] == await waiters[2] == 7 and "a" not in jobs
    other.cancel()
    await turns()
    assert work.num_cancelled == 1 and "b" not in jobs
    await jobs.aclose()


async def test_who_comes_after_a_failure_begins_anew() -> None:
    jobs, work = SharedJobs(), Work()

    async def twice() -> int:
        try:
            return await jobs.join("a", work)
        except ValueError:
            return await jobs.join("a", work)

    waiters = [asyncio.create_task(twice()) for _ in range(3)]
    await turns()
    work.gates[0].set_exception(ValueError())
    await turns()
    assert len(work.gates) == 2  # one for all three
    waiters[0].cancel()
    await turns()
    work.gates[1].set_result(8)
    assert await waiters[1] == await waiters[2] == 8
    assert "a" not in jobs and not work.num_cancelled


async def test_a_failure_that_nobody_waits_for_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gc.collect()  # what earlier tests left is theirs
    caplog.clear()
    jobs, problems = SharedJobs(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))

    async def stubborn() -> Any:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise OSError("https://a.test/?token=secret") from None

    waiter = asyncio.create_task(jobs.join("a", stubborn))
    await turns()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await jobs.aclose()
    await turns()
    gc.collect()
    assert not problems and not caplog.records
