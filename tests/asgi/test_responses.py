"""The Responses API through OpenAI's own client: whole answers, events that add up to them,
conversations that go on, and what a host keeps."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.routing import Mount

from aioengine import AsyncEngine, SamplingParams
from aioengine.asgi import openai_app
from aioengine.asgi.responses.events import ResponseAnswer
from aioengine.asgi.responses.request import read_response
from aioengine.engine.detokenizer import TokenTexts
from aioengine.streams.tokens import _merge
from tests.asgi.responses import Store, added_up, said, without_ids
from tests.asgi.serving import image_url, openai_client, serving
from tests.support.engines import encoded, greedy, running_engine, settled, until
from tests.support.scripts import script
from tests.support.tiny import tiny_image

MODEL = "tiny"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Tell the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SECOND = CALL.replace("Paris", "Rome")
ANSWER = f"<think>\nhm, é\n</think>\n\nI look.\n{CALL}"
MIXED = f"{ANSWER}\nAnd then\n{SECOND}\n{CALL}\nDone."
QUESTION = "Will it rain in Paris?"
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
LOGPROBS = "message.output_text.logprobs"


@pytest.fixture
async def tooled(tools_folder: Path) -> AsyncIterator[AsyncEngine]:
    async with running_engine(tools_folder, max_model_len=1024) as engine:
        yield engine


@pytest.fixture
async def client(tooled: AsyncEngine) -> AsyncIterator[AsyncOpenAI]:
    app = Starlette(routes=[Mount("/v1", openai_app(tooled, model_names=MODEL))])
    async with serving(app) as url, openai_client(url) as client:
        yield client


async def events_of(client: AsyncOpenAI, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream as they are sent, whose names are their types."""
    body = {"model": MODEL, "stream": True, **fields}
    events = []
    async with httpx.AsyncClient(base_url=str(client.base_url), timeout=30) as http:
        response = await http.post("responses", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_a_conversation_with_a_tool(tooled: AsyncEngine, client: AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "tools": [WEATHER], "temperature": 0}
    count = script(tooled, ANSWER)
    first = await client.responses.create(
        input=ASKED, instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=999, **options
    )
    Response.model_validate(first.to_dict(), strict=True)
    assert said(first) == [
        ("reasoning", "hm, é"),
        ("message", "I look."),
        ("weather", '{"city": "Paris"}'),
    ]
    assert first.status == "completed" and first.error is None and first.id.startswith("resp_")
    prefixes = [(item.id or "").partition("_")[0] for item in first.output]
    assert prefixes == ["rs", "msg", "fc"]
    assert first.instructions == "Be brief." and first.metadata == {"a": "b"}
    assert first.max_output_tokens == 999 and first.temperature == 0 and first.tool_choice == "auto"
    assert first.tools[0].to_dict() == WEATHER
    assert first._request_id == first.id and first.output_text == "I look."
    usage = first.usage
    assert usage is not None and usage.output_tokens == count
    assert usage.total_tokens == usage.input_tokens + count
    letters = len(tooled.tokenizer.encode("<think>\nhm, é\n</think>", add_special_tokens=False))
    assert abs(usage.output_tokens_details.reasoning_tokens - letters) <= 2

    # Items go back as they came, beside what the tool has said.
    call = first.output[-1]
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It will."}
    script(tooled, "Yes.")
    items: list[Any] = [*ASKED, *first.output, result]
    second = await client.responses.create(input=items, instructions="Be brief.", **options)
    assert said(second) == [("message", "Yes.")]

    # The same conversation as chat messages has the same prompt.
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    messages = [
        {"role": "system", "content": "Be brief."},
        *ASKED,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm, é",
            "tool_calls": [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "It will."},
    ]
    script(tooled, "Yes.")
    tools = [{"type": "function", "function": function}]
    same = await tooled.generate(messages, SamplingParams(max_tokens=5), tools=tools)
    assert second.usage is not None and second.usage.input_tokens == same.usage.prompt_tokens
    assert same.usage.cached_tokens > same.usage.prompt_tokens - 20  # token by token


@pytest.mark.parametrize("answer", [ANSWER, MIXED, "", "Just text.", "<think>\nno end"])
@pytest.mark.parametrize("is_whole", [True, False])
async def test_events_add_up_to_the_whole(
    tooled: AsyncEngine, client: AsyncOpenAI, answer: str, is_whole: bool
) -> None:
    fields: dict[str, Any] = {"input": ASKED, "tools": [WEATHER], "temperature": 0}
    count = script(tooled, answer)
    fields["max_output_tokens"] = count if is_whole else max(1, count * 2 // 3)
    salt = {"cache_salt": "other"}  # neither finds what the other has left in caches
    whole = (await client.responses.create(model=MODEL, extra_body=salt, **fields)).to_dict()
    streamed = added_up(await events_of(client, **fields))
    assert without_ids(whole) == without_ids(streamed)
    is_cut = not is_whole and count > 1
    assert whole["status"] == ("incomplete" if is_cut else "completed")
    assert (whole["incomplete_details"] is None) is not is_cut
    output: list[Any] = whole["output"]  # type: ignore[assignment]
    statuses = [item["status"] for item in output]
    assert statuses == ["completed"] * (len(statuses) - 1) + [whole["status"]]
    if answer == MIXED and is_whole:
        kinds = [item["type"] for item in output]
        assert kinds == ["reasoning", *["message", "function_call"] * 2, "function_call", "message"]
    if answer == "":
        assert [item["content"][0]["text"] for item in output] == [""]


async def test_events_however_they_are_cut(tooled: AsyncEngine) -> None:
    """A reader who is slow gets any number of tokens at once."""
    chance = random.Random(3)
    texts = TokenTexts(tooled.tokenizer)
    for is_parallel in (True, False):
        body = {"input": ASKED, "tools": [WEATHER], "parallel_tool_calls": is_parallel}
        body |= {"include": [LOGPROBS], "top_logprobs": 2, "temperature": 0}
        ask = read_response(body)
        script(tooled, MIXED)
        async with tooled.stream(ask.prompts[0], ask.params) as stream:
            deltas = [delta async for delta in stream]
            output = await stream.result()
        assert len(deltas) > 50
        answer = ResponseAnswer(MODEL, texts, ask)
        whole = await answer.complete([output])
        tokens = sum(run.num_tokens for run in output.outputs[0].runs)
        assert tokens == output.usage.completion_tokens
        num_calls = sum(item["type"] == "function_call" for item in whole["output"])
        assert num_calls == (3 if is_parallel else 1)
        entries = whole["output"][1]["content"][0]["logprobs"]
        assert "".join(entry["token"] for entry in entries).split() == ["I", "look."]
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
        for size in (1, 2, 7, 1000):
            answer = ResponseAnswer(MODEL, texts, ask)
            left, events = [*deltas], []
            while left:
                count = min(len(left), chance.randint(1, size))
                events += answer.chunks(0, _merge(left[:count]))
                del left[:count]
            events += answer.ending([output])
            events = [json.loads(json.dumps(event)) for event in events]
            assert without_ids(added_up(events)) == without_ids(whole)


async def test_many_log_probabilities(tooled: AsyncEngine, client: AsyncOpenAI) -> None:
    """So many that their events are written in a thread."""
    count = script(tooled, f"<think>hm</think>{'word ' * 60}")
    fields: dict[str, Any] = {"input": "a", "include": [LOGPROBS], "top_logprobs": 1}
    fields["max_output_tokens"] = count
    salt = {"cache_salt": "other"}
    whole = await client.responses.create(model=MODEL, extra_body=salt, **fields)
    streamed = added_up(await events_of(client, **fields))
    assert without_ids(whole.to_dict()) == without_ids(streamed)
    entries = streamed["output"][1]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries).count("word") == 60
    assert whole.usage is not None
    assert len(entries) == count - whole.usage.output_tokens_details.reasoning_tokens > 128


async def test_the_client_s_own_helpers(tooled: AsyncEngine, client: AsyncOpenAI) -> None:
    class City(BaseModel):
        name: str
        size: int

    script(tooled, ANSWER)
    async with client.responses.stream(model=MODEL, input=QUESTION, tools=[WEATHER]) as stream:  # type: ignore[list-item]
        texts = [e.delta async for e in stream if e.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(texts) == "I look." == final.output_text and len(texts) > 2
    assert said(final)[0] == ("reasoning", "hm, é")
    script(tooled, '{"name": "Rome", "size": 3}')
    parsed = await client.responses.parse(model=MODEL, input=QUESTION, text_format=City)
    assert parsed.output_parsed == City(name="Rome", size=3)
    assert parsed.text is not None and parsed.text.format is not None
    assert parsed.text.format.type == "json_schema"
    script(tooled, "Hello.")
    stream = await client.responses.create(model=MODEL, input=QUESTION, stream=True)
    kinds = [event.type async for event in stream]
    assert kinds[-1] == "response.completed" and kinds[0] == "response.created"


async def test_structure_and_choice(tooled: AsyncEngine, client: AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}}
    schema |= {"required": ["n"], "additionalProperties": False}
    wanted: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    answer = await client.responses.create(
        model=MODEL, input="a", text=wanted, max_output_tokens=80, temperature=0
    )
    assert set(json.loads(answer.output_text)) == {"n"}
    options: dict[str, Any] = {"model": MODEL, "input": "a", "max_output_tokens": 300}
    other = {**WEATHER, "name": "other"}
    for choice in (
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"name": "weather"}]},
    ):
        answer = await client.responses.create(
            tools=[other, WEATHER],  # type: ignore[list-item]
            tool_choice=choice,  # type: ignore[arg-type]
            extra_body={"seed": 3},
            **options,
        )
        names = {item.name for item in answer.output if item.type == "function_call"}
        assert names == {"weather"}
        assert answer.to_dict()["tool_choice"] == choice


