"""Other work beside a benchmark: processes of their own, and threads of this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SPIN = "while True: pass"
READ_MEMORY = """
import numpy
numbers = numpy.zeros(1 << 27)
while True: numbers.sum()
"""


@contextmanager
def processes(count: int, code: str = SPIN, *, own_group: bool = False) -> Iterator[None]:
    """Meanwhile, so many processes run `code`; `own_group`: in a session, and so a scheduling
    group (autogroup), of their own."""
    forks = f"import os\nany(not os.fork() for _ in range({count - 1}))\n{code}"
    command = [sys.executable, "-c", forks]
    # In the same group: of a group of processes of their own all the same, to be ended by it.
    group: dict[str, Any] = {"start_new_session": True} if own_group else {"process_group": 0}
    running = subprocess.Popen(command, **group)
    time.sleep(0.5 if code is SPIN else 2)
    try:
        yield
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


@contextmanager
def python_threads(count: int) -> Iterator[None]:
    """Meanwhile, so many threads of this process run pure Python."""
    is_over = threading.Event()

    def spin() -> None:
        number = 0
        while not is_over.is_set():
            for _ in range(1000):
                number += 1

    threads = [threading.Thread(target=spin, daemon=True) for _ in range(count)]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        is_over.set()
        for each in threads:
            each.join()
