"""Multimodal processing: media and prompts in, token ids, placeholder ranges and tensors out.

The names load on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.types import lazy_exports

if TYPE_CHECKING:
    from aioengine.processors.embeddings import EmbeddingItems as EmbeddingItems
    from aioengine.processors.encdec import EncDecMultiModalProcessor as EncDecMultiModalProcessor
    from aioengine.processors.info import BaseDummyInputsBuilder as BaseDummyInputsBuilder
    from aioengine.processors.info import BaseProcessingInfo as BaseProcessingInfo
    from aioengine.processors.info import ProcessingContext as ProcessingContext
    from aioengine.processors.info import ProcessorInputs as ProcessorInputs
    from aioengine.processors.info import load_context as load_context
    from aioengine.processors.inputs import MultiModalFieldConfig as MultiModalFieldConfig
    from aioengine.processors.inputs import MultiModalKwargs as MultiModalKwargs
    from aioengine.processors.inputs import MultiModalKwargsItem as MultiModalKwargsItem
    from aioengine.processors.inputs import PlaceholderRange as PlaceholderRange
    from aioengine.processors.items import AudioProcessorItems as AudioProcessorItems
    from aioengine.processors.items import ImageHeader as ImageHeader
    from aioengine.processors.items import ImageProcessorItems as ImageProcessorItems
    from aioengine.processors.items import ImageSize as ImageSize
    from aioengine.processors.items import MultiModalDataItems as MultiModalDataItems
    from aioengine.processors.items import VideoProcessorItems as VideoProcessorItems
    from aioengine.processors.processor import BaseMultiModalProcessor as BaseMultiModalProcessor
    from aioengine.processors.prompt.updates import PromptIndexTargets as PromptIndexTargets
    from aioengine.processors.prompt.updates import PromptInsertion as PromptInsertion
    from aioengine.processors.prompt.updates import PromptReplacement as PromptReplacement
    from aioengine.processors.prompt.updates import PromptUpdate as PromptUpdate
    from aioengine.processors.prompt.updates import PromptUpdateDetails as PromptUpdateDetails
    from aioengine.processors.registry import MULTIMODAL_REGISTRY as MULTIMODAL_REGISTRY
    from aioengine.processors.speech import cut_windows as cut_windows
    from aioengine.processors.speech import whisper_prompt as whisper_prompt

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "aioengine.processors.embeddings": "EmbeddingItems",
        "aioengine.processors.encdec": "EncDecMultiModalProcessor",
        "aioengine.processors.info": (
            "BaseDummyInputsBuilder BaseProcessingInfo ProcessingContext ProcessorInputs "
            "load_context"
        ),
        "aioengine.processors.inputs": (
            "MultiModalFieldConfig MultiModalKwargs MultiModalKwargsItem PlaceholderRange"
        ),
        "aioengine.processors.items": (
            "AudioProcessorItems ImageHeader ImageProcessorItems ImageSize MultiModalDataItems "
            "VideoProcessorItems"
        ),
        "aioengine.processors.processor": "BaseMultiModalProcessor",
        "aioengine.processors.prompt.updates": (
            "PromptIndexTargets PromptInsertion PromptReplacement PromptUpdate PromptUpdateDetails"
        ),
        "aioengine.processors.registry": "MULTIMODAL_REGISTRY",
        "aioengine.processors.speech": "cut_windows whisper_prompt",
    },
)
