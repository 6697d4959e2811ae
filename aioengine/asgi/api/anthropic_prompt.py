"""Conversations in Anthropic's form as prompts, and the places in them by which errors are told.

A user's message holds the results of tools, which become messages of their own before it, and the
system's prompt comes first: so the engine counts other messages than the client does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from aioengine.asgi.api.asks import flag, prompt_options, wrong
from aioengine.asgi.api.chat import FUNCTION, MAX_MESSAGES, MAX_PARTS
from aioengine.asgi.api.fields import (
    BLOCKS,
    CACHED,
    Fields,
    Handling,
    done,
    ignored,
    known,
    refused,
)
from aioengine.errors import InvalidRequestError, shown
from aioengine.types import Prompt

__all__ = ["BLOCK_FIELDS", "TOOL", "read_prompt"]

KINDS = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "tool": ("text", "image"),
}
"""Types of blocks by the role of the message that has them; the last is a tool's result."""
BLOCK: Fields = {"type": done(), "cache_control": CACHED}
TOOLSET = refused("there are no sets of tools")
BLOCK_FIELDS: Mapping[str, Fields] = {
    "text": {**BLOCK, "text": done(), "citations": refused("no documents are cited", [])},
    "image": {**BLOCK, "source": done(), "transformations": refused("images stay as they are")},
    "tool_use": {
        **BLOCK,
        **dict.fromkeys(("id", "name", "input"), done()),
        "caller": refused("calls are the model's own", {"type": "direct"}),
        "toolset_name": TOOLSET,
    },
    "tool_result": {
        **BLOCK,
        **dict.fromkeys(("tool_use_id", "content", "is_error"), done()),
        "toolset_name": TOOLSET,
    },
    "thinking": {**BLOCK, "thinking": done(), "signature": ignored("none is asked for")},
    "redacted_thinking": {**BLOCK, "data": ignored("nobody here can read it")},
}
"""Type of a block -> its fields."""
SOURCE: Fields = {
    "type": done("`base64` or `url`"),
    "data": done(),
    "url": done(),
    "media_type": ignored("an image's first bytes tell"),
}
"""Of an image's block."""
TOOL: Fields = {
    "type": done("`custom`"),
    **dict.fromkeys(("name", "description", "input_schema"), done()),
    "strict": FUNCTION["strict"],
    "eager_input_streaming": done("gives arguments as they are written"),
    "cache_control": CACHED,
    "defer_loading": refused("the model sees all tools", False),
    "allowed_callers": refused("only the model calls tools", ["direct"]),
    "input_examples": refused("put them into description", []),
}
MESSAGE = {"role": done(), "content": done()}
CHOICE = dict.fromkeys(("type", "name", "disable_parallel_tool_use"), done())
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
PREFILL = "an answer begins anew; end with a user's message"


class Block(NamedTuple):
    """A block of a message, its type, and its place in the body."""

    kind: str
    value: Mapping[str, Any]
    place: str


def read_prompt(given: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[Prompt, dict[str, str]]:
    """The prompt that fields of a body make, and place in the prompt -> place in the body.

    `own`: values for the chat template; those of the client go first. Raises InvalidRequestError.
    """
    messages = given.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise wrong("messages", f"a list of 1 to {MAX_MESSAGES} messages")
    talk = _Conversation()
    if "system" in given:
        talk.add("system", given["system"], "system")
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, dict):
            raise wrong(place, "an object with role and content")
        message = known(message, MESSAGE, f"{place}.")
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise wrong(f"{place}.role", "user, assistant or system")
        talk.add(role, message.get("content"), f"{place}.content")
    if messages[-1]["role"] == "assistant":
        raise wrong(f"messages[{len(messages) - 1}]", f"no message of the assistant's: {PREFILL}")
    options = given.get("chat_template_kwargs", {})
    if not isinstance(options, dict):
        raise wrong("chat_template_kwargs", "an object")
    prompt = Prompt(
        messages=talk.messages,
        tools=_read_tools(given.get("tools", []), talk.places),
        tool_choice=_read_choice(given.get("tool_choice")),
        chat_template_kwargs={**own, **options},
        **prompt_options(given),
    )
    return prompt, talk.places


