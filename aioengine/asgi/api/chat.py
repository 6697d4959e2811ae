"""chat/completions: conversations in, messages out, whole and in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aioengine.asgi.api.answers import ChoicesAnswer, position_entry
from aioengine.asgi.api.asks import Ask, flag, make_ask, prompt_options, wrong
from aioengine.asgi.api.fields import CACHED, CHAT, Fields, done, ignored, known, refused
from aioengine.types import (
    CompletionOutput,
    Delta,
    Message,
    Prompt,
    TokenLogprobs,
    ToolCallDelta,
)

__all__ = [
    "FUNCTION",
    "PARTS",
    "ChatAnswer",
    "check_conversation",
    "read_chat",
    "read_tools",
    "template_options",
]

MAX_MESSAGES = MAX_PARTS = 4096
MAX_TOP_LOGPROBS = 20
MODALITIES = ("image", "audio", "video")
MEDIA_PARTS = {f"{each}_url": each for each in MODALITIES} | {"input_audio": "audio"}
CONTENT = ("url", "path", "base64", "data")
HINTS: Fields = {
    "type": done(),
    "cache_control": CACHED,
    "prompt_cache_breakpoint": CACHED,
    "uuid": refused("a name of your own is taken in the process only"),
}
PARTS: Mapping[str, Fields] = {
    "text": {**HINTS, "text": done()},
    "input_audio": {**HINTS, "input_audio": done("`data` and `format`")},
    **{f"{kind}_url": {**HINTS, f"{kind}_url": done("text, or its `url`")} for kind in MODALITIES},
    **{
        kind: {**HINTS, **dict.fromkeys((kind, f"{kind}_url", *CONTENT), done())}
        for kind in MODALITIES
    },
}
"""Type of a part of a message -> its fields."""
PART_CONTENT: Fields = {
    "url": done(),
    "data": done(),
    "format": done(),
    "detail": ignored("the model's processor decides"),
}
"""Of the object that a part holds its media in."""
CALL: Fields = {
    "id": done(),
    "type": done(),
    "function": done(),
    "index": ignored("calls are in their order"),
}
CALLED: Fields = {
    "name": done(),
    "arguments": done("as JSON, or as an object"),
    "parsed_arguments": ignored("`arguments` has the same"),
}
"""The function of a call."""
TOOL: Fields = {
    "type": done("`function`"),
    "function": done("may be left out: its fields stand in the tool then"),
    "cache_control": CACHED,
}
FUNCTION: Fields = {
    "name": done(),
    "description": done(),
    "parameters": done("a JSON schema"),
    "strict": done("holds where a tool has to be called"),
    "return": done("as transformers' schemas have it"),
}
CHOICE = dict.fromkeys(("type", "function", "name", "allowed_tools"), done())
ALLOWED = {"mode": done(), "tools": done()}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def read_chat(body: Mapping[str, Any]) -> Ask:
    """The body of chat/completions. Raises InvalidRequestError."""
    given = known(body, CHAT)
    conversation = check_conversation(given.get("messages"))
    if "max_completion_tokens" in given:
        given["max_tokens"] = given["max_completion_tokens"]
    wants = flag(given, "logprobs")
    num_top = given.get("top_logprobs", 0)
    if type(num_top) is not int or not 0 <= num_top <= MAX_TOP_LOGPROBS:
        raise wrong("top_logprobs", f"an integer, 0 to {MAX_TOP_LOGPROBS}")
    if num_top and not wants:
        raise wrong("logprobs", "true where top_logprobs is given")
    if "parallel_tool_calls" in given:
        flag(given, "parallel_tool_calls")
    tools, choice = _read_choice(given)
    prompt = Prompt(
        messages=conversation,
        tools=tools,
        tool_choice=choice,
        chat_template_kwargs=template_options(given),
        **prompt_options(given),
    )
    given.setdefault("max_tokens", None)
    return make_ask(given, (prompt,), num_top if wants else None)


def check_conversation(messages: Any) -> list[Any]:
    """The messages of a body without their empty fields. Raises InvalidRequestError."""
    if not isinstance(messages, list) or len(messages) > MAX_MESSAGES:
        raise wrong("messages", f"a list of {MAX_MESSAGES} messages at most")
    return [_read_message(message, i) for i, message in enumerate(messages)]


def template_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values that the chat template may ask for. Raises InvalidRequestError."""
    options, effort = given.get("chat_template_kwargs", {}), given.get("reasoning_effort")
    if not isinstance(options, dict):
        raise wrong("chat_template_kwargs", "an object")
    if effort is None:
        return options
    if effort not in EFFORTS:
        raise wrong("reasoning_effort", f"one of {', '.join(EFFORTS)}")
    thinks = effort != "none"
    own = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    return {**own, **options}


def _read_choice(given: Mapping[str, Any]) -> tuple[Any, Any]:
    """The tools, and which of them may be called; `allowed_tools` leaves the others out."""
    tools, choice = read_tools(given.get("tools", [])), given.get("tool_choice")
    if isinstance(choice, dict):
        choice = known(choice, CHOICE, "tool_choice.")
        if isinstance(choice.get("function"), dict):
            known(choice["function"], {"name": done()}, "tool_choice.function.")
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools, choice
    allowed = choice.get("allowed_tools")
    listed = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(allowed, dict) or not isinstance(listed, list):
        raise wrong("tool_choice.allowed_tools", "an object with mode and tools")
    known(allowed, ALLOWED, "tool_choice.allowed_tools.")
    if allowed.get("mode") not in ("auto", "required"):
        raise wrong("tool_choice.allowed_tools.mode", "auto or required")
    names = [_name(each) for each in listed]
    kept = [tool for tool in tools if _name(tool) in names] if isinstance(tools, list) else tools
    if not kept:
        raise wrong("tool_choice.allowed_tools.tools", "some of tools")
    return kept, allowed["mode"]


