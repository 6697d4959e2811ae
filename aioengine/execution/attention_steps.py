"""Metadata of a step's attention, by KV group: which rows each sequence's tokens see."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aioengine.core.plan import Limits, SequencePlan
from aioengine.kernels.attention import AttentionMetadata
from aioengine.kernels.metadata import (
    GroupTables,
    SeenRows,
    stage_cross_metadata,
    stage_metadata,
)
from aioengine.kernels.transfer import StepBuffer
from aioengine.models.runtime.interfaces import PromptMemory
from aioengine.models.runtime.transformers_model import TransformersModel

__all__ = ["stage_attention"]


def stage_attention(
    model: TransformersModel,
    limits: Limits,
    buffer: StepBuffer,
    sequences: Sequence[SequencePlan],
    *,
    is_captured: bool = False,
    is_open: bool = False,
) -> list[Callable[[], AttentionMetadata]]:
    """Stage the metadata of a step, one for each KV group; what is returned gives it, once the
    buffer has been sent. `is_captured`, `is_open`: see
    `AttentionMetadata`."""
    blocks = [s.inputs and s.inputs.blocks_at(s.start, s.end) for s in sequences]
    groups = [
        GroupTables(
            [s.block_tables[index] for s in sequences],
            model.kv_groups[index].chunk,
            blocks if model.sees_blocks(index) else None,
        )
        for index in range(limits.num_groups)
    ]
    own = stage_metadata(
        buffer,
        groups,
        block_size=limits.block_size,
        starts=[s.start for s in sequences],
        ends=[s.end for s in sequences],
        stored=[s.is_stored for s in sequences],
        blocks_in_window=model.blocks_in_window,
        is_captured=is_captured,
        is_open=is_open,
    )
    if not limits.num_cross_groups:
        return own
    are_whole = all(s.num_encoder_rows and _memory_of(s) is None for s in sequences)
    seen = None if are_whole else [_seen_rows(s) for s in sequences]
    cross = [
        stage_cross_metadata(
            buffer,
            block_size=limits.block_size,
            block_tables=[s.cross_tables[group] if s.cross_tables else () for s in sequences],
            query_lens=[s.end - s.start for s in sequences],
            context_lens=[s.num_encoder_rows for s in sequences],
            is_new=[s.encoder_key is not None for s in sequences],
            seen=seen,
            is_captured=is_captured,
            is_open=is_open,
        )
        for group in range(limits.num_cross_groups)
    ]
    return own + cross


def _memory_of(s: SequencePlan) -> PromptMemory | None:
    found: PromptMemory | None = None if s.inputs is None else s.inputs.memory
    return found


def _seen_rows(s: SequencePlan) -> list[SeenRows]:
    """Return runs of a sequence's tokens, in order, with the encoder's rows that each sees."""
    memory = _memory_of(s)
    if memory is not None:
        return memory.seen_at(s.start, s.end)
    return [SeenRows(s.end - s.start, 0, s.num_encoder_rows, bool(s.num_encoder_rows))]
