"""Steps that are captured once and replayed: in buckets, filled up.

A step's launches are those of any other with as many tokens and sequences, if all of its numbers
come to the same addresses in the same sizes. So there are graphs for some sizes, and a step is
filled up to the next of them with tokens of no request, whose keys and values go to a block that is
nobody's. By the layout of the step buffer a step shows that it is like the captured one; any other
runs as it is.

    single tokens   [ a | b | c | - ]                       a bucket of 4 sequences, each with one
    any tokens      [ a a a a a | b | c c c | - - - - ]     of 256 tokens, and the most sequences

Of the second kind the embeddings come from outside, as rows of encoders lie at other places in each
step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from aioengine.core.plan import Limits, SequencePlan
from aioengine.execution.graphs import Capture, Graph
from aioengine.kernels.transfer import StepBuffer
from aioengine.models.fusion.trial import is_near
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.sampling.sampler import Sampling

__all__ = ["GREEDY", "Bucket", "CapturedSteps", "Computed", "FilledStep"]

logger = logging.getLogger(__name__)

LEAST_TOKENS = 256
"""Of the smallest step of any tokens that there is a graph for, unless all are smaller."""
MOST_BANS = 256
"""Tokens that a sequence of a captured step may bar; each has a place in the step's buffer."""
GREEDY = Sampling()


class Computed(NamedTuple):
    """Result of a step: `logits` [n, vocab], and the tokens that were chosen by them, int64 [n]."""

    logits: Tensor
    token_ids: Tensor


class Bucket(NamedTuple):
    """Sizes of steps that share a graph. `num_rows`: tokens that are chosen. `is_open`: sequences
    have any number of tokens, else one each."""

    num_tokens: int
    num_sequences: int
    num_rows: int
    is_open: bool


class FilledStep(NamedTuple):
    """A step of its bucket's size. `chosen`: of the plan's sequences, those that sample."""

    bucket: Bucket
    sequences: list[SequencePlan]
    chosen: list[SequencePlan]


_Stage = Callable[[FilledStep], Callable[[], Computed]]


@dataclass(slots=True)
class Counts:
    """Steps that were `replayed`, and that were `launched` one kernel after the other."""

    replayed: int = 0
    launched: int = 0


