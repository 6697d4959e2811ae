"""Layer specs from the meta device."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from torch import nn
from transformers import (
    CLIPVisionConfig,
    FalconConfig,
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
    LlavaConfig,
)

from aioengine import AsyncEngine
from aioengine.errors import ModelLoadError
from aioengine.models.per_layer import PerLayerText
from aioengine.models.runtime import registry, transformers_model
from aioengine.models.runtime.probe import LayerSpec, group_layers
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.models.state import probe as state_probe
from aioengine.models.text import TextModel
from aioengine.types import KVGroup
from tests.support.tiny import llava_config, tiny_tokenizer


def full_size_llava() -> LlavaConfig:
    """The shapes of LLaVA 1.5 7B."""
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
            image_size=336,
            patch_size=14,
        ),
        text_config=LlamaConfig(vocab_size=32064, max_position_embeddings=4096),
    )
    config.architectures = ["LlavaForConditionalGeneration"]
    return config


def test_a_full_size_model_is_probed_at_once() -> None:
    config = full_size_llava()
    TransformersModel.probe(llava_config())
    start = time.process_time()
    specs = TransformersModel.probe(config)
    assert time.process_time() - start < 2
    assert len(specs) == 32
    assert specs[0].name == "layers.0.self_attn"
    assert {(s.num_heads, s.num_kv_heads, s.key_dim, s.value_dim) for s in specs} == {
        (32, 32, 128, 128)
    }
    assert specs[0].scale == pytest.approx(128**-0.5)
    groups, places = group_layers(specs)
    assert groups == (KVGroup("self", 32, 128, 128, None, 32),)
    assert places == tuple((0, i) for i in range(32))


def test_windows_and_sinks_are_seen_and_make_groups() -> None:
    config = GptOssConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=16,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    config.architectures = ["GptOssForCausalLM"]
    specs = TransformersModel.probe(config)
    assert all(spec.sinks for spec in specs)
    assert [spec.window for spec in specs] == [16, None, 16, None]
    groups, places = group_layers(specs)
    assert groups == (KVGroup("self", 2, 8, 8, 16, 2), KVGroup("self", 2, 8, 8, None, 2))
    assert places == ((0, 0), (1, 0), (0, 1), (1, 1))


def test_a_decoder_that_does_not_route_is_refused_by_name() -> None:
    config = FalconConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    config.architectures = ["FalconForCausalLM"]
    with pytest.raises(ModelLoadError, match="Falcon"):
        TransformersModel.probe(config)


TINY: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KEPT: dict[str, tuple[Callable[[], Any], str, list[tuple[str, int, tuple[int, ...]]]]] = {
    "FalconH1ForCausalLM": (
        lambda: hf.FalconH1Config(
            **TINY, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1
        ),
        "layers.0.mamba",
        [("conv", 0, (576, 4)), ("recurrent", 0, (4, 16, 256))],
    ),
    "ZayaForCausalLM": (
        lambda: hf.ZayaConfig(**TINY),
        "layers.0.self_attn.qkv_proj",
        [("conv", 0, (96, 2)), ("recurrent", 0, (16,))],
    ),
    "Lfm2ForCausalLM": (
        lambda: hf.Lfm2Config(**TINY, layer_types=["conv", "full_attention"] * 2),
        "layers.0.conv",
        [("conv", 0, (64, 3))],
    ),
    "Qwen3_5ForCausalLM": (
        lambda: hf.Qwen3_5TextConfig(
            **TINY, layer_types=["linear_attention", "full_attention"] * 2
        ),
        "layers.0.linear_attn",
        [("conv", 0, (8192, 4)), ("recurrent", 0, (32, 128, 128))],
    ),
    "JambaForCausalLM": (
        lambda: hf.JambaConfig(**TINY, attn_layer_period=2, attn_layer_offset=1),
        "layers.0.mamba",
        [("conv", 0, (128, 4)), ("recurrent", 0, (128, 16))],
    ),
}
STATEFUL: dict[str, tuple[Callable[[], Any], str]] = {
    "MambaForCausalLM": (lambda: hf.MambaConfig(**TINY), r"layers\.0\.mixer"),
    "Mamba2ForCausalLM": (
        lambda: hf.Mamba2Config(**{**TINY, "head_dim": 32}, num_heads=4, n_groups=1),
        r"layers\.0\.mixer",
    ),
    "RwkvForCausalLM": (
        lambda: hf.RwkvConfig(vocab_size=128, hidden_size=64),
        "not in layers that take a cache",
    ),
}


@pytest.mark.parametrize("architecture", KEPT)
def test_what_a_layer_keeps_is_found(architecture: str) -> None:
    """Recurrent states stay in float32 where the model's code has them so."""
    make, name, parts = KEPT[architecture]
    config = make()
    config.architectures = [architecture]
    specs = TextModel.probe(config)
    found = {each.name: each.parts for each in specs.states}  # type: ignore[attr-defined]
    assert [(*part.name, part.shape) for part in found[name]] == parts
    dtypes = {part.name[0]: part.dtype for part in found[name]}
    assert dtypes["conv"] is None
    if architecture in ("FalconH1ForCausalLM", "Qwen3_5ForCausalLM"):
        assert dtypes["recurrent"] == torch.float32


