"""Rotations of one operator: the usual ones of transformers are taken, others are left alone."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    Phi3Config,
    Qwen3Config,
)
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.utils.deprecation import deprecate_kwarg

from aioengine.kernels.cpu import library
from aioengine.kernels.cpu.rotary import rotate
from aioengine.models.fusion.rotary import fuse_rotary

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 36,
    "attn_implementation": "eager",
    "pad_token_id": 0,
}

native = pytest.mark.skipif(not library.is_available(), reason="the C++ kernels were not built")


def layer(kind: type[nn.Module], config: type[Any], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    made = kind(config(**SIZES), 0).to(dtype)  # type: ignore[call-arg]
    return made.requires_grad_(False).eval()


def angles(batch: int, tokens: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turns = torch.rand(batch, tokens, dim // 2).repeat(1, 1, 2) * 100
    return turns.cos().to(dtype), turns.sin().to(dtype)


@native
@pytest.mark.parametrize("name", library.instruction_sets() if library.is_available() else [])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [2, 6, 34, 64, 128])
def test_the_operator(dim: int, dtype: torch.dtype, name: str) -> None:
    """Against transformers' function in float64, from rows that lie apart, token by token alike."""
    before = library.instruction_set()
    library.use_instruction_set(name)
    try:
        if name == "generic" and dtype is torch.float16:
            pytest.skip("converted by no instruction")
        torch.manual_seed(1)
        both = torch.randn(70, 7 * dim).to(dtype)
        query, key = (part.unflatten(-1, (-1, dim)) for part in both.split([4 * dim, 3 * dim], -1))
        cos, sin = angles(1, 70, dim, dtype)
        found = rotate(query, key, cos[0], sin[0])
        heads = (x.transpose(0, 1)[None].double() for x in (query, key))
        wanted = apply_rotary_pos_emb(*heads, cos.double(), sin.double())
        for x, y in zip(found, wanted, strict=True):
            assert x.is_contiguous() and x.dtype == dtype
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(
                x.double(), y[0].transpose(0, 1), atol=4 * eps, rtol=eps, check_dtype=False
            )
        alone = rotate(query[5:6], key[5:6], cos[0, 5:6], sin[0, 5:6])
        assert torch.equal(alone[0], found[0][5:6]) and torch.equal(alone[1], found[1][5:6])
    finally:
        library.use_instruction_set(before)


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_of_half_a_head_and_halves_that_take_turns(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    query, key = torch.randn(9, 4, 64).to(dtype), torch.randn(9, 2, 64).to(dtype)
    cos, sin = (each[0] for each in angles(1, 9, 64, dtype))
    wanted = rotate(query, key, cos, sin)
    halves = cos[:, :32], sin[:, :32]
    mixed = (torch.stack(x.chunk(2, -1), -1).flatten(-2) for x in (query, key))
    for found in (rotate(query, key, *halves), rotate(*mixed, *halves, in_pairs=True)):
        for mine, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


@native
def test_what_does_not_go_together() -> None:
    query, key, cos = torch.zeros(3, 2, 8), torch.zeros(3, 1, 8), torch.zeros(3, 8)
    for given in (
        (query, key, cos[:2], cos[:2]),
        (query, key, cos, cos[:, :4]),
        (query, key.bfloat16(), cos, cos),
        (query[..., :7], key[..., :7], cos[:, :7], cos[:, :7]),
        (query.mT, key, cos, cos),
    ):
        with pytest.raises(RuntimeError):
            rotate(*given)


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "config"), [(LlamaAttention, LlamaConfig), (Qwen3Attention, Qwen3Config)]
)
def test_usual_layers(kind: type[nn.Module], config: type[Any], dtype: torch.dtype) -> None:
    module = layer(kind, config, dtype)
    plain = copy.deepcopy(module)
    assert fuse_rotary(nn.Sequential(module)) == 1
    assert isinstance(module, kind)
    assert inspect.getsource(type(module)) == inspect.getsource(kind)
    assert fuse_rotary(nn.Sequential(copy.deepcopy(plain))) == 1, "the function is as it was"
    for batch in (1, 2):  # two are no shape of ours, and go the old way
        x = torch.randn(batch, 5, 64).to(dtype)
        turned = angles(batch, 5, 36, dtype)
        found, _ = module(x, turned, None)
        wanted, _ = plain(x, turned, None)
        close = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(found, wanted, atol=close, rtol=close)
        if batch == 2:
            assert torch.equal(found, wanted)


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["half a head", "in turns"])
def test_other_layers(name: str, dtype: torch.dtype) -> None:
    """GPT-OSS has angles of half a head; DeepSeek's halves take turns, and it reads half of its."""
    torch.manual_seed(0)
    if name == "half a head":
        module: nn.Module = GptOssAttention(GptOssConfig(**SIZES), 0)
        turned = tuple(each[..., :18] for each in angles(1, 5, 36, dtype))
    else:
        ranks = {"q_lora_rank": 24, "kv_lora_rank": 16, "v_head_dim": 16}
        dims = {"qk_rope_head_dim": 12, "qk_nope_head_dim": 20, "num_key_value_heads": 4}
        config = DeepseekV3Config(**{**SIZES, **ranks, **dims})
        module, turned = DeepseekV3Attention(config, 0), angles(1, 5, 12, dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.0, 0.2)
    plain = copy.deepcopy(module.to(dtype).requires_grad_(False).eval())
    module = copy.deepcopy(plain)
    assert fuse_rotary(nn.Sequential(module)) == 1
    x = torch.randn(1, 5, 64).to(dtype)
    found, wanted = (each(x, turned, None)[0] for each in (module, plain))
    close = 16 * torch.finfo(dtype).eps * float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, atol=close, rtol=0)


