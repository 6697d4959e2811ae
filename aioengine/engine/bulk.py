"""Any number of prompts through one engine, with a bounded number of them in memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sized,
)
from contextlib import aclosing
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from aioengine.config import EngineConfig
from aioengine.engine.prompts import PromptLike
from aioengine.errors import (
    AioEngineError,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
)
from aioengine.sampling_params import SamplingParams
from aioengine.types import Prompt, RequestOutput

__all__ = [
    "Outcome",
    "Pair",
    "ParamsLike",
    "Run",
    "Window",
    "answer",
    "check_many",
    "map_bounded",
    "map_prompts",
    "new_window",
    "outcome_of",
    "paired",
    "progress_bar",
    "until_failure",
]

AHEAD = 2
"""Requests that are live for each that a step takes: while these compute, the others' media are
read."""
HELD = 8
"""Outputs that are kept for their turn, for each request that may be live."""
ROOM_LOOK_S = 0.02

Item = TypeVar("Item")
Result = TypeVar("Result")
Pair = tuple[PromptLike, SamplingParams | None]
Outcome = RequestOutput | AioEngineError
"""What became of one prompt."""
Generate = Callable[[PromptLike, SamplingParams | None], Awaitable[RequestOutput]]
ParamsLike = SamplingParams | Iterable[SamplingParams] | None
"""Sampling parameters for all prompts, or as many as there are prompts."""


class Window(Generic[Result]):
    """Decides when the next prompt is drawn, and which results are handed out.

    At most `max_live` of those that were drawn have not finished, and at most `HELD` times as many
    have not been handed out. Raises InvalidRequestError for a `max_live` that is no number above 0.
    """

    def __init__(self, max_live: int, *, is_ordered: bool) -> None:
        if not isinstance(max_live, int) or max_live < 1:
            message = f"max_in_flight must be a positive integer, not {max_live!r:.40}"
            raise InvalidRequestError(message, parameter="max_in_flight")
        self._max_live = max_live
        self.is_ordered = is_ordered
        self._num_drawn = self._num_taken = 0
        self._finished: dict[int, Result] = {}

    @property
    def num_held(self) -> int:
        """Return how many were drawn and not handed out."""
        return self._num_drawn - self._num_taken

    @property
    def num_live(self) -> int:
        """Return how many were drawn and have not finished."""
        return self.num_held - len(self._finished)

    @property
    def has_room(self) -> bool:
        """Return whether the next may be drawn."""
        return self.num_live < self._max_live and self.num_held < self._max_live * HELD

    def draw(self) -> int:
        """Count one more, and return its index."""
        self._num_drawn += 1
        return self._num_drawn - 1

    def finish(self, index: int, result: Result) -> None:
        """Keep the result of one that was drawn, until it is taken."""
        self._finished[index] = result

    def take(self) -> Iterator[tuple[int, Result]]:
        """Hand out what may go now."""
        while self._finished:
            index = self._num_taken if self.is_ordered else next(iter(self._finished))
            if index not in self._finished:
                return
            self._num_taken += 1
            yield index, self._finished.pop(index)


def check_many(prompts: Any, params: Any) -> None:
    """Raise InvalidRequestError for what are not many prompts, or not their parameters."""
    is_one = isinstance(prompts, str | bytes | Mapping | Prompt)
    if is_one or not isinstance(prompts, Iterable | AsyncIterable):
        kind = type(prompts).__name__
        message = f"prompts must be an iterable of prompts, not {kind}; generate() takes one"
        raise InvalidRequestError(message, parameter="prompts", value=kind)
    if not isinstance(params, SamplingParams | Iterable | None):
        kind = type(params).__name__
        message = f"params must be SamplingParams, or one for each prompt, not {kind}"
        raise InvalidRequestError(message, parameter="params", value=kind)


def new_window(
    config: EngineConfig,
    params: ParamsLike,
    max_in_flight: int | None,
    *,
    is_ordered: bool,
) -> Window[Any]:
    """A window as wide as is asked for, or as keeps every step of the engine full."""
    if max_in_flight is None:
        num_completions = params.n if isinstance(params, SamplingParams) else 1
        max_in_flight = AHEAD * config.max_num_seqs
        if config.max_queued_requests is not None:
            most = config.max_num_seqs + config.max_queued_requests
            max_in_flight = min(max_in_flight, most)
        max_in_flight = max(1, max_in_flight // num_completions)
    return Window(max_in_flight, is_ordered=is_ordered)


def paired(prompts: Iterable[PromptLike], params: ParamsLike) -> Iterator[Pair]:
    """Each prompt with its parameters. Raises InvalidRequestError where these run out first."""
    if isinstance(params, SamplingParams | None):
        for prompt in prompts:
            yield prompt, params
        return
    each = iter(params)
    for index, prompt in enumerate(prompts):
        try:
            yield prompt, next(each)
        except StopIteration:
            message = f"params has {index} entries, fewer than there are prompts"
            raise InvalidRequestError(message, parameter="params", value=index) from None


def until_failure(pairs: Iterator[Pair], failures: list[Exception]) -> Iterator[Pair]:
    """Yield pairs up to an error of their source, which is kept for later."""
    try:
        yield from pairs
    except Exception as error:
        failures.append(error)


def progress_bar(prompts: Iterable[PromptLike]) -> Any:
    """A progress bar, over a known number of prompts or an unknown one."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread of its own

    total = len(prompts) if isinstance(prompts, Sized) else None
    return Bar(total=total, unit="prompt", dynamic_ncols=True)


