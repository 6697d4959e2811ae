"""The one door from other threads into an event loop, and the ways out to a thread.

Calls queue up under one lock and wake the loop once per batch. The closed-check and the enqueueing
happen under the same lock, so that a call that returns True is certain to run as long as the loop
does; after `close()`, or when the loop itself is closed, calls return False. Method: trio's entry
queue.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any, TypeVar

from aioengine.errors import EngineClosedError, EngineError, WrongLoopError

__all__ = ["LoopBridge", "check_running", "run_apart", "run_in"]

Result = TypeVar("Result")


class LoopBridge:
    """Runs callables on `loop`, in the order in which threads hand them in."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_awake = False
        self._is_closed = False

    def call(self, function: Callable[..., object], *args: Any) -> bool:
        """Have `function(*args)` run on the loop soon. From any thread; never blocks.

        Returns whether it will run. An exception in it goes to the loop's exception handler.
        """
        with self._lock:
            if self._is_closed:
                return False
            self._calls.append((function, args))
            if self._is_awake:
                return True
            try:
                self.loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop is closed
                self._is_closed = True
                self._calls.clear()
                return False
            self._is_awake = True
            return True

    def close(self) -> None:
        """Refuse further calls; those already accepted still run. Idempotent."""
        with self._lock:
            self._is_closed = True

    def _drain(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, deque()
            self._is_awake = False
        try:
            while calls:
                function, args = calls.popleft()
                try:
                    function(*args)
                except Exception as error:
                    self.loop.call_exception_handler(
                        {"message": "a call from another thread failed", "exception": error}
                    )
        finally:
            if calls:  # an interrupt: it ends the loop's run, and the loop may run again
                with self._lock:
                    self._calls.extendleft(reversed(calls))
                self.loop.call_soon(self._drain)


def check_running(loop: asyncio.AbstractEventLoop | None, rule: str) -> None:
    """Raise WrongLoopError, which says the rule, unless called on `loop`."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is not loop:
        raise WrongLoopError(rule)


async def run_apart(function: Callable[..., Result], *args: Any) -> Result:
    """`function(*args)` in a thread made for it.

    The threads that asyncio or anyio share out may all be held by handlers that wait for us.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="aioengine-apart")
    work = pool.submit(function, *args)
    try:
        return await asyncio.wrap_future(work)
    finally:
        pool.shutdown(wait=work.done())  # then the thread has nothing left to do but to end


async def run_in(pool: ThreadPoolExecutor, function: Callable[..., Result], *args: Any) -> Result:
    """`function(*args)` in one of the pool's threads; raises what it raises.

    EngineError in place of what the loop would take for its own: a cancellation that nobody asked
    for, the end of the process, or of a generator. Foreign code in a thread may raise any of them.
    """
    try:
        work = pool.submit(_contained, function, args)
    except RuntimeError as error:  # Python ends its pools before the threads that wait for them
        raise EngineClosedError("the process is ending, or the engine is closed") from error
    try:
        return await asyncio.wrap_future(work)
    finally:
        del work  # which holds an error, whose traceback holds this frame


def _contained(function: Callable[..., Result], args: tuple[Any, ...]) -> Result:
    try:
        return function(*args)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, CancelledError | StopIteration):
            raise
        raise EngineError(f"work in a thread ended with {type(error).__name__}") from error
