"""Answers in a format that the checkpoint describes itself: transformers' response templates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from aioengine.processors.chat.answers import (
    ARGUMENT_KEYS,
    BLANKS,
    AnswerParser,
    AnswerText,
    Piece,
    Reading,
    Tools,
)
from aioengine.processors.chat.calls import CallForm
from aioengine.processors.chat.tools import NAME

__all__ = ["forms_of", "is_read", "marks_of", "read_described", "thought_of"]

REASONING = ("reasoning_content", "reasoning", "thinking")
CALLS = "tool_calls"


PROBE = {
    "name": "probe",
    "parameters": {"properties": {"key": {"type": "string"}, "number": {"type": "integer"}}},
}
PROBED = {"key": "a b", "number": 3}
PART = re.compile(
    r"(?P<none>(?:\\s|\\n| )[*?])|(?P<blank>\\s\+?)|(?P<line>\\n)|\\(?P<sign>\W)"
    r"|(?P<name>\(\?P<name>(?:\\.|\[(?:\\.|[^\]\\])*\]|[^()\\])*\))"
    r"|(?P<plain>[^\\()\[\]{}|*+?.^$](?![*+?{]))"
)
"""Part of an expression of which an example is known."""


def marks_of(template: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts, and expressions without their backslashes, by which the template knows where what
    begins and ends."""
    found: list[str] = []
    for field in template["fields"].values():
        for key in ("open", "close"):
            texts = field.get(key, [])
            found += [texts] if isinstance(texts, str) else texts
            if pattern := field.get(f"{key}_pattern"):
                found.append(re.sub(r"\\(\W)", r"\1", pattern))
    return tuple(found)


def thought_of(template: Mapping[str, Any]) -> tuple[str, str] | None:
    """The marks around what is thought, the first one "" where it is not known; None where the last
    one is not."""
    fields = template["fields"]
    field: Mapping[str, Any] = next((fields[key] for key in REASONING if key in fields), {})
    opening, closing = _example(field, "open"), _example(field, "close")
    return (opening or "", closing) if closing else None


def forms_of(template: Mapping[str, Any]) -> Iterator[CallForm]:
    """Forms of calls that may be those of the template, where arguments are JSON in it."""
    field = template["fields"].get(CALLS, {})
    opening, closing = _example(field, "open"), _example(field, "close") or ""
    if opening is None or field.get("content") != "json":
        return
    if "NAME" in opening:
        yield CallForm(opening, closing)
        return
    for key in ARGUMENT_KEYS:
        before = f'{{"name": "NAME", "{key}": '
        yield CallForm(opening + before, "}" + closing)
        yield CallForm(before, "}", opening + "[", ", ", "]" + closing)


def is_read(template: Mapping[str, Any], form: CallForm) -> bool:
    """Return whether the template reads calls of this form as what they are."""
    call = form.write("probe", PROBED)
    parser = AnswerParser(partial(read_described, template), "", [{"function": PROBE}])
    pieces = parser.feed(form.first + call + form.between + call + form.last) + parser.finish()
    names = [piece.text for piece in pieces if piece.kind == "call"]
    arguments = [piece.text for piece in pieces if piece.kind == "arguments"]
    is_other = len(pieces) > len(names) + len(arguments)
    return not is_other and names == ["probe"] * 2 and arguments == [json.dumps(PROBED)] * 2


def _example(field: Mapping[str, Any], key: str) -> str | None:
    """An example of a mark, with NAME for the tool's; None where there is none, or it is not known
    how it looks."""
    if key in field:
        return field[key] if isinstance(field[key], str) else next(iter(field[key]), None)
    pattern, shown, end = field.get(f"{key}_pattern", ""), "", 0
    for part in PART.finditer(pattern):
        if part.start() > end:
            return None
        end = part.end()
        ways = {"none": "", "blank": " ", "line": "\n", "name": "NAME"}
        shown += ways.get(part.lastgroup or "", part["sign"] or part["plain"] or "")
    return shown if shown and end == len(pattern) else None


def read_described(template: Any, text: AnswerText, tools: Tools) -> Reading:
    """Read an answer by transformers' parser. What it cannot read is content."""
    from transformers.utils.chat_parsing import ResponseParser
    from transformers.utils.chat_parsing.response_templates import load_response_template

    spec = load_response_template(template)
    # Without an anchor all of the prompt would be read as an answer.
    tail = text.tail if spec.start_anchor_re.search(text.tail) else ""
    functions = [{"name": name, "parameters": schema} for name, schema in tools.items()]
    parser = ResponseParser(spec, prefix=tail, tools=[{"function": each} for each in functions])
    regions, closing = _Regions(text), _example(template["fields"].get(CALLS, {}), "close") or ""
    last = ""
    for event in parser.initial_events:
        if event["type"] == "region_open":
            list(regions.read(event))  # what it holds is of the prompt
    while True:
        is_over, fresh = text.is_over, text.rest()
        last = (last + fresh)[-len(closing) :] if closing else ""
        # Letter by letter: what comes of a text with a fault in it must not depend on its parts.
        for place, letter in enumerate([*fresh, ""] if is_over else fresh):
            try:
                if letter:
                    events = parser.feed(letter)
                else:  # the token that ends the answer may be a part of the mark
                    missing = _behind(closing, last) if regions.is_call else ""
                    events = [event for each in missing for event in parser.feed(each)]
                    events += parser.finalize()[1]
            except (ValueError, KeyError, TypeError, RecursionError):  # by what the template asks
                yield from regions.give_up(fresh[place + 1 :])
                yield from text.until("content")
                return
            for event in events:
                yield from regions.read(event)
        if is_over:
            return
        yield None


def _behind(mark: str, text: str) -> str:
    """The part of a mark that is missing at the end of a text."""
    return next(mark[n:] for n in range(len(mark), -1, -1) if text.endswith(mark[:n]))


class _Regions:
    """Turns the parser's events into pieces."""

    def __init__(self, text: AnswerText) -> None:
        self.is_call = False
        self._text = text
        self._raw = ""  # of the region that is open, where it is no text
        self._blanks = ""
        self._has_begun = False

    def read(self, event: Mapping[str, Any]) -> Iterator[Piece]:
        """Return what an event adds."""
        field, kind = event["field"], event["type"]
        self.is_call = field == CALLS and kind != "region_close"
        is_open = kind in ("region_open", "region_chunk")
        self._text.kind = "reasoning" if is_open and field in REASONING else None
        if kind == "region_open":
            self._raw, self._blanks, self._has_begun = "", "", False
        elif field == CALLS and kind == "region_chunk":
            self._raw += event["text"]
        elif field == CALLS:
            raw, self._raw = self._raw, ""
            value = event["value"]
            calls = value if isinstance(value, list) else [value]
            found = [_read_call(call) for call in calls]
            if all(NAME.fullmatch(name) for name, *_ in found):
                for name, arguments, call_id in found:
                    yield self._text.begin_call(name, call_id)
                    yield self._text.arguments(arguments)
            else:
                yield Piece("content", raw)
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


def _read_call(call: Any) -> tuple[str, str, object]:
    """Return the name, the arguments and the id of a call; no name where it is none."""
    call = call if isinstance(call, Mapping) else {}
    function = call.get("function", call)
    function = function if isinstance(function, Mapping) else {}
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    name = function.get("name")
    return name if isinstance(name, str) else "", text, call.get("id")
