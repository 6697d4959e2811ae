"""Media as callers give them to a request: one item or many, made a list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePath
from typing import Any

from aioengine.errors import InvalidRequestError, is_real
from aioengine.media_pipeline.items import MediaInput
from aioengine.processors.prompt.chat_parts import ChatMedia
from aioengine.types import Prompt

__all__ = ["FromPrompt", "as_items", "fillings", "list_media"]

BATCH_DIMENSIONS = {"image": 4, "video": 5}
"""Of an array that holds several items, along its first axis."""
MAX_ITEMS = 1 << 16
"""Taken from what may go on for ever."""


@dataclass(frozen=True, slots=True)
class FromPrompt:
    """An item of a prompt in the form of a mapping, whose text is as little trusted as messages."""

    item: Any


def as_items(modality: str, given: Any) -> list[Any]:
    """The items in what a caller gave for a modality: one, None, or any iterable of them.

    An iterator is run through at once. Arrays of numbers are one item, unless they have one
    dimension more than one has. Raises InvalidRequestError.
    """
    name = f"{modality}s"
    if given is None:
        return []
    if _is_one(modality, given):
        return [given]
    if isinstance(given, list):
        return given
    if isinstance(given, Set) or hasattr(given, "__aiter__"):
        kind = type(given).__name__
        message = f"{name} must be an item or a list of them, in order, not {kind}"
        raise InvalidRequestError(message, parameter=name, value=kind)
    items = list(islice(given, MAX_ITEMS + 1))
    if len(items) > MAX_ITEMS:
        message = f"{name} has more than {MAX_ITEMS} items"
        raise InvalidRequestError(message, parameter=name, value=MAX_ITEMS)
    return items


def _is_one(modality: str, given: Any) -> bool:
    """Return whether it is an item itself. Looks at what it can do, and imports no library."""
    if isinstance(given, str | bytes | bytearray | memoryview | Mapping):
        return True
    if isinstance(given, list | tuple):
        # Samples and their rate. A list of two may be anything.
        is_pair = modality == "audio" and isinstance(given, tuple) and len(given) == 2
        return (is_pair and is_real(given[1])) or (is_pair and getattr(given[1], "ndim", None) == 0)
    if (num_dimensions := getattr(given, "ndim", None)) is not None and hasattr(given, "dtype"):
        if getattr(given.dtype, "kind", "") in "OSU" and num_dimensions == 1:
            return False  # an array or a Series of objects
        return bool(num_dimensions != BATCH_DIMENSIONS.get(modality))
    if hasattr(given, "__aiter__") or isinstance(given, Set):
        return False
    is_file = any(callable(getattr(given, name, None)) for name in ("read", "as_py"))
    is_upload = callable(getattr(getattr(given, "file", None), "read", None))
    return is_file or is_upload or not isinstance(given, Iterable) or _shares_bytes(given)


def _shares_bytes(given: Any) -> bool:
    """Return whether it is a buffer, as an `mmap` or Arrow's."""
    try:
        return memoryview(given).itemsize == 1
    except TypeError:
        return False


def list_media(prompt: Prompt) -> list[MediaInput]:
    """Return the items of a prompt whose media are lists. Raises InvalidRequestError."""
    media = []
    for modality, items in prompt.media.items():
        uuids: Sequence[str | None] = prompt.uuids.get(modality) or [None] * len(items)
        if len(uuids) != len(items):
            message = f"uuids[{modality!r}] has {len(uuids)} entries for {len(items)} items"
            raise InvalidRequestError(message, parameter="uuids", value=len(uuids))
        for index, (item, uuid) in enumerate(zip(items, uuids, strict=True)):
            name = f"{modality}s[{index}]"
            trusted = True
            if isinstance(item, FromPrompt):
                item = item.item
                trusted = isinstance(item, PurePath)
            media.append(MediaInput(modality, index, item, name, trusted, uuid))
    return media


def fillings(prompt: Prompt) -> dict[str, list[ChatMedia]]:
    """Modality -> the items for a conversation's parts without content."""
    given: dict[str, list[ChatMedia]] = {}
    for each in list_media(prompt):
        found = ChatMedia(
            item=each.item, parameter=each.parameter, trusted=each.trusted, uuid=each.uuid
        )
        given.setdefault(each.modality, []).append(found)
    return given
