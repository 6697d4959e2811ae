"""Items of the Responses API to messages of a conversation, and the places where each came from.

What the model did in one turn is several items (what it thought, said and called), and one message
to a chat template.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from aioengine.asgi.api.asks import wrong
from aioengine.asgi.api.fields import done, known
from aioengine.errors import InvalidRequestError, shown

__all__ = ["Conversation", "read_items", "without_bytes"]

MAX_ITEMS = MAX_PARTS = 4096
PIECE = 3 << 16
"""Bytes that are written in base64 at once, which holds the GIL."""
ITEMS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output", "name"),
    "reasoning": ("content", "summary", "encrypted_content"),
}
"""Kind of an item -> its fields."""
TEXTS = {"input_text": ("text",), "output_text": ("text",), "refusal": ("refusal",)}
"""Kind of a part that is text -> its field."""
PARTS = {
    **TEXTS,
    "input_image": ("image_url", "file_id"),
    "input_audio": ("input_audio",),
}
AUDIO = {"data": done(), "format": done()}
THOUGHTS = {"reasoning_text": ("text",)}
IGNORED = frozenset(
    {*("type", "id", "status", "phase", "detail", "annotations", "logprobs", "parsed")}
    | {*("parsed_arguments", "prompt_cache_breakpoint")}
)
"""Fields that answers have, or hints: they change nothing."""
REASONS = {
    "input_file": "files are not read; give their text as input_text, images as input_image",
    "item_reference": "give the item itself, or previous_response_id",
}
ROLES = ("user", "assistant", "system", "developer")
EARLIER = "previous_response_id"
STEP = re.compile(r"[.\[]")


class Conversation:
    """Messages that items add up to. `places`: path in the messages -> path in the request."""

    def __init__(self, instructions: str | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places = {"messages": "input"}
        self._call_ids: set[str] = set()
        self._texts: dict[tuple[int, str], list[str]] = {}
        """Number of a message and its field -> texts that several items add to it."""
        if instructions is not None:
            self._add({"role": "system", "content": instructions}, "instructions")
            self.places["messages[0].content"] = "instructions"

    def place(self, parameter: str) -> str:
        """The client's words for a path in the messages; any other is its own.

        What was wrong with an earlier item is the fault of the field that named it.
        """
        ends = [len(parameter), *(found.start() for found in STEP.finditer(parameter))]
        for end in sorted(ends, reverse=True):
            place = self.places.get(parameter[:end])
            if place is not None:
                return EARLIER if place.startswith(EARLIER) else place + parameter[end:]
        return parameter

    def add(self, item: Any, path: str) -> None:
        """Go on with an item. Raises InvalidRequestError."""
        kind = _kind(item, path, ITEMS, "message" if _has_role(item) else None)
        if kind == "message":
            self._add_message(item, path)
        elif kind == "function_call":
            self._add_call(item, path)
        elif kind == "reasoning":
            self._add_reasoning(item, path)
        else:
            self._add_output(item, path)

    def _add(self, message: dict[str, Any], path: str) -> str:
        """Add a message, and return its own path."""
        own = f"messages[{len(self.messages)}]"
        self.messages.append(message)
        self.places[own] = path
        return own

    def _turn(self, path: str) -> tuple[dict[str, Any], str]:
        """The model's message that an item is a part of, and its path."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1], f"messages[{len(self.messages) - 1}]"
        message = {"role": "assistant", "content": ""}
        return message, self._add(message, path)

    def join(self) -> Conversation:
        """Write the texts that several items add to, all at once: thousands take long otherwise."""
        for (number, key), texts in self._texts.items():
            self.messages[number][key] = "\n".join(text for text in texts if text)
        return self

    def _append(self, key: str, text: str) -> None:
        """Add a text to the last message."""
        self._texts.setdefault((len(self.messages) - 1, key), []).append(text)

    def _add_message(self, item: Mapping[str, Any], path: str) -> None:
        role, content = item.get("role"), item.get("content")
        if role not in ROLES:
            raise wrong(f"{path}.role", f"one of {', '.join(ROLES)}")
        if role == "assistant":
            _, own = self._turn(path)
            self._append("content", _read_text(content, f"{path}.content", TEXTS))
        else:
            message = {"role": role, "content": ""}
            own = self._add(message, path)
            message["content"] = self._read_content(content, f"{path}.content", own)
        self.places[f"{own}.content"] = f"{path}.content"

    def _add_reasoning(self, item: Mapping[str, Any], path: str) -> None:
        """Add what the model has thought. Summaries, and what others have encrypted, are not it."""
        thoughts = item.get("content") or []
        text = _read_text(thoughts, f"{path}.content", THOUGHTS)
        if text:
            _, own = self._turn(path)
            self._append("reasoning_content", text)
            self.places[f"{own}.reasoning_content"] = f"{path}.content"

    def _add_call(self, item: Mapping[str, Any], path: str) -> None:
        call_id, name, arguments = (
            _text(item.get(key), f"{path}.{key}") for key in ("call_id", "name", "arguments")
        )
        message, own = self._turn(path)
        calls = message.setdefault("tool_calls", [])
        own = f"{own}.tool_calls[{len(calls)}]"
        self.places |= {own: path, f"{own}.function": path, f"{own}.id": f"{path}.call_id"}
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
        self._call_ids.add(call_id)

    def _add_output(self, item: Mapping[str, Any], path: str) -> None:
        call_id = item.get("call_id")
        if not isinstance(call_id, str) or call_id not in self._call_ids:
            raise wrong(f"{path}.call_id", "the call_id of an earlier function_call")
        message: dict[str, Any] = {"role": "tool", "tool_call_id": call_id, "content": ""}
        own = self._add(message, path)
        content = self._read_content(item.get("output"), f"{path}.output", own)
        if isinstance(content, list) and all(part["type"] == "text" for part in content):
            content = "\n".join(part["text"] for part in content)  # not all templates read parts
        message["content"] = content
        self.places |= {f"{own}.content": f"{path}.output", f"{own}.tool_call_id": path}

    def _read_content(self, content: Any, path: str, own: str) -> str | list[dict[str, Any]]:
        """Read the text or the parts of a message, whose own path is `own`."""
        if isinstance(content, str):
            return content
        parts = []
        for index, part in enumerate(_list(content, path, MAX_PARTS, "parts")):
            place = f"{path}[{index}]"
            read, key = _read_part(part, place)
            parts.append(read)
            self.places[f"{own}.content[{index}]"] = f"{place}.{key}" if key else place
        return parts


