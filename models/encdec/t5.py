"""T5: text to text, with a bias by distance in the place of positions.

Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer"
(2019).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aioengine.errors import ModelLoadError
from aioengine.kernels.layer_slot import LayerSlot, attach_slot
from aioengine.models.encdec.base import EncoderDecoderModel
from aioengine.processors.encdec import EncDecTextProcessor
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["T5", "bias_by_distance"]


@MULTIMODAL_REGISTRY.register_processor(EncDecTextProcessor)
class T5(EncoderDecoderModel):
    """The prompt is what the encoder reads. One bias by distance for all layers.

    The encoder takes `max_model_len` tokens, by default the config's `n_positions`: no distance
    beyond these is new to it, but its memory grows with their square.
    """

    def __init__(self, model: Any, *, max_model_len: int | None = None, **kwargs: Any) -> None:
        self._max_len = max_model_len
        super().__init__(model, max_model_len=max_model_len, **kwargs)

    @classmethod
    def hf_class(cls, hf_config: Any) -> Any:
        """The class with a head; where embeddings are not tied, a checkpoint without is refused."""
        import transformers

        return transformers.T5ForConditionalGeneration

    @property
    def max_encoder_len(self) -> int:
        return self._max_len or int(getattr(self.t5.config, "n_positions", 512))

    @property
    def t5(self) -> Any:
        """transformers' T5ForConditionalGeneration."""
        return self.model

    def patch(self) -> None:
        super().patch()
        decoder: Any = self.decoder()
        first = decoder.block[0]
        own, cross = first.layer[0].SelfAttention, first.layer[1].EncDecAttention
        table = bias_by_distance(own)
        for index, spec in enumerate(self.specs):
            if spec.kind == "self":
                group, _ = self.layer_groups[index]
                slot = LayerSlot(index, group, self._holder, distance_bias=table)
                attach_slot(decoder.get_submodule(spec.name), slot)
        # Else each would be made anew for every step, over all pairs of the batch's tokens.
        nothing = table.new_zeros(1)
        for module in (own, cross):
            module.has_relative_attention_bias = True
            module.compute_bias = lambda *args, **kwargs: nothing

    def position_arguments(self, positions: Tensor) -> dict[str, Tensor]:
        return {}

    def logits(self, hidden: Tensor) -> Tensor:
        if getattr(self.t5.config, "scale_decoder_outputs", False):
            hidden = hidden * self.t5.model_dim**-0.5
        return super().logits(hidden)


def bias_by_distance(attention: Any) -> Tensor:
    """A T5 decoder layer's bias [heads, distances]; the last is that of all greater ones."""
    most = attention.relative_attention_max_distance
    weight = attention.relative_attention_bias.weight
    distances = torch.arange(most + 1, device=weight.device)
    buckets = attention._relative_position_bucket(
        -distances,
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=most,
    )
    if buckets[-1] != attention.relative_attention_num_buckets - 1:
        raise ModelLoadError("the relative attention buckets do not end at their max_distance")
    table: Tensor = weight[buckets].T.contiguous()
    return table
