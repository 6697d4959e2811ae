"""Experts that are chosen before their operator, and gatings that layers have of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoModel

from aioengine.kernels.cpu.layer_operators import run_chosen_experts
from aioengine.kernels.matmul import Gating
from aioengine.models.fusion.routed_experts import pack_expert_layers
from tests.models.test_routed_experts import MODELS, drawn, fused, needs_packing, routes


@needs_packing
def test_experts_that_are_chosen_before() -> None:
    """What their operator refuses: places of other experts would be read."""
    model = drawn(AutoModel.from_config(MODELS["qwen3"]()), torch.float32)
    fused(model)
    plan = model.layers[0].mlp.routed
    x = torch.randn(3, 64)
    chosen, shares = routes(3, 8, torch.float32)
    run_chosen_experts(plan, x, chosen, shares)
    assert run_chosen_experts(plan, x[:0], chosen[:0], shares[:0]).shape == (0, 64)
    for which, message in ((chosen + 8, "no such expert"), (chosen - 8, "no such expert")):
        with pytest.raises(RuntimeError, match=message):
            run_chosen_experts(plan, x, which, shares)
    for wrong in ((chosen[:2], shares), (chosen, shares[:, :1]), (chosen.int(), shares)):
        with pytest.raises(RuntimeError, match=r"chosen must be|each row must have|close"):
            run_chosen_experts(plan, x, *wrong)
    with pytest.raises(RuntimeError, match="shares float32"):
        run_chosen_experts(plan, x, chosen, shares.double())
    with pytest.raises(RuntimeError, match="lists must be of the experts"):
        torch.ops.aioengine_cpu.expert_feed(x, chosen, shares, [x] * 5, [1] * 4, [0.0] * 2)


def gated(both: Tensor, limit: float, *, is_after: bool) -> Tensor:
    """Gates with a limit, before their activation or after it."""
    gate, up = both.chunk(2, -1)
    gates = silu(gate).clamp(max=limit) if is_after else silu(gate.clamp(max=limit))
    return gates * up.clamp(-limit, limit)


@needs_packing
@torch.no_grad()
def test_gatings_that_layers_have_of_their_own() -> None:
    """Known are those that a matmul can apply; others are called, and come to the same."""
    for is_after in (False, True):
        model = drawn(AutoModel.from_config(MODELS["qwen3"]()), torch.float32)
        layer: Any = model.layers[0].mlp.experts
        layer._apply_gate = partial(gated, limit=1.5, is_after=is_after)
        rows = torch.randn(11, 64)
        chosen, shares = routes(11, 8, torch.float32)
        wanted = layer(rows, chosen, shares)
        pack_expert_layers(layer)
        known = layer.aioengine_experts.keywords
        assert known["gating"] == (Gating() if is_after else Gating(1.5))
        assert (known["activation"] is None) == is_after
        torch.testing.assert_close(layer(rows, chosen, shares), wanted, atol=1e-4, rtol=1e-4)
