"""Layers that call their operators: usual ones do, to the same bits; others are left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from aioengine.kernels.attention import build_metadata
from aioengine.kernels.cpu import library
from aioengine.kernels.cpu.backend import CpuBackend
from aioengine.kernels.cpu.linear import native_way
from aioengine.kernels.layer_slot import LayerSlot, StepContext, StepHolder, attach_slot
from aioengine.models.fusion.decoder_plan import plan_decoder, run_decoder_plan
from aioengine.models.fusion.fused_mlp import fuse_activations
from aioengine.models.fusion.fused_rms_norm import fuse_norms
from aioengine.models.fusion.packed_linear import pack_layers
from aioengine.models.fusion.rotary import fuse_rotary
from aioengine.models.fusion.trial import StandIn
from aioengine.models.runtime.attention import route_attention

pytestmark = pytest.mark.skipif(
    not library.is_available() or library.instruction_set() == "generic",
    reason="the products are PyTorch's here",
)
LAYERS = 3
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 50,
    "pad_token_id": 0,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def fused(config: Any, dtype: torch.dtype) -> nn.Module:
    """A decoder whose operators are ours, with pages."""
    torch.manual_seed(0)
    model: nn.Module = AutoModel.from_config(config).to(dtype).requires_grad_(False).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.1, 0.2)
    route_attention(model)
    holder = StepHolder()
    for index, layer in enumerate(model.get_submodule("layers")):  # type: ignore[arg-type]
        slot = LayerSlot(index, 0, holder, is_last=index == LAYERS - 1)
        attach_slot(layer.self_attn, slot)
    pack_layers(model, native_way)
    fuse_activations(model)
    fuse_norms(model)
    fuse_rotary(model)
    model.holder = holder  # type: ignore[assignment] - for the test alone
    return model


def run(
    model: nn.Module,
    dtype: torch.dtype,
    wanted: Tensor | None = None,
    *,
    is_short: bool = False,
    backend: CpuBackend | None = None,
) -> Tensor:
    """Two sequences of 3 and 5 tokens, [8, hidden]; `is_short`: without the decoder itself."""
    generator = torch.Generator().manual_seed(1)
    embeds = torch.randn(1, 8, 64, generator=generator).to(dtype)
    meta = build_metadata(block_size=4, block_tables=[[3], [0, 2]], starts=[0, 0], ends=[3, 5])
    caches = [tuple(torch.zeros(2, 4, 4, 2, 32, dtype=dtype)) for _ in range(LAYERS)]
    step = StepContext([meta], caches, backend or CpuBackend(), wanted=wanted)  # type: ignore[arg-type]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    holder: Any = model.holder
    with torch.inference_mode(), holder.hold(step):
        if is_short:
            short = run_decoder_plan(model, embeds[0], positions[0])
            assert short is not None
            return short
        found: Tensor = model(
            inputs_embeds=embeds, position_ids=positions, use_cache=False
        ).last_hidden_state[0]
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
        MistralConfig(**SIZES, sliding_window=2),
        Qwen2Config(**SIZES),
    ],
    ids=["llama", "biases", "window", "qwen2"],
)
def test_the_same_bits(config: Any, dtype: torch.dtype) -> None:
    model = fused(config, dtype)
    before = copy.deepcopy(model)
    assert plan_decoder(model) == LAYERS
    found = run(model, dtype)
    assert found.isfinite().all() and found.std() > 0.1
    assert torch.equal(found, run(before, dtype))
    assert torch.equal(found, run(model, dtype, is_short=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", [[2, 7], [5], []])
def test_rows_that_are_read(wanted: list[int], dtype: torch.dtype) -> None:
    """They keep their bits; the others are not computed to the end."""
    model = fused(LlamaConfig(**SIZES), dtype)
    assert plan_decoder(model) == LAYERS
    rows = torch.tensor(wanted, dtype=torch.long)
    whole = run(model, dtype)
    for part in (run(model, dtype, rows), run(model, dtype, rows, is_short=True)):
        is_equal = (whole == part).all(dim=-1)
        assert is_equal.nonzero()[:, 0].tolist() == wanted


def test_only_the_last_layer_leaves_rows_out() -> None:
    """Those before it are attended to by the rows that are read."""
    model = fused(LlamaConfig(**SIZES), torch.float32)
    plan_decoder(model)
    computed: list[int] = []
    for layer in model.get_submodule("layers"):  # type: ignore[attr-defined]
        feed_forward = layer.mlp
        original = feed_forward.forward
        feed_forward.forward = lambda x, original=original: computed.append(len(x)) or original(x)
    run(model, torch.float32, torch.tensor([7]))
    assert computed == [8, 8, 1]


@pytest.mark.parametrize(
    "config",
    [
        GraniteConfig(**SIZES, residual_multiplier=0.5),
        CohereConfig(**{key: value for key, value in SIZES.items() if key != "head_dim"}),
        Gemma2Config(**SIZES),
        Qwen3Config(**SIZES),
    ],
    ids=["residuals are scaled", "parallel", "four norms", "norms of heads"],
)
def test_others_are_left_alone(config: Any) -> None:
    model = fused(config, torch.float32)
    kinds = [type(layer) for layer in model.get_submodule("layers")]  # type: ignore[arg-type]
    assert plan_decoder(model) == 0
    assert [type(layer) for layer in model.get_submodule("layers")] == kinds  # type: ignore[arg-type]


class _OwnBackend(CpuBackend):
    """Somebody's, which wants to see every layer's attention."""

    num_calls = 0

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        self.num_calls += 1
        return super().attend(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_are_one_operator(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the last; with another backend each attends by itself, to the same bits."""
    model = fused(LlamaConfig(**SIZES), dtype)
    plan_decoder(model)
    rows: list[int] = []
    run_layers = CpuBackend.run_layers

    def counted(self: CpuBackend, x: Tensor, *args: Any) -> Tensor | None:
        rows.append(len(x))
        return run_layers(self, x, *args)

    monkeypatch.setattr(CpuBackend, "run_layers", counted)
    found = run(model, dtype, is_short=True)
    assert rows == [8]
    own = _OwnBackend()
    assert torch.equal(run(model, dtype, is_short=True, backend=own), found)
    assert rows == [8] and own.num_calls == LAYERS


