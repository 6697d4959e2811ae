"""Decoders without media that the generic adapter runs as they are."""

from __future__ import annotations

from aioengine.models.runtime.transformers_model import TransformersModel

__all__ = ["GptOss", "TextModel"]


class TextModel(TransformersModel):
    """A causal language model: token ids in, logits out."""


class GptOss(TextModel):
    """Experts that are published in MXFP4 stay so on a CPU, 4.5 bits a weight.

    Elsewhere they are unpacked to the engine's dtype: transformers could compute on the packed
    ones, with kernels that it fetches from a hub.
    """
