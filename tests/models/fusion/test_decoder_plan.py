"""Decoders run from plans: those that qualify do, to the same bits; others are left alone."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModel,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen2VLTextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLTextConfig,
)
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from aioengine.kernels.attention import AttentionBackend
from aioengine.kernels.cpu import library
from aioengine.kernels.cpu.backend import CpuBackend
from aioengine.kernels.cpu.linear import native_way
from aioengine.kernels.layer_slot import LayerSlot, StepContext, StepHolder, attach_slot
from aioengine.kernels.metadata import build_metadata
from aioengine.kernels.torch_operators import TorchOperators
from aioengine.models.fusion.decoder_plan import plan_decoder, run_decoder_plan
from aioengine.models.fusion.fused_mlp import fuse_activations
from aioengine.models.fusion.fused_norm import fuse_norms
from aioengine.models.fusion.packed_linear import pack_layers
from aioengine.models.fusion.rotary import fuse_rotary
from aioengine.models.fusion.routed_experts import fuse_routed_layers, pack_expert_layers
from aioengine.models.fusion.trial import StandIn
from aioengine.models.runtime.attention import route_attention

pytestmark = pytest.mark.skipif(
    not library.is_available() or library.instruction_set() == "generic",
    reason="the matmuls are PyTorch's here",
)
LAYERS, HIDDEN = 3, 64
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 50,
    "pad_token_id": 0,
}
HALF = {**SIZES, "head_dim": 16}
WINDOWS = {
    "sliding_window": 2,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
SCALED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "biases": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "window": lambda: MistralConfig(**SIZES, sliding_window=2),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "norms of heads": lambda: Qwen3Config(**SIZES),
    "norms plus 1": lambda: GemmaConfig(**SIZES),
    "four norms, two groups": lambda: Gemma2Config(**SIZES, **WINDOWS),
    "two kinds of angles": lambda: Gemma3TextConfig(**SIZES, **WINDOWS),
    "three axes": lambda: Qwen2VLTextConfig(**HALF, rope_parameters=AXES),
    "rows": lambda: Qwen3VLTextConfig(**HALF, rope_parameters={**AXES, "mrope_interleaved": True}),
    "experts": lambda: Qwen3MoeConfig(  # which fill no panels
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "routed experts": lambda: Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}
IN_ONE_CALL = [name for name in CONFIGS if name != "experts"]


def routed(config: Any, dtype: torch.dtype) -> nn.Module:
    """A decoder over pages: a group for each kind of layer. The same weights for a config."""
    torch.manual_seed(0)
    kinds = {Qwen2VLTextConfig: Qwen2VLTextModel, Qwen3VLTextConfig: Qwen3VLTextModel}
    make: Any = kinds.get(type(config), AutoModel.from_config)
    model: nn.Module = make(config).to(dtype).requires_grad_(False).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.1, 0.2)
    route_attention(model)
    holder = StepHolder()
    types = getattr(config, "layer_types", None) or ["full_attention"] * LAYERS
    for index, layer in enumerate(model.get_submodule("layers")):  # type: ignore[arg-type]
        group = sorted(set(types)).index(types[index])
        slot = LayerSlot(index, group, holder, is_last=index == LAYERS - 1)
        attach_slot(layer.self_attn, slot)
    model.holder = holder  # type: ignore[assignment] - for the test alone
    return model


def fused(config: Any, dtype: torch.dtype) -> nn.Module:
    """A decoder whose operators are ours."""
    model = routed(config, dtype)
    pack_expert_layers(model)
    pack_layers(model, native_way)
    fuse_activations(model)
    fuse_routed_layers(model)
    fuse_norms(model)
    fuse_rotary(model)
    return model


def planned(name: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A decoder with its plan, and the same without."""
    model = fused(CONFIGS[name](), dtype)
    before = copy.deepcopy(model)
    assert plan_decoder(model) == LAYERS
    return model, before


