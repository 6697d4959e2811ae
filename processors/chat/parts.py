"""Media in the parts of chat messages: the keys that hold them, and parts that others fill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from aioengine.errors import InvalidRequestError, PlaceholderMismatchError

__all__ = ["PARTS", "ChatMedia", "fill_parts", "invalid", "part_text", "read_item", "wrong"]

PARTS = {
    "image": "image",
    "image_url": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
}
"""Type of a message's part -> modality."""
CONTENT = ("url", "path", "base64", "data")
"""Keys of a part's content, beside its modality and type."""


@dataclass(frozen=True, kw_only=True)
class ChatMedia:
    """One media item of a conversation, as the caller gave it.

    `parameter` is its place in the caller's words; `trusted`: given as an object by the
    application, not as a string that may have come from its users. `uuid`: the caller's own name.
    """

    item: Any
    parameter: str
    trusted: bool
    uuid: str | None = None


def fill_parts(media: dict[str, list[ChatMedia]], given: Mapping[str, Sequence[ChatMedia]]) -> None:
    """Give the parts without content or uuid the items that stand beside the messages."""
    for modality in {**media, **given}:
        found, items = media.get(modality, []), given.get(modality, ())
        bare = [i for i, part in enumerate(found) if part.item is None and part.uuid is None]
        if len(bare) != len(items):
            counts = f"the messages have {len(bare)} {modality} parts without content, "
            message = f"{counts}for which {modality}s gives {len(items)} items"
            parameter = f"{modality}s"
            if not items:
                parameter = found[bare[0]].parameter
                keys = ", ".join((modality, *CONTENT))
                message = f"{parameter} has neither content ({keys}) nor a uuid: {message}"
            raise PlaceholderMismatchError(message, parameter=parameter, value=len(items))
        for place, item in zip(bare, items, strict=True):
            found[place] = item


def read_item(part: Mapping[Any, Any], modality: str, path: str) -> Any:
    """The media item of a part, in any of the forms that OpenAI's and HF's messages have.

    None where it has none.
    """
    kind = part["type"]
    keys = (modality, f"{modality}_url", *CONTENT) if kind == modality else (kind,)
    named = [key for key in keys if part.get(key) is not None]
    if len(named) > 1:
        raise invalid(path, f"has content under {' and '.join(named)}; give one")
    if not named:
        return None
    key = named[0]
    item, name = part[key], f"{path}.{key}"
    if key == "input_audio":
        if not isinstance(item, Mapping):
            raise wrong(name, "a mapping with data and format", item)
        sound = part_text(item.get("format", ""), f"{name}.format")
        return _from_base64(item.get("data"), f"audio/{sound}", f"{name}.data")
    if key in ("base64", "data"):
        is_bytes = isinstance(item, bytes | bytearray | memoryview) and key == "data"
        return item if is_bytes else _from_base64(item, f"{modality}/*", name)
    if key == modality:
        is_link = isinstance(item, Mapping) and not item.keys() & {"bytes", "path", "array"}
        return item.get("url", item) if is_link else item
    if isinstance(item, Mapping) and key != "path":
        item = item.get("url")
    if item is not None and not isinstance(item, str | (PurePath if key == "path" else str)):
        raise wrong(name, "a mapping with a url" if key != "path" else "a path", item)
    return item


def _from_base64(data: object, kind: str, path: str) -> str:
    text = part_text(data, path)
    return text if text[:5].lower() == "data:" else f"data:{kind};base64,{text}"


def part_text(value: object, path: str) -> str:
    """Return the text at a path of the messages. Raises InvalidRequestError for anything else."""
    if not isinstance(value, str):
        raise wrong(path, "text", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(path, "is not valid Unicode (it has lone surrogates)") from None
    return value


def wrong(path: str, wanted: str, value: object) -> InvalidRequestError:
    """The error for a value of another kind than what is wanted."""
    kind = type(value).__name__
    return invalid(path, f"must be {wanted}, not {kind}", kind)


def invalid(path: str, reason: str, value: object = None) -> InvalidRequestError:
    """The error for what stands at a path of the messages."""
    return InvalidRequestError(f"{path} {reason}", parameter=path, value=value)
