"""Attention by Triton's kernels against the reference, run by Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioengine.kernels.attention import AttentionArgs, Unread, select_backend
from aioengine.kernels.gather import GatherBackend
from aioengine.kernels.metadata import (
    SeenRows,
    build_cross_metadata,
    build_metadata,
)
from aioengine.kernels.reference import ReferenceBackend
from aioengine.kernels.torch_operators import TorchOperators
from aioengine.kernels.triton import are_right_on, operators_on
from aioengine.kernels.triton import backend as launches
from aioengine.kernels.triton.backend import TritonBackend
from aioengine.kernels.triton.operators import TritonOperators
from tests.kernels.paging import PagedBatch, make_batch

MIXED = [(9, 10), (3, 4), (70, 71), (0, 7), (5, 12), (60, 85), (0, 1), (4, 8)]
CHUNKS = {
    "mixed": MIXED,
    "decode": [(9, 10), (200, 201), (3, 4), (0, 1)],
    "prefill": [(0, 5), (0, 80), (0, 9)],
    "mid-block": [(2, 11)],
    "boundaries": [(3, 4), (4, 5), (0, 4), (4, 8), (63, 64), (64, 128)],
}
NEARNESS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""To the reference in the same dtype: what rounding the result, and weights, leaves."""


def assert_near(batch: PagedBatch, **options: Any) -> None:
    expected = batch.attend(ReferenceBackend(), **options)
    found = batch.attend(TritonBackend(), **options)
    assert found.dtype == expected.dtype and torch.isfinite(expected).all()
    near = NEARNESS[expected.dtype]
    torch.testing.assert_close(found, expected, atol=near, rtol=near)


def of(chunks: list[tuple[int, int]], dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    return make_batch(chunks, backend=GatherBackend(), dtype=dtype, **sizes)


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("window", [None, 1, 5, 70])
@pytest.mark.parametrize("extras", ["", "softcap", "sinks", "both"])
def test_the_reference(name: str, window: int | None, extras: str) -> None:
    options: dict[str, Any] = {"window": window}
    if extras in ("softcap", "both"):
        options["softcap"] = 1.5
    if extras in ("sinks", "both"):
        options["sinks"] = torch.linspace(-2, 2, 4)
    assert_near(of(CHUNKS[name]), **options)


@pytest.mark.parametrize("dtype", NEARNESS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (7, 1), (40, 1)])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (72, 40), (6, 12)])
def test_shapes(dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    chunks = [(40, 41), (3, 4), (0, 3), (30, 36)]
    names = ("num_heads", "num_kv_heads", "key_dim", "value_dim")
    sizes = dict(zip(names, heads + dims, strict=True))
    for strided in (True, False):
        assert_near(of(chunks, dtype, strided=strided, **sizes))


@pytest.mark.parametrize("dim", [96, 128, 192, 256])
def test_long_heads(dim: int) -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "key_dim": dim, "value_dim": dim}
    for dtype in NEARNESS:
        assert_near(of([(20, 21), (10, 30)], dtype, block_size=16, **sizes), softcap=5.0)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    decodes=st.lists(st.integers(0, 150), max_size=3),
    chunks=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), max_size=3),
    heads=st.sampled_from([(1, 1), (4, 2), (8, 2), (6, 3), (5, 1)]),
    block_size=st.sampled_from([1, 2, 16, 32, 48]),
    window=st.one_of(st.none(), st.integers(1, 64)),
    softcap=st.sampled_from([None, 2.0]),
    num_cores=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 9),
)
def test_everywhere(
    decodes: list[int],
    chunks: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    softcap: float | None,
    num_cores: int,
    seed: int,
) -> None:
    """Also of keys in no, few and many splits."""
    spans = [(n, n + 1) for n in decodes] + [(start, start + n) for start, n in chunks]
    batch = of(spans, num_heads=heads[0], num_kv_heads=heads[1], block_size=block_size, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "num_cores", lambda _: num_cores)
        assert_near(batch, window=window, softcap=softcap)


