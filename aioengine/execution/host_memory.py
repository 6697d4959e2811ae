"""Memory that this process may still use: what the machine has, and what its limits leave.

Limits are those of control groups, versions 1 and 2, at every level above the process, and the
process's own. Linux tells; elsewhere nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_bytes"]

UNLIMITED = 1 << 60
"""Control groups of version 1 say "no limit" by a number of this size."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that may still be taken, or None where the system does not tell.

    `root` is where `proc` and `sys` lie.
    """
    found = [*_machine(root), *_control_groups(root), *_own_limits(root)]
    return min((max(0, number) for number in found), default=None)


def _machine(root: Path) -> Iterator[int]:
    meminfo = _numbers(root / "proc/meminfo")
    if "MemAvailable:" in meminfo:
        yield meminfo["MemAvailable:"] * 1024


def _control_groups(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        limit_name, usage_name, inactive_name = names
        # In a container the path may be the host's, and the group's files lie at the top.
        place = base / path.lstrip("/")
        for group in [place, *place.parents]:
            limit, usage = _number(group / limit_name), _number(group / usage_name)
            if limit is not None and usage is not None and limit < UNLIMITED:
                # File pages that are not in use are given up before memory runs out.
                spare = _numbers(group / "memory.stat").get(inactive_name, 0)
                yield limit - usage + spare
            if group == base:
                break


def _own_limits(root: Path) -> Iterator[int]:
    status = _numbers(root / "proc/self/status")
    for line in _lines(root / "proc/self/limits"):
        for name, used in (("Max address space", "VmSize:"), ("Max data size", "VmData:")):
            words = line.removeprefix(name).split() if line.startswith(name) else []
            if words and words[0].isdecimal():
                yield int(words[0]) - status.get(used, 0) * 1024


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _number(path: Path) -> int | None:
    """The number that a file holds; None for none, and for "max"."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdecimal() else None


def _numbers(path: Path) -> dict[str, int]:
    """The numbers of a file of `name number` lines."""
    words = (line.split() for line in _lines(path))
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdecimal()}
