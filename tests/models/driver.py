"""A runner made by hand: block tables with shuffled blocks, chunks at will, greedy tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aioengine.kernels.attention import select_backend
from aioengine.kernels.metadata import build_metadata
from aioengine.models.runtime.transformers_model import TransformersModel
from tests.support.tiny import IMAGE


@dataclass
class Request:
    """One sequence. `rows`: its images' encoder rows, in the order of their placeholders."""

    tokens: list[int]
    rows: list[Tensor] = field(default_factory=list)
    num_computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    @property
    def all_logits(self) -> Tensor:
        return torch.cat(self.logits)


class Driver:
    """Runs chunks of several requests as one flat batch through a model's pages."""

    def __init__(
        self,
        model: TransformersModel,
        *,
        num_blocks: int = 128,
        block_size: int = 4,
        backend: str = "gather",
        seed: int = 0,
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.free = [list(range(num_blocks)) for _ in model.kv_groups]
        shuffle = random.Random(seed)
        for blocks in self.free:
            shuffle.shuffle(blocks)
        model.bind(self._make_caches(), select_backend(backend))

    def _make_caches(self) -> list[tuple[Tensor, Tensor]]:
        """Pages hold the blocks of all layers of a group; unwritten rows are NaN."""
        pools = []
        for group in self.model.kv_groups:
            numel = group.block_bytes(self.block_size, lambda dim: dim)
            pool = torch.full((self.num_blocks, numel), torch.nan, dtype=self.model.dtype)
            pools.append(pool)
        caches = []
        for index, place in self.model.layer_groups:
            group, pool = self.model.kv_groups[index], pools[index]
            rows = self.block_size * group.num_kv_heads
            start = place * rows * (group.key_dim + group.value_dim)
            middle = start + rows * group.key_dim
            shape = (self.num_blocks, self.block_size, group.num_kv_heads)
            caches.append(
                (
                    pool[:, start:middle].view(*shape, group.key_dim),
                    pool[:, middle : middle + rows * group.value_dim].view(*shape, group.value_dim),
                )
            )
        return caches

    @torch.inference_mode()
    def step(self, chunks: Sequence[tuple[Request, int]]) -> None:
        """Compute the next `count` tokens of each request; those with one token go first."""
        chunks = sorted(chunks, key=lambda chunk: chunk[1] != 1)
        starts = [request.num_computed for request, _ in chunks]
        ends = [request.num_computed + count for request, count in chunks]
        for request, end in zip((request for request, _ in chunks), ends, strict=True):
            self._grow(request, end)
        metadata = [
            build_metadata(
                block_size=self.block_size,
                block_tables=[request.tables[group] for request, _ in chunks],
                starts=starts,
                ends=ends,
            )
            for group in range(len(self.model.kv_groups))
        ]
        embeds = self._embed([request for request, _ in chunks], starts, ends)
        hidden = self.model.forward(embeds, self.model.positions_for(starts, ends), metadata)
        logits = self.model.compute_logits(hidden)
        counts = [count for _, count in chunks]
        for (request, count), part in zip(chunks, torch.split(logits, counts), strict=True):
            request.logits.append(part)
            request.num_computed += count

    def _grow(self, request: Request, end: int) -> None:
        request.tables = request.tables or [[] for _ in self.free]
        for table, free in zip(request.tables, self.free, strict=True):
            while len(table) * self.block_size < end:
                table.append(free.pop())

    def _embed(
        self, requests: Sequence[Request], starts: Sequence[int], ends: Sequence[int]
    ) -> Tensor:
        ids: list[int] = []
        rows: list[Tensor] = []
        for request, start, end in zip(requests, starts, ends, strict=True):
            before = request.tokens[:start].count(IMAGE)
            inside = request.tokens[start:end].count(IMAGE)
            if inside:
                rows.append(torch.cat(request.rows)[before : before + inside])
            ids += request.tokens[start:end]
        input_ids = torch.tensor(ids)
        is_multimodal = input_ids == IMAGE
        return self.model.embed_input_ids(input_ids, rows or None, is_multimodal)

    def generate(self, requests: Sequence[Request], num_tokens: int, chunk: int) -> None:
        """Greedy tokens for all; prompts go in chunks of `chunk`, so steps are mixed."""
        goals = {id(request): len(request.tokens) + num_tokens for request in requests}
        while True:
            active = [r for r in requests if len(r.tokens) < goals[id(r)]]
            if not active:
                return
            self.step(
                [(r, min(chunk + i, len(r.tokens) - r.num_computed)) for i, r in enumerate(active)]
            )
            for request in active:
                if request.num_computed == len(request.tokens):
                    request.tokens.append(int(request.logits[-1][-1].argmax()))
