"""Steps of single tokens that are captured once and replayed: in buckets, filled up.

A step's launches are those of any other with as many sequences, if all of its numbers come to the
same addresses in the same sizes. So there is a graph for each bucket, a number of sequences, and a
step that has fewer is filled up with ones of no request, whose keys and values go to a block that
is nobody's. By the layout of the step buffer a step shows that it is like the captured one; any
other runs as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from aioengine.core.plan import Limits, SequencePlan
from aioengine.execution.graphs import Capture, Graph
from aioengine.kernels.transfer import StepBuffer
from aioengine.models.runtime.interfaces import PromptInputs
from aioengine.sampling.sampler import Sampling

__all__ = ["CapturedSteps", "Computed", "plain"]

logger = logging.getLogger(__name__)

MOST_BANS = 256
"""Tokens that a sequence of a captured step may bar; each has a place in the step's buffer."""
NEARNESS = 1e-2
_NOTHING = Sampling()


class Computed(NamedTuple):
    """Result of a step: `logits` [n, vocab], and the tokens that were chosen by them, int64 [n]."""

    logits: Tensor
    token_ids: Tensor


Layout = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _Counts:
    replayed: int = 0
    launched: int = 0


class CapturedSteps:
    """One engine's graphs. For the launch thread.

    `counts`: steps that were replayed, and that were launched one kernel after the other.
    `buffer`: of the numbers of these steps; it never moves.
    """

    def __init__(
        self, capture: Capture, limits: Limits, inputs: PromptInputs | None, device: torch.device
    ) -> None:
        """`inputs`: what the model has of a prompt of one token, if anything."""
        self.counts = _Counts()
        self.buffer = StepBuffer(device, is_fixed=True)
        self.buffer.reserve(_most_bytes(limits))
        self._capture = capture
        self._limits = limits
        self._graphs: dict[tuple[int, Layout], tuple[Graph, Computed]] = {}
        self._buckets = [*_powers_of_two(limits.max_num_seqs)]
        self._filler = SequencePlan(
            request_id="",
            epoch=0,
            start=0,
            end=1,
            token_ids=(0,),
            block_tables=((limits.num_blocks,),) * limits.num_groups,
            rows=(),
            samples=True,
            output_index=0,
            sampling=_NOTHING,
            inputs=inputs,
            cross_tables=((limits.num_blocks,),) * limits.num_cross_groups,
            num_encoder_rows=1 if limits.num_cross_groups else 0,
            state=limits.num_states if limits.num_states else None,
        )

    def filled(self, sequences: Sequence[SequencePlan]) -> list[SequencePlan] | None:
        """The sequences of a step, and others, as many as a bucket has; None where it is none of
        single tokens."""
        if not self._graphs or not all(map(_is_single, sequences)):
            return None
        bucket = next(each for each in self._buckets if each >= len(sequences))
        return [*sequences, *[self._filler] * (bucket - len(sequences))]

    def run(self, num_sequences: int, work: Callable[[], Computed]) -> Computed:
        """Replay the graph of the step whose numbers were sent, or launch its `work`."""
        found = self._graphs.get((num_sequences, self.buffer.layout))
        if found is None:
            self.counts.launched += 1
            return work()
        graph, computed = found
        graph.replay()
        self.counts.replayed += 1
        return computed

    def take_all(self, stage: Callable[[Sequence[SequencePlan]], Callable[[], Computed]]) -> None:
        """Capture a step of each bucket. `stage`: sends the numbers of a step, and returns what
        launches it.

        What is replayed has to come to what is launched, of other numbers than were captured; else
        nothing is, with a warning.
        """
        try:
            for steps in self._trials():
                self._take(stage, *steps)
        except Exception as error:
            self._graphs.clear()
            reason = f"{type(error).__name__}: {error!s:.200}"
            logger.warning("steps are not captured, and cost the host more (%s)", reason)
        self.counts = _Counts()

    def _take(
        self,
        stage: Callable[[Sequence[SequencePlan]], Callable[[], Computed]],
        firsts: Sequence[SequencePlan],
        seconds: Sequence[SequencePlan],
        others: Sequence[SequencePlan],
    ) -> None:
        """Capture `seconds`, which come behind `firsts`, and replay it as `others`."""
        size = len(seconds)
        stage(firsts)()
        work = stage(seconds)
        work()  # all that is made once is made
        self._graphs[size, self.buffer.layout] = self._capture.capture(work)
        stage(firsts)()
        expected = stage(others)().logits.clone()
        stage(firsts)()
        found = self.run(size, stage(others)).logits
        nobody = self._limits.num_blocks
        own = [place for place, s in enumerate(others) if nobody not in s.block_tables[0]]
        if not _are_near(found[own], expected[own]):
            raise RuntimeError(f"{size} sequences come to other logits")

    def _trials(self) -> Iterator[list[list[SequencePlan]]]:
        """Three steps of each bucket, the largest first: one of first tokens, and two that may come
        behind it, whose sequences stand in other places. In blocks, and with states, of requests.
        """
        limits = self._limits
        size = -(-2 // limits.block_size)  # blocks of two tokens
        free = range(0, limits.num_blocks - size + 1, size)
        tables = [tuple(range(first, first + size)) for first in free]
        nobody = (limits.num_blocks,) * size
        for bucket in reversed(self._buckets):
            taken = iter(tables)
            firsts = []
            for number in range(bucket):
                own = tuple(next(taken, nobody) for _ in range(limits.num_groups))
                state = number if limits.num_states else None
                firsts.append(
                    replace(self._filler, token_ids=(number % 7,), block_tables=own, state=state)
                )
            seconds = [replace(s, start=1, end=2, token_ids=(3,)) for s in firsts]
            others = [replace(s, token_ids=(4,)) for s in reversed(seconds)]
            yield [firsts, seconds, others]


def _most_bytes(limits: Limits) -> int:
    """Bytes of the numbers of the largest step that is captured, at most."""
    longest = max(limits.max_model_len, limits.max_encoder_len)
    groups = limits.num_groups + limits.num_cross_groups
    tables = 4 * groups * (longest // limits.block_size + 2)
    return limits.max_num_seqs * (tables + 32 * groups + 4 * MOST_BANS + 256) + 4096


def _is_single(s: SequencePlan) -> bool:
    """Return whether a sequence has one token, behind a prompt or alone, and nothing beside it."""
    if s.end - s.start != 1 or not s.samples or s.rows or s.encoder_key:
        return False
    if s.inputs is not None and s.inputs.memory is not None:
        return False
    return s.sampling.prompt_logprobs is None or s.end >= len(s.sampling.prompt_token_ids)


def plain(s: SequencePlan) -> Sampling:
    """What a captured step chooses the token by: all that it can, or what comes first."""
    sampling: Sampling = s.sampling
    is_known = sampling.is_plain and len(sampling.bans_at(s.output_index)) <= MOST_BANS
    return sampling if is_known else _NOTHING


def _are_near(found: Tensor, expected: Tensor) -> bool:
    """Return whether logits [n, vocab] are the same, but for what rounding leaves."""
    apart = (found.double() - expected.double()).norm()
    return bool(apart <= NEARNESS * expected.double().norm())


def _powers_of_two(most: int) -> Iterator[int]:
    """1, 2, 4 and so on below `most`, and `most`."""
    size = 1
    while size < most:
        yield size
        size *= 2
    yield most
