"""A step's tokens: their ids, and what stands for them, on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from aioengine.core.plan import UNSAMPLED, SequencePlan
from aioengine.kernels.transfer import StepBuffer
from aioengine.models.runtime.transformers_model import TransformersModel

__all__ = ["stage_tokens"]


def stage_tokens(
    model: TransformersModel,
    buffer: StepBuffer,
    sequences: Sequence[SequencePlan],
    *,
    encoded: Mapping[str, Tensor],
    last: Tensor,
    places: Mapping[str, int],
    is_fixed: bool = False,
) -> Callable[[], Tensor]:
    """Stage the step's tokens; what is returned gives their embeddings [T, hidden], once the buffer
    has been sent.

    `encoded`: rows [n, hidden] of encoders, by content, that go to their places. `last` [n] int64:
    the tokens that the step before has sampled, on the device, each request's at its place.
    `is_fixed`: in sizes that do not depend on what is known of the tokens.
    """
    token_ids = [*chain.from_iterable([s.token_ids for s in sequences])]
    unknown = [token == UNSAMPLED for token in token_ids]
    has_unknown = any(unknown)
    ids = buffer.put([max(token, 0) for token in token_ids] if has_unknown else token_ids)
    filled = None
    if is_fixed or has_unknown:
        found = _places_of(sequences, places)
        filled = buffer.put(unknown, torch.bool), buffer.put(found)
    is_row = _rows_mask(sequences, len(token_ids))
    mask = None if is_row is None else buffer.put(is_row, torch.bool)

    def embed() -> Tensor:
        given = ids.tensor
        if filled is not None:
            is_unknown, there = filled
            given = torch.where(is_unknown.tensor, last[there.tensor], given)
        if mask is None:
            return model.embed_input_ids(given)
        pieces = [
            encoded[piece.key][piece.row : piece.row + piece.count]
            for s in sequences
            for piece in s.rows
        ]
        return model.embed_input_ids(given, pieces, mask.tensor)

    return embed


def _places_of(sequences: Sequence[SequencePlan], places: Mapping[str, int]) -> list[int]:
    """The place, in the step before, of each token that it has sampled; 0 of others."""
    tails = [*accumulate([len(s.token_ids) for s in sequences])]
    found = [0] * (tails[-1] if tails else 0)
    for s, tail in zip(sequences, tails, strict=True):
        # Only a sequence's last token can be such a one.
        if s.token_ids and s.token_ids[-1] == UNSAMPLED:
            found[tail - 1] = places[s.request_id]
    return found


def _rows_mask(sequences: Sequence[SequencePlan], num_tokens: int) -> Tensor | None:
    """Mark the step's tokens that encoder rows stand for: bool [T], None if there are none."""
    if not any([s.rows for s in sequences]):
        return None
    is_row = torch.zeros(num_tokens, dtype=torch.bool)
    base = 0
    for s in sequences:
        for piece in s.rows:
            is_row[base + piece.position : base + piece.position + piece.count] = True
        base += len(s.token_ids)
    return is_row
