"""The door from threads into a loop: in order, one wake-up a batch, and never a lost call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop

from aioengine.streams.loop_bridge import LoopBridge


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    loop = request.param()
    yield loop
    loop.close()


def drain(loop: asyncio.AbstractEventLoop) -> None:
    """Run what is ready."""
    loop.call_soon(loop.stop)
    loop.run_forever()


def in_thread(function: Any, *args: Any) -> None:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


def test_calls_run_in_order_on_the_loops_thread(loop: asyncio.AbstractEventLoop) -> None:
    bridge = LoopBridge(loop)
    ran: list[tuple[int, int]] = []

    def note(number: int) -> None:
        ran.append((number, threading.get_ident()))

    in_thread(lambda: [bridge.call(note, n) for n in range(100)])
    assert not ran
    drain(loop)
    assert ran == [(n, threading.get_ident()) for n in range(100)]


def test_a_batch_wakes_the_loop_once() -> None:
    loop = asyncio.new_event_loop()
    wakes = []
    wake = loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda *args: (wakes.append(1), wake(*args))[1]  # type: ignore
    bridge = LoopBridge(loop)
    ran: list[int] = []
    for _ in range(3):
        in_thread(lambda: [bridge.call(ran.append, n) for n in range(10)])
        drain(loop)
    assert len(wakes) == 3
    assert len(ran) == 30
    loop.close()


def test_calls_from_many_threads_keep_each_threads_order(loop: asyncio.AbstractEventLoop) -> None:
    bridge = LoopBridge(loop)
    ran: list[tuple[int, int]] = []
    num_threads, num_calls = 8, 500
    done = threading.Barrier(num_threads, lambda: bridge.call(loop.stop))

    def call(thread: int) -> None:
        for number in range(num_calls):
            assert bridge.call(ran.append, (thread, number))
        done.wait(30)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(num_threads)]
    for thread in threads:
        thread.start()
    loop.run_forever()  # meanwhile
    for thread in threads:
        thread.join()
    drain(loop)
    assert len(ran) == num_threads * num_calls
    for thread_number in range(num_threads):
        assert [n for t, n in ran if t == thread_number] == list(range(num_calls))


def test_what_is_accepted_runs_and_what_comes_after_closing_is_refused(
    loop: asyncio.AbstractEventLoop,
) -> None:
    bridge = LoopBridge(loop)
    ran: list[int] = []
    assert bridge.call(ran.append, 1)
    bridge.close()
    bridge.close()
    assert not bridge.call(ran.append, 2)
    drain(loop)
    assert ran == [1]


def test_a_closed_loop_refuses(loop: asyncio.AbstractEventLoop) -> None:
    bridge = LoopBridge(loop)
    loop.close()
    assert not bridge.call(print)
    assert not bridge.call(print)


def test_a_call_made_by_a_call_runs_too(loop: asyncio.AbstractEventLoop) -> None:
    bridge = LoopBridge(loop)
    ran: list[int] = []
    bridge.call(lambda: bridge.call(ran.append, 1))
    drain(loop)
    drain(loop)
    assert ran == [1]


def test_an_exception_goes_to_the_loops_handler(loop: asyncio.AbstractEventLoop) -> None:
    bridge = LoopBridge(loop)
    contexts: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: contexts.append(context))
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("broken")

    for function, args in ((ran.append, (1,)), (fail, ()), (ran.append, (2,))):
        bridge.call(function, *args)
    drain(loop)
    assert ran == [1, 2]
    assert [str(context["exception"]) for context in contexts] == ["broken"]


def test_an_interrupt_loses_no_call(loop: asyncio.AbstractEventLoop) -> None:
    bridge = LoopBridge(loop)
    ran: list[int] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    for function, args in ((ran.append, (1,)), (interrupt, ()), (ran.append, (2,))):
        bridge.call(function, *args)
    with pytest.raises(KeyboardInterrupt):
        drain(loop)
    bridge.call(ran.append, 3)
    drain(loop)
    drain(loop)
    assert ran == [1, 2, 3]
