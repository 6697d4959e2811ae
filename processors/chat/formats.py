"""Formats of answers: how model families mark what they think and what they call.

A checkpoint may describe its own (transformers' response templates). Else a format is taken by the
marks that stand in the model's chat template. From outside: `register_answer_format`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from aioengine.processors.chat.answers import AnswerText, Parse, Piece, Reading, Tools
from aioengine.processors.chat.calls import CallForm
from aioengine.processors.chat.described import marks_of, read_described

__all__ = ["FORMATS", "PLAIN", "AnswerFormat", "find_format", "register_answer_format"]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """A way to write answers. `marks`: texts of it that are tokens of their own, mostly;
    `is_used_by` says of a chat template whether the model writes so. `thought`: the marks around
    what is thought; `calls`: how calls are written by a model with such a template, None where
    nothing can be made to call a tool."""

    name: str
    marks: tuple[str, ...]
    parse: Parse
    is_used_by: Callable[[str], bool]
    thought: tuple[str, str] | None = None
    calls: Callable[[str], CallForm] | None = None


def _thinks(text: AnswerText, opening: str, closing: str) -> Reading:
    """Read what is thought first, if the prompt has begun it, or the answer does."""
    begun = text.tail.rstrip().endswith(opening) or (yield from text.take(opening)) is not None
    if begun:
        yield from text.until("reasoning", closing, strips=True)
    return begun


def _tagged(text: AnswerText, tools: Tools) -> Reading:
    """`<think>` and `<tool_call>`: Hermes, Qwen 2.5 to 3.5 and others; a call is a JSON object, or
    tags in tags."""
    strips = yield from _thinks(text, "<think>", "</think>")
    while end := (yield from text.until("content", "<think>", "<tool_call>", strips=strips)):
        strips = True
        if end == "<think>":
            yield from text.until("reasoning", "</think>", strips=True)
        elif (yield from text.take("<function=")) is not None:
            yield from _tagged_call(text, tools)
            yield from text.until(None, "</tool_call>")
        elif (yield from text.json_call()):
            yield from text.until(None, "</tool_call>")
        else:
            yield Piece("content", text.blanks + end)  # no call
            strips = False


def _tagged_call(text: AnswerText, tools: Tools) -> Reading:
    """`<function=name><parameter=key>value</parameter></function>`, whose name comes now."""
    found = yield from text.text_until(">")
    if found is None:
        return
    name = found[0].strip()
    yield text.begin_call(name)
    separator = "{"
    while (yield from text.take("<parameter=", "</function>")) == "<parameter=":
        key = yield from text.text_until(">")
        value = None if key is None else (yield from text.text_until("</parameter>"))
        if key is None or value is None:
            return
        schema = tools.get(name, {}).get(key[0].strip(), {})
        shown = json.dumps(_cast(value[0].removeprefix("\n").removesuffix("\n"), schema))
        yield text.arguments(f"{separator}{json.dumps(key[0].strip())}: {shown}")
        separator = ", "
    yield text.arguments("{}" if separator == "{" else "}")


def _cast(value: str, schema: Any) -> Any:
    """The value that a text stands for, by the schema of an argument."""
    kinds = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if "string" in kinds:
        return value
    try:
        return json.loads(value.strip())
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(value.strip(), value)


def _bare(text: AnswerText, tools: Tools) -> Reading:
    """Llama 3: the whole answer is one call or several, with semicolons between them."""
    while (mark := (yield from text.take("<|python_tag|>", ";"))) is not None or tools:
        if not (yield from text.json_call()):
            if mark == ";":
                yield Piece("content", mark)
            break
    yield from text.until("content", strips=text.num_calls > 0)


def _listed(text: AnswerText, tools: Tools) -> Reading:
    """Mistral: `[TOOL_CALLS]` and a JSON list of calls, or a name, `[ARGS]` and an object."""
    strips = yield from _thinks(text, "[THINK]", "[/THINK]")
    while end := (yield from text.until("content", "[THINK]", "[TOOL_CALLS]", strips=strips)):
        strips = True
        if end == "[THINK]":
            yield from text.until("reasoning", "[/THINK]", strips=True)
        elif (yield from text.take("[")) is not None:
            while (yield from text.json_call()):
                if (yield from text.take(",", "]")) != ",":
                    break
        else:
            found = yield from text.text_until("[ARGS]", "[CALL_ID]")
            call_id = None
            if found is not None and found[1] == "[CALL_ID]":
                marked = yield from text.text_until("[ARGS]")
                call_id = None if marked is None else marked[0].strip()
            if found is not None:
                yield text.begin_call(found[0].strip(), call_id)
                yield from text.object_of_arguments()


def _in_channels(text: AnswerText, _tools: Tools) -> Reading:
    """GPT-OSS (harmony): messages with a channel and a recipient."""
    ends = "<|end|>", "<|call|>", "<|return|>", "<|start|>"
    while (header := (yield from text.text_until("<|message|>"))) is not None:
        head = header[0].split("<|start|>")[-1]
        channel = head.partition("<|channel|>")[2].split()
        to = next((word for word in head.split() if "to=functions." in word), None)
        if to is not None:
            name = to.partition("to=functions.")[2].partition("<|")[0]
            yield text.begin_call(name)
            yield from text.until("arguments", *ends, call=text.num_calls - 1)
        else:
            kind = "reasoning" if channel[:1] == ["analysis"] else "content"
            yield from text.until(kind, *ends, strips=True)  # type: ignore[arg-type]
    rest = text.rest()
    if rest and not any(mark in rest for mark in ("<|start|>", "<|channel|>", *ends)):
        yield Piece("content", rest)  # no message, and no part of its head


def _in_turns(text: AnswerText, tools: Tools) -> Reading:
    """Gemma 4: `<|channel>thought` and `<|tool_call>call:name{key:value}`."""
    from transformers.utils.chat_parsing.content_parsers import parse_content

    lax = {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]}
    thought, call = "<|channel>thought", "<|tool_call>call:"
    strips = yield from _thinks(text, thought, "<channel|>")
    while end := (yield from text.until("content", thought, call, strips=strips)):
        strips = True
        if end == thought:
            yield from text.until("reasoning", "<channel|>", strips=True)
            continue
        name = yield from text.text_until("{")
        body = None if name is None else (yield from text.text_until("<tool_call|>"))
        if name is None:
            return
        yield text.begin_call(name[0].strip())
        if body is not None:
            yield text.arguments(_strict("{" + body[0], lambda x: parse_content(x, "json", lax)))


def _strict(text: str, read: Callable[[str], Any]) -> str:
    """The text where it is JSON, else what `read` makes of it, else the text all the same."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        try:
            return json.dumps(read(text))
        except (ValueError, RecursionError):
            pass
    return text


