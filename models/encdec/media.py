"""Encoders that read an image among the tokens of a text, for a decoder that attends to them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from aioengine.errors import EngineError
from aioengine.models.encdec.base import EncoderDecoderModel
from aioengine.models.runtime.interfaces import merge_multimodal_embeddings
from aioengine.models.runtime.registry import find_class

__all__ = ["ImageReader"]


class ImageReader(EncoderDecoderModel):
    """The image's rows stand where the encoder's prompt has the config's `image_token_id`.

    To be put before the family of the language model among a class's bases. The prompt has to hold
    that token nowhere else: the family's processor sees to it.
    """

    @classmethod
    def hf_class(cls, hf_config: Any) -> Any:
        """The whole model's class, which holds the language model's."""
        return find_class(hf_config)

    def encode_prompt(self, **kwargs: Any) -> Tensor:
        """The encoder's output [n, length, dim], of token ids and of an image in each, or in none.

        `input_ids` [n, length]; `pixel_values` [n, 3, height, width], or `image_embeds`
        [n, rows, dim]. Raises EngineError where the rows are not as many as their placeholders.
        """
        input_ids: Tensor = kwargs.pop("input_ids")
        table = self.model.get_input_embeddings()
        if kwargs:
            is_row = input_ids == self.hf_config.image_token_id
            embeds = table(input_ids.masked_fill(is_row, 0))
            rows = self.embed_multimodal(**kwargs)
            # Read back, as a device would fail for good if there were too few.
            counts = is_row.sum(1).tolist()
            if any(counts):  # else it is a trial of how much memory it takes
                if counts != [len(each) for each in rows]:
                    raise EngineError("the image has not as many rows as placeholders")
                flat = embeds.flatten(0, 1)
                merge_multimodal_embeddings(None, flat, rows, is_multimodal=is_row.flatten())
                embeds = flat.view_as(embeds)
        else:
            embeds = table(input_ids)
        found: Tensor = self.encoder()(inputs_embeds=embeds).last_hidden_state
        return found
