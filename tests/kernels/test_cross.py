"""Cross-attention over pages, and biases by distance: both backends against dense arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from aioengine.kernels.attention import AttentionArgs, AttentionBackend
from aioengine.kernels.gather import GatherBackend
from aioengine.kernels.layer_slot import LayerSlot, StepContext, StepHolder
from aioengine.kernels.metadata import SeenRows, build_cross_metadata
from aioengine.kernels.reference import ReferenceBackend
from tests.kernels.paging import make_batch

BACKENDS: list[type[AttentionBackend]] = [GatherBackend, ReferenceBackend]
BLOCK_SIZE = 4
CASES = {
    "all new": ([3, 2, 1], [5, 8, 1], [True, True, True]),
    "decodes": ([1, 1, 1], [5, 80, 3], [False, False, False]),
    "mixed": ([1, 1, 4, 2], [7, 12, 9, 4], [True, False, False, True]),
}


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every query [n, Hq, D] sees every key [m, Hkv, D]."""
    group = query.shape[1] // key.shape[1]
    return scaled_dot_product_attention(
        query.transpose(0, 1),
        key.repeat_interleave(group, dim=1).transpose(0, 1),
        value.repeat_interleave(group, dim=1).transpose(0, 1),
        scale=0.3,
    ).transpose(0, 1)


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def build(
    tables: Sequence[Sequence[int]], case: tuple[list[int], list[int], list[bool]]
) -> Tensor | object:
    query_lens, context_lens, is_new = case
    return build_cross_metadata(
        block_size=BLOCK_SIZE,
        block_tables=tables,
        query_lens=query_lens,
        context_lens=context_lens,
        is_new=is_new,
    )