_CALL, _CALLS = "tool▁call", "tool▁calls"
_DEEPSEEK = {
    name: f"<｜{mark}｜>"
    for name, mark in {
        "calls": f"{_CALLS}▁begin",
        "call": f"{_CALL}▁begin",
        "next": "tool▁sep",
        "end": f"{_CALL}▁end",
        "ends": f"{_CALLS}▁end",
    }.items()
}


def _between_bars(text: AnswerText, tools: Tools) -> Reading:
    """DeepSeek: calls between marks; arguments behind the name, in a JSON block in older models."""
    marks = _DEEPSEEK
    strips = yield from _thinks(text, "<think>", "</think>")
    while end := (yield from text.until("content", "<think>", marks["calls"], strips=strips)):
        strips = True
        if end == "<think>":
            yield from text.until("reasoning", "</think>", strips=True)
            continue
        while (yield from text.until(None, marks["call"], marks["ends"])) == marks["call"]:
            head = yield from text.text_until(marks["next"])
            if head is None:
                return
            name = head[0].strip()
            if name == "function" and name not in tools:
                line = yield from text.text_until("\n")
                if line is None:
                    return
                name = line[0].strip()
                yield from text.take("```json")
            yield text.begin_call(name)
            yield from text.object_of_arguments()
            yield from text.until(None, marks["end"])


