"""Families in which the tokens of an image see each other both ways.

Gemma 3 (2025): each image's soft tokens are one block, also within a layer's window. PaliGemma
(Beyer et al., 2024): the whole prompt is one block, and positions count from 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from aioengine.models.generic import GenericModel
from aioengine.models.runtime.interfaces import PromptMedia
from aioengine.models.runtime.whole_pass import WholePrompt, run_whole
from aioengine.processors.generic import GenericMultiModalProcessor
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["Gemma3", "PaliGemma", "PaliGemmaMultiModalProcessor"]


class Gemma3(GenericModel):
    """The tokens of an image see each other both ways, in a block for each of its crops."""

    blocks_in_window: ClassVar[bool] = True

    def blocks(self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()) -> Tensor | None:
        if not items:
            return None
        ids = torch.full((len(token_ids),), -1)
        for number, (start, stop) in enumerate(run for item in items for run in item.runs):
            ids[start:stop] = number
        return ids


class PaliGemmaMultiModalProcessor(GenericMultiModalProcessor):
    """Behind the last image stands the sequence's first token, behind the text a line end."""

    def _apply_hf_processor_tokens_only(self, prompt_tokens: list[int]) -> list[int]:
        (image,) = self.info.encode(self.info.get_placeholder("image"))
        if image not in prompt_tokens:
            return prompt_tokens
        end = len(prompt_tokens) - prompt_tokens[::-1].index(image)
        bos = self.info.get_tokenizer().bos_token_id
        if prompt_tokens[end : end + 1] == [bos]:
            return prompt_tokens  # it is all done
        line_end = self.info.encode("\n")
        return [*prompt_tokens[:end], bos, *prompt_tokens[end:], *line_end]


@MULTIMODAL_REGISTRY.register_processor(PaliGemmaMultiModalProcessor)
class PaliGemma(GenericModel):
    """One block: the prompt is computed whole, in one step."""

    def positions(
        self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()
    ) -> tuple[Tensor, int]:
        return torch.arange(1, len(token_ids) + 1), 1

    def blocks(self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()) -> Tensor:
        return torch.zeros(len(token_ids), dtype=torch.int32)

    def reference_logits(self, prompt: WholePrompt, rows: Sequence[int]) -> Tensor:
        """See the base class. All but the last token, which is generated, are the block."""
        types = torch.zeros(1, len(prompt.token_ids), dtype=torch.int64)
        types[0, -1] = 1
        return run_whole(self.model, prompt, rows, token_type_ids=types)
