"""OpenAI's client with tools and reasoning: whole answers, chunks that add up to them, and
what is refused."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import transformers as hf
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.routing import Mount

from aioengine import AsyncEngine
from aioengine.asgi import openai_app
from aioengine.asgi.api.chat import read_chat
from tests.asgi.serving import assert_for_clients, openai_client, serving
from tests.support.engines import running_engine, settled
from tests.support.scripts import script
from tests.support.tiny import tiny_llama
from tests.support.tools_model import save_tiny_text_caller

ASKED: list[Any] = [{"role": "user", "content": "Will it rain in Paris?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 5}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
OTHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "other",
        "strict": True,
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SECOND = CALL.replace("Paris", "Rome")
ANSWER = f"<think>\nhm, é\n</think>\n\nI look.\n{CALL}"
MODEL = "tiny"


@pytest.fixture
async def engine(tools_folder: Path) -> AsyncIterator[AsyncEngine]:
    async with running_engine(tools_folder, max_model_len=1024) as engine:
        yield engine


@pytest.fixture
async def client(engine: AsyncEngine) -> AsyncIterator[AsyncOpenAI]:
    app = Starlette(routes=[Mount("/v1", openai_app(engine, model_names=MODEL))])
    async with serving(app) as url, openai_client(url) as client:
        yield client


async def streamed(client: AsyncOpenAI, **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message that a stream's chunks add up to, and why its parts ended."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reasons = []
    stream = await client.chat.completions.create(model=MODEL, stream=True, **options)
    async for chunk in stream:
        (choice,) = chunk.choices
        reasons.append(choice.finish_reason)
        delta = choice.delta
        message["content"] += delta.content or ""
        message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(message["tool_calls"]) and call.type == "function"
                message["tool_calls"].append([call.function.name, ""])
            message["tool_calls"][call.index][1] += call.function.arguments or ""
    return message, reasons


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_conversation_with_a_tool(
    engine: AsyncEngine, client: AsyncOpenAI, is_streamed: bool
) -> None:
    asked: dict[str, Any] = {"messages": ASKED, "tools": [WEATHER], "temperature": 0}
    asked["max_tokens"] = script(engine, ANSWER)
    if is_streamed:
        message, reasons = await streamed(client, **asked)
        assert message == {
            "content": "I look.",
            "reasoning_content": "hm, é",
            "tool_calls": [["weather", '{"city": "Paris"}']],
        }
        assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None} and len(reasons) > 10
        return
    answer = await client.chat.completions.create(model=MODEL, **asked)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    assert getattr(choice.message, "reasoning_content") == "hm, é"  # noqa: B009 - not OpenAI's
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert 5 < (answer.usage.completion_tokens_details.reasoning_tokens or 0) < 30
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    # As OpenAI's clients go on: with the message as it came.
    result = {"role": "tool", "tool_call_id": call.id, "content": "<|im_end|>It will."}
    asked["messages"] = [*ASKED, choice.message.model_dump(), result]
    asked["max_tokens"] = script(engine, "Yes.")
    answer = await client.chat.completions.create(model=MODEL, **asked)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop" and choice.message.content == "Yes."
    assert choice.message.tool_calls is None


async def test_an_answer_of_calls_alone_has_no_content(
    engine: AsyncEngine, client: AsyncOpenAI
) -> None:
    asked: dict[str, Any] = {"messages": ASKED, "tools": [WEATHER]}
    asked["max_tokens"] = script(engine, f"{CALL}\n{SECOND}")
    answer = await client.chat.completions.create(model=MODEL, **asked)
    message = answer.choices[0].message
    assert message.content is None and len(message.tool_calls or []) == 2
    single = await client.chat.completions.create(model=MODEL, parallel_tool_calls=False, **asked)
    calls = single.choices[0].message.tool_calls or []
    assert len(calls) == 1 and calls[0].type == "function"
    assert json.loads(calls[0].function.arguments) == {"city": "Paris"}
    found, reasons = await streamed(client, parallel_tool_calls=False, **asked)
    assert found["tool_calls"] == [["weather", '{"city": "Paris"}']]
    assert reasons[-1] == "tool_calls"


async def test_a_call_that_is_cut_off_is_no_end(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"messages": ASKED, "tools": [WEATHER]}
    asked["max_tokens"] = script(engine, CALL) - 12
    answer = await client.chat.completions.create(model=MODEL, **asked)
    (choice,) = answer.choices
    assert choice.finish_reason == "length" and choice.message.tool_calls
    _, reasons = await streamed(client, **asked)
    assert reasons[-1] == "length"


async def test_tools_that_have_to_be_called(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"messages": ASKED, "tools": [WEATHER, OTHER], "seed": 1}
    named = {"type": "function", "function": {"name": "other"}}
    choices: list[tuple[Any, set[str]]] = [
        ("required", {"weather", "other"}),
        (named, {"other"}),
        (_allowed("required", OTHER), {"other"}),
    ]
    for choice, names in choices:
        answer = await client.chat.completions.create(
            model=MODEL, max_tokens=200, tool_choice=choice, **asked
        )
        calls = answer.choices[0].message.tool_calls or []
        assert calls and {call.function.name for call in calls if call.type == "function"} <= names


CALLED = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def _allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    named = [{"type": "function", "function": {"name": t["function"]["name"]}} for t in tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


async def test_allowed_tools_leave_the_others_out_of_the_prompt(
    engine: AsyncEngine, client: AsyncOpenAI
) -> None:
    asked: dict[str, Any] = {"messages": ASKED, "max_tokens": script(engine, "a")}
    counts = []
    for options in (
        {"tools": [OTHER]},
        {"tools": [WEATHER, OTHER], "tool_choice": _allowed("auto", OTHER)},
        {"tools": [WEATHER, OTHER]},
        {"tools": [WEATHER, OTHER], "tool_choice": "none"},
        {},
    ):
        answer = await client.chat.completions.create(model=MODEL, **asked, **options)
        assert answer.usage is not None
        counts.append(answer.usage.prompt_tokens)
    assert counts[0] == counts[1] < counts[2] and counts[3] == counts[4] < counts[0]


async def test_reasoning_effort_reaches_the_template(
    engine: AsyncEngine, client: AsyncOpenAI
) -> None:
    asked: dict[str, Any] = {"messages": ASKED, "max_tokens": script(engine, "a")}
    counts = []
    for options in (
        {},
        {"reasoning_effort": "high"},
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ):
        answer = await client.chat.completions.create(model=MODEL, **asked, **options)
        assert answer.usage is not None
        counts.append(answer.usage.prompt_tokens)
    assert counts[0] == counts[1] < counts[2] == counts[3]


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        ({"tools": "weather"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "weather2"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": _allowed("none", WEATHER)},
         "tool_choice.allowed_tools.mode"),
        ({"tools": [WEATHER], "tool_choice": _allowed("auto", OTHER)},
         "tool_choice.allowed_tools.tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}},
         "tool_choice.allowed_tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"reasoning_effort": "most"}, "reasoning_effort"),
        ({"extra_body": {"chat_template_kwargs": 3}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "chat_template_kwargs['tools']"),
        ({"extra_body": {"functions": [{}]}}, "functions"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "a\nb"}]},
         "messages[0].tool_call_id"),
        ({"messages": [*ASKED, {"role": "user", "content": "x", "tool_calls": [3]}]},
         "messages[1].tool_calls"),
        ({"messages": [*ASKED, {"role": "assistant", "audio": {"id": "a"}}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
         "messages[0].content[0].x"),
        ({"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:,", "x": 1}}]}]},
         "messages[0].content[0].image_url.x"),
        ({"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": "data:,", "min_pixels": 1}]}]},
         "messages[0].content[0].min_pixels"),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [{**CALLED, "x": 1}]}]},
         "messages[1].tool_calls[0].x"),
        ({"tools": [{**WEATHER, "x": 1}]}, "tools[0].x"),
        ({"seed": {}}, "seed"),
        ({"stop": 3}, "stop"),
        ({"top_p": True}, "top_p"),
        ({"extra_body": {"ignore_eos": 1}}, "ignore_eos"),
        ({"extra_body": {"top_k": "a"}}, "top_k"),
        ({"extra_body": {"bad_words": 3}}, "bad_words"),
        ({"extra_body": {"stop_token_ids": ["a"]}}, "stop_token_ids"),
        ({"extra_body": {"thinking_budget": -1}}, "thinking_budget"),
        ({"extra_body": {"min_tokens": None, "skip_special_tokens": []}}, "skip_special_tokens"),
        ({"extra_body": {"structured_outputs": {"xml": "a"}}}, "structured_outputs.xml"),
        ({"extra_body": {"structured_outputs": {"json": 3}}}, "structured_outputs.json"),
        ({"extra_body": {"structured_outputs": {"json": {}, "regex": "a"}}},
         "structured_outputs"),
        ({"max_tokens": "a"}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"logit_bias": {"3": "a"}}, "logit_bias[3]"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": "http://a.example/b.png"}]}]},
         "messages[0].content[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]},
         "tools[0].function.x"),
        ({"tools": [{"name": "a", "x": 1}]}, "tools[0].x"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "x": 1}}, "tool_choice.x"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
         "response_format.json_schema.x"),
    ],
)  # fmt: skip
async def test_what_is_refused(client: AsyncOpenAI, options: Any, parameter: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**{"model": MODEL, "messages": ASKED, **options})
    assert caught.value.param == parameter
    assert_for_clients(caught.value.message)


@pytest.mark.parametrize("are_special", [False, True])
async def test_special_tokens_are_left_out_or_not(tmp_path: Path, are_special: bool) -> None:
    """Also where the marks of calls are special tokens themselves."""
    save_tiny_text_caller(tmp_path)
    if are_special:
        tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path)
        marks = ["<tool_call>", "</tool_call>"]
        tokenizer.add_special_tokens({"extra_special_tokens": marks})
        tokenizer.save_pretrained(tmp_path)
        tiny_llama(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    async with running_engine(tmp_path, max_model_len=1024) as engine:
        script(engine, f"a<image>b\n{CALL}")
        client = engine.openai_client()
        for skips, text in ((True, "ab"), (False, "a<image>b")):
            asked: dict[str, Any] = {"model": engine.model_name, "messages": ASKED}
            asked |= {"tools": [WEATHER], "extra_body": {"skip_special_tokens": skips}}
            answer = await client.chat.completions.create(**asked)
            message = answer.choices[0].message
            assert (message.content or "").strip() == text and message.tool_calls
            stream: Any = await client.chat.completions.create(**asked, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(pieces).strip() == text
        await client.close()


def test_hints_change_nothing() -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    part, call = {"type": "text", "text": "a"}, {**CALLED, "index": 0}
    talk: list[Any] = [
        {"role": "user", "content": [{**part, **hint}]},
        {"role": "assistant", "tool_calls": [call]},
    ]
    plain: list[Any] = [
        {"role": "user", "content": [part]},
        {"role": "assistant", "tool_calls": [CALLED]},
    ]
    found = read_chat({"messages": talk, "tools": [{**WEATHER, **hint}]})
    assert found.prompts == read_chat({"messages": plain, "tools": [WEATHER]}).prompts


def test_tools_of_the_wrong_kind_are_left_to_the_reader() -> None:
    ask = read_chat({"messages": ASKED, "tools": 3, "tool_choice": "auto"})
    assert ask.prompts[0].tools == 3  # refused with its place when the engine reads the prompt


async def test_tool_chats_that_are_left_at_random(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    """100 at once, whose clients leave when they please: nothing stays behind."""
    chance = random.Random(5)
    count = script(engine, ANSWER)
    moments = asyncio.Queue[None]()

    async def chat(number: int) -> None:
        messages = [{"role": "user", "content": f"Will it rain in {number}?"}]
        options: dict[str, Any] = {"messages": messages, "tools": [WEATHER], "max_tokens": count}
        leaves_after = chance.choice([0, 1, 2, 5, 10, 1000])
        stream = await client.chat.completions.create(model=MODEL, stream=True, **options)
        async with stream:
            for _ in range(leaves_after):
                if await anext(aiter(stream), None) is None:
                    break
        moments.put_nowait(None)

    tasks = [asyncio.create_task(chat(number)) for number in range(100)]
    for _ in range(40):
        await moments.get()
    for task in chance.sample(tasks, 50):
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(each is None or isinstance(each, asyncio.CancelledError) for each in ended), ended
    assert sum(each is None for each in ended) >= 40
    await settled(engine)
