"""Progress of a load, reported from wherever its work is done.

Between whoever wants to know and the loop over the weights lie `load` methods that an application
may override. So the way down is a context variable of the loading thread, and two engines that load
at once each hear of their own load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from aioengine.errors import EngineClosedError
from aioengine.types import LoadProgress

__all__ = ["Reporter", "counted", "is_watched", "stage"]

Item = TypeVar("Item")


class Reporter:
    """One load's, for one thread at a time. `tell` is called with what is new; None: nobody is.

    Once `is_stopped()` is true, the load ends where it next reports: a thread cannot be cancelled.
    """

    def __init__(
        self,
        tell: Callable[[LoadProgress], object] | None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._tell = tell
        self._is_stopped = is_stopped
        self._last: LoadProgress | None = None

    def report(self, stage: str, done: int, total: int) -> None:
        """Say how far a stage is. Raises EngineClosedError where the load is to end."""
        if self._is_stopped():
            raise EngineClosedError("the engine was closed while it was starting")
        progress = LoadProgress(stage, done, total)
        if self._tell is not None and progress != self._last:
            self._last = progress
            self._tell(progress)

    def finish(self, stage: str) -> None:
        """Say that a stage has ended, unless its parts have said so."""
        last = self._last
        if last is None or last.stage != stage or last.done < last.total:
            self.report(stage, 1, 1)

    @contextmanager
    def listens(self) -> Iterator[None]:
        """Meanwhile, what this thread reports comes here."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_UNHEARD = Reporter(None)
_current: ContextVar[Reporter] = ContextVar("aioengine_load")


def is_watched() -> bool:
    """Return whether this thread loads for an engine, which may want to know or to stop it."""
    return _current.get(_UNHEARD) is not _UNHEARD


@contextmanager
def stage(name: str) -> Iterator[None]:
    """One stage: reported when it begins, and when it has gone well."""
    reporter = _current.get(_UNHEARD)
    reporter.report(name, 0, 1)
    yield
    reporter.finish(name)


def counted(name: str, items: Iterable[Item], total: int) -> Iterator[Item]:
    """The items, each reported as a part of the stage once it has been dealt with."""
    reporter = _current.get(_UNHEARD)
    for done, item in enumerate(items, 1):
        yield item
        reporter.report(name, done, total)
