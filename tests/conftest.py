"""The host application of every test: one torch thread, and an eye on whoever holds the loop."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis  # before an engine freezes what is there: it asks for referrers
import pytest
import torch

import aioengine
from aioengine.kernels.cpu import library

PACKAGE = str(Path(aioengine.__file__).parent)
ROOMS = ("processors", "models", "kernels", "streams")
MAX_HELD_S = 0.050
"""CPU time that one callback of ours may take on the loop's thread. Generous: machines differ, and
the exact bound is the business of tests/engine/test_loop_free.py."""

# A machine that others use draws slowly, which is no fault of a test's.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-native", action="store_true", help="as if the C++ kernels had not been built"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--without-native"):
        library.is_available.cache_clear()
        library.LIBRARY = Path("not-built.so")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Have reports of hostile text reach pytest-xdist's main process, which wants plain UTF-8."""
    report: Any = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _verdicts_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trials of this run's models are kept for this run only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _nobody_becomes_more_important() -> Iterator[None]:
    """What a library does to this thread's priority, later tests and processes inherit."""
    yield
    if hasattr(os, "sched_getscheduler"):
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.fixture(autouse=True)
def _nobody_holds_the_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test in which one of our callbacks held the event loop.

    A machine that stands still counts against the thread that it holds up: such a test is run
    again (`--reruns` in pyproject.toml), and what holds the loop does so every time.
    """
    held: list[tuple[str, float]] = []
    run = asyncio.events.Handle._run
    collecting = threading.local()

    def note_collection(phase: str, _info: dict[str, int]) -> None:
        # A full collection walks all of torch and falls on whoever allocates next.
        moment = time.thread_time()
        if phase == "start":
            collecting.begin = moment
        else:
            # Another thread may have begun one before the callback was there to hear of it.
            begin = getattr(collecting, "begin", moment)
            collecting.total = getattr(collecting, "total", 0.0) + moment - begin

    def spent() -> float:
        return time.thread_time() - getattr(collecting, "total", 0.0)

    def timed_run(handle: asyncio.events.Handle) -> None:
        begin = spent()
        run(handle)
        took = spent() - begin
        if took > MAX_HELD_S:
            name = _owner(handle)
            if name is not None:
                held.append((name, took))
        del handle  # as asyncio's own does: a task's error holds this frame

    monkeypatch.setattr(asyncio.events.Handle, "_run", timed_run)
    gc.callbacks.append(note_collection)
    yield
    gc.callbacks.remove(note_collection)
    assert not held, f"held the event loop: {held}"


def _owner(handle: asyncio.events.Handle) -> str | None:
    """Where the callback's code lies, if it is ours."""
    callback: Any = handle._callback
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        coroutine: Any = task.get_coro()
        code = getattr(coroutine, "cr_code", None)
    else:
        code = getattr(callback, "__code__", None)
    if code is None:
        return None
    path = Path(code.co_filename)
    ours = str(path).startswith(PACKAGE) or path.parent.name in ROOMS
    return f"{path.name}:{code.co_firstlineno} {code.co_name}" if ours else None
