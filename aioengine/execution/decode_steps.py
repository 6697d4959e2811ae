"""Steps of single tokens that need no Python on their way: which plans are such steps, and how they
are put into the queue.

A step may go this way if each of its sequences has one token, and the next one is the most probable
or drawn, and does not depend on those before it in other ways than by what the model has computed.
Whether a model's steps can is found in a trial, on random tokens: the logits have to be the model's
own, bit for bit.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aioengine.core.plan import UNSAMPLED, Limits, SequencePlan, StepPlan, StepResult
from aioengine.kernels.attention import AttentionBackend
from aioengine.kernels.cpu.backend import CpuBackend
from aioengine.kernels.cpu.decode_queue import DecodeQueue, QueuedToken
from aioengine.kernels.metadata import build_cross_metadata, build_metadata
from aioengine.kernels.pool import LayerPages
from aioengine.models.fusion.decoder_plan import decode_parts_of
from aioengine.models.runtime.transformers_model import TransformersModel

__all__ = ["DecodeSteps", "find_decode_steps"]

logger = logging.getLogger(__name__)


class DecodeSteps:
    """One engine's queue of such steps, filled from plans. For the loop's thread."""

    def __init__(self, queue: DecodeQueue) -> None:
        self.queue = queue

    def put(self, plan: StepPlan, places: Mapping[str, int]) -> int | None:
        """Put a step into the queue, to be computed behind those that are there; its number.

        `places`: in the step before, of each request. None for a plan that has to go another way.
        """
        sequences = plan.sequences
        if not all(map(_is_plain, sequences)):
            return None
        tokens = [_queued(s, places) for s in sequences]
        if None in tokens:
            return None
        groups = zip(*(s.block_tables + s.cross_tables for s in sequences), strict=True)
        return self.queue.put([token for token in tokens if token], [*groups])

    def read(self, plan: StepPlan, number: int) -> tuple[StepResult, float, float]:
        """The result of a step that is done, and when it began and ended."""
        token_ids, began, ended = self.queue.read(number, len(plan.sequences))
        return StepResult(token_ids), began, ended


def find_decode_steps(
    model: TransformersModel,
    limits: Limits,
    pages: Sequence[LayerPages],
    backend: AttentionBackend,
    last: Tensor,
) -> DecodeSteps | None:
    """The way for a model's steps of single tokens without Python, if they can take one.

    `pages`: of each layer, as they are bound to the model, free as yet; `last` [max_num_seqs]
    int64: the tokens of the step before.
    """
    if type(backend) is not CpuBackend or model.device.type != "cpu" or model.states:
        return None
    if any(group.chunk is not None for group in model.kv_groups):  # whose tables have a beginning
        return None
    if not hasattr(os, "eventfd"):  # by which a queue tells of steps: Linux has it alone
        return None
    found = decode_parts_of(model.model, model.decoder())
    embeddings = model.model.get_input_embeddings().weight
    if found is None or not backend.knows(embeddings, pages[0][0]):
        return None
    operators, parts = found
    longest = max(limits.max_model_len, limits.max_encoder_len)
    try:
        queue = DecodeQueue(
            parts,
            model.dtype,
            operators.caches(pages),
            is_cross=[False] * limits.num_groups + [True] * limits.num_cross_groups,
            max_blocks=longest // limits.block_size + 2,
            max_len=limits.max_model_len,
            last=last,
        )
    except (OSError, RuntimeError) as error:  # no file for an event; what does not go together
        logger.info("steps of single tokens go through Python: %s", error)
        return None
    return DecodeSteps(queue) if _agrees(model, limits, queue) else None


def _is_plain(s: SequencePlan) -> bool:
    """Return whether all that a sequence wants is a token behind its one token."""
    if s.end - s.start != 1 or not s.samples or s.rows or s.encoder_key:
        return False
    sampling = s.sampling
    return sampling is None or sampling.is_plain


def _queued(s: SequencePlan, places: Mapping[str, int]) -> QueuedToken | None:
    """A sequence as the queue takes it; None where its position is not a number of its own."""
    position = s.start
    known = None if s.inputs is None else s.inputs.positions
    if known is not None:
        prompt, delta = known
        if s.start < prompt.shape[-1]:
            return None
        position += delta
    (token,) = s.token_ids
    if token == UNSAMPLED:
        token = -1 - places[s.request_id]
    numbers = token, position, s.end, int(s.is_stored), s.num_encoder_rows
    if s.sampling is None:
        return QueuedToken(*numbers)
    banned, choice = s.sampling.bans_at(s.output_index), s.sampling.choice(s.output_index)
    return QueuedToken(*numbers, banned, choice)


# The trial.

_LENGTHS = (5, 2)
"""Tokens of the sequences that are tried."""
_MEMORY_ROWS = 3
"""Of an encoder, for each."""


@torch.inference_mode()
def _agrees(model: TransformersModel, limits: Limits, queue: DecodeQueue) -> bool:
    """Return whether the queue comes to the model's own logits and tokens, behind random prompts.

    What the pages of the first blocks hold is overwritten.
    """
    num_groups = limits.num_groups + limits.num_cross_groups
    count = min(len(_LENGTHS), limits.max_num_seqs, limits.num_blocks // num_groups)
    most = min(limits.block_size, limits.max_model_len) - 1
    if most < 2 or not count:
        return False
    lengths = [max(1, min(length, most - 1)) for length in _LENGTHS[:count]]
    tables = [[[g * count + i] for i in range(count)] for g in range(num_groups)]
    generator = torch.Generator().manual_seed(0)
    vocab = min(model.vocab_size, len(model.model.get_input_embeddings().weight))
    ids = [torch.randint(vocab, (n + 1,), generator=generator) for n in lengths]
    num_rows = min(_MEMORY_ROWS, limits.max_encoder_len)
    memory = [
        torch.randn(num_rows, model.row_size, generator=generator).to(model.dtype)
        for _ in range(count if limits.num_cross_groups else 0)
    ]

    def run(starts: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Logits [n, vocab] of the last of these tokens."""
        tokens = torch.cat([x[a:b] for x, a, b in zip(ids, starts, ends, strict=True)])
        sizes = [b - a for a, b in zip(starts, ends, strict=True)]
        is_first = not any(starts)
        own = [
            build_metadata(
                block_size=limits.block_size, block_tables=table, starts=starts, ends=ends
            )
            for table in tables[: limits.num_groups]
        ]
        cross = [
            build_cross_metadata(
                block_size=limits.block_size,
                block_tables=table,
                query_lens=sizes,
                context_lens=[num_rows] * count,
                is_new=[is_first] * count,
            )
            for table in tables[limits.num_groups :]
        ]
        hidden = model.forward(
            model.embed_input_ids(tokens),
            model.positions_for(starts, ends, None),
            own + cross,
            memory if is_first else [],
        )
        return model.compute_logits(hidden[torch.tensor(sizes).cumsum(0) - 1])

    try:
        run([0] * count, lengths)
        wanted = run(lengths, [n + 1 for n in lengths])
        tokens = [
            QueuedToken(int(x[-1]), n, n + 1, num_memory_rows=num_rows)
            for x, n in zip(ids, lengths, strict=True)
        ]
        number = queue.put(tokens, tables)
        if number is None:
            return False
        queue.let()
        queue.run(0)
        queue.see()
        found, _, _ = queue.read(number, count)
        logits = queue.logits(count)
    except Exception as error:
        logger.info("steps of single tokens go through Python: %s", error)
        return False
    is_same = torch.equal(logits.to(wanted.dtype), wanted)
    return is_same and found == wanted.argmax(-1).tolist()
