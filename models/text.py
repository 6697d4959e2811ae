"""Decoders without media that the generic adapter runs as they are."""

from __future__ import annotations

from aioengine.models.adapter import TransformersModel
from aioengine.models.registry import register_model

__all__ = ["TextModel"]


@register_model(
    "GPT2LMHeadModel",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "OPTForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
class TextModel(TransformersModel):
    """A causal language model: token ids in, logits out."""

    supports_multimodal = False
