"""The device queues of a CPU: one compute thread that decoder and encoder share."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from aioengine.streams.device import DECODER, ENCODER, Device, Job, StepQueue, failure_of, settle
from aioengine.streams.pace import Pace
from aioengine.streams.thread_priority import step_back
from aioengine.types import read

__all__ = ["CpuDevice"]


PATIENCE_S = 0.05
"""How long the thread waits in the queue for the loop to add a step: it leaves it only to do
something else, as it has to have the interpreter's lock for that."""


class _Queued(NamedTuple):
    """A step in the queue, and its handle. `read` gives its result, and when it began and ended."""

    number: int
    future: asyncio.Future[Any]
    read: Callable[[], Any]


_QUEUE = Job(lambda: None, None)  # type: ignore[arg-type]
"""Stands for what is in the queue."""


class CpuDevice(Device):
    """Jobs are done one after the other, on the launch thread itself.

    Steps go first, but after `max_streak` of them in a row, or as many as it has patience for, an
    encoder job gets its turn. Between two steps the loop needs a moment to commit one and plan the
    next: for up to `linger_s` the thread waits for that step rather than take an encoder job that
    would delay every stream.

    Steps that a `StepQueue` takes are planned as far ahead as it takes for the thread to have
    always one to do. It does them in one call, and the loop learns of each by the queue's event.

    An encoder's run on the processors that decode other media takes twice its time, and so do they:
    it begins when they are done, or after as long as a few images take.
    """

    run_ahead = 0
    gather_s = 0.05

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        niceness: int = 0,
        max_streak: int = 4,
        linger_s: float = 0.005,
    ) -> None:
        """See `Device`; `niceness` is added to the launch thread's."""
        self._niceness = niceness
        self._max_streak = max_streak
        self._linger_s = linger_s
        self._streak = 0
        self._step_may_follow = False
        self._queue: StepQueue | None = None
        self._queued: deque[_Queued] = deque()
        self._num_other_steps = 0  # that have not ended
        self._num_queued = 0  # steps, since the beginning
        self._num_run = 0  # of them, as far as the thread has come back and said so
        self._pace = Pace()
        self._ended_s: float | None = None  # when the last step ended that no other has followed
        super().__init__(loop)

    def has_room(self, num_in_flight: int) -> bool:
        """See `Device`."""
        ahead = self.run_ahead if self._num_other_steps else max(self.run_ahead, self._pace.ahead)
        return num_in_flight <= ahead

    @property
    def takes_queued(self) -> bool:  # type: ignore[override]
        """See `Device`: what is queued does not wait for other steps."""
        return not self._num_other_steps and not self._is_closed

    def submit_step(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        """See `Device`."""
        self._num_other_steps += 1
        self._ended_s = None
        future = super().submit_step(job)
        future.add_done_callback(self._note_other)
        return future

    def submit_queued(
        self, queue: StepQueue, number: int, read: Callable[[], Any]
    ) -> asyncio.Future[Any]:
        """See `Device`."""
        future: asyncio.Future[Any] = self._bridge.loop.create_future()
        if self._queue is None:
            self._queue = queue
            self._bridge.loop.add_reader(queue.event, self._collect)
        if self._ended_s is not None:
            self._pace.note_turn(time.perf_counter() - self._ended_s)
            self._ended_s = None
        self._queued.append(_Queued(number, future, read))
        with self._changed:
            self._num_queued = number + 1
            self._allow()
            self._changed.notify_all()
        return future

    def rest(self) -> None:
        """See `Device`."""
        self._ended_s = None  # the next step will not have been waited for
        with self._changed:
            if self._step_may_follow:
                self._step_may_follow = False
                self._allow()
                self._changed.notify_all()

    def release(self, let_go: Callable[[], None]) -> asyncio.Future[Any]:
        """See `Device`. Steps in the queue that have not begun are cancelled."""
        self._leave()

        def let_all_go() -> None:
            let_go()
            self._queue = None  # a late thread may be reading what is queued until then

        return self.submit_step(let_all_go)

    async def aclose(self) -> None:
        """See `Device`."""
        self._leave()
        await super().aclose()
        self._queue = None

    def _leave(self) -> None:
        """Have the thread come out of the queue, for good."""
        if self._queue is None:
            return
        self._bridge.loop.remove_reader(self._queue.event)
        self._collect()
        with self._changed:
            self._num_queued = 0
            self._queue.let(0)
        while self._queued:
            self._queued.popleft().future.cancel()

    def _note_other(self, _: asyncio.Future[Any]) -> None:
        self._num_other_steps -= 1

    def _collect(self) -> None:
        """End the handles of steps that are done. On the loop."""
        if self._queue is None:
            return
        num_done = self._queue.see()
        while self._queued and self._queued[0].number < num_done:
            queued = self._queued.popleft()
            found = queued.read()
            _, began, self._ended_s = found
            self._pace.note_step(self._ended_s - began)
            settle(queued.future, found, None)

    def _fail_queued(self, error: Exception) -> None:
        self._collect()
        while self._queued:
            settle(self._queued.popleft().future, None, error)

    def _allow(self) -> None:
        """Tell the queue how far the thread may go in it, and whether it may wait there. Called
        with `_changed` held."""
        if self._queue is None:
            return
        steps, encodes = self._waiting[DECODER], self._waiting[ENCODER]
        is_alone = self._step_may_follow and not steps and not encodes
        limit = sys.maxsize if is_alone else self._num_queued
        if encodes:
            left = self._longest_streak(encodes[0]) - self._streak
            limit = min(limit, self._num_run + max(left, 0))
        self._queue.let(limit)

    def _submit(
        self, name: str, job: Callable[[], Any], patience: int | None = None
    ) -> asyncio.Future[Any]:
        future = super()._submit(name, job, patience)
        with self._changed:
            if self._num_run < self._num_queued:
                self._allow()
        return future

    def _launch_all(self) -> None:
        step_back(self._niceness)  # and so do the threads of OpenMP, which are started from here
        while (job := self._next()) is not None:
            if job is _QUEUE:
                self._run_queue()
                continue
            try:
                result, error = read(job.function()), None
            except BaseException as caught:  # whatever it is, the waiter has to know
                result, error = None, failure_of(caught)
            if not self._bridge.call(settle, job.future, result, error):
                break  # nobody is left to tell
            del job, result, error

    def _run_queue(self) -> None:
        assert self._queue is not None
        try:
            num_run = self._queue.run(PATIENCE_S)
        except Exception as error:
            num_run = self._num_queued  # there is nothing to go on with
            self._bridge.call(self._fail_queued, error)
        with self._changed:
            self._streak += num_run - self._num_run
            self._num_run = num_run

    def _next(self) -> Job | None:
        """Wait for the next job. None: the device has been closed."""
        steps, encodes = self._waiting[DECODER], self._waiting[ENCODER]
        with self._changed:
            while not self._is_closed:
                encode_is_due = encodes and self._streak >= self._longest_streak(encodes[0])
                is_queued = self._num_run < self._num_queued
                if (steps or is_queued) and not encode_is_due:
                    self._step_may_follow = self._linger_s > 0
                    if is_queued:  # behind another step there is none in the queue
                        self._allow()
                        return _QUEUE
                    self._streak += 1
                    return steps.popleft()
                if encodes and (encode_is_due or not self._step_may_follow):
                    self._streak = 0
                    return encodes.popleft()
                lingers = bool(encodes)
                if not self._changed.wait(self._linger_s if lingers else None) and lingers:
                    self._step_may_follow = False
            return None

    def _longest_streak(self, encode: Job) -> int:
        patience = encode.patience
        return self._max_streak if patience is None else min(patience, self._max_streak)
