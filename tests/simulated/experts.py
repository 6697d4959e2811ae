"""Routed experts on the simulated device, where nothing is read back to the host."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from aioengine.kernels import experts
from aioengine.kernels.experts import lay_out_experts
from tests.simulated.device import LAUNCH_THREAD, SimulatedMode, SimulatedTensor


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 90])
@pytest.mark.parametrize(
    ("dtype", "size", "grouped"),
    [
        (torch.bfloat16, 16, True),
        (torch.bfloat16, 12, False),  # rows that do not begin where 16 bytes begin
        (torch.float16, 16, False),
        (torch.float32, 16, False),
        (torch.float64, 16, False),
    ],
)
def test_nothing_is_read_back(
    dtype: torch.dtype,
    size: int,
    grouped: bool,
    num_tokens: int,
    is_transposed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading.current_thread(), "name", LAUNCH_THREAD)
    calls: list[Any] = []
    kernel = experts.grouped_mm

    def noted(*args: Any, **options: Any) -> Tensor:
        calls.append(args)
        return kernel(*args, **options)

    monkeypatch.setattr(experts, "grouped_mm", noted)
    generator = torch.Generator().manual_seed(num_tokens)
    chosen = torch.rand(num_tokens, 6, generator=generator).topk(2).indices
    hidden = torch.randn(num_tokens, size, generator=generator).to(dtype)
    weight = torch.randn(6, 24, size, generator=generator).to(dtype).mT
    if is_transposed:
        weight = weight.contiguous()
    shares = torch.rand(num_tokens, 2, generator=generator)
    with SimulatedMode():
        there = SimulatedTensor(weight)
        layout = lay_out_experts(SimulatedTensor(chosen), [there])
        out = layout.linear(layout.take(SimulatedTensor(hidden)), there)
        found: Any = layout.combine(out, SimulatedTensor(shares))
    pairs = torch.einsum("ti,tkio->tko", hidden.double(), weight.double()[chosen])
    expected = (pairs * shares.double()[..., None]).sum(1)
    tolerance = 0.15 if dtype == torch.bfloat16 else 0.03
    torch.testing.assert_close(found.elem.double(), expected, atol=tolerance, rtol=tolerance)
    assert bool(calls) is grouped
