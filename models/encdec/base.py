"""Encoder-decoder models: the decoder's layers attend to what the encoder makes of a prompt.

An encoder's output is an entry of the encoder cache, whatever it was made of. The step that starts
a request gives it to the decoder as its `encoder_hidden_states`, whose keys and values the
cross-attention layers write into blocks of their own; from then on, and for others with the same
input, there are the blocks. In a step that starts nobody a single row of zeros keeps the shapes
legal, and goes nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from aioengine.kernels.layer_slot import StepHolder
from aioengine.models.runtime import encoding
from aioengine.models.runtime.interfaces import MultiModalEmbeddings
from aioengine.models.runtime.probe import NUM_PROBE_ROWS
from aioengine.models.runtime.transformers_model import TransformersModel

__all__ = ["EncoderDecoderModel", "PlacedEmbedding"]


class EncoderDecoderModel(TransformersModel):
    """Cross-attention over an encoder's output."""

    @property
    def max_encoder_len(self) -> int:
        """Rows of the longest output that the encoder can give."""
        return int(self.hf_config.max_position_embeddings)

    def encoder(self) -> nn.Module:
        """The module that gives the decoder its memory."""
        encoder: nn.Module = self.model.get_encoder()
        return encoder

    def encode_prompt(self, **kwargs: Any) -> Tensor:
        """The encoder's output [n, rows, dim] for n prompts of equal shapes.

        `input_ids` [n, length]; or what a family's HF processor makes of media, beside them.
        """
        found: Tensor = self.encoder()(input_ids=kwargs["input_ids"]).last_hidden_state
        return found

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Each prompt's rows [rows, dim]; `input_ids` [length] and, of one medium, its fields."""

        def encode_batch(**kwargs: Any) -> list[Tensor]:
            placed = {
                name: encoding.place(value, self.dtype, self.device)
                for name, value in kwargs.items()
            }
            return list(self.encode_prompt(**placed))

        return encoding.encode_items(encode_batch, items)

    def memory(self, items: Sequence[Tensor]) -> Tensor:
        """The rows of `items` one after the other: [R, dim], or one of zeros."""
        if items:
            return torch.cat(list(items))
        return torch.zeros(1, self.row_size, dtype=self.dtype, device=self.device)

    def embed(
        self, input_ids: Tensor, rows: MultiModalEmbeddings | None, is_multimodal: Tensor | None
    ) -> Tensor:
        """Embeddings of the decoder's tokens, which may be scaled there and not in the encoder."""
        assert rows is None and is_multimodal is None
        table: Any = self.decoder()
        embeds: Tensor = table.get_input_embeddings()(input_ids)
        return embeds

    def call_decoder(self, decoder: nn.Module, embeds: Tensor, positions: Tensor) -> Tensor:
        """Do as the base class, with the step's memory; the probe has one of `NUM_PROBE_ROWS`."""
        step = self._holder.current
        found = None if step is None else self.run_plan(decoder, embeds, positions)
        if found is not None:
            return found
        memory = embeds.new_zeros(NUM_PROBE_ROWS, self.row_size) if step is None else step.memory
        assert memory is not None
        return self.run_decoder(decoder, embeds, positions, encoder_hidden_states=memory[None])


class PlacedEmbedding(nn.Module):
    """Positions of a flattened batch: rows of a table [positions, dim].

    Stands for modules that count positions from the beginning of the batch.
    """

    def __init__(self, table: Tensor, holder: StepHolder) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)
        self._holder = holder

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The embeddings [1, T, dim] of the step's positions, whatever was asked for."""
        step = self._holder.current
        assert step is not None and step.positions is not None
        table: Any = self.table
        return embedding(step.positions, table)[None]
