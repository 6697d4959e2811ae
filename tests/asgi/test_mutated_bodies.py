"""Bodies with a wrong value at every place: the readers refuse them in their own words."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from aioengine.asgi.api.chat import read_chat
from aioengine.asgi.api.completions import read_completion
from aioengine.asgi.api.embeddings import read_embeddings, read_rerank, read_score
from aioengine.asgi.api.messages import read_counted, read_messages
from aioengine.asgi.api.tokenize import read_text, read_tokenize
from aioengine.asgi.error_responses import ApiError
from aioengine.asgi.responses.request import read_response
from aioengine.errors import InvalidRequestError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Tell.", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
CONVERSATION = [
    {"role": "system", "content": "s"},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": {"url": "https://a.example/a.png"}},
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        ],
    },
    {
        "role": "assistant",
        "content": "b",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]
CHAT = {
    "messages": CONVERSATION,
    "tools": [TOOL],
    "logprobs": True,
    "top_logprobs": 2,
    "stop": ["x"],
    "logit_bias": {"5": 1.0},
    "stream": True,
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"a": 1},
    "reasoning_effort": "low",
    "mm_processor_kwargs": {"a": 1},
    "allowed_token_ids": [5],
    "bad_words": ["b"],
}
NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
RESPONSE = {
    "input": [
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "a"},
                {"type": "input_image", "image_url": "https://a.example/a.png"},
            ],
        },
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "t"}],
        },
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "o"}],
        },
        {"role": "user", "content": "b"},
    ],
    "instructions": "i",
    "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "weather"}]},
    "reasoning": {"effort": "low"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "metadata": {"a": "b"},
}
MESSAGES = {
    "max_tokens": 3,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image", "source": {"type": "base64", "data": "AAAA"}},
                {"type": "image", "source": {"type": "url", "url": "https://a.example/a.png"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "is_error": True,
                    "content": [{"type": "text", "text": "r"}],
                }
            ],
        },
    ],
    "tools": [{"name": "weather", "input_schema": SCHEMA, "eager_input_streaming": True}],
    "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2, "display": "omitted"},
    "output_config": {"effort": "low"},
    "stop_sequences": ["x"],
}
FORMAT = {"format": {"type": "json_schema", "schema": SCHEMA}}
BODIES: list[tuple[Callable[[Mapping[str, Any]], Any], dict[str, Any]]] = [
    (read_chat, CHAT),
    (read_chat, {**CHAT, "tool_choice": ALLOWED}),
    (read_chat, {"messages": [], "structured_outputs": {"choice": ["a", "b"]}}),
    (read_completion, {"prompt": ["a", [5, 6]], "n": 2, "best_of": 2, "logprobs": 2}),
    (read_response, RESPONSE),
    (read_messages, MESSAGES),
    (read_counted, MESSAGES),
    (read_counted, {"messages": [{"role": "user", "content": "a"}], "output_config": FORMAT}),
    (read_embeddings, {"input": ["a", [5]], "encoding_format": "float", "dimensions": 4}),
    (read_embeddings, {"messages": CONVERSATION, "pooling": "mean", "normalize": True}),
    (read_score, {"text_1": "a", "text_2": ["b", "c"]}),
    (read_rerank, {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    (read_tokenize, {"messages": CONVERSATION, "tools": [TOOL], "chat_template_kwargs": {}}),
    (read_tokenize, {"prompt": "a", "return_token_strs": True}),
    (read_text, {"tokens": [5, 6]}),
]
VALUES: list[Any] = [
    *(None, True, 0, -1, 1.5, 2**70, "", "x", "\ud800", "\0"),
    *([], [[]], [{}], [None], [1], ["a"], {}, {"a": 1}, {"type": []}, {"type": {}}),
]


def mutated(value: Any) -> Iterator[Any]:
    """Copies of a value with one of VALUES at one place, or without that place."""
    yield from VALUES
    places = value.keys() if isinstance(value, dict) else range(len(value))
    for place in places:
        child = value[place]
        inner = mutated(child) if isinstance(child, dict | list) else iter(VALUES)
        for each in inner:
            changed = copy.copy(value)
            changed[place] = each
            yield changed
        shorter = copy.copy(value)
        del shorter[place]
        yield shorter


@pytest.mark.parametrize(("read", "body"), BODIES)
def test_a_wrong_value_at_any_place_is_refused_or_read(
    read: Callable[[Mapping[str, Any]], Any], body: dict[str, Any]
) -> None:
    read(body)
    num_refused = 0
    for changed in mutated(body):
        if not isinstance(changed, dict):
            continue  # not an object: refused before
        try:
            read(changed)
        except (InvalidRequestError, ApiError) as error:
            num_refused += 1
            assert error.parameter
    assert num_refused


def test_as_many_prompts_as_the_tables_say() -> None:
    many = ["a"] * 2048
    assert len(read_embeddings({"input": many}).prompts) == 2048
    assert len(read_score({"text_1": "a", "text_2": many}).prompts) == 2049
    assert len(read_rerank({"query": "a", "documents": many}).prompts) == 2049
    with pytest.raises(InvalidRequestError) as caught:
        read_completion({"prompt": ["a"] * 128, "n": 9})
    assert caught.value.parameter == "n"


@pytest.mark.parametrize(
    ("read", "body", "parameter"),
    [
        (read_tokenize, {"messages": CONVERSATION, "tools": False}, "tools"),
        (read_messages, {**MESSAGES, "output_config": FORMAT}, "thinking.budget_tokens"),
    ],
)
def test_the_words_are_the_clients(
    read: Callable[[Mapping[str, Any]], Any], body: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(body)
    assert caught.value.parameter == parameter


def test_an_error_of_a_prompt_names_a_field_that_is_there() -> None:
    for body, name in (({"input": "a"}, "input"), ({"messages": CONVERSATION}, "messages")):
        for own in ("prompt", "n"):
            error = read_embeddings(body).in_its_words(InvalidRequestError(own, parameter=own))
            assert isinstance(error, InvalidRequestError) and error.parameter == name
