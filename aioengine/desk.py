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
from aioengine.errors import InvalidRequestError, RequestAbortedError, typed
from aioengine.instruments import Instruments, Kind, RequestEvent
from aioengine.ticket import Ticket
from aioengine.types import Prompt

if TYPE_CHECKING:
    from aioengine.intake import Intake

__all__ = ["Desk"]

ENDED_AT_ONCE = 64
"""Requests: they take one or two milliseconds of the loop."""


class Desk:
    """One engine's live requests. `counters`: those "finished", "aborted", "rejected", "failed"."""

    def __init__(
        self,
        scheduler: Scheduler,
        intake: Intake,
        instruments: Instruments,
        *,
        forget: Callable[[Ticket], object],
        changed: Callable[[], object],
    ) -> None:
        """`forget` stops the media work of a request that has ended, `changed` wakes the step
        loop."""
        self.counters: Counter[str] = Counter()
        self.tickets: dict[str, Ticket] = {}
        self.num_live = 0
        """Completions of all live requests."""
        self._in_intake: set[str] = set()
        self._owners: dict[str, Ticket] = {}  # by the scheduler's name for each completion
        self._scheduler = scheduler
        self._intake = intake
        self._instruments = instruments
        self._empty = asyncio.Event()
        self._empty.set()
        self._forget = forget
        self._changed = changed

    @property
    def num_in_intake(self) -> int:
        """Requests that are not laid out yet."""
        return len(self._in_intake)

    def owner(self, name: str) -> Ticket:
        """Whose completion the scheduler calls so."""
        return self._owners[name]

    def open(self, ticket: Ticket, begin: Callable[[], asyncio.Task[None]]) -> None:
        """Take a new request in; `begin()` starts a task that runs `admit`."""
        self.tickets[ticket.request_id] = ticket
        self.num_live += ticket.params.n
        self._in_intake.add(ticket.request_id)
        self._empty.clear()
        ticket.intake = begin()
        self._note("submitted", ticket)

    async def wait_empty(self) -> None:
        """Wait until no request is live."""
        await self._empty.wait()

    def check_name(self, request_id: str) -> None:
        """Raise InvalidRequestError for a name that is taken."""
        if request_id in self.tickets or request_id in self._owners:
            raise InvalidRequestError(
                f"request_id {request_id!r:.80} is in use by a live request", parameter="request_id"
            )

    async def admit(self, ticket: Ticket, prompt: Prompt) -> None:
        """Lay the request out and hand it to the scheduler. What goes wrong is its own error."""
        try:
            completions = await self._intake.prepare(ticket, prompt)
            for completion in completions:
                name = completion.request.request_id
                if name != ticket.request_id:
                    self.check_name(name)
                self._scheduler.submit(completion.request)
                self._owners[name] = ticket
                ticket.completions[name] = completion
        except Exception as error:
            # The step loop is not concerned: whatever it is, it is this request's error.
            ticket.intake = None
            if not ticket.has_ended:
                self.fail(ticket, typed(error))
            return
        self._in_intake.discard(ticket.request_id)
        ticket.admit()
        self._note("admitted", ticket)
        self._changed()

    def deliver(self, plan: StepPlan, result: StepResult) -> None:
        """Take a step's result and hand its tokens to their streams."""
        for sequence in plan.sequences:
            self._note_prompt(sequence, result)
        for advance in self._scheduler.commit(plan, result.token_ids):
            name = advance.request_id
            ticket = self._owners.get(name)
            if ticket is None:
                continue  # it failed with a completion before this one
            if name in result.failures:
                self.fail(ticket, result.failures[name])
                continue
            try:
                has_ended = ticket.deliver(advance, result.logprobs.get(name))
            except Exception as error:  # a tokenizer that cannot decode what its model says
                self.fail(ticket, typed(error))
                continue
            if ticket.has_ended:
                self.counters["finished"] += 1
                self._release(ticket)
            elif has_ended:
                self._drop(name)
            # Last, as a watcher may end requests.
            self._note("token", ticket, index=ticket.completions[name].index)
            if ticket.output is not None:
                self._note("finished", ticket, output=ticket.output)

    def _note_prompt(self, sequence: SequencePlan, result: StepResult) -> None:
        name = sequence.request_id
        if name in result.prompt_logprobs and name in self._owners:
            ticket = self._owners[name]
            # The name may have a new owner since the step was launched.
            if ticket.completions[name].request.sampling is sequence.sampling:
                ticket.note_prompt(*result.prompt_logprobs[name])

    def fail(self, ticket: Ticket, error: BaseException) -> None:
        """End a request with an error."""
        self.counters[_kind(error)] += 1
        ticket.fail(error)
        self._release(ticket)
        self._note(_kind(error), ticket, error=error)

    async def fail_all(self, make_error: Callable[[], BaseException]) -> None:
        """End every request, a few at a time, so that the loop gets on in between.

        The newest go first: no others' media are asked for in their place. No new ones may come
        meanwhile. A cancellation ends the rest at once.
        """
        try:
            while self.tickets:
                self._fail_newest(ENDED_AT_ONCE, make_error)
                await asyncio.sleep(0)
        finally:
            self._fail_newest(len(self.tickets), make_error)

    def _fail_newest(self, count: int, make_error: Callable[[], BaseException]) -> None:
        for ticket in list(islice(reversed(self.tickets.values()), count)):
            if not ticket.has_ended:  # a watcher may have ended it
                self.fail(ticket, make_error())

    def abort(self, request_id: str, reason: str) -> None:
        """End a request, if it is live, with RequestAbortedError."""
        ticket = self.tickets.get(request_id)
        if ticket is not None:
            self.fail(ticket, RequestAbortedError(reason))

    def _release(self, ticket: Ticket) -> None:
        """Give back all that an ended request held."""
        del self.tickets[ticket.request_id]
        self.num_live -= ticket.params.n
        self._in_intake.discard(ticket.request_id)
        for name in reversed(ticket.completions):  # those that follow the first before it
            # One that has ended before the others has given its name back.
            if self._owners.get(name) is ticket:
                self._drop(name)
        if ticket.intake is not None:
            ticket.intake.cancel()
        self._forget(ticket)
        if not self.tickets:
            self._empty.set()
        self._changed()

    def _note(self, kind: Kind, ticket: Ticket, **facts: Any) -> None:
        if self._instruments.watchers:
            now = time.perf_counter()
            self._instruments.note(RequestEvent(kind, ticket.request_id, now, **facts))

    def _drop(self, name: str) -> None:
        """Give back what the scheduler holds for one completion."""
        del self._owners[name]
        if name in self._scheduler:
            self._scheduler.end(name)


def _kind(error: BaseException) -> Kind:
    """How a request ends that ends with this error."""
    if isinstance(error, RequestAbortedError):
        return "aborted"
    return "rejected" if isinstance(error, InvalidRequestError) else "failed"
