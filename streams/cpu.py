"""The device queues of a CPU: one compute thread that decoder and encoder share."""

from __future__ import annotations

import asyncio

from aioengine.streams.device import Device, failure_of, settle
from aioengine.streams.thread_priority import step_back
from aioengine.types import read

__all__ = ["CpuDevice"]


class CpuDevice(Device):
    """Jobs are done one after the other, on the launch thread itself.

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
        super().__init__(loop, max_streak=max_streak, linger_s=linger_s)

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
