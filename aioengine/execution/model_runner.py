"""Execution of plans: owns the model, the KV pages and the encoder rows on the device.

Steps run on the decoder's launch thread, encoder runs and drops on the encoder's, which may be the
same. The two share the encoder rows, and no lock: a step reads only rows whose run has ended, and
these are referenced from its plan to its commit, so they are not dropped meanwhile. The runner
follows plans to the letter and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, islice

import numpy as np
import torch
from torch import Tensor

from aioengine.core.plan import UNSAMPLED, EncodePlan, Limits, SequencePlan, StepPlan, StepResult
from aioengine.errors import InvalidRequestError, MediaError
from aioengine.execution.attention_steps import stage_attention
from aioengine.execution.decode_steps import DecodeSteps, find_decode_steps
from aioengine.execution.state_steps import stage_states
from aioengine.kernels.attention import AttentionBackend, select_backend
from aioengine.kernels.pool import LayerPages, PageFormat, empty_pool
from aioengine.kernels.staging import Staged, StepBuffer
from aioengine.kernels.transfer import to_device, to_host
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.models.state.memory import StateMemory
from aioengine.sampling.logprobs import ScoreColumns, Scores, score
from aioengine.sampling.sampler import Sampled, Sampler
from aioengine.types import Launched, TokenLogprobs

__all__ = ["PROMPT_ROWS", "ModelRunner"]

PROMPT_ROWS = "prompt"
"""Modality of embeddings that a prompt is made of: nothing encodes them."""

Features = Mapping[str, Tensor]
_PromptScores = list[tuple[SequencePlan, list[Scores]]]

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
    ) -> None:
        """`pages`: of keys and values; None: of the model's dtype."""
        self.model = model
        self._limits = limits
        self._rows: dict[str, Tensor] = {}  # content key -> encoder rows [n, hidden]
        self._buffer = StepBuffer(model.device)
        # The tokens that the step before has sampled, on the device: by a request's place in it.
        self._last = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=model.device)
        self._places: dict[str, int] = {}
        self._sampler = Sampler()
        self._pages = _allocate_pages(model, limits, pages or PageFormat(model.dtype))
        self._backend = backend or select_backend("auto", model.device)
        self.decode_steps: DecodeSteps | None = None
        """Takes steps that need no Python, if this model has such; see `find_decode_steps`."""
        self._states: StateMemory | None = None
        if model.states:
            self._states = StateMemory(model.states, limits.num_states, model.dtype, model.device)
        model.bind(self._pages, self._backend)

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the pool that all keys and values lie in."""
        return max((keys.untyped_storage().nbytes() for keys, _ in self._pages), default=0)

    def find_decode_steps(self) -> None:
        """Try whether steps can do without Python. To be called before the first step."""
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
        sequences, chosen = _ordered(plan), [s for s in plan.sequences if s.samples]
        compute = self._stage(sequences, chosen)
        score_prompts = self._stage_scores(sequences)
        sample = self._sampler.prepare(
            self._buffer,
            [s.sampling for s in chosen],
            [s.output_index for s in chosen],
            self.model.vocab_size,
        )
        self._buffer.send()
        hidden, rows = compute()
        scored = score_prompts(hidden)
        self._places = {s.request_id: place for place, s in enumerate(chosen)}
        if not chosen:
            return Launched(_reader(chosen, None, scored, {}))
        logits = self.model.compute_logits(hidden if rows is None else hidden[rows])
        masks, failures = _masks(chosen)
        sampled = sample(logits, masks)
        self._last[: len(chosen)] = sampled.token_ids
        return Launched(_reader(chosen, sampled, scored, failures))

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Logits [n, vocab] of a step's sequences that sample, in the plan's order.

        In float32 at least. No token is chosen.
        """
        compute = self._stage(_ordered(plan), [s for s in plan.sequences if s.samples])
        self._buffer.send()
        hidden, rows = compute()
        return self.model.compute_logits(hidden if rows is None else hidden[rows])

    def _stage(
        self, sequences: Sequence[SequencePlan], chosen: Sequence[SequencePlan]
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Stage a step; what is returned computes it, once the buffer has been sent.

        It gives hidden states [T, hidden], and the rows of `chosen`; None: all, as they lie.
        """
        put = self._buffer.put
        starts = [s.start for s in sequences]
        ends = [s.end for s in sequences]
        embed = self._stage_tokens(sequences)
        metadata = stage_attention(self.model, self._limits, self._buffer, sequences)
        states = None
        if self._states is not None:
            states = stage_states(self._states, self._buffer, sequences)
        prompts = [None if s.inputs is None else s.inputs.positions for s in sequences]
        positions = put(self.model.positions_for(starts, ends, prompts))
        tails = accumulate(end - start for start, end in zip(starts, ends, strict=True))
        last = {s.request_id: tail - 1 for s, tail in zip(sequences, tails, strict=True)}
        wanted = [last[s.request_id] for s in chosen]
        # Most steps read all rows, as they lie.
        is_whole = wanted == [*range(sum(ends) - sum(starts))]
        places = None if is_whole else put(wanted)
        reads_all = any(s.sampling and s.sampling.prompt_logprobs is not None for s in sequences)

        def compute() -> tuple[Tensor, Tensor | None]:
            encoded = [self._rows[s.encoder_key] for s in sequences if s.encoder_key is not None]
            rows = None if places is None else places.tensor
            hidden = self.model.forward(
                embed(),
                positions.tensor,
                [built() for built in metadata],
                encoded,
                rows=None if reads_all else rows,
                states=None if states is None else states(),
            )
            return hidden, rows

        return compute

    def _stage_scores(self, sequences: Sequence[SequencePlan]) -> Callable[[Tensor], _PromptScores]:
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

        def score_all(hidden: Tensor) -> _PromptScores:
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

    def _stage_tokens(self, sequences: Sequence[SequencePlan]) -> Callable[[], Tensor]:
        """Stage the step's tokens; what is returned gives their embeddings [T, hidden], encoder
        rows in their places."""
        put = self._buffer.put
        token_ids = [token for s in sequences for token in s.token_ids]
        unknown = [at for at, token in enumerate(token_ids) if token == UNSAMPLED]
        ids = put(max(token, 0) for token in token_ids)
        # Only a sequence's last token can be one that the step before has sampled.
        owners = [s.request_id for s in sequences if s.token_ids[-1] == UNSAMPLED]
        filled = (put(unknown), put(self._places[owner] for owner in owners)) if unknown else None
        is_row = self._rows_mask(sequences, len(token_ids))
        mask = None if is_row is None else put(is_row, torch.bool)

        def embed() -> Tensor:
            if filled is not None:
                at, places = filled
                ids.tensor[at.tensor] = self._last[places.tensor]
            if mask is None:
                return self.model.embed_input_ids(ids.tensor)
            pieces = [
                self._rows[piece.key][piece.row : piece.row + piece.count]
                for s in sequences
                for piece in s.rows
            ]
            return self.model.embed_input_ids(ids.tensor, pieces, mask.tensor)

        return embed

    @staticmethod
    def _rows_mask(sequences: Sequence[SequencePlan], num_tokens: int) -> Tensor | None:
        """Mark the step's tokens that encoder rows stand for: bool [T], None if there are none."""
        if not any(s.rows for s in sequences):
            return None
        is_row = torch.zeros(num_tokens, dtype=torch.bool)
        base = 0
        for s in sequences:
            for piece in s.rows:
                is_row[base + piece.position : base + piece.position + piece.count] = True
            base += len(s.token_ids)
        return is_row


def _ordered(plan: StepPlan) -> list[SequencePlan]:
    """Single tokens first: attention takes them as one batch."""
    return sorted(plan.sequences, key=lambda s: s.end - s.start > 1)


def _masks(chosen: Sequence[SequencePlan]) -> tuple[list[Tensor | None], dict[str, Exception]]:
    """Bit masks of the tokens that grammars allow, and the requests whose grammar has failed."""
    masks: list[Tensor | None] = []
    failures: dict[str, Exception] = {}
    for s in chosen:
        mask = None
        if s.sampling is not None and s.sampling.constraint is not None:
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
        if barred and s.sampling is not None and (s.sampling.adjustments or s.sampling.constraint)
    }


