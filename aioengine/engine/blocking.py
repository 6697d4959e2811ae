"""The engine for code that does not await: scripts, notebooks and threads.

The engine runs on an event loop of its own, in a thread of its own.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import Any, Literal, Self, overload

from aioengine.config import EngineConfig
from aioengine.engine.async_engine import AsyncEngine
from aioengine.engine.bulk import (
    Outcome,
    ParamsLike,
    Run,
    Window,
    check_many,
    new_window,
    outcome_of,
    paired,
    progress_bar,
    until_failure,
)
from aioengine.engine.embedding_calls import BlockingEmbeddingCalls
from aioengine.engine.prompts import PromptLike
from aioengine.engine.request_calls import OPTIONS
from aioengine.errors import (
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    with_known_names,
)
from aioengine.sampling_params import SamplingParams
from aioengine.streams.loop_thread import LoopThread, seconds_to_wait
from aioengine.streams.tokens import StreamStatistics, TokenStream
from aioengine.types import Delta, EngineState, EngineStatistics, LoadProgress, RequestOutput

__all__ = ["BlockingStream", "Engine"]

CLOSED = "the engine is closed; make a new one"


class Engine(BlockingEmbeddingCalls):
    """Generates from text and media with one model, for callers that wait.

    Use as `with Engine.from_pretrained(...) as engine`, or without `with`: the first call loads the
    model, and `close()`, the end of the process or of the last reference ends the engine. Calls may
    come from any number of threads at once, and share the engine's batches. Ctrl-C in a call ends
    its request.
    """

    def __init__(
        self, model: str | os.PathLike[str], config: EngineConfig | None = None, **options: Any
    ) -> None:
        """See `AsyncEngine.from_pretrained`."""
        self._engine = AsyncEngine(model, config, **options)
        self._starting = threading.RLock()  # held by who loads the model
        self._lock = threading.RLock()  # held for moments, so that no call meets a loop that ends
        self._thread: LoopThread | None = None
        self._final: EngineStatistics | None = None

    @classmethod
    def from_pretrained(
        cls, model: str | os.PathLike[str], *, config: EngineConfig | None = None, **options: Any
    ) -> Self:
        """An engine for a local folder or hub id; see `AsyncEngine.from_pretrained`."""
        return cls(model, config, **options)

    # ---- life

    def start(self, *, progress: Callable[[LoadProgress], object] | None = None) -> None:
        """Load the model and begin to serve. Raises ModelLoadError.

        `progress` is called from the engine's thread as the load goes on.
        """
        self._check_process()
        with self._starting:
            with self._lock:
                if self._engine.state is EngineState.NEW and self._thread is None:
                    self._thread = LoopThread()
                    self._finalizer = weakref.finalize(self, self._thread.end, self._engine.aclose)
            try:
                self._call(partial(self._engine.start, progress=progress))
            except BaseException as error:
                if self._engine.state is not EngineState.RUNNING:
                    # After an interrupt the load still runs, up to where it can be dropped.
                    self._leave(wait=isinstance(error, Exception))
                raise

    def close(self, timeout: float | None = 0) -> None:
        """Wait for live requests for `timeout` seconds (None: as long as it takes); free all.

        Requests that are still live raise RequestAbortedError where they are waited for.
        Idempotent.
        """
        timeout = seconds_to_wait(timeout)
        with suppress(EngineClosedError):
            self._call(self._engine.aclose, timeout)
            self._final = self._call(self._engine.statistics)
        with self._lock:
            if self._thread is None:
                self._engine._close_unstarted()
        self._leave(wait=True)

    def _leave(self, *, wait: bool) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                thread.stop()
        if thread is not None and wait:
            thread.join()
            self._finalizer.detach()

    def __enter__(self) -> Self:
        self._serving()
        with self._open_thread():
            return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._engine).replace(AsyncEngine.__name__, type(self).__name__, 1)

    @property
    def state(self) -> EngineState:
        """Return whether the engine is new, starting, running, draining, closed or dead."""
        return self._engine.state

    @property
    def config(self) -> EngineConfig:
        """The engine's settings."""
        return self._engine.config

    @property
    def model_name(self) -> str:
        """A hub id as it is; of a local folder its own name."""
        return self._engine.model_name

    @cached_property
    def tokenizer(self) -> Any:
        """A copy of the model's tokenizer, of the caller's own."""
        engine = self._serving()
        return self._call(lambda: copy.deepcopy(engine.tokenizer))

    # ---- requests

    @with_known_names("generate() has no argument {}", OPTIONS)
    def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        images: Any = (),
        videos: Any = (),
        audios: Any = (),
        tools: Sequence[Any] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> RequestOutput:
        """The whole output for one prompt; see `AsyncEngine.generate`.

        After `timeout` seconds the request is ended and TimeoutError raised.
        """
        options: dict[str, Any] = {"request_id": request_id, "priority": priority}
        options |= {"images": images, "videos": videos, "audios": audios, "tools": tools}
        options |= {"tool_choice": tool_choice, "chat_template_kwargs": chat_template_kwargs}
        ask = partial(self._serving().generate, prompt, params, **options)
        output: RequestOutput = self._call(ask, limit=timeout)
        return output

    @with_known_names("stream() has no argument {}", OPTIONS)
    def stream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        images: Any = (),
        videos: Any = (),
        audios: Any = (),
        tools: Sequence[Any] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> BlockingStream:
        """The same as an iterator of deltas, once the request is laid out and queued."""
        options: dict[str, Any] = {"request_id": request_id, "priority": priority}
        options |= {"images": images, "videos": videos, "audios": audios, "tools": tools}
        options |= {"tool_choice": tool_choice, "chat_template_kwargs": chat_template_kwargs}
        engine = self._serving()

        async def begin() -> TokenStream:
            return await engine.stream(prompt, params, **options).__aenter__()

        return BlockingStream(self, self._call(begin))

    @overload
    def map(
        self,
        prompts: Iterable[PromptLike],
        params: ParamsLike = None,
        *,
        ordered: Literal[True] = True,
        return_exceptions: Literal[False] = False,
        max_in_flight: int | None = None,
        progress: bool = False,
    ) -> Iterator[RequestOutput]: ...

    @overload
    def map(
        self,
        prompts: Iterable[PromptLike],
        params: ParamsLike = None,
        *,
        ordered: Literal[True] = True,
        return_exceptions: bool,
        max_in_flight: int | None = None,
        progress: bool = False,
    ) -> Iterator[Outcome]: ...

    @overload
    def map(
        self,
        prompts: Iterable[PromptLike],
        params: ParamsLike = None,
        *,
        ordered: Literal[False],
        return_exceptions: bool = False,
        max_in_flight: int | None = None,
        progress: bool = False,
    ) -> Iterator[tuple[int, Outcome]]: ...

    @with_known_names("map() has no argument {}", OPTIONS)
    def map(
        self,
        prompts: Iterable[PromptLike],
        params: ParamsLike = None,
        *,
        ordered: bool = True,
        return_exceptions: bool = False,
        max_in_flight: int | None = None,
        progress: bool = False,
    ) -> Iterator[Any]:
        """Outputs for any number of prompts, drawn as there is room, on the caller's thread.

        `params`: for all, or one for each prompt. In the prompts' order, or with `ordered=False` as
        `(index, output)` as they are completed. The first error ends it, unless
        `return_exceptions` puts those of single requests in their outputs' places. At most
        `max_in_flight` are live at once (None: twice `max_num_seqs`), and a bounded number of
        outputs waits for its turn. `progress` shows a bar (tqdm). To stop early, close the iterator
        or drop it.
        """
        if isinstance(prompts, AsyncIterable):
            message = "prompts must be an iterable; AsyncEngine.map takes asynchronous ones"
            raise InvalidRequestError(message, parameter="prompts", value=type(prompts).__name__)
        check_many(prompts, params)
        window: Window[RequestOutput | BaseException] = new_window(
            self.config, params, max_in_flight, is_ordered=ordered
        )
        outcomes = self._map(prompts, params, window, return_exceptions, progress)
        return (output for _, output in outcomes) if ordered else outcomes

    def _map(
        self,
        prompts: Iterable[PromptLike],
        params: ParamsLike,
        window: Window[RequestOutput | BaseException],
        return_exceptions: bool,
        progress: bool,
    ) -> Iterator[tuple[int, Outcome]]:
        run = Run(self._serving().generate)
        bar = progress_bar(prompts) if progress else None
        failures: list[Exception] = []
        pairs = until_failure(paired(prompts, params), failures)
        result: Any = None
        try:
            while True:
                while window.has_room and run.finished.empty():
                    if (pair := next(pairs, None)) is None:
                        break
                    self._post(run.begin, window.draw(), pair)
                if not window.num_held:
                    break
                for _ in range(max(1, run.finished.qsize())):
                    window.finish(*run.finished.get())
                    if bar is not None:
                        bar.update()
                for index, result in window.take():
                    yield index, outcome_of(result, return_exceptions=return_exceptions)
            if failures:
                raise failures.pop()  # in its place behind the outputs
        finally:
            del result  # an error's traceback holds this frame
            if bar is not None:
                bar.close()
            with suppress(EngineError):  # also where garbage is collected on the loop's thread
                self._call(run.end)

    def abort(self, request_id: str) -> None:
        """End a live request with RequestAbortedError; an unknown or ended one is left alone."""
        self._call(self._serving().abort, request_id)

    def reset_caches(self) -> None:
        """Forget all prefixes, encoder outputs and processed media that no live request holds."""
        self._call(self._serving().reset_caches)

    def statistics(self) -> EngineStatistics:
        """A snapshot of all counters. Raises EngineClosedError before the first start."""
        if self._final is not None:
            return self._final
        if self._engine.state is EngineState.NEW:
            raise EngineClosedError("the engine has not been started")
        snapshot: EngineStatistics = self._call(self._engine.statistics)
        return snapshot

    # ---- the way into the loop

    def _serving(self) -> AsyncEngine:
        """The engine, started where it is new; calls wait while another thread starts it."""
        self._check_process()
        thread = self._thread
        if thread is None or not thread.is_current():
            with self._starting:
                if self._engine.state is EngineState.NEW:
                    self.start()
        return self._engine

    def _check_process(self) -> None:
        """Raise EngineError in a process that was forked from the one which has started it."""
        if (thread := self._thread) is not None:
            thread.check_process()

    @contextmanager
    def _open_thread(self) -> Iterator[LoopThread]:
        """The loop's thread, which does not end meanwhile."""
        thread = self._thread
        if thread is not None:
            thread.check_caller()
        with self._lock:
            if self._thread is None:
                raise EngineClosedError(CLOSED)
            yield self._thread

    def _submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Have `function(*args)` run on the engine's loop, and awaited if need be."""
        with self._open_thread() as thread:
            try:
                return thread.submit(function, *args)
            except RuntimeError as error:  # the loop has ended, as the process does
                raise EngineClosedError(CLOSED) from error

    def _post(self, function: Callable[..., object], *args: Any) -> None:
        """Have `function(*args)` run on the engine's loop, without an answer."""
        with self._open_thread() as thread:
            if not thread.call_soon(function, *args):
                raise EngineClosedError(CLOSED)

    def _call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Have `function(*args)` run on the engine's loop, if it still does; never waits."""
        thread = self._thread
        if thread is not None:
            thread.call_soon(function, *args)

    def _call(self, function: Callable[..., Any], *args: Any, limit: float | None = None) -> Any:
        """Return or raise what `function(*args)` on the loop does, awaited if need be."""
        limit = seconds_to_wait(limit)
        future = self._submit(function, *args)
        try:
            return future.result(limit)
        except TimeoutError as error:
            if future.done():  # of the call's own
                raise
            raise TimeoutError(f"no result within {limit} seconds (timeout=)") from error
        except CancelledError:
            raise EngineClosedError("the engine was closed") from None
        finally:
            future.cancel()  # of use after a timeout or an interrupt only
            del future  # whose error has a traceback with this frame


class BlockingStream:
    """Iterator over the deltas of one request; `result()` is its whole output.

    Use it with `with`, or drop it: closing it early ends the request.
    """

    def __init__(self, engine: Engine, stream: TokenStream) -> None:
        self._engine = engine
        self._stream = stream
        weakref.finalize(self, engine._call_soon, stream.close).atexit = False

    @property
    def request_id(self) -> str:
        """The request's name."""
        return self._stream.request_id

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        delta: Delta | None = self._engine._call(self._stream.receive)
        if delta is None:
            raise StopIteration
        return delta

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end and return the whole output; deltas need not have been read.

        Raises the request's error, and TimeoutError after `timeout` seconds, which leaves the
        request alone.
        """
        output: RequestOutput = self._engine._call(self._stream.result, limit=timeout)
        return output

    def close(self) -> None:
        """Stop reading; a request that has not ended is ended. Idempotent."""
        with suppress(EngineClosedError):
            self._engine._call(self._stream.close)

    def statistics(self) -> StreamStatistics:
        """A snapshot of the stream's counters."""
        return self._stream.statistics()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._stream).replace(TokenStream.__name__, type(self).__name__, 1)
