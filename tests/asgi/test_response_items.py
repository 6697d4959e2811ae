"""Requests to the Responses API: items as the messages that they are, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from aioengine.asgi import openai_app
from aioengine.asgi.responses.items import read_items, without_bytes
from aioengine.asgi.responses.request import read_response
from aioengine.errors import InvalidRequestError
from tests.asgi.serving import assert_for_clients, serving
from tests.support.engines import running_engine

MODEL = "tiny"
ASKED: list[Any] = [{"role": "user", "content": "Will it rain in Paris?"}]
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL: dict[str, Any] = {
    "type": "function_call",
    "call_id": "c1",
    "name": "weather",
    "arguments": "{}",
    "id": "fc_1",
    "status": "completed",
}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "It will."}


def thought(text: str) -> dict[str, Any]:
    """A reasoning item as answers have it."""
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}


def words(text: str) -> dict[str, Any]:
    """A message as answers have it."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "content": [part], "status": "completed"}


def test_a_turn_is_one_message() -> None:
    items = [*ASKED, thought("hm"), words("I look."), CALL, OUTPUT, thought("so"), words("Yes.")]
    items.append({"role": "user", "content": [{"type": "input_text", "text": "Sure?"}]})
    conversation = read_items(items, "Be brief.")
    function = {"name": "weather", "arguments": "{}"}
    assert conversation.messages == [
        {"role": "system", "content": "Be brief."},
        *ASKED,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "It will."},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "so"},
        {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
    ]
    places = {
        "messages": "input",
        "messages[0].content": "instructions",
        "messages[1].content": "input[0].content",
        "messages[2].reasoning_content": "input[1].content",
        "messages[2].content": "input[2].content",
        "messages[2].tool_calls[0].function.name": "input[3].name",
        "messages[2].tool_calls[0].id": "input[3].call_id",
        "messages[3].content": "input[4].output",
        "messages[4].reasoning_content": "input[5].content",
        "messages[5].content[0].text": "input[7].content[0].text",
        "temperature": "temperature",
    }
    assert {name: conversation.place(name) for name in places} == places


def test_interleaved_items_are_one_message() -> None:
    items = [thought("a"), words("b"), CALL, words("c"), thought("d"), {**CALL, "call_id": "c2"}]
    (message,) = read_items(items).messages
    assert (message["reasoning_content"], message["content"]) == ("a\nd", "b\nc")
    assert [call["id"] for call in message["tool_calls"]] == ["c1", "c2"]


def test_what_says_nothing_here_is_left_out() -> None:
    sealed = {"type": "reasoning", "id": "rs_1", "encrypted_content": "x"}
    sealed["summary"] = [{"type": "summary_text", "text": "y"}]  # type: ignore[assignment]
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    messages = read_items([*ASKED, sealed, refusal]).messages
    assert messages == [*ASKED, {"role": "assistant", "content": "No."}]


def test_outputs_in_parts() -> None:
    texts = [{"type": "input_text", "text": text} for text in "ab"]
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    found = [
        read_items([CALL, {**OUTPUT, "output": parts}]).messages[-1]["content"]
        for parts in (texts, [*texts, image])
    ]
    assert found[0] == "a\nb"
    assert [part["type"] for part in found[1]] == ["text", "text", "image_url"]


def test_media_that_were_decoded_with_the_body() -> None:
    image = {"type": "input_image", "image_url": b"abc"}
    audio = {"type": "input_audio", "input_audio": {"data": b"abc" * 99_999, "format": "wav"}}
    item = {"role": "user", "content": [image, audio]}
    (message,) = read_items([item]).messages
    assert [part["type"] for part in message["content"]] == ["image", "audio"]
    kept = without_bytes([item])
    image, audio = kept[0]["content"]
    assert image["image_url"] == "data:application/octet-stream;base64,YWJj"
    assert audio["input_audio"]["data"].endswith("base64," + "YWJj" * 99_999)


def test_items_behind_others() -> None:
    ask = read_response({"input": [OUTPUT], "previous_response_id": "resp_1"})
    after = ask.after([*ASKED, CALL])
    roles = [message["role"] for message in after.conversation.messages]
    assert roles == ["user", "assistant", "tool"]
    assert after.prompts[0].messages == after.conversation.messages
    error = InvalidRequestError("messages[0].content is long", parameter="messages[0].content")
    assert str(after.in_its_words(error)) == "previous_response_id is long"
    with pytest.raises(InvalidRequestError) as caught:
        ask.after(ASKED)
    assert caught.value.parameter == "input[0].call_id"


