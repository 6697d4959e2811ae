"""Prompts of two halves: what the encoder reads, with its media, and what the decoder begins with.

Names and meaning as in vLLM's class of the same name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aioengine.processors.items import MultiModalDataItems
from aioengine.processors.processor import (
    BaseMultiModalProcessor,
    MultiModalInputs,
    TextOrTokens,
)

__all__ = ["EncDecMultiModalProcessor", "MultiModalEncDecInputs"]


@dataclass(frozen=True, kw_only=True)
class MultiModalEncDecInputs(MultiModalInputs):
    """The encoder's inputs, and the token ids that the decoder begins with.

    `token_ids` and `placeholders` are the encoder prompt's.
    """

    decoder_token_ids: list[int]


class EncDecMultiModalProcessor(BaseMultiModalProcessor):
    """A family whose decoder attends to an encoder, which reads the media and perhaps text."""

    @abstractmethod
    def create_encoder_prompt(
        self, prompt: TextOrTokens, mm_items: MultiModalDataItems
    ) -> TextOrTokens:
        """What the encoder reads, placeholders not expanded: the caller's prompt, or a dummy token
        for each item where the encoder takes media only."""

    def create_decoder_prompt(
        self, prompt: TextOrTokens, mm_items: MultiModalDataItems
    ) -> TextOrTokens:
        """What the decoder begins with: here the caller's prompt."""
        return prompt

    @property
    def decoder_start_token_id(self) -> int | None:
        """The token that every decoder prompt begins with; None: none is put before it."""
        config = self.info.get_hf_config()
        for name in ("decoder_start_token_id", "bos_token_id"):
            for source in (config, config.get_text_config(decoder=True)):
                found = getattr(source, name, None)
                if found is not None:
                    return int(found)
        return None

    def decoder_prompt(self, prompt: TextOrTokens) -> list[int]:
        """The decoder's token ids, with its start token before them where it is not there yet."""
        token_ids = (
            self.tokenize(prompt, add_special_tokens=False)
            if isinstance(prompt, str)
            else self._checked_ids(prompt)
        )
        start = self.decoder_start_token_id
        if start is None or token_ids[:1] == [start]:
            return token_ids
        return [start, *token_ids]

    def apply(
        self,
        prompt: TextOrTokens,
        items: MultiModalDataItems,
        mm_kwargs: Mapping[str, Any] | None = None,
        decoder_prompt: TextOrTokens | None = None,
    ) -> MultiModalEncDecInputs:
        """Both halves. An explicit `decoder_prompt` wins over what is made of `prompt`."""
        read = self.create_encoder_prompt(prompt, items)
        encoder = super().apply(read, items, mm_kwargs)
        if decoder_prompt is None:
            decoder_prompt = self.create_decoder_prompt(prompt, items)
        return MultiModalEncDecInputs(
            token_ids=encoder.token_ids,
            placeholders=encoder.placeholders,
            items=encoder.items,
            decoder_token_ids=self.decoder_prompt(decoder_prompt),
        )
