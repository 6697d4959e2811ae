"""The forms in which a caller may give a prompt, read into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aioengine.errors import InvalidRequestError
from aioengine.types import Prompt

__all__ = ["PromptLike", "read_prompt"]

PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]] | Prompt


def read_prompt(prompt: PromptLike, media: Mapping[str, Sequence[Any]]) -> Prompt:
    """Any accepted form of a prompt as a `Prompt`, with `media` added to its own.

    Raises InvalidRequestError.
    """
    read = _as_prompt(prompt)
    given = [n for n in ("text", "token_ids", "messages") if getattr(read, n) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"a prompt has exactly one of text, token_ids and messages, not {len(given)}",
            parameter="prompt",
            value=len(given),
        )
    for name in ("encoder_text", "encoder_token_ids", "decoder_text", "decoder_token_ids"):
        if getattr(read, name) is not None:
            raise InvalidRequestError(
                f"{name} is for encoder-decoder models, which are not built yet", parameter=name
            )
    merged: dict[str, list[Any]] = {}
    for source in (read.media, media):
        for modality, items in source.items():
            if not isinstance(items, list | tuple):
                raise InvalidRequestError(
                    f"{modality}s must be a list, not {type(items).__name__}",
                    parameter=f"{modality}s",
                    value=type(items).__name__,
                )
            merged.setdefault(modality, []).extend(items)
    merged = {modality: items for modality, items in merged.items() if items}
    if merged and read.messages is not None:
        raise InvalidRequestError(
            "chat messages carry their media in their parts; give none beside them",
            parameter=f"{next(iter(merged))}s",
        )
    return replace(read, media=merged)


def _as_prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if hasattr(prompt, "tolist"):  # an array or a tensor of ids
        return Prompt(token_ids=prompt.tolist())
    if isinstance(prompt, list | tuple):
        if prompt and isinstance(prompt[0], Mapping):
            return Prompt(messages=prompt)
        return Prompt(token_ids=prompt)
    raise InvalidRequestError(
        f"prompt must be text, token ids, chat messages or a Prompt, not {type(prompt).__name__}",
        parameter="prompt",
        value=type(prompt).__name__,
    )
