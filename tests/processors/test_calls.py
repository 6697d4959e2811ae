"""Grammars of answers that have to call a tool: all that they allow is read as such a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, hf
from transformers import AddedToken

from aioengine.errors import InvalidRequestError
from aioengine.processors.chat.answers import AnswerParser
from aioengine.processors.chat.calls import CallForm, write_grammar
from aioengine.processors.chat.formats import FORMATS, AnswerFormat, find_format
from tests.processors.test_answers import ARGUMENTS, DESCRIBED, WEATHER, read_pieces
from tests.support.tiny import tiny_tokenizer

OTHER = {"type": "function", "function": {"name": "other"}}
TEMPLATES = {
    "mistral names": "[ARGS]",
    "deepseek old": "```json",
    "hermes tags": "<tool_call><function=",
}
NAMES = sorted(name for name, each in FORMATS.items() if each.calls is not None)


DESCRIBED_NAMES = {
    **DESCRIBED,
    "fields": {
        **DESCRIBED["fields"],
        "tool_calls": {
            "open_pattern": r"<\|call\|>to:(?P<name>[^\s{]+)\s*",
            "close_pattern": r"<call\|>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
DESCRIBED_TAGS = {
    **DESCRIBED,
    "fields": {
        **DESCRIBED["fields"],
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
                "value_parser": {"name": "text"},
            },
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
DESCRIPTIONS: dict[str, Any] = {"described": DESCRIBED, "described names": DESCRIBED_NAMES}
KINDS = [*NAMES, *TEMPLATES, *DESCRIPTIONS]


def form_of(kind: str) -> tuple[AnswerFormat, CallForm]:
    """The format of a kind, and its form of calls."""
    description = {**DESCRIPTIONS, "described tags": DESCRIBED_TAGS}.get(kind)
    answers = find_format("", description) if description else FORMATS[kind.split()[0]]
    template = TEMPLATES.get(kind, TEMPLATES["hermes tags"] if description else "")
    form = answers.calls(template) if answers.calls else None
    assert form is not None
    return answers, form


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "described tags"])
def test_calls_as_the_format_writes_them(kind: str, is_special: bool) -> None:
    answers, form = form_of(kind)
    tokenizer = tiny_tokenizer()
    special: dict[str, int] = {}
    if is_special:
        tokenizer.add_tokens([AddedToken(mark, special=True) for mark in answers.marks])
        special = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in answers.marks}
    vocabulary = hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=[2])
    opening, closing = answers.thought or ("", "")

    def read(text: str, tools: list[Any], *, is_one: bool, thought: str = "") -> Any:
        """The calls of a text that the grammar allows; None for another."""
        numbered = dict(enumerate(tools))
        written = write_grammar(form, numbered, is_one=is_one, thought=thought, special=special)
        grammar = LLMatcher.grammar_from_lark(written.text)
        assert not LLMatcher.validate_grammar(grammar, vocabulary)
        matcher = LLMatcher(vocabulary, grammar)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        if matcher.try_consume_tokens(token_ids) < len(token_ids) or not matcher.is_accepting():
            return None
        tail = f"<|im_start|>assistant\n{opening}\n" if thought else ""
        parser = AnswerParser(answers.parse, tail, [WEATHER, OTHER])
        pieces = parser.feed(text) + parser.finish()
        assert not [piece for piece in pieces if piece.kind == "content"]
        names = [piece.text for piece in pieces if piece.kind == "call"]
        given = ["".join(p.text for p in pieces if p.kind == "arguments" and p.call == number)
                 for number in range(len(names))]  # fmt: skip
        return [*zip(names, map(json.loads, given), strict=True)]

    # A mark that is a token of its own stands in no text.
    is_plain = is_special or kind == "described tags"  # its closing mark may stand in no text
    arguments = {"city": "Paris", "days": 3} if is_plain else ARGUMENTS
    weather, other = form.write("weather", arguments), form.write("other", {})
    one = form.first + weather + form.last
    two = form.first + weather + form.between + other + form.last
    assert read(one, [WEATHER], is_one=True) == [("weather", arguments)]
    assert read(two, [WEATHER, OTHER], is_one=False) == [("weather", arguments), ("other", {})]
    assert read(two, [WEATHER, OTHER], is_one=True) is None
    assert read(form.first + other + form.last, [WEATHER], is_one=True) is None
    assert read("Hello", [WEATHER], is_one=False) is None
    wrong = form.first + form.write("weather", {"days": "x"}) + form.last
    assert read(wrong, [WEATHER], is_one=True) is None
    if opening:
        text = f"hm {{}}\n{closing}\n\n{one}"
        assert read(text, [WEATHER], is_one=True, thought=closing) == [("weather", arguments)]
        assert read(one, [WEATHER], is_one=True, thought=closing) is None


def test_descriptions_of_which_no_form_is_known() -> None:
    fields = {
        "content": "kv-lines",
        "open_pattern": "<call>|<calls>",
        "close": "</call>",
        "repeats": True,
    }
    unknown = {**DESCRIBED, "fields": {"tool_calls": fields, "content": {}}}
    answers = find_format("", unknown)
    assert answers.calls is not None and answers.calls("") is None and answers.thought is None


def test_the_end_of_an_answer_may_be_a_part_of_its_last_mark() -> None:
    """The token that ends it comes to no text."""
    calls = {"open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
             "close_pattern": r"\}<\|eot_id\|>\s*", "repeats": True, "content": "json",
             "transform": {"function": {"name": "{name}", "arguments": "{content}"}}}  # fmt: skip
    answers = find_format("", {**DESCRIBED, "fields": {"tool_calls": calls, "content": {}}})
    for end in ("}<|eot_id|>", "}<|eot", "}"):
        text = '{"name": "weather", "parameters": {"city": "Paris"}' + end
        found = read_pieces(AnswerParser(answers.parse, "", [WEATHER]), [*text])
        assert found["calls"] == [["weather", '{"city": "Paris"}']] and not found["content"]
    assert "<|eot_id|>" in "".join(answers.marks)


@pytest.mark.parametrize("kind", [*KINDS, "described tags"])
def test_a_name_that_is_spelled_like_a_special_token(kind: str) -> None:
    _, form = form_of(kind)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("weather", special=True)])
    special = {"weather": tokenizer.convert_tokens_to_ids("weather")}
    vocabulary = hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=[2])
    written = write_grammar(form, {0: WEATHER}, is_one=True, special=special)
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(written.text))
    text = form.first + form.write("weather", {"city": "Rome"}) + form.last
    letters = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert special["weather"] not in letters
    assert matcher.try_consume_tokens(letters) == len(letters)
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"pattern": r"^\d{2}/[\w-]+$"}, ["12/a-b"], ["1/a", "12/", "٣٣/a", "12/a b"]),
        ({"pattern": "b"}, ["b", "abc"], ["ac"]),
        ({"minLength": 2, "maxLength": 3}, ["ab", "a\nb"], ["a", "abcd"]),
        ({"enum": ["a", "</p>"]}, ["a", "</p>"], ["b"]),
        ({}, ["", "a\n\nb", "</p"], []),
    ],
)
def test_texts_in_tags_follow_their_schema(
    schema: Any, taken: list[str], refused: list[str]
) -> None:
    _, form = form_of("hermes tags")
    tokenizer = tiny_tokenizer()
    vocabulary = hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=[2])
    properties = {"x": {"type": "string", **schema}}
    tool = {"function": {"name": "f", "parameters": {"properties": properties, "required": ["x"]}}}
    written = write_grammar(form, {0: tool}, is_one=True, special={})
    grammar = LLMatcher.grammar_from_lark(written.text)
    for text in [*taken, *refused]:
        matcher = LLMatcher(vocabulary, grammar)
        token_ids = tokenizer.encode(form.write("f", {"x": text}), add_special_tokens=False)
        is_taken = matcher.try_consume_tokens(token_ids) == len(token_ids)
        assert (is_taken and matcher.is_accepting()) == (text in taken), text


@pytest.mark.parametrize(
    ("parameters", "is_open"),
    [
        ({}, False),
        ({"properties": {"a": {"type": "integer"}}}, False),
        ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, False),
        ({"properties": {"a": {"type": "integer"}}, "additionalProperties": True}, True),
        ({"properties": {"a": {"type": "integer"}}, "patternProperties": {"^b": {}}}, True),
        ({"properties": {"a": {"type": "integer"}}, "required": ["b"]}, True),
    ],
)
def test_arguments_without_a_name_in_the_schema_are_not_written(
    parameters: dict[str, Any], is_open: bool
) -> None:
    _, form = form_of("hermes")
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    written = write_grammar(form, {0: tool}, is_one=True, special={})
    tokenizer = tiny_tokenizer()
    vocabulary = hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=[2])
    grammar = LLMatcher.grammar_from_lark(written.text)
    named = {"a": 1} if "properties" in parameters else {}
    taken = {}
    for name, extra in (("own", {}), ("more", {"b": 2})):
        call = form.first + form.write("f", {**named, **extra}) + form.last
        matcher = LLMatcher(vocabulary, grammar)
        token_ids = tokenizer.encode(call, add_special_tokens=False)
        taken[name] = matcher.try_consume_tokens(token_ids) == len(token_ids)
    assert taken["more"] is is_open
    assert taken["own"] is (parameters.get("required") != ["b"])


@pytest.mark.parametrize("required", [3, "a", [[]], [{}], {"a": 1}, None])
def test_schemas_that_are_none_are_left_to_the_compiler(required: Any) -> None:
    _, form = form_of("hermes")
    parameters = {"properties": {"a": {}}, "required": required}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert (
        "additionalProperties" not in write_grammar(form, {0: tool}, is_one=True, special={}).text
    )


@pytest.mark.parametrize("kind", ["llama3", "hermes", "hermes tags"])
def test_arguments_are_an_object(kind: str) -> None:
    """Whatever else a schema says: another value could not be read as arguments."""
    _, form = form_of(kind)
    names = {"city": {"type": "string"}}
    for wanted in ("array", "string", ["array", "null"], 7, None):
        function = {"name": "weather", "parameters": {"type": wanted, "properties": names}}
        with pytest.raises(InvalidRequestError, match=r"of weather must be of an object") as caught:
            write_grammar(form, {2: {"function": function}}, is_one=True, special={})
        assert caught.value.parameter == "tools[2].function.parameters"
    function = {"name": "weather", "parameters": {"type": ["null", "object"], "properties": names}}
    written = write_grammar(form, {0: {"function": function}}, is_one=True, special={})
    vocabulary = hf.from_tokenizer(tiny_tokenizer(), n_vocab=len(tiny_tokenizer()), eos_token=[2])
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(written.text))
    call = form.write("weather", {"city": "Paris"})
    before = form.before.replace("NAME", "weather")
    for text, is_allowed in ((call, True), (f"{before}null", False)):
        token_ids = tiny_tokenizer().encode(text, add_special_tokens=False)
        assert (matcher.validate_tokens(token_ids) == len(token_ids)) == is_allowed


def test_a_thought_is_followed_by_a_call() -> None:
    """A model that likes blank lines would else write nothing but these."""
    tokenizer = tiny_tokenizer()
    vocabulary = hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=[2])
    _, form = form_of("hermes")
    written = write_grammar(form, {0: WEATHER}, is_one=True, thought="</think>", special={})
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(written.text))
    for lines, is_allowed in ((0, True), (2, True), (4, True), (5, False)):
        text = f"hm</think>{chr(10) * lines}{form.before[:5]}"
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert (matcher.validate_tokens(token_ids) == len(token_ids)) == is_allowed, lines
