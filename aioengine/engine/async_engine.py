"""The public face of an engine: its life, and the calls that begin and end requests."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
import warnings
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from aioengine.config import EngineConfig
from aioengine.engine.bulk import (
    Outcome,
    ParamsLike,
    Window,
    check_many,
    map_prompts,
    new_window,
)
from aioengine.engine.devices import load_model, open_device
from aioengine.engine.lifecycle import EngineLifecycle
from aioengine.engine.prompts import CHAT, PromptLike, check_arguments, read_prompt
from aioengine.errors import (
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    RequestAbortedError,
    with_known_names,
)
from aioengine.instruments import Instruments, heard_on
from aioengine.models.runtime.load_progress import Reporter
from aioengine.sampling_params import SamplingParams
from aioengine.streams.tokens import TokenStream
from aioengine.types import (
    OUTCOMES,
    EngineState,
    EngineStatistics,
    LoadProgress,
    Prompt,
    RequestOutput,
)

if TYPE_CHECKING:
    from aioengine.engine.engine_core import EngineCore

__all__ = ["AsyncEngine"]

OPTIONS = {
    "SamplingParams: params=SamplingParams({}=...)": SamplingParams.__dataclass_fields__,
    "Prompt: Prompt(..., {}=...)": Prompt.__dataclass_fields__,
    "EngineConfig: AsyncEngine.from_pretrained(..., {}=...)": EngineConfig.__dataclass_fields__,
}
"""Names that a request's calls do not know, and where they go."""

ENDING = "the process is ending; join the threads that use an engine before the main thread ends"

logger = logging.getLogger(__name__)


