"""The device queues of a CPU: one compute thread that decoder and encoder share.

Steps go first. Between two steps the loop needs a moment to commit one and plan the next; the
thread waits for that moment rather than start an encoder job that would delay every stream, but
after `max_streak` steps in a row an encoder job gets its turn.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from aioengine.streams.bridge import LoopBridge
from aioengine.streams.device import failure_of, settle
from aioengine.types import read

__all__ = ["CpuDevice"]

Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class CpuDevice:
    """One launch thread; `linger_s` bounds how long it waits for a step that may follow."""

    run_ahead = 0

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, max_streak: int = 4, linger_s: float = 0.005
    ) -> None:
        self._bridge = LoopBridge(loop)
        self._max_streak = max_streak
        self._linger_s = linger_s
        self._steps: deque[Job] = deque()
        self._encodes: deque[Job] = deque()
        self._streak = 0
        self._step_may_follow = False
        self._is_closed = False
        self._changed = threading.Condition()
        self._ended = loop.create_future()
        self._thread = threading.Thread(target=self._run, name="aioengine-device", daemon=True)
        self._thread.start()

    def submit_step(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        """See `Device`."""
        return self._submit(self._steps, job)

    def submit_encode(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        """See `Device`."""
        return self._submit(self._encodes, job)

    def rest(self) -> None:
        """See `Device`."""
        with self._changed:
            if self._step_may_follow:
                self._step_may_follow = False
                self._changed.notify()

    async def aclose(self) -> None:
        """See `Device`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        # The waiter's own cancellation must not cancel the future that other waiters share.
        await asyncio.shield(self._ended)
        self._thread.join()
        self._bridge.close()

    def _submit(self, queue: deque[Job], job: Callable[[], Any]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._bridge.loop.create_future()
        with self._changed:
            if self._is_closed:
                future.cancel()
                return future
            queue.append((job, future))
            self._changed.notify()
        return future

    # ---- the launch thread

    def _run(self) -> None:
        while (job := self._next()) is not None:
            function, future = job
            try:
                result, error = read(function()), None
            except BaseException as caught:  # whatever it is, the waiter has to know
                result, error = None, failure_of(caught)
            if not self._bridge.call(settle, future, result, error):
                break  # nobody is left to tell
            del job, function, future, result, error
        self._bridge.call(settle, self._ended, None, None)

    def _next(self) -> Job | None:
        with self._changed:
            while True:
                if self._is_closed:
                    for _, future in [*self._steps, *self._encodes]:
                        self._bridge.call(future.cancel)
                    return None
                encode_is_due = self._encodes and self._streak >= self._max_streak
                if self._steps and not encode_is_due:
                    self._streak += 1
                    self._step_may_follow = True
                    return self._steps.popleft()
                if self._encodes and (encode_is_due or not self._step_may_follow):
                    self._streak = 0
                    return self._encodes.popleft()
                lingers = bool(self._encodes)
                if not self._changed.wait(self._linger_s if lingers else None) and lingers:
                    self._step_may_follow = False
