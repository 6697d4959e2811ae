"""Anthropic's messages: conversations as its clients send them, and the answers they expect."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from aioengine import AsyncEngine
from aioengine.asgi import service_app
from aioengine.asgi.api.fields import ANTHROPIC, BLOCKS
from aioengine.asgi.api.messages import read_counted, read_messages
from aioengine.errors import InvalidRequestError
from tests.asgi.serving import assert_for_clients, image_part, serving
from tests.asgi.test_http import client_of, mounted
from tests.support.engines import encoded, greedy, running_engine, settled, until
from tests.support.scripts import script
from tests.support.tiny import tiny_image
from tests.support.tools_model import save_tiny_text_caller

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "Hello"}]
ASK: dict[str, Any] = {"messages": HELLO, "max_tokens": 8, "temperature": 0}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Tell the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = f"<think>\nhm\n</think>\n\nI look.\n{CALL}"


def image(seed: int, kind: str = "base64") -> dict[str, Any]:
    """A block of an image."""
    data = base64.b64encode(encoded(tiny_image(seed, 60, 50))).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    if kind == "url":
        source = {"type": "url", "url": f"data:image/png;base64,{data}"}
    return {"type": "image", "source": source}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def events_of(stream: str) -> list[dict[str, Any]]:
    """The events of a stream, each named by its type, and nothing behind the last."""
    found = []
    for event in stream.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def accumulated(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The message that events add up to, by Anthropic's rules."""
    first, *rest = events
    assert first["type"] == "message_start" and rest[-1] == {"type": "message_stop"}
    message: dict[str, Any] = first["message"]
    pieces: list[str] = []
    is_open = False
    for event in rest[:-1]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            is_open, pieces = True, []
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], message["content"][-1]
            assert is_open and event["index"] == len(message["content"]) - 1
            if delta["type"] == "input_json_delta":
                pieces.append(delta["partial_json"])
            else:
                kind = delta["type"].removesuffix("_delta")
                assert kind == block["type"]
                block[kind] += delta[kind]
        elif event["type"] == "content_block_stop":
            if pieces:
                message["content"][-1]["input"] = json.loads("".join(pieces))
            is_open = False
        else:
            assert event["type"] == "message_delta" and not is_open
            message |= event["delta"] | {"usage": event["usage"]}
    return message


