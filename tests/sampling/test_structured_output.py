"""Output follows its schema, expression, choices or grammar, from a model that knows nothing."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, FinishReason, SamplingParams, StructuredOutputs
from aioengine.engine import constraints
from aioengine.errors import InvalidRequestError, OverloadedError
from aioengine.sampling import structured_output
from tests.support.engines import running_engine, until
from tests.support.tiny import save_tiny_llava, tiny_image

LONG = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("structured")
    save_tiny_llava(path)
    return path


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    async with running_engine(folder) as engine:
        yield engine


def params(structure: StructuredOutputs, **options: Any) -> SamplingParams:
    settings = {"temperature": 1.0, "seed": 3, "max_tokens": LONG, **options}
    return SamplingParams(structured_outputs=structure, **settings)


async def write(engine: AsyncEngine, structure: StructuredOutputs, **options: Any) -> str:
    output = await engine.generate("Write: ", params(structure, **options))
    assert output.outputs[0].finish_reason is FinishReason.STOP, output.text
    return output.text


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema whose values are short, so that any model comes to an end."""
    kinds = ["integer", "boolean", "enum", "string", "null"]
    kind = rng.choice([*kinds, "object", "object", "array"] if depth else kinds)
    if kind == "object":
        names = [f"{rng.choice('abcxyz')}{i}" for i in range(rng.randint(1, 3))]
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": names[: rng.randint(1, len(names))],
            "additionalProperties": False,
        }
    if kind == "array":
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": 1, "maxItems": 2}
    if kind == "integer":
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(1, 5)}
    if kind == "enum":
        return {"enum": [rng.choice([1, "two", None, "ü", [3], {"four": 5}]), "six"]}
    return {"type": kind}


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether `value` is what `random_schema` means by `schema`."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(schema["properties"])
            and all(is_valid(item, schema["properties"][name]) for name, item in value.items())
        )
    if kind == "array":
        return (
            isinstance(value, list)
            and 1 <= len(value) <= 2
            and all(is_valid(item, schema["items"]) for item in value)
        )
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    return value is None if kind == "null" else isinstance(value, bool)


async def test_200_random_schemas(engine: AsyncEngine) -> None:
    rng = random.Random(7)
    schemas = [random_schema(rng) for _ in range(200)]
    texts = await asyncio.gather(
        *(write(engine, StructuredOutputs(json=s), seed=i) for i, s in enumerate(schemas))
    )
    for text, schema in zip(texts, schemas, strict=True):
        assert is_valid(json.loads(text), schema), (text, schema)
    assert len(set(texts)) > 100


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_every_form(engine: AsyncEngine, temperature: float) -> None:
    options = {"temperature": temperature}
    pattern = r"[A-C]{2,4}-[0-9]{3}(ü|€)?"
    assert re.fullmatch(pattern, await write(engine, StructuredOutputs(regex=pattern), **options))
    choices = ["yes", "no", 'a "quoted" one', "größer", "line\nbreak"]
    assert await write(engine, StructuredOutputs(choice=choices), **options) in choices
    grammar = 'start: "(" (start | "x") ")"'
    found = await engine.generate(
        "Write: ", params(StructuredOutputs(grammar=grammar), max_tokens=60, **options)
    )
    if found.outputs[0].finish_reason is FinishReason.STOP:
        depth = found.text.count("(")
        assert found.text == "(" * depth + "x" + ")" * depth
    else:
        assert re.fullmatch(r"\(+x?\)*", found.text)
    found = await engine.generate(
        "Write: ", params(StructuredOutputs(json_object=True), max_tokens=60, **options)
    )
    assert found.text.startswith("{")