@dataclass
class Steps:
    """Two steps of two sequences: prompts of 3 and 5 tokens, then one token and a chunk of 4.

    `bounds`: other ones, of the first sequences and each step's [starts, ends).
    """

    model: nn.Module
    dtype: torch.dtype
    backend: AttentionBackend = field(default_factory=CpuBackend)
    wanted: Tensor | None = None
    num_rows: int = 0
    device: str = "cpu"
    bounds: Sequence[Sequence[tuple[int, ...]]] = (((0, 0), (3, 5)), ((3, 5), (4, 9)))

    def run(self, compute: Callable[[Tensor, Tensor, list[Tensor]], Tensor | None]) -> Tensor:
        """`compute`: embeddings, positions and rows -> hidden states [T, 64] of all."""
        generator = torch.Generator().manual_seed(1)
        head_dim = self.model.config.head_dim  # type: ignore[union-attr]
        size = (LAYERS, 2, 6, 4, 2, head_dim)
        caches = torch.zeros(size, dtype=self.dtype, device=self.device)
        found = []
        for starts, ends in self.bounds:
            pairs = [*zip(starts, ends, strict=True)]
            count = sum(end - start for start, end in pairs)
            drawn = torch.randn(1 + self.num_rows, count, HIDDEN, generator=generator)
            # Parts of one wide row each, as an encoder gives them.
            wide = drawn.to(self.device, self.dtype).transpose(0, 1).flatten(1)
            embeds, *rows = wide.split(HIDDEN, dim=1)
            positions = torch.cat([torch.arange(*pair) for pair in pairs])
            if isinstance(self.model, Qwen2VLTextModel | Qwen3VLTextModel):
                positions = torch.stack([positions, positions + 2, positions.flip(0)])
            tables = {"block_size": 4, "block_tables": [[3], [0, 2, 5]][: len(starts)]}
            tables["device"] = self.device
            metas = [build_metadata(**tables, starts=starts, ends=ends) for _ in range(2)]
            pages = [(keys, values) for keys, values in caches]
            step = StepContext(metas, pages, self.backend, wanted=self.wanted)
            holder: Any = self.model.holder
            with torch.inference_mode(), holder.hold(step):
                hidden = compute(embeds, positions.to(self.device), rows)
            assert hidden is not None
            found.append(hidden)
        return torch.cat(found)

    def plan(self) -> Tensor:
        """From the decoder's plan."""
        return self.run(lambda *given: run_decoder_plan(self.model, *given))

    def modules(self) -> Tensor:
        """By the decoder's own forward."""

        def compute(embeds: Tensor, positions: Tensor, rows: list[Tensor]) -> Tensor:
            others: dict[str, Any] = {}
            if rows:
                everywhere = torch.ones(1, len(embeds), dtype=torch.bool, device=self.device)
                others = {"visual_pos_masks": everywhere, "deepstack_visual_embeds": rows}
            ids = positions[None] if positions.dim() == 1 else positions[:, None]
            output = self.model(
                inputs_embeds=embeds[None], position_ids=ids, use_cache=False, **others
            )
            hidden: Tensor = output.last_hidden_state[0]
            return hidden

        return self.run(compute)


class OwnBackend(CpuBackend):
    """Somebody's, which wants to see every layer's attention."""

    num_calls = 0

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        self.num_calls += 1
        return super().attend(*args, **kwargs)


class Calls(TorchDispatchMode):
    """Count calls of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aioengine_cpu" and func._opname != "instruction_set":
            self.count[func._opname] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """From the plan at once, layer by layer, and within the decoder's own forward."""
    model, before = planned(name, dtype)
    wanted = Steps(before, dtype).modules()
    assert wanted.isfinite().all() and wanted.std() > 0.1
    assert torch.equal(Steps(model, dtype).plan(), wanted)
    assert torch.equal(Steps(model, dtype).modules(), wanted)
    backend = OwnBackend()
    assert torch.equal(Steps(model, dtype, backend).plan(), wanted)
    assert backend.num_calls == 2 * LAYERS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "routed experts"])
