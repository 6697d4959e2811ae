"""The body of a request to the Responses API, as a request to the engine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from aioengine.asgi.api.asks import (
    FORMAT,
    SCHEMA,
    Ask,
    check_schema,
    flag,
    in_words,
    make_ask,
    prompt_options,
    read_metadata,
    read_stream_options,
    wrong,
)
from aioengine.asgi.api.chat import MAX_TOP_LOGPROBS, template_options
from aioengine.asgi.api.fields import RESPONSES, Fields, done, known
from aioengine.asgi.responses.items import Conversation, read_items
from aioengine.errors import InvalidRequestError, refuse_names, shown
from aioengine.types import Prompt

__all__ = ["ResponseAsk", "read_response"]

ALIASES = {
    "max_tokens": "max_output_tokens",
    "prompt": "input",
    "response_format": "text.format",
    "structured_outputs": "text.format",
}
"""The engine's names of parameters, and the client's."""
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS,
    *("reasoning.encrypted_content", "message.input_image.image_url"),
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)
CHOICES = ("auto", "none", "required")
CHOICE: Mapping[Any, Fields] = {
    "function": {"type": done(), "name": done()},
    "allowed_tools": {"type": done(), "mode": done(), "tools": done()},
}
"""Type of a choice among tools -> its fields."""
VERBOSITIES = ("low", "medium", "high")
REASONING = ("effort", "summary", "generate_summary", "context", "mode")
FUNCTION = re.compile(r"^(tools\[[0-9]+\])\.function\b")
"""Place in a tool of the engine's, which here has no function of its own."""
TOOL = ("type", "name", "description", "parameters", "strict", "output_schema")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseAsk(Ask):
    """A request for a response.

    `items`: its own input; `earlier`: the items of the response before it. `echoed`: fields of the
    response that say what was asked for. `is_kept`: the response may be.
    """

    items: Any
    earlier: Sequence[Any] = ()
    conversation: Conversation
    instructions: str | None
    previous_id: str | None
    echoed: Mapping[str, Any]
    is_kept: bool

    def after(self, earlier: Sequence[Any]) -> ResponseAsk:
        """The same request behind the items of an earlier response. Raises InvalidRequestError."""
        conversation = read_items(self.items, self.instructions, earlier)
        prompt = replace(self.prompts[0], messages=conversation.messages)
        return replace(self, earlier=earlier, conversation=conversation, prompts=(prompt,))

    @property
    def all_items(self) -> list[Any]:
        """The items that the response goes on with."""
        own = self.items
        if isinstance(own, str):
            own = [{"type": "message", "role": "user", "content": own}]
        return [*self.earlier, *own]

    def in_its_words(self, error: Exception) -> Exception:
        """An error that names the client's own parameter."""
        name = getattr(error, "parameter", None) or ""
        place = FUNCTION.sub(r"\1", self.conversation.place(name))
        if place != name and isinstance(error, InvalidRequestError):
            return error.for_parameter(place)
        return Ask.in_its_words(self, error)


def read_response(body: Mapping[str, Any]) -> ResponseAsk:
    """The body of a request. Raises InvalidRequestError."""
    given = known(body, RESPONSES)
    instructions, previous_id = _text(given, "instructions"), _text(given, "previous_response_id")
    if "input" not in given:
        raise wrong("input", "text, or a list of items")
    # What an item may refer to can stand in the response before.
    items = [] if previous_id is not None else given["input"]
    conversation = read_items(items, instructions)
    tools, choice = _read_tools(given), given.get("tool_choice", "auto")
    allowed, wanted = _read_choice(choice, tools)
    text = _read_text(given.get("text", {}))
    reasoning, options = _read_reasoning(given)
    prompt = Prompt(
        messages=conversation.messages,
        tools=allowed,
        tool_choice=wanted,
        chat_template_kwargs=options,
        **prompt_options(given),
    )
    ask = _make_ask(given, prompt, text.get("format"))
    is_parallel = "parallel_tool_calls" not in given or flag(given, "parallel_tool_calls")
    echoed = {
        "background": False,
        "instructions": instructions,
        "max_output_tokens": given.get("max_output_tokens"),
        "max_tool_calls": None,
        "metadata": read_metadata(given.get("metadata", {})),
        "parallel_tool_calls": is_parallel,
        "previous_response_id": previous_id,
        "reasoning": reasoning,
        "temperature": ask.params.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": choice,
        "tools": [{"parameters": None, "strict": None, **tool} for tool in given.get("tools", [])],
        "top_logprobs": given.get("top_logprobs", 0),
        "top_p": ask.params.top_p,
        "truncation": "disabled",
    }
    return ResponseAsk(
        **{each.name: getattr(ask, each.name) for each in fields(Ask)},
        items=given["input"],
        conversation=conversation,
        instructions=instructions,
        previous_id=previous_id,
        echoed=echoed,
        is_kept="store" not in given or flag(given, "store"),
    )