async def answer(
    generate: Generate, prompt: PromptLike, params: SamplingParams | None
) -> RequestOutput:
    """The output for one prompt, once the engine has room for it beside others' requests."""
    while True:
        try:
            return await generate(prompt, params)
        except OverloadedError:
            await asyncio.sleep(ROOM_LOOK_S)


def outcome_of(result: RequestOutput | BaseException, *, return_exceptions: bool) -> Outcome:
    """An output, or the error of a single request in its place; raises any other error."""
    if not isinstance(result, BaseException):
        return result
    is_own = isinstance(result, AioEngineError) and not isinstance(result, EngineError)
    if return_exceptions and is_own:
        assert isinstance(result, AioEngineError)
        return result
    try:
        raise result
    finally:
        del result  # else its traceback leads back to it


class Run:
    """Requests of one call of `Engine.map`, on the engine's loop, and what has become of them."""

    def __init__(self, generate: Generate) -> None:
        self.finished: SimpleQueue[tuple[int, RequestOutput | BaseException]] = SimpleQueue()
        self._generate = generate
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, index: int, pair: Pair) -> None:
        """Begin a request."""
        task = asyncio.create_task(self._answer(index, *pair))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, index: int, prompt: PromptLike, params: SamplingParams | None) -> None:
        try:
            self.finished.put((index, await answer(self._generate, prompt, params)))
        except Exception as error:
            self.finished.put((index, error))
        except asyncio.CancelledError:
            self.finished.put((index, EngineClosedError("the engine is closed; make a new one")))
            raise

    async def end(self) -> None:
        """End those that are live."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


async def map_bounded(
    work: Callable[[Item], Coroutine[Any, Any, Result]],
    items: Iterable[Item] | AsyncIterable[Item],
    window: Window[asyncio.Task[Result]],
) -> AsyncGenerator[tuple[int, asyncio.Task[Result]], None]:
    """Index and ended task of each item's work, drawn and handed out as the window says."""
    news, room = asyncio.Event(), asyncio.Event()
    live: set[asyncio.Task[Any]] = set()

    def note(index: int, task: asyncio.Task[Result]) -> None:
        live.discard(task)
        window.finish(index, task)
        news.set()
        room.set()

    async def feed() -> None:
        async for item in _drawn(items):
            task = asyncio.create_task(work(item))
            live.add(task)
            task.add_done_callback(partial(note, window.draw()))
            del item, task
            await asyncio.sleep(0)
            while not window.has_room:
                room.clear()
                await room.wait()

    feeding = asyncio.create_task(feed())
    feeding.add_done_callback(lambda _: news.set())
    try:
        while window.num_held or not feeding.done():
            await news.wait()
            news.clear()
            for index, task in window.take():
                room.set()
                yield index, task
        feeding.result()  # an error of the items' source, in its place behind the results
    finally:
        live.add(feeding)
        for task in live:
            task.cancel()
        await asyncio.wait(live)


async def map_prompts(
    generate: Generate,
    prompts: Iterable[PromptLike] | AsyncIterable[PromptLike],
    params: ParamsLike,
    window: Window[asyncio.Task[RequestOutput]],
    *,
    return_exceptions: bool,
) -> AsyncIterator[Any]:
    """Outcomes of prompts that are drawn as the window has room; see `AsyncEngine.map`."""
    pairs = paired(prompts, params) if isinstance(prompts, Iterable) else _paired(prompts, params)
    results = map_bounded(lambda pair: answer(generate, *pair), pairs, window)
    async with aclosing(results):
        async for index, task in results:
            try:
                outcome = outcome_of(
                    task.exception() or task.result(), return_exceptions=return_exceptions
                )
            finally:
                del task  # which holds the error
            yield outcome if window.is_ordered else (index, outcome)


async def _drawn(items: Iterable[Item] | AsyncIterable[Item]) -> AsyncIterator[Item]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


async def _paired(prompts: AsyncIterable[PromptLike], params: ParamsLike) -> AsyncIterator[Pair]:
    latest: deque[PromptLike] = deque()

    def drawn() -> Iterator[PromptLike]:
        while True:
            yield latest.popleft()

    pairs = paired(drawn(), params)
    async for prompt in prompts:
        latest.append(prompt)
        yield next(pairs)
