"""Feed-forward layers of one product less: transformers' own are taken, others are left alone."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from aioengine.kernels.cpu import library
from aioengine.kernels.cpu.linear import native_way
from aioengine.models.activated import (
    ActivatedFeedForward,
    FeedForward,
    feed_forward,
    fuse_activations,
)
from aioengine.models.packed import pack_layers

needs_kernels = pytest.mark.skipif(
    not library.is_available() or library.instruction_set() == "generic",
    reason="the products are PyTorch's here",
)
GATED = FeedForward("down_proj", "act_fn", "up_proj", "gate_proj")


def config(activation: str, inner: int = 96) -> Any:
    return SimpleNamespace(
        hidden_size=64,
        intermediate_size=inner,
        hidden_act=activation,
        hidden_activation=activation,
        mlp_bias=True,
    )


def packed(layer: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Packed by our own way: which one is the best depends on the CPU."""
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    holder = nn.Sequential(layer.to(dtype).requires_grad_(False))
    assert pack_layers(holder, native_way)
    return holder


class Parallel(nn.Module):
    """Looks much like the others."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 96)
        self.act = nn.SiLU()


class Doubled(Parallel):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)) * 2


class Crossed(Parallel):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(y))


class Added(Parallel):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) + self.up(x))


class Branching(Parallel):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 4:
            x = x + 1
        return self.down(self.act(self.up(x)))


class Straight(Parallel):
    def forward(self, x: Tensor) -> Tensor:
        """Says what it does."""
        y = self.up(x)
        y = self.act(y)
        return self.down(y)


def test_what_classes_are_read_as() -> None:
    for kind in (LlamaMLP, GemmaMLP, Qwen2MLP):
        assert feed_forward(kind) == GATED
    assert feed_forward(CLIPMLP) == FeedForward("fc2", "activation_fn", "fc1", None)
    assert feed_forward(Straight) == FeedForward("down", "act", "up", None)
    for kind in (Doubled, Crossed, Added, Branching, nn.Linear, nn.Module):
        assert feed_forward(kind) is None, kind


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "quick_gelu"])
@pytest.mark.parametrize("kind", [LlamaMLP, GemmaMLP, CLIPMLP])
def test_is_what_the_layer_was(kind: Any, activation: str, dtype: torch.dtype) -> None:
    holder = packed(kind(config(activation)), dtype)
    plain = copy.deepcopy(holder)
    assert fuse_activations(holder) == 1
    assert isinstance(holder[0], ActivatedFeedForward)
    x = torch.randn(2, 9, 64).to(dtype)
    found, wanted = holder(x), plain(x)
    assert found.dtype == dtype and found.shape == wanted.shape
    close = 8 * torch.finfo(dtype).eps * float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, atol=close, rtol=0)
    assert torch.equal(holder(x[:1, 3:4]), found[:1, 3:4]), "a row has no company"


@needs_kernels
def test_what_is_left_alone() -> None:
    hooked = packed(LlamaMLP(config("silu")))
    hooked[0].act_fn.register_forward_hook(lambda *_: None)
    exact = packed(CLIPMLP(config("gelu")))  # by the error function
    uneven = packed(LlamaMLP(config("silu", inner=80)))  # halves that share a panel
    unpacked = nn.Sequential(LlamaMLP(config("silu")))
    for each in (hooked, exact, uneven, unpacked):
        kind, x = type(each[0]), torch.randn(3, 64)
        wanted = each(x)
        assert fuse_activations(each) == 0
        assert type(each[0]) is kind and torch.equal(each(x), wanted)


@needs_kernels
def test_an_activation_is_known_by_what_it_does() -> None:
    class Named(nn.SiLU):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.01

    layer = packed(LlamaMLP(config("silu")))
    layer[0].act_fn = Named()
    assert fuse_activations(layer) == 0
