"""Every backend against the reference, and the reference against transformers' eager attention."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as eager_sinks
from transformers.models.llama.modeling_llama import eager_attention_forward as eager

from aioengine.kernels import gather
from aioengine.kernels.attention import AttentionArgs, split_by_sequence
from aioengine.kernels.gather import GatherBackend
from aioengine.kernels.pool import LayerPages
from aioengine.kernels.reference import ReferenceBackend, visible_mask
from tests.kernels.paging import PagedBatch, make_batch

MIXED = [(9, 10), (3, 4), (16, 17), (0, 7), (5, 12), (6, 8), (0, 1), (4, 8)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}
CHUNKS = {
    "mixed": MIXED,
    "decode": [(9, 10), (30, 31), (3, 4), (0, 1)],
    "uneven decode": [(2, 3), (200, 201), (70, 71), (199, 200), (0, 1)],
    "one decode": [(7, 8)],
    "prefill": [(0, 5), (0, 8), (0, 9)],
    "mid-block": [(2, 11)],
    "boundaries": [(3, 4), (4, 5), (0, 4), (4, 8), (8, 16)],
    "empty": [],
}


def assert_twins(batch: PagedBatch, **options: object) -> None:
    expected = batch.attend(ReferenceBackend(), **options)
    actual = batch.attend(GatherBackend(), **options)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert torch.isfinite(expected).all()
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("window", [None, 1, 4, 5])
@pytest.mark.parametrize("extras", ["", "softcap", "sinks", "both"])
def test_gather_is_the_reference(name: str, window: int | None, extras: str) -> None:
    batch = make_batch(CHUNKS[name], backend=GatherBackend())
    options: dict[str, object] = {"window": window}
    if extras in ("softcap", "both"):
        options["softcap"] = 1.5
    if extras in ("sinks", "both"):
        options["sinks"] = torch.linspace(-2, 2, 4, dtype=torch.float64)
    assert_twins(batch, **options)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("dims", [(8, 8), (8, 4), (6, 12)])
@pytest.mark.parametrize("strided", [True, False])
def test_shapes(
    dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], strided: bool
) -> None:
    batch = make_batch(
        MIXED,
        backend=GatherBackend(),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        key_dim=dims[0],
        value_dim=dims[1],
        dtype=dtype,
        strided=strided,
    )
    assert_twins(batch)


@st.composite
def chunk_lists(draw: st.DrawFn) -> list[tuple[int, int]]:
    decodes = draw(st.lists(st.integers(0, 300), max_size=6))
    chunks = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=4))
    return [(n, n + 1) for n in decodes] + [(start, start + n) for start, n in chunks]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    chunks=chunk_lists(),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (8, 2), (6, 3)]),
    dims=st.tuples(st.sampled_from([4, 8, 16]), st.sampled_from([4, 8, 16])),
    block_size=st.sampled_from([1, 2, 4, 16, 32]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    strided=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 64)),
    softcap=st.sampled_from([None, 2.0]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 9),
)
def test_gather_is_the_reference_everywhere(
    chunks: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    strided: bool,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    seed: int,
) -> None:
    batch = make_batch(
        chunks,
        backend=ReferenceBackend(),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        key_dim=dims[0],
        value_dim=dims[1],
        block_size=block_size,
        dtype=dtype,
        strided=strided,
        seed=seed,
    )
    sinks = torch.linspace(-1, 3, heads[0], dtype=dtype) if with_sinks else None
    assert_twins(batch, window=window, softcap=softcap, sinks=sinks)


def oracle(batch: PagedBatch, window: int | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """Each sequence alone, whole and dense, through transformers' eager attention."""
    outputs = []
    num_heads = batch.query.shape[1]
    for i, (first, last) in enumerate(split_by_sequence(batch.meta)):
        context = batch.meta.context_lens[i]
        start = context - (last - first)
        positions = torch.arange(context)
        visible = positions[None, :] <= positions[start:, None]
        if window is not None:
            visible &= positions[start:, None] - positions[None, :] < window
        mask = torch.zeros(visible.shape, dtype=batch.query.dtype)
        mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)
        module = nn.Module().eval()
        module.num_key_value_groups = num_heads // batch.keys[i].shape[1]
        module.sinks = sinks
        out, _ = (eager if sinks is None else eager_sinks)(
            module,
            batch.query[first:last].transpose(0, 1)[None],
            batch.keys[i].transpose(0, 1)[None],
            batch.values[i].transpose(0, 1)[None],
            mask[None, None],
            scaling=0.3,
        )
        outputs.append(out[0])
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_reference_is_dense_attention(
    window: int | None, heads: tuple[int, int], with_sinks: bool
) -> None:
    batch = make_batch(
        MIXED,
        backend=ReferenceBackend(),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        value_dim=12,
        dtype=torch.float32,
    )
    sinks = torch.linspace(-2, 2, heads[0]) if with_sinks else None
    actual = batch.attend(ReferenceBackend(), scale=0.3, window=window, sinks=sinks)
    torch.testing.assert_close(actual, oracle(batch, window, sinks), atol=1e-5, rtol=1e-5)