def _make_ask(given: Mapping[str, Any], prompt: Prompt, text_format: Any) -> Ask:
    """The part of the request that all endpoints have."""
    read_stream_options(given, ("include_obfuscation",))
    names = {name: value for name, value in given.items() if name != "stream_options"}
    names["max_tokens"] = given.get("max_output_tokens")
    if text_format is not None:
        is_object = isinstance(text_format, dict)  # chats have a schema in a field of its own
        chats = _as_chats(text_format) if is_object else text_format
        names |= {"text.format": text_format, "response_format": chats}
    return make_ask(names, (prompt,), _read_logprobs(given), ALIASES)


def _as_chats(text_format: Mapping[str, Any]) -> dict[str, Any]:
    schema = {name: value for name, value in text_format.items() if name != "type"}
    return {"type": text_format.get("type"), "json_schema": schema or None}


def _read_logprobs(given: Mapping[str, Any]) -> int | None:
    include = given.get("include", [])
    if not isinstance(include, list) or not all(name in INCLUDABLE for name in include):
        raise wrong("include", f"a list of {', '.join(INCLUDABLE)}")
    num_top = given.get("top_logprobs", 0)
    if type(num_top) is not int or not 0 <= num_top <= MAX_TOP_LOGPROBS:
        raise wrong("top_logprobs", f"an integer, 0 to {MAX_TOP_LOGPROBS}")
    if num_top and LOGPROBS not in include:
        raise wrong("include", f"a list with {LOGPROBS} where top_logprobs is given")
    return num_top if LOGPROBS in include else None


def _read_text(given: Any) -> dict[str, Any]:
    """Read `text`, as answers echo it."""
    if not isinstance(given, dict):
        raise wrong("text", "an object with a format")
    refuse_names("text has no field {}", given, ("format", "verbosity"), prefix="text.")
    text = {name: value for name, value in given.items() if value is not None}
    if text.get("verbosity", VERBOSITIES[0]) not in VERBOSITIES:
        raise wrong("text.verbosity", f"one of {', '.join(VERBOSITIES)}")
    wanted = text.get("format")
    if isinstance(wanted, dict):
        check_schema(wanted, "text.format.", {**SCHEMA, "type": FORMAT["type"]})
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        text["format"] = {"name": "answer", **wanted}
    return text


def _read_reasoning(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read `reasoning` as answers echo it, and what the chat template may ask for."""
    reasoning = given.get("reasoning", {})
    if not isinstance(reasoning, dict):
        raise wrong("reasoning", "an object with an effort")
    refuse_names("reasoning has no field {}", reasoning, REASONING, prefix="reasoning.")
    for name, neutral in (("context", (None, "auto")), ("mode", (None, "standard"))):
        if reasoning.get(name) not in neutral:
            raise wrong(f"reasoning.{name}", f"{neutral[-1]}: the chat template decides")
    effort = reasoning.get("effort")
    kwargs = given.get("chat_template_kwargs", {})
    try:
        options = template_options({"chat_template_kwargs": kwargs, "reasoning_effort": effort})
    except InvalidRequestError as error:
        raise in_words(error, {"reasoning_effort": "reasoning.effort"}) from error
    return {"effort": effort, "summary": None}, options


def _read_tools(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools as chats have them, each with a function of its own."""
    tools = given.get("tools", [])
    if not isinstance(tools, list):
        raise wrong("tools", "a list of functions")
    return [_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _read_tool(tool: Any, path: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong(path, "an object with a type")
    if tool.get("type") != "function":
        kind = shown(tool.get("type"), 40)
        message = f"{path}.type {kind} is not supported: give a function, and call it yourself"
        raise InvalidRequestError(message, parameter=f"{path}.type")
    set_names = [name for name, value in tool.items() if value not in (None, False, [])]
    refuse_names(f"{path} has no field {{}}", set_names, TOOL, prefix=f"{path}.")
    function = {
        name: tool[name]
        for name in ("name", "description", "parameters", "strict")
        if tool.get(name) is not None
    }
    return {"type": "function", "function": function}


def _read_choice(choice: Any, tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Any]:
    """The tools that may be called, and the choice among them as chats have it."""
    if not isinstance(choice, dict):
        if choice not in CHOICES:
            raise wrong("tool_choice", f"one of {', '.join(CHOICES)}, or an object with a type")
        return tools, choice
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in CHOICE:
        message = f"tool_choice.type {shown(kind, 40)} is not supported: name a function"
        raise InvalidRequestError(message, parameter="tool_choice.type")
    choice = known(choice, CHOICE[kind], "tool_choice.")
    if kind == "function":
        return tools, {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("mode") not in ("auto", "required"):
        raise wrong("tool_choice.mode", "auto or required")
    listed = choice.get("tools")
    given = listed if isinstance(listed, list) else []
    names = [each.get("name") for each in given if isinstance(each, dict)]
    allowed = [tool for tool in tools if tool["function"].get("name") in names]
    if not allowed:
        raise wrong("tool_choice.tools", "some of tools")
    return allowed, choice["mode"]


def _text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if not isinstance(value, str | None):
        raise wrong(name, "text")
    return value
