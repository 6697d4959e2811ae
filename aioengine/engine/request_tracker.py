"""The live requests: each is admitted here, fed its tokens, and ended exactly once.

All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from aioengine.core.plan import SequencePlan, StepPlan, StepResult
from aioengine.core.scheduler import Scheduler
from aioengine.engine.request_state import RequestState
from aioengine.errors import InvalidRequestError, RequestAbortedError, typed
from aioengine.instruments import Instruments, Kind, RequestEvent
from aioengine.types import Prompt

if TYPE_CHECKING:
    from aioengine.engine.input_processor import InputProcessor

__all__ = ["RequestTracker"]

ENDED_AT_ONCE = 64
"""Requests: they take one or two milliseconds of the loop."""


class RequestTracker:
    """One engine's live requests. `counters`: those "finished", "aborted", "rejected", "failed"."""

    def __init__(
        self,
        scheduler: Scheduler,
        input_processor: InputProcessor,
        instruments: Instruments,
        *,
        changed: Callable[[], object],
    ) -> None:
        """`changed` wakes the step loop."""
        self.counters: Counter[str] = Counter()
        self.states: dict[str, RequestState] = {}
        self.num_live = 0
        """Completions of all live requests."""
        self.released: Callable[[RequestState], object] = lambda state: None
        """Called with each request that has ended, to stop its media work."""
        self._preparing: set[str] = set()
        self._owners: dict[str, RequestState] = {}  # by the scheduler's name for each completion
        self._scheduler = scheduler
        self._input_processor = input_processor
        self._instruments = instruments
        self._empty = asyncio.Event()
        self._empty.set()
        self._changed = changed

    @property
    def num_preparing(self) -> int:
        """Requests that are not laid out yet."""
        return len(self._preparing)

    def owner(self, name: str) -> RequestState:
        """Return the request whose completion the scheduler calls `name`."""
        return self._owners[name]

    def open(self, state: RequestState, begin: Callable[[], asyncio.Task[None]]) -> None:
        """Take a new request in; `begin()` starts a task that runs `admit`."""
        self.states[state.request_id] = state
        self.num_live += state.params.n
        self._preparing.add(state.request_id)
        self._empty.clear()
        state.preparation = begin()
        self._note("submitted", state)

    async def wait_empty(self) -> None:
        """Wait until no request is live."""
        await self._empty.wait()

    def check_name(self, request_id: str) -> None:
        """Raise InvalidRequestError for a name that is taken."""
        if request_id in self.states or request_id in self._owners:
            message = f"request_id {request_id!r:.80} is in use by a live request"
            raise InvalidRequestError(message, parameter="request_id")

    async def admit(self, state: RequestState, prompt: Prompt) -> None:
        """Lay the request out and hand it to the scheduler. What goes wrong is its own error."""
        try:
            completions = await self._input_processor.prepare(state, prompt)
            for completion in completions:
                name = completion.request.request_id
                if name != state.request_id:
                    self.check_name(name)
                self._scheduler.submit(completion.request)
                self._owners[name] = state
                state.completions[name] = completion
        except Exception as error:
            # The step loop is not concerned: whatever it is, it is this request's error.
            state.preparation = None
            if not state.has_ended:
                self.fail(state, typed(error))
            return
        self._preparing.discard(state.request_id)
        state.admit()
        self._note("admitted", state, prompt_tokens=state.num_prompt_tokens, media=state.num_media)
        self._changed()

    def deliver(self, plan: StepPlan, result: StepResult) -> None:
        """Take a step's result and hand its tokens to their streams."""
        for sequence in plan.sequences:
            self._note_prompt(sequence, result)
        for advance in self._scheduler.commit(plan, result.token_ids):
            name = advance.request_id
            state = self._owners.get(name)
            if state is None:
                continue  # it failed with a completion before this one
            if name in result.failures:
                self.fail(state, result.failures[name])
                continue
            try:
                has_ended = state.deliver(advance, result.logprobs.get(name))
            except Exception as error:  # a tokenizer that cannot decode what its model says
                self.fail(state, typed(error))
                continue
            if state.has_ended:
                self.counters["finished"] += 1
                self._release(state)
            elif has_ended:
                self._drop(name)
            # Last, as a watcher may end requests.
            if state.pooling is None:
                self._note_token(state, name)
            if state.output is not None:
                self._note("finished", state, output=state.output)

    def _note_token(self, state: RequestState, name: str) -> None:
        completion = state.completions[name]
        cached = completion.request.num_cached_tokens
        self._note("token", state, index=completion.index, cached_tokens=cached)

    def _note_prompt(self, sequence: SequencePlan, result: StepResult) -> None:
        name = sequence.request_id
        state = self._owners.get(name)
        if state is None or not (name in result.prompt_logprobs or name in result.pooled):
            return
        request = state.completions[name].request
        # The name may have a new owner since the step was launched.
        if request.sampling is not sequence.sampling or request.pooling is not sequence.pooling:
            return
        if name in result.pooled:
            state.note_pooled(*result.pooled[name])
        else:
            state.note_prompt(*result.prompt_logprobs[name])

    def fail(self, state: RequestState, error: BaseException) -> None:
        """End a request with an error."""
        self.counters[_kind(error)] += 1
        state.fail(error)
        self._release(state)
        self._note(_kind(error), state, error=error)

    async def fail_all(self, make_error: Callable[[], BaseException]) -> None:
        """End every request, a few at a time, so that the loop gets on in between.

        The newest go first: no others' media are asked for in their place. No new ones may come
        meanwhile. A cancellation ends the rest at once.
        """
        try:
            while self.states:
                self._fail_newest(ENDED_AT_ONCE, make_error)
                await asyncio.sleep(0)
        finally:
            self._fail_newest(len(self.states), make_error)

    def _fail_newest(self, count: int, make_error: Callable[[], BaseException]) -> None:
        for state in list(islice(reversed(self.states.values()), count)):
            if not state.has_ended:  # a watcher may have ended it
                self.fail(state, make_error())

    def abort(self, request_id: str, reason: str) -> None:
        """End a request, if it is live, with RequestAbortedError."""
        state = self.states.get(request_id)
        if state is not None:
            self.fail(state, RequestAbortedError(reason))

    def _release(self, state: RequestState) -> None:
        """Give back all that an ended request held."""
        del self.states[state.request_id]
        self.num_live -= state.params.n
        self._preparing.discard(state.request_id)
        for name in reversed(state.completions):  # those that follow the first before it
            # One that has ended before the others has given its name back.
            if self._owners.get(name) is state:
                self._drop(name)
        if state.preparation is not None:
            state.preparation.cancel()
            # What it was cancelled with leads to its frames, which hold the state and the model.
            state.preparation = None
        self.released(state)
        if not self.states:
            self._empty.set()
        self._changed()

    def _note(self, kind: Kind, state: RequestState, **facts: Any) -> None:
        if self._instruments.watchers:
            now = time.perf_counter()
            self._instruments.note(RequestEvent(kind, state.request_id, now, **facts))

    def _drop(self, name: str) -> None:
        """Give back what the scheduler holds for one completion."""
        del self._owners[name]
        if name in self._scheduler:
            self._scheduler.end(name)


def _kind(error: BaseException) -> Kind:
    """Return the outcome of a request that ends with this error."""
    if isinstance(error, RequestAbortedError):
        return "aborted"
    return "rejected" if isinstance(error, InvalidRequestError) else "failed"