def _reader(
    chosen: Sequence[SequencePlan],
    sampled: Sampled | None,
    prompts: _PromptScores,
    failures: dict[str, Exception],
) -> Callable[[], StepResult]:
    """Send what a step has found to the host, in one copy; what is returned reads it."""
    groups: list[Sequence[Tensor]] = [part for _, parts in prompts for part in parts]
    if sampled is not None:
        barred = [] if sampled.is_barred is None else [sampled.is_barred]
        groups += [sampled.scores or [], barred, [sampled.token_ids]]
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
            return StepResult((), prompt_logprobs=prompt_logprobs)
        scores, barred, (token_ids,) = columns
        return StepResult(
            token_ids.tolist(),
            failures | _barred(chosen, barred[0].tolist()) if barred else failures,
            _read_scores(chosen, sampled.rows, Scores(*scores)) if scores else {},
            prompt_logprobs,
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


def _allocate_pages(model: TransformersModel, limits: Limits, form: PageFormat) -> list[LayerPages]:
    """Key and value pages per layer, views of one pool of bytes.

    A block is one page, which holds the block's keys and values of all layers of its group; all
    groups draw pages from the same pool. Within a block a head's rows lie one after the other: who
    attends with one head reads on and on.
    """
    page_bytes = max(g.block_bytes(limits.block_size, form.row_bytes) for g in model.kv_groups)
    page_size = page_bytes // form.dtype.itemsize
    pool = empty_pool(limits.num_blocks * page_size, form.dtype, model.device)

    def view(offset: int, heads: int, dim: int) -> Tensor:
        size = (limits.num_blocks, limits.block_size, heads, dim)
        strides = (page_size, dim, limits.block_size * dim, 1)
        return pool.as_strided(size, strides, offset)

    pages: list[LayerPages] = []
    for group, index in model.layer_groups:
        spec = model.kv_groups[group]
        heads, *dims = spec.num_kv_heads, spec.key_dim, spec.value_dim
        key_dim, value_dim = map(form.row_size, dims)
        offset = index * limits.block_size * heads * (key_dim + value_dim)
        values = offset + limits.block_size * heads * key_dim
        pages.append(LayerPages((view(offset, heads, key_dim), view(values, heads, value_dim))))
    return pages
