"""The public face of an engine, and its life."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from aioengine.config import EngineConfig
from aioengine.engine.lifecycle import EngineLifecycle
from aioengine.engine.loading.devices import load_model, open_device
from aioengine.engine.prompts import PromptLike, read_prompt
from aioengine.engine.request_calls import RequestCalls
from aioengine.errors import (
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    RequestAbortedError,
)
from aioengine.instruments import Instruments, heard_on
from aioengine.models.runtime.load_progress import Reporter
from aioengine.types import OUTCOMES, EngineState, EngineStatistics, LoadProgress

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from aioengine.engine.engine_core import EngineCore

__all__ = ["AsyncEngine"]

ENDING = "the process is ending; join the threads that use an engine before the main thread ends"

logger = logging.getLogger(__name__)


class AsyncEngine(RequestCalls):
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

    # ---- tokens, caches and figures

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

    async def tokenize(
        self,
        prompt: PromptLike,
        *,
        images: Any = (),
        videos: Any = (),
        audios: Any = (),
        tools: Sequence[Any] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Token ids that `generate` would give to the model for these arguments, media expanded;
        of an encoder-decoder model, the encoder's.

        Nothing is scheduled. A few prompts are read at a time, the others wait. Raises what
        `generate` raises before a request is admitted.
        """
        core = self._serving_core()
        media = {"image": images, "video": videos, "audio": audios}
        chat = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        return await core.tokenize(read_prompt(prompt, media, chat))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens among them, off the loop's thread."""
        return await self._serving_core().detokenize(token_ids)

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer at most."""
        return self._serving_core().loaded.limits.max_model_len

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

    def openai_client(self, **options: Any) -> AsyncOpenAI:
        """OpenAI's own client for this engine, in this process and without a port.

        Its requests are answered as `aioengine.asgi.openai_app` would answer them, on the engine's
        event loop; on another one they raise WrongLoopError. `options`: those of
        `openai.AsyncOpenAI`, and `model_names`, as in `openai_app`. Needs the extra `client`, and
        imports it, which takes about a second the first time. Raises InvalidRequestError for an
        option that is unknown.
        """
        # Not at the top of the file: an engine needs no web service.
        client_of = import_module("aioengine.asgi.in_process").openai_client
        client: AsyncOpenAI = client_of(self, **options)
        return client

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