def _plain(text: AnswerText, _tools: Tools) -> Reading:
    """Content alone."""
    yield from text.until("content")


def _thinking(text: AnswerText, _tools: Tools) -> Reading:
    """Thoughts before the answer, and no calls."""
    begun = yield from _thinks(text, "<think>", "</think>")
    yield from text.until("content", strips=begun)


def _has(*marks: str) -> Callable[[str], bool]:
    return lambda template: any(mark in template for mark in marks)


FORMATS: dict[str, AnswerFormat] = {}
"""Known formats by name; the first that a template uses is taken."""


def register_answer_format(answer_format: AnswerFormat) -> None:
    """Have a format known by its name; it comes before those that are."""
    others = {name: each for name, each in FORMATS.items() if name != answer_format.name}
    FORMATS.clear()
    FORMATS.update({answer_format.name: answer_format, **others})


def _listed_calls(template: str) -> CallForm:
    if "[ARGS]" in template:
        return CallForm("[TOOL_CALLS]NAME[ARGS]")
    return CallForm('{"name": "NAME", "arguments": ', "}", "[TOOL_CALLS][", ", ", "]")


def _barred_calls(template: str) -> CallForm:
    begin, end = _DEEPSEEK["call"], _DEEPSEEK["end"]
    around = _DEEPSEEK["calls"], "\n", _DEEPSEEK["ends"]
    if "```json" in template:
        head = f"{begin}function{_DEEPSEEK['next']}NAME\n```json\n"
        return CallForm(head, f"\n```{end}", *around)
    return CallForm(f"{begin}NAME{_DEEPSEEK['next']}", end, *around)


_THINK = ("<think>", "</think>")
_TAGS = CallForm('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n")
_BARE = CallForm('{"name": "NAME", "parameters": ', "}", between="; ")
_TURNS = CallForm("<|tool_call>call:NAME", "<tool_call|>")
_CHANNELS = CallForm(
    "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    "<|call|>",
    between="<|start|>assistant",
)
for _known in (
    AnswerFormat("thinking", _THINK, _thinking, _has("<think>"), _THINK),
    AnswerFormat(
        "llama3",
        ("<|python_tag|>",),
        _bare,
        _has("<|python_tag|>", "<|eom_id|>"),
        calls=lambda _: _BARE,
    ),
    AnswerFormat(
        "hermes",
        (*_THINK, "<tool_call>", "</tool_call>"),
        _tagged,
        _has("<tool_call>"),
        _THINK,
        lambda _: _TAGS,
    ),
    AnswerFormat(
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        _listed,
        _has("[TOOL_CALLS]", "[THINK]"),
        ("[THINK]", "[/THINK]"),
        _listed_calls,
    ),
    AnswerFormat(
        "gemma",
        ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        _in_turns,
        _has("<|tool_call>"),
        ("<|channel>thought", "<channel|>"),
        lambda _: _TURNS,
    ),
    AnswerFormat(
        "deepseek",
        (*_THINK, *_DEEPSEEK.values()),
        _between_bars,
        _has(_DEEPSEEK["calls"], _DEEPSEEK["call"]),
        _THINK,
        _barred_calls,
    ),
    AnswerFormat(
        "harmony",
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
        _in_channels,
        _has("<|channel|>"),
        calls=lambda _: _CHANNELS,
    ),
):
    register_answer_format(_known)


PLAIN = AnswerFormat("plain", (), _plain, lambda _: True)


def find_format(template: str, response_template: Any = None) -> AnswerFormat:
    """Find how a model writes its answers, by its chat template; else `PLAIN`.

    `response_template`: what the checkpoint says of it, in transformers' form.
    """
    if response_template is not None:
        return _described(response_template)
    return next((each for each in FORMATS.values() if each.is_used_by(template)), PLAIN)


def _described(response_template: Any) -> AnswerFormat:
    parse = partial(read_described, response_template)
    return AnswerFormat("described", marks_of(response_template), parse, lambda _: True)
