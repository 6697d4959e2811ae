"""Steps of no request, by which kernels are compiled before the first request comes.

A kernel of our own is a program for each kind of layer, and of step: a few single tokens, whose
keys are split among programs; many, whose keys are not; a chunk; and one with tokens that see each
other both ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from aioengine.core.plan import Limits, SequencePlan, StepPlan
from aioengine.models.runtime.interfaces import PromptInputs
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.sampling.sampler import Sampling

__all__ = ["WRITTEN", "warm_steps"]

WRITTEN = "written"
"""The key of an encoder's output of nothing."""


def warm_steps(model: TransformersModel, limits: Limits) -> Iterator[StepPlan]:
    """A step of each kind. What it reads of the encoder is one row, of the key `WRITTEN`."""
    size = min(3, limits.max_model_len)
    first = SequencePlan(
        request_id="0",
        epoch=0,
        start=0,
        end=1,
        token_ids=(0,),
        block_tables=(tuple(range(-(-size // limits.block_size))),) * limits.num_groups,
        rows=(),
        samples=True,
        output_index=0,
        sampling=Sampling(),
        inputs=model.prompt_inputs((0,)),
        cross_tables=((0,),) * limits.num_cross_groups,
        num_encoder_rows=1 if limits.num_cross_groups else 0,
        encoder_key=WRITTEN if limits.num_cross_groups else None,
        state=0 if limits.num_states else None,
    )
    yield StepPlan(0, (first,))
    # All at the same places, as nobody reads what comes of it; but each has a state of its own.
    count = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    others = [
        replace(first, request_id=str(n), encoder_key=None, state=n if limits.num_states else None)
        for n in range(1, count)
    ]
    yield StepPlan(0, (first, *others))
    if min(size, limits.max_num_batched_tokens) < 2:
        return
    inputs = model.prompt_inputs((0, 0))
    chunk = replace(first, end=2, token_ids=(0, 0), inputs=inputs)
    yield StepPlan(0, (chunk,))
    if any(spec.latent for spec in model.specs) and limits.max_model_len > 2:
        # Keys and values are made of all latents, or of none, by how many are new.
        yield StepPlan(0, (replace(chunk, start=1, end=3),))
    if type(model).blocks is not TransformersModel.blocks:
        seen = replace(inputs or PromptInputs(), block_ids=torch.zeros(2, dtype=torch.int32))
        yield StepPlan(0, (replace(chunk, inputs=seen),))
