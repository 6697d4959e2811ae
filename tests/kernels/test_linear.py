"""Packed weights against the plain product."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from aioengine.kernels.cpu.library import end_load, is_available
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.kernels.linear import WAYS, PackedLinear, pack_linear

native = pytest.mark.skipif(not is_available(), reason="the C++ kernels were not built")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SHAPES = [(1, 1), (7, 3), (64, 16), (70, 48), (130, 257)]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed_or_skip(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    packed = pack_linear(weight, bias)
    if packed is None:
        pytest.skip(f"this CPU has no way for {weight.dtype}")
    return packed


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_is_the_plain_product(shape: tuple[int, int], dtype: torch.dtype, with_bias: bool) -> None:
    weight = drawn(*shape, dtype=dtype)
    bias = drawn(shape[0], dtype=dtype, seed=1) if with_bias else None
    packed = packed_or_skip(weight, bias)
    own = packed.nbytes - weight.nbytes
    assert 0 <= own <= (0 if bias is None else 4 * len(bias)), "a bias may be held in float32"
    for rows in (0, 1, 2, 5, 16, 63, 65, 200):
        x = drawn(rows, shape[1], dtype=dtype, seed=2)
        found = packed(x)
        wanted = linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert found.shape == wanted.shape and found.dtype == dtype and found.is_contiguous()
        bound = TOLERANCE[dtype] * max(1.0, float(wanted.abs().max()) if rows else 0.0)
        torch.testing.assert_close(found.double(), wanted, atol=bound, rtol=0)


def test_takes_any_leading_dimensions_and_strides() -> None:
    weight, bias = drawn(70, 48), drawn(70, seed=1)
    packed = packed_or_skip(weight, bias)
    for x in (
        drawn(48),
        drawn(2, 3, 48),
        drawn(48, 5).t(),
        drawn(5, 96)[:, ::2],
        drawn(3, 96)[:, 48:],
        drawn(1, 48).expand(4, 48),
        drawn(5, 48, 3).transpose(1, 2),
    ):
        torch.testing.assert_close(packed(x), linear(x, weight, bias), atol=1e-4, rtol=1e-5)


def test_keeps_nothing_of_what_it_was_given() -> None:
    weight, bias, x = drawn(70, 48), drawn(70, seed=1), drawn(3, 48, seed=2)
    packed = packed_or_skip(weight, bias)
    wanted = linear(x, weight, bias)
    weight.zero_()
    bias.zero_()
    torch.testing.assert_close(packed(x), wanted, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_long_sums_are_as_exact_as_short_ones(rows: int) -> None:
    # In one sum over them all, 8,192 numbers come to 1.7e-6, six times as much as 256.
    weight, x = drawn(64, 8192), drawn(rows, 8192, seed=1)
    wanted = linear(x.double(), weight.double())
    error = (packed_or_skip(weight, None)(x) - wanted).norm() / wanted.norm()
    assert error < 6e-7


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(4, 4, dtype=torch.float64),
        torch.zeros(4, 4, dtype=torch.int8),
        torch.zeros(0, 4),
        torch.zeros(4, 4, device="meta"),
    ],
    ids=["float64", "int8", "empty", "meta"],
)
def test_what_no_way_takes(weight: Tensor) -> None:
    assert pack_linear(weight) is None


@pytest.mark.parametrize("way", WAYS)
def test_every_way_says_no_or_is_right(way: object) -> None:
    assert callable(way)
    for dtype in TOLERANCE:
        weight, x = drawn(96, 32, dtype=dtype), drawn(4, 32, dtype=dtype, seed=1)
        packed = way(weight, None)
        if packed is not None:
            wanted = linear(x.double(), weight.double())
            bound = TOLERANCE[dtype] * float(wanted.abs().max())
            torch.testing.assert_close(packed(x).double(), wanted, atol=bound, rtol=0)


def huge_kib(address: int) -> int | None:
    """How much of the mapping at an address is in huge pages, in KiB; None where nobody says."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        return None
    is_inside = False
    for line in smaps.read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            is_inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    return None


@native
def test_weights_move_together_while_they_are_used() -> None:
    """Behind a load, into huge pages where the system has some; small ones lie side by side."""
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(n, 512, generator=generator) for n in (64, 4096, 96, 4096, 32)]
    packed = [NativeLinear(each) for each in plain]
    x = torch.randn(3, 512, generator=generator)
    wanted = [each(x) for each in packed]
    del packed[1], wanted[1]  # beside which others stay
    end_load()
    address = packed[2].operands[0].data_ptr()
    until = time.monotonic() + 5
    while not huge_kib(address) and time.monotonic() < until:
        for each, found in zip(packed, wanted, strict=True):
            assert torch.equal(each(x), found)
        time.sleep(0.01)
    for each, found in zip(packed, wanted, strict=True):
        assert torch.equal(each(x), found)


@native
def test_weights_that_are_gone_before_they_have_moved() -> None:
    for _ in range(5):
        packed = [NativeLinear(torch.ones(4096, 512)) for _ in range(4)]
        end_load()
        del packed
