"""The counters of all rooms on one page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from aioengine.core.scheduler import Scheduler
from aioengine.types import OUTCOMES, EngineStatistics, StageStatistics

if TYPE_CHECKING:
    from aioengine.processors.cache.memory import ProcessorCacheStatistics

__all__ = ["take_snapshot"]


def take_snapshot(
    scheduler: Scheduler,
    processed: ProcessorCacheStatistics,
    stages: Mapping[str, StageStatistics],
    *,
    endings: Mapping[str, int],
    num_preparing: int,
    encoder_items_run: int,
) -> EngineStatistics:
    """`endings` counts requests by how they ended; `num_preparing`: those not admitted."""
    counters, pool, cache = scheduler.counters, scheduler.pool, scheduler.media.cache
    return EngineStatistics(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting + num_preparing,
        **{outcome: endings[outcome] for outcome in OUTCOMES},
        preemptions=counters["preemptions"],
        kv_blocks_total=pool.num_blocks,
        kv_blocks_free=pool.num_free,
        kv_blocks_cached=pool.num_cached,
        prefix_query_tokens=counters["prefix_query_tokens"],
        prefix_hit_tokens=counters["prefix_hit_tokens"],
        encoder_cache_capacity_bytes=cache.capacity_bytes,
        encoder_cache_used_bytes=cache.capacity_bytes - cache.free_bytes,
        encoder_cache_entries=len(cache),
        encoder_cache_referenced=cache.num_referenced,
        encoder_cache_hits=counters["encoder_hits"],
        encoder_cache_misses=scheduler.media.counters["encoder_misses"],
        encoder_cache_evictions=cache.num_evictions,
        encoder_cache_waits=scheduler.media.counters["encoder_waits"],
        encoder_items_run=encoder_items_run,
        **{f"processor_cache_{name}": figure for name, figure in asdict(processed).items()},
        stages=stages,
    )
