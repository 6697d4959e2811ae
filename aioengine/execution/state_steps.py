"""A step's states: what its plan says of them, on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from aioengine.core.plan import SequencePlan
from aioengine.kernels.transfer import StepBuffer
from aioengine.models.state.memory import StateMemory, StateStep

__all__ = ["stage_states"]


def stage_states(
    memory: StateMemory, buffer: StepBuffer, sequences: Sequence[SequencePlan]
) -> Callable[[], StateStep]:
    """Stage the states of a step whose single tokens come first; what is returned begins them, once
    the buffer has been sent."""
    single = [s for s in sequences if s.end - s.start == 1]
    copied = [index for index, s in enumerate(single) if s.snapshots]
    copies = [place for s in single for _, place in s.snapshots]
    starts = [(s.state_source, s.state) for s in sequences if s.state_source is not None]
    zeros = [s.state for s in sequences if s.start == 0]
    chunks, row = [], len(single)
    for s in sequences[len(single) :]:
        assert s.state is not None
        ends = tuple((row + end - s.start, place) for end, place in s.snapshots)
        chunks.append((row, row + s.end - s.start, s.state, ends))
        row += s.end - s.start
    names: dict[str, Sequence[int | None]] = {
        "places": [s.state for s in single],
        "copied": copied,
        "copies": copies,
        "zeros": zeros,
        "sources": [source for source, _ in starts],
        "targets": [place for _, place in starts],
    }
    staged = {name: buffer.put(found) for name, found in names.items() if found}  # type: ignore[arg-type]

    def begin() -> StateStep:
        there = {name: each.tensor for name, each in staged.items()}
        memory.begin(there.get("zeros"), there.get("sources"), there.get("targets"))
        nothing = torch.empty(0, dtype=torch.int64)
        places = there.get("places", nothing)
        copied, copies = there.get("copied"), there.get("copies")
        return StateStep(memory, len(single), places, copied, copies, tuple(chunks))

    return begin
