"""Families that transformers' classes carry without anything of their own here.

Their HF processor says what each item becomes in the text, and their model has `get_image_features`
(or the same for videos or audio) with rows for exactly these places.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.processors.generic import GenericMultiModalProcessor
from aioengine.processors.generic_info import GenericDummyInputsBuilder, GenericProcessingInfo
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["GenericModel"]

_TOWERS = ("clip_vision_model", "siglip_vision_model")
"""Whose layers give hidden states and nothing else."""


@MULTIMODAL_REGISTRY.register_processor(
    GenericMultiModalProcessor, info=GenericProcessingInfo, dummy_inputs=GenericDummyInputsBuilder
)
class GenericModel(TransformersModel):
    """transformers' module as it is, but for layers of a vision tower that nobody reads."""

    def unread_layers(self) -> Sequence[nn.Module]:
        """Layers after the last one whose hidden states are features (`vision_feature_layer`)."""
        config = self.hf_config
        chosen = getattr(config, "vision_feature_layer", None)
        tower = getattr(self.model.model, "vision_tower", None)
        if chosen is None or tower is None or config.vision_config.model_type not in _TOWERS:
            return ()
        layers = next(each for each in tower.modules() if isinstance(each, nn.ModuleList))
        # Hidden state 0 is what goes into the first layer.
        states = len(layers) + 1
        used = max(each % states for each in ([chosen] if isinstance(chosen, int) else chosen))
        return [*layers][used:]
