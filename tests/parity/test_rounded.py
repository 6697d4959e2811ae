"""Rounded weights in families that compute with some of them in a way of their own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch import nn

from aioengine import AsyncEngine, SamplingParams
from aioengine.kernels.grouped import round_weight
from aioengine.models.quantization.grouped_layers import attach, stand_in, unpacked_names
from tests.parity import test_gemma_n4
from tests.parity.trials import compare, makers

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("name", ["gemma4", "gemma4-dense"])
async def test_a_start_without_a_trial_answers_the_same(name: str, tmp_path: Path) -> None:
    """Gemma 4 reads its embeddings' weight itself, so that has to stay."""
    await asyncio.to_thread(test_gemma_n4.save_text, name, tmp_path)
    answers = []
    for is_tried in (True, False):
        async with AsyncEngine.from_pretrained(
            tmp_path, dtype="float32", device="cpu", quantization="int8", check_model=is_tried,
            max_model_len=256, kv_cache_bytes=4 << 20,
        ) as engine:  # fmt: skip
            answers.append(await engine.generate("tell a story", PARAMS))
    tried, untried = answers
    assert tried.token_ids == untried.token_ids and len(set(tried.token_ids)) > 1


def test_an_encoder_whose_gates_fill_no_panel(tmp_path: Path) -> None:
    folder = tmp_path / "glm4v"
    makers()["glm4v"](folder).save_pretrained(folder)
    assert all(each.share < 1 for each in compare(folder, torch.float32, 1))


def test_weights_that_are_gone_and_not_packed_are_seen() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    for layer in model:
        attach(layer, round_weight(layer.weight, 8))
    assert unpacked_names(model) == []
    model[1].weight = stand_in(model[1].weight)
    assert unpacked_names(model) == ["1"]
