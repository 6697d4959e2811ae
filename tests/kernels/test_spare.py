"""Memory of large outputs that is used again: never while somebody has it."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from aioengine.kernels.cpu import library
from aioengine.kernels.cpu.norm import rms_norm

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C++ kernels were not built")
WIDTH = 1024


def ones(rows: int, value: float) -> Tensor:
    """[rows, WIDTH] of `value`, by an operator of ours."""
    return rms_norm(torch.ones(rows, WIDTH), torch.full((WIDTH,), value), 0.0)


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
    rows = 4096
    ones(rows, 1.0)
    gc.collect()
    places = set()
    for number in range(4):
        made = ones(rows, float(number))
        places.add(made.data_ptr())
        del made
    assert len(places) == 1


def test_it_is_not_kept_without_end() -> None:
    """Several times what is kept at the most, freed at once and asked for again."""
    rows = 8192  # 32 MiB each
    made = [ones(rows, float(number)) for number in range(6)]
    assert all((each == number).all() for number, each in enumerate(made))
    del made
    assert (ones(rows, 7.0) == 7.0).all()


def test_threads_share_it() -> None:
    def work(value: int) -> bool:
        made = [ones(128 + 64 * (value % 3), float(value)) for _ in range(20)]
        return all(bool((each == value).all()) for each in made)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(1, 13)))
