"""Execution of plans: owns the model, the KV pages and the encoder rows on the device.

Steps run on the decoder's launch thread, encoder runs and drops on the encoder's, which may be the
same. The two share the encoder rows, and no lock: a step reads only rows whose run has ended, and
these are referenced from its plan to its commit, so they are not dropped meanwhile. The runner
follows plans to the letter and decides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain

import torch
from torch import Tensor

from aioengine.core.plan import EncodePlan, Limits, SequencePlan, StepPlan, StepResult
from aioengine.errors import MediaError
from aioengine.execution.attention_steps import stage_attention
from aioengine.execution.captured_steps import (
    GREEDY,
    Bucket,
    CapturedSteps,
    Computed,
    FilledStep,
)
from aioengine.execution.decode_steps import DecodeSteps, find_decode_steps
from aioengine.execution.graphs import Capture
from aioengine.execution.memory_budget import allocate_pages
from aioengine.execution.state_steps import stage_states
from aioengine.execution.step_results import PromptScores, masks_of, reader
from aioengine.execution.token_steps import stage_tokens
from aioengine.execution.warm_steps import WRITTEN, warm_steps
from aioengine.kernels.attention import AttentionBackend, select_backend
from aioengine.kernels.pool import PageFormat
from aioengine.kernels.transfer import Staged, StepBuffer, to_device
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.models.runtime.whole_pass import run_classifier
from aioengine.models.state.memory import StateMemory
from aioengine.sampling.logprobs import Scores, score
from aioengine.sampling.pooling import PooledRows, find_pooled, stage_pooling
from aioengine.sampling.sampler import Sampled, Sampler, Sampling
from aioengine.types import Launched

__all__ = ["PROMPT_ROWS", "ModelRunner"]

logger = logging.getLogger(__name__)

PROMPT_ROWS = "prompt"
"""Modality of embeddings that a prompt is made of: nothing encodes them."""

Features = Mapping[str, Tensor]

NOTHING_POOLED = PooledRows((), (), ())
SCORED_ROWS = 256
"""Prompt positions whose logits are in memory at a time."""


class ModelRunner:
    """One engine's hands on the device."""

    def __init__(
        self,
        model: TransformersModel,
        limits: Limits,
        backend: AttentionBackend | None = None,
        pages: PageFormat | None = None,
        capture: Capture | None = None,
    ) -> None:
        """`pages`: of keys and values; None: of the model's dtype. `capture`: the device's."""
        self.model = model
        self._limits = limits
        self._rows: dict[str, Tensor] = {}  # content key -> encoder rows [n, hidden]
        self._buffer = StepBuffer(model.device)
        # The tokens that the step before has sampled, on the device: by a request's place in it.
        self._last = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=model.device)
        self._places: dict[str, int] = {}
        self._sampler = Sampler()
        self._backend = backend or select_backend("auto", model.device)
        # One more of each, which is nobody's, for what fills captured steps up.
        spare = 0 if capture is None else 1
        self._pages = allocate_pages(model, limits, pages or PageFormat(model.dtype), spare)
        captures = getattr(self._backend, "captures", None)
        self._has_kernels = captures is not None and all(map(captures, self._pages))
        self._captured: CapturedSteps | None = None
        is_one_launch = self._sampler.is_one_launch(model.device)
        if capture is not None and self._has_kernels and is_one_launch:
            self._captured = CapturedSteps(capture, limits, model)
        self.decode_steps: DecodeSteps | None = None
        """Takes steps that need no Python, if this model has such; see `find_decode_steps`."""
        self._states: StateMemory | None = None
        if model.states:
            num_states = limits.num_states + spare
            self._states = StateMemory(model.states, num_states, model.dtype, model.device)
        model.bind(self._pages, self._backend)

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the pool that all keys and values lie in."""
        return max((keys.untyped_storage().nbytes() for keys, _ in self._pages), default=0)

    def find_decode_steps(self) -> None:
        """Compile all kernels, and try whether steps of single tokens can do without Python in
        between: from a queue on a CPU, by graphs on a GPU. To be called before the first step, on
        the launch thread."""
        if self._has_kernels or self._sampler.is_one_launch(self.model.device):
            self._warm()
        if self._captured is not None:
            self._capture(self._captured)
        self.decode_steps = find_decode_steps(
            self.model, self._limits, self._pages, self._backend, self._last
        )

    def put(self, plan: StepPlan) -> int | None:
        """Queue a step behind the one before, which this does not compute; its number in
        `decode_steps`. None where `step` has to."""
        number = None if self.decode_steps is None else self.decode_steps.put(plan, self._places)
        if number is not None:
            self._places = {s.request_id: place for place, s in enumerate(plan.sequences)}
        return number

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> Launched[StepResult]:
        """Launch one step of the decoder."""
        captured = self._captured
        filled = None if captured is None else captured.fill(plan.sequences)
        if captured is not None and filled is not None:
            return self._step_captured(captured, filled)
        sequences, chosen = _ordered(plan), [s for s in plan.sequences if s.samples]
        embed, pooled = self._stage_tokens(self._buffer, sequences), find_pooled(sequences)
        compute = self._stage(self._buffer, sequences, chosen, pooled=pooled)
        score_prompts = self._stage_scores(sequences)
        pool = stage_pooling(self._buffer, pooled, partial(run_classifier, self.model.model))
        sample = self._sampler.prepare(
            self._buffer,
            [s.sampling for s in chosen],
            [s.output_index for s in chosen],
            self.model.vocab_size,
        )
        self._buffer.send()
        hidden, rows = compute(embed())
        scored, vectors = score_prompts(hidden), pool(hidden)
        self._places = {s.request_id: place for place, s in enumerate(chosen)}
        if not chosen:
            return Launched(reader(chosen, None, scored, {}, vectors))
        logits = self.model.compute_logits(hidden if rows is None else hidden[rows])
        masks, failures = masks_of(chosen)
        sampled = sample(logits, masks)
        self._last[: len(chosen)] = sampled.token_ids
        return Launched(reader(chosen, sampled, scored, failures, vectors))

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Logits [n, vocab] of a step's sequences that sample, in the plan's order.

        In float32 at least. No token is chosen.
        """
        sequences, chosen = _ordered(plan), [s for s in plan.sequences if s.samples]
        embed = self._stage_tokens(self._buffer, sequences)
        compute = self._stage(self._buffer, sequences, chosen)
        self._buffer.send()
        hidden, rows = compute(embed())
        return self.model.compute_logits(hidden if rows is None else hidden[rows])

    def _step_captured(self, captured: CapturedSteps, step: FilledStep) -> Launched[StepResult]:
        """Replay a step, if it is like one that was captured, else launch it."""
        chosen, sample = step.chosen, None
        samplings, choices = [s.sampling for s in chosen], captured.choices(chosen)
        begin, work = self._stage_captured(captured, step, choices)
        if choices != samplings:  # more is wanted than is captured
            indices = [s.output_index for s in chosen]
            vocab_size = self.model.vocab_size
            sample = self._sampler.prepare(self._buffer, samplings, indices, vocab_size)
        if sample is not None or step.bucket.is_open:
            self._buffer.send()
        captured.buffer.send()
        begin()
        logits, token_ids = captured.run(step.bucket, work)
        self._places = {s.request_id: place for place, s in enumerate(chosen)}
        if not chosen:
            return Launched(reader(chosen, None, [], {}))
        masks, failures = masks_of(chosen)
        sampled = Sampled(token_ids[: len(chosen)], None)
        if sample is not None:
            sampled = sample(logits[: len(chosen)], masks)
            self._last[: len(chosen)] = sampled.token_ids
        return Launched(reader(chosen, sampled, [], failures))

    def _stage_captured(
        self, captured: CapturedSteps, step: FilledStep, choices: Sequence[Sampling]
    ) -> tuple[Callable[[], None], Callable[[], Computed]]:
        """Stage a step that is filled up. `choices`: of the tokens of its `chosen` sequences.

        What is returned is called once the buffers have been sent: what comes before the captured
        work, and the work. This keeps the tokens for the step behind it.
        """
        bucket, buffer = step.bucket, captured.buffer
        tokens_in = self._buffer if bucket.is_open else buffer
        embed = self._stage_tokens(tokens_in, step.sequences, is_fixed=not bucket.is_open)
        compute = self._stage(buffer, step.sequences, step.chosen, bucket)
        missing = bucket.num_rows - len(step.chosen)
        asked = [*choices, *[GREEDY] * missing]
        indices = [*[s.output_index for s in step.chosen], *[0] * missing]
        choose = self._sampler.prepare(buffer, asked, indices, self.model.vocab_size)

        def begin() -> None:
            # Rows of encoders, at whatever places, are no part of what is captured.
            captured.put(embed() if bucket.is_open else None)

        def work() -> Computed:
            embeds = captured.embeds
            hidden, rows = compute(embed() if embeds is None else embeds[: bucket.num_tokens])
            logits = self.model.logits(hidden if rows is None else hidden[rows])
            logits = captured.keep_logits(logits)
            token_ids = choose(logits, ()).token_ids
            self._last[: bucket.num_rows] = token_ids
            return Computed(logits, token_ids)

        return begin, work

    def _warm(self) -> None:
        """Run a step of each kind that kernels are compiled for, over pages that nobody reads."""
        size = 1, self.model.row_size
        row = torch.zeros(size, dtype=self.model.dtype, device=self.model.device)
        self.keep(WRITTEN, row)
        try:
            for plan in warm_steps(self.model, self._limits):
                self.step(plan).read()
        except Exception as error:  # they are compiled when they are needed
            reason = f"{type(error).__name__}: {error!s:.200}"
            logger.warning("kernels are not compiled beforehand (%s)", reason)
        self.drop([WRITTEN])
        self._places = {}

    @torch.inference_mode()
    def _capture(self, captured: CapturedSteps) -> None:
        for page in chain.from_iterable(self._pages):
            page[-1].zero_()  # the block that is nobody's is read all the same

        def stage(step: FilledStep) -> Callable[[], Computed]:
            begin, work = self._stage_captured(captured, step, captured.choices(step.chosen))
            self._buffer.send()
            captured.buffer.send()
            begin()
            return work

        captured.take_all(stage)

    def _stage_tokens(
        self, buffer: StepBuffer, sequences: Sequence[SequencePlan], *, is_fixed: bool = False
    ) -> Callable[[], Tensor]:
        return stage_tokens(
            self.model,
            buffer,
            sequences,
            encoded=self._rows,
            last=self._last,
            places=self._places,
            is_fixed=is_fixed,
        )

    def _stage(
        self,
        buffer: StepBuffer,
        sequences: Sequence[SequencePlan],
        chosen: Sequence[SequencePlan],
        bucket: Bucket | None = None,
        pooled: PooledRows = NOTHING_POOLED,
    ) -> Callable[[Tensor], tuple[Tensor, Tensor | None]]:
        """Stage a step; what is returned computes it, once the buffer has been sent.

        Of embeddings [T, hidden] it gives hidden states [T, hidden], and the rows of `chosen`;
        None: all, as they lie. `bucket`: of a captured step. `pooled`: what else will be read.
        """
        put = buffer.put
        starts = [s.start for s in sequences]
        ends = [s.end for s in sequences]
        metadata = stage_attention(
            self.model,
            self._limits,
            buffer,
            sequences,
            is_captured=bucket is not None,
            is_open=bucket is not None and bucket.is_open,
        )
        states = None if self._states is None else stage_states(self._states, buffer, sequences)
        prompts = [s.inputs and s.inputs.positions for s in sequences]
        positions_cpu = self.model.positions_for(starts, ends, prompts)
        if bucket is not None and bucket.is_open:
            # Of no request, and behind all others: a model may know no such positions.
            positions_cpu[..., sum(s.end - s.start for s in sequences if s.request_id) :] = 0
        positions = put(positions_cpu)
        places = None
        if bucket is None or bucket.is_open:
            wanted = _last_rows(sequences, chosen)
            # Most steps read all rows, as they lie.
            if bucket is not None or wanted != [*range(sum(ends) - sum(starts))]:
                missing = 0 if bucket is None else bucket.num_rows - len(wanted)
                places = put([*wanted, *pooled.rows, *[0] * missing])
        # What wants these is not captured.
        reads_all = bucket is None and (
            bool(pooled.runs)
            or any(s.sampling and s.sampling.prompt_logprobs is not None for s in sequences)
        )

        def compute(embeds: Tensor) -> tuple[Tensor, Tensor | None]:
            encoded = [self._rows[s.encoder_key] for s in sequences if s.encoder_key is not None]
            rows = None if places is None else places.tensor
            hidden = self.model.forward(
                embeds,
                positions.tensor,
                [built() for built in metadata],
                encoded,
                rows=None if reads_all else rows,
                states=None if states is None else states(),
            )
            return hidden, rows if rows is None else rows[: len(rows) - len(pooled.rows)]

        return compute

    def _stage_scores(self, sequences: Sequence[SequencePlan]) -> Callable[[Tensor], PromptScores]:
        """Stage the prompt tokens that this step's positions predict; what is returned gives their
        scores, of hidden states [T, hidden]."""
        found: list[tuple[SequencePlan, list[tuple[int, Staged]]]] = []
        base = 0
        for s in sequences:
            if s.sampling is not None and s.sampling.prompt_logprobs is not None:
                targets = s.sampling.prompt_token_ids[s.start + 1 : s.end + 1]
                firsts = range(0, len(targets), SCORED_ROWS)
                put = self._buffer.put
                found.append(
                    (s, [(base + at, put(targets[at : at + SCORED_ROWS])) for at in firsts])
                )
            base += s.end - s.start

        def score_part(hidden: Tensor, first: int, ids: Tensor, count: int) -> Scores:
            logits = self.model.compute_logits(hidden[first : first + len(ids)])
            # A placeholder's id may lie beyond the vocabulary; its score is not shown.
            return score(logits, ids.clamp_max(logits.shape[-1] - 1), count)

        def score_all(hidden: Tensor) -> PromptScores:
            return [
                (
                    s,
                    [
                        score_part(hidden, at, ids.tensor, s.sampling.prompt_logprobs)
                        for at, ids in parts
                    ],
                )
                for s, parts in found
            ]

        return score_all

    @torch.inference_mode()
    def encode(
        self, plan: EncodePlan, features: Sequence[Features]
    ) -> list[tuple[str, Exception | None]]:
        """Run the encoder over the plan's items and keep their rows.

        Returns each key with None or what went wrong with that item; the others are unharmed.
        """
        self.drop(plan.evicted)
        try:
            encoded: list[Tensor | Exception] = list(self._encode(plan.modality, features))
            assert len(encoded) == len(features)
        except Exception:
            encoded = [self._encode_alone(plan.modality, item) for item in features]
        outcomes: list[tuple[str, Exception | None]] = []
        for key, num_rows, rows in zip(plan.keys, plan.num_rows, encoded, strict=True):
            error = self._check_rows(rows, num_rows)
            if isinstance(rows, Tensor) and error is None:
                # A view would keep its whole batch in memory, which the ledger knows nothing of.
                shares = rows.untyped_storage().nbytes() > rows.nbytes
                self._rows[key] = rows.clone() if shares else rows
            outcomes.append((key, error))
        return outcomes

    def keep(self, key: str, rows: Tensor) -> None:
        """Hold encoder rows that were not made here."""
        self._rows[key] = rows

    def drop(self, keys: Sequence[str]) -> None:
        """Forget the rows of evicted items."""
        for key in keys:
            self._rows.pop(key, None)

    def _encode(self, modality: str, features: Sequence[Features]) -> Sequence[Tensor]:
        if modality == PROMPT_ROWS:
            return [to_device(item["rows"], self.model.device) for item in features]
        return self.model.encode(modality, features)

    def _encode_alone(self, modality: str, item: Features) -> Tensor | Exception:
        """One item of a batch that failed: the fault has to be separated from its neighbours."""
        try:
            (rows,) = self._encode(modality, [item])
            return rows
        except Exception as error:
            return error

    def _check_rows(self, rows: object, num_rows: int) -> Exception | None:
        """Describe what is wrong with an item's rows, if anything: a later step must not stumble on
        it."""
        if isinstance(rows, Exception):
            return rows
        want = (num_rows, self.model.row_size)
        if isinstance(rows, Tensor) and rows.shape == want and rows.dtype == self.model.dtype:
            return None
        shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        way_out = ""
        if isinstance(rows, Tensor) and rows.dim() == 2 and len(rows) < num_rows:
            way_out = (
                "; if only some of their tokens take rows, the model's processor has to say which: "
                "PromptUpdateDetails.select_token_id"
            )
        return MediaError(
            f"item was encoded to {shape}, but its placeholders take {want}{way_out}",
            parameter="item",
            value=shape,
        )


def _last_rows(sequences: Sequence[SequencePlan], chosen: Sequence[SequencePlan]) -> list[int]:
    """The row of the last token of each that is chosen of a step's sequences."""
    tails = accumulate([s.end - s.start for s in sequences])
    last = {s.request_id: tail - 1 for s, tail in zip(sequences, tails, strict=True)}
    return [last[s.request_id] for s in chosen]


def _ordered(plan: StepPlan) -> list[SequencePlan]:
    """Single tokens first: attention takes them as one batch."""
    return sorted(plan.sequences, key=lambda s: s.end - s.start > 1)
