"""The largest of rows, tokens that are drawn, and rows as floats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from aioengine.kernels.cpu import library
from aioengine.kernels.logits import Choice, argmax, cap_softly, draw, draws, to_floats

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


@pytest.mark.parametrize("cap", [30.0, 0.5])
@pytest.mark.parametrize("width", [1, 33, 1000, 40_000])
def test_soft_caps(dtype: torch.dtype, width: int, cap: float) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = (torch.randn(3, 2 * width, generator=generator) * 2 * cap).to(dtype)[:, :width]
    found = cap_softly(logits, cap)
    assert found.dtype is dtype
    wanted = torch.tanh(logits.double() / cap) * cap
    # One rounding at the end is ours; PyTorch's has three.
    roundings = 4 if dtype is torch.float32 else (0.51 if draws(logits) else 2)
    bound = roundings * torch.finfo(dtype).eps * cap
    torch.testing.assert_close(found.double(), wanted, atol=bound, rtol=0)
    for row in range(3):  # of which each comes to the same alone
        assert torch.equal(cap_softly(logits[row : row + 1], cap)[0], found[row])


@pytest.mark.parametrize("cap", [1e-3, 5.0, 1e4])
def test_soft_caps_keep_the_digits_of_small_numbers(cap: float) -> None:
    logits = torch.linspace(-1.5, 1.5, 30_001)[None] * cap
    found, wanted = cap_softly(logits, cap).double(), torch.tanh(logits.double() / cap) * cap
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(found, wanted, atol=1e-30, rtol=4 * eps)


def test_soft_caps_of_odd_numbers(dtype: torch.dtype) -> None:
    found = cap_softly(torch.tensor([[INF, -INF, 0.0, NAN, 1.0]], dtype=dtype), 2.0)[0]
    assert found[:3].tolist() == [2, -2, 0] and found[3].isnan() and found[4].isfinite()
    if draws(torch.ones(1, 4).to(dtype)):
        with pytest.raises(RuntimeError, match="cap must be larger"):
            cap_softly(torch.ones(1, 4).to(dtype), 0.0)


@pytest.mark.parametrize("width", [1, 33, 1000])
def test_as_floats(dtype: torch.dtype, width: int) -> None:
    logits = torch.randn(5, 2 * width).to(dtype)[:, :width]
    assert torch.equal(to_floats(logits), logits.float())


def test_others_are_pytorchs() -> None:
    logits = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(argmax(logits), logits.argmax(-1)) and to_floats(logits) is logits
    assert argmax(torch.empty(0, 4)).tolist() == []
    assert argmax(torch.arange(6).view(2, 3)).tolist() == [2, 2]


# ---- tokens that are drawn


def drawn_exactly(logits: list[float], choice: Choice) -> set[int]:
    """The tokens that may be drawn, in float64: the pick may lie on an edge."""
    top = max(logits)
    weights = [math.exp((x - top) / choice.temperature) for x in logits]
    ranked = sorted(weights, reverse=True)
    head = ranked[: int(choice.top_k)] if 0 < choice.top_k < len(ranked) else ranked
    before, least = 0.0, head[0] if len(head) < len(ranked) or choice.top_p < 1 else 0.0
    for weight in head if least else []:
        if before >= choice.top_p * sum(head):
            break
        before, least = before + weight, weight
    # Weights as good as equal may be taken for equal, or not.
    found = set()
    for slack in (1 - 1e-5, 1 + 1e-5):
        floor = max(choice.min_p, least) * slack
        kept = [weight if weight >= floor else 0.0 for weight in weights]
        lowest, highest = ((choice.pick + edge) * sum(kept) for edge in (-1e-5, 1e-5))
        sum_so_far = 0.0
        for token, weight in enumerate(kept):
            if weight and sum_so_far <= highest and sum_so_far + weight >= lowest:
                found.add(token)
            sum_so_far += weight
    return found


CHOICES = {
    "all": Choice(1.0, 0, 1.0, 0.0, 0.3),
    "cold": Choice(0.05, 0, 1.0, 0.0, 0.9),
    "top k": Choice(1.5, 5, 1.0, 0.0, 0.7),
    "top p": Choice(2.0, 0, 0.6, 0.0, 0.99),
    "nearly all of p": Choice(50.0, 0, 0.9999, 0.0, 0.5),
    "min p": Choice(1.0, 0, 1.0, 0.2, 0.8),
    "all filters": Choice(3.0, 40, 0.7, 0.01, 0.45),
}


@pytest.mark.parametrize("width", [1, 7, 64, 1000, 4099])
@pytest.mark.parametrize("name", CHOICES)
def test_drawn_tokens(dtype: torch.dtype, name: str, width: int) -> None:
    torch.manual_seed(width)
    logits = (3 * torch.randn(4, width)).to(dtype)
    if not draws(logits):
        pytest.skip("not converted here")
    picks = (0.0, 0.25, CHOICES[name].pick, 1 - 2**-53)
    choices = [CHOICES[name]._replace(pick=pick) for pick in picks]
    found = draw(logits, torch.tensor(choices, dtype=torch.float64)).tolist()
    for row, choice, token in zip(logits.tolist(), choices, found, strict=True):
        assert token in drawn_exactly(row, choice)
    alone = [
        draw(logits[i : i + 1], torch.tensor(choices[i : i + 1], dtype=torch.float64)).item()
        for i in range(4)
    ]
    assert alone == found, "a row has no company"


def test_what_is_improbable_is_drawn_as_often_as_it_is_probable() -> None:
    logits = torch.tensor([[0.0, -4.0, -INF, -2.0]]).expand(20_000, -1).contiguous()
    picks = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    choices = torch.tensor([[1.0, 0, 1.0, 0, 0]], dtype=torch.float64).repeat(20_000, 1)
    choices[:, 4] = picks
    counts = draw(logits, choices).bincount(minlength=4) / 20_000
    torch.testing.assert_close(counts, logits[0].softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("numbers", [[NAN] * 5, [-INF] * 5, [0.0, NAN, 1.0], [INF, 0.0, INF]])
def test_what_cannot_be_drawn_gives_a_token_all_the_same(
    dtype: torch.dtype, numbers: list[float]
) -> None:
    logits = torch.tensor([numbers], dtype=dtype)
    if not draws(logits):
        pytest.skip("not converted here")
    for choice in CHOICES.values():
        (token,) = draw(logits, torch.tensor([choice], dtype=torch.float64)).tolist()
        assert 0 <= token < len(numbers)
