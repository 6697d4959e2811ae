"""Experts in blocks, and packed, against each token alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aioengine.kernels import experts
from aioengine.kernels.cpu.library import is_available
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.kernels.experts import (
    ExpertBlocks,
    ExpertRows,
    PackedExperts,
    TorchExperts,
    can_pack_experts,
    pack_experts,
    pack_grouped_experts,
)
from aioengine.kernels.grouped import GroupedWeight, pack_grouped, round_weight
from aioengine.kernels.matmul import Activation, Gating, activated

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


needs_kernels = pytest.mark.skipif(not is_available(), reason="the C++ kernels were not built")


def packed_experts(
    kind: str, dtype: torch.dtype, num_experts: int, outputs: int, inputs: int
) -> tuple[PackedExperts | TorchExperts, list[Any]]:
    """Experts packed as one, and each by itself."""
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(num_experts, outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(num_experts, outputs, generator=generator)
    if kind == "plain":
        packed = pack_experts(weight, bias)
        assert packed is not None
        return packed, [NativeLinear(*each) for each in zip(weight, bias, strict=True)]
    bits = 8 if "8" in kind else 4
    each = [round_weight(x.float(), bits) for x in weight]
    if "full" in kind:
        each = [replace(x, has_full_inputs=True) for x in each]
    together = GroupedWeight.joined(each)
    own = [pack_grouped(*one) for one in zip(each, bias, strict=True)]
    return pack_grouped_experts(together, bias, num_experts), own


@needs_kernels
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 40, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "8 bits", "4 bits", "4 bits, full inputs"])
def test_packed_experts_are_matmuls_of_their_own(
    kind: str, dtype: torch.dtype, num_tokens: int
) -> None:
    """To the bit, whatever rows and experts are beside them."""
    packed, own = packed_experts(kind, dtype, 5, 64, 96)
    chosen = choose("at random", num_tokens, 5, 2)
    hidden = torch.randn(num_tokens, 96, generator=torch.Generator().manual_seed(3)).to(dtype)
    layout = ExpertRows.of(chosen, 5)
    rows = layout.take(hidden)
    assert packed.can_gate
    for activation, is_gated in ((Activation.NONE, False), (Activation.SILU, True)):
        found = packed(rows, layout.ends, activation, is_gated)
        parts = torch.tensor_split(rows, layout.ends[:-1])
        wanted = [f(x, activation, is_gated) for f, x in zip(own, parts, strict=True)]
        assert torch.equal(found, torch.cat(wanted))


@needs_kernels
@pytest.mark.parametrize("gating", [Gating(4.0, 1.0), Gating(6.0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "8 bits", "4 bits, full inputs"])
def test_gates_with_limits(kind: str, dtype: torch.dtype, gating: Gating) -> None:
    packed, _ = packed_experts(kind, dtype, 5, 64, 96)
    rows = torch.randn(40, 96, generator=torch.Generator().manual_seed(3)).to(dtype)
    ends = torch.tensor([7, 7, 20, 39, 40])
    inner = packed(rows, ends).float()
    assert (inner > gating.limit).any() and (inner < -gating.limit).any()
    found = packed(rows, ends, Activation.QUICK_GELU, True, gating)
    wanted = activated(inner, Activation.QUICK_GELU, True, gating)
    bound = 16 * max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(found.float(), wanted, rtol=bound, atol=bound * 8)
    if isinstance(packed, PackedExperts):
        for limit, is_gated in ((-1.0, True), (0.0, True), (2.0, False)):
            with pytest.raises(RuntimeError, match="limit is positive"):
                packed(rows, ends, Activation.SILU, is_gated, Gating(limit, 1.0))


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 64])
@pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (4, 2), (16, 3)])
def test_sorted_rows_are_put_together_again(num_tokens: int, num_experts: int, k: int) -> None:
    chosen = choose("at random", num_tokens, num_experts, k)
    hidden, shares = torch.randn(num_tokens, SIZE), torch.rand(num_tokens, k)
    factors = torch.arange(1.0, num_experts + 1)
    layout = ExpertRows.of(chosen, num_experts)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), layout.ends[:-1]])
    of_rows = factors.repeat_interleave(layout.ends - starts)
    found = layout.combine(layout.take(hidden) * of_rows[:, None], shares)
    wanted = hidden * (factors[chosen] * shares).sum(1, keepdim=True)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_experts_in_groups_by_pytorch(bits: int) -> None:
    weight = round_weight(torch.randn(3 * 32, 64), bits)
    bias = torch.randn(3, 32)
    experts = TorchExperts(weight, bias, 3)
    rows, ends = torch.randn(9, 64), torch.tensor([4, 4, 9])
    parts = zip(rows.tensor_split(ends[:-1]), weight.floats().view(3, 32, 64), bias, strict=True)
    wanted = torch.cat([x @ own.T + shift for x, own, shift in parts])
    torch.testing.assert_close(experts(rows, ends), wanted, rtol=0.02, atol=0.02 * 64**0.5)
    if is_available():
        packed = pack_grouped_experts(weight, bias, 3)
        torch.testing.assert_close(packed(rows, ends), experts(rows, ends), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_gated", [False, True])
def test_activations_by_pytorch(is_gated: bool) -> None:
    """Also of layers without gates, whose activation the first matmul takes."""
    experts = TorchExperts(round_weight(torch.randn(3 * 64, 64), 8), None, 3)
    rows, ends = torch.randn(9, 64), torch.tensor([4, 4, 9])
    plain = experts(rows, ends)
    gates, others = plain.chunk(2, -1) if is_gated else (plain, torch.ones(()))
    wanted = torch.nn.functional.silu(gates) * others
    torch.testing.assert_close(experts(rows, ends, Activation.SILU, is_gated), wanted)


@needs_kernels
@pytest.mark.parametrize("ends", [[3, 2, 9], [-1, 4, 9], [4, 4, 8], [4, 4, 10], [9], []])
def test_rows_of_nobody_are_refused(ends: list[int]) -> None:
    packed = pack_experts(torch.randn(3, 32, 64), None)
    if packed is not None:
        with pytest.raises(RuntimeError, match=r"ends must rise|do not fit"):
            packed(torch.randn(9, 64), torch.tensor(ends, dtype=torch.int64))


def test_panels_that_are_not_filled() -> None:
    assert pack_experts(torch.randn(3, 40, 64), None) is None
    assert not can_pack_experts(torch.randn(3, 40, 64))
