"""From plans to tensors: owns the model, the KV pages and the encoder rows on the device.

Every method runs on the device's launch thread, one at a time, so nothing here is locked. The
runner follows plans to the letter and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aioengine.errors import MediaError
from aioengine.kernels.attention import AttentionMetadata, build_metadata, select_backend
from aioengine.models.adapter import TransformersModel
from aioengine.plan import UNSAMPLED, EncodePlan, Limits, SequencePlan, StepPlan
from aioengine.sampler import sample

__all__ = ["Runner"]

Features = Mapping[str, Tensor]


class Runner:
    """One engine's hands on the device."""

    def __init__(self, model: TransformersModel, limits: Limits) -> None:
        self.model = model
        self._limits = limits
        self._rows: dict[str, Tensor] = {}  # content key -> encoder rows [n, hidden]
        self._sampled: dict[str, int] = {}  # request -> the token of the step before
        model.bind(_allocate_pages(model, limits), select_backend("auto", model.device))

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> list[int]:
        """Run one step of the decoder: a token id for each sequence that samples, in order."""
        # Attention takes single tokens as one batch, and wants them first.
        sequences = sorted(plan.sequences, key=lambda s: s.end - s.start > 1)
        starts = [s.start for s in sequences]
        ends = [s.end for s in sequences]
        metadata = self._metadata(sequences, starts, ends)
        positions = self.model.positions_for(starts, ends).to(self.model.device)
        hidden = self.model.forward(self._embed(sequences), positions, metadata)
        sampling = [(i, s) for i, s in enumerate(sequences) if s.samples]
        self._sampled = {}
        if not sampling:
            return []
        last = [sum(metadata[0].query_lens[: i + 1]) - 1 for i, _ in sampling]
        logits = self.model.compute_logits(hidden[torch.tensor(last, device=hidden.device)])
        chosen = [s for _, s in sampling]
        token_ids = sample(logits, [s.sampling for s in chosen], [s.output_index for s in chosen])
        self._sampled = dict(zip((s.request_id for s in chosen), token_ids.tolist(), strict=True))
        return [self._sampled[s.request_id] for s in plan.sequences if s.samples]

    @torch.inference_mode()
    def encode(
        self, plan: EncodePlan, features: Sequence[Features]
    ) -> list[tuple[str, Exception | None]]:
        """Run the encoder over the plan's items and keep their rows.

        Returns each key with None or what went wrong with that item; the others are unharmed.
        """
        self.drop(plan.evicted)
        try:
            encoded: list[Tensor | Exception] = list(self.model.encode(plan.modality, features))
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

    def drop(self, keys: Sequence[str]) -> None:
        """Forget the rows of evicted items."""
        for key in keys:
            self._rows.pop(key, None)

    def _encode_alone(self, modality: str, item: Features) -> Tensor | Exception:
        """One item of a batch that failed: the fault has to be told from its neighbours."""
        try:
            (rows,) = self.model.encode(modality, [item])
            return rows
        except Exception as error:
            return error

    def _check_rows(self, rows: object, num_rows: int) -> Exception | None:
        """What is wrong with an item's rows, if anything: a later step must not stumble on it."""
        if isinstance(rows, Exception):
            return rows
        want = (num_rows, self.model.hidden_size)
        if isinstance(rows, Tensor) and rows.shape == want and rows.dtype == self.model.dtype:
            return None
        shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        return MediaError(
            f"item was encoded to {shape}, but its placeholders take {want}",
            parameter="item",
            value=shape,
        )

    def _metadata(
        self, sequences: Sequence[SequencePlan], starts: Sequence[int], ends: Sequence[int]
    ) -> list[AttentionMetadata]:
        return [
            build_metadata(
                block_size=self._limits.block_size,
                block_tables=[s.block_tables[group] for s in sequences],
                starts=starts,
                ends=ends,
                device=self.model.device,
            )
            for group in range(self._limits.num_groups)
        ]

    def _embed(self, sequences: Sequence[SequencePlan]) -> Tensor:
        """Embeddings [T, hidden] of the step's tokens, encoder rows in their places."""
        device = self.model.device
        token_ids = [
            self._sampled[s.request_id] if token == UNSAMPLED else token
            for s in sequences
            for token in s.token_ids
        ]
        ids = torch.tensor(token_ids, device=device)
        pieces: list[Tensor] = []
        is_row = torch.zeros(len(token_ids), dtype=torch.bool)
        base = 0
        for sequence in sequences:
            for piece in sequence.rows:
                pieces.append(self._rows[piece.key][piece.row : piece.row + piece.count])
                is_row[base + piece.position : base + piece.position + piece.count] = True
            base += len(sequence.token_ids)
        if not pieces:
            return self.model.embed_input_ids(ids)
        return self.model.embed_input_ids(ids, pieces, is_row.to(device))


def _allocate_pages(model: TransformersModel, limits: Limits) -> list[tuple[Tensor, Tensor]]:
    """Key and value pages per layer, views of one pool of bytes.

    A block is one page, which holds the block's keys and values of all layers of its group; all
    groups draw pages from the same pool.
    """
    itemsize = model.dtype.itemsize
    page_bytes = max(g.block_bytes(limits.block_size, itemsize) for g in model.kv_groups)
    page_numbers = page_bytes // itemsize
    pool = torch.empty(limits.num_blocks * page_numbers, dtype=model.dtype, device=model.device)

    def view(offset: int, heads: int, dim: int) -> Tensor:
        size = (limits.num_blocks, limits.block_size, heads, dim)
        return pool.as_strided(size, (page_numbers, heads * dim, dim, 1), offset)

    pages = []
    for group, index in model.layer_groups:
        spec = model.kv_groups[group]
        keys = limits.block_size * spec.num_kv_heads * spec.key_dim
        values = limits.block_size * spec.num_kv_heads * spec.value_dim
        offset = index * (keys + values)
        pages.append(
            (
                view(offset, spec.num_kv_heads, spec.key_dim),
                view(offset + keys, spec.num_kv_heads, spec.value_dim),
            )
        )
    return pages
