"""Requests that `engine.openai_client()` makes: the `openai` package's own, made in less time."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import AsyncIterator, Callable
from types import MappingProxyType
from typing import Any

import openai
import pydantic
import pytest
import typing_extensions as typing
from openai import AsyncOpenAI
from openai.resources.chat import AsyncCompletions
from openai.types.chat import ChatCompletion, ChatCompletionMessage, completion_create_params
from openai.types.responses import ResponseFunctionToolCall, response_create_params

from aioengine import AsyncEngine
from aioengine.asgi.in_process import URL, InProcessClient
from tests.asgi.test_in_process_transport import START, part

TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CALLING = ChatCompletionMessage.model_validate({"role": "assistant", "tool_calls": [CALL]})
QUESTION: dict[str, Any] = {"role": "user", "content": "The quick"}
TOLD = {"role": "tool", "tool_call_id": "call-1", "content": "5 °C"}


class Recorder:
    """An app that keeps the requests, and gives one answer to all."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.headers: list[dict[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(json.loads(body))
        self.headers.append(dict(scope["headers"]))
        await send({**START, "headers": [(b"content-type", b"application/json")]})
        await send(part(b"{}", more_body=False))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
async def client(recorder: Recorder) -> AsyncIterator[AsyncOpenAI]:
    engine = AsyncEngine("nowhere")
    http_client = InProcessClient(engine, recorder)
    async with engine.openai_client().with_options(http_client=http_client) as client:
        yield client


@pytest.fixture
async def package(recorder: Recorder) -> AsyncIterator[AsyncOpenAI]:
    """The package's own class."""
    http_client = InProcessClient(AsyncEngine("nowhere"), recorder)
    async with AsyncOpenAI(base_url=URL, api_key="none", http_client=http_client) as package:
        yield package