async def test_reasoning_effort(tooled: AsyncEngine, client: AsyncOpenAI) -> None:
    script(tooled, "x")
    thinks, thinks_not = [
        await client.responses.create(model=MODEL, input="a", reasoning={"effort": effort})
        for effort in ("high", "none")
    ]
    assert thinks.usage is not None and thinks_not.usage is not None
    assert thinks.usage.input_tokens < thinks_not.usage.input_tokens  # an empty thought
    assert thinks.reasoning is not None and thinks.reasoning.effort == "high"


async def test_images(engine: AsyncEngine) -> None:
    """Small ones, and one that is decoded as the body is read, alike in messages."""
    large = encoded(tiny_image(3, 260, 200))
    assert len(large) > 1 << 16
    content = [
        {"type": "input_text", "text": "What is in "},
        {"type": "input_image", "image_url": image_url(1), "detail": "auto"},
        {"type": "input_image", "image_url": image_url(3, 260, 200), "detail": "low"},
    ]
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is in "},
                {"type": "image", "image": encoded(tiny_image(1, 60, 50))},
                {"type": "image", "image": large},
            ],
        }
    ]
    expected = await engine.generate(messages, greedy(8))
    store = Store()
    app = Starlette(routes=[Mount("/v1", openai_app(engine, response_store=store))])
    async with serving(app) as url, openai_client(url) as client:
        options: dict[str, Any] = {"model": "tiny-llava", "temperature": 0, "max_output_tokens": 8}
        options["extra_body"] = {"ignore_eos": True}
        items: list[Any] = [{"role": "user", "content": content}]
        answer = await client.responses.create(input=items, **options)
        assert answer.output_text == expected.text and expected.text.strip()
        json.dumps(store.records[answer.id])  # the large one too
        again = await client.responses.create(
            input="And now?", previous_response_id=answer.id, **options
        )
        said_before = {"role": "assistant", "content": expected.text}
        messages += [said_before, {"role": "user", "content": "And now?"}]
        expected = await engine.generate(messages, greedy(8))
        assert again.output_text == expected.text
        broken = [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            await client.responses.create(input=[{"role": "user", "content": broken}], **options)  # type: ignore[arg-type,list-item]
        assert caught.value.param == "input[0].content[0].image_url"
    await settled(engine)


async def test_responses_that_are_kept(tooled: AsyncEngine) -> None:
    store = Store()
    keys = {"one": "key-1", "two": "key-2"}
    app = openai_app(tooled, model_names=MODEL, response_store=store, api_key=keys)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(Starlette(routes=[Mount("/v1", app)])))
        one, two = [
            await stack.enter_async_context(openai_client(url, api_key=key))
            for key in keys.values()
        ]
        script(tooled, ANSWER)
        options: dict[str, Any] = {"model": MODEL, "tools": [WEATHER]}
        first = await one.responses.create(input=QUESTION, instructions="Be brief.", **options)
        assert first.to_dict()["store"] is True
        (call,) = [item for item in first.output if item.type == "function_call"]
        script(tooled, "Yes.")
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
        events = [
            event
            async for event in await one.responses.create(
                input=[result], previous_response_id=first.id, stream=True, **options
            )
        ]
        final = events[-1]
        assert final.type == "response.completed"
        second = final.response
        assert second.previous_response_id == first.id and second.instructions is None
        whole = [{"role": "user", "content": QUESTION}, *first.output, result]
        script(tooled, "Yes.")
        same = await two.responses.create(input=whole, store=False, **options)  # type: ignore[arg-type]
        assert same.usage is not None and second.usage is not None
        assert same.usage.input_tokens == second.usage.input_tokens
        assert same.to_dict()["store"] is False and list(store.records) == [first.id, second.id]
        got = await one.responses.retrieve(second.id)
        for query in ({"stream": True}, {"include": ["reasoning.encrypted_content"]}):
            with pytest.raises(openai.BadRequestError, match="response is") as refused:
                await one.responses.retrieve(second.id, **query)
            assert refused.value.param in query
        assert got.to_dict() == second.to_dict()
        # Another key's are none of one's own.
        with pytest.raises(openai.NotFoundError):
            await two.responses.retrieve(second.id)
        with pytest.raises(openai.NotFoundError):
            await two.responses.delete(second.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await two.responses.create(input="a", previous_response_id=first.id, **options)
        assert caught.value.param == "previous_response_id"
        assert caught.value.code == "previous_response_not_found"
        await one.responses.delete(second.id)
        assert list(store.records) == [first.id]


async def test_nothing_is_kept_by_default(tooled: AsyncEngine, client: AsyncOpenAI) -> None:
    script(tooled, "x")
    answer = await client.responses.create(model=MODEL, input="a", store=True)
    assert answer.to_dict()["store"] is False
    with pytest.raises(openai.BadRequestError, match="keeps no responses") as caught:
        await client.responses.create(model=MODEL, input="a", previous_response_id=answer.id)
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(answer.id)


async def test_a_store_that_fails(tooled: AsyncEngine) -> None:
    """Before an answer has begun it is an error, and then the end of its events."""

    class Broken(Store):
        async def save(self, response_id: str, record: Any) -> None:
            raise OSError("no space left")

    app = openai_app(tooled, model_names=MODEL, response_store=Broken())
    async with serving(Starlette(routes=[Mount("/v1", app)])) as url, openai_client(url) as client:
        script(tooled, "x")
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model=MODEL, input="a")
        error, failed = (await events_of(client, input="a"))[-2:]
        assert error["type"] == "error" and error["code"] == "internal_error"
        assert failed["type"] == "response.failed"
        response = Response.model_validate(failed["response"], strict=True)
        assert response.error is not None and response.error.code == "server_error"
        assert said(response) == [("message", "x")] and "space" not in json.dumps(failed)