@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_blocks_see_both_ways(window: int | None, in_window: bool) -> None:
    batch = of([(6, 26), (4, 5), (0, 90)])
    ids = torch.full((20 + 1 + 90,), -1, dtype=torch.int32)
    ids[3:9], ids[12:15], ids[13:14] = 0, 1, -1
    ids[21 + 10 : 21 + 80] = 4
    ids[21 + 82 : 21 + 84] = 5
    meta = replace(
        batch.meta, block_ids=ids, has_blocks=(True, False, True), blocks_in_window=in_window
    )
    # Sequences of one token come first.
    assert batch.meta.num_decodes == 0
    assert_near(replace(batch, meta=meta), window=window)


@pytest.mark.parametrize("num_distances", [1, 4, 100])
@pytest.mark.parametrize("window", [None, 6])
def test_bias_by_distance(num_distances: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(4, num_distances, generator=generator)
    assert_near(of(MIXED), window=window, distance_bias=bias, softcap=3.0)
    assert_near(of(MIXED), window=window, distance_bias=bias, sinks=torch.linspace(-1, 1, 4))


@pytest.mark.parametrize("partly", [False, True])
def test_cross_attention(partly: bool) -> None:
    """All tokens see all rows, or runs of tokens parts of them; and new rows are written."""
    batch = of([(0, 40), (0, 100), (0, 3)], block_size=4)
    lens, tables, at = [40, 100, 3], [], 0
    for n in lens:
        tables.append([*range(at, at + -(-n // 4))])
        at += -(-n // 4)
    query_lens = [1, 30, 2]
    seen = [
        [SeenRows(1, 8, 20)],
        [SeenRows(20, 0, 64), SeenRows(1, 64, 36), SeenRows(9, 0, 0)],
        [SeenRows(2, 0, 3)],
    ]
    meta = build_cross_metadata(
        block_size=4, block_tables=tables, query_lens=query_lens, context_lens=lens,
        is_new=[True, True, True], seen=seen if partly else None,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(33, 4, 8, generator=generator)
    if meta.readers is not None:
        query = query[meta.readers]
    new = torch.randn(143, 2, 8, generator=generator), torch.randn(143, 2, 8, generator=generator)
    args = AttentionArgs(scale=0.4)
    results = []
    for backend in (ReferenceBackend(), TritonBackend()):
        pages = batch.key_cache.clone(), batch.value_cache.clone()
        results.append(backend.attend(query, pages, meta, args, new=new))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def as_captured(batch: PagedBatch, *, is_open: bool) -> PagedBatch:
    """The batch with what a captured step says of it: no lengths on the host, no padding."""
    meta, size = batch.meta, batch.meta.block_size
    used = [-(-length // size) for length in meta.context_lens]
    rows = [row[:count] for row, count in zip(meta.block_table, used, strict=True)]
    # Behind others, as where a step has several tables.
    flat = torch.cat([torch.full((5,), 1 << 20, dtype=torch.int32), *rows])
    starts = torch.tensor([5, *used[:-1]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lens = {"query_lens": Unread(len(meta.query_lens))} if is_open else {}
    lens["context_lens"] = Unread(len(meta.context_lens))
    own = {"block_table": flat, "table_starts": starts, "is_open": is_open, "scratch": {}}
    if is_open:
        own["num_decodes"] = 0
    return replace(batch, meta=replace(meta, **own, **lens))  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 5])
def test_captured_steps_of_single_tokens(window: int | None) -> None:
    batch = of(CHUNKS["decode"])
    found = as_captured(batch, is_open=False).attend(TritonBackend(), window=window)
    assert torch.equal(found, batch.attend(TritonBackend(), window=window))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", ["mixed", "prefill", "decode", "boundaries"])
def test_captured_steps_of_any_tokens(name: str, window: int | None) -> None:
    """In any order, and with sequences of no token between them and at the end."""
    batch = of(CHUNKS[name])
    expected = batch.attend(ReferenceBackend(), window=window)
    captured = as_captured(batch, is_open=True)
    starts = captured.meta.query_start
    nothing = torch.zeros(1, dtype=torch.int32)
    meta = captured.meta
    assert meta.table_starts is not None
    more = replace(
        meta,
        query_start=torch.cat([starts[:2], starts[1:], starts[-1:]]),
        seq_lens=torch.cat([meta.seq_lens[:1], nothing, meta.seq_lens[1:], nothing]),
        table_starts=torch.cat([meta.table_starts[:1], nothing, meta.table_starts[1:], nothing]),
        query_lens=Unread(len(meta.query_lens) + 2),
    )
    for each in (meta, more):
        found = replace(captured, meta=each).attend(TritonBackend(), window=window)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_lengths_of_captured_steps_are_not_read() -> None:
    lengths: Any = Unread(2)
    assert len(lengths) == 2 and lengths
    for read in (
        list,
        sum,
        max,
        lambda x: x[0],
        lambda x: x[:1],
        lambda x: 3 in x,
        lambda x: x == (3, 4),
        lambda x: [*zip(x, x, strict=True)],
    ):
        with pytest.raises(RuntimeError, match="captured step"):
            read(lengths)
    with pytest.raises(RuntimeError, match="captured step"):
        as_captured(of(MIXED), is_open=True).attend(GatherBackend())


def test_writing_touches_nothing_else() -> None:
    batch = of(MIXED, num_kv_heads=3, num_heads=3, key_dim=24, value_dim=40)
    num_tokens = batch.meta.num_tokens
    new = torch.randn(num_tokens, 3, 24), torch.randn(num_tokens, 3, 40)
    found = []
    for backend in (ReferenceBackend(), TritonBackend()):
        pages = batch.key_cache.clone(), batch.value_cache.clone()
        backend.write_kv(new, pages, batch.meta)
        found.append(pages)
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(theirs.nan_to_num(777.0), ours.nan_to_num(777.0))


def test_a_pool_of_more_than_2_to_the_31_numbers() -> None:
    """Offsets take 64 bits: blocks at the far end, and memory that is not touched in between."""
    dim, heads, block_size = 64, 2, 16
    num_blocks = (2**31) // (dim * heads * block_size) + 8
    pages = tuple(
        torch.empty(num_blocks, block_size, heads, dim, dtype=torch.float16, device="meta")
        for _ in range(2)
    )
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        keys, values = (torch.empty_like(each, device="cpu") for each in pages)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    last = [num_blocks - 1, num_blocks - 3]
    generator = torch.Generator().manual_seed(0)
    results = []
    new = [torch.randn(20, heads, dim, generator=generator).half() for _ in range(2)]
    query = torch.randn(20, 4, dim, generator=generator).half()
    small = tuple(torch.zeros(2, block_size, heads, dim).half() for _ in range(2))
    for backend, pool, table in (
        (ReferenceBackend(), small, [0, 1]),
        (TritonBackend(), (keys, values), last),
    ):
        meta = build_metadata(block_size=block_size, block_tables=[table], starts=[0], ends=[20])
        results.append(backend.attend(query, pool, meta, AttentionArgs(0.1), new=(new[0], new[1])))
    torch.testing.assert_close(*results, atol=2e-3, rtol=2e-3)


def test_what_the_kernels_do_not_know_goes_another_way() -> None:
    wide = of([(4, 5), (0, 6)], key_dim=320, value_dim=320)
    for batch in (wide, make_batch(MIXED, backend=GatherBackend(), dtype=torch.float64)):
        expected = batch.attend(GatherBackend())
        assert torch.equal(batch.attend(TritonBackend()), expected)
    packed = of(MIXED, in_bytes=True)
    assert torch.equal(packed.attend(TritonBackend()), packed.attend(GatherBackend()))


def test_it_is_selected_by_name() -> None:
    assert isinstance(select_backend("triton"), TritonBackend)


def test_a_device_shows_that_it_runs_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = torch.device("cpu")
    are_right_on.cache_clear()
    assert are_right_on(here) and operators_on(here) is TritonOperators
    monkeypatch.setattr(ReferenceBackend, "attend", lambda *_, **__: torch.zeros(21, 4, 64).half())
    are_right_on.cache_clear()
    assert not are_right_on(here) and operators_on(here) is TorchOperators
    assert "differs from the reference" in caplog.text
    are_right_on.cache_clear()