def chats() -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> arguments of `chat.completions.create`."""
    tools = [{"type": "function", "function": TOOL}]
    return {
        "text": lambda: {"messages": [QUESTION]},
        "no messages": lambda: {"messages": []},
        "a tuple": lambda: {"messages": (QUESTION,), "tools": tuple(tools)},
        "a generator": lambda: {"messages": (each for each in [QUESTION])},
        "an answer": lambda: {"messages": [QUESTION, CALLING, TOLD], "tools": tools},
        "calls of an answer": lambda: {
            "messages": [QUESTION, {"role": "assistant", "tool_calls": CALLING.tool_calls}, TOLD]
        },
        "a caller's own types": lambda: {
            "messages": [
                MappingProxyType(QUESTION),
                Said(role="user", content="brown"),
                {"role": "user", "content": ({"type": "text", "text": each} for each in "fox")},
                {"role": "assistant", "tool_calls": (MappingProxyType(CALL),)},
            ]
        },
        "a parsed answer": lambda: {"messages": [QUESTION, parsed()]},
        "a body of the caller's": lambda: {
            "messages": [QUESTION],
            "extra_body": {"top_k": 3, "messages": [TOLD]},
        },
        "fields that are omitted": lambda: {
            "messages": [
                {**QUESTION, "name": openai.omit},
                {"role": "user", "content": [{"type": "text", "text": "fox", "x": openai.omit}]},
            ],
            "tools": [{**tools[0], "function": {**TOOL, "description": openai.not_given}}],
        },
        "nothing of it": lambda: {"messages": [QUESTION], "tools": openai.omit},
    }


class Said(pydantic.BaseModel):
    role: str
    content: str
    name: str = "left out, as nobody has set it"


def parsed() -> Any:
    class Weather(openai.BaseModel):
        degrees: int

    kind: Any = openai.types.chat.ParsedChatCompletionMessage[Weather]
    content = {"role": "assistant", "content": '{"degrees": 5}', "parsed": {"degrees": 5}}
    return kind.model_validate(content)


@pytest.mark.parametrize("name", chats())
async def test_chats_are_sent_as_the_package_sends_them(
    client: AsyncOpenAI, package: AsyncOpenAI, recorder: Recorder, name: str
) -> None:
    for each in (client, package):
        arguments = chats()[name]()
        given = list(arguments["messages"]) if isinstance(arguments["messages"], list) else None
        await each.chat.completions.create(model="a", temperature=0.5, **arguments)
        assert given is None or arguments["messages"] == given
    own, expected = recorder.bodies
    assert own == expected and own["model"] == "a"


async def test_responses_are_asked_as_the_package_asks_them(
    client: AsyncOpenAI, package: AsyncOpenAI, recorder: Recorder
) -> None:
    called = {"type": "function_call", "call_id": "call-1", "name": "weather", "arguments": "{}"}
    answer = ResponseFunctionToolCall.model_validate(called)
    result = {"type": "function_call_output", "call_id": "call-1", "output": "5 °C"}
    inputs: list[Any] = ["The quick", [QUESTION], [QUESTION, answer, result]]
    for given in inputs:
        for each in (client, package):
            await each.responses.create(
                model="a",
                input=given,
                tools=[{"type": "function", **TOOL}],  # type: ignore[typeddict-item]
            )
    for own, expected in zip(recorder.bodies[::2], recorder.bodies[1::2], strict=True):
        assert own == expected


async def test_streams_and_raw_responses_take_the_same_way(
    client: AsyncOpenAI, recorder: Recorder
) -> None:
    messages: Any = [QUESTION]
    await client.chat.completions.with_raw_response.create(model="a", messages=messages)
    again = client.with_options(max_retries=0).chat.completions
    await again.create(model="a", messages=messages, stream=True)
    assert [body["messages"] for body in recorder.bodies] == [messages] * 2


@pytest.mark.parametrize("depth", [400, 700, None])
async def test_deep_and_circular_messages_are_what_they_are_to_the_package(
    client: AsyncOpenAI, package: AsyncOpenAI, recorder: Recorder, depth: int | None
) -> None:
    """`depth`: of lists in a message; None: it holds itself."""
    message: dict[str, Any] = {"role": "user", "content": "fox", "deep": []}
    inner = message["deep"]
    for _ in range(depth or 0):
        inner.append([])
        inner = inner[0]
    if depth is None:
        inner.append(message)
    for each in (client, package):
        messages: Any = [message]
        if depth is None:
            with pytest.raises(ValueError, match="Circular reference"):
                await each.chat.completions.create(model="a", messages=messages)
        else:
            await each.chat.completions.create(model="a", messages=messages)
    assert recorder.bodies[:1] == recorder.bodies[1:]


@pytest.mark.parametrize("wrong", [Said, object()])
async def test_what_is_no_json(client: AsyncOpenAI, package: AsyncOpenAI, wrong: Any) -> None:
    raised = []
    for each in (client, package):
        with pytest.raises(TypeError) as caught:
            await each.chat.completions.create(model="a", messages=[QUESTION, wrong])
        raised.append(str(caught.value))
    assert raised[0] == raised[1]


async def test_what_a_caller_changes_meanwhile_is_not_sent(
    client: AsyncOpenAI, recorder: Recorder
) -> None:
    message: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "The"}]}
    messages: Any = [message]

    async def key() -> str:
        message["content"][0]["text"] = "A"
        messages.append(TOLD)
        return "none"

    await client.with_options(api_key=key).chat.completions.create(model="a", messages=messages)
    (body,) = recorder.bodies
    assert body["messages"] == [{"role": "user", "content": [{"type": "text", "text": "The"}]}]


async def test_a_body_that_is_no_mapping_is_left_to_the_package(client: AsyncOpenAI) -> None:
    with pytest.raises(TypeError, match="not a mapping"):
        await client.chat.completions.create(model="a", messages=[], extra_body="nothing")


async def test_the_work_for_a_message_does_not_grow_with_its_types(
    client: AsyncOpenAI, package: AsyncOpenAI
) -> None:
    """The package tries each type of message and tool on each."""
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    tools: Any = [{"type": "function", "function": TOOL}]

    async def num_calls(asked: AsyncOpenAI, count: int) -> int:
        made = 0

        def note(_frame: Any, event: str, _value: Any) -> None:
            nonlocal made
            made += event == "call"

        messages: Any = [QUESTION, answer, TOLD] * count
        sys.setprofile(note)
        try:
            await asked.chat.completions.create(model="a", messages=messages, tools=tools * count)
        finally:
            sys.setprofile(None)
        return made

    calls = {}
    for each in (client, package):
        await num_calls(each, 1)  # what is called first only
        calls[each] = await num_calls(each, 102) - await num_calls(each, 2)
    assert 10 * calls[client] < calls[package]


async def test_who_traces_calls_sees_the_callers_arguments(
    client: AsyncOpenAI, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracing libraries replace the method of the package's class, at any time."""
    create: Any = AsyncCompletions.create
    seen: list[Any] = []

    async def traced(self: Any, **arguments: Any) -> ChatCompletion:
        seen.append(arguments)
        return await create(self, **arguments)

    monkeypatch.setattr(AsyncCompletions, "create", traced)
    messages: Any = [QUESTION, TOLD]
    await client.chat.completions.create(model="a", messages=messages)
    (arguments,) = seen
    assert arguments["model"] == "a"
    assert [message["role"] for message in arguments["messages"]] == ["user", "tool"]
    assert len(arguments["messages"]) == 2 and arguments["messages"][1] is TOLD
    assert str(arguments["messages"]) == str(messages)
    assert recorder.bodies[0]["messages"] == messages


