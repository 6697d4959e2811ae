"""Operators that a simulated device runs later, in a random order that streams and events allow.

Each stream has a queue of operators, and of points in other streams that what follows waits for.
Whoever waits on the host runs them: the heads of the queues, as chance has it, until the point that
it waits for has passed. What nobody waits for stays undone, and by seed some devices run ahead of
the host and others far behind it. For one sequence of launches and waits a seed gives one order;
the host's threads may race, and then the sequence differs.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import NamedTuple

__all__ = ["DeviceFailedError", "Point", "Queues"]

EAGERNESS = (0.0, 0.2, 1.0)
"""Operators that the device runs by itself for each that is launched; one of these by seed."""
SHARE_OF_OTHERS = (0.0, 0.5, 0.9)
"""Of the operators run during a wait, those that it does not ask for; one of these by wait."""


class DeviceFailedError(RuntimeError):
    """An operator failed when it was run; every later wait says so."""


class Point(NamedTuple):
    """The end of a stream's first `count` operators."""

    stream: int
    count: int


class Queues:
    """The queues of all streams of a device."""

    def __init__(self, seed: int, lock: threading.RLock) -> None:
        """`lock`: held while an operator runs; between two of them a waiting thread lets it go."""
        self._random = Random(seed)
        self._eagerness = self._random.choice(EAGERNESS)
        self._lock = lock
        self._queues: dict[int, deque[Callable[[], None] | Point]] = {}
        self._launched: Counter[int] = Counter()
        self._done: Counter[int] = Counter()
        self.failure: DeviceFailedError | None = None

    def put(self, stream: int, work: Callable[[], None] | Point) -> None:
        """Queue an operator, or let what follows in the stream wait for a point."""
        with self._lock:
            self._queues.setdefault(stream, deque()).append(work)
            self._launched[stream] += 1

    def point(self, stream: int) -> Point:
        """The end of what has been launched into a stream so far."""
        with self._lock:
            return Point(stream, self._launched[stream])

    def has_passed(self, point: Point) -> bool:
        """Whether all before the point has been run."""
        return self._done[point.stream] >= point.count

    def go_on(self, *, surely: bool = False) -> None:
        """Run an operator or none, as a device does without being asked."""
        with self._lock:
            if self._queues and (surely or self._random.random() < self._eagerness):
                self._run_one(self._random.choice(self._runnable()))

    def run_until(self, point: Point) -> None:
        """Run what the point needs, and more by chance. Raises DeviceFailedError."""
        share = self._random.choice(SHARE_OF_OTHERS)
        while True:
            with self._lock:
                if self.has_passed(point):
                    break
                is_other = self._random.random() < share
                chosen = self._random.choice(self._runnable()) if is_other else self._needed(point)
                self._run_one(chosen)
        if self.failure is not None:
            raise self.failure

    def run_all(self) -> None:
        """Run everything. Raises DeviceFailedError."""
        with self._lock:
            points = [Point(stream, count) for stream, count in self._launched.items()]
            self._random.shuffle(points)
        for point in points:
            self.run_until(point)

    def _runnable(self) -> list[int]:
        """The streams whose next operator waits for nothing."""
        heads = ((stream, queue[0]) for stream, queue in self._queues.items())
        return [s for s, head in heads if not isinstance(head, Point) or self.has_passed(head)]

    def _needed(self, point: Point) -> int:
        """The stream whose next operator a point waits for, in the end."""
        while True:
            head = self._queues[point.stream][0]
            if not isinstance(head, Point) or self.has_passed(head):
                return point.stream
            point = head

    def _run_one(self, stream: int) -> None:
        queue = self._queues[stream]
        work = queue.popleft()
        if not queue:
            del self._queues[stream]
        if not isinstance(work, Point) and self.failure is None:
            try:
                work()
            except Exception as error:
                self.failure = DeviceFailedError(
                    "; ".join(
                        [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
                    )
                )
        self._done[stream] += 1
