"""Chameleon: images become tokens of the vocabulary itself.

Chameleon Team, "Chameleon: Mixed-Modal Early-Fusion Foundation Models" (2024). The encoder's rows
are the embeddings of the codes that an image is quantised to. Every prompt ends in a separator,
and the model never says a code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aioengine.models.generic import GenericModel
from aioengine.processors.generic import GenericMultiModalProcessor
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["Chameleon", "ChameleonMultiModalProcessor"]


class ChameleonMultiModalProcessor(GenericMultiModalProcessor):
    """The separator behind every prompt, with images or without."""

    def _apply_hf_processor_tokens_only(self, prompt_tokens: list[int]) -> list[int]:
        return [*prompt_tokens, self.info.get_tokenizer().sep_token_id]


@MULTIMODAL_REGISTRY.register_processor(ChameleonMultiModalProcessor)
class Chameleon(GenericModel):
    """No code of an image is ever the next token."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        codes = model.model.vocabulary_mapping.image_tokens
        self._is_code = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
        self._is_code[torch.as_tensor(codes)] = True

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        return logits.masked_fill(self._is_code, torch.finfo(logits.dtype).min)
