"""Voxtral Realtime: a causal tower, and a decoder that writes while it hears.

A row for each 80 ms of audio is added to the embedding of the token that is there, in the answer as
in the prompt. The answer ends with the audio.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from aioengine.models.runtime import encoding
from aioengine.models.runtime.interfaces import MultiModalEmbeddings, flatten_embeddings
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.models.runtime.whole_pass import WholePrompt, run_whole
from aioengine.models.voxtral.realtime_processing import (
    VoxtralRealtimeDummyInputs,
    VoxtralRealtimeInfo,
    VoxtralRealtimeProcessor,
)
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["VoxtralRealtime"]

FRAMES_AT_ONCE = 3000
"""Mel frames that the tower hears together; what it keeps of those before them is a window."""


@MULTIMODAL_REGISTRY.register_processor(
    VoxtralRealtimeProcessor, info=VoxtralRealtimeInfo, dummy_inputs=VoxtralRealtimeDummyInputs
)
class VoxtralRealtime(TransformersModel):
    """One audio item, of any length: a row of it is added to each token, the answer's too."""

    def patch(self) -> None:
        """See the base class. The tower is causal, and an encoder like others."""
        super().patch()
        for layer in self.model.model.audio_tower.layers:
            layer.self_attn.is_of_encoder = True

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Rows [n, rows, hidden] of n audio items of one length.

        `input_features` [n, mel bins, frames]; or `audio_embeds`, which pass through.
        """
        features = kwargs.get("input_features")
        if features is None:
            return super().embed_multimodal(**kwargs)
        assert isinstance(features, Tensor)
        inner = self.model.model
        step = FRAMES_AT_ONCE - FRAMES_AT_ONCE % self.hf_config.audio_length_per_tok
        pieces = torch.split(features, step, dim=-1)
        cache = DynamicCache(config=inner.audio_tower.config) if len(pieces) > 1 else None
        rows, padding = [], None
        for piece in pieces:
            found = inner.get_audio_features(
                encoding.place(piece, self.dtype, self.device),
                past_key_values=cache,
                padding_cache=padding,
                use_cache=cache is not None,
            )
            rows.append(found.pooler_output)
            padding = found.padding_cache  # what convolutions see of the piece before
        return torch.cat(rows, dim=1)

    def embed(
        self, input_ids: Tensor, rows: MultiModalEmbeddings | None, is_multimodal: Tensor | None
    ) -> Tensor:
        """See the base class. Rows are added to what their tokens embed to."""
        embeds: Tensor = self.model.get_input_embeddings()(input_ids)
        if is_multimodal is None or rows is None:
            return embeds
        added = flatten_embeddings(rows).to(embeds)
        mask = is_multimodal.to(input_ids.device)[:, None]
        return embeds + torch.zeros_like(embeds).masked_scatter_(mask, added)

    def call_decoder(self, decoder: nn.Module, embeds: Tensor, positions: Tensor) -> Tensor:
        """See the base class. Each layer is told by how much the text is late."""
        delay = embeds.new_full((1,), float(self.hf_config.default_num_delay_tokens))
        told = self.model.model.time_embedding(delay)[None]
        return self.run_decoder(decoder, embeds, positions, t_cond=told)

    def reference_logits(self, prompt: WholePrompt, rows: Sequence[int]) -> Tensor:
        """See the base class. transformers takes as much audio as there are tokens."""
        num_frames = len(prompt.token_ids) * self.hf_config.audio_length_per_tok
        features = [item.features["input_features"][:, :num_frames] for item in prompt.items]
        if not features:
            return run_whole(self.model, prompt, rows)
        bare = WholePrompt(token_ids=prompt.token_ids)
        given = {
            "input_features": torch.stack(features),
            "num_delay_tokens": torch.tensor(self.hf_config.default_num_delay_tokens),
        }
        return run_whole(self.model, bare, rows, **given)
