"""Angles by Triton's kernel, and which decoders have theirs made by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import Gemma3TextConfig, LlamaConfig, Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from aioengine.kernels.triton.angles import angles_of
from aioengine.models.fusion.decoder_plan import _Rotary
from aioengine.models.fusion.rotary import make_angles_by

POSITIONS = torch.tensor([0, 1, 5, 77, 4095, 100_000])
SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LLAMAS = {
    "default": {},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "odd": {"head_dim": 20},
}


def made(module: nn.Module, calls: Any, dtype: torch.dtype, axes: int | None = None) -> Any:
    like = torch.zeros(1, dtype=dtype)
    slow = _Rotary(module, axes, calls)
    fast = make_angles_by(angles_of, module, slow, like, axes)
    x = torch.zeros(len(POSITIONS), 64, dtype=dtype)
    return fast, fast(x, POSITIONS), slow(x, POSITIONS)


def assert_same(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            assert x.dtype == y.dtype
            near = 2e-6 if x.dtype is torch.float32 else 2**-7
            torch.testing.assert_close(x, y, atol=near, rtol=near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LLAMAS)
def test_angles_of_one_kind(name: str, dtype: torch.dtype) -> None:
    module = LlamaRotaryEmbedding(LlamaConfig(**SIZES, **LLAMAS[name]))
    fast, found, expected = made(module, [((), {})], dtype)
    assert not isinstance(fast, _Rotary), "the module's frequencies are found"
    assert_same(found, expected)
    assert fast(torch.zeros(0, 64, dtype=dtype), POSITIONS[:0])[0][0].shape[0] == 0


def test_angles_of_two_kinds() -> None:
    config = Gemma3TextConfig(
        **SIZES, head_dim=32, num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    calls = [((), {"layer_type": kind}) for kind in config.layer_types]
    fast, found, expected = made(Gemma3RotaryEmbedding(config), calls, torch.float32)
    assert not isinstance(fast, _Rotary) and len(found) == 2
    assert_same(found, expected)


SECTIONS: dict[str, Any] = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
WITH_AXES: dict[str, Callable[[], nn.Module]] = {
    "in sections": lambda: Qwen2VLRotaryEmbedding(
        Qwen2VLTextConfig(**SIZES, rope_parameters=SECTIONS)
    ),
    "interleaved": lambda: Qwen3VLTextRotaryEmbedding(
        Qwen3VLTextConfig(
            **SIZES, head_dim=32, rope_parameters={**SECTIONS, "mrope_interleaved": True}
        )
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WITH_AXES)
def test_each_frequency_turns_by_its_axis(name: str, dtype: torch.dtype) -> None:
    module = WITH_AXES[name]()
    fast, found, expected = made(module, [((), {})], dtype, axes=3)
    assert_same(found, expected)
    positions = torch.stack([POSITIONS, POSITIONS.flip(0), POSITIONS + 3])
    x = torch.zeros(len(POSITIONS), 64, dtype=dtype)
    expected = _Rotary(module, 3, [((), {})])(x, positions)
    with patch.object(module, "forward", side_effect=AssertionError("the module is not called")):
        assert_same(fast(x, positions), expected)


def test_positions_lie_in_any_order() -> None:
    frequencies, axes = torch.tensor([1.0, 0.5]), torch.tensor([0, 1])
    positions = torch.tensor([[3, 5], [4, 6], [1, 2]])
    for given in (positions.T, positions.T[:, 1:2], positions[1:2].T):
        cos, sin = angles_of(given, frequencies, 1.0, torch.float32, axes)
        turns = (given[axes].float() * frequencies[:, None]).T.repeat(1, 2)
        torch.testing.assert_close((cos, sin), (turns.cos(), turns.sin()))


class Averaged(Qwen2VLRotaryEmbedding):
    """Each frequency turns by the mean of the positions."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        mean = position_ids.float().mean(0, keepdim=True)
        return super().forward(x, mean.expand(3, -1, -1))


def test_mixed_axes_are_left_to_the_module() -> None:
    module = Averaged(Qwen2VLTextConfig(**SIZES, rope_parameters=SECTIONS))
    fast, _, _ = made(module, [((), {})], torch.float32, axes=3)
    positions = torch.stack([POSITIONS, POSITIONS.flip(0), POSITIONS + 3])
    x = torch.zeros(len(POSITIONS), 64)
    assert_same(fast(x, positions), _Rotary(module, 3, [((), {})])(x, positions))


class Other(LlamaRotaryEmbedding):
    """Angles that its frequencies alone do not give."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return super().forward(x, position_ids + 1)


def test_other_angles_are_left_to_the_module() -> None:
    fast, _, _ = made(Other(LlamaConfig(**SIZES)), [((), {})], torch.float32)
    assert isinstance(fast, _Rotary)
