"""Multimodal processing: media and prompts in, token ids, placeholder ranges and tensors out.

The names load on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioengine.processors.embeddings import EmbeddingItems as EmbeddingItems
    from aioengine.processors.encdec import (
        EncDecMultiModalProcessor as EncDecMultiModalProcessor,
    )
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

_HOMES = {
    "MULTIMODAL_REGISTRY": "registry",
    "AudioProcessorItems": "items",
    "BaseDummyInputsBuilder": "info",
    "BaseMultiModalProcessor": "processor",
    "BaseProcessingInfo": "info",
    "EmbeddingItems": "embeddings",
    "EncDecMultiModalProcessor": "encdec",
    "ImageHeader": "items",
    "ImageProcessorItems": "items",
    "ImageSize": "items",
    "MultiModalDataItems": "items",
    "MultiModalFieldConfig": "inputs",
    "MultiModalKwargs": "inputs",
    "MultiModalKwargsItem": "inputs",
    "PlaceholderRange": "inputs",
    "ProcessingContext": "info",
    "ProcessorInputs": "info",
    "PromptIndexTargets": "prompt.updates",
    "PromptInsertion": "prompt.updates",
    "PromptReplacement": "prompt.updates",
    "PromptUpdate": "prompt.updates",
    "PromptUpdateDetails": "prompt.updates",
    "VideoProcessorItems": "items",
    "cut_windows": "speech",
    "load_context": "info",
    "whisper_prompt": "speech",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
