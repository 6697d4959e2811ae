"""Report of a benchmark, as numbers and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from aioengine import EngineStatistics

__all__ = ["Record", "Report", "Spread", "make_report", "show_report"]


@dataclass(frozen=True)
class Record:
    """One request. `arrivals`: seconds since its submission, and tokens that came together."""

    num_prompt_tokens: int
    arrivals: list[tuple[float, int]]

    def gaps(self) -> Iterator[float]:
        """Seconds before each token but the first ones; those of one arrival share its wait."""
        for (before, _), (now, count) in pairwise(self.arrivals):
            yield from [(now - before) / count] * count


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Spread of times, in seconds: the mean, and what so many percent do not exceed."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """`ttft_s`: seconds to a request's first token; `itl_s`: between two tokens, None where every
    answer came at once; `e2e_s`: to a request's last token."""

    num_prompts: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    cached_prompt_tokens: int
    encoder_items: int
    encoder_items_cached: int
    preemptions: int
    ttft_s: Spread
    itl_s: Spread | None
    e2e_s: Spread


def make_report(
    records: Sequence[Record], took_s: float, before: EngineStatistics, after: EngineStatistics
) -> Report:
    """Summarize at least one request, with the engine's counters before and after all of them."""
    prompt_tokens = sum(record.num_prompt_tokens for record in records)
    output_tokens = sum(count for record in records for _, count in record.arrivals)
    gaps = [gap for record in records for gap in record.gaps()]
    cached_items = after.encoder_cache_hits - before.encoder_cache_hits
    return Report(
        num_prompts=len(records),
        duration_s=took_s,
        requests_per_s=len(records) / took_s,
        output_tokens_per_s=output_tokens / took_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / took_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_prompt_tokens=after.prefix_hit_tokens - before.prefix_hit_tokens,
        encoder_items=cached_items + after.encoder_cache_misses - before.encoder_cache_misses,
        encoder_items_cached=cached_items,
        preemptions=after.preemptions - before.preemptions,
        ttft_s=_spread([record.arrivals[0][0] for record in records]),
        itl_s=_spread(gaps) if gaps else None,
        e2e_s=_spread([record.arrivals[-1][0] for record in records]),
    )


def _spread(values: Sequence[float]) -> Spread:
    # Of a single value there are no quantiles before Python 3.13.
    sample = values if len(values) > 1 else [*values, *values]
    cuts = statistics.quantiles(sample, n=100, method="inclusive")
    return Spread(mean=statistics.fmean(values), p50=cuts[49], p90=cuts[89], p99=cuts[98])


def show_report(report: Report, console: Console) -> None:
    """Write the report for people."""
    lines = [
        f"{report.num_prompts} requests in {report.duration_s:.2f} s, "
        f"{report.requests_per_s:.2f} a second",
        f"{report.output_tokens_per_s:.1f} output tokens/s, {report.total_tokens_per_s:.1f} with "
        "those of the prompts",
        f"{report.prompt_tokens} prompt tokens, {report.cached_prompt_tokens} of them cached; "
        f"{report.output_tokens} output tokens; {report.preemptions} preemptions",
    ]
    if report.encoder_items:
        lines.append(f"{report.encoder_items} images, {report.encoder_items_cached} cached")
    console.print("\n".join(lines), highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("", "mean", "p50", "p90", "p99"):
        table.add_column(column, justify="right" if column else "left")
    times = {
        "first token": report.ttft_s,
        "between tokens": report.itl_s,
        "whole request": report.e2e_s,
    }
    for name, spread in times.items():
        if spread is not None:
            table.add_row(name, *(f"{value * 1e3:.1f} ms" for value in astuple(spread)))
    console.print(table)
