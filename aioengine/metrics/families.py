"""Every metric: its name, its meaning, its labels, and where its numbers come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from aioengine.instruments import PROCESSORS, STAGES
from aioengine.types import OUTCOMES, EngineState, EngineStatistics

__all__ = ["FIGURES", "HISTOGRAMS", "Figure", "Histogram", "Reading", "Values"]

VALUES = {"": ("",), "outcome": OUTCOMES, "stage": (*STAGES, PROCESSORS)}
"""Label of a histogram -> its values."""

IMPLS = ("native", "transformers")

SECONDS = tuple(m * s for s in (0.001, 0.01, 0.1, 1, 10, 100) for m in (1, 2.5, 5))
"""1 ms to 500 s: from a cached prompt on a small model to a long answer on a busy one. Three steps
to a factor of ten tell a quantile within a factor of 2.5, with few series."""
GAPS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5),
)
"""Dense from 10 to 200 ms, where a stream goes from instant to slower than one reads."""
LAGS = SECONDS[:12]
"""Up to 5 s: what holds a loop for longer is an outage, however long."""
TOKENS = tuple(1 << power for power in range(18))
"""1 to 131072, doubling."""

Values = Mapping[str, float]
"""By the family's own label; under "" where it has none."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Sources of one engine's figures. `statistics`: None while it is not open."""

    state: EngineState
    num_tokens: int
    statistics: EngineStatistics | None


@dataclass(frozen=True, slots=True)
class Family:
    """A metric, with its label beside `model`, if it has one."""

    name: str
    meaning: str
    _: KW_ONLY
    label: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of all its labels."""
        return ("model", self.label) if self.label else ("model",)


@dataclass(frozen=True, slots=True)
class Figure(Family):
    """A counter or a gauge, as its name says, which is read when somebody asks."""

    read: Callable[[Reading], Values]

    @property
    def kind(self) -> str:
        """Its type, in Prometheus' words."""
        return "counter" if self.name.endswith("_total") else "gauge"


@dataclass(frozen=True, slots=True)
class Histogram(Family):
    """Counted as it happens, into buckets up to `bounds`, for each of its label's values."""

    bounds: tuple[float, ...] = SECONDS
    kind: ClassVar[str] = "histogram"

    @property
    def values(self) -> tuple[str, ...]:
        """The values of its own label."""
        return VALUES[self.label]


def _from_statistics(read: Callable[[EngineStatistics], Values]) -> Callable[[Reading], Values]:
    return lambda reading: {} if reading.statistics is None else read(reading.statistics)


def _field(name: str) -> Callable[[Reading], Values]:
    return _from_statistics(lambda statistics: {"": getattr(statistics, name)})


PLAIN = {
    "completions_running": "Completions that hold KV blocks.",
    "completions_waiting": "Completions that hold none, and requests not laid out.",
    "preemptions_total": "Completions whose KV blocks were taken back.",
    "kv_blocks": "KV blocks there are.",
    "kv_blocks_free": "KV blocks that a new request could get.",
    "kv_blocks_cached": "KV blocks whose content can be used again.",
    "states": "Places for what layers keep of a request beside keys and values.",
    "states_free": "Places of states that a new request could get.",
    "states_cached": "Snapshots of states that a prompt can begin with.",
    "prefix_cache_query_tokens_total": "Prompt tokens looked for in the prefix cache.",
    "prefix_cache_hit_tokens_total": "Prompt tokens found in the prefix cache.",
    "encoder_cache_capacity_bytes": "Bytes that the encoder cache may hold.",
    "encoder_cache_used_bytes": "Bytes that the encoder cache holds.",
    "encoder_cache_entries": "Items in the encoder cache.",
    "encoder_cache_referenced_entries": (
        "Items in the encoder cache that are in use or being encoded."
    ),
    "encoder_cache_hits_total": "Items that were encoded already.",
    "encoder_cache_misses_total": "Items that had to be encoded.",
    "encoder_cache_evictions_total": "Encoded items that made room.",
    "encoder_cache_waits_total": "Items for which the encoder cache had no room at first.",
    "encoder_items_total": "Items that the encoder has run.",
    "processor_cache_capacity_bytes": "Bytes that the cache of processed items may hold.",
    "processor_cache_used_bytes": "Bytes that the cache of processed items holds.",
    "processor_cache_entries": "Items in the cache of processed ones.",
    "processor_cache_hits_total": "Items that were processed already.",
    "processor_cache_misses_total": "Items that were not.",
    "processor_cache_evictions_total": "Processed items that made room.",
}
"""A metric's name, without its prefix, and the meaning."""
FIELDS = {name: name.removesuffix("_total") for name in PLAIN} | {
    "completions_running": "running",
    "completions_waiting": "waiting",
    "kv_blocks": "kv_blocks_total",
    "states": "states_total",
    "prefix_cache_query_tokens_total": "prefix_query_tokens",
    "prefix_cache_hit_tokens_total": "prefix_hit_tokens",
    "encoder_cache_referenced_entries": "encoder_cache_referenced",
    "encoder_items_total": "encoder_items_run",
}
"""Name -> the field of EngineStatistics, where the two differ by more than a counter's suffix."""

