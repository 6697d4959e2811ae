"""The operators in C++ against the reference, on each instruction set that this CPU has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from aioengine.kernels.attention import AttentionArgs, AttentionMetadata, select_backend
from aioengine.kernels.cpu import library, norm
from aioengine.kernels.cpu.backend import CpuBackend
from aioengine.kernels.cpu.linear import Activation, NativeLinear, native_way
from aioengine.kernels.gather import GatherBackend
from aioengine.kernels.grouped import pack_grouped, round_weight
from aioengine.kernels.layer_plan import NormPlan
from aioengine.kernels.linear import pack_linear
from aioengine.kernels.metadata import build_cross_metadata, build_metadata
from aioengine.kernels.reference import ReferenceBackend
from tests.kernels.paging import PagedBatch, make_batch

pytestmark = pytest.mark.skipif(
    not library.is_available(), reason="the C++ kernels were not built: no compiler"
)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MIXED = [(9, 10), (3, 4), (16, 17), (0, 7), (5, 12), (6, 8), (0, 1), (4, 8)]
CHUNKS = {
    "mixed": MIXED,
    "uneven decode": [(2, 3), (200, 201), (70, 71), (199, 200), (0, 1)],
    "prefill": [(0, 5), (0, 8), (0, 9)],
    "more rows than a piece": [(0, 70), (3, 100)],
    "more keys than a tile": [(0, 130), (126, 129), (63, 64), (64, 65)],
    "boundaries": [(3, 4), (4, 5), (0, 4), (4, 8), (8, 16)],
    "empty": [],
}


def assert_twins(batch: PagedBatch, **options: object) -> None:
    # The reference's own arithmetic is done in float64, so that all of the error is the other's.
    wide = replace(
        batch,
        query=batch.query.double(),
        key_cache=batch.key_cache.double(),
        value_cache=batch.value_cache.double(),
    )
    expected = wide.attend(ReferenceBackend(), **options)
    actual = batch.attend(CpuBackend(), **options)
    assert actual.dtype == batch.query.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def extras_of(extras: str, num_heads: int, dtype: torch.dtype) -> dict[str, object]:
    options: dict[str, object] = {}
    if "softcap" in extras:
        options["softcap"] = 1.5
    if "sinks" in extras:
        options["sinks"] = torch.linspace(-2, 2, num_heads, dtype=dtype)
    if "bias" in extras:
        options["distance_bias"] = torch.linspace(-3, 3, num_heads * 9).view(num_heads, 9).to(dtype)
    return options


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("window", [None, 1, 5, 66])
@pytest.mark.parametrize("extras", ["", "softcap", "sinks", "bias", "softcap sinks bias"])
def test_is_the_reference(name: str, window: int | None, extras: str, instruction_set: str) -> None:
    batch = make_batch(CHUNKS[name], backend=CpuBackend(), dtype=torch.float32)
    assert_twins(batch, window=window, **extras_of(extras, 4, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1), (14, 2), (40, 1)])
@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (32, 16), (6, 12), (72, 80), (1, 3), (96, 33)])
@pytest.mark.parametrize("strided", [True, False])
def test_shapes(
    dtype: torch.dtype,
    heads: tuple[int, int],
    dims: tuple[int, int],
    strided: bool,
    instruction_set: str,
) -> None:
    batch = make_batch(
        MIXED,
        backend=CpuBackend(),
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
    decodes = draw(st.lists(st.integers(0, 700), max_size=4))
    chunks = draw(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 90)), max_size=3))
    return [(n, n + 1) for n in decodes] + [(start, start + n) for start, n in chunks]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    chunks=chunk_lists(),
    heads=st.sampled_from([(1, 1), (2, 2), (8, 2), (6, 3), (5, 1)]),
    dims=st.tuples(st.sampled_from([4, 8, 16, 64, 100]), st.sampled_from([4, 8, 16, 64, 100])),
    block_size=st.sampled_from([1, 2, 7, 16, 32, 128]),
    dtype=st.sampled_from(list(TOLERANCE)),
    strided=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 130)),
    extras=st.sampled_from(["", "softcap", "sinks", "bias", "softcap sinks"]),
    seed=st.integers(0, 9),
)
def test_is_the_reference_everywhere(
    chunks: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    strided: bool,
    window: int | None,
    extras: str,
    seed: int,
) -> None:
    batch = make_batch(
        chunks,
        backend=CpuBackend(),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        key_dim=dims[0],
        value_dim=dims[1],
        block_size=block_size,
        dtype=dtype,
        strided=strided,
        seed=seed,
    )
    assert_twins(batch, window=window, **extras_of(extras, heads[0], dtype))


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (2, 2)])
@pytest.mark.parametrize("window", [None, 3000])
@pytest.mark.parametrize("extras", ["", "sinks"])
def test_long_contexts_are_split(
    heads: tuple[int, int], window: int | None, extras: str, instruction_set: str
) -> None:
    """One or two sequences and few heads: less than there is to do for each thread."""
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for chunks in ([(4999, 5000)], [(2000, 2001), (900, 905)]):
                batch = make_batch(
                    chunks,
                    backend=CpuBackend(),
                    num_heads=heads[0],
                    num_kv_heads=heads[1],
                    block_size=32,
                    dtype=torch.float32,
                )
                options = extras_of(extras, heads[0], torch.float32)
                assert_twins(batch, window=window, **options)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3, 70, 600])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 1)])
@pytest.mark.parametrize("value_dim", [24, 48, 64])
def test_a_token_gets_the_same_bits_in_any_company(
    dtype: torch.dtype,
    window: int | None,
    heads: tuple[int, int],
    value_dim: int,
    instruction_set: str,
) -> None:
    """Alone or with others, in one chunk or in many, on one thread or on three."""
    chunks = [(1499, 1500), (3, 4), (500, 530), (0, 9), (1020, 1030)]
    batch = make_batch(
        chunks,
        backend=CpuBackend(),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        key_dim=64,
        value_dim=value_dim,
        block_size=32,
        dtype=dtype,
    )
    together = batch.attend(CpuBackend(), window=window)
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(batch.attend(CpuBackend(), window=window), together)
            for index, (start, end) in enumerate(chunks):
                first = int(batch.meta.query_start[index])
                cuts = {(start, end), *((at, at + 1) for at in range(start, end, 9))}
                for cut_start, cut_end in cuts:
                    rows = slice(first + cut_start - start, first + cut_end - start)
                    alone = build_metadata(
                        block_size=32,
                        block_tables=[batch.meta.block_table[index].tolist()],
                        starts=[cut_start],
                        ends=[cut_end],
                    )
                    part = replace(batch, meta=alone, query=batch.query[rows])
                    found = part.attend(CpuBackend(), window=window)
                    assert torch.equal(found, together[rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("window", [None, 2, 4])
@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize("extras", ["", "softcap", "sinks"])
def test_blocks_see_both_ways(
    window: int | None, in_window: bool, extras: str, instruction_set: str
) -> None:
    chunks = [(9, 10), (0, 7), (0, 7), (5, 12), (5, 12), (60, 150)]
    ids = [
        [0],
        [-1, 0, 0, 0, -1, 1, 1],
        [-1] * 7,
        [0, 0, -1, 0, 0, 0, -1],
        [-1, -1, 1, 1, 1, 1, 1],
        [-1] * 3 + [0] * 50 + [-1] * 2 + [1] * 35,
    ]
    batch = make_batch(chunks, backend=CpuBackend(), dtype=torch.float32)
    flat = torch.tensor([each for group in ids for each in group], dtype=torch.int32)
    has_blocks = tuple(len(group) > 1 and max(group) >= 0 for group in ids)
    meta = replace(batch.meta, scratch={}, block_ids=flat, has_blocks=has_blocks)
    mixed = replace(batch, meta=replace(meta, blocks_in_window=in_window))
    assert_twins(mixed, window=window, **extras_of(extras, 4, torch.float32))


CROSS = {
    "all new": ([3, 2, 1], [5, 8, 1], [True, True, True]),
    "decodes": ([1, 1, 1], [5, 80, 1500], [False, False, False]),
    "mixed": ([1, 1, 4, 2], [7, 12, 9, 4], [True, False, False, True]),
}


@pytest.mark.parametrize("name", CROSS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_cross_attention(name: str, dtype: torch.dtype, instruction_set: str) -> None:
    query_lens, context_lens, _ = CROSS[name]
    is_new = [True] * len(query_lens)
    key, value, cache, others, meta = cross_step(query_lens, context_lens, is_new, dtype)
    query = torch.randn(sum(query_lens), 6, 16).to(dtype)
    args = AttentionArgs(0.3)
    expected = ReferenceBackend().attend(query, (cache, others), meta, args, new=(key, value))
    cache.fill_(torch.nan)
    others.fill_(torch.nan)
    found = CpuBackend().attend(query, (cache, others), meta, args, new=(key, value))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def cross_step(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    is_new: Sequence[bool],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, AttentionMetadata]:
    torch.manual_seed(0)
    counts = [-(-n // 4) for n in context_lens]
    free = torch.randperm(sum(counts) + 2).tolist()
    meta = build_cross_metadata(
        block_size=4,
        block_tables=[[free.pop() for _ in range(count)] for count in counts],
        query_lens=query_lens,
        context_lens=context_lens,
        is_new=is_new,
    )
    rows = sum(context_lens)
    caches = torch.full((2, sum(counts) + 2, 4, 3, 16), torch.nan, dtype=dtype)
    key, value = torch.randn(2, rows, 3, 16).to(dtype)
    return key, value, caches[0], caches[1], meta


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_keys_are_written_where_they_belong(dtype: torch.dtype) -> None:
    """Beside the twin in bits; new rows may be slices of a wider matrix, as of merged layers."""
    meta = build_metadata(
        block_size=4, block_tables=[[5, 1], [2, 0, 3]], starts=[2, 9], ends=[7, 10]
    )
    wide = torch.randn(6, 2 * 8 + 2 * 8 + 4).to(dtype)
    key, value = wide[:, :16].view(6, 2, 8), wide[:, 16:32].view(6, 2, 8)
    turned = wide[:, :16].reshape(6, 8, 2).transpose(1, 2)
    for new in ((key, value), (turned, value), (key.contiguous(), turned.contiguous())):
        caches = [torch.full((6, 4, 2, 8), -7.0).to(dtype) for _ in range(4)]
        CpuBackend().write_kv(new, (caches[0], caches[1]), meta)
        GatherBackend().write_kv(new, (caches[2], caches[3]), meta)
        assert torch.equal(caches[0], caches[2])
        assert torch.equal(caches[1], caches[3])


def test_queries_may_lie_in_wider_rows() -> None:
    batch = make_batch(MIXED, backend=CpuBackend(), dtype=torch.float32)
    query = batch.query
    wide = torch.randn(query.shape[0], query.shape[1] + 3, query.shape[2] + 5)
    wide[:, 1:-2, 2:-3] = query
    lying = replace(batch, query=wide[:, 1:-2, 2:-3])
    assert torch.equal(lying.attend(CpuBackend()), batch.attend(CpuBackend()))
    turned = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(
        replace(batch, query=turned).attend(CpuBackend()), batch.attend(CpuBackend())
    )


def test_double_precision_is_left_to_pytorch() -> None:
    batch = make_batch(MIXED, backend=CpuBackend(), dtype=torch.float64)
    assert torch.equal(batch.attend(CpuBackend()), batch.attend(GatherBackend()))


def test_large_scores_and_bad_numbers_stay_in_their_row() -> None:
    batch = make_batch([(3, 4), (10, 11), (0, 6)], backend=CpuBackend(), dtype=torch.float32)
    loud = batch.query.clone()
    loud[0] *= 1e20
    loud[3, 1] = torch.nan
    found = replace(batch, query=loud).attend(CpuBackend())
    assert torch.isfinite(found[0]).all()
    assert torch.isnan(found[3, 1]).all()
    plain = batch.attend(CpuBackend())
    assert torch.equal(found[[1, 2, 4, 5, 6, 7]], plain[[1, 2, 4, 5, 6, 7]])
    assert torch.equal(found[3, 0], plain[3, 0])


def test_what_does_not_fit_is_refused() -> None:
    batch = make_batch(MIXED, backend=CpuBackend(), dtype=torch.float32)
    with pytest.raises(RuntimeError, match="fit each other"):
        replace(batch, query=batch.query[..., :4]).attend(CpuBackend())
    with pytest.raises(RuntimeError, match="fit each other"):
        replace(batch, value_cache=batch.value_cache.double()).attend(CpuBackend())
    meta = batch.meta
    for changed in (
        {"block_table": meta.block_table[:-1]},
        {"block_table": meta.block_table[:, :1]},
        {"block_ids": torch.zeros(1, dtype=torch.int32), "has_blocks": (True,)},
        {"query_start": meta.query_start + 1},
    ):
        with pytest.raises(RuntimeError, match=r"block_table|block_ids|query"):
            replace(batch, meta=replace(meta, scratch={}, **changed)).attend(CpuBackend())
    for options in (
        {"sinks": torch.zeros(1)},
        {"distance_bias": torch.zeros(1, 2)},
        {"distance_bias": torch.zeros(4, 0)},
        {"window": -1},
    ):
        with pytest.raises(RuntimeError, match=r"sinks|distance_bias|window"):
            batch.attend(CpuBackend(), **options)


def test_the_best_instruction_set_is_chosen() -> None:
    best = library.instruction_sets()[-1]
    assert library.instruction_set() == best
    assert library.use_instruction_set("none such") == best


def test_it_is_chosen_on_cpus() -> None:
    assert select_backend("auto").name == "cpu"
    assert select_backend("auto", "cuda").name == "gather"


LINEAR_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", LINEAR_TOLERANCE)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 64, 32),
        (2, 100, 70),
        (300, 130, 33),
        (17, 1, 1),
        (97, 9, 31),
        (45, 96, 70),
        (700, 64, 40),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products(
    dtype: torch.dtype, shape: tuple[int, int, int], with_bias: bool, instruction_set: str
) -> None:
    if dtype is torch.float16 and instruction_set == "generic":
        pytest.skip("float16 is left to PyTorch on such a CPU")
    rows, depth, outputs = shape
    torch.manual_seed(0)
    x, weight = torch.randn(rows, depth).to(dtype), torch.randn(outputs, depth).to(dtype)
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    layer = NativeLinear(weight, bias)
    found = layer(x)
    wanted = linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.dtype == dtype and found.is_contiguous()
    bound = LINEAR_TOLERANCE[dtype] * float(wanted.abs().max())
    torch.testing.assert_close(found.double(), wanted, atol=bound, rtol=0)
    wide = torch.randn(rows, 1, depth + 5).to(dtype)
    wide[..., 3:-2] = x[:, None]
    assert torch.equal(layer(wide[..., 3:-2]), found[:, None])
    alone = torch.cat([layer(row[None]) for row in x[:20]])
    assert torch.equal(alone, found[:20]), "a row gets the same bits in any batch"


def bytes_of(weight: Tensor, bias: Tensor | None = None) -> tuple[NativeLinear, Tensor]:
    """A weight in 8 bits, whose inputs are not rounded, and what it is in float64."""
    grouped = replace(round_weight(weight, 8), has_full_inputs=True)
    packed = pack_grouped(grouped, bias)
    assert isinstance(packed, NativeLinear)
    return packed, grouped.floats().double()


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_weights_of_several_chunks(
    dtype: torch.dtype, is_gated: bool, instruction_set: str
) -> None:
    # So deep that the largest numbers make five chunks, the smallest two; the last one is shorter.
    torch.manual_seed(0)
    depth = 5024
    weight = torch.randn(192, depth)
    if dtype is torch.int8:
        layer, exact = bytes_of(weight)
    else:
        layer, exact = NativeLinear(weight.to(dtype)), weight.to(dtype).double()
    x = torch.randn(70, depth).to(torch.bfloat16 if dtype is torch.bfloat16 else torch.float32)
    wanted = linear(x.double(), exact)
    if is_gated:
        gates, others = wanted.chunk(2, -1)
        wanted = silu(gates) * others
    options = (Activation.SILU, True) if is_gated else ()
    found = layer(x, *options)
    bound = LINEAR_TOLERANCE[x.dtype] * float(wanted.abs().max())
    torch.testing.assert_close(found.double(), wanted, atol=bound, rtol=0)
    for first, last in ((0, 1), (1, 3), (3, 20), (20, 53)):
        assert torch.equal(layer(x[first:last], *options), found[first:last])


@pytest.mark.parametrize("rows", [1, 4, 16, 100])
@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        (Activation.SILU, silu),
        (Activation.GELU_TANH, lambda x: gelu(x, approximate="tanh")),
        (Activation.QUICK_GELU, lambda x: x * torch.sigmoid(1.702 * x)),
        (Activation.GELU, gelu),
    ],
)
def test_products_with_activations(
    activation: Activation,
    formula: Callable[[Tensor], Tensor],
    rows: int,
    instruction_set: str,
) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 50), torch.randn(192, 50), torch.randn(192)
    x[0] *= 100  # where exponentials end
    layer = NativeLinear(weight, bias)

    def assert_close(found: Tensor, wanted: Tensor) -> None:
        bound = 1e-5 * float(wanted.abs().max())
        torch.testing.assert_close(found.double(), wanted, atol=bound, rtol=0)

    wanted = linear(x.double(), weight.double(), bias.double())
    found = layer(x, activation)
    assert_close(found, formula(wanted))
    assert layer.can_gate
    found = layer(x, activation, is_gated=True)
    gates, others = wanted.chunk(2, -1)
    assert_close(found, formula(gates) * others)
    small, numbers = bytes_of(weight, bias)
    gates, others = linear(x.double(), numbers, bias.double()).chunk(2, -1)
    found = small(x, activation, is_gated=True)
    assert_close(found, formula(gates) * others)
    assert layer(torch.full((1, 50), torch.nan), activation).isnan().all()
    large = NativeLinear(torch.ones(1, 1))(torch.tensor([[1e30], [torch.inf]]), activation)
    assert large.flatten().tolist() == [torch.tensor(1e30).item(), torch.inf]


def test_halves_that_share_a_panel() -> None:
    layer = NativeLinear(torch.randn(96, 8))
    assert not layer.can_gate
    with pytest.raises(RuntimeError, match="whole panels"):
        layer(torch.randn(2, 8), Activation.SILU, is_gated=True)


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        (Activation.SILU, silu),
        (Activation.QUICK_GELU, lambda x: x * torch.sigmoid(1.702 * x)),
    ],
)
def test_activations_in_bfloat16_are_rounded_once(
    activation: Activation, formula: Callable[[Tensor], Tensor], instruction_set: str
) -> None:
    """An exponential that is off by millionths moves one output in a thousand."""
    torch.manual_seed(0)
    x = (3 * torch.randn(400, 256)).bfloat16()
    found = NativeLinear(torch.eye(256, dtype=torch.bfloat16))(x, activation)
    wanted = formula(x.double()).bfloat16()
    assert (found != wanted).double().mean() < 1e-4


def test_products_of_nothing_and_of_what_does_not_fit() -> None:
    layer = NativeLinear(torch.randn(40, 16))
    assert layer(torch.randn(0, 16)).shape == (0, 40)
    with pytest.raises(RuntimeError, match="fit each other"):
        layer(torch.randn(3, 15))
    with pytest.raises(RuntimeError, match="float32, bfloat16"):
        layer(torch.randn(3, 16).double())


def test_which_products_are_native() -> None:
    weight = torch.randn(40, 16)
    assert (native_way(weight, None) is None) == (library.instruction_set() == "generic")
    packed = pack_linear(weight)
    assert packed is not None and packed.nbytes >= weight.nbytes


@pytest.mark.parametrize("rows", [1, 16, 33, 700])
def test_gated_products_of_bfloat16(rows: int, instruction_set: str) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, 96), torch.randn(192, 96), torch.randn(192)
    x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    layer = NativeLinear(weight, bias)
    assert layer.is_paired == (instruction_set in ("avx512_bf16", "amx_bf16"))
    assert library.has_bfloat16() == layer.is_paired
    gates, others = linear(x.double(), weight.double(), bias.double()).chunk(2, -1)
    found, wanted = layer(x, Activation.SILU, is_gated=True), silu(gates) * others
    bound = 4e-3 * float(wanted.abs().max())
    torch.testing.assert_close(found.double(), wanted, atol=bound, rtol=0)
    if layer.is_paired:
        with pytest.raises(RuntimeError, match="bfloat16"):
            layer(x.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [1, 7, 64, 1000])
def test_norms(dim: int, dtype: torch.dtype, instruction_set: str) -> None:
    if dtype is torch.float16 and instruction_set == "generic":
        pytest.skip("no conversions of halves without F16C")
    torch.manual_seed(dim)
    x, weight = torch.randn(2, 9, dim).to(dtype) * 30, torch.randn(dim).to(dtype)
    exact = torch.nn.functional.rms_norm(x.double(), (dim,), weight.double(), 1e-5)
    found = norm.compute_norm(x, NormPlan(weight, 1e-5))
    assert found.dtype is dtype and found.shape == x.shape
    torch.testing.assert_close(found, exact.to(dtype), rtol=torch.finfo(dtype).eps * 4, atol=1e-6)
    assert torch.equal(norm.compute_norm(x[:, 4:5], NormPlan(weight, 1e-5)), found[:, 4:5])
    with pytest.raises(RuntimeError, match="width"):
        norm.compute_norm(x, NormPlan(torch.ones(dim + 1, dtype=dtype), 1e-5))
