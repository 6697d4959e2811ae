"""BART and mBART: text to text, over learned positions.

Lewis et al., "BART: Denoising Sequence-to-Sequence Pre-training for Natural Language Generation,
Translation, and Comprehension" (2019); Liu et al., "Multilingual Denoising Pre-training for Neural
Machine Translation" (2020).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from aioengine.models.encdec.base import EncoderDecoderModel, PlacedEmbedding
from aioengine.processors.encdec import EncDecTextProcessor
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["Bart"]


@MULTIMODAL_REGISTRY.register_processor(EncDecTextProcessor)
class Bart(EncoderDecoderModel):
    """The prompt is what the encoder reads.

    The decoder counts positions from its batch's beginning: they are put in their places.
    """

    @classmethod
    def hf_class(cls, hf_config: Any) -> Any:
        """The class with a head: a checkpoint of the bare model shares it with the embeddings."""
        import transformers

        if hf_config.model_type == "mbart":
            return transformers.MBartForConditionalGeneration
        return transformers.BartForConditionalGeneration

    def patch(self) -> None:
        super().patch()
        decoder: Any = self.decoder()
        old = decoder.embed_positions
        decoder.embed_positions = PlacedEmbedding(old.weight, old.offset, self._holder)

    def position_arguments(self, positions: Tensor) -> dict[str, Tensor]:
        return {}

    def logits(self, hidden: Tensor) -> Tensor:
        bias: Tensor = self.model.final_logits_bias.to(hidden.dtype)
        return super().logits(hidden) + bias
