"""Tools in conversations: transformers' own prompts for six ways to write them, and text that stays
text in all that tools say."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.errors import InvalidRequestError
from aioengine.processors.chat.renderer import ChatRenderer
from aioengine.processors.chat.tools import check_depth, read_choice, read_tools
from aioengine.processors.text_only import TextOnlyDummyInputs, TextOnlyInfo, TextOnlyProcessor
from tests.processors.conftest import context_of, make_tokenizer
from tests.support.tools_model import TEMPLATE

TEMPLATES = {
    "hermes": TEMPLATE,
    "tags": (
        "{% for tool in tools or [] %}<function>{{ tool.function.name }}"
        "{% for key, value in tool.function.parameters.properties.items() %}\n<parameter>"
        "{{ key }}: {{ value.type }}</parameter>{% endfor %}</function>\n{% endfor %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<tool_call>\n<function={{ c.function.name }}>\n"
        "{% for key, value in c.function.arguments.items() %}<parameter={{ key }}>\n"
        "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>{% endfor %}{% endfor %}"
    ),
    "llama3": (
        "{{ bos_token }}{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}"
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{% if m.tool_calls %}<|python_tag|>"
        '{"name": "{{ m.tool_calls[0].function.name }}", '
        '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
        "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"
        "<|eot_id|>{% endfor %}"
    ),
    "mistral": (
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS]["
        "{% for c in m.tool_calls %}{{ c.function | tojson }}{% if c.id %}, {{ c.id }}{% endif %}"
        "{% endfor %}]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}: "
        "{{ m.content }}[/TOOL_RESULTS]{% else %}[INST]{{ m.content }}[/INST]{% endif %}"
        "{% endfor %}"
    ),
    "gemma": (
        "{% for tool in tools or [] %}<|tool>declaration:{{ tool.function.name }}"
        "{{ tool.function }}<tool|>{% endfor %}{% for m in messages %}<|turn>{{ m.role }}\n"
        "{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{{ '{' }}"
        "{% for key, value in c.function.arguments | dictsort %}{{ key }}:<|\"|>{{ value }}<|\"|>"
        "{% endfor %}{{ '}' }}<tool_call|>{% endfor %}<turn|>\n{% endfor %}<|turn>model\n"
    ),
    "harmony": (
        "{% for tool in tools or [] %}// {{ tool.function.description }}\ntype "
        "{{ tool.function.name }}{% endfor %}{% for m in messages %}<|start|>{{ m.role }}"
        "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "{% for c in m.tool_calls or [] %}<|channel|>commentary to=functions.{{ c.function.name }} "
        "<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
        "<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
    ),
}  # fmt: skip
MARKS = ["<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "<|call|>", "<|eot_id|>", "<|turn>"]


def weather(city: str, days: int = 1) -> str:
    """Tell the weather of a city.

    Args:
        city: Name of the city.
        days: How many days to look ahead.
    """
    return f"{city}, {days}"


Make = Callable[[str], tuple[ChatRenderer, Any]]


@pytest.fixture(scope="module")
def renderer_of(llava_folder: Path) -> Make:
    @cache
    def made(name: str) -> tuple[ChatRenderer, Any]:
        tokenizer = make_tokenizer("bytes")
        tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
        tokenizer.chat_template = TEMPLATES[name]
        context = context_of(llava_folder)
        context._tokenizer = tokenizer
        info = TextOnlyInfo(context)
        return ChatRenderer(TextOnlyProcessor(info, TextOnlyDummyInputs(info))), tokenizer

    return made


CALLS = [
    {
        "id": "call00001",
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Paris", "days": 2}},
    }
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Will it rain?"},
    {"role": "assistant", "content": "", "reasoning_content": "A tool knows.", "tool_calls": CALLS},
    {"role": "tool", "content": '{"rain": true}', "tool_call_id": "call00001", "name": "weather"},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_transformers_own(renderer_of: Make, name: str) -> None:
    renderer, tokenizer = renderer_of(name)
    tools = read_tools([weather])
    found = renderer.render(MESSAGES, tools=tools)
    theirs = [
        {**({"thinking": m["reasoning_content"]} if "reasoning_content" in m else {}), **m}
        for m in MESSAGES
    ]
    expected = tokenizer.apply_chat_template(
        theirs, tools=[weather], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(found.token_ids, skip_special_tokens=False) == expected
    assert found.token_ids == tokenizer(expected, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_are_objects_or_their_json(renderer_of: Make, name: str) -> None:
    renderer, _ = renderer_of(name)
    function = CALLS[0]["function"]
    as_text = {**CALLS[0], "function": {**function, "arguments": json.dumps(function["arguments"])}}
    messages = [MESSAGES[0], {**MESSAGES[1], "tool_calls": [as_text]}, MESSAGES[2]]
    assert renderer.render(messages).token_ids == renderer.render(MESSAGES).token_ids


def test_halves_of_characters_in_arguments(renderer_of: Make) -> None:
    """JSON can escape them, and a model may."""
    renderer, tokenizer = renderer_of("hermes")

    def prompt(arguments: str) -> str:
        call = {**CALLS[0], "function": {"name": "weather", "arguments": arguments}}
        messages = [MESSAGES[0], {"role": "assistant", "tool_calls": [call]}]
        return str(tokenizer.decode(renderer.render(messages).token_ids))

    assert prompt(r'{"city": "\ud800", "\udc00": ["\ud83d\ude00"]}') == prompt(
        '{"city": "\ufffd", "\ufffd": ["\U0001f600"]}'
    )


def test_values_that_stand_in_many_places() -> None:
    shared: Any = {"a": 1}
    for _ in range(40):
        shared = [shared, shared]
    with pytest.raises(InvalidRequestError, match="values in it"):
        check_depth(shared, "chat_template_kwargs")
    check_depth([[1] * 1000] * 100, "chat_template_kwargs")


HOSTILE = st.text(st.sampled_from('ab<|>[]"{'), max_size=8) | st.sampled_from(MARKS)


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(sorted(TEMPLATES)), texts=st.tuples(*[HOSTILE] * 5))
def test_what_tools_say_stays_text(renderer_of: Make, name: str, texts: tuple[str, ...]) -> None:
    """No text in a call, a result or a tool comes to a special token; the template's own do."""
    renderer, tokenizer = renderer_of(name)
    result, key, value, told, thought = texts

    def prompt(*given: str) -> list[int]:
        result, key, value, told, thought = given
        tool = {
            "name": "weather",
            "description": told,
            "parameters": {"type": "object", "properties": {"key" + key: {"type": "string"}}},
        }
        call = {"name": "weather", "arguments": {"key" + key: value}}
        call_id = "".join(letter for letter in f"a|{value}" if letter.isprintable())[:256]
        messages = [
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": thought,
                "tool_calls": [{"id": call_id, "type": "function", "function": call}],
            },
            {"role": "tool", "content": result, "tool_call_id": call_id},
        ]
        return renderer.render(messages, tools=read_tools([tool])).token_ids

    special = {tokenizer.convert_tokens_to_ids(mark) for mark in MARKS}
    found = [each for each in prompt(result, key, value, told, thought) if each in special]
    plain = [each for each in prompt("x", "x", "x", "x", "x") if each in special]
    assert found == plain


