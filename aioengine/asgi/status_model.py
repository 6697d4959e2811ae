"""Model of the status page: one engine's spans, moments and counters as plain objects.

Pure: it knows no clock, no loop and no server. Times that come in are seconds of
`time.perf_counter()`; those that go out are milliseconds, and spans count from the board's begin.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from aioengine.instruments import STAGES, RequestEvent, StageSpan, TraceRecorder
from aioengine.types import OUTCOMES, EngineState, EngineStatistics, StageStatistics

__all__ = ["KnownRequest", "Latencies", "Peaks", "StatusBoard", "TokenRate"]

MAX_SPANS = 4096
MAX_SHOWN_REQUESTS = 6
MAX_ENDED_REQUESTS = 64
PREFILL = len(STAGES)
"""The number of a step that computes a part of a prompt, among the stages' numbers."""
MAX_SHOWN_CHARACTERS = 64
RATE_SECONDS = 3


@dataclass(slots=True)
class KnownRequest:
    """A live request, or one that has just ended: `stage` is its outcome then.

    `last_tokens`: completion index -> the time of its last token.
    """

    submitted: float
    stage: str = "intake"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    media: Mapping[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None
    last_tokens: dict[int, float] = field(default_factory=dict)

    def report(self, name: str, spans: Iterable[StageSpan]) -> dict[str, object]:
        """Moments and spans as JSON's objects, in milliseconds since its submission.

        The steps that computed its prompt are "prefill"; those behind its first token are left out.
        """

        def since(time: float | None) -> float | None:
            return None if time is None else _ms(time - self.submitted)

        last = math.inf if self.first_token is None else self.first_token
        return {
            **self.summary(),
            "admitted_ms": since(self.admitted),
            "first_token_ms": since(self.first_token),
            "ended_ms": since(self.ended),
            "spans": [
                [
                    "prefill" if span.stage == "step" else span.stage,
                    since(span.start),
                    _ms(span.end - span.start),
                    span.detail,
                ]
                for span in spans
                if name in span.requests
                and span.end > self.submitted  # names may be given again
                and (span.stage != "step" or span.end <= last)
            ],
        }

    def summary(self) -> dict[str, object]:
        """Stage and counts as JSON objects."""
        return {
            "stage": self.stage,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "media": dict(self.media),
            "tokens": self.num_tokens,
        }


class TokenRate:
    """Tokens by whole seconds, for a minute."""

    def __init__(self, num_seconds: int = 60) -> None:
        self._num_seconds = num_seconds
        self._counts: Counter[int] = Counter()

    def add(self, time: float) -> None:
        """One token more."""
        self._counts[int(time)] += 1
        if len(self._counts) > self._num_seconds:
            del self._counts[next(iter(self._counts))]

    def history(self, now: float) -> list[int]:
        """Tokens of each second of the last minute, oldest first, the current one left out."""
        return [self._counts[second] for second in range(int(now) - self._num_seconds, int(now))]

    def per_second(self, now: float) -> float:
        """The mean over the last two to three seconds."""
        begin = int(now) - RATE_SECONDS + 1
        latest = (count for second, count in self._counts.items() if second >= begin)
        return sum(latest) / (now - begin)


class Peaks:
    """The highest value of each second of the last minute."""

    def __init__(self, num_seconds: int = 60) -> None:
        self._num_seconds = num_seconds
        self._seconds: dict[int, tuple[float, float]] = {}  # second -> its highest and last value

    def note(self, time: float, value: float) -> None:
        """The value is another one from now on."""
        second = int(time)
        last = next(reversed(self._seconds.values()))[1] if self._seconds else value
        highest = self._seconds.get(second, (last, last))[0]
        self._seconds[second] = max(highest, value), value
        if len(self._seconds) > self._num_seconds + 1:
            del self._seconds[next(iter(self._seconds))]

    def history(self, now: float) -> list[float | None]:
        """The peaks of the seconds, oldest first, up to the current one; None before the first."""
        begin = int(now) - self._num_seconds + 1
        before = (last for at, (_, last) in reversed(self._seconds.items()) if at < begin)
        value = next(before, None)
        found: list[float | None] = []
        for second in range(begin, int(now) + 1):
            highest, value = self._seconds.get(second, (value, value))
            found.append(highest)
        return found


class Latencies:
    """The latest times of one kind, in seconds, and their percentiles."""

    def __init__(self, max_age_s: float = 60.0, max_count: int = 1024) -> None:
        self._max_age_s = max_age_s
        self._found: deque[tuple[float, float]] = deque(maxlen=max_count)  # when, how long

    def add(self, time: float, seconds: float) -> None:
        """One more, measured at `time`."""
        self._found.append((time, seconds))

    def percentiles(self, now: float) -> dict[str, float] | None:
        """Median, 99th percentile and maximum in milliseconds; None if there are none of late."""
        oldest = now - self._max_age_s
        latest = sorted(seconds for time, seconds in self._found if time >= oldest)
        if not latest:
            return None
        return {
            "p50": _ms(_nearest_rank(latest, 0.50)),
            "p99": _ms(_nearest_rank(latest, 0.99)),
            "max": _ms(latest[-1]),
        }


class StatusBoard:
    """One engine's recent past, bounded: `note_*` hear of it, the others say what to show.

    `recorder` holds the latest spans, `num_spans` counts all there were: a span's number is its
    place among all.
    """

    def __init__(self, model: str, begin: float, max_spans: int = MAX_SPANS) -> None:
        self.recorder = TraceRecorder(max_spans)
        self.num_spans = 0
        self._model = printable(model)
        self._begin = begin
        self._live: dict[str, KnownRequest] = {}  # in the order of their submission
        self._ended: dict[str, KnownRequest] = {}  # the last of them, in the order of their end
        self._are_prefill: deque[bool] = deque(maxlen=max_spans)  # as long as the recorder
        self._num_live = Peaks()
        self._memory = Peaks()
        self._kv_share = Peaks()
        self._num_at: Counter[str] = Counter()  # live requests by what they are at
        self._rate = TokenRate()
        self._first_token = Latencies()
        self._inter_token = Latencies()
        self._loop_lag = Latencies(max_age_s=10.0)

    # ---- what it hears

    def note_span(self, span: StageSpan) -> None:
        """Hear of a finished piece of work."""
        has_prompt = (  # it comes before the tokens of its step
            span.stage == "step"
            and self._num_at["prefill"] > 0
            and any(map(self._is_prefilled, span.requests))
        )
        self.recorder(span)
        self._are_prefill.append(has_prompt)
        self.num_spans += 1

    def note_event(self, event: RequestEvent) -> None:
        """Hear of a moment in a request's life."""
        if event.kind == "token":
            self._note_token(event)
        elif event.kind == "submitted":
            self._live[event.request_id] = KnownRequest(event.time)
            self._num_at["intake"] += 1
            self._num_live.note(event.time, len(self._live))
        elif event.kind == "admitted":
            if (live := self._live.get(event.request_id)) is not None:
                self._move(live, "prefill")
                live.admitted = event.time
                live.prompt_tokens, live.media = event.prompt_tokens, event.media or {}
        elif (live := self._live.pop(event.request_id, None)) is not None:
            self._end(live, event)

    def find(self, name: str) -> KnownRequest | None:
        """Return a request that is live, or among the last to end."""
        return self._live.get(name) or self._ended.get(name)

    def _is_prefilled(self, name: str) -> bool:
        live = self._live.get(name)
        return live is not None and live.stage == "prefill"

    def _end(self, live: KnownRequest, event: RequestEvent) -> None:
        self._num_at[live.stage] -= 1
        self._num_live.note(event.time, len(self._live))
        live.stage, live.ended = event.kind, event.time
        live.last_tokens.clear()
        self._ended.pop(event.request_id, None)
        self._ended[event.request_id] = live
        if len(self._ended) > MAX_ENDED_REQUESTS:
            del self._ended[next(iter(self._ended))]

    def _move(self, live: KnownRequest, stage: str) -> None:
        self._num_at[live.stage] -= 1
        live.stage = stage
        self._num_at[stage] += 1

    def note_loop_lag(self, now: float, seconds: float) -> None:
        """Record how late the event loop was with a timer."""
        self._loop_lag.add(now, seconds)

    def _note_token(self, event: RequestEvent) -> None:
        self._rate.add(event.time)
        live = self._live.get(event.request_id)
        if live is None:  # submitted before the board began, or ended by another watcher just now
            return
        if not live.num_tokens:
            self._first_token.add(event.time, event.time - live.submitted)
            self._move(live, "decode")
            live.first_token, live.cached_tokens = event.time, event.cached_tokens
        live.num_tokens += 1
        before = live.last_tokens.get(event.index)
        if before is not None:
            self._inter_token.add(event.time, event.time - before)
        live.last_tokens[event.index] = event.time

    # ---- what it shows

    def snapshot(
        self,
        now: float,
        state: EngineState,
        statistics: EngineStatistics | None,
        memory_bytes: int | None = None,
    ) -> dict[str, object]:
        """All figures at `now`, as JSON's objects; `statistics` are None before the first start.

        `memory_bytes`: what the process has in memory. Its history, and the KV cache's, are of the
        snapshots: of while somebody looks.
        """
        if memory_bytes is not None:
            self._memory.note(now, memory_bytes)
        if statistics is not None and statistics.kv_blocks_total:
            self._kv_share.note(now, 1 - statistics.kv_blocks_free / statistics.kv_blocks_total)
        return {
            "state": state.value,
            "model": self._model,
            "model_impl": None if statistics is None else statistics.model_impl,
            "uptime_s": round(now - self._begin, 1),
            "requests": None if statistics is None else _requests(statistics),
            "stages": self._stages(statistics),
            "oldest": self._oldest(now),
            "tokens_per_s": round(self._rate.per_second(now), 1),
            "tokens_by_second": self._rate.history(now),
            "live_by_second": self._num_live.history(now),
            "memory_bytes": memory_bytes,
            "memory_by_second": self._memory.history(now),
            "kv_by_second": [
                None if share is None else round(share, 3) for share in self._kv_share.history(now)
            ],
            "first_token_ms": self._first_token.percentiles(now),
            "inter_token_ms": self._inter_token.percentiles(now),
            "loop_lag_ms": self._loop_lag.percentiles(now),
            "caches": None if statistics is None else _caches(statistics),
            "work": None if statistics is None else _work(statistics.stages),
        }

    def spans(self, first: int, end: int) -> dict[str, object]:
        """The spans numbered [first, end) that are still held, as JSON's objects.

        Each is the stage's number (PREFILL for a step that computes a prompt), begin and duration
        in milliseconds, the number of requests it was for, and what it was.
        """
        oldest = self.num_spans - len(self.recorder.spans)
        first, end = max(first, oldest), max(end, oldest)
        held = zip(self.recorder.spans, self._are_prefill, strict=True)
        return {
            "first": first,
            "spans": [
                [
                    _number(span.stage, has_prompt),
                    _ms(span.start - self._begin),
                    _ms(span.end - span.start),
                    len(span.requests),
                    span.detail,
                ]
                for span, has_prompt in islice(held, first - oldest, end - oldest)
            ],
        }

    def clock(self, now: float) -> float:
        """Milliseconds since the board began, as the spans count them."""
        return _ms(now - self._begin)

    def _stages(self, statistics: EngineStatistics | None) -> dict[str, int]:
        """Requests by what they are at. Those that are admitted, without a token and without KV
        blocks wait for these."""
        counts = self._num_at
        waiting = 0 if statistics is None else statistics.waiting - counts["intake"]
        waiting = min(max(waiting, 0), counts["prefill"])
        return {
            "intake": counts["intake"],
            "waiting": waiting,
            "prefill": counts["prefill"] - waiting,
            "decode": counts["decode"],
        }

    def _oldest(self, now: float) -> list[dict[str, object]]:
        """List those that have been live for longest."""
        return [
            {
                "id": printable(name),
                "age_s": round(now - live.submitted, 1),
                **live.summary(),
            }
            for name, live in islice(self._live.items(), MAX_SHOWN_REQUESTS)
        ]


def printable(text: str) -> str:
    """A caller's name for something, short and without what a terminal or page might obey."""
    shown = "".join(c if c.isprintable() else "\ufffd" for c in text[:MAX_SHOWN_CHARACTERS])
    return shown if len(text) <= MAX_SHOWN_CHARACTERS else shown + "…"


def _number(stage: str, has_prompt: bool) -> int:
    if has_prompt:
        return PREFILL
    return STAGES.index(stage) if stage in STAGES else -1


def _requests(statistics: EngineStatistics) -> dict[str, int]:
    names = ("running", "waiting", *OUTCOMES, "preemptions")
    return {name: getattr(statistics, name) for name in names}


def _caches(statistics: EngineStatistics) -> dict[str, dict[str, float | None]]:
    """Fill and hit rate of each cache; blocks of the KV cache, bytes of the others."""
    kv: dict[str, float | None] = {
        "capacity": statistics.kv_blocks_total,
        "used": statistics.kv_blocks_total - statistics.kv_blocks_free,
        "cached": statistics.kv_blocks_cached,
        "hit_rate": _ratio(statistics.prefix_hit_tokens, statistics.prefix_query_tokens),
    }
    return {"kv": kv, **{name: _cache(statistics, name) for name in ("encoder", "processor")}}


def _cache(statistics: EngineStatistics, name: str) -> dict[str, float | None]:
    def figure(of: str) -> int:
        return int(getattr(statistics, f"{name}_cache_{of}"))

    return {
        "capacity": figure("capacity_bytes"),
        "used": figure("used_bytes"),
        "entries": figure("entries"),
        "evictions": figure("evictions"),
        "hit_rate": _ratio(figure("hits"), figure("hits") + figure("misses")),
    }


def _work(stages: Mapping[str, StageStatistics]) -> list[dict[str, float]]:
    """List how often each stage ran, and for how long on average, in the order of STAGES."""
    found = (stages.get(stage, StageStatistics()) for stage in STAGES)
    return [
        {"count": each.count, "mean_ms": _ms(each.total_s / max(1, each.count))} for each in found
    ]


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _nearest_rank(ascending: list[float], quantile: float) -> float:
    return ascending[max(0, math.ceil(quantile * len(ascending)) - 1)]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
