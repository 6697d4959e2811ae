"""Decoders run from plans on the simulated device, and what their layers launch there.

Run on it by test_simulated.py, not by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aioengine.kernels.attention import AttentionBackend, select_backend
from aioengine.kernels.torch_operators import TorchOperators
from aioengine.models.fusion import DECODER_PASSES
from aioengine.models.fusion.decoder_plan import plan_decoder
from tests.models.fusion.test_decoder_plan import CONFIGS, LAYERS, Steps, routed
from tests.simulated.device import DEVICE, SimulatedMode

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ERRORS = {torch.float32: 5e-5, torch.float16: 5e-2, torch.bfloat16: 2e-1}
"""Of all hidden states together, which rounding explains."""
LAUNCHES = {"llama": (11, 37), "norms of heads": (13, 53), "two kinds of angles": (27, 81)}
"""Of a layer in bfloat16 beside what attention launches: from the plan, and at least as modules."""


def on_device(name: str, dtype: torch.dtype, *, is_planned: bool) -> nn.Module:
    """A decoder on the device, as transformers has it or run from its plan."""
    model = routed(CONFIGS[name](), dtype).to("cuda")
    if is_planned:
        for each in DECODER_PASSES:
            each(model)
        assert plan_decoder(model) == LAYERS
        assert isinstance(model._aioengine_decoder.operators, TorchOperators)  # type: ignore[union-attr]
    return model


def steps(model: nn.Module, dtype: torch.dtype, **options: Any) -> Steps:
    backend = select_backend("auto", "cuda")
    return Steps(model, dtype, device="cuda", **{"backend": backend, **options})


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in CONFIGS
        for dtype in DTYPES
        # Layers of experts are one operator in the other two dtypes alone (`routed_experts`).
        if name != "experts" and (name, dtype) != ("routed experts", torch.float16)
    ],
)
def test_the_plan_computes_what_the_modules_do(name: str, dtype: torch.dtype) -> None:
    with SimulatedMode():
        modules, plan = (on_device(name, dtype, is_planned=is_one) for is_one in (False, True))
        num_rows = 2 if name == "rows" else 0
        wanted = steps(modules, dtype, num_rows=num_rows).modules().cpu().double()
        found = steps(plan, dtype, num_rows=num_rows).plan().cpu().double()
        places = torch.tensor([1, 2], device="cuda")
        part = steps(plan, dtype, num_rows=num_rows, wanted=places).plan().cpu()
    assert wanted.isfinite().all() and wanted.std() > 0.1
    error = (found - wanted).norm() / wanted.norm()
    assert float(error) <= ERRORS[dtype]
    kept = torch.tensor([1, 2, 9, 10])
    error = (part[kept] - wanted[kept]).norm() / wanted.norm()
    assert float(error) <= ERRORS[dtype]


class _NoAttention:
    """Attention that launches nothing: what is counted is the rest of a layer."""

    name = "none"

    def attend(self, query: Tensor, *_: Any, **__: Any) -> Tensor:
        return query


def num_launches(run: Callable[[], Tensor]) -> int:
    """Operators that were launched meanwhile."""
    before = sum(DEVICE.launches.values())
    run()
    return sum(DEVICE.launches.values()) - before


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_a_layer(name: str) -> None:
    """What a step launches less than one without the last layer."""
    counts = []
    with SimulatedMode():
        for is_planned in (True, False):
            model: Any = on_device(name, torch.bfloat16, is_planned=is_planned)
            nothing: AttentionBackend = _NoAttention()  # type: ignore[assignment]
            run = steps(model, torch.bfloat16, backend=nothing)
            whole = num_launches(run.plan if is_planned else run.modules)
            model.layers = model.layers[:-1]
            model.config.num_hidden_layers = len(model.layers)
            if is_planned:
                plan_decoder(model)
            part = num_launches(run.plan if is_planned else run.modules)
            counts.append((whole - part) // 2)  # there are two steps
    assert counts[0] == LAUNCHES[name][0] and counts[1] >= LAUNCHES[name][1], counts