async def test_a_client_who_leaves(tooled: AsyncEngine) -> None:
    store = Store()
    app = openai_app(tooled, model_names=MODEL, response_store=store)
    async with serving(Starlette(routes=[Mount("/v1", app)])) as url, openai_client(url) as client:
        script(tooled, "word " * 200)
        stream = await client.responses.create(model=MODEL, input="a", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        asking = asyncio.create_task(client.responses.create(model=MODEL, input="a"))
        await until(lambda: tooled.statistics().running)
        asking.cancel()
        await settled(tooled)
    assert not store.records


async def test_clients_who_leave_at_random(tooled: AsyncEngine) -> None:
    chance, store = random.Random(7), Store()
    app = openai_app(tooled, model_names=MODEL, response_store=store)
    async with serving(Starlette(routes=[Mount("/v1", app)])) as url, openai_client(url) as client:
        script(tooled, MIXED)

        async def ask(number: int) -> bool:
            stream = await client.responses.create(
                model=MODEL, input=f"Will it rain in {number}?", tools=[WEATHER], stream=True
            )  # type: ignore[call-overload]
            async with stream:
                for _ in range(chance.choice([0, 1, 5, 50, 1000])):
                    event = await anext(aiter(stream), None)
                    if event is None or event.type == "response.completed":
                        return True
            return False

        ended = await asyncio.gather(*map(ask, range(40)))
        await settled(tooled)
    assert 0 < sum(ended) <= len(store.records) < 40


async def test_half_a_surrogate_pair_is_escaped(tooled: AsyncEngine) -> None:
    store = Store()
    app = Starlette(routes=[Mount("/v1", openai_app(tooled, response_store=store))])
    half, body = "\ud800", {"input": "a", "max_output_tokens": 2, "metadata": {"a": "\ud800"}}
    async with serving(app) as url, httpx.AsyncClient(base_url=f"{url}/v1") as client:
        whole = (await client.post("/responses", content=json.dumps(body))).json()
        assert whole["metadata"] == {"a": half}
        assert (await client.get(f"/responses/{whole['id']}")).json() == whole
        stream = await client.post("/responses", content=json.dumps({**body, "stream": True}))
        events = [json.loads(line[6:]) for line in stream.text.splitlines() if line[:5] == "data:"]
        assert added_up(events)["metadata"] == {"a": half}
        data = {"purpose": "batch"}
        file = await client.post("/files", files={"file": ("a", b"{}")}, data=data)
        wanted: dict[str, Any] = {"input_file_id": file.json()["id"], "completion_window": "24h"}
        wanted |= {"endpoint": "/v1/completions", "metadata": {"a": half}}
        batch = (await client.post("/batches", content=json.dumps(wanted))).json()
        assert batch["metadata"] == {"a": half}
        assert (await client.get("/batches")).json()["data"][0]["id"] == batch["id"]
        wanted["metadata"] = {"a": "b" * 513}
        refused = await client.post("/batches", content=json.dumps(wanted))
        assert refused.json()["error"]["param"] == "metadata"
