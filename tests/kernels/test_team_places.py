"""Where helpers of a team run: beside the thread that they help, and where they are allowed to."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from aioengine.kernels.cpu import library
from aioengine.kernels.cpu.linear import native_way

TASKS = Path("/proc/self/task")
pytestmark = [
    pytest.mark.skipif(not library.is_available(), reason="no native operators"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells where a thread runs"),
]


def processor_of(thread: int) -> int:
    """The processor that a thread ran on last."""
    fields = (TASKS / str(thread) / "stat").read_text().rpartition(")")[2].split()
    return int(fields[36])


def mask_of(thread: int, wanted: set[int]) -> frozenset[int]:
    """What a thread may use: less for the moment in which it moves, however long that takes where
    it does not run."""
    end = time.monotonic() + 10
    while (found := os.sched_getaffinity(thread)) != wanted and time.monotonic() < end:
        time.sleep(0.001)
    return frozenset(found)


@contextmanager
def spinning(processor: int) -> Iterator[None]:
    """Meanwhile, a process keeps a processor busy."""
    code = (
        f"import os\nos.sched_setaffinity(0, {{{processor}}})\nprint(flush=True)\nwhile True: pass"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_helper_leaves_the_processor_of_the_thread_that_it_helps() -> None:
    """Also for a busy one, as it would take time from that thread alone. What it may use stays."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("there is one processor")
    own, other = allowed[:2]

    def run() -> tuple[set[int], set[int], set[frozenset[int]]]:
        os.sched_setaffinity(0, {own, other})
        before = {int(each.name) for each in TASKS.iterdir()}
        layer(rows)
        helpers = {int(each.name) for each in TASKS.iterdir()} - before
        helpers -= {each.native_id for each in threading.enumerate()}
        os.sched_setaffinity(0, {own})
        seen, masks = set(), set()
        with spinning(other):
            for _ in range(20):
                for helper in helpers:
                    os.sched_setaffinity(helper, {own})
                    os.sched_setaffinity(helper, {own, other})
                layer(rows)
                seen |= {processor_of(helper) for helper in helpers}
                masks |= {mask_of(helper, {own, other}) for helper in helpers}
        library.end_team()
        return helpers, seen, masks

    layer = native_way(torch.ones(4096, 4096), None)
    assert layer is not None
    rows = torch.ones(32, 4096)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(1) as pool:
            helpers, seen, masks = pool.submit(run).result()
    finally:
        torch.set_num_threads(threads)
    assert len(helpers) == 1
    assert other in seen
    assert masks == {frozenset({own, other})}
