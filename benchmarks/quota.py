"""Tokens per second of a process that may use some of the processors, as a share of all it could.

A container has a quota of processor time, all or nothing: threads that have used it up wait
for the next period, of 100 ms. `benchmarks/busy.py` runs without neighbours in a control group of
its own, once for each quota, in turns with one that has none; the fair share is the quota over the
processors. Needs the right to make control groups (of either version). Last line: JSON.

    python benchmarks/quota.py [--cpus 0.5,1,1.5] [what busy.py takes]
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PERIOD_US = 100_000
BUSY = Path(__file__).with_name("busy.py")


@contextmanager
def control_group(cpus: float) -> Iterator[Path]:
    """A group of that quota meanwhile; where processes that are to be in it write their number."""
    root = Path("/sys/fs/cgroup")
    has_versions = (root / "cpu").is_dir()
    group = (root / "cpu" if has_versions else root) / f"aioengine-quota-{os.getpid()}"
    group.mkdir()
    try:
        quota = round(cpus * PERIOD_US)
        if has_versions:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        yield group / "cgroup.procs"
    finally:
        leave(group)


def leave(group: Path) -> None:
    """Remove a group, once what was in it has ended: what is in it still is killed."""
    for _ in range(100):
        try:
            return group.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        for process in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        time.sleep(0.05)
    group.rmdir()


def run(busy: list[str], procs: Path | None = None) -> dict[str, Any]:
    """What `busy.py` measures without neighbours, in the group that `procs` is of."""
    command = shlex.join([sys.executable, str(BUSY), "--only", "nobody", *busy])
    enter = f"echo $$ > {shlex.quote(str(procs))} && " if procs else ""
    done = subprocess.run(
        ["sh", "-c", f"{enter}exec {command}"], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cpus", type=lambda text: [*map(float, text.split(","))], default=[0.5, 1.0, 1.5]
    )
    options, busy = parser.parse_known_args()
    if min(options.cpus) < 0.01:
        parser.error("--cpus: a quota is at least 0.01")
    cores = len(os.sched_getaffinity(0))
    before, shares, lags = run(busy), {}, {}
    idle = [before]
    for cpus in options.cpus:
        with control_group(cpus) as procs:
            limited = run(busy, procs)
        after = run(busy)
        shares[cpus] = {
            key: round(
                2 * rate / (before["idle_tokens_per_s"][key] + after["idle_tokens_per_s"][key]), 3
            )
            for key, rate in limited["idle_tokens_per_s"].items()
        }
        lags[cpus] = limited["lag_ms"]
        print(f"{cpus} of {cores}: {shares[cpus]}, {lags[cpus]}", file=sys.stderr)
        before = after
        idle.append(after)
    print(
        json.dumps(
            {
                "benchmark": "quota",
                "model": before["model"],
                "dtype": before["dtype"],
                "cores": cores,
                "fair_share": {cpus: cpus / cores for cpus in options.cpus},
                "share": shares,
                "lag_ms": lags,
                "idle": [each["idle_tokens_per_s"] for each in idle],
            }
        )
    )


if __name__ == "__main__":
    main()