@pytest.mark.parametrize("backend_class", BACKENDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("softcap", [None, 1e6])
def test_every_token_sees_every_row(
    backend_class: type[AttentionBackend], name: str, softcap: float | None
) -> None:
    backend, case = backend_class(), CASES[name]
    query_lens, context_lens, is_new = case
    counts = [-(-n // BLOCK_SIZE) for n in context_lens]
    free = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[free.pop() for _ in range(count)] for count in counts]
    key_cache, value_cache = torch.full((2, sum(counts) + 2, BLOCK_SIZE, 2, 8), torch.nan).double()
    pages = key_cache, value_cache
    keys = [draw(n, 2, 8, seed=i) for i, n in enumerate(context_lens)]
    values = [draw(n, 2, 8, seed=10 + i) for i, n in enumerate(context_lens)]
    meta = build(tables, case)
    new = [i for i, each in enumerate(is_new) if each]
    old = [i for i, each in enumerate(is_new) if not each]
    if old:  # an earlier step has written these
        before = build([tables[i] for i in old], ([1] * len(old), [context_lens[i] for i in old],
                                                  [True] * len(old)))  # fmt: skip
        rows = torch.cat([keys[i] for i in old]), torch.cat([values[i] for i in old])
        backend.write_kv(rows, pages, before)
    if new:
        rows = torch.cat([keys[i] for i in new]), torch.cat([values[i] for i in new])
        assert len(meta.slot_blocks) == len(rows[0])
        backend.write_kv(rows, pages, meta)
    else:
        assert len(meta.slot_blocks) == 0
    query = draw(sum(query_lens), 4, 8, seed=99)
    # A cap that bounds nothing takes the explicit way to the same numbers.
    found = backend.attend(query, pages, meta, AttentionArgs(0.3, softcap=softcap))
    parts = torch.split(query, query_lens)
    expected = [dense(*part) for part in zip(parts, keys, values, strict=True)]
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-9, rtol=1e-9)


# (tokens, first row, rows) of each run of a sequence's tokens; rows of each; which are new.
RUNS: dict[str, tuple[list[list[tuple[int, int, int]]], list[int], list[bool]]] = {
    "runs": ([[(1, 0, 0), (2, 0, 9), (1, 4, 3)], [(5, 8, 5)]], [9, 13], [True, True]),
    "single tokens": ([[(1, 4, 2)], [(1, 0, 0)], [(1, 0, 6)]], [6, 5, 6], [False, True, False]),
    "a chunk beside them": ([[(1, 0, 5)], [(3, 0, 0), (4, 0, 7)]], [5, 7], [False, True]),
    "without rows": ([[(2, 0, 0)], [(1, 0, 3)]], [0, 3], [False, True]),
    "nobody sees": ([[(2, 0, 0)], [(1, 0, 0)]], [4, 0], [True, False]),
}


@pytest.mark.parametrize("backend_class", BACKENDS)
@pytest.mark.parametrize("name", RUNS)
def test_each_token_sees_its_run_of_rows(backend_class: type[AttentionBackend], name: str) -> None:
    backend, (runs, context_lens, is_new) = backend_class(), RUNS[name]
    query_lens = [sum(tokens for tokens, *_ in part) for part in runs]
    counts = [-(-n // BLOCK_SIZE) for n in context_lens]
    free = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[free.pop() for _ in range(count)] for count in counts]
    pages = torch.full((2, sum(counts) + 2, BLOCK_SIZE, 2, 8), torch.nan).double().unbind()
    keys = [draw(n, 2, 8, seed=i) for i, n in enumerate(context_lens)]
    values = [draw(n, 2, 8, seed=10 + i) for i, n in enumerate(context_lens)]
    for table, key, value, is_there in zip(tables, keys, values, is_new, strict=True):
        if len(key) and not is_there:
            before = build([table], ([1], [len(key)], [True]))
            backend.write_kv((key, value), pages, before)
    meta = build_cross_metadata(
        block_size=BLOCK_SIZE,
        block_tables=tables,
        query_lens=query_lens,
        context_lens=context_lens,
        is_new=is_new,
        seen=[[SeenRows(*run, is_sighted=run[2] > 3) for run in part] for part in runs],
    )
    query = draw(sum(query_lens), 4, 8, seed=99)
    holder = StepHolder()
    rows = [
        torch.cat([*(part[i] for i, new in enumerate(is_new) if new), draw(0, 2, 8, seed=0)])
        for part in (keys, values)
    ]
    with holder.hold(StepContext([meta], [pages], backend)):
        found = LayerSlot(0, 0, holder).attend(query, *rows, AttentionArgs(0.3))
    flat = [(i, run) for i, part in enumerate(runs) for run in part for _ in range(run[0])]
    for row, (i, (_, first, num)) in enumerate(flat):
        seen = slice(first, first + num)
        one = query[row : row + 1]
        expected = dense(one, keys[i][seen], values[i][seen])[0] if num else torch.zeros(4, 8)
        torch.testing.assert_close(found[row], expected.double(), atol=1e-9, rtol=1e-9)
    assert meta.sighted.tolist() == [num > 3 for _, (*_, num) in flat]
    for table, key in zip(tables, keys, strict=True):  # all that is new was written
        written = pages[0][table].flatten(0, 1)[: len(key)]
        torch.testing.assert_close(written, key)


@pytest.mark.parametrize("backend_class", BACKENDS)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("width", [1, 5, 40])
def test_a_bias_by_distance(
    backend_class: type[AttentionBackend], window: int | None, width: int
) -> None:
    chunks = [(9, 10), (20, 21), (0, 1), (0, 7), (5, 12)]
    batch = make_batch(chunks, backend=backend_class())
    table = draw(4, width, seed=5)
    found = batch.attend(backend_class(), scale=0.3, window=window, distance_bias=table)
    row = 0
    for i, (start, end) in enumerate(chunks):
        for position in range(start, end):
            first = 0 if window is None else max(0, position - window + 1)
            key = batch.keys[i][first : position + 1].repeat_interleave(2, dim=1)
            value = batch.values[i][first : position + 1].repeat_interleave(2, dim=1)
            scores = torch.einsum("hd,nhd->hn", batch.query[row], key) * 0.3
            back = [min(position - at, width - 1) for at in range(first, position + 1)]
            weights = (scores + table[:, back]).softmax(-1)
            expected = torch.einsum("hn,nhd->hd", weights, value)
            torch.testing.assert_close(found[row], expected, atol=1e-9, rtol=1e-9)
            row += 1
