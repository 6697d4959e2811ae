"""Families that transformers' classes carry without anything of their own here.

Their HF processor says what each item becomes in the text, and their model has `get_image_features`
(or the same for videos or audio) with rows for exactly these places.
"""

from __future__ import annotations

from aioengine.models.runtime.registry import register_model
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.processors.generic import GenericMultiModalProcessor
from aioengine.processors.generic_info import GenericDummyInputsBuilder, GenericProcessingInfo
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["GenericModel"]


@register_model(
    "AriaForConditionalGeneration",
    "DeepseekVLForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
)
@MULTIMODAL_REGISTRY.register_processor(
    GenericMultiModalProcessor, info=GenericProcessingInfo, dummy_inputs=GenericDummyInputsBuilder
)
class GenericModel(TransformersModel):
    """Nothing of its own: transformers' module as it is."""
