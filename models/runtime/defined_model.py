"""Models that are defined here, since transformers has no class for them.

A definition is an `nn.Module`:

    __init__(config)
    forward(input_ids, positions, inputs_embeds=None, **kwargs) -> hidden states [T, hidden]
    compute_logits(hidden [n, hidden]) -> [n, vocab]
    load_weights(iterable of (name, tensor)) -> the names of its parameters that were loaded
    get_input_embeddings(), get_output_embeddings() -> modules with `weight` [rows, hidden]

and, where not every attention layer in it is the decoder's, `get_decoder()`, the part that holds
those that are. Its decoder attends through `aioengine.models.Attention`, or is a module of
transformers, called with `inputs_embeds[None]` and `position_ids[None]`. Media are encoded by
its `get_image_features(pixel_values, ...)` (and so for videos and audio), by an override of
`embed_multimodal`, or, where the definition is `SupportsMultiModal`, by itself.

`DefinedModel` runs it. A family is a subclass that names its `definition` and, where transformers
has no class for the config either, its `config_class`. What transformers cannot load of tokenizer
and processor, the family's processing info does (`BaseProcessingInfo.load_tokenizer`,
`load_hf_processor`). Code of a checkpoint is never run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from aioengine.models.runtime import encoding
from aioengine.models.runtime.hf_loading import build_on_meta
from aioengine.models.runtime.interfaces import MultiModalEmbeddings, SupportsMultiModal
from aioengine.models.runtime.probe import LayerSpec
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.models.runtime.weights import load_defined
from aioengine.models.runtime.whole_pass import WholePrompt, attending_whole

__all__ = ["DefinedModel", "RMSNorm", "rotary_table", "rotate_halves"]


class DefinedModel(TransformersModel):
    """A model whose module is `definition`, called with the config; see the module."""

    definition: ClassVar[type[nn.Module]]

    @classmethod
    def load_module(cls, path: str | os.PathLike[str], *, hf_config: Any, **options: Any) -> Any:
        """See `TransformersModel.load_module`. Weights are read from safetensors files only."""
        model = load_defined(cls.definition, path, hf_config=hf_config, **options)
        model.config = hf_config
        return model

    @classmethod
    def probe(cls, hf_config: Any) -> tuple[LayerSpec, ...]:
        """See `TransformersModel.probe`. The definition is built here for the first time."""
        module: Any = build_on_meta(cls.definition, hf_config)
        module.config = hf_config
        return cls.around(module).layers()

    def reference_logits(self, prompt: WholePrompt, rows: Sequence[int]) -> Tensor:
        """See the base class: the definition is its own reference, without pages and chunks."""
        token_ids = prompt.token_ids
        encoded = [
            row for item in prompt.items for row in self.encode(item.modality, [item.features])
        ]
        mask = None if not encoded else prompt.kinds() > 0
        ids = torch.tensor(token_ids, device=self.device)
        embeds = self.embed_input_ids(ids, encoded or None, mask)
        known = self.positions(token_ids, prompt.items)
        positions = self.positions_for([0], [len(token_ids)], [known]).to(self.device)
        decoder = self.decoder()
        with attending_whole(decoder):
            hidden = self.call_decoder(decoder, embeds, positions)
        return self.compute_logits(hidden[list(rows)])

    def decoder(self) -> nn.Module:
        """The part that holds the decoder's attention layers; the whole, if it does not say."""
        find = getattr(self.model, "get_decoder", None)
        decoder: nn.Module = self.model if find is None else find()
        return decoder

    def call_decoder(self, decoder: nn.Module, embeds: Tensor, positions: Tensor) -> Tensor:
        """The whole definition on [T, hidden] and [T] or [3, T]; `decoder` is a part of it."""
        hidden: Tensor = self.model(None, positions, inputs_embeds=embeds)
        return hidden

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """See `TransformersModel.embed_multimodal`; by the definition's own, if it has one."""
        if not isinstance(self.model, SupportsMultiModal):
            return super().embed_multimodal(**kwargs)
        found = encoding.passed_through(kwargs, self.dtype, self.device)
        if found is not None:
            return found
        placed = {k: encoding.place(v, self.dtype, self.device) for k, v in kwargs.items()}
        rows = self.model.embed_multimodal(**placed)
        return [] if rows is None else rows

    def embed(
        self, input_ids: Tensor, rows: MultiModalEmbeddings | None, is_multimodal: Tensor | None
    ) -> Tensor:
        """See `TransformersModel.embed`; by the definition's `embed_input_ids`, if it has one."""
        if not isinstance(self.model, SupportsMultiModal):
            return super().embed(input_ids, rows, is_multimodal)
        return self.model.embed_input_ids(input_ids, rows, is_multimodal)

    def logits(self, hidden: Tensor) -> Tensor:
        """The definition's `compute_logits`."""
        logits: Tensor = self.model.compute_logits(hidden)
        return logits


# Pieces that several definitions are made of.


class RMSNorm(nn.Module):
    """Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), in float32 at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden` [..., size] -> the same shape and dtype."""
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        normed = rms_norm(wide, wide.shape[-1:], eps=self.eps)
        return self.weight * normed.to(hidden.dtype)


def rotary_table(
    positions: Tensor, frequencies: Tensor, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines float32 [T, 1, n], `factor` times, of `positions` [T] and n frequencies.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
    """
    angles = positions[:, None].to(torch.float32) * frequencies.to(torch.float32)
    return factor * angles.cos()[:, None], factor * angles.sin()[:, None]


def rotate_halves(vectors: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """`vectors` [T, heads, size] with their first 2 n entries turned, i together with n + i.

    Computed in float32 at least; shape and dtype stay.
    """
    cosines, sines = table
    size = cosines.shape[-1]
    first, second = vectors[..., :size], vectors[..., size : 2 * size]
    turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    turned = turned.to(vectors.dtype)
    if 2 * size == vectors.shape[-1]:
        return turned
    return torch.cat([turned, vectors[..., 2 * size :]], dim=-1)