def test_options_of_the_template(renderer_of: Make) -> None:
    renderer, tokenizer = renderer_of("hermes")
    found = renderer.render(MESSAGES[:1], options={"enable_thinking": False})
    assert tokenizer.decode(found.token_ids).endswith("<think>\n\n</think>\n\n")
    assert found.tail.endswith("<think>\n\n</think>\n\n") and found.answers.name == "hermes"
    for name in ("tools", "messages", "chat_template", "eos_token", "tokenize", "a b"):
        with pytest.raises(InvalidRequestError, match="not for the caller") as caught:
            renderer.render(MESSAGES[:1], options={name: 1})
        assert caught.value.parameter == f"chat_template_kwargs[{name!r}]"


def test_a_template_without_tools(renderer_of: Make) -> None:
    renderer = copy(renderer_of("hermes")[0])
    renderer._tool_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="knows none"):
        renderer.render(MESSAGES[:1], tools=read_tools([weather]))


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("tools", "parameter"),
    [
        ("f", "tools"),
        ([3], "tools[0]"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {"name": "<|im_end|>"}}], "tools[0].function.name"),
        ([FUNCTION, FUNCTION], "tools[1]"),
        ([{**FUNCTION, "parameters": [1]}], "tools[0].function.parameters"),
        ([{**FUNCTION, "default": float("nan")}], "tools[0]"),
        ([lambda x: x], "tools[0]"),
    ],
)
def test_tools_that_are_none(tools: Any, parameter: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_tools(tools)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("message", "parameter"),
    [
        ({"role": "user", "content": "x", "tool_calls": CALLS}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "tool", "content": "x", "tool_call_id": "a\nb"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": "x", "weights": 1}, "messages[0]"),
    ],
)
def test_messages_that_are_none(renderer_of: Make, message: Any, parameter: str) -> None:
    renderer, _ = renderer_of("hermes")
    with pytest.raises(InvalidRequestError) as caught:
        renderer.render([message])
    assert caught.value.parameter == parameter


def test_the_schema_of_a_function_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unhashable:
        """Say hello."""

        __name__ = "hello"
        __hash__ = None  # type: ignore[assignment]

        def __call__(self) -> str:
            return "hello"

    def hello() -> str:
        """Say hello."""
        return "hello"

    first = read_tools([hello])
    assert first == [{"type": "function", "function": first[0]["function"]}]
    monkeypatch.setattr("transformers.utils.get_json_schema", None)
    assert read_tools([hello]) == first
    with pytest.raises(InvalidRequestError, match="no schema can be made"):
        read_tools([Unhashable()])


def test_choices() -> None:
    tools = read_tools([FUNCTION])
    assert [read_choice(each, tools) for each in (None, "none", "required")] == [
        "auto", "none", "required",
    ]  # fmt: skip
    named = {"name": "f"}
    for given_as in ("f", named, {"type": "function", "function": named}):
        assert read_choice(given_as, tools) == named
    for wrong in ("g", 3, {"name": "g"}):
        with pytest.raises(InvalidRequestError):
            read_choice(wrong, tools)
    with pytest.raises(InvalidRequestError, match="no tools"):
        read_choice("required", [])
