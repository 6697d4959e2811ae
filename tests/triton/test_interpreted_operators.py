"""A plan's layers by Triton's kernels: what the operators in PyTorch come to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aioengine.kernels.layer_plan import NormPlan
from aioengine.kernels.matmul import Activation
from aioengine.kernels.torch_operators import TorchOperators
from aioengine.kernels.triton.operators import TritonOperators
from tests.triton.decoders import Decoder, random

NEARNESS = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 6e-3}


VARIANTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "window": {"window": 3},
    "biases and layer norms": {"has_bias": True},
    "norms of heads": {"has_head_norms": True},
    "norms before the sums": {"has_out_norms": True},
    "odd heads": {"head_dim": 20, "has_head_norms": True},
    "no angles": {"more": {"angles": None}},
    "no angles, norms of heads": {"more": {"angles": None}, "has_head_norms": True},
    "tanh": {"activation": Activation.GELU_TANH},
    "quick": {"activation": Activation.QUICK_GELU},
    "erf": {"activation": Activation.GELU},
}


@pytest.mark.parametrize("dtype", NEARNESS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_layers(variant: str, dtype: torch.dtype) -> None:
    decoder, near = Decoder(dtype, **VARIANTS[variant]), NEARNESS[dtype]
    for wanted in (None, torch.tensor([9, 2])):
        found, pages = decoder.run(TritonOperators, wanted)
        expected, expected_pages = decoder.run(TorchOperators, wanted)
        assert found.dtype == dtype and expected.isfinite().all()
        torch.testing.assert_close(found, expected, atol=near, rtol=near)
        torch.testing.assert_close(pages, expected_pages, atol=near, rtol=near)


@pytest.mark.parametrize("dim", [5, 64, 3000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_norms(dim: int, has_bias: bool) -> None:
    """Weights of the rows' dtype, and in float32; rows that lie apart; none."""
    operators = TritonOperators([])
    for dtype in (torch.float32, torch.bfloat16):
        for weight_dtype in {torch.float32, dtype}:
            bias = random(dim, seed=2).to(weight_dtype) if has_bias else None
            plan = NormPlan(random(dim, seed=1).to(weight_dtype), 1e-6, bias)
            for rows in (random(7, dim).to(dtype), random(7, 2 * dim).to(dtype)[:, :dim]):
                for x in (rows, rows[:0]):
                    found, expected = (
                        operators.normalize(x, plan),
                        TorchOperators([]).normalize(x, plan),
                    )
                    near = 1e-5 if dtype is torch.float32 else 1e-2
                    torch.testing.assert_close(found, expected, atol=near, rtol=near)


def test_float64_goes_another_way() -> None:
    decoder = Decoder(torch.float64)
    for found, expected in zip(
        decoder.run(TritonOperators, None), decoder.run(TorchOperators, None), strict=True
    ):
        assert torch.equal(found, expected)
