"""Happens-before on a simulated device: streams, events, and what every operator reads and writes.

Each stream has a vector clock: the number of its own operators, and for every other stream the
number of those that are known to have ended before its next one begins. Recording an event copies
a clock, waiting for one merges it (Lamport, 1978; Mattern, 1989). The host is one more
participant: an operator is launched after all that any of its threads has waited for.

Beside that an order may have queues (queues.py), in which operators lie until they are run; without
them each has been run when it is launched.

Two findings: a *race*, where two operators touch the same memory, one of them writes, and nothing
orders them; and memory that is *freed while read*: a block goes back to the stream that it was made
in, which may use it at once, while another stream is not known to be done with it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.simulated.queues import Point, Queues

__all__ = ["Event", "Finding", "Order", "Stream"]

Clock = dict[int, int]
"""Stream -> its operators that are known to have ended."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of order: `kind` is "race" or "freed while read"."""

    kind: str
    operator: str
    where: str
    other: str
    other_where: str


@dataclass(frozen=True, slots=True)
class _Access:
    stream: int
    number: int
    operator: str
    where: str


@dataclass(slots=True)
class _Block:
    """Memory of one storage: whose it is, who wrote it last, who has read it since."""

    owner: int
    written: _Access | None = None
    reads: dict[int, _Access] = field(default_factory=dict)


class Order:
    """The clocks of all streams, and the last accesses to all memory. Thread-safe."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._host: Clock = {}
        self._clocks: dict[int, Clock] = {0: {}}
        self._blocks: dict[int, _Block] = {}
        self.queues: Queues | None = None

    def new_stream(self) -> int:
        """The number of a new stream; 0 is the default one."""
        with self._lock:
            number = next(self._numbers)
            self._clocks[number] = {}
            return number

    def record(self, stream: int) -> Clock:
        """What has been launched into a stream so far."""
        with self._lock:
            return dict(self._clocks[stream])

    def wait(self, stream: int, clock: Clock) -> None:
        """Order a stream's next operators behind a recorded clock."""
        with self._lock:
            _merge(self._clocks[stream], clock)

    def synchronize(self, clock: Clock | None = None) -> None:
        """Order all that is launched from now on behind a clock; None: behind everything."""
        with self._lock:
            for each in self._clocks.values() if clock is None else (clock,):
                _merge(self._host, each)

    def launch(
        self, stream: int, operator: str, where: str, reads: Iterable[int], writes: Iterable[int]
    ) -> None:
        """Note an operator that reads and writes blocks of memory, by address."""
        with self._lock:
            clock = self._clocks[stream]
            _merge(clock, self._host)
            clock[stream] = clock.get(stream, 0) + 1
            access = _Access(stream, clock[stream], operator, where)
            writes = set(writes)
            for address in writes:
                block = self._block(address, stream)
                for other in (block.written, *block.reads.values()):
                    self._check("race", access, other, clock)
                block.written, block.reads = access, {}
            for address in set(reads) - writes:
                block = self._block(address, stream)
                self._check("race", access, block.written, clock)
                block.reads[stream] = access

    def allocate(self, address: int, stream: int) -> None:
        """Note memory that a stream's allocator gave out."""
        with self._lock:
            self._blocks[address] = _Block(stream)

    def free(self, address: int) -> None:
        """Note memory that nobody refers to any more: it goes back to the stream it is of."""
        with self._lock:
            block = self._blocks.pop(address)
            clock = {**self._clocks[block.owner]}
            _merge(clock, self._host)
            end = _Access(block.owner, clock.get(block.owner, 0), "free", "")
            for other in (block.written, *block.reads.values()):
                self._check("freed while read", end, other, clock)

    def _block(self, address: int, stream: int) -> _Block:
        return self._blocks.setdefault(address, _Block(stream))

    def _check(self, kind: str, access: _Access, other: _Access | None, clock: Clock) -> None:
        if other is None or other.stream == access.stream:
            return
        if clock.get(other.stream, 0) < other.number:
            names = access.operator, access.where, other.operator, other.where
            self.findings.append(Finding(kind, *names))


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


class Stream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, order: Order, *, priority: int = 0, is_default: bool = False) -> None:
        self.order = order
        self.priority = priority
        self.number = 0 if is_default else order.new_stream()

    def record_event(self, event: Event | None = None) -> Event:
        """Mark the end of what has been launched into the stream."""
        event = event or Event(self.order)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let what is launched from now on begin behind the event."""
        self.order.wait(self.number, event.clock)
        if self.order.queues is not None and event.point is not None:
            self.order.queues.put(self.number, event.point)

    def wait_stream(self, other: Stream) -> None:
        """Let what is launched from now on begin behind all of another stream."""
        self.wait_event(other.record_event())


class Event:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, order: Order, **_: object) -> None:
        self.order = order
        self.clock: Clock = {}
        self.point: Point | None = None

    def record(self, stream: Stream) -> None:
        """Mark the end of what has been launched into the stream."""
        self.clock = self.order.record(stream.number)
        queues = self.order.queues
        self.point = None if queues is None else queues.point(stream.number)

    def synchronize(self) -> None:
        """Wait on the host. Raises DeviceFailedError."""
        if self.order.queues is not None and self.point is not None:
            self.order.queues.run_until(self.point)
        self.order.synchronize(self.clock)

    def query(self) -> bool:
        """Whether it has come. A device with queues goes on meanwhile."""
        queues = self.order.queues
        if queues is None or self.point is None:
            return True
        queues.go_on(surely=True)
        return queues.has_passed(self.point)