def _name(tool: Any) -> Any:
    """The name of a tool, None where it has none."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _read_message(message: Any, index: int) -> Any:
    """A message without its empty fields, which clients send back as they got them.

    What is no message is left to the chat template's reader, which knows how to refuse it.
    """
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    if isinstance(content, list) and len(content) > MAX_PARTS:
        raise wrong(f"messages[{index}].content", f"of {MAX_PARTS} parts at most")
    parts = content if isinstance(content, list) else []
    for number, part in enumerate(parts):
        parts[number] = _with_bytes(_read_part(part, f"messages[{index}].content[{number}]."))
    read = {
        name: value
        for name, value in message.items()
        if name in ("role", "content") or value not in (None, [])
    }
    if isinstance(calls := read.get("tool_calls"), list):
        path = f"messages[{index}].tool_calls"
        read["tool_calls"] = [_read_call(call, f"{path}[{i}].") for i, call in enumerate(calls)]
    return read


def _read_part(part: Any, path: str) -> Any:
    """A part with the fields alone that it may have; what is none is left to the same reader.

    A name of the caller's own (`uuid`) would be taken at its word, whoever else uses it.
    """
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if not isinstance(kind, str):
        raise wrong(f"{path}type", f"one of {', '.join(PARTS)}")
    if kind not in PARTS:
        return part
    read = known(part, PARTS[kind], path)
    if kind != "text" and read.keys() <= {"type"}:
        raise wrong(path + kind, "given")  # no items stand beside the messages
    if kind not in MEDIA_PARTS or not isinstance(content := read.get(kind), dict):
        return read
    content = known(content, PART_CONTENT, f"{path}{kind}.")
    if kind != "input_audio" and "url" not in content:
        raise wrong(f"{path}{kind}.url", "given")
    return {**read, kind: content}


def _read_call(call: Any, path: str) -> Any:
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    return {**known(call, CALL, path), "function": known(function, CALLED, f"{path}function.")}


def read_tools(tools: Any) -> Any:
    """The tools with the fields alone that they may have. Raises InvalidRequestError.

    What is no tool is left to the engine's reader, which knows how to refuse it.
    """
    if not isinstance(tools, list):
        return tools
    return [_read_tool(tool, f"tools[{index}].") for index, tool in enumerate(tools)]


def _read_tool(tool: Any, path: str) -> Any:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        return tool
    if "function" not in tool:
        return known(tool, {**TOOL, **FUNCTION}, path)
    read, function = known(tool, TOOL, path), tool["function"]
    if isinstance(function, dict):
        read["function"] = known(function, FUNCTION, f"{path}function.")
    return read


def _with_bytes(part: Any) -> Any:
    """A part whose base64 was decoded as the body was read, as one that holds the bytes."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in MEDIA_PARTS:
        return part
    item = part.get(kind)
    if isinstance(item, dict) and (kind != "input_audio" or isinstance(item.get("format"), str)):
        item = item.get("data" if kind == "input_audio" else "url")
    modality = MEDIA_PARTS[kind]
    return {"type": modality, modality: item} if isinstance(item, bytes) else part


class ChatAnswer(ChoicesAnswer):
    """Answers of chat/completions."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._is_single = self._ask.fields.get("parallel_tool_calls") is False
        self._calling: set[int] = set()
        """Completions that have called a tool."""

    def _first(self) -> Iterable[dict[str, Any]]:
        return ({"delta": {"role": "assistant", "content": ""}, "finish_reason": None},)

    def _content(self, output: CompletionOutput) -> dict[str, Any]:
        said = output.message or Message(output.text)
        calls = said.tool_calls[: 1 if self._is_single else None]
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if not calls:
            return {"message": message, "finish_reason": output.finish_reason}
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
        message["content"] = said.content or None
        return {"message": message, "finish_reason": _reason(output.finish_reason)}

    def _addition(self, index: int, delta: Delta) -> dict[str, Any]:
        added: dict[str, Any] = {}
        if delta.reasoning:
            added["reasoning_content"] = delta.reasoning
        calls = [call for call in delta.tool_calls if not (self._is_single and call.index)]
        if calls:
            self._calling.add(index)
            added["tool_calls"] = [_call_delta(call) for call in calls]
        if delta.content or not added:
            added["content"] = delta.content
        has_called = index in self._calling
        reason = _reason(delta.finish_reason) if has_called else delta.finish_reason
        return {"delta": added, "finish_reason": reason}

    def _rest(self) -> dict[str, Any]:
        return {"delta": {"content": ""}}

    def _is_empty(self, delta: Delta) -> bool:
        return not (delta.content or delta.reasoning or delta.tool_calls)

    def _logprobs(self, index: int, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        entries = [position_entry(self._texts, each, self._num_logprobs) for each in positions]
        return {"content": entries, "refusal": None}


def _reason(reason: str | None) -> str | None:
    """The reason for the end of a completion that has called a tool."""
    return "tool_calls" if reason == "stop" else reason


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    function = {"name": call.name, **function}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