@pytest.mark.parametrize("architecture", STATEFUL)
def test_state_without_attention_is_refused_by_name(architecture: str) -> None:
    make, where = STATEFUL[architecture]
    config = make()
    config.architectures = [architecture]
    with pytest.raises(ModelLoadError, match=f"keeps a state .*{where}"):
        TextModel.probe(config)


def test_of_layers_that_are_alike_one_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that keep a state run in loops: a refusal would take seconds at a usual size."""
    asked: list[str] = []
    right = state_probe._parts_of

    def counted(decoder: nn.Module, name: str, width: int) -> Any:
        asked.append(name)
        return right(decoder, name, width)

    monkeypatch.setattr(state_probe, "_parts_of", counted)
    config = hf.MambaConfig(**{**TINY, "num_hidden_layers": 24})
    config.architectures = ["MambaForCausalLM"]
    with pytest.raises(ModelLoadError, match="keeps a state"):
        TextModel.probe(config)
    assert asked == ["layers.0.mixer"]
    asked.clear()
    hybrid = hf.Lfm2Config(**TINY, layer_types=["conv", "full_attention"] * 2)
    hybrid.architectures = ["Lfm2ForCausalLM"]
    found: Any = TextModel.probe(hybrid)
    assert [each.name for each in found.states] == ["layers.0.conv", "layers.2.conv"]
    assert asked == ["layers.0.conv"]


class Odd(nn.Module):
    """A mixer that asks its cache for more."""

    def forward(
        self, hidden_states: torch.Tensor, past_key_values: Any = None, **_: Any
    ) -> torch.Tensor:
        if past_key_values is not None:
            past_key_values.update_indexer(hidden_states)
        return hidden_states


def test_a_state_of_another_kind_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf.models.lfm2.modeling_lfm2.Lfm2ShortConv, "forward", Odd.forward)
    config = hf.Lfm2Config(**TINY, layer_types=["conv", "full_attention"] * 2)
    config.architectures = ["Lfm2ForCausalLM"]
    with pytest.raises(ModelLoadError, match=r"layers\.0\.conv \(Lfm2ShortConv\).*update_indexer"):
        TextModel.probe(config)


async def test_state_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_CLASSES", {"Mamba2ForCausalLM": TextModel})
    monkeypatch.setattr(transformers_model, "load_pretrained", None)
    config = STATEFUL["Mamba2ForCausalLM"][0]()
    config.architectures = ["Mamba2ForCausalLM"]
    config.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    save_file({"any": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"Mamba2Model keeps a state"):
        async with AsyncEngine.from_pretrained(tmp_path, device="cpu"):
            pass


class OwnAttention(nn.Module):
    """A layer's attention that never asks for ours."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None


class OneLayerOfItsOwn(TransformersModel):
    def decoder(self) -> nn.Module:
        decoder: Any = super().decoder()
        decoder.layers[1].self_attn = OwnAttention()
        return decoder  # type: ignore[no-any-return]


