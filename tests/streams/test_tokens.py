"""Token streams: nothing lost, nobody slowed, one end, and an error after the tokens before it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from aioengine.errors import MediaError, RequestAbortedError
from aioengine.streams.tokens import TokenSink, TokenStream, open_stream
from aioengine.types import CompletionOutput, Delta, FinishReason, RequestOutput, Timings, Usage


def delta(*token_ids: int, index: int = 0, **options: Any) -> Delta:
    return Delta(index, "".join(chr(97 + i) for i in token_ids), token_ids, **options)


def output() -> RequestOutput:
    return RequestOutput(
        "r", (1,), [CompletionOutput(0, "ab", (0, 1))], Usage(1, 2, 0, 0, 0), Timings()
    )


class Closings:
    """Counts how often the reader's leaving was told to the engine."""

    count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def closings() -> Closings:
    return Closings()


@pytest.fixture
def ends(closings: Closings) -> tuple[TokenSink, TokenStream]:
    return open_stream("r", closings)


async def test_deltas_come_as_they_are_pushed(ends: tuple[TokenSink, TokenStream]) -> None:
    sink, stream = ends

    async def read() -> list[tuple[int, ...]]:
        return [part.token_ids async for part in stream]

    reader = asyncio.create_task(read())
    for token_id in range(3):
        sink.push(delta(token_id))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    sink.finish(output())
    assert await reader == [(0,), (1,), (2,)]
    assert stream.statistics().deltas_pushed == stream.statistics().deltas_received == 3


async def test_a_late_reader_gets_one_merged_delta(ends: tuple[TokenSink, TokenStream]) -> None:
    sink, stream = ends
    sink.push(delta(0, logprobs=({0: -1.0},)))
    sink.push(delta(1, logprobs=({1: -1.5},)))
    sink.push(delta(2, 3, logprobs=({2: -2.0}, {3: -3.0}), finish_reason=FinishReason.LENGTH))
    sink.finish(output())
    merged = await stream.receive()
    assert merged is not None
    assert (merged.text, merged.token_ids) == ("abcd", (0, 1, 2, 3))
    assert merged.logprobs == ({0: -1.0}, {1: -1.5}, {2: -2.0}, {3: -3.0})
    assert merged.finish_reason is FinishReason.LENGTH
    assert await stream.receive() is None
    assert stream.statistics().deltas_pushed == 3
    assert stream.statistics().deltas_received == 1


async def test_completions_are_not_merged_with_each_other(
    ends: tuple[TokenSink, TokenStream],
) -> None:
    sink, stream = ends
    for token_id in range(3):
        for index in (1, 0):
            sink.push(delta(token_id, index=index))
    sink.finish(output())
    assert [(part.index, part.token_ids) async for part in stream] == [
        (1, (0, 1, 2)),
        (0, (0, 1, 2)),
    ]


async def test_an_error_comes_after_the_tokens_before_it(
    ends: tuple[TokenSink, TokenStream], closings: Closings
) -> None:
    sink, stream = ends
    sink.push(delta(0))
    sink.fail(MediaError("broken", parameter="images[0]"))
    sink.push(delta(1))
    sink.finish(output())
    first = await stream.receive()
    assert first is not None and first.token_ids == (0,)
    for call in (stream.receive, stream.result, stream.receive):
        with pytest.raises(MediaError, match="broken"):
            await call()
    with pytest.raises(MediaError):
        stream.receive_nowait()
    stream.close()
    assert closings.count == 0


async def test_the_result_needs_no_reading(ends: tuple[TokenSink, TokenStream]) -> None:
    sink, stream = ends
    waiting = [asyncio.create_task(stream.result()) for _ in range(2)]
    await asyncio.sleep(0)
    sink.push(delta(0))
    sink.push(delta(1))
    expected = output()
    sink.finish(expected)
    assert [await task for task in waiting] == [expected, expected]
    assert await stream.result() is expected
    rest = await stream.receive()
    assert rest is not None and rest.token_ids == (0, 1)


async def test_receive_nowait_never_waits(ends: tuple[TokenSink, TokenStream]) -> None:
    sink, stream = ends
    assert stream.receive_nowait() is None
    sink.push(delta(0))
    part = stream.receive_nowait()
    assert part is not None and part.token_ids == (0,)
    assert stream.receive_nowait() is None
    sink.finish(output())
    assert stream.receive_nowait() is None


