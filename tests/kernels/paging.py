"""A paged batch made by hand: shuffled blocks, poisoned rows, and the same keys, dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from aioengine.kernels.attention import AttentionArgs, AttentionBackend, AttentionMetadata
from aioengine.kernels.metadata import build_metadata
from aioengine.kernels.pool import BYTES, row_bytes

NEARNESS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""How near a device's attention is to that of the reference on the CPU, by dtype."""


@dataclass(frozen=True)
class PagedBatch:
    """`query` [T, Hq, Dk]; caches as a backend sees them; `keys[i]` [context, Hkv, Dk] in order."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    meta: AttentionMetadata
    keys: list[Tensor]
    values: list[Tensor]

    def attend(self, backend: AttentionBackend, **options: object) -> Tensor:
        return backend.attend(
            self.query,
            (self.key_cache, self.value_cache),
            self.meta,
            AttentionArgs(**{"scale": self.query.shape[-1] ** -0.5, **options}),  # type: ignore[arg-type]
        )

    def attend_there(
        self, backend: AttentionBackend, move: Callable[[Tensor], Any], **options: Any
    ) -> Any:
        """Attend with all tensors, those of `options` too, where `move` takes them."""

        def moved(value: Any) -> Any:
            return move(value) if isinstance(value, Tensor) else value

        meta = {each.name: moved(getattr(self.meta, each.name)) for each in fields(self.meta)}
        there = replace(
            self,
            query=move(self.query),
            key_cache=move(self.key_cache),
            value_cache=move(self.value_cache),
            meta=replace(self.meta, **{**meta, "scratch": {}}),
        )
        return there.attend(backend, **{name: moved(value) for name, value in options.items()})


def make_batch(
    chunks: Sequence[tuple[int, int]],
    *,
    backend: AttentionBackend,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    key_dim: int = 8,
    value_dim: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float64,
    strided: bool = True,
    in_bytes: bool = False,
    seed: int = 0,
) -> PagedBatch:
    """Sequences computing [start, end) each; everything before `start` is in the pages already.

    Rows that no sequence owns are NaN. `strided`: the layer's keys and values lie in the pages of
    one pool, as an engine has them, which also holds other tensors; head by head. `in_bytes`: rows
    of caches are in 8 bits.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    counts = [-(-end // block_size) for _, end in chunks]
    num_blocks = sum(counts) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    tables = [[free.pop() for _ in range(count)] for count in counts]
    dims = key_dim, value_dim
    sizes = (row_bytes(key_dim), row_bytes(value_dim)) if in_bytes else dims
    kind = BYTES if in_bytes else dtype
    key_cache, value_cache = _caches(num_blocks, block_size, num_kv_heads, sizes, kind, strided)
    keys = [draw(end, num_kv_heads, key_dim) for _, end in chunks]
    values = [draw(end, num_kv_heads, value_dim) for _, end in chunks]

    past = [(i, start) for i, (start, _) in enumerate(chunks) if start]
    if past:
        _write(backend, key_cache, value_cache, block_size, tables, keys, values, past)
    meta = build_metadata(
        block_size=block_size,
        block_tables=tables,
        starts=[start for start, _ in chunks],
        ends=[end for _, end in chunks],
    )
    if chunks:
        new_keys = [key[start:] for key, (start, _) in zip(keys, chunks, strict=True)]
        new_values = [value[start:] for value, (start, _) in zip(values, chunks, strict=True)]
        new = torch.cat(new_keys), torch.cat(new_values)
        backend.write_kv(new, (key_cache, value_cache), meta)
    query = draw(meta.num_tokens, num_heads, key_dim)
    return PagedBatch(query, key_cache, value_cache, meta, keys, values)


def _caches(
    num_blocks: int,
    block_size: int,
    num_heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    strided: bool,
) -> tuple[Tensor, Tensor]:
    """Pages of keys and of values."""
    sizes = [block_size * num_heads * dim for dim in dims]
    nothing = 255 if dtype is BYTES else torch.nan  # of bytes, scales that are NaN
    if not strided:
        key, value = (
            torch.full((num_blocks, block_size, num_heads, dim), nothing, dtype=dtype)
            for dim in dims
        )
        return key, value
    # Another layer of the same shape before, and a few odd elements after.
    behind = 0 if dims[0] % 8 else dims[0]
    pool = torch.full((num_blocks, 2 * sum(sizes) + behind), nothing, dtype=dtype)
    parts = pool.split([sum(sizes), *sizes, behind], dim=1)
    key, value = (
        part.view(num_blocks, num_heads, block_size, dim).transpose(1, 2)
        for part, dim in zip(parts[1:3], dims, strict=True)
    )
    return key, value


def _write(
    backend: AttentionBackend,
    key_cache: Tensor,
    value_cache: Tensor,
    block_size: int,
    tables: Sequence[Sequence[int]],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    past: Sequence[tuple[int, int]],
) -> None:
    meta = build_metadata(
        block_size=block_size,
        block_tables=[tables[i] for i, _ in past],
        starts=[0] * len(past),
        ends=[end for _, end in past],
    )
    new_keys = torch.cat([keys[i][:end] for i, end in past])
    new_values = torch.cat([values[i][:end] for i, end in past])
    backend.write_kv((new_keys, new_values), (key_cache, value_cache), meta)
