"""A layer's operators in one: to the bits of the operators that it is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aioengine.kernels.attention import AttentionArgs, AttentionMetadata, build_metadata
from aioengine.kernels.cpu import library
from aioengine.kernels.cpu.backend import CpuBackend
from aioengine.kernels.cpu.fused_layer import UsualLayer, listed
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
    found = usual_layer(0, dtype, norm=norm, qkv=merged).project(x, cos, sin)
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
    layer = usual_layer(0, dtype, out=out, feed_norm=norm, up=up, is_gated=is_gated, down=down)
    found = layer.feed(x, attended)
    new = out(attended) + x
    inner = up(rms_norm(new, norm, EPSILON), silu, is_gated)
    assert torch.equal(found, down(inner) + new)
    assert torch.equal(x, before)


def usual_layer(
    index: int,
    dtype: torch.dtype,
    *,
    has_bias: bool = False,
    is_gated: bool = True,
    softcap: float = 0.0,
    window: int = 0,
    **others: Any,
) -> UsualLayer:
    """One of some, no two of which are equal; `others`: parts that are given."""
    heads, kv_heads = HEADS
    outputs = (heads + 2 * kv_heads) * HEAD
    norms = 1 + 0.1 * torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(index))
    layer = UsualLayer(
        norm=norms[0].to(dtype),
        epsilon=EPSILON * (1 + index),
        qkv=product(outputs, HIDDEN, dtype, has_bias=has_bias),
        heads=HEADS,
        scale=0.1 * (1 + index),
        softcap=softcap,
        window=window if index else 0,
        out=product(HIDDEN, heads * HEAD, dtype, has_bias=has_bias),
        feed_norm=norms[1].to(dtype),
        feed_epsilon=EPSILON,
        up=product(INNER * (1 + is_gated), HIDDEN, dtype, has_bias=has_bias),
        activation=Activation.SILU,
        is_gated=is_gated,
        down=product(HIDDEN, INNER, dtype, has_bias=has_bias),
    )
    return replace(layer, **others)


def one_by_one(
    x: Tensor,
    layers: list[UsualLayer],
    caches: list[tuple[Tensor, Tensor]],
    meta: AttentionMetadata,
) -> Tensor:
    backend = CpuBackend()
    cos, sin = angles(x)
    for layer, (keys, values) in zip(layers, caches, strict=True):
        query, key, value = layer.project(x, cos, sin)
        attended = backend.attend(
            query,
            (keys, values),
            meta,
            AttentionArgs(layer.scale, layer.window or None, layer.softcap or None),
            new=(key, value),
        )
        x = layer.feed(x, attended.flatten(-2))
    return x


def angles(x: Tensor) -> tuple[Tensor, Tensor]:
    turns = random(len(x), HEAD // 2).repeat(1, 2)
    return turns.cos().to(x.dtype), turns.sin().to(x.dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("softcap", "window"), [(0.0, 0), (0.0, 2), (3.0, 0)])
def test_layers_at_once(
    dtype: torch.dtype, has_bias: bool, is_gated: bool, softcap: float, window: int
) -> None:
    """Two sequences, one of which goes on from what lies in its pages, through three layers."""
    layers = [
        usual_layer(
            index, dtype, has_bias=has_bias, is_gated=is_gated, softcap=softcap, window=window
        )
        for index in range(3)
    ]
    x = random(6, HIDDEN).to(dtype)
    meta = build_metadata(block_size=4, block_tables=[[3], [0, 2]], starts=[0, 4], ends=[3, 7])
    caches = random(3, 2, 4, 4, HEADS[1], HEAD).to(dtype)
    others = caches.clone()
    found = CpuBackend().run_layers(
        x, *angles(x), listed(layers), [*zip(*caches.unbind(1), strict=True)], meta
    )
    wanted = one_by_one(x, layers, [*zip(*others.unbind(1), strict=True)], meta)
    assert found.isfinite().all() and not torch.equal(found, x)
    assert torch.equal(found, wanted)
    assert torch.equal(caches, others)


def test_lists_of_layers_that_do_not_go_together_are_refused() -> None:
    layer = usual_layer(0, torch.float32, has_bias=False, is_gated=True, softcap=0.0, window=0)
    x = random(3, HIDDEN)
    meta = build_metadata(block_size=4, block_tables=[[3]], starts=[0], ends=[3])
    cache = (torch.zeros(4, 4, HEADS[1], HEAD), torch.zeros(4, 4, HEADS[1], HEAD))
    tensors, sizes, numbers = listed([layer])
    found = CpuBackend().run_layers(x, *angles(x), (tensors, sizes, numbers), [cache], meta)
    first = CpuBackend().run_layers(x, *angles(x), listed([layer, layer]), [cache], meta)
    assert found.shape == x.shape and torch.equal(found, first)
    for lists in ((tensors[1:], sizes, numbers), (tensors, sizes[1:], numbers)):
        with pytest.raises(RuntimeError, match="same number of layers"):
            CpuBackend().run_layers(x, *angles(x), lists, [cache], meta)
    with pytest.raises(RuntimeError, match="same number of layers"):
        CpuBackend().run_layers(x, *angles(x), (tensors, sizes, numbers), [cache, cache], meta)


def test_what_does_not_fit_is_refused() -> None:
    out = product(HIDDEN, HIDDEN, torch.float32, has_bias=False)
    x, norm = random(3, HIDDEN), random(HIDDEN)

    layer = usual_layer(0, torch.float32, qkv=out, out=out, up=out, down=out, is_gated=False)
    layer = replace(layer, norm=norm, feed_norm=norm, activation=Activation.NONE)
    assert layer.feed(x, x).shape == x.shape
    for other in (random(4, HIDDEN), x.double(), x.T.contiguous().T):
        with pytest.raises(RuntimeError, match=r"residual|dimension"):
            layer.feed(other, x)
    with pytest.raises(RuntimeError, match="fit each other"):
        layer.feed(x, random(3, HIDDEN + 1))
    with pytest.raises(RuntimeError, match="fit each other"):
        layer.project(x, random(3, HEAD), random(3, HEAD))
