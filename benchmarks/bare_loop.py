"""A probe of how late an event loop wakes, and a process whose loop does nothing else.

The process stands beside a benchmark, for what the machine itself adds at that moment. It reads
lines: `begin` forgets what was seen, `end` prints it as a line of JSON, in milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

TICK_S = 0.001


def run_queue_delays_s() -> dict[str, float]:
    """Thread -> for how long it has waited, ready to run, for a core."""
    delays = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError, IndexError):
                path = Path(f"/proc/self/task/{thread}/schedstat")
                delays[thread] = int(path.read_text().split()[1]) / 1e9
    return delays


@dataclass
class Probe:
    """Lags and stalls of the loop, in milliseconds.

    A stall is a lag less what the process' threads waited for cores. Knowing it takes dozens of
    system calls a tick, each of which gives the GIL up: beside threads that run Python, stalls
    are better left out.
    """

    has_stalls: bool = True
    lags: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            before = run_queue_delays_s() if self.has_stalls else {}
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            lag = time.perf_counter() - due
            self.lags.append(lag * 1e3)
            if not self.has_stalls:
                continue
            after = run_queue_delays_s()
            waited = [after[thread] - before[thread] for thread in before.keys() & after]
            self.stalls.append(max(0.0, lag - max(waited, default=0.0)) * 1e3)

    def summary(self, prefix: str) -> dict[str, float]:
        """Milliseconds: median, 99th percentile and worst."""
        found = {}
        seen = {"lag": sorted(self.lags)}
        if self.has_stalls:
            seen["stall"] = sorted(self.stalls)
        for name, values in seen.items():
            for label, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
                found[f"{prefix}_{name}_{label}"] = round(values[int(share * (len(values) - 1))], 2)
        return found


class BareLoop:
    """The process, as the benchmark beside it holds it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def spawn(cls) -> BareLoop:
        """A new one, which is watching when this returns."""
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, __file__)
        bare = cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))
        await bare.end()
        return bare

    def begin(self) -> None:
        """Forget what was seen."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"begin\n")

    async def end(self) -> dict[str, float]:
        """Lags and stalls since `begin()`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"end\n")
        found: dict[str, float] = json.loads(await self._process.stdout.readline())
        return found

    async def aclose(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


async def serve() -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    probe = Probe()
    watching = asyncio.create_task(probe.run())
    await asyncio.sleep(20 * TICK_S)
    while line := await reader.readline():
        if line == b"begin\n":
            probe.lags.clear()
            probe.stalls.clear()
        else:
            print(json.dumps(probe.summary("bare")), flush=True)
    watching.cancel()


if __name__ == "__main__":
    asyncio.run(serve())