class CapturedSteps:
    """One engine's graphs. For the launch thread.

    `buffer`: of the numbers of these steps, large enough for all. `embeds` [most tokens, width]: of
    the step, where they come from outside.
    """

    embeds: Tensor | None = None

    def __init__(self, capture: Capture, limits: Limits, model: TransformersModel) -> None:
        self.counts = Counts()
        self.buffer = StepBuffer(model.device, is_fixed=True)
        self.buffer.reserve(_most_bytes(limits))
        self._capture = capture
        self._limits = limits
        self._row_size, self._least_width = model.row_size, 0
        self._most_bans = min(MOST_BANS, model.vocab_size - 1)
        self._graphs: dict[object, tuple[Graph, Computed]] = {}
        self._embeds: dict[int, Tensor] = {}  # by their width
        self._logits: Tensor | None = None
        singles = _doubled(1, limits.max_num_seqs)
        self._singles = [Bucket(count, count, count, False) for count in singles]
        rows = limits.max_num_seqs
        # One token is a step of single ones.
        is_one = min(limits.max_num_batched_tokens, limits.max_model_len) < 2
        sizes = () if is_one else _doubled(LEAST_TOKENS, limits.max_num_batched_tokens)
        self._open = [Bucket(size, rows + 1, rows, True) for size in sizes]
        self._filler = SequencePlan(
            request_id="",
            epoch=0,
            start=1,  # where there are states, first tokens have more to do
            end=2,
            token_ids=(0,),
            block_tables=((limits.num_blocks,) * -(-2 // limits.block_size),) * limits.num_groups,
            rows=(),
            samples=True,
            output_index=0,
            sampling=GREEDY,
            inputs=model.prompt_inputs((0,)),
            cross_tables=((limits.num_blocks,),) * limits.num_cross_groups,
            num_encoder_rows=1 if limits.num_cross_groups else 0,
            state=limits.num_states if limits.num_states else None,
        )

    def fill(self, sequences: Sequence[SequencePlan]) -> FilledStep | None:
        """Fill a step up to the size of a bucket; None where it is like none that was captured."""
        if not self._graphs or not all(map(_is_plain, sequences)):
            return None
        count = sum([s.end - s.start for s in sequences])
        if count == len(sequences) and all([s.samples and not s.rows for s in sequences]):
            return self._fill(next(x for x in self._singles if x.num_tokens >= count), sequences)
        # What has states, or reads an encoder's rows, has more to do for what is no single token.
        if self._limits.num_states or self._limits.num_cross_groups:
            return None
        bucket = next((x for x in self._open if x.num_tokens >= count), None)
        return None if bucket is None else self._fill(bucket, sequences)

    def choices(self, sequences: Sequence[SequencePlan]) -> list[Sampling]:
        """Return what a captured step chooses each token by: all that it can, or what comes first
        where more is wanted."""
        return [
            s.sampling
            if s.sampling.is_plain
            and (
                s.sampling.adjustments is None
                or len(s.sampling.bans_at(s.output_index)) <= self._most_bans
            )
            else GREEDY
            for s in sequences
        ]

    def put(self, embeds: Tensor | None) -> None:
        """Take the embeddings of the step that comes; None where it makes them itself."""
        if embeds is None:
            self.embeds = None
            return
        count, width = embeds.shape
        if width < self._least_width:
            width, embeds = self._least_width, pad(embeds, (0, self._least_width - width))
        if width not in self._embeds:
            size = self._limits.max_num_batched_tokens, width
            self._embeds[width] = embeds.new_zeros(size)
        self.embeds = self._embeds[width]
        self.embeds[:count] = embeds

    def keep_logits(self, logits: Tensor) -> Tensor:
        """Logits [n, vocab] in float32 at least, in memory that the graphs share."""
        if self._logits is None:
            dtype = torch.promote_types(logits.dtype, torch.float32)
            self._logits = logits.new_empty(self._limits.max_num_seqs, logits.shape[1], dtype=dtype)
        return self._logits[: len(logits)].copy_(logits)

    def run(self, bucket: Bucket, work: Callable[[], Computed]) -> Computed:
        """Replay the graph of the step whose numbers were sent, or launch its `work`."""
        found = self._graphs.get(self._key(bucket))
        if found is None:
            self.counts.launched += 1
            return work()
        graph, computed = found
        graph.replay()
        self.counts.replayed += 1
        return computed

    def take_all(self, stage: _Stage) -> None:
        """Capture a step of each bucket. `stage`: sends the numbers of a step, and returns what
        launches it.

        What is replayed has to come to what is launched, of other numbers than were captured; else
        none of the same kind is, with a warning.
        """
        is_plain = not (self._limits.num_states or self._limits.num_cross_groups)
        for buckets in (self._open if is_plain else (), self._singles):
            before = dict(self._graphs)
            try:
                for bucket in reversed(buckets):
                    self._take(stage, bucket)
                    if bucket.is_open:
                        self._least_width = self._row_size  # embeddings with rows may be wider
                        self._take(stage, bucket)
                        self._least_width = 0
            except Exception as error:
                self._graphs, self._least_width = before, 0
                what = "steps of single tokens" if buckets is self._singles else "other steps"
                reason = f"{type(error).__name__}: {error!s:.200}"
                logger.warning("%s are not captured, and cost the host more (%s)", what, reason)
        self.counts = Counts()

    def _take(self, stage: _Stage, bucket: Bucket) -> None:
        """Capture a step that comes behind another, and replay it with other numbers."""
        trials = self._open_trials(bucket) if bucket.is_open else self._single_trials(bucket)
        first, second, other = (self._fill(bucket, each) for each in trials)
        stage(first)()
        work = stage(second)
        if self._key(bucket) in self._graphs:  # of wider embeddings, where none are
            return
        work()  # all that is made once is made
        self._graphs[self._key(bucket)] = self._capture.capture(work)
        stage(first)()
        expected = stage(other)().logits.clone()
        stage(first)()
        found = self.run(bucket, stage(other)).logits
        if self.counts.launched:
            raise RuntimeError("the numbers of steps of one size lie at different places")
        nobody = self._limits.num_blocks
        own = [
            place
            for place, s in enumerate(other.chosen)
            if all(nobody not in table for table in s.block_tables)
        ]
        if not own or not is_near(found[own], expected[own]):
            raise RuntimeError(f"{bucket} comes to other logits")

    def _key(self, bucket: Bucket) -> object:
        width = None if self.embeds is None else self.embeds.shape[1]
        return bucket, width, self.buffer.layout, self.buffer.num_moves

    def _fill(self, bucket: Bucket, sequences: Sequence[SequencePlan]) -> FilledStep:
        chosen = [s for s in sequences if s.samples]
        missing = bucket.num_sequences - len(sequences)
        if not bucket.is_open:
            return FilledStep(bucket, [*sequences, *[self._filler] * missing], chosen)
        rest = bucket.num_tokens - sum(s.end - s.start for s in sequences)
        fillers = [self._filler_of(rest), *[self._filler_of(0)] * (missing - 1)]
        return FilledStep(bucket, [*sequences, *fillers], chosen)

    def _filler_of(self, num_tokens: int) -> SequencePlan:
        """A sequence of so many tokens, of no request."""
        blocks = (self._limits.num_blocks,) * -(-num_tokens // self._limits.block_size)
        return replace(
            self._filler,
            start=0,
            end=num_tokens,
            token_ids=(0,) * num_tokens,
            block_tables=(blocks,) * self._limits.num_groups,
            samples=False,
        )

    def _single_trials(self, bucket: Bucket) -> Iterator[list[SequencePlan]]:
        """Three steps: one of first tokens, and two that may come behind it, whose sequences stand
        in other places."""
        firsts = self._begun(bucket.num_sequences, 2)
        seconds = [replace(s, start=1, end=2, token_ids=(3,)) for s in firsts]
        yield from (firsts, seconds, [replace(s, token_ids=(4,)) for s in reversed(seconds)])

    def _open_trials(self, bucket: Bucket) -> Iterator[list[SequencePlan]]:
        """The same of any numbers of tokens: some end, some go on, and the number of sequences is
        another one."""
        size = min(4, bucket.num_tokens // 2, self._limits.max_model_len // 2)
        one, *others = self._begun(min(2, self._limits.max_num_seqs), 2 * size)
        long = replace(one, end=size, token_ids=(5,) * size)
        yield [long]
        yield [replace(one, start=size, end=size + 1, token_ids=(3,)), *others]
        more = [replace(s, end=size, token_ids=(6,) * size) for s in others]
        yield [*more, replace(one, start=size, end=2 * size, token_ids=(4,) * size)]

    def _begun(self, count: int, num_tokens: int) -> list[SequencePlan]:
        """Sequences of first tokens, with blocks for so many, and states, of requests."""
        limits = self._limits
        size = -(-num_tokens // limits.block_size)
        free = range(0, limits.num_blocks - size + 1, size)
        tables = iter([tuple(range(first, first + size)) for first in free])
        nobody = (limits.num_blocks,) * size
        return [
            replace(
                self._filler,
                request_id=f"trial {number}",
                start=0,
                end=1,
                token_ids=(number % 7,),
                block_tables=tuple(next(tables, nobody) for _ in range(limits.num_groups)),
                state=number if limits.num_states else None,
            )
            for number in range(count)
        ]


def _most_bytes(limits: Limits) -> int:
    """Bytes of the numbers of the largest step that is captured, at most."""
    longest = max(limits.max_model_len, limits.max_encoder_len)
    groups = limits.num_groups + limits.num_cross_groups
    tables = 4 * groups * (longest // limits.block_size + 2)
    sequences = limits.max_num_seqs + 1
    tokens = limits.max_num_batched_tokens * (32 + 8 * groups + 4)
    return tokens + sequences * (tables + 32 * groups + 4 * MOST_BANS + 256) + 4096


def _is_plain(s: SequencePlan) -> bool:
    """Return whether a sequence wants nothing of a step but hidden states, and one token maybe."""
    if s.encoder_key or not (s.inputs is None or s.inputs.memory is None):
        return False
    if s.end - s.start > 1 and s.inputs is not None and s.inputs.block_ids is not None:
        return False
    sampling = s.sampling
    if sampling is None:
        return False
    return sampling.prompt_logprobs is None or s.start + 1 >= len(sampling.prompt_token_ids)


def _doubled(size: int, most: int) -> Iterator[int]:
    """`size`, twice as much and so on below `most`, and `most`."""
    while size < most:
        yield size
        size *= 2
    yield most
