"""Feed-forward layers of one product less: transformers' own are taken, others are left alone."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.bart.modeling_bart import BartConfig, BartEncoderLayer
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.whisper.modeling_whisper import WhisperConfig, WhisperDecoderLayer

from aioengine.kernels.cpu import library
from aioengine.kernels.cpu.linear import native_way
from aioengine.kernels.layer_slot import LayerSlot, StepHolder, attach_slot, slot_of
from aioengine.kernels.matmul import Activation
from aioengine.models.fusion.fused_mlp import (
    ActivatedFeedForward,
    ActivatedLinear,
    fuse_activations,
)
from aioengine.models.fusion.layer_names import FeedForward, LayerNames
from aioengine.models.fusion.packed_linear import pack_layers
from aioengine.models.runtime.attention import route_attention

needs_kernels = pytest.mark.skipif(
    not library.is_available() or library.instruction_set() == "generic",
    reason="the products are PyTorch's here",
)


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
    """Has the names of the others, and is not what they are."""

    layer_names = LayerNames(
        merged=[("gate", "up")], feed_forward=FeedForward("down", "act", "up", "gate")
    )

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
        return self.down(self.act(self.gate(x)) * self.up(x))


class Swapped(Parallel):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * self.act(self.up(x)))


class Straight(Parallel):
    """Is what its names say, by the names of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.gate(x))
        y = y * self.up(x)
        return self.down(y)


@needs_kernels
def test_a_trial_decides() -> None:
    for kind in (Doubled, Added, Branching, Swapped, Crossed):
        holder = packed(kind())
        assert fuse_activations(holder) == 0, kind
        assert type(holder[0]) is kind and isinstance(holder[0].act, nn.SiLU)
    named = packed(Straight())
    plain = copy.deepcopy(named)
    assert fuse_activations(named) == 1 and isinstance(named[0], ActivatedFeedForward)
    x = torch.randn(3, 64)
    torch.testing.assert_close(named(x), plain(x), atol=1e-4, rtol=0)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "quick_gelu", "gelu"])
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
def test_a_default_dtype_of_the_application_s() -> None:
    """Its own, or that of a model which it loads meanwhile: transformers sets the process's."""
    holder = packed(GemmaMLP(config("gelu_pytorch_tanh")), torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert fuse_activations(holder) == 1
    finally:
        torch.set_default_dtype(torch.float32)
    assert holder[0].fused[2] is Activation.GELU_TANH


@needs_kernels
def test_what_is_left_alone() -> None:
    hooked = packed(LlamaMLP(config("silu")))
    hooked[0].act_fn.register_forward_hook(lambda *_: None)
    other = packed(CLIPMLP(config("relu")))
    uneven = packed(LlamaMLP(config("silu", inner=80)))  # halves that share a panel
    unpacked = nn.Sequential(LlamaMLP(config("silu")))
    for each in (hooked, other, uneven, unpacked):
        kind, x = type(each[0]), torch.randn(3, 64)
        wanted = each(x)
        assert fuse_activations(each) == 0
        assert type(each[0]) is kind and torch.equal(each(x), wanted)


class Normed(nn.Module):
    """A projector with a norm before it, as InternVL's."""

    layer_names = LayerNames(feed_forward=FeedForward("down", "act", "up"))

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(2048), nn.GELU()
        self.up, self.down = nn.Linear(2048, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(self.norm(x))))


@needs_kernels
def test_a_norm_with_its_first_weights_is_not_left_out() -> None:
    layer = Normed()
    holder = packed(layer, torch.bfloat16)
    nn.init.ones_(layer.norm.weight)
    nn.init.zeros_(layer.norm.bias)
    fuse_activations(holder)
    assert not isinstance(layer, ActivatedFeedForward)


@needs_kernels
def test_an_activation_is_known_by_what_it_does() -> None:
    class Named(nn.SiLU):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.01

    layer = packed(LlamaMLP(config("silu")))
    layer[0].act_fn = Named()
    assert fuse_activations(layer) == 0


