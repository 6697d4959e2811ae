"""Plans of steps from the scheduler to the device, and their results: immutable data, no behaviour.

A plan is a snapshot: the launch thread may read it while the event loop goes on changing requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aioengine.types import FinishReason, TokenLogprobs

__all__ = [
    "UNSAMPLED",
    "Advance",
    "EncodePlan",
    "Limits",
    "MediaPlan",
    "RowSlice",
    "SequencePlan",
    "StepPlan",
    "StepResult",
]

UNSAMPLED = -1
"""Stands for an input token that a step still in flight samples; the device fills it in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resources to share. `max_model_len` tokens must fit the pool's blocks, beside an encoder
    input of `max_encoder_len` rows where there are cross-attention groups.

    `num_states`: places for the states of layers that keep one, 0 where none does: more than
    `max_num_seqs`, the rest for snapshots. These are `state_interval` tokens apart, whole blocks.

    `max_encode_items` bounds one encoder batch; `max_media_rows` bounds, in encoder rows, the media
    that are being decoded or lie decoded and not yet encoded.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_groups: int = 1
    num_cross_groups: int = 0
    num_states: int = 0
    state_interval: int = 1
    max_encoder_len: int = 0
    encoder_cache_bytes: int = 0
    max_num_encoder_input_tokens: int = 0
    max_encode_items: int = 1
    max_media_rows: int = 1 << 16
    disable_chunked_mm_input: bool = False
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class RowSlice:
    """`count` encoder rows of `key`, from `row` on, go to positions from `position` on.

    `position` counts from the start of the sequence's chunk.
    """

    key: str
    position: int
    row: int
    count: int


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One request's part of a step: compute its token positions [start, end).

    `token_ids` are the inputs at these positions (UNSAMPLED where the device knows better);
    `block_tables` has one tuple of block ids per KV group and covers [0, end). If `samples`, the
    last position's logits give output token number `output_index`. `sampling`, `pooling` and
    `inputs` are opaque to the core; one with `pooling` samples nothing.

    `is_stored`: the cache holds the one token of this part already, in a block that others may
    read, and only its logits are wanted. What the step writes of it goes where the next token's
    keys and values will, and `block_tables` covers [0, end].

    `cross_tables`: as many more for the groups of cross-attention, which cover the encoder's
    `num_encoder_rows`; `encoder_key`: this step writes them, of these rows.

    `state`: the place of the state of layers that keep one. It is all zeros where `start` is 0;
    else it is what the step before has left, or a copy of `state_source`. `snapshots`: (end,
    place), in order: the state after so many tokens goes there too.
    """

    request_id: str
    epoch: int
    start: int
    end: int
    token_ids: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    rows: tuple[RowSlice, ...]
    samples: bool
    output_index: int
    is_stored: bool = False
    sampling: Any = None
    pooling: Any = None
    inputs: Any = None
    cross_tables: tuple[tuple[int, ...], ...] = ()
    num_encoder_rows: int = 0
    encoder_key: str | None = None
    state: int | None = None
    state_source: int | None = None
    snapshots: tuple[tuple[int, int], ...] = ()

    @property
    def row_keys(self) -> set[str]:
        """The encoder's outputs that this step reads."""
        keys = {row.key for row in self.rows}
        return keys if self.encoder_key is None else keys | {self.encoder_key}


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass of the decoder over the chunks of several requests."""

    step_id: int
    sequences: tuple[SequencePlan, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(sequence.end - sequence.start for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step. `token_ids`: one for each sequence that samples, in the plan's order.

    `failures`: requests that cannot go on; their tokens mean nothing.

    Log probabilities, where they were asked for, by request: of the sampled token in `logprobs`; in
    `prompt_logprobs` of the prompt's tokens, from the position given on, as `ScoreColumns`.

    `processed`: begin and end of the callers' own logits processors, where there were such.
    `pooled`: what this step adds to the vector of a request that asked for one.
    """

    token_ids: Sequence[int]
    failures: Mapping[str, Exception] = field(default_factory=dict)
    logprobs: Mapping[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, tuple[int, Any]] = field(default_factory=dict)
    processed: tuple[float, float] | None = None
    pooled: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """One run of the encoder over whole items of one modality.

    `evicted` are the keys whose rows make room: they are dropped before the run. `patience`: so
    many steps of the decoder, in a row, may go before it where both run on one queue.
    """

    modality: str
    keys: tuple[str, ...]
    num_rows: tuple[int, ...]
    evicted: tuple[str, ...]
    patience: int = 1


@dataclass(frozen=True, slots=True)
class MediaPlan:
    """Media to decode and process now, soonest needed first, and what to encode."""

    decode: tuple[str, ...]
    encode: EncodePlan | None


@dataclass(frozen=True, slots=True)
class Advance:
    """A sampled token that a commit accepted, and whether it was the request's last.

    UNSAMPLED of a request that ends with its prompt.
    """

    request_id: str
    token_id: int
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
