"""Orders in which queues are run: legal, random by seed, and no more than a wait asks for."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from tests.simulated.queues import DeviceFailedError, Queues

SEEDS = range(40)


def queues(seed: int) -> Queues:
    return Queues(seed, threading.RLock())


def order_of(seed: int, *, waits: bool) -> str:
    """ "a" and "b" twice, in two streams; the second stream may wait for the first one's first."""
    made, done = queues(seed), list[str]()
    made.put(1, lambda: done.append("a"))
    point = made.point(1)
    made.put(1, lambda: done.append("A"))
    if waits:
        made.put(2, point)
    made.put(2, lambda: done.append("b"))
    made.put(2, lambda: done.append("B"))
    made.run_all()
    return "".join(done)


def test_all_orders_of_two_streams_come() -> None:
    found = {order_of(seed, waits=False) for seed in SEEDS}
    assert found == {"aAbB", "abAB", "abBA", "baAB", "baBA", "bBaA"}


def test_a_stream_waits_for_a_point() -> None:
    found = {order_of(seed, waits=True) for seed in SEEDS}
    assert found == {"aAbB", "abAB", "abBA"}


def test_a_seed_gives_one_order() -> None:
    assert all(order_of(seed, waits=False) == order_of(seed, waits=False) for seed in SEEDS)


def test_a_wait_runs_what_it_needs() -> None:
    num_done = set()
    for seed in SEEDS:
        made, done = queues(seed), list[int]()
        for stream in (1, 2, 3):
            made.put(stream, partial(done.append, stream))
        made.put(2, made.point(1))
        point = made.point(2)
        made.put(2, partial(done.append, 4))
        made.run_until(point)
        assert made.has_passed(point) and {1, 2} <= set(done)
        num_done.add(len(done))
    assert num_done == {2, 3}


def test_a_failure_is_kept() -> None:
    made, done = queues(0), list[int]()

    def fails() -> None:
        raise IndexError("no")

    made.put(1, fails)
    made.put(1, lambda: done.append(1))
    for _ in range(2):
        with pytest.raises(DeviceFailedError, match="IndexError: no"):
            made.run_all()
    assert not done
