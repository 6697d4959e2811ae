"""Tools that a model may call: their schemas, the calls in a conversation, and which are allowed.

A tool is a Python function, whose signature and docstring transformers makes a JSON schema of, or
such a schema in OpenAI's form. A call's arguments are an object, as templates want them; OpenAI's
messages have them as JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from aioengine.errors import InvalidRequestError, shown
from aioengine.processors.chat.parts import invalid, part_text, wrong

__all__ = ["CHOICES", "list_tools", "read_calls", "read_choice", "read_id", "read_tools"]

CHOICES = ("auto", "none", "required")
"""Names of what a model may do with its tools, beside calling a certain one."""
MAX_TOOLS = 1024
MAX_DEPTH = 64
"""Of lists and objects in a tool or a call."""
MAX_VALUES = 1 << 18
"""Of all of them, where what is in several places counts in each."""
MAX_ID = 256
"""Characters."""
_SCHEMAS: WeakKeyDictionary[Callable[..., Any], dict[str, Any]] = WeakKeyDictionary()
NAME = re.compile(r"[\w.:/-]{1,256}")
"""Of tools and of calls: no such text spells a special token."""


def list_tools(tools: Any) -> list[Any]:
    """List tools, whatever each is. Raises InvalidRequestError for what is no list, or too long."""
    if isinstance(tools, Mapping | str) or not isinstance(tools, Sequence):
        raise wrong("tools", "a list of functions or schemas", tools)
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"has more than {MAX_TOOLS} entries", len(tools))
    return list(tools)


def read_tools(tools: Any) -> list[dict[str, Any]]:
    """Read tools, functions or schemas, into schemas in OpenAI's form.

    Raises InvalidRequestError with the exact place as parameter (`tools[0].function.name`).
    """
    read = [_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(list_tools(tools))]
    names: set[str] = set()
    for index, tool in enumerate(read):
        name = tool["function"]["name"]
        if name in names:
            raise invalid(f"tools[{index}]", f"has the name {name} of another tool")
        names.add(name)
    return read


def _read_tool(tool: Any, path: str) -> dict[str, Any]:
    if callable(tool):
        return _known_schema_of(tool, path)
    if not isinstance(tool, Mapping):
        raise wrong(path, "a function or a schema", tool)
    check_depth(tool, path)
    if "function" not in tool and "name" in tool:  # the function alone, as some write it
        kind = tool.get("type", "function")
        tool = {"type": kind, "function": {k: v for k, v in tool.items() if k != "type"}}
    if tool.get("type", "function") != "function":
        raise invalid(f"{path}.type", "must be function; other tools are not built")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise wrong(f"{path}.function", "a mapping with a name", function)
    read_name(function.get("name"), f"{path}.function.name")
    if not isinstance(function.get("description", ""), str):
        raise wrong(f"{path}.function.description", "text", function["description"])
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None):
        raise wrong(f"{path}.function.parameters", "a JSON schema", parameters)
    try:
        json.dumps(tool, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise invalid(path, f"has values that JSON does not know ({error!s:.100})") from error
    return {**tool, "type": "function", "function": dict(function)}


def _known_schema_of(function: Callable[..., Any], path: str) -> dict[str, Any]:
    """Make a function's schema once: its source is not read again with each call."""
    try:
        if function not in _SCHEMAS:
            _SCHEMAS[function] = _schema_of(function, path)
        return _SCHEMAS[function]
    except TypeError:  # it cannot be looked up
        return _schema_of(function, path)


def _schema_of(function: Callable[..., Any], path: str) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise invalid(
            path,
            f"is a function of which no schema can be made ({error!s:.200}); give {name} type "
            "hints and a docstring that describes each argument (Args:), or give a schema",
        ) from error
    read_name(schema["function"]["name"], f"{path}.name")
    return schema


def read_name(value: object, path: str) -> str:
    """Read the name of a tool. Raises InvalidRequestError."""
    text = part_text(value, path)
    if NAME.fullmatch(text) is None:
        rule = "must be letters, digits and ._:/- alone, 256 at most"
        raise invalid(path, f"{rule}, not {shown(text, 40)}")
    return text


def read_id(value: object, path: str) -> str:
    """Read the id of a call, which others may have made. Raises InvalidRequestError."""
    text = part_text(value, path)
    if not 0 < len(text) <= MAX_ID or not text.isprintable():
        raise invalid(path, f"must be printable text of 1 to {MAX_ID} characters")
    return text


def read_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str | Mapping[str, str]:
    """Read which tools may be called: one of `CHOICES`, or {"name": ...} of a certain one.

    Raises InvalidRequestError for another choice, or a tool that there is not.
    """
    if choice is None:
        return "auto"
    if isinstance(choice, str) and choice in CHOICES:
        if choice == "required" and not tools:
            raise invalid("tool_choice", "is required, but there are no tools")
        return choice
    if isinstance(choice, str):
        choice = {"name": choice}
    if not isinstance(choice, Mapping):
        raise wrong("tool_choice", f"one of {', '.join(CHOICES)} or a tool's name", choice)
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        known = f"; there are {', '.join(names)[:200]}" if names else "; there are none"
        raise invalid("tool_choice", f"must be {', '.join(CHOICES)} or the name of a tool{known}")
    return {"name": str(name)}


def read_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """Read an assistant message's `tool_calls`, whose arguments become objects where they can.

    Raises InvalidRequestError.
    """
    if isinstance(calls, Mapping | str) or not isinstance(calls, Sequence):
        raise wrong(path, "a list of calls", calls)
    return [_read_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _read_call(call: Any, path: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise wrong(path, "a mapping with a function", call)
    check_depth(call, path)
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise wrong(f"{path}.function", "a mapping with a name and arguments", function)
    name = read_name(function.get("name"), f"{path}.function.name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _as_object(part_text(arguments, f"{path}.function.arguments"))
    elif not isinstance(arguments, Mapping):
        raise wrong(f"{path}.function.arguments", "an object or its JSON", arguments)
    read: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        read = {"id": read_id(call["id"], f"{path}.id"), **read}
    return read


def _as_object(text: str) -> dict[str, Any] | str:
    """The object that a text is in JSON, else the text: a model may have written it so."""
    try:
        found = json.loads(text or "{}")
        check_depth(found, "arguments")
        if "\\u" in text:  # JSON can escape halves of characters, which no prompt can have
            whole = json.dumps(found, ensure_ascii=False).encode("utf-16", "surrogatepass")
            found = json.loads(whole.decode("utf-16", "replace"))
    except (ValueError, RecursionError, InvalidRequestError):
        return text
    return found if isinstance(found, dict) else text


def check_depth(value: Any, path: str) -> None:
    """Raise InvalidRequestError for lists and mappings too deep in each other, or too many."""
    level = [value]
    num_values = 0
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for each in level:
            if isinstance(each, Mapping):
                children += each.values()
            elif isinstance(each, list | tuple):
                children += each
            if num_values + len(children) > MAX_VALUES:
                raise invalid(path, f"has more than {MAX_VALUES} values in it")
        if not children:
            return
        level = children
        num_values += len(level)
    raise invalid(path, f"has more than {MAX_DEPTH} lists and objects in each other")
