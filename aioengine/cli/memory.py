"""Memory that a burst of large requests has left behind, given back to the system."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioengine.asgi.json_body import BodyBudget

__all__ = ["BurstWatch", "give_back_memory"]

BURST_BYTES = 32 << 20
"""Of bodies, by which they have to fall for a burst to be over."""
DELAY_S = 0.5
"""After which what has ended holds nothing any more, but in cycles."""


def give_back_memory() -> None:
    """Collect garbage, and have glibc give back what is free, which lets go of the GIL.

    For a process of our own, whose libraries are frozen, so that there is little to walk through.
    Requests that end early leave their media in cycles of errors and frames.
    """
    gc.collect()
    with suppress(AttributeError, OSError, TypeError):  # another allocator
        ctypes.CDLL(None).malloc_trim(0)


class BurstWatch:
    """A watch over the bodies under way, for the end of a burst. Times in seconds."""

    def __init__(self, bodies: BodyBudget) -> None:
        self._bodies = bodies
        self._due: float | None = None

    def is_over(self, now: float) -> bool:
        """Return whether a burst has just ended; true once for each."""
        bodies = self._bodies
        if bodies.peak_bytes - bodies.num_bytes >= BURST_BYTES:
            bodies.peak_bytes = bodies.num_bytes
            self._due = now + DELAY_S
        if self._due is None or now < self._due:
            return False
        self._due = None
        return True