def read_items(
    given: Any, instructions: str | None = None, earlier: Sequence[Any] = ()
) -> Conversation:
    """Read a request's `input`. Raises InvalidRequestError, with the place as parameter.

    `earlier`: items of the response before it.
    """
    conversation = Conversation(instructions)
    for item in earlier:
        conversation.add(item, EARLIER)
    if isinstance(given, str):
        own = conversation._add({"role": "user", "content": given}, "input")
        conversation.places[f"{own}.content"] = "input"
        return conversation.join()
    for index, item in enumerate(_list(given, "input", MAX_ITEMS, "items")):
        conversation.add(item, f"input[{index}]")
    return conversation.join()


def without_bytes(value: Any) -> Any:
    """A copy of items in which media that were decoded with the body are `data:` URLs again."""
    if isinstance(value, bytes):
        pieces = (value[start : start + PIECE] for start in range(0, len(value), PIECE))
        return "data:application/octet-stream;base64," + "".join(
            b64encode(piece).decode() for piece in pieces
        )
    if isinstance(value, dict):
        return {key: without_bytes(child) for key, child in value.items()}
    if isinstance(value, list):
        return [without_bytes(child) for child in value]
    return value


def _read_part(part: Any, path: str) -> tuple[dict[str, Any], str]:
    """A part as chat messages have it, and the field that its content is in."""
    kind = _kind(part, path, PARTS)
    if kind in TEXTS:
        (key,) = TEXTS[kind]
        return {"type": "text", "text": _text(part.get(key), f"{path}.{key}")}, ""
    if kind == "input_audio":
        audio = part.get("input_audio")
        if isinstance(audio, dict):
            known(audio, AUDIO, f"{path}.input_audio.")
        data = audio.get("data") if isinstance(audio, dict) else None
        if isinstance(data, bytes):
            return {"type": "audio", "audio": data}, "input_audio"
        return {"type": "input_audio", "input_audio": audio}, ""
    if part.get("file_id") is not None:
        message = f"{path}.file_id is not supported: no files are kept here; give image_url"
        raise InvalidRequestError(message, parameter=f"{path}.file_id")
    url = part.get("image_url")
    if isinstance(url, bytes):
        return {"type": "image", "image": url}, "image_url"
    if not isinstance(url, str):
        raise wrong(f"{path}.image_url", "a data: or http(s) URL")
    return {"type": "image_url", "image_url": {"url": url}}, "image_url"


def _read_text(content: Any, path: str, kinds: Mapping[str, Sequence[str]]) -> str:
    """Read a text, or parts that are nothing else."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(_list(content, path, MAX_PARTS, "parts")):
        place = f"{path}[{index}]"
        (key,) = kinds[_kind(part, place, kinds)]
        texts.append(_text(part.get(key), f"{place}.{key}"))
    return "".join(texts)


def _kind(value: Any, path: str, known: Mapping[str, Sequence[str]], default: Any = None) -> str:
    """The type of an item or a part, which has no other fields than it may have."""
    if not isinstance(value, dict):
        raise wrong(path, f"an object with a type: {', '.join(known)}")
    kind = value.get("type", default)
    if not isinstance(kind, str) or kind not in known:
        reason = REASONS.get(kind) if isinstance(kind, str) else None
        way_out = reason or f"give one of {', '.join(known)}"
        message = f"{path}.type {shown(kind, 40)} is not supported: {way_out}"
        raise InvalidRequestError(message, parameter=f"{path}.type")
    for name, field in value.items():
        if name not in known[kind] and name not in IGNORED and field is not None:
            message = f"{path} has a field that is not supported in {kind}: {shown(name, 40)}"
            raise InvalidRequestError(message, parameter=f"{path}.{name:.40}")
    return kind


def _has_role(item: Any) -> bool:
    """Return whether an item without a type is a message, as clients may write it."""
    return isinstance(item, dict) and "role" in item


def _list(value: Any, path: str, most: int, what: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise wrong(path, f"text, or a list of {most} {what} at most")
    return value


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise wrong(path, "text")
    return value
