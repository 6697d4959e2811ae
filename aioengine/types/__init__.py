"""The nouns that every floor shares. Standard library only."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any, Generic, NamedTuple, TypeVar

from aioengine.types.messages import Message, Run, ToolCall, ToolCallDelta

__all__ = [
    "CompletionOutput",
    "Delta",
    "EmbeddingOutput",
    "Embeddings",
    "EngineState",
    "EngineStatistics",
    "FinishReason",
    "KVGroup",
    "Launched",
    "LoadProgress",
    "Logprob",
    "Message",
    "Prompt",
    "RequestOutput",
    "Run",
    "ScoreOutput",
    "Span",
    "StageStatistics",
    "Timings",
    "TokenLogprobs",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "lazy_exports",
    "read",
]

Result = TypeVar("Result")

SHOWN = 400
"""Characters of a text that a `repr` shows."""

OUTCOMES = ("finished", "aborted", "rejected", "failed")
"""Of requests that have ended."""


@dataclass(frozen=True, slots=True)
class Launched(Generic[Result]):
    """The result of a device's job, to be read once the device has done the job's work."""

    read: Callable[[], Result]


def read(result: Any) -> Any:
    """Return a job's result, read where it is a `Launched`."""
    return result.read() if isinstance(result, Launched) else result


@dataclass(frozen=True)
class Span:
    """Place of one media item in a prompt: positions [offset, offset + length).

    It may go on behind the prompt, over tokens of the answer. `embed_runs` are the half-open
    ranges, relative to `offset`, ascending and disjoint, whose positions take encoder rows; the
    others are ordinary tokens (separators, newlines). Row k of the encoder's output belongs to the
    k-th position that the runs cover.
    """

    offset: int
    length: int
    embed_runs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.embed_runs:
            object.__setattr__(self, "embed_runs", ((0, self.length),))

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.offset + self.length

    @cached_property
    def num_rows(self) -> int:
        """Return how many encoder rows the span takes."""
        return sum(stop - start for start, stop in self.embed_runs)

    @cached_property
    def first_row_position(self) -> int:
        """The first prompt position that takes an encoder row."""
        return self.offset + self.embed_runs[0][0]

    @cached_property
    def last_row_position(self) -> int:
        """The last prompt position that takes an encoder row."""
        return self.offset + self.embed_runs[-1][1] - 1

    def row_runs(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """The rows that prompt positions [start, end) take, as runs.

        Returns `(position, row, count)` triples: `count` rows from `row` on go to `count` positions
        from `position` on.
        """
        runs = []
        row = 0
        for run_start, run_stop in self.embed_runs:
            low = max(start, self.offset + run_start)
            high = min(end, self.offset + run_stop)
            if low < high:
                runs.append((low, row + low - self.offset - run_start, high - low))
            row += run_stop - run_start
        return runs


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV blocks have one shape and one life: they share a request's block table.

    `kind`: "self" (grows with the tokens) or "cross" (written once per encoder input). `window`:
    how many past tokens a query sees, None for all. `num_layers`: layers in the group. `chunk`: a
    query sees no token before the last multiple of this position; None for no such bound.
    """

    kind: str
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    num_layers: int
    chunk: int | None = None

    def block_bytes(self, block_size: int, row_bytes: Callable[[int], int]) -> int:
        """Bytes of one block of `block_size` tokens over all layers of the group.

        `row_bytes`: of a key or value of so many numbers.
        """
        row = self.num_kv_heads * (row_bytes(self.key_dim) + row_bytes(self.value_dim))
        return self.num_layers * block_size * row


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Precomputed encoder output, given in place of a media item.

    `rows`: a dense, finite float array `[num_rows, hidden_size]` (torch tensor or numpy array);
    `extra`: further per-item fields that a family needs (grid sizes and the like).
    """

    rows: Any
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __init__(self, rows: Any, **extra: Any) -> None:
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "extra", extra)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Input of a request, spelt out. Exactly one of `text`, `token_ids`, `messages`, `embeds`.

    `embeds`: a dense, finite float tensor or array `[tokens, width]`, in place of the rows that
    token ids have in the embedding table; what transformers takes as `inputs_embeds`.

    `media`: modality -> one item, or any iterable of them, in the order of their placeholders.
    `uuids`: modality -> the caller's own names for these items. `cache_salt`: nothing cached is
    shared across different salts.

    Beside `messages`: `tools`, functions or schemas in OpenAI's form; `tool_choice`, "auto",
    "none", "required" or the name of one; `chat_template_kwargs`, what the model's chat template
    asks for (as `{"enable_thinking": False}`).
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any] | Message] | None = None
    media: Mapping[str, Any] = field(default_factory=dict)
    encoder_text: str | None = None
    encoder_token_ids: Sequence[int] | None = None
    decoder_text: str | None = None
    decoder_token_ids: Sequence[int] | None = None
    uuids: Mapping[str, str | Sequence[str | None]] = field(default_factory=dict)
    cache_salt: str | None = None
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    embeds: Any = None
    tools: Sequence[Any] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class FinishReason(enum.StrEnum):
    """The reason a completion ended. A request that is aborted raises RequestAbortedError."""

    STOP = "stop"
    LENGTH = "length"


