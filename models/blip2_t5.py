"""BLIP-2 over T5: a picture's queries stand before the text that T5's encoder reads.

Li et al., "BLIP-2: Bootstrapping Language-Image Pre-training with Frozen Image Encoders and Large
Language Models" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from aioengine.errors import PlaceholderMismatchError
from aioengine.models.blip2 import (
    Blip2DummyInputsBuilder,
    Blip2MultiModalProcessor,
    Blip2ProcessingInfo,
)
from aioengine.models.encdec_media import PictureReader
from aioengine.models.runtime.hf_loading import find_class
from aioengine.models.t5 import T5
from aioengine.processors.encdec import EncDecMultiModalProcessor
from aioengine.processors.inputs import MultiModalKwargsItem
from aioengine.processors.items import MultiModalDataItems
from aioengine.processors.processor import Layout, TextOrTokens
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["Blip2T5", "Blip2T5MultiModalProcessor"]


class Blip2T5MultiModalProcessor(Blip2MultiModalProcessor, EncDecMultiModalProcessor):
    """The prompt is the encoder's; a picture's tokens come before everything."""

    def create_encoder_prompt(
        self, prompt: TextOrTokens, mm_items: MultiModalDataItems
    ) -> TextOrTokens:
        return prompt

    def create_decoder_prompt(
        self, prompt: TextOrTokens, mm_items: MultiModalDataItems
    ) -> TextOrTokens:
        return self.default_decoder_prompt()

    def layout(
        self,
        prompt: TextOrTokens,
        items: MultiModalDataItems,
        mm_kwargs: Mapping[str, Any],
        outputs: Mapping[str, Sequence[MultiModalKwargsItem]] | None = None,
        literals: Sequence[tuple[int, int]] = (),
    ) -> Layout:
        """As the base class; a picture's token may stand in the prompt for nothing else."""
        found = super().layout(prompt, items, mm_kwargs, outputs, literals)
        places = found.placeholders.get("image", ())
        image_token_id = self.info.get_hf_config().image_token_index
        spare = found.token_ids.count(image_token_id) - sum(place.length for place in places)
        if spare:
            raise PlaceholderMismatchError(
                f"the prompt has {spare} placeholder(s) for pictures; leave them out, as a picture "
                "comes before the text by itself",
                parameter="prompt",
                value=spare,
            )
        return found


@MULTIMODAL_REGISTRY.register_processor(
    Blip2T5MultiModalProcessor, info=Blip2ProcessingInfo, dummy_inputs=Blip2DummyInputsBuilder
)
class Blip2T5(PictureReader, T5):
    """A whole T5 inside; `Blip2.chosen_for` hands it the configs that say so."""

    @classmethod
    def hf_class(cls, hf_config: Any) -> Any:
        return find_class(hf_config)

    @property
    def t5(self) -> Any:
        return self.model.language_model

    def decoder(self) -> nn.Module:
        decoder: nn.Module = self.t5.get_decoder()
        return decoder