class AsyncEngine:
    """Generates from text and media with one model, inside the running event loop.

    Use as `async with AsyncEngine.from_pretrained(...) as engine`. An engine belongs to the loop
    that started it and is started once.
    """

    def __init__(
        self, model: str | os.PathLike[str], config: EngineConfig | None = None, **options: Any
    ) -> None:
        """See `from_pretrained`."""
        is_name = isinstance(model, str | os.PathLike) and isinstance(os.fspath(model), str)
        if not is_name or not os.fspath(model):
            message = f"model must be a folder or a hub id, not {type(model).__name__}"
            raise InvalidRequestError(message, parameter="model", value=type(model).__name__)
        self.config = config = replace(config or EngineConfig(), **options)
        self.instruments = Instruments()
        self.model = model
        self._lifecycle = EngineLifecycle(config)
        self._closing: asyncio.Task[None] | None = None
        self._resources = AsyncExitStack()  # closed in the reverse order of their beginning
        self._core: EngineCore | None = None

    @classmethod
    def from_pretrained(
        cls, model: str | os.PathLike[str], *, config: EngineConfig | None = None, **options: Any
    ) -> Self:
        """An engine for a local folder or hub id. Cheap: nothing is loaded before `start()`.

        `options` are fields of EngineConfig, in place of `config` or on top of it. Raises
        InvalidRequestError for options that are unknown or out of range.
        """
        return cls(model, config, **options)

    # ---- life

    async def start(self, *, progress: Callable[[LoadProgress], object] | None = None) -> None:
        """Load the model in a worker thread and begin to serve. Raises ModelLoadError.

        `progress` is called on the event loop as the load goes on; once it raises, no more. The
        first engine of a process calls `gc.freeze()` once its libraries are imported.
        """
        loop = self._lifecycle.start()
        begin = time.perf_counter()
        logger.info("%s is being loaded", self.model_name)
        tell = None if progress is None else heard_on(loop, progress)
        reporter = Reporter(tell, self._lifecycle.is_closed)
        reporter.report("libraries", 0, 1)
        try:
            core = await self._open(reporter)
            if core is not None:
                reporter.report("workers", 0, 1)
                await core.input_processor.media.start()
                reporter.finish("workers")
                if self._lifecycle.is_closed():
                    raise EngineClosedError("what it would serve with is gone")
                self._resources.push_async_callback(core.stop)
                await core.start()
        except BaseException as error:
            self._lifecycle.transition(EngineState.CLOSED)
            await self._resources.aclose()
            task = asyncio.current_task()
            is_cancelled = isinstance(error, asyncio.CancelledError) and task and task.cancelling()
            if self._closing is None or is_cancelled:
                raise
            # What failed has failed because of aclose().
        if self._closing is not None:
            await asyncio.shield(self._closing)
            await self._resources.aclose()
            raise EngineClosedError("the engine was closed while it was starting")
        self._lifecycle.transition(EngineState.RUNNING)
        if core is not None:
            took = time.perf_counter() - begin
            logger.info("%s is ready after %.1f s: %s", self.model_name, took, core.describe())

    async def _open(self, reporter: Reporter) -> EngineCore | None:
        """The engine around a loaded model; None if it is closed meanwhile."""
        try:
            device = await open_device(self.config)
            self._resources.push_async_callback(device.aclose)
            if self._lifecycle.is_closed():
                return None
            loaded = await device.submit_step(
                partial(load_model, self.model, self.config, reporter)
            )
            if self._lifecycle.is_closed():
                return None
        except EngineError:
            raise
        except Exception as error:  # whatever torch, a driver or a checkpoint can raise
            if not threading.main_thread().is_alive():
                raise EngineClosedError(ENDING) from error
            message = f"the model could not be loaded ({type(error).__name__}: {error!s:.300})"
            raise ModelLoadError(message) from error
        # Not at the top of the file: it needs torch, which is imported at start.
        core_class = import_module("aioengine.engine.engine_core").EngineCore
        core: EngineCore = core_class(
            loaded, self.config, device, self.instruments, self._lifecycle
        )
        self._core = core
        self._resources.push_async_callback(_release, core, self._lifecycle, self.model_name)
        self._resources.push_async_callback(core.input_processor.aclose)
        return core

    @property
    def state(self) -> EngineState:
        """Return whether the engine is new, starting, running, draining, closed or dead."""
        return self._lifecycle.state

    async def drain(self) -> None:
        """Take no new requests, and wait until those that are live have ended.

        New ones raise EngineClosedError, until `resume()`. The engine stays open, its caches warm.
        Raises EngineError where the engine dies, or is closed, before they have.
        """
        tracker = self._serving_core().tracker
        self._lifecycle.transition(EngineState.DRAINING)
        await tracker.wait_empty()
        self._lifecycle.check_serving()

    def resume(self) -> None:
        """Take new requests again, after a `drain()` or during one; but not while it closes."""
        self._lifecycle.check_serving()
        if self._lifecycle.drains_for_good:
            raise EngineClosedError("the engine is being closed")
        self._lifecycle.transition(EngineState.RUNNING)

    async def aclose(self, timeout: float | None = 0) -> None:  # noqa: ASYNC109 - of the requests
        """Drain for `timeout` seconds (None: as long as it takes), then end and free everything.

        Requests that are still live get RequestAbortedError. Idempotent: whoever calls it while it
        is under way waits for the same end. Cancelling it while it drains makes it close at once.
        An engine that was never started is closed too, and is not started again.
        """
        if self._lifecycle.loop is None:
            self._close_unstarted()
            return
        self._lifecycle.check_loop()
        try:
            if self._lifecycle.is_serving and timeout != 0:
                self._lifecycle.drains_for_good = True
                with suppress(TimeoutError, EngineError):  # a dead engine has nothing to finish
                    async with asyncio.timeout(timeout):
                        await self.drain()
        finally:
            self._lifecycle.transition(EngineState.CLOSED)
            if self._closing is None:
                self._closing = asyncio.create_task(_close(self._core, self._resources))
        await asyncio.shield(self._closing)

    def _close_unstarted(self) -> None:
        self._lifecycle.transition(EngineState.CLOSED)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # ---- requests

    @with_known_names("generate() has no argument {}", OPTIONS)
    async def generate(
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
    ) -> RequestOutput:
        """The whole output for one prompt. Cancelling the awaiting task ends the request.

        `prompt`: text, token ids, chat messages, a `Prompt`, or a mapping as vLLM takes it.
        `images`: one, or any iterable of them, for its placeholders or its messages' parts without
        content, in order; so are `videos` and `audios`. `tools` and what follows: see `Prompt`. A
        smaller `priority` goes first, always: a steady flow of these keeps others waiting.
        Raises the errors of `aioengine.errors`.
        """
        given: dict[str, Any] = {"images": images, "videos": videos, "audios": audios}
        given |= _chat(tools, tool_choice, chat_template_kwargs)
        stream = self.stream(prompt, params, request_id=request_id, priority=priority, **given)
        try:
            return await stream.result()
        finally:
            stream.close()
            del stream  # it holds the error, whose traceback holds this frame

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
    ) -> TokenStream:
        """The same as a stream of deltas; use it with `async with`. The request begins at once.

        What the arguments alone show is raised here; what headers and layout show, when the stream
        is entered; all else when it is read.
        """
        core = self._serving_core()
        check_arguments(params, request_id, priority)
        name = request_id if request_id is not None else uuid.uuid4().hex
        core.tracker.check_name(name)
        params = params or SamplingParams()
        self._lifecycle.check_entry(core.tracker.num_live, params.n)
        # Last, as it runs through iterators: whoever finds no room may come again.
        media = {"image": images, "video": videos, "audio": audios}
        read = read_prompt(prompt, media, _chat(tools, tool_choice, chat_template_kwargs))
        return core.submit(name, read, params, priority)

    @overload
    def map(
        self,
        prompts: Iterable[PromptLike] | AsyncIterable[PromptLike],
        params: ParamsLike = None,
        *,
        ordered: Literal[True] = True,
        return_exceptions: Literal[False] = False,
        max_in_flight: int | None = None,
    ) -> AsyncIterator[RequestOutput]: ...

    @overload
    def map(
        self,
        prompts: Iterable[PromptLike] | AsyncIterable[PromptLike],
        params: ParamsLike = None,
        *,
        ordered: Literal[True] = True,
        return_exceptions: bool,
        max_in_flight: int | None = None,
    ) -> AsyncIterator[Outcome]: ...

    @overload
    def map(
        self,
        prompts: Iterable[PromptLike] | AsyncIterable[PromptLike],
        params: ParamsLike = None,
        *,
        ordered: Literal[False],
        return_exceptions: bool = False,
        max_in_flight: int | None = None,
    ) -> AsyncIterator[tuple[int, Outcome]]: ...

    @with_known_names("map() has no argument {}", OPTIONS)
    def map(
        self,
        prompts: Iterable[PromptLike] | AsyncIterable[PromptLike],
        params: ParamsLike = None,
        *,
        ordered: bool = True,
        return_exceptions: bool = False,
        max_in_flight: int | None = None,
    ) -> AsyncIterator[Any]:
        """Outputs for any number of prompts, drawn as there is room for them.

        `params`: for all, or one for each prompt. In the prompts' order, or with `ordered=False` as
        `(index, output)` as they are completed. The first error ends it, unless
        `return_exceptions` puts those of single requests in their outputs' places. At most
        `max_in_flight` are live at once (None: twice `max_num_seqs`), and a bounded number of
        outputs waits for its turn. To stop early, use it within `contextlib.aclosing`.
        """
        check_many(prompts, params)
        window: Window[asyncio.Task[RequestOutput]] = new_window(
            self.config, params, max_in_flight, is_ordered=ordered
        )
        return map_prompts(
            self.generate, prompts, params, window, return_exceptions=return_exceptions
        )

    def check_room(self, num_completions: int) -> None:
        """Raise what would keep so many completions out now.

        That is OverloadedError or an EngineError; InvalidRequestError for more than ever may enter.
        """
        self._lifecycle.check_entry(self._serving_core().tracker.num_live, num_completions)

    async def abort(self, request_id: str) -> None:
        """End a live request with RequestAbortedError; an unknown or ended one is left alone."""
        self._serving_core().tracker.abort(request_id, "the request was aborted")
        await asyncio.sleep(0)

    async def reset_caches(self) -> None:
        """Forget all prefixes, encoder outputs and processed media that no live request holds."""
        await self._serving_core().reset_caches()

    def statistics(self) -> EngineStatistics:
        """A snapshot of all counters. Raises EngineClosedError before the first start."""
        if not self._lifecycle.was_serving:
            raise EngineClosedError("the engine has not been started")
        self._lifecycle.check_loop()
        assert self._core is not None
        return self._core.statistics()

    @property
    def model_name(self) -> str:
        """A hub id as it is; of a local folder its own name, without where it lies."""
        path = Path(self.model)
        is_local = path.is_absolute() or path.exists()
        return path.resolve().name if is_local else os.fspath(self.model)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, for use on the event loop's thread."""
        return self.processor.info.get_tokenizer()

    @property
    def processor(self) -> Any:
        """The model's `BaseMultiModalProcessor`, for use on the event loop's thread."""
        return self._serving_core().loaded.loop_processor

    def __repr__(self) -> str:
        core = self._core
        live = ""
        if core is not None and self._lifecycle.is_serving:
            scheduler = core.scheduler
            num_waiting = scheduler.num_waiting + core.tracker.num_preparing
            live = f": {scheduler.num_running} requests run, {num_waiting} wait"
        return f"<{type(self).__name__} {self.model_name} is {self.state}{live}>"

    def __del__(self) -> None:
        """Close an engine that nobody can call any more; nothing here leads to it in a circle."""
        core: EngineCore | None = getattr(self, "_core", None)  # not where __init__ has failed
        loop = None if core is None else self._lifecycle.loop
        if loop is None or core is None or not self._lifecycle.is_serving or loop.is_closed():
            return
        message = f"{self!r} was dropped before its end; use 'async with' or aclose() it"
        warnings.warn(message, ResourceWarning, stacklevel=2, source=self)
        lifecycle, resources = self._lifecycle, self._resources

        def close() -> None:
            lifecycle.transition(EngineState.CLOSED)
            core.closing = asyncio.create_task(_close(core, resources))

        loop.call_soon_threadsafe(close)

    def _serving_core(self) -> EngineCore:
        """The core of an engine that runs; raises EngineError where it does not."""
        self._lifecycle.check_serving()
        assert self._core is not None
        return self._core


def _chat(*given: Any) -> dict[str, Any]:
    return dict(zip(CHAT, given, strict=True))


async def _close(core: EngineCore | None, resources: AsyncExitStack) -> None:
    try:
        if core is not None and not core.is_released:
            await core.tracker.fail_all(partial(RequestAbortedError, "the engine was closed"))
    finally:
        await resources.aclose()


async def _release(core: EngineCore, lifecycle: EngineLifecycle, name: str) -> None:
    let_go = core.release()
    lifecycle.clear_frames()
    dropping = core.device.release(let_go)
    await asyncio.wait([dropping])
    if not dropping.cancelled():
        dropping.exception()  # is seen: a device that is broken may refuse this too
    if lifecycle.was_serving:
        final = core.statistics()
        counts = (f"{getattr(final, each)} {each}" for each in OUTCOMES)
        logger.info("%s is closed; requests: %s", name, ", ".join(counts))