async def asked(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer, which the accumulated events of the same answer equal."""
    whole = await client.post(PATH, json=body)
    assert whole.status_code == 200, whole.text
    stream = await client.post(PATH, json={**body, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    message, streamed = whole.json(), accumulated(events_of(stream.text))
    assert message["id"] != streamed["id"] and message["id"].startswith("msg_")
    own = ("id", "usage")
    assert _without(message, own) == _without(streamed, own)
    assert message["usage"]["output_tokens"] == streamed["usage"]["output_tokens"]
    return dict(message)


def _without(message: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The message without some fields and the ids of its calls, which are new each time."""
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {k: v for k, v in message.items() if k not in names} | {"content": content}


@pytest.fixture
async def client(engine: AsyncEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(mounted(engine)) as client:
        yield client


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template knows tools and thoughts."""
    return save_tiny_text_caller(tmp_path_factory.mktemp("caller"))


@asynccontextmanager
async def calling(folder: Path, answer: str) -> AsyncIterator[tuple[AsyncEngine, Any]]:
    """An engine that gives this answer, and its client."""
    async with running_engine(folder, max_model_len=1024) as engine:
        script(engine, answer)
        async with client_of(mounted(engine)) as client:
            yield engine, client


# ---- texts and images


async def test_a_text(engine: AsyncEngine, client: httpx.AsyncClient) -> None:
    expected = await engine.generate(HELLO, greedy(8))
    answer = await asked(client, {**ASK, "model": "tiny-llava"})
    assert answer["content"] == [text(expected.text)]
    assert (answer["type"], answer["role"], answer["model"]) == (
        "message",
        "assistant",
        "tiny-llava",
    )
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    usage = answer["usage"]
    assert usage["output_tokens"] == 8
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert num_prompt == expected.usage.prompt_tokens
    again = (await client.post(PATH, json={**ASK, "system": "Be brief. " * 9})).json()["usage"]
    warm = (await client.post(PATH, json={**ASK, "system": "Be brief. " * 9})).json()["usage"]
    assert warm["cache_read_input_tokens"] > again["cache_read_input_tokens"]
    assert warm["input_tokens"] < again["input_tokens"]


@pytest.mark.parametrize("kind", ["base64", "url"])
async def test_images(engine: AsyncEngine, client: httpx.AsyncClient, kind: str) -> None:
    content = [text("What is in "), image(1, kind), text(" and "), image(2, kind)]
    same = [text("What is in "), image_part(1), text(" and "), image_part(2)]
    messages = [{"role": "system", "content": "One\nTwo"}, {"role": "user", "content": same}]
    expected = await engine.generate(messages, greedy(8))
    body = {**ASK, "messages": [user(*content)], "system": [text("One"), text("Two")]}
    answer = await asked(client, body)
    assert answer["content"] == [text(expected.text)]
    counted = await client.post(f"{PATH}/count_tokens", json=_without_key(body, "max_tokens"))
    assert counted.json() == {"input_tokens": expected.usage.prompt_tokens}
    await settled(engine)


def _without_key(body: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != key}


async def test_an_image_of_many_kilobytes(engine: AsyncEngine, client: httpx.AsyncClient) -> None:
    """Its base64 is decoded as the body is read."""
    picture = tiny_image(3, 300, 300)
    data = base64.b64encode(encoded(picture)).decode()
    assert len(data) > 1 << 16
    block = {"type": "image", "source": {"type": "base64", "data": data}}
    expected = await engine.generate([user(text("a"), {"type": "image", "image": picture})])
    response = await client.post(PATH, json={**ASK, "messages": [user(text("a"), block)]})
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert num_prompt == expected.usage.prompt_tokens


async def test_places_of_bad_images_are_the_clients(client: httpx.AsyncClient) -> None:
    """The engine's messages are others: the system's is one, and so is each result of a tool."""
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    bad = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
    nested = {"type": "tool_result", "tool_use_id": "a", "content": [text("b"), bad]}
    before = [*HELLO, {"role": "assistant", "content": [call]}]
    plain = {"type": "tool_result", "tool_use_id": "a", "content": "fine"}
    for message, place in (
        (user(nested), "messages[2].content[0].content[1] "),
        (user(plain, text("b"), bad), "messages[2].content[2] "),
    ):
        body = {**ASK, "messages": [*before, message], "system": "s"}
        for path in (PATH, f"{PATH}/count_tokens"):
            response = await client.post(path, json=body)
            error = response.json()["error"]
            assert response.status_code == 422 and error["type"] == "invalid_request_error"
            assert error["message"].startswith(place), error


async def test_stop_sequences(engine: AsyncEngine, client: httpx.AsyncClient) -> None:
    script(engine, "One two three.")
    answer = await asked(client, {**ASK, "max_tokens": 50, "stop_sequences": ["two", "x"]})
    assert answer["content"] == [text("One ")]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "two")
    answer = await asked(client, {**ASK, "max_tokens": 50})
    assert answer["content"] == [text("One two three.")]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)


async def test_a_full_context(folder: Path) -> None:
    async with running_engine(folder, max_model_len=32) as engine:
        script(engine, "a b c d e f g h i j k l m n o p q r s t u v w x y z" * 2)
        async with client_of(mounted(engine)) as client:
            answer = await asked(client, {**ASK, "max_tokens": 500})
            assert answer["stop_reason"] == "model_context_window_exceeded"


async def test_a_bound_on_thinking(folder: Path) -> None:
    """It is the engine's, and refused by its own name where the model is not known to think."""
    body = {**ASK, "thinking": {"type": "enabled", "budget_tokens": 9}}
    assert read_messages(body).params.thinking_budget == 9
    assert read_messages(ASK).params.thinking_budget is None
    async with running_engine(folder) as engine, client_of(mounted(engine)) as client:
        response = await client.post("/v1/messages", json=body)
        assert response.status_code == 400
        assert "thinking.budget_tokens" in response.json()["error"]["message"]


async def test_a_schema(engine: AsyncEngine, client: httpx.AsyncClient) -> None:
    schema = {"type": "integer", "minimum": 3, "maximum": 3}
    wanted = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    answer = await asked(client, {**ASK, "output_config": wanted})
    assert json.loads(answer["content"][0]["text"]) == 3


# ---- tools and thoughts


async def test_tools_over_two_turns(caller: Path) -> None:
    async with calling(caller, ANSWER) as (engine, client):
        body = {**ASK, "max_tokens": 400, "tools": [WEATHER], "tool_choice": {"type": "auto"}}
        answer = await asked(client, body)
        thought, said, call = answer["content"]
        assert thought == {"type": "thinking", "thinking": "hm", "signature": ""}
        assert said == text("I look.")
        assert (call["type"], call["name"], call["input"]) == (
            "tool_use",
            "weather",
            {"city": "Paris"},
        )
        assert answer["stop_reason"] == "tool_use"
        # What a client got it may send back, with the result.
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [text("It will.")]}
        body["messages"] = [
            *HELLO,
            {"role": "assistant", "content": answer["content"]},
            user(result, text("And?")),
        ]
        script(engine, "Yes.")
        answer = await asked(client, body)
        assert answer["content"] == [text("Yes.")] and answer["stop_reason"] == "end_turn"
        token_ids = await engine.tokenize(read_messages(body).prompts[0])
        prompt = engine.tokenizer.decode(token_ids)
        assert f"<think>\nhm\n</think>\nI look.{CALL}<|im_end|>" in prompt
        assert "<|im_start|>tool\nIt will.<|im_end|>\n<|im_start|>user\nAnd?" in prompt
        assert "Tell the weather." in prompt
        body["messages"][-1] = user({**result, "is_error": True})
        prompt = engine.tokenizer.decode(await engine.tokenize(read_messages(body).prompts[0]))
        assert "<|im_start|>tool\nError: It will.<|im_end|>" in prompt
        await settled(engine)


@pytest.mark.parametrize("is_eager", [False, True])
async def test_arguments_in_a_stream(caller: Path, is_eager: bool) -> None:
    async with calling(caller, ANSWER) as (_, client):
        tools = [{**WEATHER, "eager_input_streaming": is_eager}]
        body = {**ASK, "max_tokens": 400, "tools": tools, "stream": True}
        events = events_of((await client.post(PATH, json=body)).text)
        pieces = [
            event["delta"]["partial_json"]
            for event in events
            if event["type"] == "content_block_delta"
            and event["delta"]["type"] == "input_json_delta"
        ]
        assert json.loads("".join(pieces)) == {"city": "Paris"}
        assert (len(pieces) > 1) is is_eager


@pytest.mark.parametrize(
    "answer",
    [
        '<tool_call>\n{"name": "weather", "arguments": {"city": Paris}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"city": 1e999}}\n</tool_call>',
    ],
)
async def test_arguments_that_are_no_json(caller: Path, answer: str) -> None:
    async with calling(caller, answer) as (_, client):
        found = await asked(client, {**ASK, "max_tokens": 400, "tools": [WEATHER]})
        (call,) = found["content"]
        written = answer.partition('"arguments": ')[2].partition("}")[0] + "}"
        assert call["input"] == {"INVALID_JSON": written}


async def test_arguments_that_are_cut_short(caller: Path) -> None:
    async with calling(caller, ANSWER) as (engine, client):
        num_tokens = len(engine.tokenizer.encode(ANSWER[:-25], add_special_tokens=False))
        found = await asked(client, {**ASK, "max_tokens": num_tokens, "tools": [WEATHER]})
        (*_, call) = found["content"]
        assert list(call["input"]) == ["INVALID_JSON"] and found["stop_reason"] == "max_tokens"
        assert call["input"]["INVALID_JSON"].startswith('{"ci')


async def test_calls_side_by_side(caller: Path) -> None:
    second = CALL.replace("Paris", "Rome")
    async with calling(caller, f"{CALL}\n{second}") as (_, client):
        body = {**ASK, "max_tokens": 400, "tools": [WEATHER]}
        calls = (await asked(client, body))["content"]
        assert [call["input"]["city"] for call in calls] == ["Paris", "Rome"]
        assert len({call["id"] for call in calls}) == 2
        body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
        (call,) = (await asked(client, body))["content"]
        assert call["input"] == {"city": "Paris"}


async def test_a_tool_that_has_to_be_called(caller: Path) -> None:
    async with running_engine(caller, max_model_len=1024) as engine:
        async with client_of(mounted(engine)) as client:
            tool = {"name": "f", "input_schema": {"type": "object", "additionalProperties": False}}
            body = {**ASK, "max_tokens": 400, "tools": [tool]}
            for choice in ({"type": "any"}, {"type": "tool", "name": "f"}):
                asking = {**body, "tool_choice": choice}
                answer = await asked(client, asking)
                names = [each["name"] for each in answer["content"] if each["type"] == "tool_use"]
                assert names and set(names) == {"f"} and answer["stop_reason"] == "tool_use"
                counted = await client.post(f"{PATH}/count_tokens", json=asking)
                assert counted.json()["input_tokens"] > 0
        await settled(engine)


async def test_thinking(caller: Path) -> None:
    async with calling(caller, ANSWER) as (engine, client):

        async def prompt(**fields: Any) -> str:
            ids = await engine.tokenize(read_counted({"messages": HELLO, **fields}).prompts[0])
            return str(engine.tokenizer.decode(ids))

        off = await prompt(thinking={"type": "disabled"})
        assert off.endswith("<think>\n\n</think>\n\n")
        for on in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
            assert await prompt(thinking=on) == await prompt() != off
        hidden = {"type": "adaptive", "display": "omitted"}
        answer = await asked(client, {**ASK, "max_tokens": 400, "thinking": hidden})
        assert [block["type"] for block in answer["content"]] == ["text", "tool_use"]


# ---- errors, keys, clients who leave


MINE = {"type": "image", "source": {"type": "file", "file_id": "a"}}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens must be given"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop_sequences": "x"}, "stop_sequences must be a list of texts"),
    ({"messages": []}, "messages must be"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{**HELLO[0], "name": "a"}]}, "'name' is not a field of messages[0]"),
    ({"messages": [user(7)]}, "messages[0].content[0] must be"),
    ({"messages": [user({"type": "document"})]}, "document, which is not supported: give"),
    ({"messages": [user({"type": "tool_use"})]}, "messages[0].content[0] has the type"),
    ({"messages": [user({"type": "text", "text": 7})]}, "messages[0].content[0].text"),
    ({"messages": [user({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [user(MINE)]}, "messages[0].content[0].source must be"),
    (
        {"messages": [user(text("a"), {**text("b"), "foo": 1})]},
        "'foo' is not a field of messages[0].content[1]",
    ),
    ({"messages": [user({**text("b"), "citations": [{}]})]}, "content[0].citations is not supp"),
    ({"messages": [user({**MINE, "detail": 1})]}, "'detail' is not a field of messages[0].conte"),
    (
        {"messages": [user({**MINE, "source": {"type": "url", "url": "a", "x": 1}})]},
        "'x' is not a field of messages[0].content[0].source",
    ),
    (
        {"messages": [user({"type": "tool_result", "tool_use_id": "a", "isError": True})]},
        "'isError' is not a field of messages[0].content[0]; did you mean 'is_error'?",
    ),
    (
        {
            "messages": [
                user(
                    {"type": "tool_result", "tool_use_id": "a", "content": [{**text("a"), "x": 1}]}
                )
            ]
        },
        "'x' is not a field of messages[0].content[0].content[0]",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "name": "a", "id": "b", "caller": {"type": "code"}}
                    ],
                },
                *HELLO,
            ]
        },
        "messages[0].content[0].caller is not supported",
    ),
    ({"tools": [{**WEATHER, "parameters": {}}]}, "'parameters' is not a field of tools[0]"),
    ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading is not supported"),
    ({"tool_choice": {"type": "auto", "names": []}}, "'names' is not a field of tool_choice"),
    ({"thinking": {"type": "disabled", "budget": 1}}, "'budget' is not a field of thinking"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "a"}]}, "an answer begins anew"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0] has the type 'bash_2025"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema must be"),
    ({"tools": [{"name": "<a>", "input_schema": {}}]}, "tools[0].name must be"),
    ({"tools": [{"name": ["a"], "input_schema": {}}]}, "tools[0].name must be"),
    ({"tool_choice": "auto"}, "tool_choice must be"),
    ({"tool_choice": {"type": "tool", "name": "a"}}, "tool_choice must be"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "between_tools"}}, "thinking must be"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#/no"}}}},
        "output_config.format",
    ),
    ({"stop_sequences": [7]}, "stop_sequences"),
    ({"temperature": -1}, "temperature"),
    ({"container": "a"}, "container is not supported: no code is run here"),
    ({"max_token": 1}, "'max_token' is not a field of this request; did you mean 'max_tokens'?"),
    ({"stream": "yes"}, "stream must be true or false"),
    ({"system": 7}, "system must be text"),
]


