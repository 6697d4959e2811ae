"""Niceness of the threads that compute, where the application asks for it.

Threads that decode and multiply keep every core busy. A loop's thread that wakes for moments may
wait among equals for the end of somebody's time slice; threads that are nicer make way at once, but
beside other busy processes they get next to nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

__all__ = ["step_back"]


def step_back(niceness: int) -> None:
    """Make the calling thread, and those that it starts from now on, nicer than they were.

    On Linux, where niceness is a thread's own; elsewhere nothing is done. It cannot be taken back
    without privileges, so this is for threads that are the engine's.
    """
    if sys.platform != "linux" or niceness == 0:
        return
    thread = threading.get_native_id()
    with suppress(OSError):  # a sandbox may forbid it
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(19, now + niceness))
