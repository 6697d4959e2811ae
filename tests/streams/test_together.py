"""Coroutines side by side: results in order, the first error alone, nothing held after it."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from aioengine.streams.together import run_together


class Payload:
    """Something large."""


async def test_results_come_in_order() -> None:
    async def after(delays: int, value: str) -> str:
        for _ in range(delays):
            await asyncio.sleep(0)
        return value

    assert await run_together([after(3, "a"), after(1, "b"), after(2, "c")]) == ["a", "b", "c"]
    assert await run_together([]) == []


async def test_the_first_error_ends_the_others_and_is_raised_as_it_is() -> None:
    ended = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def fail() -> None:
        await asyncio.sleep(0)
        raise LookupError("as it is")

    with pytest.raises(LookupError, match="as it is") as caught:
        await run_together([wait(), fail(), wait()])
    assert ended == [True, True]
    assert caught.value.__context__ is None


@pytest.mark.parametrize("num_failures", [1, 2, 3])
async def test_what_the_others_held_is_let_go_of(num_failures: int) -> None:
    """At once: a second failure's frames may hold most of a server's memory."""
    alive: weakref.WeakSet[Payload] = weakref.WeakSet()

    async def fail() -> None:
        payload = Payload()
        alive.add(payload)
        await asyncio.sleep(0)
        raise LookupError

    async def ask() -> None:
        try:
            await run_together(fail() for _ in range(num_failures))
        except LookupError:
            assert alive

    gc.collect()
    gc.disable()
    try:
        await asyncio.create_task(ask())
        assert not alive
    finally:
        gc.enable()


async def test_a_cancelled_caller_ends_them_all() -> None:
    ended = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    task = asyncio.create_task(run_together([wait(), wait()]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True, True]
