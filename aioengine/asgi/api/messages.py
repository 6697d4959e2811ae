"""messages: conversations in Anthropic's form in, blocks of content out, whole and in events.

A call's arguments are an object in an answer. Text of a model that is none, as where the answer was
cut short, stands in one: `{"INVALID_JSON": text}`. A stream therefore holds the arguments of a call
back until they are complete, unless its tool asks for them as they come (`eager_input_streaming`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aioengine.asgi.api.answers import Answer
from aioengine.asgi.api.anthropic_prompt import read_prompt
from aioengine.asgi.api.asks import Ask, flag, in_words, make_ask, wrong
from aioengine.asgi.api.fields import ANTHROPIC, done, known
from aioengine.asgi.error_responses import ApiError, anthropic_error
from aioengine.errors import InvalidRequestError
from aioengine.types import Delta, FinishReason, RequestOutput, ToolCall, ToolCallDelta

__all__ = ["MessagesAnswer", "read_counted", "read_messages"]

ALIASES = {
    "stop": "stop_sequences",
    "structured_outputs": "output_config.format",
    "response_format": "output_config.format",
    "thinking_budget": "thinking.budget_tokens",
}
"""The engine's names of parameters, and Anthropic's."""
BLOCKS = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
"""Blocks of text as they begin."""
THINKING = dict.fromkeys(("type", "budget_tokens", "display"), done())
FORMAT = {"type": done(), "schema": done()}
Event = dict[str, Any]


def read_messages(body: Mapping[str, Any]) -> Ask:
    """The body of messages. Raises InvalidRequestError."""
    if body.get("max_tokens") is None:
        raise wrong("max_tokens", "given: the most tokens that the answer may have")
    return read_counted(body)


def read_counted(body: Mapping[str, Any]) -> Ask:
    """The body of messages/count_tokens, where `max_tokens` may be absent.

    Raises InvalidRequestError.
    """
    given = known(body, ANTHROPIC)
    thinking = _read_thinking(given.get("thinking"))
    effort, schema = _read_output(given.get("output_config", {}))
    own = {} if effort is None else {"reasoning_effort": effort}
    if thinking.get("type") is not None:
        thinks = thinking["type"] != "disabled"
        own |= {"enable_thinking": thinks, "thinking": thinks}
    prompt, places = read_prompt(given, own)
    choice = given.get("tool_choice", {})
    fields: dict[str, Any] = {
        **given,
        "parallel_tool_calls": not flag(choice, "disable_parallel_tool_use", "tool_choice."),
        "shows_thinking": thinking.get("display") != "omitted",
        "thinking_budget": thinking.get("budget_tokens"),
    }
    if "stop_sequences" in given:
        if not isinstance(given["stop_sequences"], list):
            raise wrong("stop_sequences", "a list of texts")
        fields["stop"] = given["stop_sequences"]
    if (budget := thinking.get("budget_tokens")) is not None:
        fields["thinking_budget"] = budget
    if schema is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    try:
        ask = make_ask(fields, (prompt,), None)
    except InvalidRequestError as error:
        raise in_words(error, ALIASES) from error
    return replace(ask, aliases={"prompt": "messages", **ALIASES, **places})


def _read_thinking(given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    kinds = ("enabled", "adaptive", "disabled")
    if not isinstance(given, dict) or given.get("type") not in kinds:
        raise wrong("thinking", f"an object whose type is one of {', '.join(kinds)}")
    given = known(given, THINKING, "thinking.")
    if given.get("display") not in (None, "summarized", "omitted"):
        raise wrong("thinking.display", "summarized or omitted")
    budget = given.get("budget_tokens")
    if given["type"] == "enabled" and not (type(budget) is int and budget > 0):
        raise wrong("thinking.budget_tokens", "an integer, 1 or more")
    return given if given["type"] == "enabled" else {**given, "budget_tokens": None}


def _read_output(given: Any) -> tuple[Any, Any]:
    """The effort, and the schema of the answer."""
    if not isinstance(given, dict) or given.keys() - {"effort", "format"}:
        raise wrong("output_config", "an object with effort and format at most")
    effort, wanted = given.get("effort"), given.get("format")
    if not isinstance(effort, str | None):
        raise wrong("output_config.effort", "text")
    if wanted is None:
        return effort, None
    schema = wanted.get("schema") if isinstance(wanted, dict) else None
    if not isinstance(schema, dict) or wanted.get("type") != "json_schema":
        raise wrong("output_config.format", "of type json_schema, with a schema")
    known(wanted, FORMAT, "output_config.format.")
    return effort, schema


class MessagesAnswer(Answer):
    """Answers of messages."""

    prefix = "msg_"
    has_named_events = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._has_begun = False
        self._index = -1
        """Of the last block that has begun."""
        self._kind: str | None = None
        """Of the block that is open."""
        self._call: int | None = None
        """Number of the call that the open block has."""
        self._held: list[str] | None = None
        """Arguments of that call, which wait for their end."""
        tools = self._ask.fields.get("tools", ())
        eager = [tool for tool in tools if tool.get("eager_input_streaming") is True]
        self._eager = [tool.get("name") for tool in eager]
        """Tools whose arguments are given as they come."""

    async def complete(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """See `Answer`."""
        (output,) = outputs
        said = output.message
        assert said is not None
        content: list[dict[str, Any]] = []
        if said.reasoning and self._ask.fields["shows_thinking"]:
            content.append({**BLOCKS["thinking"], "thinking": said.reasoning})
        if said.content:
            content.append({**BLOCKS["text"], "text": said.content})
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
            for call in self._taken(said.tool_calls)
        ]
        return self._message(content) | self._stop(output) | {"usage": _usage(output)}

    def chunks(self, number: int, delta: Delta) -> Iterator[Event]:
        """See `Answer`; half a character adds nothing yet."""
        yield from self._begin()
        calls = [call for call in delta.tool_calls if self._is_taken(call.index)]
        for call in calls:
            # First, as a delta of several tokens may have what comes behind the open call.
            if call.name is None and call.index == self._call:
                yield from self._add_arguments(call.arguments)
        own = [call for call in calls if call.name is not None or call.index != self._call]
        if delta.reasoning and self._ask.fields["shows_thinking"]:
            yield from self._add("thinking", delta.reasoning)
        if delta.content:
            yield from self._add("text", delta.content)
        for call in own:
            if call.name is not None:
                yield from self._open_call(call)
            yield from self._add_arguments(call.arguments)

    def ending(self, outputs: Sequence[RequestOutput]) -> Iterator[Event]:
        """See `Answer`."""
        (output,) = outputs
        yield from self._begin()
        yield from self._close()
        yield {"type": "message_delta", "delta": self._stop(output), "usage": _usage(output)}
        yield {"type": "message_stop"}

    def failure(self, error: ApiError) -> Iterator[Event]:
        """See `Answer`."""
        yield anthropic_error(error)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content}

    def _begin(self) -> Iterator[Event]:
        """Write the first event. How many tokens the prompt has is said in the last but one."""
        if not self._has_begun:
            self._has_begun = True
            start = {"stop_reason": None, "stop_sequence": None, "usage": _counts(0, 0, 0)}
            yield {"type": "message_start", "message": {**self._message([]), **start}}

    def _add(self, kind: str, text: str) -> Iterator[Event]:
        if self._kind != kind:
            yield from self._open(kind, dict(BLOCKS[kind]))
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._kind = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _open_call(self, call: ToolCallDelta) -> Iterator[Event]:
        block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        yield from self._open("tool_use", block)
        self._call = call.index
        self._held = None if call.name in self._eager else []

    def _add_arguments(self, text: str) -> Iterator[Event]:
        if self._held is not None:
            self._held.append(text)
        elif text:
            yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _close(self) -> Iterator[Event]:
        if self._held is not None:
            text = "".join(self._held)
            found = _input(text)
            self._held = None
            text = json.dumps(found) if "INVALID_JSON" in found else text
            yield from self._add_arguments(text)
        if self._kind is not None:
            self._kind = self._call = None
            yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _taken(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        return [call for index, call in enumerate(calls) if self._is_taken(index)]

    def _is_taken(self, index: int) -> bool:
        """Return whether the answer has the call: the first, or as many as there are."""
        return bool(index == 0 or self._ask.fields["parallel_tool_calls"])

    def _stop(self, output: RequestOutput) -> dict[str, Any]:
        """The reason for the end, in Anthropic's words."""
        (only,) = output.outputs
        sequence = only.stop_reason if isinstance(only.stop_reason, str) else None
        reason = "end_turn"
        if only.finish_reason == FinishReason.LENGTH:
            is_full = len(only.token_ids) < (self._ask.params.max_tokens or 0)
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif sequence is not None:
            reason = "stop_sequence"
        elif only.message is not None and only.message.tool_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as an object; see the top of this file."""
    try:
        found = ToolCall("", "", arguments.strip() or "{}").read()
        json.dumps(found, allow_nan=False)
    except (ValueError, RecursionError):
        return {"INVALID_JSON": arguments}
    return found


def _usage(output: RequestOutput) -> dict[str, int]:
    usage = output.usage
    return _counts(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def _counts(num_prompt: int, num_answer: int, num_cached: int) -> dict[str, int]:
    """Counts of tokens; those that were read from the cache are no input tokens."""
    return {
        "input_tokens": num_prompt - num_cached,
        "output_tokens": num_answer,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
    }
