"""A request as the scheduler sees it: counters, media items and stop rules.

There is no phase: tokens are *scheduled* (some planned step computes them), then *computed* (that
step has committed), and both counters chase `num_tokens`. A token that a step in flight will sample
counts as a token already (`num_pending`), so that the next step can be planned before it is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aioengine.core.plan import UNSAMPLED, RowSlice
from aioengine.types import FinishReason, Span

__all__ = ["Item", "KnownPrefix", "Request", "StopRule"]


@dataclass(frozen=True, slots=True)
class Item:
    """One media item of a prompt. `key` is its content's identity, `num_bytes` its rows' size.

    `span` may go on behind the prompt: then the answer's tokens take rows too, and the answer ends
    with them. `name` is what the caller calls it, for errors.
    """

    key: str
    modality: str
    span: Span
    num_bytes: int
    name: str = "media"


@dataclass(frozen=True, slots=True)
class StopRule:
    """Conditions under which a request ends by itself; stop strings are looked for where there is
    text."""

    max_tokens: int
    reason_at_most: FinishReason = FinishReason.LENGTH
    """Why a request ends that has got `max_tokens`."""
    min_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()

    def check(self, num_output: int, token_id: int) -> tuple[FinishReason, int | None] | None:
        """Return whether `token_id`, the `num_output`-th output token, ends the request, and by
        what."""
        if num_output >= self.min_tokens:
            if token_id in self.eos_token_ids:
                return FinishReason.STOP, None
            if token_id in self.stop_token_ids:
                return FinishReason.STOP, token_id
        if num_output >= self.max_tokens:
            return self.reason_at_most, None
        return None


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """Cached blocks that a search found, one table per group, when so many blocks had been cached
    and forgotten."""

    num_forgotten: int
    num_published: int
    tables: tuple[list[int], ...]


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One live request. Only the scheduler changes it.

    `bidirectional` are the position ranges whose tokens see each other both ways: they are computed
    whole, and their KV depends on all of their content.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    stop: StopRule
    items: tuple[Item, ...] = ()
    encoder: Item | None = None
    """What cross-attention reads: its span counts the encoder's rows, not the prompt's tokens.
    Beside it there are no `items`, so that a step never needs two of the encoder's outputs before
    the request can start."""
    bidirectional: tuple[tuple[int, int], ...] = ()
    starts_outside: bool = False
    """A cached prefix does not end inside such a range, of which a window hides the begin."""
    priority: int = 0
    cache_salt: str | None = None
    private_salt: bytes | None = None
    """What the completions of one prompt alone have in common, where others find no blocks."""
    reads_prefix: bool = True
    """The seam for requests that must compute every token (log probabilities of the prompt)."""
    sampling: Any = None
    pooling: Any = None
    """What becomes of its hidden states: it samples no token then, and ends with its prompt."""
    inputs: Any = None
    """What the model has to know of the prompt as a whole."""
    awaits_tokens: bool = False
    """Each token has to be known before the next step is planned (a grammar looks at it, a
    bound on reasoning, or a logits processor of the caller's own)."""
    has_form: bool = False
    """Its output has a form, a grammar's, of which more may be wanted than there is room for."""
    leader: Request | None = None
    """Computes the same prompt; this one waits until it has, to find the prompt in the cache."""
    followers: dict[str, Request] = field(default_factory=dict)
    """Those that wait for this one's prompt now."""
    num_sharing: int = 0
    """Live requests of its prompt: itself, and those that it leads or has led."""

    whole_ranges: tuple[tuple[int, int], ...] = ()
    """Position ranges that one step must compute whole."""
    arrival: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    num_scheduled: int = 0
    num_computed: int = 0
    num_pending: int = 0
    last_step: int = -1
    epoch: int = 0
    """Raised at preemption; a commit for an older epoch moves no counters."""
    block_tables: list[list[int]] = field(default_factory=list)
    cross_tables: list[list[int]] = field(default_factory=list)
    """Written once, by the step that starts the request, or by another of the same input."""
    cross_digests: list[bytes] = field(default_factory=list)
    finds_cross: bool = False
    """Whether the pool held the encoder input's keys and values when it was last asked."""
    state: int | None = None
    """The place of its layers' state, while it runs and they keep one."""
    num_shared: int = 0
    """Tokens whose blocks were cached when it was last asked, whether a snapshot ends them or
    not."""
    digests: list[bytes] = field(default_factory=list)
    num_published: int = 0
    known_prefix: KnownPrefix | None = None
    """The cached blocks found last."""
    hit_estimate: int = 0
    """Tokens that the prefix cache held when it was last asked."""
    num_cached_tokens: int = 0
    """Prompt tokens that the first admission found in the prefix cache."""
    encoded_keys: set[str] = field(default_factory=set)
    """Items that were encoded on this request's behalf."""
    seen_keys: set[str] = field(default_factory=set)
    has_slot: bool = False
    lacks_blocks: bool = False
    """Whether it found none for its next tokens, and may take none from others."""
    taken_back: set[str] = field(default_factory=set)
    """Items for whose pixels it waited when its blocks were taken; once for each."""

    @property
    def order(self) -> tuple[int, int]:
        """Seniority: the smaller goes first."""
        return (self.priority, self.arrival)

    @property
    def all_items(self) -> tuple[Item, ...]:
        """Media to encode, for the prompt or for cross-attention."""
        return self.items if self.encoder is None else (self.encoder, *self.items)

    @property
    def num_answer_rows(self) -> int:
        """Encoder rows behind the prompt, one for each token of the answer; 0 if it takes none."""
        end = max((item.span.end for item in self.items), default=0)
        return max(0, end - len(self.prompt_token_ids))

    @property
    def num_encoder_rows(self) -> int:
        """Rows that cross-attention reads."""
        return 0 if self.encoder is None else self.encoder.span.num_rows

    @property
    def is_running(self) -> bool:
        """Return whether it holds block tables (they may be empty of blocks)."""
        return bool(self.block_tables)

    @property
    def num_known(self) -> int:
        """Tokens whose ids are known on the host."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens there are, those in flight included."""
        return self.num_known + self.num_pending

    @property
    def num_output(self) -> int:
        """Output tokens there are, those in flight included."""
        return len(self.output_token_ids) + self.num_pending

    @property
    def is_exhausted(self) -> bool:
        """Return whether the steps in flight already compute the last that it may have."""
        if self.pooling is not None:
            return self.ends_behind(self.num_scheduled)
        return self.num_output >= self.stop.max_tokens

    @property
    def has_computed_prompt(self) -> bool:
        """Return whether the prompt's KV is there, for others to share."""
        return self.num_computed >= len(self.prompt_token_ids)

    @property
    def is_decoding(self) -> bool:
        """Return whether one token is all there is to compute."""
        return self.num_tokens - self.num_scheduled == 1

    def ends_behind(self, position: int) -> bool:
        """Return whether it ends once all positions before this one are computed."""
        return self.pooling is not None and position == len(self.prompt_token_ids)

    def verdict(self, token_id: int) -> tuple[FinishReason, int | None] | None:
        """Return whether it ends now, behind this output token if it has any, and by what."""
        if self.pooling is not None:
            return FinishReason.STOP, None
        return self.stop.check(len(self.output_token_ids), token_id)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """The input ids at positions [start, end)."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        known = self.prompt_token_ids[start:] + tuple(
            self.output_token_ids[max(0, start - num_prompt) : end - num_prompt]
        )
        return known + (UNSAMPLED,) * (end - start - len(known))

    def cut_before_whole(self, start: int, end: int) -> int:
        """The end of the chunk from `start` that does not end inside a whole range."""
        for low, high in self.whole_ranges:
            if low < end < high:
                return max(low, start)
        return end

    def cut_before_missing(self, start: int, position: int, least: int) -> int:
        """The end of the chunk from `start` before a row that is not there.

        Fewer than `least` tokens wait with it, as they are computed at the price of many, unless
        they take rows of another item, which may have to make room for the missing one's.
        """
        end = self.cut_before_whole(start, position)
        waits = end - start < least and not self.open_items(start)[0].span.row_runs(start, end)
        return start if waits else end

    def needed_at(self, item: Item) -> int:
        """The position that cannot be computed without the item's rows."""
        first = item.span.first_row_position
        return min((low for low, high in self.whole_ranges if low <= first < high), default=first)

    def is_first_hit(self, key: str) -> bool:
        """Return whether this is its first use of an item that was encoded for another; notes the
        use."""
        is_first = key not in self.seen_keys
        self.seen_keys.add(key)
        return is_first and key not in self.encoded_keys

    def row_slices(self, start: int, end: int) -> Iterator[RowSlice]:
        """The encoder rows that positions [start, end) take."""
        for item in self.open_items(start):
            if item.span.first_row_position >= end:
                return
            for position, row, count in item.span.row_runs(start, end):
                yield RowSlice(item.key, position - start, row, count)

    def open_items(self, position: int) -> Sequence[Item]:
        """The items that take rows at `position` or later, in prompt order."""
        if not self.items or self.items[-1].span.last_row_position < position:
            return ()  # the usual case: all images are behind
        for index, item in enumerate(self.items):
            if item.span.last_row_position >= position:
                return self.items[index:]
        return ()
