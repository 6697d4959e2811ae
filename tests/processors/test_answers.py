"""Answers in known formats: the same message however the text is cut, and nothing of it lost."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing.content_parsers import parse_content

from aioengine.processors.chat.answers import MOST_IN_VAIN, AnswerParser, JsonScan
from aioengine.processors.chat.formats import FORMATS, find_format
from aioengine.processors.chat.lax_json import QUOTE, as_json
from aioengine.processors.chat.tools import NAME

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
ARGUMENTS = {"city": 'Paris "}</tool_call>', "days": 3}
JSON = json.dumps(ARGUMENTS)
CALL = {"name": "weather", "arguments": ARGUMENTS}
D = {"b": "<｜tool▁call▁begin｜>", "s": "<｜tool▁sep｜>", "e": "<｜tool▁call▁end｜>"}
DS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

ANSWERS: dict[str, tuple[str, str, str, str]] = {
    "hermes": (
        "hermes", "",
        f"<think>\nhm <b>\n</think>\n\nI look.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>\n"
        f'<tool_call>{{"arguments": {JSON}, "name": "weather"}}</tool_call>', "",
    ),
    "hermes, thought in the prompt": (
        "hermes", "<|im_start|>assistant\n<think>\n",
        f"hm <b>\n</think>\n\nI look.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>\n"
        f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>", "",
    ),
    "tags": (
        "hermes", "",
        "<think>hm <b></think>I look.\n\n" + 2 * (
            "<tool_call>\n<function=weather>\n<parameter=city>\n" + ARGUMENTS["city"]
            + "\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        ), "",
    ),
    "llama3": (
        "llama3", "",
        f'{{"name": "weather", "parameters": {JSON}}}; {{"name": "weather", "parameters": {JSON}}}',
        "bare",
    ),
    "mistral, a list": (
        "mistral", "",
        f"[THINK]hm <b>[/THINK]I look.[TOOL_CALLS][{json.dumps(CALL)}, {json.dumps(CALL)}]", "",
    ),
    "mistral, names": (
        "mistral", "",
        f"[THINK]hm <b>[/THINK]I look.[TOOL_CALLS]weather[ARGS]{JSON}"
        f"[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{JSON}", "",
    ),
    "gemma": (
        "gemma", "",
        "<|channel>thought\nhm <b>\n<channel|>I look." + 2 * (
            '<|tool_call>call:weather{city:<|"|>Paris "}</tool_call><|"|>,days:3}<tool_call|>'
        ), "",
    ),
    "deepseek": (
        "deepseek", "",
        f"<think>hm <b></think>I look.\n{DS[0]}" + 2 * (
            f"{D['b']}function{D['s']}weather\n```json\n{JSON}\n```{D['e']}\n"
        ) + DS[1], "",
    ),
    "deepseek 3.1": (
        "deepseek", "<think>", f"hm <b></think>I look.{DS[0]}" + 2 * (
            f"{D['b']}weather{D['s']}{JSON}{D['e']}"
        ) + DS[1], "",
    ),
    "harmony": (
        "harmony", "<|start|>assistant",
        "<|channel|>analysis<|message|>hm <b><|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|>" + 2 * (
            "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
            f"<|message|>{JSON}<|call|>"
        ), "",
    ),
}  # fmt: skip


def read(name: str, tail: str, parts: list[str], tools: Any = (WEATHER,)) -> dict[str, Any]:
    """The message that an answer comes to, in parts."""
    return read_pieces(AnswerParser(FORMATS[name].parse, tail, tools), parts)


def read_pieces(parser: AnswerParser, parts: list[str]) -> dict[str, Any]:
    """The message that a parser makes of parts of an answer."""
    pieces = [piece for part in parts for piece in parser.feed(part)] + parser.finish()
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for piece in pieces:
        if piece.kind == "call":
            assert piece.call == len(found["calls"])
            found["calls"].append([piece.text, ""])
        elif piece.kind == "arguments":
            assert piece.call == len(found["calls"]) - 1
            found["calls"][-1][1] += piece.text
        else:
            found[piece.kind] += piece.text
    return found


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_and_thoughts_however_they_are_cut(name: str) -> None:
    kind, tail, answer, form = ANSWERS[name]
    whole = read(kind, tail, [answer])
    assert [call[0] for call in whole["calls"]] == ["weather", "weather"]
    assert [json.loads(call[1]) for call in whole["calls"]] == [ARGUMENTS, ARGUMENTS]
    if not form:
        assert whole["content"] == "I look." and whole["reasoning"] == "hm <b>"
    assert read(kind, tail, [*answer]) == whole
    for cut in range(len(answer)):
        assert read(kind, tail, [answer[:cut], answer[cut:]]) == whole


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_breaks_off_is_the_same_in_parts(name: str) -> None:
    kind, tail, answer, _ = ANSWERS[name]
    for end in range(len(answer)):
        assert read(kind, tail, [*answer[:end]]) == read(kind, tail, [answer[:end]])


TEXTS = st.text(st.sampled_from(' \n{}[]",:ab<>|/'), max_size=20)
WORDS = sorted({mark for each in FORMATS.values() for mark in each.marks})


@given(
    name=st.sampled_from(sorted(FORMATS)),
    parts=st.lists(st.one_of(TEXTS, st.sampled_from(WORDS), st.just(json.dumps(CALL)))),
)
def test_any_answer_is_read(name: str, parts: list[str]) -> None:
    answer = "".join(parts)
    assert read(name, "", [*answer]) == read(name, "", [answer])


@pytest.mark.parametrize("name", sorted(FORMATS))
@given(text=st.text(st.sampled_from("ab \n.<[{é"), max_size=30))
def test_a_text_without_marks_is_content(name: str, text: str) -> None:
    assert read(name, "", [*text])["content"] == text


@pytest.mark.parametrize(
    "answer", ["<tool_call>no call</tool_call>", "<tool_call>{}</tool_call>", "a <tool_call> tag"]
)
def test_what_is_no_call_stays_text(answer: str) -> None:
    assert read("hermes", "", [*answer]) == {"content": answer, "reasoning": "", "calls": []}


NAMED = {
    "hermes": '<tool_call>{"arguments": {"a": 1}, "name": "NAME"}</tool_call>',
    "tags": "<tool_call><function=NAME><parameter=a>1</parameter></function></tool_call>",
    "llama3": '{"name": "NAME", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "NAME", "arguments": {"a": 1}}]',
    "mistral names": '[TOOL_CALLS]NAME[ARGS]{"a": 1}',
    "gemma": "<|tool_call>call:NAME{a:1}<tool_call|>",
    "deepseek": f"{DS[0]}{D['b']}function{D['s']}NAME\n```json\n{{}}\n```{D['e']}{DS[1]}",
    "deepseek 3.1": f'{DS[0]}{D["b"]}NAME{D["s"]}{{"a": 1}}{D["e"]}{DS[1]}',
    "harmony": '<|channel|>commentary to=functions.NAME<|message|>{"a": 1}<|call|>',
}


@pytest.mark.parametrize("form", NAMED)
@pytest.mark.parametrize("name", ["", "get weather", "<b>", "n" * 257, "wetter\xad", "é", "a/b-1"])
def test_a_call_has_a_name_that_a_tool_can_have(form: str, name: str) -> None:
    """Else the message that it stands in would be refused in the next conversation."""
    kind = "hermes" if form == "tags" else form.split()[0]
    answer = NAMED[form].replace("NAME", name)
    tools = [{"function": {"name": name}}]
    found = read(kind, "", [answer], tools)
    if form == "harmony" and " " in name:
        name = name.split()[0]  # what follows a name there is a type
    if NAME.fullmatch(name):
        assert [call[0] for call in found["calls"]] == [name] and not found["content"]
    else:
        assert not found["calls"]
        assert found["content"] == ('{"a": 1}' if form == "harmony" else answer)
    assert read(kind, "", [*answer], tools) == found
    for cut in range(len(answer)):
        assert read(kind, "", [answer[:cut], answer[cut:]], tools) == found


@pytest.mark.parametrize("call_id", ["", "\n", "\x1b[0m", "i" * 257, 7, None, "call_1"])
def test_a_call_has_an_id_that_a_conversation_can_have(call_id: Any) -> None:
    call = json.dumps({"id": call_id, **CALL})
    forms = {"hermes": f"<tool_call>{call}</tool_call>", "mistral": f"[TOOL_CALLS][{call}]"}
    if isinstance(call_id, str):
        forms["mistral "] = f"[TOOL_CALLS]weather[CALL_ID]{call_id}[ARGS]{JSON}"
    for kind, answer in forms.items():
        pieces = AnswerParser(FORMATS[kind.strip()].parse, "", [WEATHER]).feed(answer)
        assert [piece.id for piece in pieces if piece.kind == "call"] == [
            call_id if call_id == "call_1" else None
        ]


@pytest.mark.parametrize(
    "answer",
    [
        '{"name": "Ada Lovelace"@, "born": 1815}',
        '{"name": "Ada Lovelace"@, "arguments": {}}',
        '{"name": "weather", "born":@ 1815}',
        '{"born":@ 1815, "name": "weather", "parameters": {}}',
        '{"id": 7, "type": "x", "poem":@ "weather"}',
        '{"parameters": {}, "name": "Ada"@}',
        '{"name": ["weather"]@}',
        '{"parameters": {"city": "Par',
    ],
)
def test_bare_json_that_calls_no_tool_is_content(answer: str) -> None:
    """And comes as soon as it is known to be none, which is at the `@`."""
    first, _, last = answer.partition("@")
    for parts in ([first, last], [*first, *last]):
        found = {"content": first + last, "reasoning": "", "calls": []}
        assert read("llama3", "", parts) == found
    parser = AnswerParser(FORMATS["llama3"].parse, "", [WEATHER])
    assert not parser.feed(first[:-1])
    assert "".join(piece.text for piece in parser.feed(first[-1])) == (first if last else "")


@pytest.mark.parametrize(
    ("answer", "arguments"),
    [
        ('{"name": "weather"}', "{}"),
        ('{"name": "weather"', ""),
        ('{"type": "function", "id": "a", "name": "weather"}', "{}"),
        (f'{{"name": "weather", "arguments": {JSON}}}', JSON),
        (f'{{"parameters": {JSON}, "name": "weather"}}', JSON),
        ('<|python_tag|>{"name": "search", "why": "", "parameters": {}}', "{}"),
    ],
)
def test_bare_json_that_calls_a_tool(answer: str, arguments: str) -> None:
    for parts in ([answer], [*answer]):
        found = read("llama3", "", parts)
        assert [call[1] for call in found["calls"]] == [arguments] and not found["content"]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('"name": "weather", "name": "other", "arguments": {"a": 1}', '{"a": 1}'),
        ('"name": "weather", "arguments": {"a": 1}, "parameters": {"b": 1}', '{"a": 1}'),
        ('"arguments": {"a": 1}, "parameters": {"b": 1}, "name": "weather"', '{"a": 1}'),
        ('"parameters": {"a": 1}, "name": "weather", "arguments": {"b": 1}', '{"a": 1}'),
        ('"why": "b", "name": "weather", "arguments": {}, "more": 1', "{}"),
        ('"name": "weather", "city": "x"', None),
        ('"name": "weather", 7', None),
    ],
)
def test_a_call_has_one_name_and_one_set_of_arguments(body: str, arguments: str | None) -> None:
    answer = f"<tool_call>{{{body}}}</tool_call>"
    calls = [["weather", arguments]] if arguments else []
    expected = {"content": "" if calls else answer, "reasoning": "", "calls": calls}
    assert read("hermes", "", [answer]) == read("hermes", "", [*answer]) == expected


ONE = '{"name": "weather", "arguments": {"a": 1}}'
CALLED = ["weather", '{"a": 1}']


@pytest.mark.parametrize(
    ("kind", "answer", "content", "count"),
    [
        ("hermes", f"<tool_call>{ONE}\n{ONE}</tool_call>", "", 2),
        ("hermes", f"<tool_call>{ONE}<tool_call>{ONE}</tool_call>done", "done", 2),
        ("hermes", f"<tool_call>{ONE} Now I wait.", "Now I wait.", 1),
        ("hermes", f"<tool_call>{ONE} so </tool_call> it is", "soit is", 1),
        ("hermes", f"<tool_call>{ONE[:-1]} so </tool_call>", "so", 1),
        ("hermes", f"<tool_call>{ONE}}}\n</tool_call>", "", 1),
        ("hermes", f"<tool_call>{ONE}\n{{no}}</tool_call>", "{no}", 1),
        ("hermes", f"<tool_call>{ONE}</tool_call> a </tool_call>", "a </tool_call>", 1),
        ("mistral", "so [TOOL_CALLS] ", "so", 0),
        ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", 0),
        ("mistral", "so [TOOL_CALLS][broken", "so [TOOL_CALLS][broken", 0),
        ("mistral", f"[TOOL_CALLS][{ONE}, no]", ", no]", 1),
        ("deepseek", f"{DS[0]}weather{D['s']}{CALLED[1]}{D['e']}{DS[1]}done", "done", 1),
        ("deepseek", f"{D['b']}weather{D['s']}{CALLED[1]}{D['e']}", "", 1),
        ("deepseek", f"{DS[0]}{D['b']}weather{D['s']}{CALLED[1]} so{D['e']}{DS[1]}", "so", 1),
        ("deepseek", f"{DS[0]}{D['b']}weath", f"{DS[0]}{D['b']}weath", 0),
        (
            "harmony",
            f"<|channel|>commentary to=functions.weather<|message|>{CALLED[1]} so<|call|>",
            "so",
            1,
        ),
    ],
)
def test_text_beside_calls_stays_content(kind: str, answer: str, content: str, count: int) -> None:
    found = read(kind, "", [answer])
    assert found["calls"] == count * [CALLED] and found["content"] == content
    assert read(kind, "", [*answer]) == found


PARTS = {
    "hermes": (
        "<function=weather>", "<function=", "<parameter=city>", "<parameter=", ">", "</parameter>",
        "</function>", ONE, ONE[:20], ONE[:-1], "{", "}",
    ),
    "llama3": (ONE, ONE[:20], ONE[:-1], ";", "{", "}"),
    "mistral": (ONE, ONE[:20], ONE[:-1], "[", ",", "]", "{", "}"),
    "gemma": ("weather{", "{", "}", ":", '"'),
    "deepseek": ("function", "```json", "\n", "{", "}"),
}  # fmt: skip


@given(kind=st.sampled_from(sorted(PARTS)), data=st.data())
def test_no_word_of_an_answer_is_lost(kind: str, data: st.DataObject) -> None:
    words = (*PARTS[kind], *FORMATS[kind].marks, "", "")
    chosen = data.draw(st.lists(st.sampled_from(words), max_size=12))
    said = [word or f"word{place}" for place, word in enumerate(chosen)]
    answer = " ".join(said)
    parser = AnswerParser(FORMATS[kind].parse, "", [WEATHER])
    pieces = parser.feed(answer) + parser.finish()
    found = "".join(piece.text + (piece.id or "") for piece in pieces)
    for word in said:
        assert not word.startswith("word") or word in found
    assert read(kind, "", [*answer]) == read(kind, "", [answer])


def test_broken_arguments_are_given_as_they_are() -> None:
    broken = '<tool_call>{"name": "weather", "arguments": {"city": "Par'
    assert read("hermes", "", [*broken])["calls"] == [["weather", '{"city": "Par']]


GEMMA_TEXTS = st.text('ab,:{}[]<|>\\\n"é1', max_size=8).filter(lambda text: QUOTE not in text)
KEYS = st.text("ab_é1", min_size=1, max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | GEMMA_TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
    max_leaves=8,
)


def in_gemma(value: Any, *, is_marked: bool) -> str:
    """A value as Gemma writes it, its strings between marks or as JSON has them."""
    if isinstance(value, dict):
        found = (f"{key}:{in_gemma(each, is_marked=is_marked)}" for key, each in value.items())
        return "{" + ",".join(found) + "}"
    if isinstance(value, list):
        return f"[{','.join(in_gemma(each, is_marked=is_marked) for each in value)}]"
    if isinstance(value, str) and is_marked:
        return f"{QUOTE}{value}{QUOTE}"
    return json.dumps(value)


@given(value=st.dictionaries(KEYS, VALUES))
def test_gemmas_notation_is_read_as_transformers_does(value: dict[str, Any]) -> None:
    lax = {"unquoted_keys": True, "string_delims": [[QUOTE, QUOTE]]}
    text = in_gemma(value, is_marked=True)
    assert json.loads(as_json(text)) == parse_content(text, "json", lax) == value


@given(value=st.dictionaries(KEYS, VALUES))
def test_gemmas_keys_beside_plain_strings(value: dict[str, Any]) -> None:
    """Which may look like keys within."""
    assert json.loads(as_json(in_gemma(value, is_marked=False))) == value


@pytest.mark.parametrize(
    "text",
    ['{a:<|"|>x', '{a:<|"|>x}', '{a:"x}', '{a:"\\', '{a:x<|"|>}', "{a:", "{a:b}", '{"a":1,}'],
)
def test_what_is_not_gemmas_notation_stays_as_it_is(text: str) -> None:
    assert as_json(text) == text


@pytest.mark.parametrize("unit", ['<|"|>x<|"|>,', '"x",'])
def test_a_call_of_gemma_with_very_many_strings(unit: str) -> None:
    answer = "<|tool_call>call:weather{l:[" + unit * 20_000 + "0]}<tool_call|>"
    ((called, arguments),) = read("gemma", "", [answer])["calls"]
    assert called == "weather" and json.loads(arguments) == {"l": [*["x"] * 20_000, 0]}


DEEP = "[" * 100_000
VALUE = "<parameter=days>" + DEEP + "</parameter>"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("hermes", f"<tool_call><function=weather>{VALUE}</function></tool_call>"),
        ("hermes", f'<tool_call>{{"arguments": "{DEEP}", "name": "weather"}}</tool_call>'),
        ("hermes", f'<tool_call>{{"arguments": {DEEP}{"]" * len(DEEP)}, "name": "weather"}}'),
        ("gemma", f"<|tool_call>call:weather{{days:{DEEP}}}<tool_call|>"),
        ("gemma", f'<|tool_call>call:weather{{"days": {DEEP}{"]" * len(DEEP)}}}<tool_call|>'),
    ],
)
def test_arguments_that_are_too_deep_are_text(name: str, answer: str) -> None:
    """A model may write anything, on the engine's loop."""
    ((called, arguments),) = read(name, "", [answer])["calls"]
    assert called == "weather" and DEEP in arguments


