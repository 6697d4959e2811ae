"""Happens-before by itself: which operators are ordered, and by what."""

from __future__ import annotations

import pytest

from tests.simulated.order import Event, Order, Stream

MEMORY = 4096


def launch(order: Order, stream: Stream, *, writes: bool) -> None:
    touched = ((), (MEMORY,)) if writes else ((MEMORY,), ())
    order.launch(stream.number, "write" if writes else "read", "here", *touched)


@pytest.fixture
def order() -> Order:
    return Order()


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("by", ["nothing", "event", "wait_stream", "host", "device", "both"])
def test_two_streams(order: Order, by: str, first: bool, second: bool) -> None:
    one, other = Stream(order), Stream(order)
    order.allocate(MEMORY, one.number)
    launch(order, one, writes=first)
    event = one.record_event()
    if by == "event":
        other.wait_event(event)
    elif by == "wait_stream":
        other.wait_stream(one)
    elif by == "host":
        event.synchronize()
    elif by == "device":
        order.synchronize()
    elif by == "both":
        third = Stream(order)
        third.wait_event(event)
        other.wait_stream(third)
    launch(order, other, writes=second)
    assert [each.kind for each in order.findings] == (["race"] if by == "nothing" else [])


def test_reads_need_no_order(order: Order) -> None:
    one, other = Stream(order), Stream(order)
    order.allocate(MEMORY, one.number)
    launch(order, one, writes=False)
    launch(order, other, writes=False)
    launch(order, one, writes=False)
    assert not order.findings


def test_an_event_covers_what_came_before_it_only(order: Order) -> None:
    one, other = Stream(order), Stream(order)
    order.allocate(MEMORY, one.number)
    event = Event(order)
    event.record(one)
    launch(order, one, writes=True)
    other.wait_event(event)
    launch(order, other, writes=False)
    assert [each.kind for each in order.findings] == ["race"]


@pytest.mark.parametrize("waits", [False, True])
def test_memory_goes_back_to_its_stream(order: Order, waits: bool) -> None:
    one, other = Stream(order), Stream(order)
    order.allocate(MEMORY, one.number)
    launch(order, one, writes=True)
    other.wait_stream(one)
    launch(order, other, writes=False)
    if waits:
        one.wait_stream(other)
    order.free(MEMORY)
    assert [each.kind for each in order.findings] == ([] if waits else ["freed while read"])
    order.allocate(MEMORY, one.number)  # and is new memory then
    launch(order, other, writes=True)
    assert len(order.findings) == (0 if waits else 1)
