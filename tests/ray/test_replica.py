"""A replica in this process: its answers, its end, and how it is known to be unwell."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from aioengine import EngineConfig, EngineState, RequestOutput, SamplingParams, errors
from aioengine.ray_serve.calls import HttpRequest, answer
from aioengine.ray_serve.replica import EngineReplica
from tests.support.engines import assert_at_rest, greedy, settled, until
from tests.support.tiny import tiny_image


def chat(**fields: Any) -> HttpRequest:
    """A chat completion request."""
    message = {"role": "user", "content": "What is in the picture?"}
    body = {"messages": [message], "temperature": 0, "ignore_eos": True, **fields}
    return HttpRequest("POST", "/v1/chat/completions", body=json.dumps(body).encode())


@pytest.fixture
async def replica(folder: Path, engine_config: EngineConfig) -> AsyncIterator[EngineReplica]:
    """As Serve makes it, and as it lets go of it."""
    replica = EngineReplica.__new__(EngineReplica)
    await replica.__init__(folder, engine_config, model_names=["tiny"])
    yield replica
    closing = replica.__del__()
    if closing is not None:
        await closing


async def whole(messages: AsyncIterator[Message]) -> tuple[int, bytes]:
    """Status and body of an answer."""
    start, *bodies = [message async for message in messages]
    return start["status"], b"".join(message["body"] for message in bodies)


async def test_answers_as_the_engine_does(replica: EngineReplica) -> None:
    status, body = await whole(replica.respond(chat(max_tokens=12)))
    expected = await replica.generate(
        [{"role": "user", "content": "What is in the picture?"}], greedy(12)
    )
    deltas = [
        delta
        async for delta in replica.stream(
            [{"role": "user", "content": "What is in the picture?"}], greedy(12)
        )
    ]
    assert status == 200
    assert json.loads(body)["choices"][0]["message"]["content"] == expected.text
    assert "".join(delta.text for delta in deltas) == expected.text
    assert len(deltas) > 1
    assert (await replica.statistics()).finished == 3
    await replica.reset_caches()
    assert (await replica.statistics()).kv_blocks_cached == 0


async def test_other_paths_are_not_found(replica: EngineReplica) -> None:
    status, _ = await whole(replica.respond(HttpRequest("GET", "/v1/none")))
    assert status == 404
    status, body = await whole(replica.respond(HttpRequest("GET", "/v1/models")))
    assert (status, json.loads(body)["data"][0]["id"]) == (200, "tiny")


async def test_closing_an_answer_ends_its_request(replica: EngineReplica) -> None:
    messages = replica.respond(chat(max_tokens=400, stream=True))
    assert (await anext(messages))["status"] == 200
    await anext(messages)
    await messages.aclose()
    await settled(replica._engine)
    statistics = await replica.statistics()
    assert (statistics.aborted, statistics.finished) == (1, 0)


async def test_cancelling_an_answer_that_has_not_begun_ends_its_request(
    replica: EngineReplica,
) -> None:
    waiting = asyncio.ensure_future(whole(replica.respond(chat(max_tokens=400))))
    await until(lambda: replica._engine.statistics().running)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await settled(replica._engine)
    assert (await replica.statistics()).aborted == 1


async def test_serve_closes_it(replica: EngineReplica) -> None:
    await replica.check_health()
    closing = replica.__del__()
    assert closing is not None
    await closing
    assert replica._engine.state is EngineState.CLOSED
    assert replica.__del__() is None
    with pytest.raises(errors.EngineClosedError):
        await replica.check_health()
    with pytest.raises(errors.EngineClosedError):
        await anext(replica.respond(chat()))


async def test_a_dead_engine_is_unwell_and_answers_nothing(
    replica: EngineReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither now, when the answer would be a 503, nor later."""

    def fail(*args: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(replica._engine._core.loaded.runner, "step", fail)
    for _ in range(2):
        with pytest.raises(errors.EngineDeadError):
            await anext(replica.respond(chat()))
        with pytest.raises(errors.EngineDeadError):
            await replica.check_health()


async def test_a_stream_tells_itself_that_its_engine_died(
    replica: EngineReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = replica.respond(chat(max_tokens=400, stream=True))
    await anext(messages)
    await anext(messages)

    def fail(*args: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(replica._engine._core.loaded.runner, "step", fail)
    rest = b"".join([message["body"] async for message in messages])
    assert b'"code":"engine_dead"' in rest.splitlines()[-2]


async def test_an_application_that_fails_or_never_ends() -> None:
    ended = asyncio.Event()

    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == b"body"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            await receive()
        finally:
            ended.set()

    messages = answer(failing, HttpRequest("GET", "/"))
    await anext(messages)
    with pytest.raises(ZeroDivisionError):
        await anext(messages)
    messages = answer(endless, HttpRequest("GET", "/", body=b"body"))
    await anext(messages)
    await messages.aclose()
    assert ended.is_set()


async def test_parts_of_a_body_are_joined_after_the_first() -> None:
    """Nothing waits for the interval but what comes within it; the end does not."""
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        await go_on.wait()
        for word in (b"these ", b"come ", b"together"):
            await send({"type": "http.response.body", "body": word, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body"})

    messages = answer(app, HttpRequest("GET", "/"), interval_s=3600)
    assert (await anext(messages))["status"] == 200
    assert (await anext(messages))["body"] == b"first "
    go_on.set()
    last = await anext(messages)
    assert last["body"] == b"these come together"
    assert not last.get("more_body", False)
    with pytest.raises(StopAsyncIteration):
        await anext(messages)


async def test_what_passes_between_processes_can(replica: EngineReplica) -> None:
    """Ray pickles it."""
    image = tiny_image(0)
    output = await replica.generate(
        "<image> what", SamplingParams(max_tokens=3, prompt_logprobs=1), images=[image]
    )
    copied: RequestOutput = pickle.loads(pickle.dumps(output))
    assert copied.token_ids == output.token_ids
    assert copied.prompt_logprobs is not None
    assert list(copied.prompt_logprobs) == list(output.prompt_logprobs or [])
    statistics = await replica.statistics()
    assert pickle.loads(pickle.dumps(statistics)) == statistics
    assert_at_rest(replica._engine)


@pytest.mark.parametrize("kind", [getattr(errors, name) for name in errors.__all__])
def test_errors_pass_whole(kind: type[errors.AioEngineError]) -> None:
    options = {}
    if issubclass(kind, errors.InvalidRequestError):
        options = {"parameter": "images[1]", "value": 7}
    error = kind("what is wrong", **options)
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is kind
    assert (str(copied), vars(copied)) == ("what is wrong", options)
