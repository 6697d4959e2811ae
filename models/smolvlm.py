"""SmolVLM and SmolVLM2: Idefics 3 in small, with videos.

Marafioti et al., "SmolVLM: Redefining small and efficient multimodal models" (2025). A video is its
frames, each an image that is not cut up, behind its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioengine.models.generic import GenericModel
from aioengine.processors.generic_info import GenericProcessingInfo
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["SmolVLM", "SmolVLMProcessingInfo"]


class SmolVLMProcessingInfo(GenericProcessingInfo):
    """An HF processor without torchvision and num2words, which transformers' own asks for."""

    @classmethod
    def load_hf_processor(
        cls, source: str, hf_config: Any, options: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        from aioengine.processors.hf.smolvlm import load_smolvlm_processor

        return load_smolvlm_processor(source, options, **kwargs)


@MULTIMODAL_REGISTRY.register_processor(info=SmolVLMProcessingInfo)
class SmolVLM(GenericModel):
    """Nothing of its own: frames go through `get_image_features`, as images do."""