class EngineState(enum.StrEnum):
    """State of an engine. One that drains takes nothing new; one that is dead has failed."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    CLOSED = "closed"
    DEAD = "dead"


class Logprob(NamedTuple):
    """A token's natural log probability, and its rank: 1 for the most probable."""

    logprob: float
    rank: int


TokenLogprobs = Mapping[int, Logprob]
"""Of one position: the token that stands there first, then the most probable ones."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Item of a stream: the new text and tokens of one completion since the last delta.

    `logprobs`: one for each of `token_ids`, where they were asked for. Of an answer to messages:
    what it adds to each part of the `Message`, and `runs`, which tell its order.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    runs: tuple[Run, ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished completion.

    `logprobs`: one for each of `token_ids`, where they were asked for; `stop_reason`: the stop
    string or token id that ended it, if any. `message`: of an answer to messages, else None; `runs`
    tell its order.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    message: Message | None = None
    runs: tuple[Run, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request. `cached_tokens`: prompt tokens served from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    encoder_items: int
    encoder_cached_items: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since submission at which each stage was complete; None where it did not happen."""

    fetched: float | None = None
    decoded: float | None = None
    processed: float | None = None
    admitted: float | None = None
    encoded: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True, slots=True, repr=False)
class RequestOutput:
    """A finished request. `.text` and `.token_ids` are those of the first completion.

    `prompt_logprobs`: one for each of `prompt_token_ids`, where they were asked for; the first
    token has none, nor has a position that takes encoder rows. `vector`: pooled hidden states, or a
    classifier's scores, of a request that ends with its prompt; None of all others.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    usage: Usage
    timings: Timings
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    vector: Any = None

    def __repr__(self) -> str:
        """Show what a person looks for, and no thousands of token ids."""
        first, usage = self.outputs[0], self.usage
        text = first.text if len(first.text) <= SHOWN else f"{first.text[:SHOWN]}..."
        more = f", {len(self.outputs)} completions" if len(self.outputs) > 1 else ""
        return (
            f"<RequestOutput {text!r} ({first.finish_reason}){more}, {usage.prompt_tokens} prompt "
            f"tokens, {usage.completion_tokens} tokens out>"
        )

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first completion's token ids."""
        return self.outputs[0].token_ids

    @property
    def message(self) -> Message | None:
        """The first completion's message; None where the prompt had none."""
        return self.outputs[0].message


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """A prompt's embedding: `vector` float32 [width], a numpy array."""

    request_id: str
    vector: Any
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """Scores of documents for a query, in their order. `usages`: of each request that was made."""

    scores: tuple[float, ...]
    usages: tuple[Usage, ...]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of an engine's start: `done` of `total` parts of one stage.

    The stages, in order: "libraries" (torch and transformers are imported), "processor" (the
    checkpoint's settings, its tokenizer and HF processor), "weights" (parts are parameters or
    tensors), "memory" (what a step takes is measured, and the caches are laid out), "workers"
    (threads or processes for media begin). A stage whose parts are not known, or not yet, is one
    part; `done` never falls within a stage.
    """

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """Count of a stage's runs, and their seconds in all and at most."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """A snapshot of an engine's counters.

    `kv_blocks_free` is what a new request could get: unused blocks plus cached, unreferenced ones;
    at rest it equals `kv_blocks_total`. `states_...` are the same of places for what layers keep of
    a request beside keys and values; most models have none. Bytes are bytes; tokens are prompt
    tokens. `running` and
    `waiting` count completions (a request of `n` has so many, once it is laid out), `finished`,
    `aborted`, `rejected` and `failed` count requests: `rejected` ended with an InvalidRequestError,
    the caller's mistake, `failed` with the engine's. What is refused before its stream is made is
    not counted. `encoder_cache_waits` counts items for which there was no room at first.
    `model_impl`: "native" where the architecture has a class here, "transformers" where it is run
    as any other of its kind. `device` and `dtype` are the model's, as "cpu" and "bfloat16".
    """

    model_impl: str
    device: str = ""
    dtype: str = ""
    running: int
    waiting: int
    finished: int
    aborted: int
    rejected: int
    failed: int
    preemptions: int
    kv_blocks_total: int
    kv_blocks_free: int
    kv_blocks_cached: int
    states_total: int
    states_free: int
    states_cached: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    encoder_cache_capacity_bytes: int
    encoder_cache_used_bytes: int
    encoder_cache_entries: int
    encoder_cache_referenced: int
    encoder_cache_hits: int
    encoder_cache_misses: int
    encoder_cache_evictions: int
    encoder_cache_waits: int
    encoder_items_run: int
    processor_cache_capacity_bytes: int
    processor_cache_used_bytes: int
    processor_cache_entries: int
    processor_cache_hits: int
    processor_cache_misses: int
    processor_cache_evictions: int
    stages: Mapping[str, StageStatistics]


def lazy_exports(
    package: str, exports: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Names of a package that load on first use, and its `__getattr__` and `__dir__`.

    `exports`: module -> the names in it, with spaces between them; a module that is exported
    itself is its own home.
    """
    homes = {name: home for home, names in exports.items() for name in names.split()}

    def load(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(home)
        value = module if home == f"{package}.{name}" else getattr(module, name)
        setattr(import_module(package), name, value)
        return value

    return [*homes], load, lambda: sorted(import_module(package).__all__)
