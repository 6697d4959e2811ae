"""Formats of answers: how model families mark what they think and what they call.

A checkpoint may describe its own (transformers' response templates). Else a format is taken by the
marks that stand in the model's chat template. From outside: `register_answer_format`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aioengine.processors.chat.answers import (
    AnswerText,
    JsonScan,
    Parse,
    Piece,
    Reading,
    Tools,
)
from aioengine.processors.chat.calls import CallForm
from aioengine.processors.chat.described import (
    forms_of,
    is_read,
    marks_of,
    read_described,
    thought_of,
)
from aioengine.processors.chat.lax_json import QUOTE, as_json
from aioengine.processors.chat.schemas import argument_variants, cast_text, may_be_json
from aioengine.processors.chat.tools import NAME

__all__ = ["FORMATS", "PLAIN", "AnswerFormat", "find_format", "register_answer_format"]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """A way to write answers. `marks`: texts of it that are tokens of their own, mostly;
    `is_used_by` says of a chat template whether the model writes so. `thought`: the marks around
    what is thought, the first "" where it is not one text; `calls`: how calls are written by a
    model with such a template, None where nothing can be made to call a tool."""

    name: str
    marks: tuple[str, ...]
    parse: Parse
    is_used_by: Callable[[str], bool]
    thought: tuple[str, str] | None = None
    calls: Callable[[str], CallForm | None] | None = None


_THINK = ("<think>", "</think>")


def _thinks(text: AnswerText, opening: str, closing: str) -> Reading:
    """Read what is thought first, if the prompt has begun it, or the answer does."""
    begun = text.tail.rstrip().endswith(opening) or (yield from text.take(opening)) is not None
    if begun:
        yield from text.until("reasoning", closing, strips=True)
    return begun


def _with_calls(
    text: AnswerText,
    thought: tuple[str, str],
    begins: tuple[str, ...],
    closes: tuple[str, ...],
    read_calls: Callable[[], Reading],
) -> Reading:
    """Read what is thought and said, and behind each of `begins` calls, if `read_calls` finds any.

    `closes`: marks that may stand behind these, the last of which ends them.
    """
    strips = yield from _thinks(text, *thought)
    outside = ends = (thought[0], *begins)
    while end := (yield from text.until("content", *ends, strips=strips)):
        strips = True
        if end == thought[0]:
            yield from text.until("reasoning", thought[1], strips=True)
        elif end in closes:
            ends = outside if end == closes[-1] else ends
        elif (yield from read_calls()):
            ends = (*outside, *closes)
        else:
            yield Piece("content", text.blanks + end)
            strips = False


def _tagged(text: AnswerText, tools: Tools) -> Reading:
    """`<think>` and `<tool_call>`: Hermes, Qwen 2.5 to 3.5 and others; a call is a JSON object, or
    tags in tags."""

    def read_calls() -> Reading:
        if not (yield from text.json_call()):
            return (yield from text.attempt(_tagged_call(text, tools)))
        while (yield from text.take("}")) or (yield from text.json_call()):
            pass  # some models write one brace too many
        return True

    yield from _with_calls(text, _THINK, ("<tool_call>",), ("</tool_call>",), read_calls)


def _tagged_call(text: AnswerText, tools: Tools) -> Reading:
    """`<function=name><parameter=key>value</parameter></function>`."""
    if (yield from text.take("<function=")) is None:
        return
    name = yield from text.name()
    if name is None or (yield from text.take(">")) is None:
        return
    yield text.begin_call(name)
    before, end = "{", "</function>"
    while (mark := (yield from text.take("<parameter=", end))) == "<parameter=":
        key = yield from text.text_until(">")
        shown = json.dumps(text.rest() if key is None else key[0].strip())
        if key is None:
            yield text.arguments(before + shown[:-1])  # it is cut off, as JSON would be
            return
        variants = argument_variants(tools.get(name, {}), key[0].strip())
        value = yield from _tagged_value(text, variants)
        if value is None:
            rest = json.dumps(text.rest().removeprefix("\n"))
            yield text.arguments(f"{before}{shown}: {rest[:-1]}")
            return
        value = cast_text(value.removeprefix("\n").removesuffix("\n"), variants)
        yield text.arguments(f"{before}{shown}: {json.dumps(value)}")
        before = ", "
    if mark == end or (yield from text.peek("</tool_call>")):
        yield text.arguments("{}" if before == "{" else "}")


def _tagged_value(text: AnswerText, variants: Sequence[Mapping[str, Any]]) -> Reading:
    """Read a value up to its closing tag, which may stand in a text of JSON too."""
    end = "</parameter>"
    found = yield from text.text_until(end)
    if found is None:
        return None
    parts, scan = [found[0]], JsonScan()
    is_json = not text.is_tiring and may_be_json(found[0], variants)
    if not is_json or scan.over(found[0].lstrip(), 0)[1]:
        return found[0]
    while (found := (yield from text.text_until(end))) is not None:
        parts.append(found[0])
        if scan.over(end + found[0], 0)[1]:
            return end.join(parts)
    text.put_back("".join(part + end for part in parts[1:]))
    return parts[0]


def _bare(text: AnswerText, tools: Tools) -> Reading:
    """Llama 3: the whole answer is one call or several, with semicolons between them.

    JSON without a mark may be any answer: it is a call where it is one of a tool.
    """
    while (mark := (yield from text.take("<|python_tag|>", ";"))) is not None or tools:
        is_marked = mark == "<|python_tag|>" or not tools
        if not (yield from text.json_call(only=None if is_marked else tools)):
            if mark == ";":
                yield Piece("content", mark)
            break
    yield from text.until("content", strips=text.num_calls > 0)


def _listed(text: AnswerText, _tools: Tools) -> Reading:
    """Mistral: `[TOOL_CALLS]` and a JSON list of calls, or a name, `[ARGS]` and an object."""

    def named_call() -> Reading:
        name = yield from text.name()
        mark = None if name is None else (yield from text.take("[ARGS]", "[CALL_ID]"))
        call_id = (yield from text.text_until("[ARGS]")) if mark == "[CALL_ID]" else ("",)
        if name is not None and mark is not None and call_id is not None:
            yield text.begin_call(name, call_id[0].strip())
            yield from text.object_of_arguments()

    def read_calls() -> Reading:
        if not (yield from text.json_call("[")):
            return (yield from text.attempt(named_call())) or text.is_spent
        while (yield from text.json_call(",")):
            pass
        yield from text.take("]")
        return True

    yield from _with_calls(text, ("[THINK]", "[/THINK]"), ("[TOOL_CALLS]",), (), read_calls)


def _in_channels(text: AnswerText, _tools: Tools) -> Reading:
    """GPT-OSS (harmony): messages with a channel and a recipient."""
    ends = "<|end|>", "<|call|>", "<|return|>", "<|start|>"
    while (header := (yield from text.text_until("<|message|>"))) is not None:
        head = header[0].split("<|start|>")[-1]
        channel = head.partition("<|channel|>")[2].split()
        to = next((word for word in head.split() if "to=functions." in word), "")
        name = to.partition("to=functions.")[2].partition("<|")[0]
        if NAME.fullmatch(name):
            yield text.begin_call(name)
            if (yield from text.peek("{")):  # whose strings may hold an end
                yield from text.object_of_arguments()
                yield from text.until("content", *ends, strips=True)
            else:
                yield from text.until("arguments", *ends, call=text.num_calls - 1)
        else:
            kind = "reasoning" if channel[:1] == ["analysis"] else "content"
            yield from text.until(kind, *ends, strips=True)  # type: ignore[arg-type]
    rest = text.rest()
    if rest and not any(mark in rest for mark in ("<|start|>", "<|channel|>", *ends)):
        yield Piece("content", rest)  # no message, and no part of its head


def _in_turns(text: AnswerText, _tools: Tools) -> Reading:
    """Gemma 4: `<|channel>thought` and `<|tool_call>call:name{key:value}`, whose strings may hold
    the closing mark."""
    quote, end = QUOTE, "<tool_call|>"
    inside = {"": (end, quote, '"'), quote: (quote,), '"': ('"', '\\"', "\\\\")}

    def call() -> Reading:
        name = yield from text.name()
        if name is None or (yield from text.take("{")) is None:
            return
        yield text.begin_call(name)
        body, string = ["{"], ""  # the delimiter of a string that is open
        while (found := (yield from text.text_until(*inside[string]))) is not None:
            body.append(found[0])
            if found[1] == end:
                break
            body.append(found[1])
            if found[1] in inside:
                string = "" if string else found[1]
        else:
            body.append(text.rest())
        yield text.arguments(as_json("".join(body)))

    thought = "<|channel>thought", "<channel|>"
    yield from _with_calls(text, thought, ("<|tool_call>call:",), (), lambda: text.attempt(call()))


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

    def call() -> Reading:
        yield from text.take(marks["call"])
        name = yield from text.name()
        if name is None or (yield from text.take(marks["next"])) is None:
            return
        if name == "function" and not (name in tools and (yield from text.peek("{"))):
            name = yield from text.name()
            is_json = (yield from text.take("```json")) or (yield from text.peek("{"))
            if name is None or is_json is None:
                return
        yield text.begin_call(name)
        yield from text.object_of_arguments()
        yield from text.take("```")

    begins, ends = (marks["calls"], marks["call"]), (marks["end"], marks["ends"])
    yield from _with_calls(text, _THINK, begins, ends, lambda: text.attempt(call()))


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


def _tagged_calls(template: str) -> CallForm:
    return _TAGS_IN_TAGS if "<function=" in template else _TAGS


def _barred_calls(template: str) -> CallForm:
    begin, end = _DEEPSEEK["call"], _DEEPSEEK["end"]
    around = _DEEPSEEK["calls"], "\n", _DEEPSEEK["ends"]
    if "```json" in template:
        head = f"{begin}function{_DEEPSEEK['next']}NAME\n```json\n"
        return CallForm(head, f"\n```{end}", *around)
    return CallForm(f"{begin}NAME{_DEEPSEEK['next']}", end, *around)


_TAGS = CallForm('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n")
_TAGS_IN_TAGS = CallForm(
    "<tool_call>\n<function=NAME>\n",
    "</function>\n</tool_call>",
    between="\n",
    argument=("<parameter=KEY>\n", "\n</parameter>\n"),
)
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
        _tagged_calls,
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
        ("<|channel|>analysis<|message|>", "<|end|>"),
        lambda _: _CHANNELS,
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
    """The format of a description. Calls are forced in the words of the chat template, if they are
    such ones, else of the description itself."""

    def calls(template: str) -> CallForm | None:
        known = find_format(template)
        forms = [] if known.calls is None else [known.calls(template)]
        forms += forms_of(response_template)
        return next((form for form in forms if form and is_read(response_template, form)), None)

    return AnswerFormat(
        "described",
        marks_of(response_template),
        partial(read_described, response_template),
        lambda _: True,
        thought_of(response_template),
        calls,
    )