def test_operators_in_pytorch_compute_the_same(name: str, dtype: torch.dtype) -> None:
    model, _ = planned(name, dtype)
    wanted = Steps(model, dtype).plan()
    decoder: Any = model._aioengine_decoder
    operators = TorchOperators(decoder.plan.layers, decoder.plan.norm)
    model._aioengine_decoder = replace(decoder, operators=operators)  # type: ignore[assignment]
    found = Steps(model, dtype).plan()
    if name == "experts" and dtype is not torch.float32:
        return  # where rounding chooses another expert, there is nothing to compare
    error = (found - wanted).float().norm() / wanted.float().norm()
    # CPUs that multiply bfloat16 add up in another order, which these wide weights make much of.
    assert float(error) <= {torch.float32: 5e-5, torch.float16: 2e-2, torch.bfloat16: 0.25}[dtype]
    assert found.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", IN_ONE_CALL)
def test_a_step_is_one_call(name: str, dtype: torch.dtype) -> None:
    model, _ = planned(name, dtype)
    num_rows = 2 if name == "rows" else 0
    for wanted in (None, torch.tensor([1])):
        with Calls() as calls:
            Steps(model, dtype, wanted=wanted, num_rows=num_rows).plan()
        assert calls.count == {"run_plan": 2}  # one for each of the steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_is_called_between_two_calls(dtype: torch.dtype) -> None:
    model, _ = planned("experts", dtype)
    with Calls() as calls:
        Steps(model, dtype).plan()
    assert calls.count["run_plan"] == 2 * LAYERS and calls.count["project"] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [[2, 3], [1], []])
@pytest.mark.parametrize("name", ["llama", "two kinds of angles", "rows"])
def test_rows_that_are_read(name: str, rows: list[int], dtype: torch.dtype) -> None:
    """They keep their bits; the others are not computed to the end."""
    model, before = planned(name, dtype)
    places = torch.tensor(rows, dtype=torch.long)
    num_rows = 3 if name == "rows" else 0  # the last of them behind the last layer
    whole = Steps(before, dtype, num_rows=num_rows).modules()
    is_read = [*rows, *(8 + row for row in rows)]
    backend = OwnBackend()
    parts = [
        Steps(model, dtype, wanted=places, num_rows=num_rows).plan(),
        Steps(model, dtype, backend, wanted=places, num_rows=num_rows).plan(),
    ]
    if not num_rows:  # the decoder itself adds rows to all
        parts.append(Steps(model, dtype, wanted=places).modules())
    for part in parts:
        is_equal = (whole == part).all(dim=-1)
        assert is_equal.nonzero()[:, 0].tolist() == is_read


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_added_behind_the_first_layers(dtype: torch.dtype) -> None:
    model, before = planned("rows", dtype)
    wanted = Steps(before, dtype, num_rows=2).modules()
    assert not torch.equal(wanted, Steps(before, dtype).modules())
    assert torch.equal(Steps(model, dtype, num_rows=2).plan(), wanted)
    assert torch.equal(Steps(model, dtype, OwnBackend(), num_rows=2).plan(), wanted)
    one_by_one = {"num_rows": 2, "bounds": (((0,), (1,)), ((1,), (2,)))}
    wanted = Steps(before, dtype, **one_by_one).modules()
    assert torch.equal(Steps(model, dtype, **one_by_one).plan(), wanted)


def test_what_a_decoder_does_not_take_is_not_planned() -> None:
    model, _ = planned("llama", torch.float32)
    embeds, ids = torch.ones(3, HIDDEN), torch.arange(3)
    assert run_decoder_plan(model, embeds, ids.expand(3, 3)) is None
    assert run_decoder_plan(model, embeds, ids, [embeds]) is None


@pytest.mark.parametrize(
    "config",
    [
        GraniteConfig(**SIZES, residual_multiplier=0.5),
        CohereConfig(**{key: value for key, value in SIZES.items() if key != "head_dim"}),
        Ministral3Config(**SIZES, rope_parameters=SCALED),
        Olmo2Config(**{key: value for key, value in SIZES.items() if key != "head_dim"}),
    ],
    ids=["residuals are scaled", "parallel", "scaled by position", "norms over all heads"],
)
def test_others_are_left_alone(config: Any) -> None:
    model = fused(config, torch.float32)
    kinds = [type(layer) for layer in model.get_submodule("layers")]  # type: ignore[arg-type]
    assert plan_decoder(model) == 0
    assert [type(layer) for layer in model.get_submodule("layers")] == kinds  # type: ignore[arg-type]
    assert run_decoder_plan(model, torch.ones(3, HIDDEN), torch.arange(3)) is None