class _Conversation:
    """Messages as the engine takes them. `places`: those in them -> those in the body."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}

    def add(self, role: str, content: Any, place: str) -> None:
        """Add a message of the client's, which may become several."""
        blocks = _read_blocks(content, role, place)
        if role == "assistant":
            self._add_answer(blocks, place)
            return
        if role == "system":
            self._put({"role": role, "content": "\n".join(map(_text, blocks))}, place)
            return
        for block in blocks:
            if block.kind == "tool_result":
                self._add_result(block)
        rest = [block for block in blocks if block.kind != "tool_result"]
        if rest or not blocks:
            self._add_parts({"role": role}, rest, place, is_text=isinstance(content, str))

    def _add_answer(self, blocks: list[Block], place: str) -> None:
        """Add what the model has said, thought and called; each is one text, or one list."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(_text(block) for block in blocks if block.kind == "text"),
        }
        thoughts = [_text(block, "thinking") for block in blocks if block.kind == "thinking"]
        if any(thoughts):
            message["reasoning_content"] = "".join(thoughts)
        calls = [block for block in blocks if block.kind == "tool_use"]
        if calls:
            message["tool_calls"] = [_call(block) for block in calls]
        path = self._put(message, place)
        for number, block in enumerate(calls):
            name = f"{path}.tool_calls[{number}]"
            self.places[name] = self.places[f"{name}.function"] = block.place
            self.places[f"{name}.function.arguments"] = f"{block.place}.input"

    def _add_result(self, result: Block) -> None:
        """Add the result of a tool; one that is an error says so in its text."""
        content, place = result.value.get("content"), f"{result.place}.content"
        blocks = _read_blocks("" if content is None else content, "tool", place)
        message = {"role": "tool", "tool_call_id": result.value.get("tool_use_id")}
        if message["tool_call_id"] is None:
            raise wrong(f"{result.place}.tool_use_id", "the id of a call")
        if flag(result.value, "is_error", f"{result.place}."):
            blocks.insert(0, Block("text", {"text": "Error: "}, place))
        path = self._add_parts(message, blocks, place, is_text=False)
        self.places[f"{path}.tool_call_id"] = f"{result.place}.tool_use_id"

    def _add_parts(
        self, message: dict[str, Any], blocks: list[Block], place: str, *, is_text: bool
    ) -> str:
        """Add a message of texts and images. A result without images is text for all templates."""
        is_text |= message["role"] == "tool" and all(each.kind == "text" for each in blocks)
        if is_text:
            return self._put({**message, "content": "".join(map(_text, blocks))}, place)
        parts = [_image(each) if each.kind == "image" else _text_part(each) for each in blocks]
        path = self._put({**message, "content": parts}, place)
        for number, block in enumerate(blocks):
            self.places[f"{path}.content[{number}]"] = block.place
        return path

    def _put(self, message: dict[str, Any], place: str) -> str:
        path = f"messages[{len(self.messages)}]"
        self.messages.append(message)
        self.places[f"{path}.content"] = place
        self.places[path] = place.removesuffix(".content")
        return path


def _read_blocks(content: Any, role: str, place: str) -> list[Block]:
    """The blocks of a content, text among them as it is given. Refuses those that are not built."""
    if isinstance(content, str):
        return [Block("text", {"text": content}, place)] if content else []
    if not isinstance(content, list) or len(content) > MAX_PARTS:
        raise wrong(place, f"text or a list of {MAX_PARTS} blocks at most")
    blocks = []
    for index, value in enumerate(content):
        path = f"{place}[{index}]"
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            raise wrong(path, "a block with a type")
        field = BLOCKS.get(kind)
        if field is not None and field.handling is Handling.REFUSED:
            text = f"{path} has the type {kind}, which is not supported: {field.note}"
            raise InvalidRequestError(text, parameter=path)
        if kind not in KINDS[role]:
            text = f"{path} has the type {shown(kind, 40)}; supported: {', '.join(KINDS[role])}"
            raise InvalidRequestError(text, parameter=path)
        blocks.append(Block(kind, known(value, BLOCK_FIELDS[kind], f"{path}."), path))
    return blocks


def _text(block: Block, key: str = "text") -> str:
    text = block.value.get(key)
    if not isinstance(text, str):
        raise wrong(f"{block.place}.{key}" if "type" in block.value else block.place, "text")
    return text


def _text_part(block: Block) -> dict[str, Any]:
    return {"type": "text", "text": _text(block)}


def _image(block: Block) -> dict[str, Any]:
    """An image as a part; its base64 may have been decoded as the body was read."""
    source, place = block.value.get("source"), f"{block.place}.source"
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("base64", "url"):
        raise wrong(place, "an object of type base64 or url; no files are kept here")
    source = known(source, SOURCE, f"{place}.")
    item = source.get("data" if kind == "base64" else "url")
    if not isinstance(item, str | bytes):
        raise wrong(f"{place}.{'data' if kind == 'base64' else 'url'}", "text")
    if kind == "base64" or isinstance(item, bytes):
        return {"type": "image", "data": item}
    return {"type": "image_url", "image_url": {"url": item}}


def _call(block: Block) -> dict[str, Any]:
    value = block.value
    function = {"name": value.get("name"), "arguments": value.get("input", {})}
    return {"id": value.get("id"), "type": "function", "function": function}


def _read_tools(tools: Any, places: dict[str, str]) -> list[dict[str, Any]]:
    """The tools as functions. Refuses those whose schemas Anthropic's models alone know."""
    if not isinstance(tools, list):
        raise wrong("tools", "a list of tools")
    read = []
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise wrong(path, "an object with a name and an input_schema")
        kind = tool.get("type")
        if kind not in (None, "custom"):
            text = f"{path} has the type {shown(kind, 40)}, a tool of Anthropic's own, which is not"
            text += " supported; describe one of yours by a name and an input_schema"
            raise InvalidRequestError(text, parameter=path)
        tool = known(tool, TOOL, f"{path}.")
        if not isinstance(tool.get("input_schema"), dict):
            raise wrong(f"{path}.input_schema", "a JSON schema")
        function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
        function |= {name: tool[name] for name in ("description", "strict") if name in tool}
        read.append({"type": "function", "function": function})
        places[f"{path}.function"] = path
        places[f"{path}.function.parameters"] = f"{path}.input_schema"
    return read


def _read_choice(choice: Any) -> Any:
    if choice is None:
        return None
    if isinstance(choice, dict):
        choice = known(choice, CHOICE, "tool_choice.")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool" and isinstance(choice.get("name"), str):
        return {"name": choice["name"]}
    if not isinstance(kind, str) or kind not in CHOICES:
        raise wrong("tool_choice", f"of type {', '.join(CHOICES)}, or tool with a name")
    return CHOICES[kind]
