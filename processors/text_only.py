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

    @classmethod
    def load_hf_processor(
        cls, source: str, hf_config: Any, options: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        """See the base class. The decoder alone of a family with media has a tokenizer, and may
        lack what would process these."""
        try:
            return super().load_hf_processor(source, hf_config, options, **kwargs)
        except Exception:  # whatever transformers raises: the tokenizer says what is wrong with it
            return cls.load_tokenizer(source, hf_config, options)

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