def test_softcap_bounds_the_scores() -> None:
    batch = make_batch([(2, 3)], backend=ReferenceBackend(), num_heads=1, num_kv_heads=1)
    scores = (batch.keys[0][:, 0] @ batch.query[0, 0]) * 0.5
    weights = (2.0 * torch.tanh(scores / 2.0)).softmax(0)
    expected = weights @ batch.values[0][:, 0]
    actual = batch.attend(ReferenceBackend(), scale=0.5, softcap=2.0)
    torch.testing.assert_close(actual[0, 0], expected)


def test_buckets_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([(n, n + 1) for n in (5, 90, 6, 88, 7)], backend=GatherBackend())
    whole = batch.attend(GatherBackend())
    monkeypatch.setattr(gather, "MAX_BUCKET_BYTES_CPU", 1)
    monkeypatch.setattr(gather, "MAX_EXPLICIT_QUERIES", 2)
    alone = replace(batch, meta=replace(batch.meta, scratch={}))
    torch.testing.assert_close(alone.attend(GatherBackend()), whole, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize("chunks", [MIXED, CHUNKS["decode"], CHUNKS["uneven decode"]])
def test_layers_of_one_step_may_differ(chunks: list[tuple[int, int]], strided: bool) -> None:
    batch = make_batch(chunks, backend=GatherBackend(), strided=strided)
    caches = batch.key_cache, batch.value_cache
    other = copy.deepcopy(caches)
    for each in other:
        each.mul_(-0.7)
    generator = torch.Generator().manual_seed(3)
    biases = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    layers: list[tuple[int, dict[str, Any]]] = [
        (4, {}),
        (4, {"scale": 0.1}),
        (2, {}),  # of query heads
        (4, {"softcap": 1.5}),
        (4, {"sinks": biases[0, :, 0]}),
        (4, {"distance_bias": biases[0]}),
        (4, {"distance_bias": biases[1]}),
        (4, {"window": 3}),
        (4, {"window": 3, "distance_bias": biases[1]}),
    ]
    backend = GatherBackend()
    for keys_and_values in (caches, other, caches):
        pages = LayerPages(keys_and_values)
        for num_heads, options in layers:
            query = batch.query[:, :num_heads] + num_heads
            args = AttentionArgs(**{"scale": 0.3, **options})
            found = backend.attend(query, pages, batch.meta, args)
            alone = replace(batch.meta, scratch={})
            wanted = ReferenceBackend().attend(query, keys_and_values, alone, args)
            torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)


def with_blocks(batch: PagedBatch, ids: list[list[int]], *, in_window: bool = False) -> PagedBatch:
    """The batch with block ids for the new tokens of each sequence."""
    flat = torch.tensor([each for group in ids for each in group], dtype=torch.int32)
    has_blocks = tuple(len(group) > 1 and max(group) >= 0 for group in ids)
    meta = replace(batch.meta, scratch={}, block_ids=flat, has_blocks=has_blocks)
    return replace(batch, meta=replace(meta, blocks_in_window=in_window))


@pytest.mark.parametrize("window", [None, 2, 4])
@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize("extras", ["", "softcap", "sinks"])
def test_blocks_see_both_ways(window: int | None, in_window: bool, extras: str) -> None:
    batch = make_batch([(9, 10), (0, 7), (0, 7), (5, 12), (5, 12)], backend=GatherBackend())
    ids = [[0], [-1, 0, 0, 0, -1, 1, 1], [-1] * 7, [0, 0, -1, 0, 0, 0, -1], [-1, -1, 1, 1, 1, 1, 1]]
    options: dict[str, object] = {"window": window}
    if extras == "softcap":
        options["softcap"] = 1.5
    if extras == "sinks":
        options["sinks"] = torch.linspace(-2, 2, 4, dtype=torch.float64)
    mixed = with_blocks(batch, ids, in_window=in_window)
    assert_twins(mixed, **options)
    plain, bidirectional = (
        batch.attend(GatherBackend(), **options),
        mixed.attend(GatherBackend(), **options),
    )
    first = [0, 1, 8, 15, 22]  # of each sequence: those without blocks are as they were
    assert torch.equal(plain[0], bidirectional[0])
    assert torch.equal(plain[first[2] : first[3]], bidirectional[first[2] : first[3]])
    assert not torch.allclose(plain[first[1] + 1], bidirectional[first[1] + 1])


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize("in_window", [False, True])
def test_what_a_block_sees(window: int | None, in_window: bool) -> None:
    """Said token by token: the two ways in which windows and blocks go together."""
    start, end, ids = 4, 11, [-1, 0, 0, -1, 0, 1, 1]
    begin = 0 if window is None else max(0, start - window + 1)
    found = visible_mask(
        start, end, begin, window, torch.device("cpu"), torch.tensor(ids), in_window
    )
    for query in range(start, end):
        for key in range(begin, end):
            is_block = key >= start and ids[query - start] == ids[key - start] >= 0
            is_near = window is None or key > query - window
            causal = key <= query
            wanted = (
                is_near and (causal or is_block) if in_window else (causal and is_near) or is_block
            )
            assert bool(found[query - start, key - begin]) is wanted, (query, key)


def test_a_backend_serves_inside_and_outside_inference_mode() -> None:
    batch = make_batch(MIXED, backend=GatherBackend())
    backend = GatherBackend()
    with torch.inference_mode():
        inside = batch.attend(backend)
    torch.testing.assert_close(batch.attend(backend), inside)