CLOSING = "a <tool_call|> </parameter> <|call|> }"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("gemma", '<|tool_call>call:weather{city:<|"|>TEXT<|"|>}<tool_call|>'),
        ("gemma", '<|tool_call>call:weather{"city": "TEXT"}<tool_call|>'),
        (
            "harmony",
            '<|channel|>commentary to=functions.weather<|message|>{"city": "TEXT"}<|call|>',
        ),
        (
            "hermes",
            '<tool_call><function=weather><parameter=more>{"city": "TEXT"}</parameter>'
            "</function></tool_call>",
        ),
    ],
)
def test_closing_marks_in_texts_of_arguments(name: str, answer: str) -> None:
    more = {"type": "object", "properties": {"more": {"type": "object"}}}
    tool = {"function": {"name": "weather", "parameters": more}}
    whole = answer.replace("TEXT", CLOSING)
    ((called, arguments),) = read(name, "", [*whole], [tool])["calls"]
    found = json.loads(arguments)
    assert called == "weather" and found.get("more", found) == {"city": CLOSING}
    for cut in range(len(whole)):
        assert read(name, "", [whole[:cut], whole[cut:]], [tool])["calls"] == [[called, arguments]]


def test_a_call_that_is_cut_off_has_no_whole_arguments() -> None:
    """In no format, wherever the cut is: a caller must not take them for all of them."""
    for name, (kind, tail, answer, _) in ANSWERS.items():
        for end in range(len(answer)):
            for called, arguments in read(kind, tail, [answer[:end]])["calls"]:
                assert called == "weather"
                with suppress(ValueError):
                    assert json.loads(arguments) == ARGUMENTS, (name, answer[:end])


