"""Lag of the event loop: whatever holds it holds up every stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["TICK_S", "LoopLag"]

TICK_S = 0.1
"""Between two ticks: a stall that is longer is seen, one that is shorter by its share."""


class LoopLag:
    """A clock that ticks on the event loop, as a chain of timers without a task.

    `tick` gets by how many seconds a tick came late, and says whether there shall be another.
    """

    def __init__(self, tick: Callable[[float], bool]) -> None:
        self._tick = tick
        self._is_ticking = False

    def begin(self) -> None:
        """Tick on the running loop from now on; nothing new where it ticks already."""
        if not self._is_ticking:
            self._is_ticking = True
            self._wait(asyncio.get_running_loop())

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + TICK_S
        loop.call_at(due, self._strike, loop, due)

    def _strike(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        # A timer may come early by the clock's resolution.
        self._is_ticking = self._tick(max(0.0, loop.time() - due))
        if self._is_ticking:
            self._wait(loop)
