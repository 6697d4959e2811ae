"""The device queues of a CPU: one compute thread that decoder and encoder share."""

from __future__ import annotations

import asyncio

from aioengine.streams.device import DECODER, ENCODER, Device, Job, failure_of, settle
from aioengine.streams.thread_priority import step_back
from aioengine.types import read

__all__ = ["CpuDevice"]


class CpuDevice(Device):
    """Jobs are done one after the other, on the launch thread itself.

    Steps go first, but after `max_streak` of them in a row, or as many as it has patience for, an
    encoder job gets its turn. Between two steps the loop needs a moment to commit one and plan the
    next: for up to `linger_s` the thread waits for that step rather than take an encoder job that
    would delay every stream.

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
        super().__init__(loop)

    def rest(self) -> None:
        """See `Device`."""
        with self._changed:
            if self._step_may_follow:
                self._step_may_follow = False
                self._changed.notify_all()

    def _launch_all(self) -> None:
        step_back(self._niceness)  # and so do the threads of OpenMP, which are started from here
        while (job := self._next()) is not None:
            try:
                result, error = read(job.function()), None
            except BaseException as caught:  # whatever it is, the waiter has to know
                result, error = None, failure_of(caught)
            if not self._bridge.call(settle, job.future, result, error):
                break  # nobody is left to tell
            del job, result, error

    def _next(self) -> Job | None:
        """Wait for the next job. None: the device has been closed."""
        steps, encodes = self._waiting[DECODER], self._waiting[ENCODER]
        with self._changed:
            while not self._is_closed:
                encode_is_due = encodes and self._streak >= self._longest_streak(encodes[0])
                if steps and not encode_is_due:
                    self._streak += 1
                    self._step_may_follow = self._linger_s > 0
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
