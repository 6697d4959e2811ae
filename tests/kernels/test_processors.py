"""The processors that a team of threads is for: affinity, and quotas of control groups."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aioengine.kernels.cpu import library

pytestmark = [
    pytest.mark.skipif(not library.is_available(), reason="the C++ kernels were not built"),
    pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here"),
]


def ask(groups: Path, own: Path) -> int:
    found: int = torch.ops.aioengine_cpu.usable_processors(str(groups), str(own))
    return found


Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    return write


def all_processors() -> int:
    return len(os.sched_getaffinity(0))


def test_without_groups(tmp_path: Path) -> None:
    assert ask(tmp_path / "none", tmp_path / "nothing") == all_processors()


@pytest.mark.parametrize(
    ("quota", "most"),
    [
        ("max 100000", None),
        ("50000 100000", 1),
        ("100000 100000", 1),
        ("150000 100000", 1),
        ("199999 100000", 1),
        ("400000 200000", 2),
        ("100000000 100000", None),
        ("", None),
        ("0 100000", None),
        ("-1 100000", None),
        ("abc def", None),
        ("100000 0", None),
    ],
)
def test_quotas(tmp_path: Path, write: Write, quota: str, most: int | None) -> None:
    write("own", "0::/app/inner\n")
    write("groups/app/inner/cpu.max", f"{quota}\n")
    wanted = all_processors() if most is None else min(most, all_processors())
    assert ask(tmp_path / "groups", tmp_path / "own") == wanted


@pytest.mark.parametrize("place", ["", "app/", "app/inner/"])
def test_the_least_of_a_group_and_those_around_it(tmp_path: Path, write: Write, place: str) -> None:
    write("own", "0::/app/inner\n")
    for each in ("", "app/", "app/inner/"):
        write(f"groups/{each}cpu.max", "max 100000\n")
    write(f"groups/{place}cpu.max", "100000 100000\n")
    assert ask(tmp_path / "groups", tmp_path / "own") == 1


def test_groups_of_the_first_version(tmp_path: Path, write: Write) -> None:
    write("own", "5:memory:/app\n4:cpu,cpuacct:/app\n")
    write("groups/cpu/app/cpu.cfs_quota_us", "-1\n")
    write("groups/cpu/app/cpu.cfs_period_us", "100000\n")
    assert ask(tmp_path / "groups", tmp_path / "own") == all_processors()
    write("groups/cpu/app/cpu.cfs_quota_us", "150000\n")
    assert ask(tmp_path / "groups", tmp_path / "own") == 1


@pytest.mark.parametrize("line", ["", "0:", "0::", "0::relative", "0::/../../etc", ":::::"])
def test_lines_that_say_nothing(tmp_path: Path, write: Write, line: str) -> None:
    write("own", f"{line}\n")
    assert ask(tmp_path / "groups", tmp_path / "own") == all_processors()


def test_affinity(tmp_path: Path) -> None:
    """Of the calling thread, which a host may have bound."""
    found = []

    def bound() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        found.append(ask(tmp_path / "none", tmp_path / "nothing"))

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert found == [1]
