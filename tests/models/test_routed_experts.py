"""Routed experts on a CPU: packed, as the layers of transformers that they were, and rounded."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    NemotronHConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.aria.modeling_aria import AriaExperts, AriaTextConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from aioengine import AsyncEngine, SamplingParams
from aioengine.kernels.cpu.layer_operators import run_experts
from aioengine.kernels.cpu.library import instruction_set, is_available
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.kernels.grouped import round_weight
from aioengine.models.fusion.fused_mlp import fuse_activations
from aioengine.models.fusion.packed_linear import pack_layers
from aioengine.models.fusion.routed_experts import fuse_routed_layers, pack_expert_layers
from aioengine.models.quantization.grouped_layers import (
    attach,
    expert_weights,
    known_groups,
    unpacked_names,
)
from aioengine.models.quantization.rounding import Rounding, round_weights
from aioengine.models.runtime.hf_loading import load_pretrained
from tests.models.test_packed_floats import pack as pack_floats
from tests.support.tiny import tiny_tokenizer

needs_packing = pytest.mark.skipif(
    not is_available() or instruction_set() == "generic", reason="PyTorch's matmuls are as fast"
)
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
QWEN = {**SIZES, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3MoeConfig(**QWEN),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "gpt-oss": lambda: GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(module: nn.Module, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    module = module.to(dtype).eval().requires_grad_(False)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.0, 0.15)
    return module


def routes(count: int, num_experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scores = torch.randn(count, num_experts, generator=torch.Generator().manual_seed(2))
    shares, chosen = scores.softmax(-1).topk(2, dim=-1)
    return chosen, shares.to(dtype)


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_of_packed_experts(name: str, dtype: torch.dtype) -> None:
    model = drawn(AutoModel.from_config(MODELS[name]()), dtype)
    ids = torch.randint(96, (1, 40), generator=torch.Generator().manual_seed(1))
    wanted = model(ids).last_hidden_state.float()
    assert pack_expert_layers(model) == 2
    found = model(ids).last_hidden_state.float()
    bound = 40 * torch.finfo(dtype).eps * float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, atol=bound, rtol=0)
    layers = [each for each in model.modules() if expert_weights(each)]
    assert len(layers) == 2
    assert all(not any(x.stride()) for each in layers for x in expert_weights(each).values())
    assert pack_expert_layers(model) == 0


@needs_packing
@pytest.mark.parametrize("kind", ["transposed", "without gates"])
@torch.no_grad()
def test_layers_of_other_forms(kind: str) -> None:
    if kind == "transposed":
        config = AriaTextConfig(**SIZES, moe_num_experts=4, moe_topk=2)
        layer, width = drawn(AriaExperts(config), torch.float32), config.hidden_size
    else:
        config = NemotronHConfig(
            hidden_size=64, n_routed_experts=4, moe_intermediate_size=96, num_experts_per_tok=2
        )
        layer, width = drawn(NemotronHExperts(config), torch.float32), config.hidden_size
    config._experts_implementation = "eager"
    rows = torch.randn(11, width)
    chosen, shares = routes(11, 4, torch.float32)
    wanted = layer(rows, chosen, shares)
    assert pack_expert_layers(layer) == 1
    torch.testing.assert_close(layer(rows, chosen, shares), wanted, atol=1e-4, rtol=1e-4)


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_a_token_alone_has_the_bits_that_it_has_among_others(dtype: torch.dtype) -> None:
    model = drawn(AutoModel.from_config(MODELS["qwen3"]()), dtype)
    pack_expert_layers(model)
    layer: Any = next(each for each in model.modules() if expert_weights(each))
    rows = torch.randn(130, 64).to(dtype)
    chosen, shares = routes(130, 8, dtype)
    together = layer(rows, chosen, shares)
    for i in (0, 7, 129):
        alone = layer(rows[i : i + 1], chosen[i : i + 1], shares[i : i + 1])
        assert torch.equal(alone[0], together[i])
    some = layer(rows[5:60], chosen[5:60], shares[5:60])
    assert torch.equal(some, together[5:60])


def fused(model: Any) -> int:
    """Run the passes that a layer of routed experts takes part in; how many are one operator."""
    for each in (pack_expert_layers, pack_layers, fuse_activations):
        each(model)
    return fuse_routed_layers(model)


def result(layer: nn.Module, x: Tensor) -> Tensor:
    """What a layer comes to, whatever else it gives."""
    found = layer(x)
    first: Tensor = found[0] if isinstance(found, tuple) else found
    return first


WHOLE: dict[str, Callable[[], Any]] = {
    **MODELS,
    "shares of all experts": lambda: Qwen3MoeConfig(**QWEN, norm_topk_prob=False),
    "all experts": lambda: Qwen3MoeConfig(**{**QWEN, "num_experts_per_tok": 8}),
    "aria": lambda: AriaTextConfig(
        **{**SIZES, "intermediate_size": 32},
        moe_num_experts=6,
        moe_topk=3,
        moe_num_shared_experts=2,
    ),
}


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WHOLE)
@torch.no_grad()
def test_layers_that_are_one_operator(name: str, dtype: torch.dtype) -> None:
    """What a layer comes to, and a row alone, among others and beside rows that are no numbers."""
    model = drawn(AutoModel.from_config(WHOLE[name]()), dtype)
    own = [each.mlp for each in copy.deepcopy(model).layers]
    assert fused(model) == 2
    for layer, plain in zip((each.mlp for each in model.layers), own, strict=True):
        x = torch.randn(1, 90, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
        found, wanted = result(layer, x), result(plain, x)
        # Where two experts are nearly as good, rounding chooses.
        errors = (found - wanted).abs().amax(-1).float() / float(wanted.abs().max())
        assert (errors < 16 * torch.finfo(dtype).eps).float().mean() > 0.9
        for i in (0, 41, 89):
            assert torch.equal(result(layer, x[:, i : i + 1])[0, 0], found[0, i])
        bad = x.clone()
        bad[0, 7], bad[0, 8] = torch.nan, torch.inf
        others = [i for i in range(90) if i not in (7, 8)]
        assert torch.equal(result(layer, bad)[0, others], found[0, others])
        assert result(layer, bad)[0, 7].isnan().all()
        assert result(layer, x[:, :0]).shape == (1, 0, 64)


@needs_packing
@torch.no_grad()
def test_layers_that_are_not_one_operator() -> None:
    """Layers of other dtypes, that have other parts, or whom somebody listens to."""
    assert fused(drawn(AutoModel.from_config(MODELS["qwen3"]()), torch.float16)) == 0
    config = Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=64)  # which has a gate
    assert fused(drawn(AutoModel.from_config(config), torch.float32)) == 0
    model = drawn(AutoModel.from_config(MODELS["qwen3"]()), torch.float32)
    model.layers[0].mlp.gate.register_forward_hook(lambda *_: None)
    assert fused(model) == 1


def scaled_layer(layer: Any, x: Tensor) -> Tensor:
    found: Tensor = type(layer).plain(layer, x)
    return found * 1.05


def other_router(change: Callable[[Tensor], Tensor], layer: Any, x: Tensor) -> Any:
    logits, shares, chosen = type(layer).plain(layer, x)
    return logits, change(shares), chosen


CHANGES: dict[str, tuple[str, Any]] = {
    "a factor": ("mlp", scaled_layer),
    "shares that are scaled": ("mlp.gate", partial(other_router, lambda x: x * 1.05)),
    "shares that are softer": ("mlp.gate", partial(other_router, lambda x: x.sqrt() / 2)),
}


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_layers_that_compute_something_else(name: str, dtype: torch.dtype) -> None:
    """Each layer is tried, as those of one class may differ."""
    model = drawn(AutoModel.from_config(WHOLE["qwen3"]()), dtype)
    path, change = CHANGES[name]
    module = model.layers[1].get_submodule(path)
    kind: Any = type(module)
    # A method, as a function that is partly applied is none.
    methods = {"plain": kind.forward, "forward": lambda self, x: change(self, x)}
    module.__class__ = type(kind.__name__, (kind,), methods)
    assert fused(model) == 1
    assert hasattr(model.layers[0].mlp, "routed") and not hasattr(model.layers[1].mlp, "routed")


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_layers_of_one_model_that_differ(dtype: torch.dtype) -> None:
    model = drawn(AutoModel.from_config(WHOLE["qwen3"]()), dtype)
    model.layers[1].mlp.gate.norm_topk_prob = False
    model.layers[0].mlp.gate.norm_topk_prob = True
    assert fused(model) == 2
    assert [each.mlp.routed.is_normalized for each in model.layers] == [True, False]
    other = drawn(AutoModel.from_config(WHOLE["qwen3"]()), dtype)
    other.layers[1].mlp.gate.register_buffer("correction", torch.zeros(8))
    assert fused(other) == 1


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_router_of_other_layers(dtype: torch.dtype) -> None:
    """Its logits are the same bits in any company; PyTorch's are not."""
    config = Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=64)
    model = drawn(AutoModel.from_config(config), dtype)
    own = copy.deepcopy(model.layers[0].mlp.gate)
    assert fused(model) == 0
    router = model.layers[0].mlp.gate
    x = torch.randn(70, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    found, wanted = router(x), own(x)
    bound = 8 * torch.finfo(dtype).eps
    for mine, theirs in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(mine, theirs, atol=bound, rtol=bound)
    for i in (0, 69):
        assert all(
            torch.equal(a[0], b[i]) for a, b in zip(router(x[i : i + 1]), found, strict=True)
        )


@needs_packing
def test_operators_refuse_what_is_no_layer() -> None:
    model = drawn(AutoModel.from_config(MODELS["qwen3"]()), torch.float32)
    fused(model)
    plan = model.layers[0].mlp.routed
    x = torch.randn(3, 64)
    run_experts(plan, x)
    for wrong, message in (
        (replace(plan, num_chosen=0), "some of the experts"),
        (replace(plan, num_chosen=9), "some of the experts"),
        (replace(plan, router=replace_outputs(plan)), "outputs|panels|weight"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run_experts(wrong, x)
    with pytest.raises(RuntimeError):
        run_experts(plan, x.half())
    with pytest.raises(RuntimeError):
        run_experts(plan, x[:, :48].contiguous())
    with pytest.raises(RuntimeError, match="lists must be of one routed layer"):
        torch.ops.aioengine_cpu.routed_feed(x, [x] * 15, [1] * 8, [0.0] * 2)


def replace_outputs(plan: Any) -> Any:
    """The router of a layer that has more experts than there are."""
    other = copy.copy(plan.router)
    other.operands = NativeLinear(torch.randn(100, 64)).operands
    return other


@needs_packing
@torch.no_grad()
def test_other_dtypes_are_computed_one_expert_after_the_other() -> None:
    model = drawn(AutoModel.from_config(MODELS["mixtral"]()), torch.float64)
    model.set_experts_implementation("grouped_mm")
    assert pack_expert_layers(model) == 0
    assert model(torch.arange(9)[None]).last_hidden_state.isfinite().all()


@needs_packing
@torch.no_grad()
def test_a_single_expert_that_is_transposed() -> None:
    config = GptOssConfig(**SIZES, num_local_experts=1, num_experts_per_tok=1)
    assert pack_expert_layers(drawn(AutoModel.from_config(config), torch.float32)) == 2


@needs_packing
@torch.no_grad()
def test_what_is_left_alone() -> None:
    """Experts that fill no panel, and layers that somebody listens to."""
    config = Qwen3MoeConfig(**{**QWEN, "moe_intermediate_size": 24})
    assert pack_expert_layers(drawn(AutoModel.from_config(config), torch.float32)) == 0
    model = drawn(AutoModel.from_config(MODELS["qwen3"]()), torch.float32)
    layer = next(each for each in model.modules() if expert_weights(each))
    layer.register_forward_hook(lambda *_: None)
    assert pack_expert_layers(model) == 1
    assert pack_expert_layers(drawn(AutoModel.from_config(MODELS["qwen3"]()), torch.float64)) == 0


@needs_packing
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@torch.no_grad()
def test_rounded(bits: int, keep: bool) -> None:
    model = drawn(GptOssForCausalLM(MODELS["gpt-oss"]()), torch.float32)
    whole = drawn(GptOssForCausalLM(MODELS["gpt-oss"]()), torch.float32)
    rounding = Rounding(bits=bits, has_full_inputs=True)
    round_weights(model, model.model, [], [], rounding, keep=keep)
    for mine, theirs in zip(model.modules(), whole.modules(), strict=True):
        for name, weight in expert_weights(theirs).items():
            known = known_groups(mine)[name]
            assert known.bits == bits
            rounded = torch.cat([round_weight(each, bits).floats() for each in weight])
            assert torch.equal(known.floats(), rounded)
            getattr(theirs, name).copy_(rounded.view(weight.shape).mT)
            if keep:
                assert torch.equal(getattr(mine, name), getattr(theirs, name))
    assert len(unpacked_names(model)) == (0 if keep else 2)
    assert pack_expert_layers(model) == 2 and unpacked_names(model) == []
    ids = torch.randint(96, (1, 20), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(ids).logits, whole(ids).logits, atol=2e-4, rtol=1e-4)


@needs_packing
@pytest.mark.parametrize("sizes", [{"hidden_size": 72}, {"intermediate_size": 72}], ids=str)
@torch.no_grad()
def test_a_layer_is_rounded_whole_or_not_at_all(sizes: dict[str, int]) -> None:
    """Of one of its two matmuls the outputs fill panels: the other's cannot be packed."""
    config = GptOssConfig(**{**SIZES, **sizes}, num_local_experts=4, num_experts_per_tok=2)
    model = drawn(GptOssForCausalLM(config), torch.float32)
    round_weights(model, model.model, [], [], Rounding(bits=8), keep=False)
    assert not any(known_groups(each) for each in model.modules() if expert_weights(each))
    assert unpacked_names(model) == []


def stored(model: Any) -> dict[str, Tensor]:
    """Weights of a checkpoint whose experts are e4m3; the model has what they stand for then."""
    weights = model.state_dict()
    parts: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if ".experts." not in name:
            parts[name] = weight.contiguous()
            continue
        stem = name.rpartition(".")[0]
        for i, expert in enumerate(weight):
            names = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            for own, matrix in zip(names, expert.chunk(len(names)), strict=True):
                codes, scales, meant = pack_floats(matrix, (32, 32))
                matrix.copy_(meant)
                parts[f"{stem}.{i}.{own}.weight"] = codes.contiguous()
                parts[f"{stem}.{i}.{own}.weight_scale_inv"] = scales
    return parts


@needs_packing
@torch.no_grad()
def test_experts_that_are_stored_one_by_one(tmp_path: Path) -> None:
    """Matrices of a checkpoint that transformers joins to one parameter."""
    meant = drawn(Qwen3MoeForCausalLM(MODELS["qwen3"]()), torch.float32)
    save_file(stored(meant), tmp_path / "model.safetensors", {"format": "pt"})
    config = Qwen3MoeConfig(
        **QWEN, quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32]}
    )
    model = load_pretrained(
        Qwen3MoeForCausalLM, tmp_path, hf_config=config, dtype=torch.float32, device="cpu"
    )
    layers = [each for each in model.modules() if expert_weights(each)]
    assert [sorted(known_groups(each)) for each in layers] == [["down_proj", "gate_up_proj"]] * 2
    assert known_groups(layers[0])["gate_up_proj"].numbers.dtype is torch.float8_e4m3fn
    assert pack_expert_layers(model) == 2
    ids = torch.randint(96, (1, 20), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(ids).logits, meant(ids).logits, atol=2e-4, rtol=1e-4)


@needs_packing
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
async def test_an_engine(quantization: str | None, tmp_path: Path) -> None:
    """The same tokens alone and together, tried at load and not."""

    def save() -> None:
        config = MODELS["gpt-oss"]()
        config.update({"vocab_size": 128, "eos_token_id": 2, "pad_token_id": 0})
        drawn(GptOssForCausalLM(config), torch.float32).save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)

    await asyncio.to_thread(save)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    prompts = [[5 + i * 7 % 80 for i in range(n)] for n in (3, 9, 40)]
    answers = []
    for is_tried in (True, False):
        async with AsyncEngine.from_pretrained(
            tmp_path, dtype="float32", device="cpu", quantization=quantization,
            check_model=is_tried, max_model_len=128, kv_cache_bytes=4 << 20,
        ) as engine:  # fmt: skip
            layers = [
                type(each).__name__
                for each in engine._core.loaded.runner.model.model.modules()
                if hasattr(each, "aioengine_experts")
            ]
            assert layers == ["GptOssExperts"] * 2
            alone = [await engine.generate(each, params) for each in prompts]
            await engine.reset_caches()
            together = await asyncio.gather(*(engine.generate(each, params) for each in prompts))
            assert [x.outputs[0].logprobs for x in alone] == [
                x.outputs[0].logprobs for x in together
            ]
            answers.append([list(each.token_ids) for each in together])
    assert answers[0] == answers[1]


def test_a_module_that_has_other_weights() -> None:
    layer = nn.Linear(8, 8)
    attach(layer, round_weight(layer.weight, 8))
    assert expert_weights(layer) == {} and list(known_groups(layer)) == ["weight"]