def test_a_call_that_is_cut_off_behind_its_name_has_no_arguments() -> None:
    first = '<tool_call>{"name": "weather"'
    for last in ("", " ", ",", ', "argu', ', "arguments"', ', "arguments": ', ', "id": "x'):
        for parts in ([first + last], [*first, *last]):
            found = {"content": "", "reasoning": "", "calls": [["weather", ""]]}
            assert read("hermes", "", parts) == found


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("", ""),
        ("<parameter=ci", '{"ci'),
        ("<parameter=city>Par</para", '{"city": "Par</para'),
        ("<parameter=city>x</parameter><parameter=days", '{"city": "x", "days'),
        ("<parameter=city>x</parameter></tool_call>", '{"city": "x"}'),
        ("</tool_call>", "{}"),
        ("</function>", "{}"),
    ],
)
def test_arguments_in_tags_are_whole_at_their_end(body: str, arguments: str) -> None:
    answer = "<tool_call><function=weather>" + body
    for parts in ([answer], [*answer]):
        assert read("hermes", "", parts)["calls"] == [["weather", arguments]]


def test_a_value_in_tags_that_is_no_json_ends_at_its_tag() -> None:
    schema = {"properties": {"more": {"type": "object"}, "days": {"type": "integer"}}}
    tool = {"function": {"name": "weather", "parameters": schema}}
    answer = (
        "<tool_call><function=weather><parameter=more>{'a': [</parameter>"
        "<parameter=days>3</parameter></function></tool_call>done"
    )
    found = read("hermes", "", [*answer], [tool])
    assert found == read("hermes", "", [answer], [tool]) and found["content"] == "done"
    assert json.loads(found["calls"][0][1]) == {"more": "{'a': [", "days": 3}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "string", "nullable": True}, "nullable", "nullable"),
        ({"type": "string", "enum": ["a"], "nullable": True}, "None", None),
        ({"type": "string", "nullable": False}, "null", "null"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, "{a", "{a"),
        ({"anyOf": [{"enum": ["auto"]}, {"type": "integer"}]}, "auto", "auto"),
        ({"anyOf": [{"enum": ["auto"]}, {"type": "integer"}]}, "7", 7),
        ({"$ref": "#/$defs/n"}, "7", 7),
        ({"$ref": "#/$defs/loop"}, "7", "7"),
        ({"type": "boolean"}, "True", True),
        ({}, "[1]", "[1]"),
        (7, "[1]", "[1]"),
    ],
)
def test_texts_in_tags_by_their_schema(schema: Any, text: str, value: Any) -> None:
    definitions = {"n": {"type": "number"}, "loop": {"$ref": "#/$defs/loop"}}
    parameters = {"properties": {"x": schema}, "$defs": definitions}
    tool = {"function": {"name": "f", "parameters": parameters}}
    answer = f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function></tool_call>"
    assert json.loads(read("hermes", "", [answer], [tool])["calls"][0][1]) == {"x": value}


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("hermes", "<tool_call><function=weather><parameter=city>"),
        ("gemma", '<|tool_call>call:weather{city:<|"|>'),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "'),
        ("harmony", '<|channel|>commentary to=functions.weather<|message|>{"city": "'),
    ],
)
def test_a_long_argument_is_looked_through_once(name: str, begin: str) -> None:
    parser = AnswerParser(FORMATS[name].parse, "", [WEATHER])
    parser.feed(begin)
    for _ in range(1000):
        parser.feed("some text ")
    assert len(parser._text._text) < 100  # what is left to look through


