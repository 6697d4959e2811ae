"""Memory of large outputs that is used again: never while somebody has it."""

from __future__ import annotations

import gc
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aioengine.kernels.cpu import library
from aioengine.kernels.cpu.norm import compute_norm
from aioengine.kernels.layer_plan import NormPlan

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C++ kernels were not built")
WIDTH = 1024


def resident_bytes() -> int:
    """Of this process's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def ones(rows: int, value: float) -> Tensor:
    """[rows, WIDTH] of `value`, by an operator of ours."""
    return compute_norm(torch.ones(rows, WIDTH), NormPlan(torch.full((WIDTH,), value), 0.0))


def test_what_is_held_keeps_its_numbers() -> None:
    """Outputs of many sizes come and go; those that are held are nobody else's."""
    held: list[tuple[Tensor, float]] = []
    for number in range(40):
        value = float(number + 1)
        made = ones(64 * (1 + number % 5), value)
        assert (made == value).all()
        if number % 3 == 0:
            held.append((made[::2], value))  # a view keeps it too
        del made
    places = {each.untyped_storage().data_ptr() for each, _ in held}
    assert len(places) == len(held)
    assert all((each == value).all() for each, value in held)


def test_it_is_used_again() -> None:
    """Nobody else who asks for as much in between gets it."""
    x, weight = torch.ones(4096, WIDTH), torch.ones(WIDTH)
    made = compute_norm(x, NormPlan(weight, 0.0))
    place = made.data_ptr()
    del made
    others = [torch.zeros(4096, WIDTH) for _ in range(3)]
    assert compute_norm(x, NormPlan(weight, 0.0)).data_ptr() == place
    assert not any(each.any() for each in others)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in /proc")
def test_the_end_of_a_load_gives_it_back() -> None:
    ones(1024 * 12, 1.0)  # 50 MB
    library.end_load()
    before = resident_bytes()
    ones(1024 * 12, 1.0)
    assert resident_bytes() > before + (32 << 20)
    library.end_load()
    assert resident_bytes() < before + (16 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_team_ends_with_its_threads() -> None:
    """Before the thread that it belongs to does; the next operator has another one."""

    def num_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def run() -> list[int]:
        counts = [num_threads()]
        for _ in range(2):
            ones(32, 3.0)
            counts.append(num_threads())
            library.end_team()
            counts.append(num_threads())
        return counts

    with ThreadPoolExecutor(1) as pool:
        first, *others = pool.submit(run).result()
    more = min(torch.get_num_threads(), len(os.sched_getaffinity(0))) - 1
    assert others == [first + more, first] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_it_is_not_kept_without_end() -> None:
    """Of 384 MiB that are freed at once 64 are kept, as of the 64 before them."""
    ones(16384, 0.0)
    before = resident_bytes()
    made = [ones(16384, float(number)) for number in range(6)]
    assert all((each == number).all() for number, each in enumerate(made))
    assert resident_bytes() - before > 300 << 20
    del made
    gc.collect()
    assert resident_bytes() - before < 150 << 20


def test_threads_share_it() -> None:
    def work(value: int) -> bool:
        made = [ones(128 + 64 * (value % 3), float(value)) for _ in range(20)]
        return all(bool((each == value).all()) for each in made)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(1, 13)))