IMAGE = {"type": "input_image", "image_url": "https://a.example/x.png"}
SOUND = {"type": "input_audio", "input_audio": {"x": 1}}
SCHEMA = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": 3}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a"]}, "input[0]"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "other", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": "a", "name": "b"}]}, "input[0].name"),
    ({"input": [{"role": "user", "content": "a", "flag": False}]}, "input[0].flag"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "x": 1}]}]},
        "input[0].content[0].x",
    ),
    (
        {
            "input": [
                {"role": "user", "content": [{"type": "input_audio", "input_audio": {"x": 1}}]}
            ]
        },
        "input[0].content[0].input_audio.x",
    ),
    ({"text": {"format": {"type": "json_object", "schema2": {}}}}, "text.format.schema2"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "input[0].content[0].type",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
        "input[0].content[0].file_id",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].image_url",
    ),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].image_url"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]},
        "input[0].content[0].text",
    ),
    ({"input": [{"role": "assistant", "content": [IMAGE]}]}, "input[0].content[0].type"),
    (
        {"input": [*ASKED, {"type": "function_call_output", "call_id": "x", "output": "a"}]},
        "input[1].call_id",
    ),
    (
        {
            "input": [
                *ASKED,
                {"type": "function_call", "call_id": "x", "name": "a b", "arguments": ""},
            ]
        },
        "input[1].name",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "<|x|>"}]}, "tools[0].name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"tools": [WEATHER], "tool_choice": "weather"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "tool_choice.tools",
    ),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, "text.format"),
    ({"text": {"fromat": {}}}, "text.fromat"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_tokens": 3}, "max_tokens"),
    ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ({"top_logprobs": 3}, "include"),
    ({"include": ["all"]}, "include"),
    ({"metadata": {"a": 3}}, "metadata"),
    ({"stream_options": {"include_usage": True}, "stream": True}, "stream_options"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    (
        {"stream_options": {"include_obfuscation": 5}, "stream": True},
        "stream_options.include_obfuscation",
    ),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather", "x": 1}},
        "tool_choice.x",
    ),
    (
        {
            "tools": [WEATHER],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "weather"}],
                "name": "weather",
            },
        },
        "tool_choice.name",
    ),
    ({"tools": [WEATHER], "tool_choice": {"type": ["function"]}}, "tool_choice.type"),
    ({"text": {"format": {**SCHEMA, "name": 5}}}, "text.format.name"),
    ({"text": {"format": {**SCHEMA, "strict": "x"}}}, "text.format.strict"),
    ({"text": {"format": {**SCHEMA, "description": 5}}}, "text.format.description"),
    ({"text": {"verbosity": "QQ"}}, "text.verbosity"),
    ({"text": {"verbosity": ["low"]}}, "text.verbosity"),
    ({"truncation": "auto"}, "truncation"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"n": 2}, "n"),
]


async def test_what_is_refused(tools_folder: Path) -> None:
    async with running_engine(tools_folder) as engine:
        app = Starlette(routes=[Mount("/v1", openai_app(engine, model_names=MODEL))])
        async with serving(app) as url, httpx.AsyncClient(base_url=f"{url}/v1") as http:
            for fields, parameter in REFUSED:
                body = {"model": MODEL, "input": "a", **fields}
                answer = await http.post("/responses", json=body)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, parameter), (fields, error)
                assert error["message"] and "messages" not in error["message"], error
                assert_for_clients(error["message"])


def test_items_of_one_turn_add_up() -> None:
    said = [{"role": "assistant", "content": text} for text in ("a", "", "b")]
    conversation = read_items([*said, thought("c"), *said[:1], thought("d")])
    assert conversation.messages == [
        {"role": "assistant", "content": "a\nb\na", "reasoning_content": "c\nd"}
    ]


def test_a_tool_has_its_place_behind_an_earlier_response() -> None:
    ask = read_response({"input": "a", "tools": [WEATHER], "previous_response_id": "resp_1"})
    path = "tools[0].function.name"
    error = ask.after([]).in_its_words(InvalidRequestError(f"{path} is wrong", parameter=path))
    assert isinstance(error, InvalidRequestError)
    assert (error.parameter, str(error)) == ("tools[0].name", "tools[0].name is wrong")
