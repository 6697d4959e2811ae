"""Coroutines side by side, the first error ending the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from traceback import clear_frames
from typing import Any, TypeVar

__all__ = ["run_together"]

Result = TypeVar("Result")


async def run_together(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all side by side and return their results, in order.

    The first error cancels the others and is raised as it is, in no exception group. What the
    others held is let go of at once: a task group's own frame and its exception hold each other,
    and with them every argument of every task, until garbage is collected.
    """
    coroutines = [*work]
    if len(coroutines) == 1:
        return [await coroutines.pop()]  # which needs no task of its own
    failure: BaseException | None = None
    running: list[asyncio.Task[Result]] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            running += [tasks.create_task(each) for each in coroutines]
    except BaseExceptionGroup as group:
        clear_frames(group.__traceback__)
        coroutines.clear()
        failure = group.exceptions[0]
        del tasks
        running.clear()
    if failure is None:
        return [task.result() for task in running]
    try:
        raise failure
    finally:
        del failure  # whose traceback holds this frame