async def test_a_schema_as_text_and_as_an_object(engine: AsyncEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False  # type: ignore[assignment]
    one = await write(engine, StructuredOutputs(json=schema))
    assert one == await write(engine, StructuredOutputs(json=json.dumps(schema)))
    assert json.loads(one)["a"] in (True, False)


@pytest.mark.parametrize("run_ahead", [0, 1])
async def test_company_changes_nothing(engine: AsyncEngine, folder: Path, run_ahead: int) -> None:
    engine._core.device.run_ahead = run_ahead
    structure = StructuredOutputs(regex="[a-z ]{30,40}")
    alone = [await write(engine, structure, seed=seed) for seed in range(4)]
    together = await asyncio.gather(
        *(write(engine, structure, seed=seed) for seed in range(4)),
        engine.generate("free", SamplingParams(max_tokens=40, seed=1)),
        engine.generate("<image>", SamplingParams(max_tokens=40), images=[tiny_image(1)]),
    )
    assert together[:4] == alone
    # Room for three or four at a time, so that they are preempted.
    small = {"block_size": 4, "max_model_len": 64, "kv_cache_bytes": 1 << 16}
    async with running_engine(folder, **small) as scarce:
        scarce._core.device.run_ahead = run_ahead
        again = (write(scarce, structure, seed=seed) for seed in (*range(4), *range(4)))
        assert await asyncio.gather(*again) == alone * 2
        assert scarce.statistics().preemptions > 0
    several = await engine.generate("Write: ", params(structure, n=3, seed=0))
    assert [completion.text for completion in several.outputs] == alone[:3]


async def test_stop_strings_end_it_early(engine: AsyncEngine) -> None:
    structure = StructuredOutputs(regex="(ab){5}END(ab){5}")
    output = await engine.generate("Write: ", params(structure, stop="EN"))
    assert output.text == "ab" * 5
    assert output.outputs[0].stop_reason == "EN"


async def test_what_leaves_no_token(engine: AsyncEngine) -> None:
    """Other parameters may forbid all that the grammar allows: an error, and no other harmed."""
    free = engine.generate("free", SamplingParams(max_tokens=20, seed=1))
    only = engine.tokenizer.convert_tokens_to_ids(engine.tokenizer.tokenize("z"))
    clash = engine.generate(
        "Write: ", params(StructuredOutputs(choice=["yes"]), allowed_token_ids=only)
    )
    expected = (await engine.generate("free", SamplingParams(max_tokens=20, seed=1))).token_ids
    found, refused = await asyncio.gather(free, clash, return_exceptions=True)
    assert isinstance(refused, InvalidRequestError)
    assert refused.parameter == "params"
    assert not isinstance(found, BaseException)
    assert found.token_ids == expected


async def test_parameters_that_leave_no_token_without_a_grammar(engine: AsyncEngine) -> None:
    for temperature in (0.0, 1.0):
        settings: dict[str, Any] = {"temperature": temperature, "max_tokens": 8}
        ends = [engine.tokenizer.eos_token_id]
        for clash in ({"allowed_token_ids": ends, "min_tokens": 3}, {"bad_words": ["z"]}):
            if "bad_words" in clash:
                ids = engine.tokenizer.encode("z", add_special_tokens=False)
                clash["allowed_token_ids"] = ids
            with pytest.raises(InvalidRequestError, match="no token"):
                await engine.generate("Write: ", SamplingParams(**settings, **clash))


def chained(count: int) -> dict[str, Any]:
    """A schema whose definitions lead to each other."""
    links = {
        f"a{i}": {"properties": {"a": {"$ref": f"#/$defs/a{i + 1}"}}, "required": ["a"]}
        for i in range(count)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{count}": {"type": "null"}}}


def rules(count: int, name: str) -> str:
    """A grammar whose rules, or terminals, lead to each other."""
    lines = ["start: " + name + "0"]
    lines += [f'{name}{i}: {name}{i + 1} "a"' for i in range(count)]
    return "\n".join([*lines, f'{name}{count}: "b"'])


HOSTILE: dict[str, dict[str, Any]] = {
    "a chain of references": {"json": chained(495)},
    "a chain of rules": {"grammar": rules(990, "a")},
    "a chain of terminals": {"grammar": rules(990, "A")},
    "options": {"regex": "a?" * 1000},
    "options in a grammar": {"grammar": "start: " + " ".join(["/" + "a?" * 100 + "/"] * 9)},
    "options in a schema": {"json": {"type": "string", "pattern": "^" + "a?" * 1000 + "$"}},
    "no grammar": {"grammar": "start: ("},
    "unknown rule": {"grammar": "start: nothing"},
    "no expression": {"regex": "(a"},
    "unknown keyword": {"json": {"type": "string", "pattern": "(a"}},
    "no type": {"json": {"type": "nothing"}},
    "a great number": {"regex": "(a{1,1000}){1,1000}{1,1000}"},
    "states": {"regex": "(x+x+)+y" * 50 + "(a|b|ab|ba)*" * 100},
    "many names": {"json": {"properties": {f"n{i}": {"type": "object"} for i in range(2000)}}},
    "references": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "abroad": {"json": {"$ref": "https://example.org/schema.json"}},
    "impossible": {"json": {"type": "integer", "minimum": 5, "maximum": 4}},
    "a deep grammar": {"grammar": "start: " + "(" * 1000 + '"a"' + ")" * 1000},
    "a deep expression": {"regex": "(" * 1000 + "a" + ")" * 1000},
    "a multiple": {"json": {"type": "integer", "multipleOf": 1999}},
    "two expressions at once": {
        "json": {
            "type": "string",
            "allOf": [{"pattern": f"^(a|b)*a(a|b){{{i}}}$"} for i in (9, 99)],
        }
    },
    "an ambiguous grammar": {"grammar": "start: s\ns: s s | /[a-z0-9 ]/"},
    "many ways to go on": {
        "grammar": "start: s\ns: s s | "
        + " | ".join(f"a{i}" for i in range(80))
        + "\n"
        + "\n".join(f"a{i}: /[a-z0-9 ]/" for i in range(80))
    },
    "far back": {"regex": "(?s:.*)a(?s:.){60}x"},
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_grammars(engine: AsyncEngine, name: str) -> None:
    """Refused, or followed: nothing hangs, and nobody else notices."""
    steps: list[float] = []
    engine.instruments.listeners.append(
        lambda span: steps.append(span.end - span.start) if span.stage == "step" else None
    )
    begin = time.thread_time()
    hostile = engine.generate("Write: ", params(StructuredOutputs(**HOSTILE[name]), max_tokens=8))
    other = engine.generate("free", SamplingParams(max_tokens=8, seed=1))
    refused, found = await asyncio.gather(hostile, other, return_exceptions=True)
    assert time.thread_time() - begin < 1.0
    assert max(steps) < 1.0, "a mask held up a step, and with it every stream"
    assert not isinstance(found, BaseException)
    assert isinstance(refused, InvalidRequestError) or not isinstance(refused, BaseException)


TOO_MUCH: dict[str, dict[str, Any]] = {
    "a large multiple": {"json": {"type": "integer", "multipleOf": 5000011}},
    "a multiple with a point": {"json": {"type": "number", "multipleOf": 123.4567}},
    "multiples at once": {"json": {"allOf": [{"multipleOf": i} for i in (97, 89, 83, 79)]}},
    "multiples in a choice": {"json": {"multipleOf": 97, "anyOf": [{"multipleOf": 89}]}},
    "expressions at once": {
        "json": {"allOf": [{"pattern": f"^(a|b)*a(a|b){{{i}}}$"} for i in range(37)]}
    },
    "a schema in a grammar": {"grammar": 'start: %json {"type": "integer", "multipleOf": 5000011}'},
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_a_compiler_would_never_end_with(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        StructuredOutputs(**TOO_MUCH[name])


def test_schemas_that_are_combined_as_usual() -> None:
    fields = {
        f"field{i}": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}
        for i in range(20)
    }
    money = {f"price{i}": {"type": "number", "multipleOf": 0.01} for i in range(100)}
    base = {"properties": {"id": {"format": "uuid"}}, "required": ["id"]}
    schema = {"properties": fields | money, "allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": base}}
    StructuredOutputs(json=schema)
    StructuredOutputs(json={"allOf": [base, schema]})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"json": {"$ref": "#"}}, "no finite text satisfies it"),
        ({"grammar": "start: start"}, "no finite text satisfies it"),
        (
            {"regex": "(?=a)b"},
            "look-around, including look-ahead and look-behind, is not supported",
        ),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": r"\bfoo"}, "lookarounds not supported yet"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"json": {"type": "nope"}}, "Invalid type: nope"),
    ],
)
async def test_one_sentence_says_why(
    engine: AsyncEngine, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await engine.generate("Write: ", params(StructuredOutputs(**options)))
    assert str(caught.value) == f"structured_outputs cannot be followed: {reason}"


@pytest.mark.parametrize("text", ["a</s>b", "</s>", "x<image>y", "<image></s>"])
async def test_texts_that_spell_special_tokens(engine: AsyncEngine, text: str) -> None:
    """They are written in letters, and end nothing."""
    for structure in (
        StructuredOutputs(choice=[text]),
        StructuredOutputs(regex=text),
        StructuredOutputs(grammar=f"start: {json.dumps(text)}"),
    ):
        assert await write(engine, structure) == text
    schema = {"type": "object", "properties": {text: {"const": text}}, "required": [text]}
    schema["additionalProperties"] = False
    assert json.loads(await write(engine, StructuredOutputs(json=schema))) == {text: text}


async def test_an_ambiguous_grammar_is_ended_before_it_costs_much(engine: AsyncEngine) -> None:
    grammars = engine._core.loaded.grammars
    structure = StructuredOutputs(**HOSTILE["an ambiguous grammar"])
    (constraint,) = await asyncio.wrap_future(grammars.submit(structure, 1))
    (letter,) = engine.tokenizer.encode("a", add_special_tokens=False)
    with pytest.raises(InvalidRequestError, match="cannot be followed"):
        for index in range(2000):
            constraint.mask([letter] * index, index)
    assert constraint._spent_s < 4.0


async def test_masks_that_take_long_end_their_request(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_output, "MASK_EXTRA_S", 0.0)
    monkeypatch.setattr(structured_output, "MASK_TOKEN_S", 1e-9)
    with pytest.raises(InvalidRequestError, match="takes too long to find"):
        await engine.generate("Write: ", params(StructuredOutputs(regex="[a-z ]+")))


async def test_a_budget_of_states_is_each_completion_s_own(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random texts that follow one schema would fill one lexer's states together."""
    monkeypatch.setitem(structured_output.LIMITS, "max_lexer_states", 1500)
    schema = {"type": "array", "items": {"type": "string", "maxLength": 500}, "minItems": 2}
    wanted = [
        params(StructuredOutputs(json=schema), max_tokens=40, seed=seed, temperature=30.0, n=2)
        for seed in range(20)
    ]
    outputs = await asyncio.gather(*(engine.generate("Write: ", each) for each in wanted))
    assert all(len(output.outputs) == 2 for output in outputs)


async def test_a_compilation_that_does_not_end(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = engine._core.loaded.grammars
    compile_plain, gate = grammars._matcher, threading.Event()

    def compile_slowly(grammar: str) -> Any:
        if "hostile" in grammar:
            gate.wait(60)
        return compile_plain(grammar)

    monkeypatch.setattr(grammars, "_matcher", compile_slowly)
    monkeypatch.setattr(structured_output, "MAX_COMPILE_S", 0.05)
    monkeypatch.setattr(constraints, "GRAMMAR_LOOK_S", 0.02)
    try:
        for number in range(structured_output.MAX_ABANDONED):
            bad = params(StructuredOutputs(choice=[f"hostile{number}"]))
            refused, good = await asyncio.gather(
                engine.generate("Write: ", bad),
                engine.generate("Write: ", params(StructuredOutputs(choice=["yes", "no"]))),
                return_exceptions=True,
            )
            assert isinstance(refused, InvalidRequestError)
            assert "takes too long to compile" in str(refused)
            if number == 0:
                assert not isinstance(good, BaseException) and good.text in ("yes", "no")
        with pytest.raises(OverloadedError):
            await engine.generate("Write: ", params(StructuredOutputs(choice=["yes"])))
    finally:
        gate.set()
    await until(lambda: grammars._thread.num_abandoned == 0)
    assert await write(engine, StructuredOutputs(choice=["yes"])) == "yes"


async def test_live_constraints_have_a_limit(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_output, "MAX_LIVE", 3)
    choice = StructuredOutputs(choice=["yes", "no"])
    with pytest.raises(OverloadedError, match="live already"):
        await engine.generate("Write: ", params(choice, n=4))
    live = engine._core.loaded.grammars._live
    for _ in range(2):
        await engine.generate("Write: ", params(choice, n=3))
        await engine.generate("free", SamplingParams(max_tokens=2))  # the next step lets go
        await until(lambda: not live)


async def test_any_letter_may_be_chosen(engine: AsyncEngine) -> None:
    for text in ("\x7f", '"\\', "\u00e9\u2028", "a\nb", "%json"):
        assert await write(engine, StructuredOutputs(choice=[text])) == text


async def test_names_are_refused_with_the_reason(engine: AsyncEngine) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs") as caught:
        await engine.generate("Write: ", params(StructuredOutputs(regex="(a")))
    assert caught.value.parameter == "structured_outputs"