FIGURES = (
    Figure(
        "aioengine_engine_state",
        "1 for the state that the engine is in, 0 for the others.",
        lambda reading: {state.value: float(state is reading.state) for state in EngineState},
        label="state",
    ),
    Figure(
        "aioengine_model_impl",
        "1 for what runs the model: its architecture's own class, or one for all of its kind.",
        _from_statistics(
            lambda statistics: {name: float(name == statistics.model_impl) for name in IMPLS}
        ),
        label="impl",
    ),
    Figure(
        "aioengine_requests_total",
        "Requests that have ended.",
        _from_statistics(lambda statistics: {name: getattr(statistics, name) for name in OUTCOMES}),
        label="outcome",
    ),
    Figure(
        "aioengine_generated_tokens_total",
        "Tokens generated, however their requests end.",
        lambda reading: {"": reading.num_tokens},
    ),
    *(Figure(f"aioengine_{n}", meaning, _field(FIELDS[n])) for n, meaning in PLAIN.items()),
    Figure(
        "aioengine_stage_runs_total",
        "Pieces of work that a stage has done.",
        _from_statistics(lambda statistics: {k: v.count for k, v in statistics.stages.items()}),
        label="stage",
    ),
    Figure(
        "aioengine_stage_seconds_total",
        "Seconds that a stage's work took, taken together.",
        _from_statistics(lambda statistics: {k: v.total_s for k, v in statistics.stages.items()}),
        label="stage",
    ),
)

FIRST_TOKEN = Histogram(
    "aioengine_time_to_first_token_seconds", "From submission to the first token of a request."
)
INTER_TOKEN = Histogram(
    "aioengine_inter_token_latency_seconds", "Between two tokens of one completion.", GAPS
)
DURATION = Histogram(
    "aioengine_request_duration_seconds",
    "From submission to the end of a request.",
    label="outcome",
)
INTAKE = Histogram(
    "aioengine_intake_duration_seconds",
    "From submission to admission: media fetched and the prompt laid out.",
)
QUEUE = Histogram(
    "aioengine_queue_duration_seconds", "From admission to the start of a request's first step."
)
PROMPT_TOKENS = Histogram(
    "aioengine_request_prompt_tokens", "Prompt tokens of a finished request.", TOKENS
)
OUTPUT_TOKENS = Histogram(
    "aioengine_request_generated_tokens",
    "Tokens of a finished request, all completions together.",
    TOKENS,
)
STAGE = Histogram(
    "aioengine_stage_duration_seconds", "How long one piece of a stage's work took.", label="stage"
)
LAG = Histogram(
    "aioengine_event_loop_lag_seconds", "By how much a timer of the event loop came late.", LAGS
)
HISTOGRAMS = (
    *(FIRST_TOKEN, INTER_TOKEN, DURATION, INTAKE, QUEUE),
    *(PROMPT_TOKENS, OUTPUT_TOKENS, STAGE, LAG),
)
