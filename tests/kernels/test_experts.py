"""Experts in blocks against each token alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aioengine.kernels import experts
from aioengine.kernels.experts import ExpertBlocks

SIZE, OUT = 8, 6


def choose(kind: str, num_tokens: int, num_experts: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    if kind == "all to one":
        return torch.arange(k).expand(num_tokens, -1) + num_experts - k
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    return scores.topk(k, dim=-1).indices


@pytest.mark.parametrize("kind", ["at random", "all to one"])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 64, 700])
@pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (4, 2), (16, 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_meet_their_experts(
    kind: str, num_tokens: int, num_experts: int, k: int, biased: bool
) -> None:
    chosen = choose(kind, num_tokens, num_experts, k)
    generator = torch.Generator().manual_seed(1)
    hidden, weight, bias, shares = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in (
            (num_tokens, SIZE),
            (num_experts, SIZE, OUT),
            (num_experts, OUT),
            chosen.shape,
        )
    )
    blocks = ExpertBlocks.of(chosen, num_experts)
    out = blocks.linear(blocks.take(hidden), weight, bias if biased else None)
    found = blocks.combine(out, shares)
    pairs = torch.einsum("ti,tkio->tko", hidden, weight[chosen])
    expected = ((pairs + bias[chosen] * biased) * shares[..., None]).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_how_many_blocks_there_are_does_not_depend_on_the_router() -> None:
    shapes = {
        ExpertBlocks.of(choose(kind, 64, 16, 3), 16).take(torch.ones(64, SIZE)).shape
        for kind in ("at random", "all to one")
    }
    assert len(shapes) == 1
    assert shapes.pop()[0] <= 3 * 16


def test_weights_are_copied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, hidden = choose("at random", 64, 16, 3), torch.randn(64, SIZE)
    weight = torch.randn(16, SIZE, OUT)
    blocks = ExpertBlocks.of(chosen, 16)
    whole = blocks.linear(blocks.take(hidden), weight)
    monkeypatch.setattr(experts, "MAX_WEIGHT_BYTES", 1)
    torch.testing.assert_close(blocks.linear(blocks.take(hidden), weight), whole)
