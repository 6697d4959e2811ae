"""Threads that compute are as nice as they are told, and nobody else's niceness changes."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import pytest

from aioengine.streams.cpu import CpuDevice
from aioengine.streams.thread_priority import step_back

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="niceness is the process's there")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def in_thread(*steps: int) -> list[int]:
    seen: list[int] = []

    def run() -> None:
        for step in steps:
            step_back(step)
        seen.append(niceness())
        heir = threading.Thread(target=lambda: seen.append(niceness()))
        heir.start()
        heir.join()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return seen


def test_a_thread_and_its_heirs() -> None:
    before = niceness()
    assert in_thread(0) == [before, before]
    assert in_thread(4) == [min(19, before + 4)] * 2
    assert in_thread(10, 10) == [19, 19]
    assert niceness() == before


def test_where_it_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    before = niceness()
    assert in_thread(4) == [before, before]


@pytest.mark.parametrize("steps", [0, 4])
async def test_the_cpu_device(steps: int) -> None:
    before = niceness()
    device = CpuDevice(asyncio.get_running_loop(), niceness=steps)
    assert await device.submit_step(niceness) == min(19, before + steps)
    assert await device.submit_encode(niceness) == min(19, before + steps)
    await device.aclose()
    assert niceness() == before
