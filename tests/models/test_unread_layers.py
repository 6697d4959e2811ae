"""Vision towers without the layers whose output nobody reads: the same rows, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlavaForConditionalGeneration

from aioengine.models.generic import GenericModel
from aioengine.models.llava import Llava
from tests.support.tiny import draw_weights, llava_config, tiny_pixels


def make(tower: str, chosen: Any) -> Any:
    config = llava_config(tower=tower)
    config.vision_feature_layer = chosen
    config.vision_config.num_hidden_layers = 4
    with torch.random.fork_rng(devices=[]):
        model = LlavaForConditionalGeneration(config)
    draw_weights(model)
    return model.double().eval().requires_grad_(False)


def num_empty(layers: nn.ModuleList) -> int:
    return sum(not list(layer.parameters()) for layer in layers)


@pytest.mark.parametrize("tower", ["clip", "siglip"])
@pytest.mark.parametrize(
    ("chosen", "count"), [(-2, 1), (-1, 0), (-4, 3), (1, 3), (4, 0), ([-2, 1], 1), ([-3, 1], 2)]
)
@torch.inference_mode()
def test_rows_are_the_same(tower: str, chosen: Any, count: int) -> None:
    model, pixels = make(tower, chosen), tiny_pixels(2).double()
    layers = model.model.vision_tower.encoder.layers
    kinds = [type(layer).__name__ for layer in layers]
    wanted = model.get_image_features(pixel_values=pixels).pooler_output
    Llava(model).pack()
    for _ in range(2):
        found = model.get_image_features(pixel_values=pixels).pooler_output
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
    assert num_empty(layers) == count
    assert [type(layer).__name__ for layer in layers] == kinds


@torch.inference_mode()
def test_before_the_first_run_too() -> None:
    """Hooks that collect hidden states are laid at the first run, on modules of a class."""
    pixels = tiny_pixels(1).double()
    wanted = make("clip", -2).get_image_features(pixel_values=pixels).pooler_output
    model = make("clip", -2)
    Llava(model).pack()
    assert num_empty(model.model.vision_tower.encoder.layers) == 1
    found = model.get_image_features(pixel_values=pixels).pooler_output
    assert torch.equal(found[0], wanted[0])


def test_what_is_left_alone() -> None:
    """A tower of another kind, whose layers may give something else."""
    other = GenericModel.around(make("clip", -2))
    assert len(other.unread_layers()) == 1
    other.hf_config.vision_config.model_type = "pixtral"
    assert not other.unread_layers()
