"""Processing for models that take no media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aioengine.processors.info import BaseDummyInputsBuilder, BaseProcessingInfo, ProcessorInputs
from aioengine.processors.inputs import MultiModalFieldConfig, MultiModalKwargs
from aioengine.processors.items import Counts, MultiModalDataItems
from aioengine.processors.processor import BaseMultiModalProcessor
from aioengine.processors.prompt.updates import PromptUpdate

__all__ = ["TextOnlyDummyInputs", "TextOnlyInfo", "TextOnlyProcessor"]


class TextOnlyInfo(BaseProcessingInfo):
    """Processing for models that take no media."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Counts) -> Counts:
        return {}


class TextOnlyDummyInputs(BaseDummyInputsBuilder):
    """Processing for models that take no media."""

    def get_dummy_processor_inputs(self, seq_len: int, mm_counts: Counts) -> ProcessorInputs:
        return ProcessorInputs(prompt_text="")


class TextOnlyProcessor(BaseMultiModalProcessor):
    """Processing for models that take no media: text is tokenised, token ids pass through."""

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        return []