def test_a_decoder_that_does_more_is_called() -> None:
    """Its layers are usual ones, but embeddings are scaled before them."""
    config = GraniteConfig(**SIZES, residual_multiplier=1.0, embedding_multiplier=2.0)
    model = fused(config, torch.float32)
    before = copy.deepcopy(model)
    assert plan_decoder(model) == LAYERS
    assert run_decoder_plan(model, torch.ones(3, 64), torch.arange(3)) is None
    assert torch.equal(run(model, torch.float32), run(before, torch.float32))


@pytest.mark.parametrize("name", ["", "norm", "rotary_emb", "layers.1"])
def test_hooks_around_layers_are_called(name: str) -> None:
    model = fused(LlamaConfig(**SIZES), torch.float32)
    called: list[nn.Module] = []
    hook = model.get_submodule(name).register_forward_hook(lambda each, *_: called.append(each))
    plan_decoder(model)
    assert run_decoder_plan(model, torch.ones(3, 64), torch.arange(3)) is None
    run(model, torch.float32)
    assert model.get_submodule(name) in called
    hook.remove()


def test_hooks_are_called() -> None:
    """A layer is left alone where somebody listens to one of its modules."""
    model = fused(LlamaConfig(**SIZES), torch.float32)
    layer = model.get_submodule("layers")[1]  # type: ignore[index]
    layer.self_attn.o_proj.register_forward_hook(lambda *_: None)
    assert plan_decoder(model) == LAYERS - 1


def test_what_it_does_not_know_goes_the_old_way() -> None:
    """Two rows of a batch, without a slot: plain attention."""
    model = fused(LlamaConfig(**SIZES), torch.float32)
    before = copy.deepcopy(model)
    plan_decoder(model)
    x = torch.randn(2, 4, 64)
    turns = torch.rand(2, 4, 16).repeat(1, 1, 2)
    angles = turns.cos(), turns.sin()
    outputs = []
    for each in (model, before):
        layer = each.get_submodule("layers")[0]  # type: ignore[index]
        attach_slot(layer.self_attn, None)  # type: ignore[arg-type]
        with torch.inference_mode():
            outputs.append(layer(x, position_embeddings=angles, attention_mask=None))
    assert torch.equal(*outputs)


def test_rows_that_do_not_lie_close_together_go_the_old_way() -> None:
    model = fused(LlamaConfig(**SIZES), torch.bfloat16)
    before = copy.deepcopy(model)
    assert plan_decoder(model) == LAYERS
    x = torch.randn(1, 64, 4).to(torch.bfloat16).mT
    turns = torch.rand(1, 4, 16).repeat(1, 1, 2)
    angles = turns.cos().to(x.dtype), turns.sin().to(x.dtype)
    outputs = []
    for each in (model, before):
        layer = each.get_submodule("layers")[0]  # type: ignore[index]
        attach_slot(layer.self_attn, StandIn())
        with torch.inference_mode():
            outputs.append(layer(x, position_embeddings=angles, attention_mask=None))
    assert torch.equal(*outputs)
