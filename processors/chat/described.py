"""Answers in a format that the checkpoint describes itself: transformers' response templates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from aioengine.processors.chat.answers import BLANKS, AnswerText, Piece, Reading, Tools

__all__ = ["marks_of", "read_described"]

REASONING = ("reasoning_content", "reasoning", "thinking")
CALLS = "tool_calls"


def marks_of(template: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts, and expressions, by which the template knows where what begins and ends."""
    keys = ("open", "close", "open_pattern", "close_pattern")
    found = [each[key] for each in template["fields"].values() for key in keys if key in each]
    return tuple(word for each in found for word in ([each] if isinstance(each, str) else each))


def read_described(template: Any, text: AnswerText, tools: Tools) -> Reading:
    """Read an answer by transformers' parser. What it cannot read is content."""
    from transformers.utils.chat_parsing import ResponseParser
    from transformers.utils.chat_parsing.response_templates import load_response_template

    spec = load_response_template(template)
    # Without an anchor all of the prompt would be read as an answer.
    tail = text.tail if spec.start_anchor_re.search(text.tail) else ""
    functions = [{"name": name, "parameters": schema} for name, schema in tools.items()]
    parser = ResponseParser(spec, prefix=tail, tools=[{"function": each} for each in functions])
    regions = _Regions(text)
    for event in parser.initial_events:
        if event["type"] == "region_open":
            list(regions.read(event))  # what it holds is of the prompt
    while True:
        is_over, fresh = text.is_over, text.rest()
        # Letter by letter: what comes of a text with a fault in it must not depend on its parts.
        for place, letter in enumerate([*fresh, ""] if is_over else fresh):
            try:
                events = parser.feed(letter) if letter else parser.finalize()[1]
            except (ValueError, KeyError, TypeError, RecursionError):  # by what the template asks
                yield from regions.give_up(fresh[place + 1 :])
                yield from text.until("content")
                return
            for event in events:
                yield from regions.read(event)
        if is_over:
            return
        yield None


class _Regions:
    """Turns the parser's events into pieces."""

    def __init__(self, text: AnswerText) -> None:
        self._text = text
        self._raw = ""  # of the region that is open, where it is no text
        self._blanks = ""
        self._has_begun = False

    def read(self, event: Mapping[str, Any]) -> Iterator[Piece]:
        """Return what an event adds."""
        field, kind = event["field"], event["type"]
        if kind == "region_open":
            self._raw, self._blanks, self._has_begun = "", "", False
        elif field == CALLS and kind == "region_chunk":
            self._raw += event["text"]
        elif field == CALLS:
            self._raw = ""
            value = event["value"]
            for call in value if isinstance(value, list) else [value]:
                yield from self._call(call)
        elif kind == "region_chunk" and field in ("content", *REASONING):
            yield from self._more(event["text"], is_content=field == "content")

    def give_up(self, fresh: str) -> Iterator[Piece]:
        """Return what has come of a region that cannot be read."""
        if self._raw or fresh:
            yield Piece("content", self._raw + fresh)

    def _more(self, text: str, *, is_content: bool) -> Iterator[Piece]:
        text = self._blanks + text
        if not self._has_begun:
            text = text.lstrip(BLANKS)
        shown = text.rstrip(BLANKS)
        self._blanks = text[len(shown) :]
        if shown:
            self._has_begun = True
            yield Piece("content" if is_content else "reasoning", shown)

    def _call(self, call: Any) -> Iterator[Piece]:
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments", {})
        yield self._text.begin_call(str(function.get("name", "")), call.get("id"))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        yield self._text.arguments(text)
