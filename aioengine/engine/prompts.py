"""The forms in which a caller may give a prompt, read into one; and a check of the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aioengine.errors import InvalidRequestError, UnsupportedModalityError
from aioengine.processors.mm_kwargs import copy_options
from aioengine.sampling_params import SamplingParams
from aioengine.types import Prompt

__all__ = ["PromptLike", "check_arguments", "count_least", "read_prompt"]

MAX_MODALITY_CHARACTERS = 40

FORMS = ("text", "token_ids", "messages")
"""What a prompt has exactly one of."""
HALVES = ("encoder_text", "encoder_token_ids", "decoder_text", "decoder_token_ids")
"""What of a prompt is for encoder-decoder models."""
TOKEN_IDS = ("token_ids", "encoder_token_ids", "decoder_token_ids")
FIELDS: tuple[tuple[Sequence[str], Any, str], ...] = (
    (("text", "encoder_text", "decoder_text", "cache_salt"), str | None, "text"),
    (TOKEN_IDS, Sequence | None, "a sequence of token ids"),
    (("messages",), Sequence | None, "a list of messages"),
    (("media", "uuids"), Mapping, "a mapping from modality to a list"),
    (("mm_processor_kwargs",), Mapping, "a mapping"),
)
"""Fields of a prompt, their type, and the same in words."""

PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]] | Prompt


def read_prompt(prompt: PromptLike, media: Mapping[str, Sequence[Any]]) -> Prompt:
    """Any accepted form of a prompt as a `Prompt`, with `media` added to its own.

    Raises InvalidRequestError.
    """
    read = _as_prompt(prompt)
    _check_fields(read)
    given = [name for name in FORMS if getattr(read, name) is not None]
    halves = [name for name in HALVES if getattr(read, name) is not None]
    if len(given) > 1 or not (given or halves or any(read.media.values()) or any(media.values())):
        message = f"a prompt has exactly one of text, token_ids and messages, not {len(given)}"
        raise InvalidRequestError(message, parameter="prompt", value=len(given))
    for half in ("encoder", "decoder"):
        if f"{half}_text" in halves and f"{half}_token_ids" in halves:
            message = f"give {half}_text or {half}_token_ids, not both"
            raise InvalidRequestError(message, parameter=f"{half}_text")
    merged = _merge(read.media, media)
    if merged and read.messages is not None:
        message = "chat messages carry their media in their parts; give none beside them"
        raise InvalidRequestError(message, parameter=f"{next(iter(merged))}s")
    return replace(read, media=merged, mm_processor_kwargs=copy_options(read.mm_processor_kwargs))


def count_least(prompt: Prompt) -> tuple[int, int]:
    """Characters of the longest text, or of all in the messages, and what counts as a token.

    That is each token id, media item, message and part of a message: an empty part may become none,
    but costs as much to read. Of messages, what has their form is counted.
    """
    texts = prompt.text, prompt.encoder_text, prompt.decoder_text
    characters = max(len(text or "") for text in texts)
    token_ids = prompt.token_ids, prompt.encoder_token_ids, prompt.decoder_token_ids
    others = max(len(ids or ()) for ids in token_ids) + sum(map(len, prompt.media.values()))
    for message in prompt.messages or ():
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list | tuple) else ()
        others += 1 + len(parts)
        for part in parts or [content]:
            text = part.get("text") if isinstance(part, Mapping) else part
            characters += len(text) if isinstance(text, str) else 0
    return characters, others


def check_arguments(params: object, request_id: object, priority: object) -> None:
    """Raise InvalidRequestError for arguments of the wrong kind."""
    if not isinstance(params, SamplingParams | None):
        raise _wrong("params", "SamplingParams", params)
    if not isinstance(request_id, str | None):
        raise _wrong("request_id", "text", request_id)
    if not isinstance(priority, int):
        raise _wrong("priority", "an integer", priority)


def _as_prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, Prompt):
        given = {name: getattr(prompt, name) for name in TOKEN_IDS}
        # Arrays or tensors of ids.
        return replace(prompt, **{k: ids.tolist() for k, ids in given.items() if _is_array(ids)})
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if _is_array(prompt):
        return Prompt(token_ids=prompt.tolist())
    if isinstance(prompt, list | tuple):
        if prompt and isinstance(prompt[0], Mapping):
            return Prompt(messages=prompt)
        return Prompt(token_ids=prompt)
    raise _wrong("prompt", "text, token ids, chat messages or a Prompt", prompt)


def _is_array(value: object) -> bool:
    return hasattr(value, "tolist")


def _check_fields(prompt: Prompt) -> None:
    """Refuse fields of the wrong kind, which would surface later and further from the caller."""
    for names, kind, wanted in FIELDS:
        for name in names:
            value, is_form = getattr(prompt, name), name in FORMS
            parameter = "prompt" if is_form else name
            if not isinstance(value, kind):
                raise _wrong(parameter, f"made of {wanted}" if is_form else wanted, value)
            if kind == Sequence | None and isinstance(value, str | bytes):
                raise _wrong(parameter, f"made of a sequence as {name}", value)
    for modality, uuids in prompt.uuids.items():
        if not isinstance(uuids, list | tuple) or not all(isinstance(u, str | None) for u in uuids):
            raise _wrong("uuids", f"a list of text or None for {modality!r:.40}", uuids)


def _merge(*sources: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Modality -> items of all sources; modalities without items are left out."""
    merged: dict[str, list[Any]] = {}
    for source in sources:
        for modality, items in source.items():
            if not isinstance(modality, str) or len(modality) > MAX_MODALITY_CHARACTERS:
                message = f"media has a key that is no modality: {modality!r:.40}"
                raise UnsupportedModalityError(message, parameter="media")
            if not isinstance(items, list | tuple):
                raise _wrong(f"{modality}s", "a list", items)
            merged.setdefault(modality, []).extend(items)
    return {modality: items for modality, items in merged.items() if items}


def _wrong(parameter: str, wanted: str, value: object) -> InvalidRequestError:
    kind = type(value).__name__
    return InvalidRequestError(
        f"{parameter} must be {wanted}, not {kind}", parameter=parameter, value=kind
    )
