"""What computes beside a host's event loop lets the loop go first.

Threads that decode and multiply keep every core busy. The loop's thread wakes for moments, and
among equals it would wait for the end of somebody's turn, some milliseconds each time.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

__all__ = ["STEPS", "step_back"]

STEPS = 10
"""By how much nicer: a tenth of a core where an equal of the loop's wants all of it, else all."""


def step_back() -> None:
    """Make the calling thread, and those that it starts from now on, nicer than they were.

    On Linux, where niceness is a thread's own; elsewhere nothing is done. It cannot be taken back
    without privileges, so this is for threads that are the engine's.
    """
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with suppress(OSError):  # a sandbox may forbid it
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(19, now + STEPS))
