"""Linear layers of 8-bit weights: close to the plain product, and each row on its own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from aioengine.kernels.int8 import (
    _exact_bits,
    _is_native,
    can_quantize,
    dynamic,
    quantize_linear,
    weight_only,
)
from aioengine.kernels.linear import Way

TOLERANCE = {weight_only: 0.015, dynamic: 0.03}
WAYS = [weight_only] if _is_native() else []
WAYS += [] if _exact_bits() is None else [dynamic]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_is_close_to_the_plain_product(way: Way, dtype: torch.dtype, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 48, generator=generator).to(dtype)
    bias = torch.randn(70, generator=generator).to(dtype) if with_bias else None
    packed = way(weight, bias)
    assert packed is not None
    assert packed.nbytes < weight.nbytes
    for rows in (0, 1, 5, 70):
        x = torch.randn(2, rows, 48, generator=generator).to(dtype)
        found, wanted = packed(x), linear(x, weight, bias)
        assert found.shape == wanted.shape and found.dtype == dtype
        if rows:
            assert (found - wanted).abs().max() < TOLERANCE[way] * wanted.abs().max()


@pytest.mark.parametrize("way", WAYS)
def test_a_row_s_output_does_not_depend_on_its_company(way: Way) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = way(torch.randn(64, 48, generator=generator), None)
    assert packed is not None
    x = torch.randn(9, 48, generator=generator)
    x[1:] *= 1000
    alone, together = packed(x[:1]), packed(x)
    assert torch.equal(together[:1], alone)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_and_outliers(way: Way) -> None:
    packed = way(torch.zeros(8, 8), None)
    assert packed is not None
    assert torch.equal(packed(torch.zeros(2, 8)), torch.zeros(2, 8))
    one = way(torch.full((8, 512), -3.0), None)
    assert one is not None
    torch.testing.assert_close(one(torch.full((3, 512), 7.0)), torch.full((3, 8), -3.0 * 7 * 512))


def test_the_better_way_is_taken() -> None:
    packed = quantize_linear(torch.randn(8, 8))
    assert type(packed) is type(WAYS[0](torch.randn(8, 8), None))


def test_what_is_not_taken() -> None:
    assert not can_quantize(torch.float64)
    assert quantize_linear(torch.zeros(4, 4, dtype=torch.float64)) is None
    assert quantize_linear(torch.zeros(4, 4, device="meta")) is None
