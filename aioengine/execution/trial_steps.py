"""The steps of a trial: prompts in chunks, side by side, over pages of one pool."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor

from aioengine.core.plan import EncodePlan, Limits, RowSlice, SequencePlan, StepPlan
from aioengine.execution.model_runner import ModelRunner
from aioengine.execution.trial_prompts import TrialPrompt
from aioengine.kernels.attention import AttentionBackend
from aioengine.models.runtime.interfaces import PromptInputs
from aioengine.models.runtime.transformers_model import TransformersModel

__all__ = ["Reference", "run_steps"]


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Result of the module's own forward over a prompt.

    `bounds`: where the steps' chunks begin and end; two that are equal are a step without any.
    `logits` [n, vocab]: of each chunk's last position. `noise` [n]: by how much rounding moves
    them, as a relative distance.
    """

    prompt: TrialPrompt
    inputs: PromptInputs | None
    bounds: tuple[int, ...]
    logits: Tensor
    noise: Tensor

    def expects(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Logits and noise of the rows that steps have found: the last comes twice, if one more."""
        logits, noise = (torch.cat([each, each[-1:]]) for each in (self.logits, self.noise))
        return logits[:num_rows], noise[:num_rows]

    @property
    def num_encoder_rows(self) -> int:
        """Rows that cross-attention reads."""
        memory = None if self.inputs is None else self.inputs.memory
        return self.prompt.num_encoder_rows if memory is None else memory.num_rows

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """The positions [start, end) of each step."""
        return list(pairwise(self.bounds))


def run_steps(
    model: TransformersModel,
    references: Sequence[Reference],
    block_size: int,
    backend: AttentionBackend | None,
) -> list[Tensor]:
    """Each prompt's logits at its reference's rows, by steps as the engine's own.

    The shortest begins anew behind the others, as a request that was preempted: its last row once
    more, of a single chunk over pages and a state that have been used.
    """
    if not references:
        return []
    tables = _Tables(model, references, block_size)
    runner = ModelRunner(model, tables.limits, backend)
    for number, reference in enumerate(references):
        _encode(runner, reference, str(number))
    found: list[list[Tensor]] = [[] for _ in references]
    # Every other prompt begins a step later: one decodes while another's second chunk runs.
    nothing = (0, 0)
    staggered = [
        [nothing, *each.chunks] if number % 2 else [*each.chunks, nothing]
        for number, each in enumerate(references)
    ]
    for step, chunks in enumerate(zip(*staggered, strict=True)):
        parts = [(number, *chunk) for number, chunk in enumerate(chunks) if chunk[0] < chunk[1]]
        if parts:
            plan = StepPlan(step, tuple(tables.sequence(*part) for part in parts))
            for (number, _, _), row in zip(parts, runner.logits(plan), strict=True):
                found[number].append(row)
    again = min(range(len(references)), key=lambda number: references[number].bounds[-1])
    plan = StepPlan(len(staggered[0]), (tables.sequence(again, 0, references[again].bounds[-1]),))
    found[again].append(runner.logits(plan)[0])
    return [torch.stack(rows) for rows in found]


def _encode(runner: ModelRunner, reference: Reference, name: str) -> None:
    """Have the encoder's rows of a prompt made; raises what goes wrong."""
    prompt, whole = reference.prompt, reference.prompt.whole
    work: list[tuple[int, Any]] = [(item.span.num_rows, item.features) for item in whole.items]
    if whole.encoder is not None:
        work = [(prompt.num_encoder_rows, whole.encoder)]
    memory = None if reference.inputs is None else reference.inputs.memory
    if memory is not None:
        media = [item.features for item in whole.items]
        work = [(memory.num_rows, {"media": media, "index": memory.index})]
    for num_rows, features in work:
        plan = EncodePlan(prompt.modality, (name,), (num_rows,), ())
        ((_, error),) = runner.encode(plan, [features])
        if error is not None:
            raise error


class _Tables:
    """Pages for the prompts: blocks of their own, in no order, of one pool."""

    def __init__(
        self, model: TransformersModel, references: Sequence[Reference], block_size: int
    ) -> None:
        self._references = references
        num_cross = sum(group.kind == "cross" for group in model.kv_groups)
        num_own = len(model.kv_groups) - num_cross
        own = [-(-each.bounds[-1] // block_size) for each in references]
        cross = [-(-each.num_encoder_rows // block_size) for each in references]
        total = sum(own) * num_own + sum(cross) * num_cross
        blocks = iter(random.Random(0).sample(range(total), total))

        def draw(counts: list[int], num_groups: int) -> list[tuple[tuple[int, ...], ...]]:
            groups = range(num_groups)
            return [tuple(tuple(islice(blocks, count)) for _ in groups) for count in counts]

        self._own, self._cross = draw(own, num_own), draw(cross, num_cross)
        longest = max(reference.bounds[-1] for reference in references)
        self.limits = Limits(
            max_num_seqs=len(references),
            max_num_batched_tokens=longest * len(references),
            max_model_len=longest,
            block_size=block_size,
            num_blocks=total,
            num_groups=num_own,
            num_cross_groups=num_cross,
            num_states=len(references),
            max_encoder_len=max(each.num_encoder_rows for each in references),
        )

    def sequence(self, number: int, start: int, end: int) -> SequencePlan:
        """The part [start, end) of a prompt."""
        reference = self._references[number]
        whole = reference.prompt.whole
        rows = tuple(
            RowSlice(str(number), position - start, row, length)
            for item in (() if reference.num_encoder_rows else whole.items)
            for position, row, length in item.span.row_runs(start, end)
        )
        is_first = start == 0 and reference.num_encoder_rows > 0
        return SequencePlan(
            request_id=str(number),
            epoch=0,
            start=start,
            end=end,
            token_ids=whole.token_ids[start:end],
            block_tables=self._own[number],
            rows=rows,
            samples=True,
            output_index=0,
            inputs=reference.inputs,
            cross_tables=self._cross[number],
            num_encoder_rows=reference.num_encoder_rows,
            encoder_key=str(number) if is_first else None,
            state=number,
        )
