"""Threads that compute are nicer than the loop's, and nobody else's niceness changes."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import pytest

from aioengine.streams.courtesy import STEPS, step_back
from aioengine.streams.cpu import CpuDevice

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="niceness is the process's there")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def in_thread(*steps: object) -> list[int]:
    seen: list[int] = []

    def run() -> None:
        for _ in steps:
            step_back()
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
    assert in_thread() == [before, before]
    assert in_thread(1) == [min(19, before + STEPS)] * 2
    assert in_thread(1, 2, 3) == [19, 19]
    assert niceness() == before


def test_where_it_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    before = niceness()
    assert in_thread(1) == [before, before]


async def test_the_cpu_device() -> None:
    before = niceness()
    device = CpuDevice(asyncio.get_running_loop())
    assert await device.submit_step(niceness) == min(19, before + STEPS)
    assert await device.submit_encode(niceness) == min(19, before + STEPS)
    await device.aclose()
    assert niceness() == before