@native
def test_a_forward_that_renames_an_old_argument() -> None:
    """As transformers 5.24 has them; with another decorator a class is left alone."""

    class Renaming(LlamaAttention):
        forward = deprecate_kwarg("old", "99.0", new_name="new")(
            inspect.unwrap(LlamaAttention.forward)
        )

    class Decorated(LlamaAttention):
        @functools.wraps(LlamaAttention.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return LlamaAttention.forward(self, *args, **kwargs)

    module, plain = (layer(kind, LlamaConfig, torch.float32) for kind in (Renaming, LlamaAttention))
    assert fuse_rotary(nn.Sequential(module)) == 1
    x, turned = torch.randn(1, 5, 64), angles(1, 5, 36, torch.float32)
    torch.testing.assert_close(module(x, turned, None)[0], plain(x, turned, None)[0])
    assert fuse_rotary(nn.Sequential(layer(Decorated, LlamaConfig, torch.float32))) == 0


@native
def test_the_operator_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody else's layers are touched."""
    module, other = (layer(LlamaAttention, LlamaConfig, torch.float32) for _ in range(2))
    fuse_rotary(nn.Sequential(module))

    def gone(*_: object) -> None:
        raise AssertionError("transformers' function was called")

    monkeypatch.setattr(modeling_llama, "rotate_half", gone)
    x, turned = torch.randn(1, 5, 64), angles(1, 5, 36, torch.float32)
    module(x, turned, None)
    with pytest.raises(AssertionError, match="was called"):
        other(x, turned, None)


@native
@pytest.mark.parametrize(
    ("kind", "config"), [(CohereAttention, CohereConfig), (Phi3Attention, Phi3Config)]
)
def test_rotations_of_another_kind_stay(kind: type[nn.Module], config: type[Any]) -> None:
    """Neighbours against each other; a part of a head (or all, which is the usual one)."""
    module = layer(kind, config, torch.float32)
    plain = copy.deepcopy(module)
    fuse_rotary(nn.Sequential(module))
    x = torch.randn(1, 5, 64)
    dim = plain.head_dim // 2 if kind is Phi3Attention else plain.head_dim
    turned = angles(1, 5, int(dim), torch.float32)
    assert torch.equal(module(x, turned, None)[0], plain(x, turned, None)[0])
    if kind is CohereAttention:
        assert type(module) is kind


def test_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.models.fusion.rotary.is_available", lambda: False)
    module = layer(LlamaAttention, LlamaConfig, torch.float32)
    assert fuse_rotary(nn.Sequential(module)) == 0
    assert type(module) is LlamaAttention
