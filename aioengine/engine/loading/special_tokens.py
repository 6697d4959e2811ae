"""Tokens that a text ends with, or never has, by a checkpoint's generation config."""

from __future__ import annotations

from typing import Any

from aioengine.errors import ModelLoadError
from aioengine.models.runtime.transformers_model import TransformersModel

__all__ = ["eos_token_ids", "suppressed", "token_ids"]


def eos_token_ids(model: TransformersModel) -> frozenset[int]:
    """Tokens that a text ends with, by the generation config, else by the text's."""
    for config in (_settings(model), model.text_config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()


def suppressed(model: TransformersModel, ends: frozenset[int]) -> tuple[int, ...]:
    """Tokens that never come: by the generation config, by themselves or as words of one, and
    padding where it has no place among positions. Raises ModelLoadError where that ends texts."""
    padding: int | None = getattr(model, "padding_id", None)
    if padding in ends:
        raise ModelLoadError(
            f"token {padding} is both padding, which has no place among the model's positions, and "
            "the end of a text; mend eos_token_id in generation_config.json"
        )
    words = getattr(_settings(model), "bad_words_ids", None) or ()
    alone = {word[0] for word in words if len(word) == 1 and 0 <= word[0] < model.vocab_size}
    never = {*token_ids(model, "suppress_tokens"), *(alone - ends)}
    return tuple(sorted(never if padding is None else never | {padding}))


def token_ids(model: TransformersModel, name: str) -> tuple[int, ...]:
    """A list of the generation config, without what lies beyond the vocabulary."""
    found = getattr(_settings(model), name, None) or ()
    if not isinstance(found, list | tuple):
        raise ModelLoadError(f"{name} in generation_config.json must be a list of token ids")
    return tuple(sorted({int(i) for i in found if 0 <= i < model.vocab_size}))


def _settings(model: TransformersModel) -> Any:
    """The generation config; None of a model without a head."""
    return getattr(model.model, "generation_config", None)
