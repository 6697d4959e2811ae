"""Memory that a burst of large requests has left to the allocator, given back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioengine.asgi.body import BodyBudget

__all__ = ["BurstWatch", "find_trim"]

BURST_BYTES = 32 << 20
"""Of bodies, by which they have to fall for a burst to be over."""
DELAY_S = 1.0
"""After which what has ended holds nothing any more."""


def find_trim() -> Callable[[], None] | None:
    """glibc's `malloc_trim`, which lets go of the GIL; None for other allocators."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return lambda: trim(0)


class BurstWatch:
    """A watch over the bodies under way, for the end of a burst. Times in seconds."""

    def __init__(self, bodies: BodyBudget) -> None:
        self._bodies = bodies
        self._due: float | None = None

    def is_over(self, now: float) -> bool:
        """Whether a burst has just ended; true once for each."""
        bodies = self._bodies
        if bodies.peak_bytes - bodies.num_bytes >= BURST_BYTES:
            bodies.peak_bytes = bodies.num_bytes
            self._due = now + DELAY_S
        if self._due is None or now < self._due:
            return False
        self._due = None
        return True
