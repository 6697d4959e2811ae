"""Grammars of answers that have to call a tool: all that they allow is read as such a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, hf
from transformers import AddedToken

from aioengine.processors.chat.answers import AnswerParser
from aioengine.processors.chat.calls import CallForm, write_grammar
from aioengine.processors.chat.formats import FORMATS, AnswerFormat
from tests.processors.test_answers import ARGUMENTS, WEATHER
from tests.support.tiny import tiny_tokenizer

OTHER = {"type": "function", "function": {"name": "other"}}
TEMPLATES = {
    "mistral names": "[ARGS]",
    "deepseek old": "```json",
    "hermes tags": "<tool_call><function=",
}
NAMES = sorted(name for name, each in FORMATS.items() if each.calls is not None)


KINDS = [*NAMES, *TEMPLATES]


def form_of(kind: str) -> tuple[AnswerFormat, CallForm]:
    """The format of a kind, and its form of calls."""
    answers = FORMATS[kind.split()[0]]
    form = answers.calls(TEMPLATES.get(kind, "")) if answers.calls else None
    assert form is not None
    return answers, form


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("kind", KINDS)
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
        parser = AnswerParser(answers.parse, opening if thought else "", [WEATHER, OTHER])
        pieces = parser.feed(text) + parser.finish()
        assert not [piece for piece in pieces if piece.kind == "content"]
        names = [piece.text for piece in pieces if piece.kind == "call"]
        given = ["".join(p.text for p in pieces if p.kind == "arguments" and p.call == number)
                 for number in range(len(names))]  # fmt: skip
        return [*zip(names, map(json.loads, given), strict=True)]

    # A mark that is a token of its own stands in no text.
    arguments = {"city": "Paris", "days": 3} if is_special else ARGUMENTS
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
