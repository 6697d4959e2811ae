"""Encoders without the layers whose output nobody reads: the same rows, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlavaForConditionalGeneration
from transformers.models.internvl.modeling_internvl import InternVLModel
from transformers.models.llava.modeling_llava import LlavaModel
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

from aioengine.models.fusion.trimmed import PassedOn, _towers, trim_encoders
from tests.tiny import draw_weights, llava_config, tiny_pixels


def make(tower: str, chosen: Any) -> Any:
    config = llava_config(tower=tower)
    config.vision_feature_layer = chosen
    config.vision_config.num_hidden_layers = 4
    with torch.random.fork_rng(devices=[]):
        model = LlavaForConditionalGeneration(config)
    draw_weights(model)
    return model.double().eval().requires_grad_(False)


@pytest.mark.parametrize("tower", ["clip", "siglip"])
@pytest.mark.parametrize(
    ("chosen", "count"), [(-2, 1), (-1, 0), (-4, 3), (1, 3), (4, 0), ([-2, 1], 1), ([-3, 1], 2)]
)
@torch.inference_mode()
def test_rows_are_the_same(tower: str, chosen: Any, count: int) -> None:
    model, pixels = make(tower, chosen), tiny_pixels(2).double()
    wanted = model.get_image_features(pixel_values=pixels).pooler_output
    assert trim_encoders(model) == count
    for _ in range(2):
        found = model.get_image_features(pixel_values=pixels).pooler_output
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
    layers = model.model.vision_tower.encoder.layers
    assert len(layers) == 4
    assert sum(isinstance(layer, PassedOn) for layer in layers) == count
    assert all(not list(layer.parameters()) for layer in layers if isinstance(layer, PassedOn))


@torch.inference_mode()
def test_before_the_first_run_too() -> None:
    """Hooks that collect hidden states are laid at the first run, on modules of a class."""
    pixels = tiny_pixels(1).double()
    wanted = make("clip", -2).get_image_features(pixel_values=pixels).pooler_output
    model = make("clip", -2)
    assert trim_encoders(model) == 1
    found = model.get_image_features(pixel_values=pixels).pooler_output
    assert torch.equal(found[0], wanted[0])


def tower_names(kind: type[nn.Module]) -> set[str]:
    """Of the children of a module of a class, without its weights."""
    shell = kind.__new__(kind)
    nn.Module.__init__(shell)
    children = {name: nn.Identity() for name in ("vision_tower", "multi_modal_projector")}
    for name, child in children.items():
        shell.add_module(name, child)
    found = {id(child) for child in _towers(shell)}
    return {name for name, child in children.items() if id(child) in found}


def test_whose_towers_are_read_by_hidden_states_only() -> None:
    for kind in (LlavaModel, LlavaNextModel, LlavaOnevisionModel):
        assert "vision_tower" in tower_names(kind), kind
    # It may read the last hidden state as well, which has gone through a norm.
    assert "vision_tower" not in tower_names(InternVLModel)
