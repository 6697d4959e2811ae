"""A hand-cranked world around the pure core: a fake device that notices every wrong read.

KV content at a position is a hash of everything it may depend on, stored under (block, offset), so
that a block reused too early, a wrong prefix hit or a missing encoder row shows as a wrong hash.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field

from aioengine.core.media_scheduler import BATCHES_AHEAD
from aioengine.core.plan import UNSAMPLED, EncodePlan, Limits, SequencePlan, StepPlan
from aioengine.core.request import Item, Request, StopRule
from aioengine.core.scheduler import Scheduler
from aioengine.types import FinishReason, Span

VOCABULARY = 11
EOS = 10
PLACEHOLDER = 9


def digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


@dataclass(frozen=True)
class Image:
    key: str
    length: int
    embed_runs: tuple[tuple[int, int], ...]
    num_bytes: int
    bidirectional: bool = False
    num_answer_rows: int = 0
    """For tokens behind a prompt that ends with it."""


IMAGES = (
    Image("a", 3, ((0, 3),), 3),
    Image("b", 5, ((0, 2), (3, 4)), 3),
    Image("c", 4, ((1, 4),), 3),
    Image("d", 2, ((0, 2),), 2),
    Image("e", 3, ((0, 3),), 3, bidirectional=True),
    Image("f", 2, ((0, 2),), 3, num_answer_rows=4),
    Image("g", 3, ((0, 1), (2, 3)), 2, num_answer_rows=7),
)


CLIPS = (
    Item("p", "audio", Span(0, 5), 3),
    Item("q", "audio", Span(0, 8), 2),
    Item("r", "audio", Span(0, 3), 3),
)
"""What encoders are given. Some are as long as two blocks are."""


def make_request(
    name: str,
    parts: list[int | Image],
    *,
    max_tokens: int = 3,
    eos: bool = True,
    **options: object,
) -> Request:
    """A request whose prompt is made of token ids and images; `eos`: whether EOS ends it."""
    tokens: list[int] = []
    items, bidirectional = [], []
    for number, part in enumerate(parts):
        if isinstance(part, Image):
            span = Span(len(tokens), part.length, part.embed_runs)
            if part.num_answer_rows and number == len(parts) - 1:
                *runs, (start, stop) = part.embed_runs
                runs.append((start, stop + part.num_answer_rows))
                span = Span(len(tokens), part.length + part.num_answer_rows, tuple(runs))
            items.append(Item(part.key, "image", span, part.num_bytes))
            if part.bidirectional:
                bidirectional.append((span.offset, span.end))
            tokens += [PLACEHOLDER] * part.length
        else:
            tokens.append(part)
    return Request(
        request_id=name,
        prompt_token_ids=tuple(tokens),
        items=tuple(items),
        bidirectional=tuple(bidirectional),
        stop=StopRule(max_tokens, eos_token_ids=frozenset({EOS} if eos else ())),
        **options,  # type: ignore[arg-type]
    )


def chain(request: Request, token_ids: list[int]) -> list[str]:
    """What the KV cache must hold at each position of the request, computed in one go."""
    contents: list[object] = list(token_ids)
    for item in request.items:
        for position, row, count in item.span.row_runs(0, len(token_ids)):
            for i in range(count):
                contents[position + i] = (item.key, row + i)
    root = "" if request.encoder is None else request.encoder.key
    states: list[str] = []
    for position, content in enumerate(contents):
        whole = [(lo, hi) for lo, hi in request.bidirectional if lo <= position < hi]
        if whole:
            lo, hi = whole[0]
            before = states[lo - 1] if lo else root
            states.append(digest(before, contents[lo:hi], position - lo))
        else:
            states.append(digest(states[-1] if states else root, content))
    return states


def sample(state: str) -> int:
    return int(state, 16) % VOCABULARY


def expected_output(request: Request) -> tuple[list[int], FinishReason]:
    """The tokens that the request must get, whatever else goes on."""
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    if request.pooling is not None:
        return [UNSAMPLED], FinishReason.STOP
    while True:
        token = sample(chain(request, tokens)[-1])
        output.append(token)
        tokens.append(token)
        verdict = request.stop.check(len(output), token)
        if verdict is not None:
            return output, verdict[0]


@dataclass
class World:
    """The scheduler, a device and a media pipeline, all moved by hand."""

    limits: Limits
    scheduler: Scheduler = field(init=False)
    kv: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)
    """(block, row) -> the group that wrote last, and what."""
    states: dict[int, str] = field(default_factory=dict)
    """Place of a state -> the chain's last link there, "" of nothing."""
    rows: set[str] = field(default_factory=set)
    requests: dict[str, Request] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    endings: dict[str, str] = field(default_factory=dict)
    steps: list[StepPlan] = field(default_factory=list)
    encodes: list[EncodePlan] = field(default_factory=list)
    decoding: list[str] = field(default_factory=list)
    last_token: dict[str, int] = field(default_factory=dict)
    made: dict[str, dict[int, int]] = field(default_factory=dict)  # output tokens, by index
    pooled: dict[str, list[str]] = field(default_factory=dict)  # states, without a token
    leaders: dict[str, Request] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)

    # ---- what a caller does

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)
        self.requests[request.request_id] = request
        if request.leader is not None:
            self.leaders[request.request_id] = request.leader
        self.outputs[request.request_id] = []

    def end(self, name: str, ending: str) -> None:
        assert name not in self.endings, "ended twice"
        self.endings[name] = ending
        self.scheduler.end(name)

    @property
    def live(self) -> list[str]:
        return [name for name in self.requests if name not in self.endings]

    # ---- what the shell does

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.check_plan(plan)
            before = {s.request_id for s in self.steps[-1].sequences} if self.steps else set()
            late = {s.request_id for s in plan.sequences if s.token_ids[-1] == UNSAMPLED}
            assert late <= before, "a step knows the tokens of the one before it alone"
            self.steps.append(plan)
        self.check()
        return plan

    def plan_media(self) -> None:
        ranks = self.needs()
        media = self.scheduler.schedule_media()
        self.decoding += media.decode
        if media.encode is not None:
            self.check_evictions(media.encode, ranks)
            self.rows -= set(media.encode.evicted)
            self.encodes.append(media.encode)
        self.check()

    def commit(self) -> None:
        plan = self.steps.pop(0)
        for s in plan.sequences:  # a layer writes everybody's keys before anybody reads
            self.write_cross(s)
        self.begin_states(plan)
        sampled = [self.run(s) for s in plan.sequences]
        tokens = [token for token, s in zip(sampled, plan.sequences, strict=True) if s.samples]
        for advance in self.scheduler.commit(plan, tokens):
            assert advance.request_id not in self.endings, "a token after the end"
            self.outputs[advance.request_id].append(advance.token_id)
            if advance.finish_reason is not None:
                self.endings[advance.request_id] = str(advance.finish_reason)
        self.note_leaders()
        self.check()

    def pixels(self, key: str) -> None:
        self.decoding.remove(key)
        self.scheduler.media.media_ready(key)
        self.check()

    def pixels_fail(self, key: str) -> None:
        self.decoding.remove(key)
        self.fail_users(key)

    def encoded(self) -> None:
        for key in self.encodes.pop(0).keys:
            self.rows.add(key)
            self.scheduler.media.encoded(key)
        self.check()

    def encode_fails(self) -> None:
        for key in self.encodes.pop(0).keys:
            self.scheduler.media.encoding_failed(key)
            self.fail_users(key)
        self.check()

    def fail_users(self, key: str) -> None:
        for name in self.live:
            if any(item.key == key for item in self.requests[name].all_items):
                self.end(name, "failed")

    def forget_unneeded(self) -> None:
        """The last waiter's leaving cancels a job."""
        self.decoding = [key for key in self.decoding if self.scheduler.media.is_needed(key)]

    # ---- the device

    def write_cross(self, sequence: SequencePlan) -> None:
        if sequence.encoder_key is None:
            return
        assert sequence.encoder_key in self.rows, "an encoder's output is read that is not there"
        for row in range(sequence.num_encoder_rows):
            for group, place in self.cross_slots(sequence, row):
                self.kv[place] = group, digest(sequence.encoder_key, row)

    def check_cross(self, sequence: SequencePlan, request: Request) -> None:
        """What cross-attention reads is what the request's encoder has made."""
        if request.encoder is None:
            return
        assert len(sequence.cross_tables) == self.limits.num_cross_groups > 0
        assert sequence.num_encoder_rows == request.encoder.span.num_rows
        for row in range(sequence.num_encoder_rows):
            for group, place in self.cross_slots(sequence, row):
                assert self.kv[place] == (group, digest(request.encoder.key, row)), "wrong cross KV"

    def begin_states(self, plan: StepPlan) -> None:
        """Zeros and copies come before a step's layers, all copies at once."""
        made = {
            s.state: "" if not s.start else self.states[s.state_source]
            for s in plan.sequences
            if s.state is not None and (not s.start or s.state_source is not None)
        }
        self.states |= made

    def run_state(self, sequence: SequencePlan, links: list[str]) -> None:
        """What lies in a request's place is the state before the chunk, and becomes that after."""
        assert (sequence.state is not None) == bool(self.limits.num_states)
        if sequence.state is None:
            return
        if sequence.request_id in self.live:
            before = links[sequence.start - 1] if sequence.start else ""
            assert self.states[sequence.state] == before, "wrong state"
        ends = [end for end, _ in sequence.snapshots]
        assert ends == sorted({*ends}) and all(sequence.start < e <= sequence.end for e in ends)
        for end, place in (*sequence.snapshots, (sequence.end, sequence.state)):
            self.states[place] = links[end - 1]

    def run(self, sequence: SequencePlan) -> int:
        request = self.requests[sequence.request_id]
        given = [
            self.last_token[sequence.request_id] if token == UNSAMPLED else token
            for token in sequence.token_ids
        ]
        tokens = list(request.tokens(0, sequence.start)) + given
        if UNSAMPLED in tokens[: sequence.start]:
            assert sequence.request_id not in self.live, "a chunk planned over two unknown tokens"
            # It has ended, and steps that were planned before that go on with what they sampled.
            made, first = self.made[sequence.request_id], len(request.prompt_token_ids)
            tokens = [
                made[position - first] if token == UNSAMPLED else token
                for position, token in enumerate(tokens)
            ]
        for row in sequence.rows:
            assert row.key in self.rows, "an encoder row is read that is not there"
        states = chain(request, tokens)
        self.run_state(sequence, states)
        if sequence.request_id in self.live:
            self.check_cross(sequence, request)
            for position in range(sequence.end if sequence.is_stored else sequence.start):
                for group, place in self.slots(sequence, position):
                    assert self.kv[place] == (group, states[position]), "wrong KV"
        for position in range(sequence.start, sequence.end):
            for group, place in self.slots(sequence, position + sequence.is_stored):
                self.kv[place] = group, "not read" if sequence.is_stored else states[position]
        if sequence.pooling is not None and sequence.request_id in self.live:
            assert not sequence.samples and not sequence.is_stored
            found = self.pooled.setdefault(f"{sequence.request_id} {sequence.epoch}", [])
            self.pooled[sequence.request_id] = found
            found += states[sequence.start : sequence.end]
        token = sample(states[sequence.end - 1])
        if sequence.samples:
            self.last_token[sequence.request_id] = token
            self.made.setdefault(sequence.request_id, {})[sequence.output_index] = token
        return token

    def slots(self, sequence: SequencePlan, position: int) -> list[tuple[int, tuple[int, int]]]:
        """Where the position lies, block and row, in each group."""
        size = self.limits.block_size
        return [
            (group, (table[position // size], position % size))
            for group, table in enumerate(sequence.block_tables)
        ]

    def cross_slots(self, sequence: SequencePlan, row: int) -> list[tuple[int, tuple[int, int]]]:
        """Where a row of the encoder's lies, in each group of cross-attention."""
        size = self.limits.block_size
        return [
            (group, (table[row // size], row % size))
            for group, table in enumerate(sequence.cross_tables, self.limits.num_groups)
        ]

    # ---- what must hold all the time

    def check(self) -> None:
        self.scheduler.pool.check()
        self.scheduler.states.check()
        self.scheduler.media.cache.check()
        cache = self.scheduler.media.cache
        total = cache.free_bytes + cache.evictable_bytes + cache.referenced_bytes
        assert total == self.limits.encoder_cache_bytes
        if not self.limits.enable_prefix_caching:
            self.check_strangers()

    def check_strangers(self) -> None:
        """Without a prefix cache no block is shared but by completions of one prompt."""
        owners: dict[int, Request] = {}
        for request in self.scheduler._running:
            leader = request.leader or request
            for block in itertools.chain(*request.block_tables, *request.cross_tables):
                assert owners.setdefault(block, leader) is leader

    def check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        assert len(plan.sequences) <= self.limits.max_num_seqs
        assert len({s.request_id for s in plan.sequences}) == len(plan.sequences)
        written = [s.num_encoder_rows for s in plan.sequences if s.encoder_key is not None]
        assert len(written) < 2 or sum(written) <= self.limits.max_num_encoder_input_tokens
        self.note_leaders()  # one that was preempted may find its whole prompt in the cache
        for s in plan.sequences:
            assert s.start < s.end == s.start + len(s.token_ids)
            request = self.requests[s.request_id]
            assert not (request.awaits_tokens and UNSAMPLED in s.token_ids)
            assert not s.is_stored or (s.samples and s.end == s.start + 1)
            assert not s.is_stored or s.state is None
            leader = self.leaders.get(s.request_id)
            if leader is not None and s.request_id not in self.begun:
                # The leader may have been preempted since.
                assert leader.request_id in self.endings or leader.request_id in self.shared
            self.begun.add(s.request_id)
            whole = list(request.bidirectional)
            if self.limits.disable_chunked_mm_input:
                num_prompt = len(request.prompt_token_ids)
                whole += [(i.span.offset, min(i.span.end, num_prompt)) for i in request.items]
            for low, high in whole:
                assert not low < s.end < high, "a range that must stay whole was cut"
            taken = {(r.key, r.row + i) for r in s.rows for i in range(r.count)}
            due = {
                (item.key, row + i)
                for item in request.items
                for _, row, count in item.span.row_runs(s.start, s.end)
                for i in range(count)
            }
            assert taken == due
        places = [s.state for s in plan.sequences if s.state is not None]
        places += [place for s in plan.sequences for _, place in s.snapshots]
        assert len(set(places)) == len(places), "a place of two states"
        num_slots = sum(request.has_slot for request in self.scheduler._running)
        assert num_slots <= self.limits.max_num_seqs

    def note_leaders(self) -> None:
        leaders = self.leaders.values()
        self.shared |= {leader.request_id for leader in leaders if leader.has_computed_prompt}

    def needs(self) -> dict[str, tuple[int, int]]:
        """Key -> how soon it is needed, written anew.

        (0, distance) for running requests, (1, place) for waiting ones, and (2, 0) for items behind
        one without pixels.
        """
        soonest: dict[str, tuple[int, int]] = {}
        media = self.scheduler.media
        most = BATCHES_AHEAD * self.limits.max_num_seqs
        waiting = enumerate(self.scheduler._waiting.media[:most])
        for kind, place, request in [
            *((0, 0, request) for request in self.scheduler._running),
            *((1, place, request) for place, request in waiting),
        ]:
            at = request.hit_estimate if kind else request.num_scheduled
            is_behind = False
            for item in request.all_items:
                if item is request.encoder:
                    if not kind or request.finds_cross:
                        continue
                elif item.span.last_row_position < at:
                    continue
                distance = max(0, self.needed_at(request, item) - at)
                mine = (kind, place if kind else distance)
                if request.lacks_blocks:
                    mine = (1, -1)
                if is_behind:
                    mine = (2, 0)
                soonest[item.key] = min(soonest.get(item.key, mine), mine)
                is_behind |= item.key not in media.cache and not media._decoded.get(item.key)
        return soonest

    def needed_at(self, request: Request, item: Item) -> int:
        if request.bidirectional or self.limits.disable_chunked_mm_input:
            for low, high in request.bidirectional:
                if low <= item.span.offset < high:
                    return low
            if self.limits.disable_chunked_mm_input:
                return item.span.offset
        return item.span.first_row_position

    def check_evictions(self, plan: EncodePlan, needs: dict[str, tuple[int, int]]) -> None:
        for victim in plan.evicted:
            assert needs.get(victim, (3, 0)) >= needs[plan.keys[0]], "evicted what is needed sooner"
