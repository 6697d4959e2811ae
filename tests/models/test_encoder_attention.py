"""Encoders that ask for our attention, and when it hands on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, CLIPVisionConfig, CLIPVisionModel

from aioengine.kernels.cpu import library
from aioengine.models.fusion import encoder_attention
from aioengine.models.fusion.encoder_attention import FULL_ATTENTION_NAME, route_encoders
from tests.support.tiny import tiny_llama, tiny_llava

ask = AttentionInterface()[FULL_ATTENTION_NAME]


def encoder() -> CLIPVisionModel:
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=56,
        patch_size=7,
    )
    return CLIPVisionModel(config).to(torch.bfloat16).eval()


@torch.inference_mode()
def test_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encoder()
    plain = copy.deepcopy(model)
    assert route_encoders(model) == 2
    calls = 0
    original = encoder_attention.attend_to_all

    def count(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args)

    monkeypatch.setattr(encoder_attention, "attend_to_all", count)
    pixels = torch.randn(3, 3, 56, 56, dtype=torch.bfloat16)
    found, wanted = (each(pixel_values=pixels).last_hidden_state for each in (model, plain))
    torch.testing.assert_close(found, wanted, atol=0.1, rtol=0)
    instruction_set = library.instruction_set() if library.is_available() else "none"
    assert calls == (2 if instruction_set in ("avx512_bf16", "amx_bf16") else 0)
    assert torch.equal(model(pixel_values=pixels[1:2]).last_hidden_state, found[1:2])


def test_who_asks_for_it() -> None:
    model = tiny_llava(torch.float32)
    config = model.model.vision_tower.config
    assert route_encoders(model) > 0
    modules = dict(model.named_modules())
    asking = {name for name in modules if _implementation(modules[name]) == FULL_ATTENTION_NAME}
    assert asking and all("vision_tower" in name and name.endswith("self_attn") for name in asking)
    assert config._attn_implementation == "sdpa", "who makes masks asks as before"
    assert route_encoders(tiny_llama(torch.float32)) == 0, "decoders are causal"


def _implementation(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def test_what_it_does_not_know_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(encoder_attention, "is_faster", lambda *_: True)
    module = nn.Module()
    module.is_causal = False
    x = torch.randn(1, 2, 5, 32, dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    arguments: list[dict[str, Any]] = [
        {"attention_mask": mask},
        {"attention_mask": None, "is_causal": True},
        {"attention_mask": None, "position_bias": torch.randn(1, 2, 5, 5, dtype=torch.bfloat16)},
    ]
    plain = scaled_dot_product_attention(x, x, x).transpose(1, 2)
    monkeypatch.setattr(encoder_attention, "attend_to_all", fail)
    for each in arguments:
        found, _ = ask(module, x, x, x, **each)
        assert not torch.allclose(found, plain, atol=1e-2)
    with pytest.raises(AssertionError):
        ask(module, x, x, x, attention_mask=None, output_hidden_states=3, dropout=0.0)
