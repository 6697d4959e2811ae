"""How late an event loop wakes: a task that sleeps a millisecond at a time, and what it saw.

On a busy machine much of a lag is waiting for a processor, which the kernel counts for each thread
(Linux). "Held" lags are without that time, and no longer than the processor time that this process
used meanwhile: they bound from above what its own threads did to the loop.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Callable

TICK_S = 0.001
Lag = tuple[float, float]
"""Seconds by which a sleep ended late, and how many of them our own threads may have caused."""


def settle() -> None:
    """Help a peer's process: no collector walks what it has loaded, and the GIL is asked for soon.

    Ours does without.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(0.0005)


def processor_waits() -> Callable[[], float]:
    """A clock of the seconds that this thread has been runnable without a processor to run on."""
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return lambda: 0.0
    return lambda: int(os.pread(file, 64, 0).split()[1]) * 1e-9


async def probe(lags: list[Lag]) -> None:
    """Notes how late each of many short sleeps ends, until cancelled."""
    clock = processor_waits()
    while True:
        due, waited, used = time.perf_counter() + TICK_S, clock(), time.process_time()
        await asyncio.sleep(TICK_S)
        late = time.perf_counter() - due
        held = min(late - (clock() - waited), time.process_time() - used)
        lags.append((late, max(0.0, held)))


def summary(lags: list[Lag]) -> dict[str, float]:
    """Milliseconds: median, 99th percentile and worst of both kinds."""
    found: dict[str, float] = {}
    for name, values in (
        ("lag", sorted(late for late, _ in lags)),
        ("held", sorted(held for _, held in lags)),
    ):
        for label, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            found[f"{name}_ms_{label}"] = round(values[int(share * (len(values) - 1))] * 1e3, 2)
    return found
