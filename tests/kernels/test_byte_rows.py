"""Keys and values in 8 bits: what a row keeps, and attention over such rows on every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioengine.kernels.attention import AttentionBackend
from aioengine.kernels.cpu import library
from aioengine.kernels.cpu.backend import CpuBackend
from aioengine.kernels.gather import GatherBackend
from aioengine.kernels.pool import BYTES, numbers_in, pack_rows, row_bytes, unpack_rows
from aioengine.kernels.reference import ReferenceBackend
from tests.kernels.paging import PagedBatch, make_batch
from tests.kernels.test_cpu import CHUNKS, MIXED, TOLERANCE, chunk_lists, extras_of

native = pytest.mark.skipif(
    not library.is_available(), reason="the C++ kernels were not built: no compiler"
)


def assert_twins(batch: PagedBatch, backend: AttentionBackend, **options: object) -> None:
    wide = replace(
        batch,
        query=batch.query.double(),
        key_cache=unpack_rows(batch.key_cache, torch.float64),
        value_cache=unpack_rows(batch.value_cache, torch.float64),
    )
    expected = wide.attend(ReferenceBackend(), **options)
    assert torch.isfinite(expected).all()
    actual = batch.attend(backend, **options)
    assert actual.dtype == batch.query.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@given(st.integers(1, 2000))
def test_row_sizes(dim: int) -> None:
    assert row_bytes(dim) == dim + 2 * -(-dim // 32)
    assert numbers_in(torch.empty(1, row_bytes(dim), dtype=BYTES)) == dim
    assert numbers_in(torch.empty(1, dim)) == dim


@given(
    st.integers(1, 100),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.sampled_from([1e-3, 1.0, 300.0]),
)
@settings(deadline=None)
def test_a_number_is_off_by_half_a_step_of_its_group(
    dim: int, dtype: torch.dtype, size: float
) -> None:
    rows = (torch.randn(3, 2, dim, generator=torch.Generator().manual_seed(dim)) * size).to(dtype)
    packed = pack_rows(rows)
    assert packed.dtype is BYTES
    assert packed.shape == (3, 2, row_bytes(dim))
    found = unpack_rows(packed, torch.float64)
    for first in range(0, dim, 32):
        group = rows[..., first : first + 32].double()
        step = group.abs().amax(-1, keepdim=True) / 127
        # And by what the scale itself is rounded, which is in bfloat16.
        off = (found[..., first : first + 32] - group).abs()
        assert (off <= step * (0.5 + 127 / 256)).all()


def test_faults_and_zeros_stay_in_their_group() -> None:
    rows = torch.ones(2, 96)
    rows[0, 3], rows[0, 40], rows[1, 70] = torch.nan, -torch.inf, 1e-38
    rows[1, 64:] *= 0
    found = unpack_rows(pack_rows(rows), torch.float32)
    assert found[0, :64].isnan().all()
    assert (found[1, 64:] == 0).all()
    torch.testing.assert_close(found[0, 64:], rows[0, 64:], atol=0.01, rtol=0)


@native
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [1, 8, 31, 32, 33, 64, 72, 128, 200])
def test_native_rows_are_ours(dtype: torch.dtype, dim: int, instruction_set: str) -> None:
    if dtype is torch.float16 and instruction_set == "generic":
        pytest.skip("generic code has no float16")
    backend = CpuBackend()
    batch = make_batch(
        [(0, 40)], backend=backend, key_dim=dim, value_dim=dim, dtype=dtype, in_bytes=True
    )
    again = make_batch(
        [(0, 40)],
        backend=ReferenceBackend(),
        key_dim=dim,
        value_dim=dim,
        dtype=dtype,
        in_bytes=True,
    )
    for ours, theirs in (
        (batch.key_cache, again.key_cache),
        (batch.value_cache, again.value_cache),
    ):
        assert torch.equal(ours[..., dim:], theirs[..., dim:])  # scales
        off = ours[..., :dim].view(torch.int8).int() - theirs[..., :dim].view(torch.int8).int()
        assert off.abs().max() <= 1  # where a number lies in the middle of two
        assert (off != 0).double().mean() < 0.01


@native
def test_native_faults_stay_in_their_group(instruction_set: str) -> None:
    batch = make_batch(
        [(0, 3)], backend=CpuBackend(), key_dim=64, dtype=torch.float32, in_bytes=True
    )
    rows = torch.ones(3, 2, 64)
    rows[0, 0, 3], rows[1, 1, 40], rows[2, 0, 33] = torch.nan, torch.inf, -torch.inf
    CpuBackend().write_kv(
        (rows, torch.ones(3, 2, 8)), (batch.key_cache, batch.value_cache), batch.meta
    )
    block = int(batch.meta.block_table[0, 0])
    found = unpack_rows(batch.key_cache[block, :3], torch.float32).isnan()
    expected = torch.zeros(3, 2, 64, dtype=torch.bool)
    expected[0, 0, :32] = expected[1, 1, 32:] = expected[2, 0, 32:] = True
    assert torch.equal(found, expected)


@native
@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("window", [None, 5, 66])
@pytest.mark.parametrize("extras", ["", "softcap sinks bias"])
def test_native_is_the_reference(
    name: str, window: int | None, extras: str, instruction_set: str
) -> None:
    batch = make_batch(CHUNKS[name], backend=CpuBackend(), dtype=torch.float32, in_bytes=True)
    assert_twins(batch, CpuBackend(), window=window, **extras_of(extras, 4, torch.float32))


@native
@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (14, 2), (40, 1)])
@pytest.mark.parametrize(
    "dims", [(8, 8), (64, 64), (128, 128), (32, 16), (72, 80), (1, 3), (96, 33)]
)
@pytest.mark.parametrize("strided", [True, False])
def test_native_shapes(
    dtype: torch.dtype,
    heads: tuple[int, int],
    dims: tuple[int, int],
    strided: bool,
    instruction_set: str,
) -> None:
    if dtype is torch.float16 and instruction_set == "generic":
        pytest.skip("generic code has no float16")
    batch = make_batch(
        MIXED,
        backend=CpuBackend(),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        key_dim=dims[0],
        value_dim=dims[1],
        dtype=dtype,
        strided=strided,
        in_bytes=True,
    )
    assert_twins(batch, CpuBackend())


@native
@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    chunks=chunk_lists(),
    heads=st.sampled_from([(1, 1), (8, 2), (6, 3)]),
    dims=st.tuples(st.sampled_from([8, 16, 64, 100]), st.sampled_from([8, 16, 64, 100])),
    block_size=st.sampled_from([1, 7, 16, 32]),
    dtype=st.sampled_from(list(TOLERANCE)),
    window=st.one_of(st.none(), st.integers(1, 130)),
    seed=st.integers(0, 9),
)
def test_native_is_the_reference_everywhere(
    chunks: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
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
        in_bytes=True,
        seed=seed,
    )
    assert_twins(batch, CpuBackend(), window=window)


@native
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_token_has_the_same_bits_alone(dtype: torch.dtype, instruction_set: str) -> None:
    if dtype is torch.float16 and instruction_set == "generic":
        pytest.skip("generic code has no float16")
    sizes = {"num_heads": 6, "num_kv_heads": 2, "key_dim": 64, "value_dim": 64}

    def attended(chunks: list[tuple[int, int]]) -> Tensor:
        batch = make_batch(chunks, backend=CpuBackend(), dtype=dtype, in_bytes=True, **sizes)  # type: ignore[arg-type]
        query = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
        last = replace(batch, query=batch.query.clone())
        last.query[len(last.query) - 1] = query[0]
        return last.attend(CpuBackend())[-1]

    # The keys of the first sequence are drawn first, so they are the same.
    assert torch.equal(attended([(99, 100)]), attended([(60, 100)]))
    assert torch.equal(attended([(99, 100)]), attended([(0, 100)]))


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [(8, 8), (40, 40), (8, 36)])
@pytest.mark.parametrize("extras", ["", "softcap sinks"])
def test_gather_is_the_reference(
    name: str, dtype: torch.dtype, dims: tuple[int, int], extras: str
) -> None:
    batch = make_batch(
        CHUNKS[name],
        backend=GatherBackend(),
        key_dim=dims[0],
        value_dim=dims[1],
        dtype=dtype,
        in_bytes=True,
    )
    wide = replace(batch, query=batch.query.double())
    expected = wide.attend(ReferenceBackend(), **extras_of(extras, 4, dtype))
    actual = batch.attend(GatherBackend(), **extras_of(extras, 4, dtype))
    tolerance = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [1, 31, 33, 65])
def test_a_row_alone_may_begin_anywhere(dim: int, dtype: torch.dtype) -> None:
    """Scales of odd rows lie at odd bytes."""
    rows = torch.arange(3 * dim, dtype=torch.float32).view(3, 1, dim).to(dtype)
    packed = pack_rows(rows)
    together = unpack_rows(packed, dtype)
    for i in range(3):
        assert torch.equal(unpack_rows(packed[i : i + 1], dtype), together[i : i + 1])
    assert unpack_rows(pack_rows(rows[:0]), dtype).shape == (0, 1, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_numbers_stay_finite(dtype: torch.dtype) -> None:
    rows = torch.full((1, 32), 0.99 * torch.finfo(dtype).max).to(dtype)
    assert unpack_rows(pack_rows(rows), dtype).isfinite().all()


def rows_of(dim: int, dtype: torch.dtype = torch.float32, heads: int = 2) -> Tensor:
    return torch.ones(4, heads, dim).to(dtype)


def cache_of(size: int, dtype: torch.dtype = BYTES, heads: int = 2) -> Tensor:
    return torch.zeros(1, 4, heads, size, dtype=dtype)


FORGED = {
    "one cache of numbers": (rows_of(64), rows_of(64), cache_of(68), cache_of(64, torch.float32)),
    "the other": (rows_of(64), rows_of(64), cache_of(64, torch.float32), cache_of(68)),
    "narrow values": (rows_of(64), rows_of(64, torch.bfloat16), cache_of(68), cache_of(68)),
    "wide values": (rows_of(64), rows_of(64, torch.float64), cache_of(68), cache_of(68)),
    "integers": (rows_of(64), rows_of(64, torch.int64), cache_of(68), cache_of(68)),
    "fewer heads": (rows_of(64), rows_of(64, heads=1), cache_of(68), cache_of(68, heads=1)),
    "fewer blocks": (rows_of(64), rows_of(64), cache_of(68), cache_of(68)[:0]),
    "no row": (rows_of(64), rows_of(1), cache_of(68), cache_of(1)),
    "a row that no numbers have": (rows_of(32), rows_of(33), cache_of(34), cache_of(36)),
}


@native
@pytest.mark.parametrize("name", FORGED)
def test_forged_pages_are_refused(name: str) -> None:
    """Before anything is written: the operators are open to everybody."""
    key, value, key_cache, value_cache = FORGED[name]
    slots = torch.zeros(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"must be of|do not fit|no row"):
        torch.ops.aioengine_cpu.write_kv(key, value, key_cache, value_cache, *slots)
    places = (*slots, torch.tensor([0, 4]).int(), torch.tensor([4]).int(), torch.zeros(1, 1).int())
    with pytest.raises(RuntimeError, match=r"must be of|do not fit|no row"):
        torch.ops.aioengine_cpu.attend(
            key, key, value, key_cache, value_cache, *places, None, None, None, 1.0, 0.0, 0, True,
            False,
        )  # fmt: skip
    assert not key_cache.any() and not value_cache.any()
