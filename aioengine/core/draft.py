"""A step that is being put together, and a request's part of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from aioengine.core.plan import SequencePlan
from aioengine.core.request import Item, Request

__all__ = ["StepDraft", "plan_sequence"]


@dataclass(slots=True)
class StepDraft:
    """A step being put together. `num_slots` counts the running requests that hold a slot."""

    step_id: int
    budget: int
    num_slots: int
    sequences: list[SequencePlan] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    is_short_of_blocks: bool = False
    num_parked_rows: int = 0  # that running requests wait for
    num_new_rows: int = 0  # of encoders' outputs, whose keys and values it writes


def plan_sequence(
    request: Request,
    start: int,
    end: int,
    *,
    is_stored: bool,
    encoder: Item | None,
    source: int | None,
    snapshots: tuple[tuple[int, int], ...],
) -> SequencePlan:
    """The plan of positions [start, end) of a request whose blocks are there; see `SequencePlan`.

    `encoder`: the step writes the keys and values that cross-attention reads. `source`: of the
    state that it begins with.
    """
    return SequencePlan(
        request_id=request.request_id,
        epoch=request.epoch,
        start=start,
        end=end,
        token_ids=request.tokens(start, end),
        block_tables=tuple(tuple(table) for table in request.block_tables),
        rows=tuple(request.row_slices(start, end)),
        samples=request.pooling is None and end == request.num_tokens,
        output_index=request.num_output,
        is_stored=is_stored,
        sampling=request.sampling,
        pooling=request.pooling,
        inputs=request.inputs,
        cross_tables=tuple(tuple(table) for table in request.cross_tables),
        num_encoder_rows=request.num_encoder_rows,
        encoder_key=None if encoder is None else encoder.key,
        state=request.state,
        state_source=source,
        snapshots=snapshots,
    )
