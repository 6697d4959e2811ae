"""Decides, step by step, which tokens are computed and who gets the memory for it.

A request's tokens are scheduled, then computed, and chase `num_tokens`; there is no prefill or
decode phase. A step serves single tokens first, then the chunks of running requests by seniority,
then waiting requests. A chunk ends before the first encoder row that is not there; a request at
such an end is *parked* and holds no slot, and so is one with less than a block of text before it.
All of it is synchronous and deterministic. `schedule()` may run ahead of `commit()`: blocks and
rows are let go when the last step that uses them commits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from aioengine.core.admission import bounded_stop, refuse_impossible, whole_ranges
from aioengine.core.block_pool import BlockPool
from aioengine.core.draft import StepDraft, plan_sequence
from aioengine.core.limbo import Limbo
from aioengine.core.media_scheduler import MediaScheduler
from aioengine.core.plan import UNSAMPLED, Advance, Limits, MediaPlan, StepPlan
from aioengine.core.request import Item, Request
from aioengine.core.state_pool import StatePool
from aioengine.core.waiting import WaitingRequests, insert, remove, take_turns

__all__ = ["Scheduler"]


class Scheduler:
    """The pure core. `schedule*()` hand out work; `commit()` and `media`'s methods take results."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits)
        longest = self.pool.blocks_for(limits.max_model_len) * limits.num_groups
        longest += self.pool.blocks_for(limits.max_encoder_len) * limits.num_cross_groups
        assert longest <= limits.num_blocks
        self.states = StatePool(limits)
        assert limits.num_states == 0 or limits.num_states > limits.max_num_seqs
        self.media = MediaScheduler(limits)
        self.counters: Counter[str] = Counter()
        self._live: dict[str, Request] = {}
        self._running: list[Request] = []  # by seniority
        self._waiting = WaitingRequests()
        self._in_flight: deque[tuple[StepPlan, list[Request]]] = deque()
        self._limbo = Limbo(self.pool, self.states)
        self._num_arrivals = 0
        self._num_steps = 0
        self._last_committed = -1
        self._urgent: Request | None = None

    # ---- requests come and go

    def submit(self, request: Request) -> None:
        """Queue a request. Raises at once for one that could never be served."""
        assert request.request_id not in self._live
        assert request.encoder is None or not request.items
        request.whole_ranges = whole_ranges(request, self.limits)
        refuse_impossible(request, self.limits)
        request.stop = bounded_stop(request, self.limits)
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._live[request.request_id] = request
        self.media.add(request)
        leader = request.leader or request
        leader.num_sharing += 1
        if leader is not request and self._is_live(leader) and not leader.has_computed_prompt:
            leader.followers[request.request_id] = request
            return
        request.hit_estimate = self.pool.hit_length(request, self._find_prefix(request))
        request.finds_cross = self.pool.find_cross(request) is not None
        self._waiting.add(request)

    def end(self, request_id: str) -> None:
        """End a live request, for whatever reason. Steps in flight go on without it."""
        request = self._live.pop(request_id)
        leader = request.leader or request
        self._release_followers(request)
        if request.is_running:
            remove(self._running, request)
        elif not leader.followers.pop(request_id, None):
            self._waiting.remove(request)
        self._release_blocks(request)
        leader.num_sharing -= 1
        if not leader.num_sharing:
            self.pool.forget_private(leader)
            self.states.forget_private(leader)
        self.media.remove(request)
        if self._urgent is request:
            self._urgent = None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    @property
    def num_running(self) -> int:
        """Requests that hold KV blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none."""
        return len(self._live) - len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not committed."""
        return len(self._in_flight)

    @property
    def is_stalled(self) -> bool:
        """Return whether requests are pending and nothing that could move them is under way."""
        return bool(self._live) and not self._in_flight and not self.media.is_waiting_for_others

    def schedule_media(self) -> MediaPlan:
        """Choose what to decode now, and what to encode if the encoder is free."""
        return self.media.schedule(self._running, self._waiting.media)

    # ---- one step of the decoder

    def schedule(self) -> StepPlan | None:
        """Plan the next step, or None if there is nothing that can be computed now."""
        step = StepDraft(self._num_steps, self.limits.max_num_batched_tokens, 0)
        for request in self._running:
            blocker = self.media.blocker(request)
            request.has_slot &= blocker is None and not request.is_exhausted
            step.num_slots += request.has_slot
            step.num_parked_rows += 0 if blocker is None else blocker.span.num_rows
        self._serve_urgent(step)
        for request in self._running_order():
            self._plan_running(request, step)
        if not step.is_short_of_blocks:
            self._plan_waiting(step)
        if not step.sequences:
            return None
        plan = StepPlan(step.step_id, tuple(step.sequences))
        self._num_steps += 1
        self._in_flight.append((plan, step.requests))
        return plan

    def commit(self, plan: StepPlan, token_ids: Sequence[int]) -> list[Advance]:
        """Take the oldest step's result: one token id for each sequence that samples.

        A token of a request that has ended meanwhile is dropped; of one that was preempted, kept.
        """
        oldest, requests = self._in_flight.popleft()
        assert oldest is plan
        self._last_committed = plan.step_id
        sampled = iter(token_ids)
        advances = []
        for sequence, request in zip(plan.sequences, requests, strict=True):
            for key in sequence.row_keys:
                self.media.cache.release(key)
            token_id = next(sampled) if sequence.samples else UNSAMPLED
            if not self._is_live(request):
                self.states.commit(request, sequence, is_current=False)
                continue
            if sequence.samples:
                request.num_pending -= 1
                request.output_token_ids.append(token_id)
            is_current = request.epoch == sequence.epoch
            self.states.commit(request, sequence, is_current)
            if is_current:
                request.num_computed = sequence.end
                self.pool.publish(request)
                if request.has_computed_prompt:
                    self._release_followers(request)
            if sequence.samples or request.ends_behind(sequence.end):
                advances.append(self._advance(request, token_id))
        self._limbo.commit(self._last_committed)
        return advances

    def _advance(self, request: Request, token_id: int) -> Advance:
        verdict = request.verdict(token_id)
        if verdict is None:
            return Advance(request.request_id, token_id)
        self.end(request.request_id)
        return Advance(request.request_id, token_id, *verdict)

    def _serve_urgent(self, step: StepDraft) -> None:
        """Plan first what must be computed whole and did not fit behind the others."""
        request, self._urgent = self._urgent, None
        if request is None:
            return
        if request.is_running:
            self._plan_running(request, step)
        elif step.num_slots < self.limits.max_num_seqs:
            self._admit(request, step)

    def _running_order(self) -> list[Request]:
        """Single tokens first, then chunks, last those who need a slot; each by seniority."""

        def turn(request: Request) -> int:
            return (0 if request.is_decoding else 1) if request.has_slot else 2

        return sorted(self._running, key=turn)

    def _plan_running(self, request: Request, step: StepDraft) -> None:
        # One before it in this very step may have preempted it, or it was urgent.
        if not request.is_running or request.last_step == step.step_id:
            return
        if request.is_exhausted or not step.budget:
            return
        # A step knows the tokens of the one before it alone, which may have left the request out.
        is_late = request.last_step != step.step_id - 1
        if request.num_pending and (request.awaits_tokens or is_late):
            return
        if not request.has_slot and step.num_slots >= self.limits.max_num_seqs:
            return
        start = request.num_scheduled
        wanted = end = self._chunk_end(request, start, step.budget)
        if wanted > start:
            end = self._fit_blocks(request, start, wanted, step)
        request.lacks_blocks = end <= start < wanted
        if end > start:
            self._take(request, start, end, step)
        elif step.is_short_of_blocks and request.has_slot:
            # A senior without a slot may be the one who can make room.
            request.has_slot = False
            step.num_slots -= 1

    def _plan_waiting(self, step: StepDraft) -> None:
        """Start waiting requests by seniority, until one of them holds up those behind it.

        A request with media does not pass another whose next image has its pixels: running ones
        are encoded for first, so that it could be passed for ever. Where more rows are missed than
        are asked for at a time, one looks a little further for those who miss none. Text passes.
        """
        most = self.limits.max_num_seqs
        if not step.budget or step.num_slots >= most:
            return
        num_rows, num_passed, media = step.num_parked_rows, 0, list(self._waiting.media)
        for request in take_turns(media, list(self._waiting.text)):
            if not step.budget or step.num_slots >= most or self._urgent is not None:
                return  # what is urgent has to find a slot in the next step
            if num_rows > self.limits.max_media_rows and self.media.awaited(request):
                num_passed += 1
                if num_passed == most:
                    media.clear()
                continue
            if not self._admit(request, step):
                return
            missing = self.media.awaited(request)
            if missing is not None:
                num_rows += missing.span.num_rows
                if not (request.is_running or request.encoder) and self.media.has_pixels(missing):
                    media.clear()

    def _admit(self, request: Request, step: StepDraft) -> bool:
        """Start a waiting request if that gives it tokens now. False: nobody behind it may pass.

        Only a shortage of blocks holds up those behind, and only for a request whose next image,
        if it has one, is encoded; all others are skipped. A request that lacks no rows starts when
        the whole of it fits; one that does, when its first chunk fits. What cross-attention reads
        has to be encoded, or its keys and values to be there.
        """
        if request.num_pending:
            return True
        cross = self.pool.find_cross(request)
        request.finds_cross = cross is not None
        if cross is None and not self._may_write_cross(request, step):
            return True
        hit = self._find_prefix(request)
        start = request.hit_estimate = self.pool.hit_length(request, hit)
        missing = self.media.first_missing(request, start, request.num_tokens)
        if (
            missing
            and missing[1].key in request.taken_back
            and not self.media.has_pixels(missing[1])
        ):
            return True
        end = self._chunk_end(request, start, step.budget)
        if end <= start:
            return True
        found = hit + (cross or [])
        for blocks in found:
            self.pool.reference(blocks)
        goal = request.num_tokens if missing is None else end
        is_stored = start < len(hit[0]) * self.limits.block_size
        num_new = self.pool.blocks_for(goal + is_stored) * len(hit) - sum(map(len, hit))
        num_cross = self.pool.blocks_for(request.num_encoder_rows)
        if cross is None:
            num_new += num_cross * self.limits.num_cross_groups
        num_states = self.states.needed(request, start)
        self._make_room(num_new, step, None, num_states)
        if num_new > self.pool.num_free or num_states > self.states.num_free:
            for blocks in found:
                self.pool.release(blocks)
            return missing is not None and missing[1] is request.open_items(start)[0]
        source = self.states.start(request, start)
        self._start(request, hit, start)
        if cross is None:
            groups = range(self.limits.num_cross_groups)
            request.cross_tables = [self.pool.allocate(num_cross) for _ in groups]
            self.pool.publish_cross(request)
            step.num_new_rows += request.num_encoder_rows
        else:
            request.cross_tables = cross
        self._take(request, start, end, step, request.encoder if cross is None else None, source)
        return True

    def _find_prefix(self, request: Request) -> list[list[int]]:
        """The blocks that a request can start behind, one table per group."""
        return self.states.cut(request, self.pool.find_prefix(request))

    def _may_write_cross(self, request: Request, step: StepDraft) -> bool:
        """Return whether the encoder's output is there and fits the step beside others."""
        num_rows = step.num_new_rows + request.num_encoder_rows
        fits = num_rows <= self.limits.max_num_encoder_input_tokens or not step.num_new_rows
        return fits and self.media.is_encoded(request.encoder)

    def _is_live(self, request: Request) -> bool:
        return self._live.get(request.request_id) is request

    def _release_followers(self, leader: Request) -> None:
        """The prompt that they share is computed, or will not be: they may start."""
        if leader.followers:
            num_cached = leader.num_published * self.limits.block_size
            self._waiting.add_followers(leader, num_cached, self.pool.find_cross(leader))

    def _start(self, request: Request, hit: list[list[int]], start: int) -> None:
        self._waiting.remove(request)
        insert(self._running, request)
        request.block_tables = hit
        request.num_scheduled = request.num_computed = start
        request.num_published = len(hit[0])
        self.counters["prefix_query_tokens"] += request.num_tokens
        self.counters["prefix_hit_tokens"] += start
        if request.epoch == 0:
            request.num_cached_tokens = start

    def _take(
        self,
        request: Request,
        start: int,
        end: int,
        step: StepDraft,
        encoder: Item | None = None,
        source: int | None = None,
    ) -> None:
        """Put positions [start, end) into the step: blocks, encoder references, counters.

        `encoder`: the step writes the keys and values that cross-attention reads, too. `source`:
        the snapshot that it begins with.
        """
        is_stored = start < request.num_published * self.limits.block_size
        for table in request.block_tables:
            table += self.pool.allocate(self.pool.blocks_for(end + is_stored) - len(table))
        shared_end = self.pool.shareable(request, end)
        snapshots = self.states.plan_snapshots(request, start, shared_end)
        sequence = plan_sequence(
            request,
            start,
            end,
            is_stored=is_stored,
            encoder=encoder,
            source=source,
            snapshots=snapshots,
        )
        for key in sequence.row_keys:
            self.media.cache.reference(key)
            self.counters["encoder_hits"] += request.is_first_hit(key)
        step.sequences.append(sequence)
        step.requests.append(request)
        step.budget -= end - start
        step.num_slots += not request.has_slot
        request.has_slot = True
        request.num_scheduled = end
        request.num_pending += sequence.samples
        request.last_step = step.step_id

    # ---- where a chunk ends

    def _chunk_end(self, request: Request, start: int, budget: int) -> int:
        """The end of the chunk from `start`: by tokens there are, budget, rows, whole ranges."""
        end = min(start + budget, request.num_tokens)
        missing = self.media.first_missing(request, start, end)
        if missing is not None:
            return request.cut_before_missing(start, missing[0], self.limits.block_size)
        whole = request.cut_before_whole(start, end)
        if whole == start and self._urgent is None:
            self._urgent = request
        return whole

    # ---- blocks

    def _fit_blocks(self, request: Request, start: int, end: int, step: StepDraft) -> int:
        """Shorten [start, end) to the blocks that there are, after taking from juniors."""
        groups, held = len(request.block_tables), len(request.block_tables[0])
        needed = (self.pool.blocks_for(end) - held) * groups
        self._make_room(needed, step, request)
        if needed <= self.pool.num_free:
            return end
        step.is_short_of_blocks = True
        limit = (held + self.pool.num_free // groups) * self.limits.block_size
        return max(start, request.cut_before_whole(start, min(end, limit)))

    def _make_room(
        self, needed: int, step: StepDraft, senior: Request | None, num_states: int = 0
    ) -> None:
        """Preempt until `needed` blocks, and so many places of states, are free, or will be when
        the steps in flight commit.

        First those who wait for pixels (once for each item, so that they get on in the end), then,
        if a running request asks, its juniors; the newest of the lowest priority first.
        """
        if needed <= self.pool.num_free and num_states <= self.states.num_free:
            return
        for victim in self._victims(step, senior):
            if needed <= self._limbo.num_blocks and num_states <= self._limbo.num_states:
                return
            step.num_slots -= victim.has_slot
            self._preempt(victim)

    def _victims(self, step: StepDraft, senior: Request | None) -> list[Request]:
        others = [
            request
            for request in reversed(self._running)
            if request is not senior and request.last_step != step.step_id
        ]
        first = [r for r in others if self.media.unseen_blocker(r) not in {None, *r.taken_back}]
        if senior is None:
            return first
        return first + [r for r in others if r.order > senior.order and r not in first]

    def _preempt(self, request: Request) -> None:
        """Take all blocks back; the request waits again and recomputes."""
        unseen = self.media.unseen_blocker(request)
        if unseen is not None:
            request.taken_back.add(unseen)
        remove(self._running, request)
        self._waiting.add(request)
        self._release_blocks(request)
        request.block_tables, request.cross_tables = [], []
        request.state = None
        request.num_scheduled = request.num_computed = request.num_published = 0
        request.hit_estimate = 0
        request.has_slot = request.lacks_blocks = False
        request.epoch += 1
        self.counters["preemptions"] += 1

    def _release_blocks(self, request: Request) -> None:
        tables = request.block_tables + request.cross_tables
        blocks = [block for table in tables for block in table]
        states = [] if request.state is None else [request.state]
        is_in_flight = request.last_step > self._last_committed
        self._limbo.let_go(blocks, states, self._num_steps - 1 if is_in_flight else None)
