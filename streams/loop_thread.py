"""An event loop in a thread of its own, for callers that wait."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from inspect import isawaitable
from typing import Any

from aioengine.errors import EngineError, WrongLoopError, is_real, require

__all__ = ["LoopThread", "new_runner", "seconds_to_wait"]

LAST_WAIT_S = 5.0
"""How long what nobody has closed may take to end, at the end of the process."""


def new_runner() -> asyncio.Runner:
    """A runner with uvloop's loop where it is installed, else asyncio's own."""
    try:
        from uvloop import new_event_loop
    except ImportError:  # Windows
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=new_event_loop)


class LoopThread:
    """An event loop in a daemon thread.

    Calls reach it with one wake-up, where anyio's blocking portal takes two and makes two tasks.
    """

    def __init__(self) -> None:
        begun: Future[None] = Future()
        self._process = os.getpid()
        self._thread = threading.Thread(
            target=self._run, args=(begun,), name="aioengine-loop", daemon=True
        )
        self._thread.start()
        begun.result()

    def is_current(self) -> bool:
        """Return whether this is the thread that the loop runs in."""
        return threading.get_ident() == self._thread.ident

    def check_process(self) -> None:
        """Raise an EngineError where a call would wait for what a fork left out."""
        if os.getpid() != self._process:
            raise EngineError("an engine does not follow a fork; make one in the new process")

    def check_caller(self) -> None:
        """Raise an EngineError there too, and where a call would wait for itself."""
        self.check_process()
        if self.is_current():
            raise WrongLoopError("an Engine cannot be called from callbacks on its own event loop")

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Have the loop call `function(*args)` and await what it returns, if need be.

        Cancelling the future cancels the call. Raises RuntimeError once the loop has ended.
        """

        async def call() -> Any:
            result = function(*args)
            return await result if isawaitable(result) else result

        calling = call()
        try:
            return asyncio.run_coroutine_threadsafe(calling, self._loop)
        except RuntimeError:
            calling.close()
            raise

    def call_soon(self, function: Callable[..., object], *args: Any) -> bool:
        """Have the loop run `function(*args)`; False if it has ended. Never waits."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return False
        return True

    def stop(self) -> None:
        """End the loop once its tasks have ended."""
        self.call_soon(self._stopped.set)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the loop has ended."""
        self._thread.join(timeout)

    def end(self, close: Callable[[], Awaitable[object]]) -> None:
        """Have the loop await `close()` and end, for what nobody refers to any more.

        Waits for it a while, as the process may be ending.
        """

        async def close_and_stop() -> None:
            try:
                await close()
            finally:
                self._stopped.set()

        if os.getpid() == self._process:
            with suppress(RuntimeError):
                self.submit(close_and_stop)
            if not self.is_current():
                self.join(LAST_WAIT_S)

    def _run(self, begun: Future[None]) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._stopped = asyncio.Event()
            begun.set_result(None)
            await self._stopped.wait()
            while left := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(left)

        try:
            with new_runner() as runner:
                runner.run(serve())
        except BaseException as error:
            if begun.done():
                raise
            begun.set_exception(error)


def seconds_to_wait(timeout: Any) -> float | None:
    """A limit that threads can wait for; None where it is none. Raises InvalidRequestError."""
    if timeout is None or timeout == math.inf:
        return None
    require(is_real(timeout), "timeout", timeout, "a number of seconds, or None for no limit")
    return None if timeout > threading.TIMEOUT_MAX else float(timeout)
