"""The engine in the application's own event loop: public calls on top, one step loop below.

All state lives on the loop's thread. Tasks belong to the engine's scope; work that takes long runs
on the device's launch thread and on worker threads, and comes back through futures.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from aioengine.config import EngineConfig
from aioengine.core.plan import StepPlan, StepResult
from aioengine.core.scheduler import Scheduler
from aioengine.engine.devices import load_model, open_device
from aioengine.engine.encoder_jobs import EncoderJobs
from aioengine.engine.lifecycle import EngineLifecycle
from aioengine.engine.prompts import PromptLike, check_arguments, read_prompt
from aioengine.engine.request_state import RequestState
from aioengine.engine.request_tracker import RequestTracker
from aioengine.engine.statistics import take_snapshot
from aioengine.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    RequestAbortedError,
)
from aioengine.instruments import Instruments, StageSpan, heard_on, timed
from aioengine.models.runtime.load_progress import Reporter
from aioengine.sampling_params import SamplingParams
from aioengine.streams.device import Device
from aioengine.streams.tokens import TokenStream, open_stream
from aioengine.types import EngineState, EngineStatistics, LoadProgress, RequestOutput

if TYPE_CHECKING:
    from aioengine.engine.input_processor import InputProcessor
    from aioengine.engine.loader import Loaded

__all__ = ["AsyncEngine"]

Task = asyncio.Task[None]


class AsyncEngine:
    """Generates from text and media with one model, inside the running event loop.

    Use as `async with AsyncEngine.from_pretrained(...) as engine`. An engine belongs to the loop
    that started it and is started once.
    """

    def __init__(self, model: str | os.PathLike[str], config: EngineConfig) -> None:
        self.config = config
        self.instruments = Instruments()
        self.model = model
        self._lifecycle = EngineLifecycle(config)
        self._closing: asyncio.Task[None] | None = None
        self._main: asyncio.Task[None] | None = None
        self._resources = AsyncExitStack()  # closed in the reverse order of their beginning
        self._device: Device
        self._input_processor: InputProcessor
        self._parts: Loaded
        self._tracker: RequestTracker | None = None
        self._final: EngineStatistics | None = None  # once the engine is closed

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        *,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> Self:
        """An engine for a local folder or hub id. Cheap: nothing is loaded before `start()`.

        `options` are fields of EngineConfig, in place of `config` or on top of it. Raises
        InvalidRequestError for options that are unknown or out of range.
        """
        unknown = sorted(options.keys() - EngineConfig.__dataclass_fields__.keys())
        if unknown:
            raise InvalidRequestError(
                f"EngineConfig has no option {unknown[0]!r:.60}", parameter=unknown[0]
            )
        return cls(model, replace(config or EngineConfig(), **options))

    # ---- life

    async def start(self, *, progress: Callable[[LoadProgress], object] | None = None) -> None:
        """Load the model in a worker thread and begin to serve. Raises ModelLoadError.

        `progress` is called on the event loop as the load goes on; once it raises, no more. The
        first engine of a process calls `gc.freeze()` once its libraries are imported.
        """
        if self._lifecycle.loop is not None:
            raise EngineClosedError("an engine is started once; make a new one")
        self._lifecycle.loop = asyncio.get_running_loop()
        reporter = Reporter(None if progress is None else heard_on(self._lifecycle.loop, progress))
        reporter.report("libraries", 0, 1)
        try:
            loaded = await self._open(reporter)
            if loaded is not None:
                self._assemble(loaded)
                reporter.report("workers", 0, 1)
                await self._input_processor.media.start()
                reporter.finish("workers")
                if self._closing is not None:
                    raise EngineClosedError("what it would serve with is gone")
                started = self._lifecycle.loop.create_future()
                self._main = asyncio.create_task(self._serve(started), name="aioengine")
                self._resources.push_async_callback(self._stop_serving)
                await started
        except BaseException as error:
            self._lifecycle.close()
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
        self._lifecycle.open()

    async def _open(self, reporter: Reporter) -> Loaded | None:
        """The device's queues and the model; None if the engine is closed meanwhile."""
        try:
            self._device = await open_device(self.config)
            self._resources.push_async_callback(self._device.aclose)
            if self._closing is not None:
                return None
            loaded: Loaded = await self._device.submit_step(
                partial(load_model, self.model, self.config, reporter)
            )
            return loaded if self._closing is None else None
        except EngineError:
            raise
        except Exception as error:  # whatever torch, a driver or a checkpoint can raise
            raise ModelLoadError(
                f"the model could not be loaded ({type(error).__name__}: {error!s:.300})"
            ) from error

    def _assemble(self, loaded: Loaded) -> None:
        # Not at the top of the file: input_processor needs torch, which is imported at start.
        input_processor = import_module("aioengine.engine.input_processor")
        self._parts = loaded
        self._scheduler = Scheduler(loaded.limits)
        self._input_processor = input_processor.InputProcessor(
            loaded, self.config, self.model, self.instruments
        )
        self._resources.push_async_callback(self._input_processor.aclose)
        self._changed = asyncio.Event()
        self._tracker = RequestTracker(
            self._scheduler,
            self._input_processor,
            self.instruments,
            forget=lambda state: self._encoder_jobs.forget(state),
            changed=self._changed.set,
        )
        self._encoder_jobs = EncoderJobs(
            self._scheduler,
            self._input_processor.media,
            loaded.runner,
            self._device,
            self.instruments,
            spawn=self._spawn,
            changed=self._changed.set,
            owner=self._tracker.owner,
            fail=self._tracker.fail,
        )
        self._resources.callback(self._release)

    def _release(self) -> None:
        """Drop the model and what leads back here: a cycle with frozen objects is never freed."""
        if self._lifecycle.was_open:
            self._final = self.statistics()
        self._tracker = self._main = None
        del self._parts, self._scheduler, self._input_processor, self._encoder_jobs
        self._lifecycle.clear_frames()

    @property
    def state(self) -> EngineState:
        """Whether the engine is new, starting, running, draining, closed or dead."""
        return self._lifecycle.state

    async def drain(self) -> None:
        """Take no new requests, and wait until those that are live have ended.

        New ones raise EngineClosedError, until `resume()`. The engine stays open, its caches warm.
        Raises EngineError where the engine dies, or is closed, before they have.
        """
        tracker = self._check_open()
        self._lifecycle.is_draining = True
        await tracker.wait_empty()
        self._check_open()

    def resume(self) -> None:
        """Take new requests again, after a `drain()` or during one; but not while it closes."""
        self._check_open()
        if self._lifecycle.is_closing:
            raise EngineClosedError("the engine is being closed")
        self._lifecycle.is_draining = False

    async def aclose(self, timeout: float | None = 0) -> None:  # noqa: ASYNC109 - of the requests
        """Drain for `timeout` seconds (None: as long as it takes), then end and free everything.

        Requests that are still live get RequestAbortedError. Idempotent: whoever calls it while it
        is under way waits for the same end. Cancelling it while it drains makes it close at once.
        An engine that was never started is left as it is.
        """
        if self._lifecycle.loop is None:
            return
        self._lifecycle.check_loop()
        try:
            if self._lifecycle.is_open and timeout != 0:
                self._lifecycle.is_closing = True
                with suppress(TimeoutError, EngineError):  # a dead engine has nothing to finish
                    async with asyncio.timeout(timeout):
                        await self.drain()
        finally:
            self._lifecycle.close()
            if self._closing is None:
                self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            if self._tracker is not None:
                await self._tracker.fail_all(lambda: RequestAbortedError("the engine was closed"))
        finally:
            await self._resources.aclose()

    async def _stop_serving(self) -> None:
        assert self._main is not None
        self._main.cancel()
        await asyncio.wait([self._main])

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    # ---- requests

    async def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audios: Sequence[Any] = (),
        request_id: str | None = None,
        priority: int = 0,
    ) -> RequestOutput:
        """The whole output for one prompt. Cancelling the awaiting task ends the request.

        `prompt`: text, token ids, chat messages or a `Prompt`; `images` fill its placeholders in
        order. A smaller `priority` goes first, always: a steady flow of these keeps others waiting.
        Raises the errors of `aioengine.errors`.
        """
        stream = self.stream(
            prompt,
            params,
            images=images,
            videos=videos,
            audios=audios,
            request_id=request_id,
            priority=priority,
        )
        try:
            return await stream.result()
        finally:
            stream.close()

    def stream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audios: Sequence[Any] = (),
        request_id: str | None = None,
        priority: int = 0,
    ) -> TokenStream:
        """The same as a stream of deltas; use it with `async with`. The request begins at once.

        What the arguments alone show is raised here; what headers and layout show, when the stream
        is entered; all else when it is read.
        """
        tracker = self._check_open()
        media = {"image": images, "video": videos, "audio": audios}
        read = read_prompt(prompt, media)
        check_arguments(params, request_id, priority)
        name = request_id if request_id is not None else uuid.uuid4().hex
        tracker.check_name(name)
        self._lifecycle.check_entry(tracker.num_live, 1 if params is None else params.n)
        give_up = partial(tracker.abort, name, "the stream was closed")
        sink, stream = open_stream(name, give_up, self._lifecycle.loop)
        state = RequestState(name, sink, params or SamplingParams(), priority=priority)
        tracker.open(state, partial(self._spawn, tracker.admit, state, read))
        return stream

    def check_room(self, num_completions: int) -> None:
        """Raise what would keep so many completions out now.

        That is OverloadedError or an EngineError; InvalidRequestError for more than ever may enter.
        """
        self._lifecycle.check_entry(self._check_open().num_live, num_completions)

    async def abort(self, request_id: str) -> None:
        """End a live request with RequestAbortedError; an unknown or ended one is left alone."""
        self._check_open().abort(request_id, "the request was aborted")
        await asyncio.sleep(0)

    async def reset_caches(self) -> None:
        """Forget all prefixes, encoder outputs and processed media that no live request holds."""
        self._check_open()
        media = self._input_processor.media  # it may be closed meanwhile
        self._scheduler.pool.clear()
        evicted = self._scheduler.media.cache.clear()
        self._changed.set()
        if evicted:
            await asyncio.wait([self._encoder_jobs.drop(evicted)])
        await media.clear()

    def statistics(self) -> EngineStatistics:
        """A snapshot of all counters. Raises EngineClosedError before the first start."""
        if not self._lifecycle.was_open:
            raise EngineClosedError("the engine has not been started")
        self._lifecycle.check_loop()
        if self._final is not None:
            return self._final
        assert self._tracker is not None
        return take_snapshot(
            self._scheduler,
            self._input_processor.media.cache.statistics(),
            self.instruments.stages(),
            endings=self._tracker.counters,
            num_preparing=self._tracker.num_preparing,
            encoder_items_run=self._encoder_jobs.num_items_run,
        )

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, for use on the event loop's thread."""
        self._check_open()
        return self._parts.loop_processor.info.get_tokenizer()

    @property
    def processor(self) -> Any:
        """The model's `BaseMultiModalProcessor`, for use on the event loop's thread."""
        self._check_open()
        return self._parts.loop_processor

    def _check_open(self) -> RequestTracker:
        """The tracker of an engine that runs; raises EngineError where it does not."""
        self._lifecycle.check_open()
        assert self._tracker is not None
        return self._tracker

    # ---- the step loop

    async def _serve(self, started: asyncio.Future[None]) -> None:
        assert self._tracker is not None
        try:
            async with asyncio.TaskGroup() as self._tasks:
                started.set_result(None)
                try:
                    await self._step_loop()
                except Exception as error:
                    self._die(error)
                await self._tracker.fail_all(self._death)
        finally:
            # Somebody may have cancelled every task of the loop.
            self._lifecycle.close()
            await self._tracker.fail_all(lambda: RequestAbortedError("the engine was stopped"))
            del self._tasks

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> Task:
        """Run `work(*args)` in the engine's scope. What it raises is the engine's end."""
        return self._tasks.create_task(self._guard(work, args))

    async def _guard(
        self, work: Callable[..., Coroutine[Any, Any, None]], args: tuple[Any, ...]
    ) -> None:
        # The coroutine is made in here: a task cancelled before its first step makes none.
        try:
            await work(*args)
        except Exception as error:
            self._die(error)

    def _die(self, error: BaseException) -> None:
        """The device or the engine itself is broken: every open stream says so."""
        self._lifecycle.death = self._lifecycle.death or error
        self._changed.set()

    def _death(self) -> EngineDeadError:
        dead = EngineDeadError("the engine has died; start a new one")
        dead.__cause__ = self._lifecycle.death
        return dead

    async def _step_loop(self) -> None:
        scheduler, device = self._scheduler, self._device
        in_flight: list[tuple[StepPlan, asyncio.Future[Any]]] = []
        while self._lifecycle.death is None:
            self._changed.clear()
            while in_flight and in_flight[0][1].done():
                self._commit(*in_flight.pop(0))
            plan = scheduler.schedule() if len(in_flight) <= device.run_ahead else None
            if plan is not None:
                handle = device.submit_step(partial(timed, self._parts.runner.step, plan))
                handle.add_done_callback(lambda _: self._changed.set())
                in_flight.append((plan, handle))
                if len(in_flight) <= device.run_ahead:
                    self._changed.set()
            elif not in_flight:
                device.rest()
            self._encoder_jobs.start(scheduler.schedule_media())
            if scheduler.is_stalled:
                raise RuntimeError("requests are pending and nothing can move them")
            await self._changed.wait()

    def _commit(self, plan: StepPlan, handle: asyncio.Future[Any]) -> None:
        """Take a step's result and hand its tokens to their streams."""
        assert self._tracker is not None
        result: StepResult
        result, start, end = handle.result()
        names = tuple(s.request_id for s in plan.sequences)
        self.instruments.record(StageSpan("step", start, end, names, f"{plan.num_tokens} tokens"))
        self._tracker.deliver(plan, result)