def test_a_decoder_that_does_more_is_called() -> None:
    """Its layers are usual ones, but embeddings are scaled before them."""
    config = GraniteConfig(**SIZES, residual_multiplier=1.0, embedding_multiplier=2.0)
    model = fused(config, torch.float32)
    before = copy.deepcopy(model)
    assert plan_decoder(model) == LAYERS
    assert run_decoder_plan(model, torch.ones(3, HIDDEN), torch.arange(3)) is None
    found = Steps(model, torch.float32).modules()
    assert torch.equal(found, Steps(before, torch.float32).modules())


def test_layers_that_are_told_more_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder may hand its layers something that only its own know."""

    def forward(
        self: nn.Module, hidden_states: Tensor, share: float = 1.0, **others: Any
    ) -> Tensor:
        own: Tensor = LlamaDecoderLayer.forward(self, hidden_states, **others)
        return own * share

    kind = type("Layer", (LlamaDecoderLayer,), {"forward": forward})
    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", kind)
    model = fused(LlamaConfig(**SIZES), torch.float32)
    before = copy.deepcopy(model)
    run = type(model).forward
    share = {"share": 0.5}
    for each in (model, before):
        monkeypatch.setattr(each, "forward", partial(run, each, **share), raising=False)
    assert plan_decoder(model) == LAYERS
    assert run_decoder_plan(model, torch.ones(3, HIDDEN), torch.arange(3)) is None
    found = Steps(model, torch.float32).modules()
    assert torch.equal(found, Steps(before, torch.float32).modules())


@pytest.mark.parametrize("name", ["", "norm", "rotary_emb", "layers.1"])
def test_hooks_around_layers_are_called(name: str) -> None:
    model = fused(LlamaConfig(**SIZES), torch.float32)
    called: list[nn.Module] = []
    hook = model.get_submodule(name).register_forward_hook(lambda each, *_: called.append(each))
    plan_decoder(model)
    assert run_decoder_plan(model, torch.ones(3, HIDDEN), torch.arange(3)) is None
    Steps(model, torch.float32).modules()
    assert model.get_submodule(name) in called
    hook.remove()


def test_hooks_are_called() -> None:
    """A layer is left alone where somebody listens to one of its modules."""
    model = fused(LlamaConfig(**SIZES), torch.float32)
    layer = model.get_submodule("layers")[1]  # type: ignore[index]
    layer.self_attn.o_proj.register_forward_hook(lambda *_: None)
    assert plan_decoder(model) == LAYERS - 1


def outputs_of_a_layer(models: Sequence[nn.Module], x: Tensor, slot: Any) -> list[Tensor]:
    turns = torch.rand(*x.shape[:2], 16).repeat(1, 1, 2)
    angles = turns.cos().to(x.dtype), turns.sin().to(x.dtype)
    outputs = []
    for each in models:
        layer = each.get_submodule("layers")[0]  # type: ignore[index]
        attach_slot(layer.self_attn, slot)  # type: ignore[arg-type]
        with torch.inference_mode():
            outputs.append(layer(x, position_embeddings=angles, attention_mask=None))
    return outputs


def test_what_it_does_not_know_goes_the_old_way() -> None:
    """Two rows of a batch, without a slot: plain attention."""
    models = planned("llama", torch.float32)
    assert torch.equal(*outputs_of_a_layer(models, torch.randn(2, 4, HIDDEN), None))


def test_rows_that_do_not_lie_close_together_go_the_old_way() -> None:
    models = planned("llama", torch.bfloat16)
    x = torch.randn(1, HIDDEN, 4).to(torch.bfloat16).mT
    assert torch.equal(*outputs_of_a_layer(models, x, StandIn()))
