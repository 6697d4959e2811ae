"""An event loop in a thread of its own, for callers that wait."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import anyio
from anyio.from_thread import BlockingPortal

from aioengine.errors import EngineError, WrongLoopError

__all__ = ["LoopThread"]

LAST_WAIT_S = 5.0
"""How long what nobody has closed may take to end, at the end of the process."""


class LoopThread:
    """An event loop in a thread of its own, and the portal into it."""

    def __init__(self) -> None:
        opened: Future[BlockingPortal] = Future()
        self._process = os.getpid()
        self._thread = threading.Thread(
            target=self._run, args=(opened,), name="aioengine-loop", daemon=True
        )
        self._thread.start()
        self.portal = opened.result()

    def is_current(self) -> bool:
        """Return whether this is the thread that the loop runs in."""
        return threading.get_ident() == self._thread.ident

    def check_caller(self) -> None:
        """Raise an EngineError where a call would wait for itself, or for what a fork left out."""
        if os.getpid() != self._process:
            raise EngineError("an engine does not follow a fork; make one in the new process")
        if self.is_current():
            raise WrongLoopError("an Engine cannot be called from callbacks on its own event loop")

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Have the loop run `function(*args)`, unless it has ended; never waits."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """End the loop once its tasks have ended; from another thread than its own."""
        with suppress(RuntimeError):  # it ends already
            self.portal.start_task_soon(self.portal.stop)

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
                await self.portal.stop()

        def begin() -> None:
            self._last = asyncio.create_task(close_and_stop())

        if os.getpid() == self._process:
            self.call_soon(begin)
            if not self.is_current():
                self.join(LAST_WAIT_S)

    def _run(self, opened: Future[BlockingPortal]) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            async with BlockingPortal() as portal:
                opened.set_result(portal)
                await portal.sleep_until_stopped()

        try:
            options = {"use_uvloop": find_spec("uvloop") is not None}
            anyio.run(serve, backend="asyncio", backend_options=options)
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)
