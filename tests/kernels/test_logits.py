"""The largest of rows, and rows as floats, beside PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aioengine.kernels.cpu import library
from aioengine.kernels.logits import argmax, to_floats

pytestmark = pytest.mark.skipif(not library.is_available(), reason="no C++ kernels here")

NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest, instruction_set: str) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    # Few numbers, so that the largest is there several times.
    return torch.randint(-50, 50, (count, width), generator=generator).to(dtype)


@pytest.mark.parametrize("width", [1, 7, 64, 1000, 4099])
@pytest.mark.parametrize("count", [1, 5])
def test_the_first_of_the_largest(dtype: torch.dtype, count: int, width: int) -> None:
    logits = rows(count, width, dtype)
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(argmax(logits), first)
    assert torch.equal(
        argmax(logits[:, : max(1, width // 2)]), argmax(logits[:, : max(1, width // 2)].clone())
    )


@pytest.mark.parametrize(
    ("numbers", "place"),
    [
        ([-INF, -INF, -INF], 0),
        ([-INF, -3.0, -INF], 1),
        ([0.0, NAN, INF], 1),
        ([0.0, INF, INF], 1),
        ([NAN] * 3, 0),
        ([*range(3000), NAN, NAN], 3000),
        ([*[-INF] * 3000, NAN, 5.0], 3000),
    ],
)
def test_odd_numbers(dtype: torch.dtype, numbers: list[float], place: int) -> None:
    assert argmax(torch.tensor([numbers], dtype=dtype)).tolist() == [place]


@pytest.mark.parametrize("width", [1, 33, 1000])
def test_as_floats(dtype: torch.dtype, width: int) -> None:
    logits = torch.randn(5, 2 * width).to(dtype)[:, :width]
    assert torch.equal(to_floats(logits), logits.float())


def test_others_are_pytorchs() -> None:
    logits = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(argmax(logits), logits.argmax(-1)) and to_floats(logits) is logits
    assert argmax(torch.empty(0, 4)).tolist() == []
    assert argmax(torch.arange(6).view(2, 3)).tolist() == [2, 2]
