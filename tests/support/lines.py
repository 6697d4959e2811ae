"""How much work a call is, in lines of Python executed: the same on every machine.

Loops inside C functions (a list's copy) do not count.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any, Self

import pytest

_RUN = asyncio.events.Handle._run
_READS_WAKE_UPS = "BaseSelectorEventLoop._read_from_self"


class LineCounter:
    """Counts the lines that are executed while it is entered."""

    def __init__(self) -> None:
        self.num_lines = 0

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        self.num_lines += event == "line"
        return self._trace


def num_lines(function: Callable[[], object]) -> int:
    """The lines that a call of `function` executes."""
    with LineCounter() as counter:
        function()
    return counter.num_lines


class CallbackLines(AbstractContextManager["CallbackLines"]):
    """The lines of each callback that the running loop makes; `most`: by kind, the largest.

    The loop's own reading of wake-ups is left out: it reads on as long as other threads write.
    """

    def __init__(self) -> None:
        self.most: dict[str, int] = defaultdict(int)
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Self:
        self._patch.setattr(asyncio.events.Handle, "_run", self._counted_run())
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._patch.undo()

    def _counted_run(self) -> Callable[[asyncio.events.Handle], None]:
        def counted_run(handle: asyncio.events.Handle) -> None:
            kind = kind_of(handle._callback)  # type: ignore[attr-defined]
            with LineCounter() as counter:
                _RUN(handle)
            if kind != _READS_WAKE_UPS:
                self.most[kind] = max(self.most[kind], counter.num_lines)

        return counted_run


def kind_of(callback: Any) -> str:
    """What runs: a task's coroutine, or a function."""
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        coroutine: Any = task.get_coro()
        work = coroutine.cr_frame and coroutine.cr_frame.f_locals.get("work")
        callback = work or coroutine
    if isinstance(callback, functools.partial):
        callback = callback.func
    return str(getattr(callback, "__qualname__", type(callback).__qualname__))
