"""A layer's operators in one: to the bits of the operators that it is made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aioengine.kernels.cpu import library
from aioengine.kernels.cpu.layer import feed, project
from aioengine.kernels.cpu.linear import Activation, NativeLinear
from aioengine.kernels.cpu.norm import rms_norm
from aioengine.kernels.cpu.rotary import rotate

pytestmark = pytest.mark.skipif(not library.is_available(), reason="no C++ kernels here")

HIDDEN, INNER, HEAD = 64, 96, 32
HEADS = (4, 2)
EPSILON = 1e-5


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest, instruction_set: str) -> torch.dtype:
    if request.param is torch.float16 and instruction_set == "generic":
        pytest.skip("float16 needs F16C")
    found: torch.dtype = request.param
    return found


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def product(outputs: int, inputs: int, dtype: torch.dtype, *, has_bias: bool) -> NativeLinear:
    bias = random(outputs) if has_bias else None
    return NativeLinear((random(outputs, inputs) / 8).to(dtype), bias)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_before_attention(dtype: torch.dtype, rows: int, has_bias: bool) -> None:
    x, cos, sin = (random(rows, width).to(dtype) for width in (HIDDEN, HEAD, HEAD))
    norm = random(HIDDEN).to(dtype)
    heads, kv_heads = HEADS
    merged = product((heads + 2 * kv_heads) * HEAD, HIDDEN, dtype, has_bias=has_bias)
    found = project(x, norm, EPSILON, merged, HEADS, cos, sin)
    whole = merged(rms_norm(x, norm, EPSILON)).view(rows, -1, HEAD)
    query, key, value = torch.split(whole, (heads, kv_heads, kv_heads), 1)
    for one, other in zip(found, (*rotate(query, key, cos, sin), value), strict=True):
        assert one.shape == other.shape and torch.equal(one, other)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("hidden", [HIDDEN, 72])
@pytest.mark.parametrize("is_gated", [False, True])
def test_after_attention(
    dtype: torch.dtype, instruction_set: str, rows: int, has_bias: bool, hidden: int, is_gated: bool
) -> None:
    if hidden % 32 and dtype is torch.bfloat16 and "bf16" in instruction_set:
        pytest.skip("such weights are oneDNN's")
    x, attended = random(rows, hidden).to(dtype), random(rows, HIDDEN).to(dtype)
    norm = random(hidden).to(dtype)
    out = product(hidden, HIDDEN, dtype, has_bias=has_bias)
    up = product(INNER * (1 + is_gated), hidden, dtype, has_bias=has_bias)
    down = product(hidden, INNER, dtype, has_bias=has_bias)
    before = x.clone()
    silu = Activation.SILU
    found = feed(x, attended, out, norm, EPSILON, up, silu, is_gated, down)
    new = out(attended) + x
    inner = up(rms_norm(new, norm, EPSILON), silu, is_gated)
    assert torch.equal(found, down(inner) + new)
    assert torch.equal(x, before)


def test_what_does_not_fit_is_refused() -> None:
    out = product(HIDDEN, HIDDEN, torch.float32, has_bias=False)
    x, norm = random(3, HIDDEN), random(HIDDEN)

    def fed(x: Tensor, attended: Tensor) -> Tensor:
        return feed(x, attended, out, norm, EPSILON, out, Activation.NONE, False, out)

    assert fed(x, x).shape == x.shape
    for other in (random(4, HIDDEN), x.double(), x.T.contiguous().T):
        with pytest.raises(RuntimeError, match=r"residual|dimension"):
            fed(other, x)
    with pytest.raises(RuntimeError, match="fit each other"):
        fed(x, random(3, HIDDEN + 1))
    with pytest.raises(RuntimeError, match="fit each other"):
        project(x, norm, EPSILON, out, HEADS, random(3, HEAD), random(3, HEAD))