def test_hints_change_nothing() -> None:
    """Those that are only for Anthropic's own, and what an earlier answer had."""
    hint = {"cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("b")]}
    plain = [user(text("a")), {"role": "assistant", "content": [call]}, user(result)]
    hinted = [
        user({**text("a"), **hint, "citations": None}),
        {"role": "assistant", "content": [{**call, **hint, "caller": {"type": "direct"}}]},
        user({**result, "content": [{**text("b"), **hint}], "toolset_name": None}),
    ]
    tool = {**WEATHER, **hint, "defer_loading": False, "type": "custom", "input_examples": []}
    found = read_messages({**ASK, "messages": hinted, "tools": [tool]})
    assert found.prompts == read_messages({**ASK, "messages": plain, "tools": [WEATHER]}).prompts


async def test_bad_requests(client: httpx.AsyncClient) -> None:
    for body, words in BAD:
        response = await client.post(PATH, json={**ASK, **body})
        assert response.status_code == 400, response.text
        found = response.json()
        assert found.keys() == {"type", "error"} and found["type"] == "error"
        assert found["error"].keys() == {"type", "message"}
        assert found["error"]["type"] == "invalid_request_error"
        assert words in found["error"]["message"], found
        assert_for_clients(found["error"]["message"])


async def test_kinds_of_errors(folder: Path) -> None:
    """Those that come before the handler too."""
    large = {"messages": [user(text("a" * 200_000))]}
    engine = AsyncEngine.from_pretrained(folder, max_num_seqs=1, max_queued_requests=1)
    async with client_of(mounted(engine, api_key="one", max_body_bytes=100_000)) as client:

        async def kind(body: dict[str, Any], key: str = "one", path: str = PATH) -> Any:
            response = await client.post(path, json=body, headers={"x-api-key": key})
            found = response.json()
            assert found["type"] == "error" and found["error"]["message"]
            return response.status_code, found["error"]["type"]

        assert await kind(ASK) == (503, "overloaded_error")
        async with engine:
            for path in (PATH, f"{PATH}/count_tokens"):
                assert await kind(ASK, "two", path) == (401, "authentication_error")
                assert await kind({**ASK, "model": "x"}, path=path) == (404, "not_found_error")
                assert await kind(large, path=path) == (413, "request_too_large")
            streams = [engine.stream("a", greedy(400)) for _ in range(2)]
            assert await kind(ASK) == (429, "rate_limit_error")
            for stream in streams:
                stream.close()
            await settled(engine)
            for headers in ({"x-api-key": "one"}, {"authorization": "Bearer one"}):
                response = await client.post(PATH, json=ASK, headers=headers)
                assert response.status_code == 200
            assert (await client.post(PATH, json=ASK)).status_code == 401


async def test_errors_that_come_before_an_endpoint(engine: AsyncEngine) -> None:
    app = service_app(engine, trusted_hosts="loopback", allowed_origins=[])
    async with client_of(app) as client:
        for path in (PATH, f"{PATH}/count_tokens", f"{PATH}/"):
            for method, headers, expected in (
                ("POST", {"origin": "https://a.example"}, (403, "permission_error")),
                ("POST", {"host": "a.example"}, (421, "invalid_request_error")),
                ("GET", {}, (405, "invalid_request_error")),
            ):
                response = await client.request(method, path, headers=headers)
                found = response.json()
                assert found.keys() == {"type", "error"} and found["type"] == "error", path
                assert (response.status_code, found["error"]["type"]) == expected


async def test_a_stream_that_fails_ends_with_an_error(engine: AsyncEngine) -> None:
    script(engine, "a b c d " * 50)
    async with (
        client_of(mounted(engine)) as client,
        client.stream("POST", PATH, json={**ASK, "max_tokens": 300, "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        async with aclosing(lines):
            async for line in lines:
                if "text_delta" in line:
                    break
            await engine.abort(response.headers["x-request-id"])
            rest = [line async for line in lines]
        events = events_of("\n".join(rest))
        assert events[-1]["type"] == "error"
        assert events[-1]["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_who_leaves(engine: AsyncEngine, is_streamed: bool) -> None:
    script(engine, "a b c d " * 50)
    body = {**ASK, "max_tokens": 300, "messages": [user(text("a"), image(1))]}
    async with client_of(mounted(engine)) as client:
        asking = asyncio.create_task(client.post(PATH, json={**body, "stream": is_streamed}))
        await until(lambda: engine.statistics().running == 1)
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: engine.statistics().aborted == 1)
        await settled(engine)


def test_a_body_is_read_as_it_is_given() -> None:
    """Reading changes nothing in it, and asks for nothing of the engine."""
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        read_messages({"messages": HELLO})
    body = {**ASK, "system": "s", "tools": [WEATHER], "metadata": {"user_id": "a"}, "top_k": 3}
    before = json.dumps(body)
    ask = read_messages(body)
    assert json.dumps(body) == before
    assert (ask.params.max_tokens, ask.params.temperature, ask.params.top_k) == (8, 0, 3)


# ---- Anthropic's own client


async def test_its_client(caller: Path) -> None:
    anthropic = pytest.importorskip("anthropic")
    async with running_engine(caller, max_model_len=1024) as engine:
        script(engine, ANSWER)
        async with (
            serving(mounted(engine, api_key="one")) as url,
            anthropic.AsyncAnthropic(base_url=url, api_key="one", max_retries=0) as client,
        ):
            body: Any = {"model": engine.model_name, "messages": HELLO, "tools": [WEATHER]}
            whole = await client.messages.create(max_tokens=400, **body)
            async with client.messages.stream(max_tokens=400, **body) as stream:
                streamed = await stream.get_final_message()
            for message in (whole, streamed):
                thought, said, call = message.content
                assert (thought.thinking, said.text) == ("hm", "I look.")
                assert call.input == {"city": "Paris"} and message.stop_reason == "tool_use"
            assert streamed.usage.output_tokens == whole.usage.output_tokens
            counted = await client.messages.count_tokens(**body)
            usage = whole.usage
            assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
            with pytest.raises(anthropic.NotFoundError, match="GET models"):
                await client.messages.create(max_tokens=4, model="x", messages=HELLO)


def test_no_field_of_its_client_is_left_out() -> None:
    types = pytest.importorskip("anthropic.types")
    given = types.message_create_params
    names = {
        name
        for kind in (
            given.MessageCreateParamsBase,
            given.MessageCreateParamsStreaming,
            types.MessageCountTokensParams,
        )
        for name in kind.__annotations__
    }
    assert len(names) > 15 and names <= ANTHROPIC.keys(), names - ANTHROPIC.keys()
    blocks = types.content_block_param.ContentBlockParam.__args__
    kinds = {each.__annotations__["type"].__forward_arg__ for each in blocks}
    assert len(kinds) > 10
    for kind in kinds:
        assert any(f'"{name}"' in kind or f"'{name}'" in kind for name in BLOCKS), kind