@pytest.mark.parametrize(
    ("name", "first", "head"),
    [
        ("hermes", "", "<tool_call>{"),
        ("hermes", "", '<tool_call>{"name": {'),
        ("hermes", "<tool_call><function=put>", "<parameter=x>{</parameter>"),
        ("mistral", "", '[TOOL_CALLS][{"name": {'),
    ],
)
def test_calls_without_an_end_are_looked_through_so_often(
    monkeypatch: pytest.MonkeyPatch, name: str, first: str, head: str
) -> None:
    """However many there are: each could be one up to the end of the answer."""
    num_read = 0
    own = JsonScan.over

    def counted(scan: JsonScan, text: str, start: int) -> tuple[int, bool]:
        nonlocal num_read
        place, is_whole = own(scan, text, start)
        num_read += place - start
        return place, is_whole

    monkeypatch.setattr(JsonScan, "over", counted)
    schema = {"type": "object", "properties": {"x": {"type": "object"}}}
    tool = {"type": "function", "function": {"name": "put", "parameters": schema}}
    text = first + 2000 * head
    found = read(name, "", [text], [tool])
    assert num_read < 2 * MOST_IN_VAIN + 8 * len(text)
    if not first and name == "hermes":
        assert found["content"] == text and not found["calls"]


def test_no_arguments_are_an_empty_object() -> None:
    found = read("hermes", "", ['<tool_call>{"name": "weather"}</tool_call> done'])
    assert found["calls"] == [["weather", "{}"]] and found["content"] == "done"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|im_start|>assistant <tool_call>", "hermes"),
        ("[INST] [TOOL_CALLS]", "mistral"),
        ("<|start|>assistant<|channel|>", "harmony"),
        ("<|python_tag|>", "llama3"),
        ("<think> x", "thinking"),
        ("no marks", "plain"),
    ],
)
def test_formats_are_found_by_their_marks(template: str, name: str) -> None:
    assert find_format(template).name == name