def test_one_layer_that_does_not_route_is_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match=r"layers\.1"):
        OneLayerOfItsOwn.probe(llava_config())


def test_a_bias_of_a_layer_s_own_is_refused_by_name() -> None:
    """It follows from queries, and no number is needed to see that a flat batch would lose it."""
    config = hf.InklingTextConfig(**TINY)
    config.architectures = ["InklingForCausalLM"]
    with pytest.raises(ModelLoadError, match=r"self_attn \(InklingAttention\).* position_bias"):
        TransformersModel.probe(config)


def test_an_unknown_class_is_refused() -> None:
    config = llava_config()
    config.architectures = ["NoSuchModel"]
    with pytest.raises(ModelLoadError, match="NoSuchModel"):
        TransformersModel.probe(config)


def test_the_config_is_left_alone() -> None:
    config = llava_config()
    before = config.to_json_string()
    TransformersModel.probe(config)
    assert config.to_json_string() == before
    assert config.text_config._attn_implementation != "aioengine_paged"


def spec(name: str, window: int | None, key_dim: int = 8, shares: str | None = None) -> LayerSpec:
    return LayerSpec(name, "self", 4, 2, key_dim, 8, 1.0, window, None, False, shares)


def test_layers_of_one_shape_share_a_group() -> None:
    groups, places = group_layers([spec("a", None), spec("b", 4), spec("c", None), spec("d", 4, 6)])
    assert [group.num_layers for group in groups] == [2, 1, 1]
    assert places == ((0, 0), (1, 0), (0, 1), (2, 0))


def test_a_layer_that_shares_has_the_place_of_the_one_that_stores() -> None:
    specs = [spec("a", 4), spec("b", 4), spec("c", None), spec("d", 4, shares="b"), spec("e", None)]
    groups, places = group_layers(specs)
    assert [group.num_layers for group in groups] == [2, 2]
    assert places == ((0, 0), (0, 1), (1, 0), (0, 1), (1, 1))


def gemma4_config(**changes: Any) -> Gemma4TextConfig:
    """Two layers that read the keys of the last of their kind before them."""
    kinds = ["sliding", "sliding", "full", "full", "sliding", "full"]
    config = Gemma4TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=len(kinds),
        layer_types=[f"{kind}_attention" for kind in kinds],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        sliding_window=16,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        **changes,
    )
    config.architectures = ["Gemma4ForCausalLM"]
    return config


def test_whose_keys_a_layer_reads_is_seen() -> None:
    specs = PerLayerText.probe(gemma4_config(num_kv_shared_layers=2))
    owners = [spec.shares for spec in specs]
    assert owners == [None] * 4 + ["layers.1.self_attn", "layers.3.self_attn"]
    assert [s.key_dim for s in specs] == [8, 8, 16, 16, 8, 16]
    groups, places = group_layers(specs)
    assert groups == (KVGroup("self", 2, 8, 8, 16, 2), KVGroup("self", 2, 16, 16, None, 2))
    assert places == ((0, 0), (0, 1), (1, 0), (1, 1), (0, 1), (1, 1))


def test_keys_that_are_equal_and_not_the_same_are_not_shared() -> None:
    specs = PerLayerText.probe(gemma4_config())
    assert [spec.shares for spec in specs] == [None] * 6


class ShortSighted(PerLayerText):
    """One of the layers that share sees less than the one that stores."""

    def decoder(self) -> nn.Module:
        decoder: Any = super().decoder()
        decoder.layers[5].self_attn.sliding_window = 4
        return decoder  # type: ignore[no-any-return]


def test_keys_are_not_shared_where_they_are_not_kept_as_long() -> None:
    """Pages belong to a window's group, which may let go of what no layer of it can see."""
    specs = ShortSighted.probe(gemma4_config(num_kv_shared_layers=2))
    assert [spec.shares for spec in specs[4:]] == ["layers.1.self_attn", None]
    groups, _ = group_layers(specs)
    assert [group.num_layers for group in groups] == [2, 2, 1]