async def test_methods_have_the_packages_signatures(client: AsyncOpenAI) -> None:
    own, package = client.chat.completions.create, AsyncCompletions.create
    assert (
        list(inspect.signature(own).parameters) == list(inspect.signature(package).parameters)[1:]
    )
    with pytest.raises(TypeError, match="messages"):
        await client.chat.completions.create(model="a")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="colour"):
        await client.chat.completions.create(model="a", messages=[], colour="red")  # type: ignore[call-overload]


async def test_nothing_of_the_machine_is_said(client: AsyncOpenAI, recorder: Recorder) -> None:
    await client.chat.completions.create(model="a", messages=[])
    (headers,) = recorder.headers
    assert not [name for name in headers if name.startswith(b"x-stainless-os")]
    assert headers[b"host"] == b"aioengine" and headers[b"content-type"] == b"application/json"


async def test_another_base_url_is_used(client: AsyncOpenAI, recorder: Recorder) -> None:
    """Whatever for: the URLs that are kept are of one base."""
    seen = []

    async def note(request: Any) -> None:
        seen.append(str(request.url))

    client._client.event_hooks["request"].append(note)
    for base in (URL, f"{URL}/other"):
        client.base_url = base
        for _ in range(2):
            await client.chat.completions.create(model="a", messages=[])
    paths = [f"{URL}/chat/completions", f"{URL}/other/chat/completions"]
    assert seen == [paths[0]] * 2 + [paths[1]] * 2


def annotations(kind: Any, seen: set[Any]) -> list[Any]:
    """All metadata within a type."""
    found = list(getattr(kind, "__metadata__", ()))
    if typing.is_typeddict(kind) and kind not in seen:
        seen.add(kind)
        for field in typing.get_type_hints(kind, include_extras=True).values():
            found += annotations(field, seen)
    for argument in typing.get_args(kind):
        found += annotations(argument, seen)
    return found


@pytest.mark.parametrize(
    "kind",
    [
        completion_create_params.CompletionCreateParamsStreaming,
        response_create_params.ResponseCreateParamsStreaming,
    ],
)
def test_the_packages_types_change_nothing_of_a_request(kind: Any) -> None:
    """A type that renames or rewrites a field would have to be walked."""
    seen: set[Any] = set()
    assert not annotations(kind, seen) and len(seen) > 20