DESCRIBED: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<call>", "close": "</call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<end>"},
    },
}  # fmt: skip


def test_a_format_that_the_checkpoint_describes() -> None:
    answer_format = find_format("", DESCRIBED)
    answer = f"hm</think>\n\nI look. <call>{json.dumps(CALL)}</call>"

    def found(parts: list[str]) -> list[Any]:
        tail = "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n<think>\n"
        parser = AnswerParser(answer_format.parse, tail, [WEATHER])
        pieces = [piece for part in parts for piece in parser.feed(part)] + parser.finish()
        texts = {kind: "" for kind in ("reasoning", "content", "call", "arguments")}
        for piece in pieces:
            texts[piece.kind] += piece.text
        return [*texts.values()]

    whole = found([answer])
    assert whole[:3] == ["hm", "I look.", "weather"] and json.loads(whole[3]) == ARGUMENTS
    assert found([*answer]) == whole
    for no_call in ("[1]", "7", '{"name": "get weather"}', '{"name": 7}', '{"arguments": {}}'):
        answer = f"x</think> <call>{no_call}</call>"
        assert found([answer]) == found([*answer]) == ["x", no_call, "", ""]
    broken = "x</think> <call>{broken</call> y"
    assert found([broken]) == found([*broken]) == ["x", "{broken y", "", ""]