class Inside(nn.Module):
    """A layer with its feed-forward part written out."""

    layer_names = LayerNames(activated=("act", "first"))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.act = nn.Linear(64, 96), nn.Linear(96, 64), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.first(x))
        return x + self.last(inner)


class Twice(Inside):
    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.first(x)) + self.first(x)
        return x + self.last(inner)


class Inherited(Inside):
    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.first(x)) * self.first.weight.sum()
        return x + self.act(self.last(inner))


class Reader(Inside):
    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.first(x))
        return x + self.act(self.last(inner))


class Chunked(Inside):
    """As a gated layer whose halves are one matmul."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.first(x).chunk(2, -1)
        return x + self.last(torch.cat([self.act(gate), up], -1))


class Asking(Inside):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + self.last(self.act(self.first(y)))


@needs_kernels
def test_a_trial_decides_of_parts() -> None:
    for kind in (Twice, Inherited, Reader, Chunked, Asking):
        holder = packed(kind())
        layer: Any = holder[0]
        assert fuse_activations(holder) == 0, kind
        assert isinstance(layer.act, nn.GELU) and not isinstance(layer.first, ActivatedLinear)
    assert fuse_activations(packed(Inside())) == 1
    two = nn.ModuleList([packed(Twice()), packed(Twice())])
    assert fuse_activations(two) == 0, "one trial for all of a class"


@needs_kernels
def test_layers_of_decoders() -> None:
    """Their attention belongs to the engine's pages, which no trial touches."""
    config = WhisperConfig(d_model=64, decoder_attention_heads=2, decoder_ffn_dim=96)
    config._attn_implementation = "sdpa"
    layer: Any = WhisperDecoderLayer(config, layer_idx=0).eval()
    route_attention(layer)
    slot = LayerSlot(0, 0, StepHolder())
    for attention in (layer.self_attn, layer.encoder_attn):
        attach_slot(attention, slot)
    holder = packed(layer)
    assert fuse_activations(holder) == 1
    assert isinstance(layer.fc1, ActivatedLinear) and isinstance(layer.activation_fn, nn.Identity)
    assert slot_of(layer.self_attn) is slot_of(layer.encoder_attn) is slot


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_a_part_is_what_it_was(activation: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"encoder_attention_heads": 2, "encoder_ffn_dim": 96, "d_model": 64}
    settings = BartConfig(**options, activation_function=activation)
    settings._attn_implementation = "sdpa"
    holder = packed(BartEncoderLayer(settings).eval(), dtype)
    plain = copy.deepcopy(holder)
    assert fuse_activations(holder) == 1
    layer: Any = holder[0]
    assert isinstance(layer.fc1, ActivatedLinear) and isinstance(layer.activation_fn, nn.Identity)
    x = torch.randn(2, 9, 64).to(dtype)
    found, wanted = holder[0](x, None), plain[0](x, None)
    close = 16 * torch.finfo(dtype).eps * float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, atol=close, rtol=0)
    assert fuse_activations(holder) == 0, "it stays as it is"


@needs_kernels
def test_parts_that_are_left_alone() -> None:
    hooked = packed(Inside())
    hooked[0].act.register_forward_hook(lambda *_: None)
    other = packed(Inside())
    other[0].act = nn.Tanh()
    normed = packed(Inside())
    normed[0].act = nn.LayerNorm(96)

    class Heads(nn.Module):
        """Is at home with matrices."""

        def forward(self, x: Tensor) -> Tensor:
            return x.view(x.shape[0], 2, x.shape[1] // 2).flatten(1)

    class Halved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.dim() == 2 else x[::2]

    reshaped, halved = packed(Inside()), packed(Inside())
    reshaped[0].act, halved[0].act = Heads(), Halved()
    shared = packed(Inside())
    shared.append(nn.Sequential(shared[0].first, nn.Linear(96, 64)))
    for each in (hooked, other, normed, reshaped, halved, shared):
        x = torch.randn(3, 64)
        wanted = each(x)
        assert fuse_activations(each) == 0 and torch.equal(each(x), wanted)
