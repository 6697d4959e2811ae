"""Token streams: a mailbox between the engine, which never waits, and a reader, who may.

A reader who falls behind gets merged deltas: nothing is lost and nobody is slowed. An error comes
after the tokens before it. A stream is a resource: closing it early ends the request, and entering
it waits until the request is admitted, so that what is wrong with it is raised there.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Self

from aioengine.errors import RequestAbortedError
from aioengine.streams.loop_bridge import check_running
from aioengine.types import Delta, RequestOutput

__all__ = ["StreamStatistics", "TokenSink", "TokenStream", "open_stream"]


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """`deltas_pushed` by the engine, `deltas_received` by the reader: the rest were merged."""

    deltas_pushed: int
    deltas_received: int
    is_closed: bool


class TokenSink:
    """The engine's end, and what the reader's has to read.

    No method of the engine's waits; after the end, further calls do nothing.
    """

    def __init__(
        self, close_request: Callable[[], object], loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self.close_request = close_request
        self.loop = loop
        self.pending: dict[int, list[Delta]] = {}  # by completion
        self.output: RequestOutput | None = None
        self.error: BaseException | None = None
        self.has_failed = False
        self.is_admitted = False
        self.is_closed = False
        self.num_pushed = 0
        self.num_received = 0
        self.readers: set[asyncio.Future[None]] = set()
        self.result_waiters: set[asyncio.Future[None]] = set()

    @property
    def has_ended(self) -> bool:
        """Return whether nothing more comes."""
        return self.is_closed or self.output is not None or self.has_failed

    def push(self, delta: Delta) -> None:
        """Hand over new text and tokens."""
        if not self.has_ended:
            self.pending.setdefault(delta.index, []).append(delta)
            self.num_pushed += 1
            _wake(self.readers)

    def admit(self) -> None:
        """The request is laid out and queued."""
        self.is_admitted = True
        _wake(self.readers, self.result_waiters)

    def finish(self, output: RequestOutput) -> None:
        """The request has ended well."""
        if not self.has_ended:
            self.output = output
            self.end()

    def fail(self, error: BaseException) -> None:
        """The request has ended with an error."""
        if not self.has_ended:
            self.error = error
            self.has_failed = True
            self.end()

    def end(self) -> None:
        """The stream has ended, and lets go of the engine: its reader may keep it for long."""
        self.close_request = lambda: None
        _wake(self.readers, self.result_waiters)

    def close(self) -> None:
        """Nobody reads any more: what has not ended is ended at once."""
        if not self.has_ended:
            self.is_closed = True
            self.close_request()
            self.end()
        self.pending.clear()

    def check_loop(self) -> None:
        """Raise WrongLoopError on any other loop than the stream's."""
        if self.loop is not None:
            check_running(self.loop, "a stream is read and closed on the event loop that opened it")


def _wake(*waiters: set[asyncio.Future[None]]) -> None:
    for waiter in chain(*waiters):
        if not waiter.done():
            waiter.set_result(None)


async def _wait(waiters: set[asyncio.Future[None]]) -> None:
    waiter = asyncio.get_running_loop().create_future()
    waiters.add(waiter)
    try:
        await waiter
    finally:
        waiters.discard(waiter)


class TokenStream:
    """The reader's end: `async for delta in stream`, then `await stream.result()`."""

    def __init__(self, request_id: str, sink: TokenSink) -> None:
        self.request_id = request_id
        self._sink = sink
        self._error: BaseException | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        delta = await self.receive()
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def admitted(self) -> None:
        """Wait until the request is laid out and queued.

        Raises what arguments, headers and layout show to be wrong.
        """
        box = self._sink
        box.check_loop()
        while not (box.is_admitted or box.has_ended):
            await _wait(box.result_waiters)
        failure = self._failure()
        if failure is not None and not box.is_admitted:
            raise failure

    async def receive(self) -> Delta | None:
        """The next delta, or None at the end. Raises the request's error, once all tokens are out.

        Several tokens that came since the last call are one delta.
        """
        box = self._sink
        box.check_loop()
        while not box.pending and not box.has_ended:
            await _wait(box.readers)
        return self.receive_nowait()

    def receive_nowait(self) -> Delta | None:
        """Return what is there now, or None. Raises the request's error, once all tokens are
        out."""
        box = self._sink
        if box.pending and not box.is_closed:
            box.num_received += 1
            return _merge(box.pending.pop(next(iter(box.pending))))
        if (failure := self._failure()) is not None:
            raise failure
        return None

    def _failure(self) -> BaseException | None:
        """The request's error. This end keeps it, as its traceback leads to the other end."""
        box = self._sink
        if box.error is not None:
            self._error, box.error = box.error, None
        return self._error

    async def result(self) -> RequestOutput:
        """Wait for the end and return the whole output; deltas need not have been read.

        Raises the request's error; RequestAbortedError if the stream was closed before the end.
        """
        box = self._sink
        box.check_loop()
        while not box.has_ended:
            await _wait(box.result_waiters)
        if box.output is not None:
            return box.output
        if (failure := self._failure()) is not None:
            try:
                raise failure
            finally:
                del self, box, failure  # else its traceback leads back to it
        raise RequestAbortedError(f"the stream of request {self.request_id!r} was closed")

    def close(self) -> None:
        """Stop reading; a request that has not ended is ended at once. Idempotent."""
        self._sink.check_loop()
        self._sink.close()

    async def aclose(self) -> None:
        """`close()`, for those who expect to await it."""
        self.close()
        await asyncio.sleep(0)

    def statistics(self) -> StreamStatistics:
        """A snapshot of the stream's counters."""
        box = self._sink
        return StreamStatistics(box.num_pushed, box.num_received, box.is_closed)

    async def __aenter__(self) -> Self:
        try:
            await self.admitted()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        box = self._sink
        state = "open" if not box.has_ended else "closed" if box.is_closed else "finished"
        state = "failed" if box.has_failed else state
        counts = f"{box.num_received} deltas read"
        return f"<{type(self).__name__} {self.request_id!r} is {state}: {counts}>"

    def __del__(self) -> None:
        box = self._sink
        if not box.has_ended:
            if box.loop is not None:
                with suppress(RuntimeError):  # the loop is closed
                    box.loop.call_soon_threadsafe(box.close)  # the collector runs in any thread
            warnings.warn(
                f"a TokenStream (request {self.request_id!r}) was dropped before its end, and its "
                f"request is ended; use 'async with' or close() it",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )


def open_stream(
    request_id: str,
    close_request: Callable[[], object],
    loop: asyncio.AbstractEventLoop | None = None,
) -> tuple[TokenSink, TokenStream]:
    """The two ends of a new stream. `close_request()` is called if the reader closes it early.

    With a `loop`, reading or closing it anywhere else raises WrongLoopError.
    """
    sink = TokenSink(close_request, loop)
    return sink, TokenStream(request_id, sink)


def _merge(deltas: list[Delta]) -> Delta:
    """Successive deltas of one completion as one."""
    if len(deltas) == 1:
        return deltas[0]
    logprobs = [delta.logprobs for delta in deltas]
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=None if None in logprobs else tuple(chain.from_iterable(filter(None, logprobs))),
        content="".join(delta.content for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=tuple(chain.from_iterable(delta.tool_calls for delta in deltas)),
        runs=tuple(chain.from_iterable(delta.runs for delta in deltas)),
    )