def test_what_is_thought_is_known_as_it_comes() -> None:
    cases = [
        ("hermes", "", "x", "<think>", "hm <b", "</think>", "yes"),
        ("hermes", "<think>\n", "", "", "hm", "</think>", "yes<think"),
        ("deepseek", "", "", "<think>", "hm", "</think>", f"yes{DS[0]}"),
        ("mistral", "", "", "[THINK]", "hm", "[/THINK]", "[TOOL_CALLS]"),
        ("gemma", "", "", "<|channel>thought", "\nhm", "<channel|>", "yes"),
        ("harmony", "", "", "<|channel|>analysis<|message|>", "hm", "<|end|>", "<|channel|>final"),
        ("thinking", "<think>", "", "", "hm", "</think>", "yes <think>"),
    ]
    for name, tail, *parts in cases:
        parser = AnswerParser(FORMATS[name].parse, tail, [])
        _, begin, thought, end, _ = parts
        assert parser.is_thinking is (not begin)
        for number, part in enumerate(parts):
            for place, letter in enumerate(part, 1):
                parser.feed(letter)
                is_over = number == 3 and place == len(end)
                has_begun = number in (2, 3) or (number == 1 and place == len(begin))
                assert parser.is_thinking is (has_begun and not is_over), (name, part[:place])
        assert thought


@pytest.mark.parametrize("name", FORMATS)
def test_blanks_are_looked_at_once_however_many_come(name: str) -> None:
    """A model may write nothing else for long: what is held back is no part of what is searched."""
    parser = AnswerParser(FORMATS[name].parse, "", [WEATHER])
    before = "<|channel|>final<|message|>a" if name == "harmony" else "a"
    pieces = parser.feed(before)
    for _ in range(1000):
        pieces += parser.feed(" \n")
    assert len(parser._text._text) < 100
    pieces += parser.feed("b") + parser.finish()
    assert "".join(piece.text for piece in pieces) == "a" + " \n" * 1000 + "b"


@pytest.mark.parametrize("called", ["function", "weather"])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_tool_may_be_called_function(called: str, size: int) -> None:
    """An older form of calls has this word in each."""
    tools = [WEATHER, {"type": "function", "function": {"name": "function"}}]
    older = f"{D['b']}function{D['s']}{called}\n```json\n{JSON}\n```{D['e']}"
    newer = f"{D['b']}{called}{D['s']}{JSON}{D['e']}"
    for call in (older, newer):
        text = DS[0] + call + DS[1]
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        assert read("deepseek", "", parts, tools)["calls"] == [[called, JSON]]
