"""Random schemas of tools: what a grammar allows is read as a call that satisfies the schema, in
every format; and a schema that cannot be followed is refused, with the tool's name."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import jsonschema
import pytest
from transformers import AddedToken

from aioengine.errors import InvalidRequestError
from aioengine.processors.chat.answers import AnswerParser
from aioengine.processors.chat.calls import CallForm, write_grammar
from aioengine.processors.chat.formats import AnswerFormat
from aioengine.sampling.structured_output import Grammars
from tests.processors.test_answers import read_pieces
from tests.processors.test_calls import KINDS, form_of
from tests.support.tiny import EOS, tiny_tokenizer

NAMES = ["city", "days", "größe", "a b", 'q"x', "name", "arguments", "x/y", "π", "null"]
TEXTS = ["rain", "Zürich", "a b", 'say "no"', "null", "3", "[1]", "</p>", "", "line\nline", "😀"]
PATTERNS = [
    "^[a-c]{1,3}$",
    "[0-9]+",
    "^(yes|no)$",
    "^[0-9]{2}-[a-z/]+$",
    "^a",
    "[^/]x$",
    "^[A-Z]{2}/[0-9]$",
]
UNUSUAL: list[dict[str, Any]] = [
    {"not": {"type": "string"}},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"const": 1}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "string", "pattern": "a(?!b)"},
    {"type": "string", "pattern": "("},
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"$ref": "#/nowhere"},
    {"type": "string", "if": {"minLength": 2}, "then": {"maxLength": 3}},
    {"type": 7},
    {"enum": []},
]
"""Schemas that no grammar is made of, or hardly any."""
MOST_TOKENS = 2000
HASTE = 200
"""Tokens after which a walk takes the nearest way to its end."""


class Schemas:
    """Makes schemas of the kinds that tools have; `unusual`: the share of values that are not."""

    def __init__(self, seed: int, unusual: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._unusual = unusual
        self._definitions: dict[str, Any] = {}
        self.is_usual = True

    def of_tool(self) -> dict[str, Any]:
        """Make a schema of arguments."""
        if self._random.random() < 0.2:
            self._definitions["place"] = self._object(2)
        if self._random.random() < 0.1:  # one that holds itself
            self._definitions["node"] = {
                "type": "object",
                "properties": {"value": self.value(2), "next": {"$ref": "#/$defs/node"}},
                "required": ["value"],
            }
        schema = {} if self._random.random() < 0.05 else self._object(0)
        if self._definitions:
            schema["$defs"] = self._definitions
        return schema

    def value(self, depth: int) -> dict[str, Any]:
        """Make a schema of a value."""
        if self._random.random() < self._unusual:
            self.is_usual = False
            return dict(self._random.choice(UNUSUAL))
        kinds = [self._text, self._text, self._integer, self._number, self._enum, self._other]
        if depth < 3:
            kinds += [self._object, self._array, self._any_of, self._reference]
        found = self._random.choice(kinds)(depth + 1)
        if self._random.random() < 0.3:
            found["description"] = self._random.choice(TEXTS)
        return found

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(NAMES, self._random.randint(0, 4))
        found: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.value(depth + 1) for name in names},
            "required": [name for name in names if self._random.random() < 0.6],
        }
        if self._random.random() < 0.5:
            found["additionalProperties"] = False
        return found

    def _array(self, depth: int) -> dict[str, Any]:
        least = self._random.randint(0, 2)
        found = {"type": "array", "items": self.value(depth)}
        if self._random.random() < 0.5:
            found |= {"minItems": least, "maxItems": least + self._random.randint(0, 2)}
        return found

    def _any_of(self, depth: int) -> dict[str, Any]:
        if self._random.random() < 0.5:
            return {"anyOf": [self.value(depth), {"type": "null"}]}
        return {"anyOf": [self.value(depth) for _ in range(2)]}

    def _reference(self, depth: int) -> dict[str, Any]:
        if not self._definitions:
            return self.value(depth)
        return {"$ref": f"#/$defs/{self._random.choice([*self._definitions])}"}

    def _text(self, _depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "string"}
        chance = self._random.random()
        if chance < 0.25:
            found["pattern"] = self._random.choice(PATTERNS)
        elif chance < 0.5:
            found |= {"minLength": 1, "maxLength": self._random.randint(2, 9)}
        return found

    def _integer(self, _depth: int) -> dict[str, Any]:
        least = self._random.randint(-50, 50)
        bounds = {"minimum": least, "maximum": least + self._random.randint(0, 200)}
        return {"type": "integer", **(bounds if self._random.random() < 0.6 else {})}

    def _number(self, _depth: int) -> dict[str, Any]:
        bounds = {"exclusiveMinimum": 0, "maximum": 1.5}
        return {"type": "number", **(bounds if self._random.random() < 0.4 else {})}

    def _enum(self, _depth: int) -> dict[str, Any]:
        if self._random.random() < 0.3:
            return {"const": self._random.choice([*TEXTS, 3, True, None])}
        values = self._random.sample([*TEXTS, 1, 2.5, False, None], 3)
        return {"enum": values}

    def _other(self, _depth: int) -> dict[str, Any]:
        kinds: list[dict[str, Any]] = [
            {"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {},
            {"type": ["integer", "string"]}, {"type": "object"}, {"type": "array"},
        ]  # fmt: skip
        return dict(self._random.choice(kinds))


class Format(NamedTuple):
    answers: AnswerFormat
    form: CallForm
    tokenizer: Any
    special: dict[str, int]
    grammars: Grammars


@cache
def format_of(kind: str, is_special: bool) -> Format:
    answers, form = form_of(kind)
    tokenizer, special = tiny_tokenizer(), {}
    if is_special:
        tokenizer.add_tokens([AddedToken(mark, special=True) for mark in answers.marks])
        special = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in answers.marks}
    grammars = Grammars(tokenizer, len(tokenizer), frozenset({EOS}))
    MADE.append(grammars)
    return Format(answers, form, tokenizer, special, grammars)


MADE: list[Grammars] = []


@pytest.fixture(scope="module", autouse=True)
def no_threads_left() -> Iterator[None]:
    """End the threads that compile."""
    yield
    format_of.cache_clear()
    while MADE:
        MADE.pop().close()


def walk(matcher: Any, tokenizer: Any, end: str, rng: random.Random) -> str:
    """Write an answer that the grammar allows. `end`: of a call."""
    ends = ['"', 'x"', "}", "]", '"}', "</parameter>", "\n</parameter>\n", end, "1", ","]
    closing = [tokenizer.encode(end, add_special_tokens=False) for end in ends if end]
    token_ids: list[int] = []
    while len(token_ids) < MOST_TOKENS:
        if matcher.is_accepting():
            return str(tokenizer.decode(token_ids, skip_special_tokens=False))
        chosen: list[int] = []
        if rng.random() < 0.2 + len(token_ids) / HASTE:
            fits = [ids for ids in closing if matcher.validate_tokens(ids) == len(ids)]
            if len(token_ids) > HASTE:  # neither another digit nor another item
                fits = [ids for ids in fits if ids not in closing[-2:]] or fits
            chosen = rng.choice(fits) if fits else []
        if not chosen:
            bits = matcher.compute_bitmask()
            allowed = [i for i in range(len(tokenizer)) if bits[i // 8] >> i % 8 & 1]
            assert allowed and not matcher.is_error()
            chosen = [rng.choice(allowed)]
        assert matcher.consume_tokens(chosen)
        token_ids += chosen
    raise AssertionError(f"no end: {tokenizer.decode(token_ids[:HASTE])!r}")


def is_read(seed: int, unusual: float = 0.0) -> bool:
    """Whether a seed's schema is followed in its format, and not refused, as an unusual one may
    be."""
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    answers, form, tokenizer, special, grammars = format_of(kind, rng.random() < 0.5)
    schemas = Schemas(seed, unusual)
    schema = schemas.of_tool()
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    try:
        grammar = write_grammar(form, {3: tool}, is_one=True, special=special)
        (constraint,) = grammars.submit(grammar, 1).result()
    except InvalidRequestError as error:
        assert not schemas.is_usual, str(error)
        assert error.parameter == "tools[3].function.parameters"
        assert "weather" in str(error) and "tools[3]" in str(error)
        return False
    # What is described is read up to the first end, in a text too.
    end = "" if kind.startswith("described") else form.after
    answer = walk(constraint._matcher, tokenizer, end, rng)
    found = read_pieces(AnswerParser(answers.parse, "", [tool]), [answer])
    context = f"{kind}, seed {seed}: {answer!r} for {json.dumps(schema)}"
    assert found["content"] == "" and [call[0] for call in found["calls"]] == ["weather"], context
    arguments = json.loads(found["calls"][0][1])
    errors: Iterator[Any] = jsonschema.Draft202012Validator(schema).iter_errors(arguments)
    assert not [error.message for error in errors], context
    return True


@pytest.mark.parametrize("start", range(0, 100, 50))
def test_calls_satisfy_random_schemas(start: int) -> None:
    assert all(is_read(seed) for seed in range(start, start + 50))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(100, 1000, 100))
def test_calls_satisfy_a_thousand_schemas(start: int) -> None:
    assert all(is_read(seed) for seed in range(start, start + 100))


def test_a_schema_that_cannot_be_followed_is_refused_by_its_tool() -> None:
    found = [is_read(seed, unusual=0.3) for seed in range(2000, 2060)]
    assert 10 < sum(found) < 50
