"""Registry of the processor of each model class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from aioengine.processors.info import BaseDummyInputsBuilder, BaseProcessingInfo, ProcessingContext
from aioengine.processors.processor import BaseMultiModalProcessor
from aioengine.processors.text_only import TextOnlyDummyInputs, TextOnlyInfo, TextOnlyProcessor

__all__ = ["MULTIMODAL_REGISTRY", "MultiModalRegistry"]

ModelT = TypeVar("ModelT", bound=type[Any])
Parts: TypeAlias = tuple[
    type[BaseMultiModalProcessor], type[BaseProcessingInfo], type[BaseDummyInputsBuilder]
]

_TEXT_ONLY: Parts = TextOnlyProcessor, TextOnlyInfo, TextOnlyDummyInputs


class MultiModalRegistry:
    """Model class -> how its prompts are processed. Subclasses of a model class inherit it."""

    def __init__(self) -> None:
        self._entries: dict[type[Any], Parts] = {}

    def register_processor(
        self,
        processor: type[BaseMultiModalProcessor] | None = None,
        *,
        info: type[BaseProcessingInfo] | None = None,
        dummy_inputs: type[BaseDummyInputsBuilder] | None = None,
    ) -> Callable[[ModelT], ModelT]:
        """Decorates a model class with its processor; the last registration counts.

        What is not given is that of the class that it derives from; for text only if it has none.
        """

        def register(model_cls: ModelT) -> ModelT:
            known = self._find(model_cls)
            parts = processor or known[0], info or known[1], dummy_inputs or known[2]
            self._entries[model_cls] = parts
            return model_cls

        return register

    def is_multimodal(self, model_cls: type[Any]) -> bool:
        """Return whether a processor is registered for the class or one that it derives from."""
        return self._find(model_cls) is not _TEXT_ONLY

    def find_info(self, model_cls: type[Any]) -> type[BaseProcessingInfo]:
        """The processing info that is registered for the class; for text only if none is."""
        return self._find(model_cls)[1]

    def create_processor(
        self, model_cls: type[Any], context: ProcessingContext
    ) -> BaseMultiModalProcessor:
        """A processor for one worker thread, which owns `context`; for text only if none is known.

        Loads the HF processor. Raises ModelLoadError.
        """
        processor, info, dummy_inputs = self._find(model_cls)
        if self.is_multimodal(model_cls):
            assert context.hf_processor is not None
        family_info = info(context)
        return processor.chosen_for(family_info)(family_info, dummy_inputs(family_info))

    def _find(self, model_cls: type[Any]) -> Parts:
        found = (self._entries[base] for base in model_cls.__mro__ if base in self._entries)
        return next(found, _TEXT_ONLY)


MULTIMODAL_REGISTRY = MultiModalRegistry()