async def test_closing_early_ends_the_request_once(
    ends: tuple[TokenSink, TokenStream], closings: Closings
) -> None:
    sink, stream = ends
    sink.admit()
    sink.push(delta(0))
    async with stream:
        stream.close()
        stream.close()
        await stream.aclose()
    assert closings.count == 1
    assert stream.statistics().is_closed
    assert await stream.receive() is None
    assert [part async for part in stream] == []
    with pytest.raises(RequestAbortedError):
        await stream.result()
    sink.push(delta(1))
    sink.finish(output())
    sink.fail(RuntimeError())
    assert await stream.receive() is None


async def test_closing_after_the_end_closes_nothing(
    ends: tuple[TokenSink, TokenStream], closings: Closings
) -> None:
    sink, stream = ends
    sink.push(delta(0))
    sink.finish(output())
    stream.close()
    assert closings.count == 0
    assert await stream.receive() is None
    assert (await stream.result()).token_ids == (0, 1)


async def test_closing_wakes_those_who_wait(ends: tuple[TokenSink, TokenStream]) -> None:
    _, stream = ends
    reader = asyncio.create_task(stream.receive())
    waiter = asyncio.create_task(stream.result())
    await asyncio.sleep(0)
    stream.close()
    assert await reader is None
    with pytest.raises(RequestAbortedError):
        await waiter


async def test_two_readers_share_the_deltas(ends: tuple[TokenSink, TokenStream]) -> None:
    sink, stream = ends
    received: list[int] = []

    async def read() -> None:
        async for part in stream:
            received.extend(part.token_ids)

    readers = [asyncio.create_task(read()) for _ in range(2)]
    for token_id in range(10):
        sink.push(delta(token_id))
        if token_id % 3:
            await asyncio.sleep(0)
    sink.finish(output())
    await asyncio.gather(*readers)
    assert sorted(received) == list(range(10))


async def test_a_cancelled_reader_loses_nothing(ends: tuple[TokenSink, TokenStream]) -> None:
    sink, stream = ends
    reader = asyncio.create_task(stream.receive())
    await asyncio.sleep(0)
    sink.push(delta(0))  # the reader is woken, and cancelled before it runs
    reader.cancel()
    await asyncio.wait([reader])
    sink.push(delta(1))
    sink.finish(output())
    assert [part.token_ids async for part in stream] == [(0, 1)]


@pytest.mark.parametrize(
    ("end", "warns"),
    [
        (lambda sink, stream: None, True),
        (lambda sink, stream: sink.finish(output()), False),
        (lambda sink, stream: sink.fail(RuntimeError()), False),
        (lambda sink, stream: stream.close(), False),
    ],
)
def test_a_stream_dropped_before_its_end_warns(
    end: Callable[[TokenSink, TokenStream], None],
    warns: bool,
    recwarn: pytest.WarningsRecorder,
) -> None:
    sink, stream = open_stream("dropped", lambda: None)
    end(sink, stream)
    del stream
    gc.collect()
    messages = [str(w.message) for w in recwarn if w.category is ResourceWarning]
    assert len(messages) == warns
    assert not warns or "dropped" in messages[0]


async def test_entering_waits_for_admission(ends: tuple[TokenSink, TokenStream]) -> None:
    sink, stream = ends
    entering = asyncio.ensure_future(stream.__aenter__())
    await asyncio.sleep(0)
    assert not entering.done()
    sink.admit()
    assert await entering is stream
    sink.finish(output())


async def test_entering_raises_what_kept_the_request_out(
    ends: tuple[TokenSink, TokenStream], closings: Closings
) -> None:
    sink, stream = ends
    sink.fail(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        async with stream:
            raise AssertionError("entered")
    assert closings.count == 0


async def test_an_error_after_admission_is_for_the_reader(
    ends: tuple[TokenSink, TokenStream],
) -> None:
    sink, stream = ends
    sink.admit()
    sink.push(delta(0))
    sink.fail(ValueError("later"))
    async with stream:
        assert (await stream.receive()) is not None
        with pytest.raises(ValueError, match="later"):
            await stream.receive()


async def test_a_reader_who_gives_up_entering_ends_the_request(
    ends: tuple[TokenSink, TokenStream], closings: Closings
) -> None:
    _, stream = ends
    entering = asyncio.ensure_future(stream.__aenter__())
    await asyncio.sleep(0)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert closings.count == 1


@pytest.mark.parametrize("how", ["finish", "fail", "close"])
async def test_an_ended_stream_that_is_kept_keeps_nothing_of_the_engine(how: str) -> None:
    engine = Closings()
    gone = weakref.ref(engine)
    sink, stream = open_stream("r", engine)
    del engine
    if how == "close":
        stream.close()
    else:
        sink.fail(MediaError("broken")) if how == "fail" else sink.finish(output())
    assert gone() is None
    stream.close()
    assert stream.statistics().is_closed == (how == "close")
