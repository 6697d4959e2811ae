"""Results of a step: what grammars and budgets allow of it, and what is read of it on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from aioengine.core.plan import SequencePlan, StepResult
from aioengine.errors import InvalidRequestError
from aioengine.kernels.transfer import to_host
from aioengine.sampling.logprobs import ScoreColumns, Scores
from aioengine.sampling.sampler import Sampled
from aioengine.types import TokenLogprobs

__all__ = ["PromptScores", "masks_of", "reader"]

PromptScores = list[tuple[SequencePlan, list[Scores]]]
"""Of sequences whose prompts' tokens are scored."""


def masks_of(chosen: Sequence[SequencePlan]) -> tuple[list[Tensor | None], dict[str, Exception]]:
    """Bit masks of the tokens that may come, and the requests whose grammar has failed.

    The callers' own processors learn of the tokens that have come.
    """
    masks: list[Tensor | None] = []
    failures: dict[str, Exception] = {}
    for s in chosen:
        mask = None
        if s.sampling.processors is not None:
            s.sampling.processors.take(s.token_ids, s.output_index)
        if s.sampling.constraint is not None:
            try:
                mask = s.sampling.constraint.mask(s.token_ids, s.output_index)
            except InvalidRequestError as error:
                failures[s.request_id] = error
        masks.append(mask)
    return masks, failures


def _barred(chosen: Sequence[SequencePlan], is_barred: Sequence[bool]) -> dict[str, Exception]:
    """The requests whose parameters have left them no token."""
    return {
        s.request_id: InvalidRequestError(
            "the sampling parameters, with the tokens that the model's generation config "
            "suppresses, leave no token to choose; allow more tokens, or ban fewer",
            parameter="params",
        )
        for s, barred in zip(chosen, is_barred, strict=True)
        if barred and s.sampling.may_bar_all
    }


def reader(
    chosen: Sequence[SequencePlan],
    sampled: Sampled | None,
    prompts: PromptScores,
    failures: dict[str, Exception],
    pooled: Callable[[], Mapping[str, Any]] = dict,
) -> Callable[[], StepResult]:
    """Send what a step has found to the host, in one copy; what is returned reads it."""
    groups: list[Sequence[Tensor]] = [part for _, parts in prompts for part in parts]
    if sampled is not None:
        barred = [] if sampled.is_barred is None else [sampled.is_barred]
        own = sampled.processed
        are_numbers = [] if own is None or own.are_numbers is None else [own.are_numbers]
        groups += [sampled.scores or [], barred, are_numbers, [sampled.token_ids]]
    on_their_way = iter(to_host([tensor for group in groups for tensor in group]))
    found = [[*islice(on_their_way, len(group))] for group in groups]

    def read() -> StepResult:
        columns = iter(found)
        prompt_logprobs = {
            s.request_id: (s.start + 1, _joined([Scores(*next(columns)) for _ in parts]))
            for s, parts in prompts
            if parts
        }
        if sampled is None:
            return StepResult((), prompt_logprobs=prompt_logprobs, pooled=pooled())
        scores, barred, are_numbers, (token_ids,) = columns
        left = _barred(chosen, barred[0].tolist()) if barred else {}
        spent, failed = None, {}
        if (own := sampled.processed) is not None:
            spent = own.start, own.end
            by_row = own.read(are_numbers[0].tolist() if are_numbers else ())
            failed = {chosen[row].request_id: error for row, error in by_row.items()}
        return StepResult(
            token_ids.tolist(),
            {**left, **failures, **failed},
            _read_scores(chosen, sampled.rows, Scores(*scores)) if scores else {},
            prompt_logprobs,
            spent,
            pooled(),
        )

    return read


def _read_scores(
    chosen: Sequence[SequencePlan], rows: Sequence[int], scores: Scores
) -> dict[str, TokenLogprobs]:
    asked = [chosen[row] for row in rows]
    found = scores.read([s.sampling.logprobs for s in asked])
    return {s.request_id: logprobs for s, logprobs in zip(asked, found, strict=True)}


def _joined(parts: Sequence[Scores]) -> ScoreColumns:
    columns = zip(*(part.columns() for part in parts), strict=True)
    return ScoreColumns(*map(np.concatenate, columns))
