"""A running engine, without its public face: requests in, steps and encoder runs, tokens out.

All state lives on the loop's thread. Tasks belong to the engine's scope; work that takes long runs
on the device's launch thread and on worker threads, and comes back through futures.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from aioengine.config import MIB, EngineConfig
from aioengine.core.plan import StepPlan, StepResult
from aioengine.core.scheduler import Scheduler
from aioengine.engine.detokenizer import decode_long
from aioengine.engine.encoder_jobs import EncoderJobs
from aioengine.engine.input_processor import InputProcessor
from aioengine.engine.lifecycle import EngineLifecycle
from aioengine.engine.loading.loader import Loaded
from aioengine.engine.request_state import RequestState
from aioengine.engine.request_tracker import RequestTracker
from aioengine.errors import (
    EngineDeadError,
    InvalidRequestError,
    RequestAbortedError,
    is_int,
    typed,
)
from aioengine.instruments import PROCESSORS, Instruments, StageSpan, timed
from aioengine.kernels.cpu.library import end_team
from aioengine.sampling_params import SamplingParams
from aioengine.streams.device import Device
from aioengine.streams.loop_bridge import run_in
from aioengine.streams.tokens import TokenSink, TokenStream, open_stream
from aioengine.types import OUTCOMES, EngineState, EngineStatistics, Prompt

__all__ = ["EngineCore"]

Task = asyncio.Task[None]
TOKENIZED_AT_ONCE = 8
"""Prompts whose tokens somebody wants to see: others wait for their turn."""
MAX_TOKEN_ID = (1 << 31) - 1


class EngineCore:
    """One engine's parts, complete once it is constructed; `start` has it take steps.

    `loaded`: the model and its processors; `lifecycle` learns here when the device breaks.
    """

    def __init__(
        self,
        loaded: Loaded,
        config: EngineConfig,
        device: Device,
        instruments: Instruments,
        lifecycle: EngineLifecycle,
    ) -> None:
        self.loaded = loaded
        self.device = device
        self.scheduler = Scheduler(loaded.limits)
        self.input_processor = InputProcessor(loaded, config, loaded.source, instruments)
        self._changed = asyncio.Event()
        self._tokenizing = asyncio.Semaphore(TOKENIZED_AT_ONCE)
        self.tracker = RequestTracker(
            self.scheduler, self.input_processor, instruments, changed=self._changed.set
        )
        self.encoder_jobs = EncoderJobs(
            self.scheduler,
            self.input_processor.media,
            loaded.runner,
            device,
            instruments,
            self.tracker,
            spawn=self._spawn,
            changed=self._changed.set,
        )
        self.tracker.released = self.encoder_jobs.forget
        self._quantization = config.quantization or "as in the checkpoint"
        self._instruments = instruments
        self._lifecycle = lifecycle
        self._main: Task | None = None
        self._final: EngineStatistics | None = None  # once it is released
        self.closing: Task | None = None  # of an engine that was dropped

    async def start(self) -> None:
        """Serve from now on, in a task of its own."""
        started = asyncio.get_running_loop().create_future()
        self._main = asyncio.create_task(self._run(started), name="aioengine")
        await started

    async def stop(self) -> None:
        """Take no more steps. Requests that are still live are aborted."""
        if self._main is not None:
            self._main.cancel()
            await asyncio.wait([self._main])

    @property
    def is_released(self) -> bool:
        """Return whether it has let go of the model."""
        return self._final is not None

    def release(self) -> Callable[[], None]:
        """Drop what leads back here, as a cycle with frozen objects is never freed.

        Returns what drops the last reference to the model, for the launch thread, as its last job.
        """
        self._final = self.statistics()
        kept = [self.loaded]

        def let_go() -> None:
            # A late thread of the team may still be reading weights: they go when it has come out.
            end_team()
            kept.clear()

        self._main = None
        self.encoder_jobs.stop()
        del self.tracker.released  # which leads from the tracker to the encoder jobs and back
        del self.loaded, self.scheduler, self.input_processor, self.tracker, self.encoder_jobs
        return let_go

    # ---- requests

    def check_entry(self, num_completions: int) -> None:
        """Raise what would keep so many completions out now."""
        self._lifecycle.check_entry(self.tracker.num_live, num_completions)

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        pooling: Any = None,
    ) -> TokenStream:
        """Take a request in; its preparation begins at once, in a task of the engine.

        `pooling`: a `Pooling` of one that ends with its prompt.
        """
        give_up = partial(self.tracker.abort, request_id, "the stream was closed")
        sink, stream = open_stream(request_id, give_up, self._lifecycle.loop)
        state = RequestState(request_id, sink, params, priority=priority, pooling=pooling)
        self.tracker.open(state, partial(self._spawn, self.tracker.admit, state, prompt))
        return stream

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """A prompt's token ids, rendered and laid out; nothing is scheduled."""
        ids: tuple[int, ...] = await self._attend(partial(self._tokenize, prompt))
        return ids

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens among them."""
        tokenizer, thread = self.loaded.layout_processor.info.get_tokenizer(), self.input_processor
        text: str = await self._attend(
            partial(run_in, thread.thread, _decode, tokenizer, token_ids)
        )
        return text

    async def _tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        if prompt.tool_choice != "none":
            prompt = replace(prompt, tool_choice="auto")  # a call that has to be needs a grammar
        sink = TokenSink(lambda: None, None)
        state = RequestState(f"tokens-{uuid.uuid4().hex}", sink, SamplingParams(), priority=0)
        try:
            first, *_ = await self.input_processor.prepare(state, prompt)
        finally:
            if state.lease is not None:
                state.lease.close()
        # Of an encoder-decoder model the encoder's.
        layout = state.layout
        return first.request.prompt_token_ids if layout is None else tuple(layout.token_ids)

    async def _attend(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Await work in the engine's scope: it ends with the engine, and with its caller."""
        outcome: list[Any] = []
        task = self._spawn(self._note_outcome, work, outcome)
        try:
            await asyncio.wait([task])
            if not outcome:
                raise RequestAbortedError("the engine was closed")
            if isinstance(outcome[0], Exception):
                raise outcome[0]
            return outcome[0]
        finally:
            task.cancel()
            outcome.clear()  # an error's traceback holds this frame

    async def _note_outcome(self, work: Callable[[], Awaitable[Any]], outcome: list[Any]) -> None:
        try:
            async with self._tokenizing:
                outcome.append(await work())
        except Exception as error:
            outcome.append(typed(error))

    async def reset_caches(self) -> None:
        """Forget all prefixes, encoder outputs and processed media that no live request holds."""
        media = self.input_processor.media  # it may be closed meanwhile
        self.scheduler.pool.clear()
        self.scheduler.states.clear()
        evicted = self.scheduler.media.cache.clear()
        self._changed.set()
        if evicted:
            await asyncio.wait([self.encoder_jobs.drop(evicted)])
        await media.clear()

    def describe(self) -> str:
        """Say in one line what the model runs as, on what, and with how much memory."""
        loaded, limits, model = self.loaded, self.loaded.limits, self.loaded.runner.model
        num_tokens = limits.num_blocks // max(1, limits.num_groups) * limits.block_size
        parts = (
            f"{type(model).__name__} ({loaded.model_impl})",
            f"{model.device}, {torch.get_num_threads()} threads",
            f"{model.dtype}".removeprefix("torch."),
            f"quantization {self._quantization}",
            f"KV cache {limits.num_blocks} blocks, {num_tokens} tokens, "
            f"{loaded.runner.kv_cache_bytes / MIB:.0f} MiB",
            f"encoder cache {limits.encoder_cache_bytes / MIB:.0f} MiB",
        )
        return "; ".join(parts)

    def statistics(self) -> EngineStatistics:
        """A snapshot of all counters; of one that is released, the last."""
        if self._final is not None:
            return self._final
        scheduler, tracker = self.scheduler, self.tracker
        counters, pool, media = scheduler.counters, scheduler.pool, scheduler.media
        model = self.loaded.runner.model
        processed = asdict(self.input_processor.media.cache.statistics())
        return EngineStatistics(
            model_impl=self.loaded.model_impl,
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + tracker.num_preparing,
            **{outcome: tracker.counters[outcome] for outcome in OUTCOMES},
            preemptions=counters["preemptions"],
            kv_blocks_total=pool.count,
            kv_blocks_free=pool.num_free,
            kv_blocks_cached=pool.num_cached,
            states_total=scheduler.states.count,
            states_free=scheduler.states.num_free,
            states_cached=scheduler.states.num_cached,
            prefix_query_tokens=counters["prefix_query_tokens"],
            prefix_hit_tokens=counters["prefix_hit_tokens"],
            encoder_cache_capacity_bytes=media.cache.capacity_bytes,
            encoder_cache_used_bytes=media.cache.capacity_bytes - media.cache.free_bytes,
            encoder_cache_entries=len(media.cache),
            encoder_cache_referenced=media.cache.num_referenced,
            encoder_cache_hits=counters["encoder_hits"],
            encoder_cache_misses=media.counters["encoder_misses"],
            encoder_cache_evictions=media.cache.num_evictions,
            encoder_cache_waits=media.counters["encoder_waits"],
            encoder_items_run=self.encoder_jobs.num_items_run,
            **{f"processor_cache_{name}": figure for name, figure in processed.items()},
            stages=self._instruments.stages(),
        )

    # ---- tasks

    async def _run(self, started: asyncio.Future[None]) -> None:
        try:
            async with asyncio.TaskGroup() as self._tasks:
                started.set_result(None)
                try:
                    await self._step_loop()
                except Exception as error:
                    # A reader that clears the frames of its error would close this one, if it was
                    # among them: it waits below while readers are told.
                    own = error.__traceback__
                    self.die(error.with_traceback(own.tb_next if own else None))
                await self.tracker.fail_all(self._death)
        finally:
            # Somebody may have cancelled every task of the loop.
            self._lifecycle.transition(EngineState.CLOSED)
            await self.tracker.fail_all(lambda: RequestAbortedError("the engine was stopped"))
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
            self.die(error)

    def die(self, error: BaseException) -> None:
        """The device or the engine itself is broken: every open stream says so."""
        self._lifecycle.die(error)
        self._changed.set()

    def _death(self) -> EngineDeadError:
        dead = EngineDeadError("the engine has died; start a new one")
        dead.__cause__ = self._lifecycle.death
        return dead

    # ---- the step loop

    async def _step_loop(self) -> None:
        in_flight: list[tuple[StepPlan, asyncio.Future[Any]]] = []
        while self._lifecycle.death is None:
            self._changed.clear()
            self.step(in_flight)
            if self.scheduler.is_stalled:
                raise RuntimeError("requests are pending and nothing can move them")
            if self._changed.is_set():
                await asyncio.sleep(0)  # others on the loop have their turn between two plans
            await self._changed.wait()

    def step(self, in_flight: list[tuple[StepPlan, asyncio.Future[Any]]]) -> None:
        """Commit what is done, launch what can be, without waiting.

        `in_flight`: launched steps in order, which this adds to and takes from.
        """
        device = self.device
        while in_flight and in_flight[0][1].done():
            self._commit(*in_flight.pop(0))
        plan = self.scheduler.schedule() if device.has_room(len(in_flight)) else None
        if plan is not None:
            handle = self._launch(plan)
            handle.add_done_callback(self._note_end)
            in_flight.append((plan, handle))
            if device.has_room(len(in_flight)):
                self._changed.set()
        elif not in_flight:
            device.rest()
        self.encoder_jobs.start(self.scheduler.schedule_media())

    def _launch(self, plan: StepPlan) -> asyncio.Future[Any]:
        """Hand a step to the device: to its queue, or as a job."""
        device, runner = self.device, self.loaded.runner
        steps = runner.decode_steps
        if steps is not None and device.takes_queued and (number := runner.put(plan)) is not None:
            return device.submit_queued(steps.queue, number, partial(steps.read, plan, number))
        return device.submit_step(partial(timed, runner.step, plan))

    def _note_end(self, handle: asyncio.Future[Any]) -> None:
        if not handle.cancelled():
            handle.exception()  # is seen: nobody commits a step behind one that has failed
        self._changed.set()

    def _commit(self, plan: StepPlan, handle: asyncio.Future[Any]) -> None:
        """Take a step's result and hand its tokens to their streams."""
        result: StepResult
        result, start, end = handle.result()
        names = tuple(s.request_id for s in plan.sequences)
        self._instruments.record(StageSpan("step", start, end, names, f"{plan.num_tokens} tokens"))
        if result.processed is not None:
            own = (s for s in plan.sequences if s.sampling is not None and s.sampling.processors)
            names = tuple(s.request_id for s in own)
            self._instruments.record(StageSpan(PROCESSORS, *result.processed, names))
        self.tracker.deliver(plan, result)


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    token_ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
        raise InvalidRequestError("tokens must be a list of token ids", parameter="tokens")
    for index, token_id in enumerate(token_ids):
        if not is_int(token_id) or not 0 <= token_id <= MAX_TOKEN_ID:
            name = f"tokens[{index}]"
            raise InvalidRequestError(f"{name} must be a token id", parameter=name)
    return decode_long(tokenizer, token_ids)
