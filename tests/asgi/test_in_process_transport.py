"""The transport below OpenAI's client, over apps of a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from aioengine import AsyncEngine
from aioengine.asgi.in_process import MAX_WAITING, URL, InProcessClient, _Transport
from tests.support.engines import other_tasks, until

START = {"type": "http.response.start", "status": 200, "headers": []}
NAME: ContextVar[str] = ContextVar("NAME")


def part(body: bytes = b"", *, more_body: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more_body}


class App:
    """Runs `answer(receive, send)`, and notes how that has ended."""

    def __init__(self, answer: Callable[[Any, Any], Awaitable[None]]) -> None:
        self.ends: list[str] = []
        self.scopes: list[Any] = []
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        try:
            await self._answer(receive, send)
            self.ends.append("complete")
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            raise


@pytest.fixture
async def engine() -> AsyncEngine:
    """Never started: these apps ask nothing of it."""
    return AsyncEngine("nowhere")


@pytest.fixture
async def no_tasks_are_left() -> AsyncIterator[None]:
    before = other_tasks()
    yield
    assert other_tasks() <= before


pytestmark = pytest.mark.usefixtures("no_tasks_are_left")


async def passes() -> None:
    """Give everything on the loop all the time that it can use."""
    for _ in range(100):
        await asyncio.sleep(0)


async def test_an_app_waits_while_nobody_reads(engine: AsyncEngine) -> None:
    num_sent = 0

    async def answer(receive: Any, send: Any) -> None:
        nonlocal num_sent
        await send(START)
        for number in range(50):
            await send(part(b"%d " % number))
            num_sent += 1
        await send(part(more_body=False))

    app = App(answer)
    async with InProcessClient(engine, app) as client, client.stream("GET", URL) as response:
        await passes()
        assert num_sent == MAX_WAITING
        parts = response.aiter_raw()
        first = await anext(parts)
        await passes()
        assert MAX_WAITING < num_sent <= 2 * MAX_WAITING
        rest = [data async for data in parts]
    assert first + b"".join(rest) == b"".join(b"%d " % number for number in range(50))
    assert app.ends == ["complete"]


async def test_each_part_comes_as_it_is_sent(engine: AsyncEngine) -> None:
    goes_on = asyncio.Event()

    async def answer(receive: Any, send: Any) -> None:
        await send(START)
        for letter in (b"a", b"b"):
            await send(part(letter))
            await goes_on.wait()
            goes_on.clear()
        await send(part(more_body=False))

    app = App(answer)
    async with InProcessClient(engine, app) as client, client.stream("GET", URL) as response:
        parts = response.aiter_raw()
        for letter in (b"a", b"b"):
            assert await anext(parts) == letter
            goes_on.set()
        assert not [data async for data in parts]


async def test_a_reader_who_leaves(engine: AsyncEngine) -> None:
    """A part that is written can no longer be sent, and a disconnect is heard."""
    heard: list[Any] = []

    async def answer(receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        await send(START)
        await send(part(b"a"))
        try:
            await asyncio.Event().wait()
        finally:
            heard.append(await receive())
            with pytest.raises(OSError, match="the client has left"):
                await send(part(b"b"))

    app = App(answer)
    async with InProcessClient(engine, app) as client, client.stream("GET", URL) as response:
        assert await anext(response.aiter_raw()) == b"a"
    assert heard == [{"type": "http.disconnect"}]
    assert app.ends == ["cancelled"]


async def test_a_request_passes_as_it_is(engine: AsyncEngine) -> None:
    """Without a copy of its body."""
    body, found = bytes(1 << 20), []

    async def answer(receive: Any, send: Any) -> None:
        found.append(await receive())
        await send({**START, "status": 201, "headers": [(b"x-a", b"1"), (b"x-a", b"2")]})
        await send(part(b"whole", more_body=False))

    app = App(answer)
    async with InProcessClient(engine, app) as client:
        response = await client.post(f"{URL}/a%20b?c=d", content=body, headers={"X-Own": "e"})
    assert (response.status_code, response.text) == (201, "whole")
    assert response.headers.get_list("x-a") == ["1", "2"]
    (message,) = found
    assert message["body"] is body and not message["more_body"]
    (scope,) = app.scopes
    assert (scope["root_path"], scope["path"]) == ("/v1", "/v1/a b")
    assert (scope["raw_path"], scope["query_string"]) == (b"/v1/a%20b", b"c=d")
    assert (b"x-own", b"e") in scope["headers"]


async def test_the_callers_context_is_seen(engine: AsyncEngine) -> None:
    async def answer(receive: Any, send: Any) -> None:
        await send(START)
        await send(part(NAME.get().encode(), more_body=False))

    async def ask(client: Any, name: str) -> str:
        NAME.set(name)
        return str((await client.get(URL)).text)

    async with InProcessClient(engine, App(answer)) as client:
        names = await asyncio.gather(ask(client, "a"), ask(client, "b"))
    assert names == ["a", "b"]


def openai_over(client: Any) -> AsyncOpenAI:
    """OpenAI's client without second tries."""
    return AsyncOpenAI(api_key="none", base_url=URL, http_client=client, max_retries=0)


async def ask(client: AsyncOpenAI, **options: Any) -> Any:
    return await client.chat.completions.create(model="a", messages=[], **options)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_nothing_comes_in_time(engine: AsyncEngine, has_begun: bool) -> None:
    async def answer(receive: Any, send: Any) -> None:
        if has_begun:
            await send(START)
        await asyncio.Event().wait()

    app = App(answer)
    async with openai_over(InProcessClient(engine, app)) as client:
        with pytest.raises(openai.APITimeoutError):
            async for _ in await ask(client.with_options(timeout=0.01), stream=True):
                pass
        assert app.ends == ["cancelled"]


async def _nothing(receive: Any, send: Any) -> None:
    pass


async def _fails(receive: Any, send: Any) -> None:
    raise ZeroDivisionError


async def _fails_in_the_middle(receive: Any, send: Any) -> None:
    await send(START)
    await send(part(b"data: "))
    raise ZeroDivisionError


async def _is_cancelled(receive: Any, send: Any) -> None:
    await send(START)
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (_nothing, None),
        (_fails, ZeroDivisionError),
        (_fails_in_the_middle, ZeroDivisionError),
        (_is_cancelled, None),
    ],
)
async def test_an_app_that_ends_too_early(
    engine: AsyncEngine, answer: Any, cause: type[Exception] | None
) -> None:
    async with openai_over(InProcessClient(engine, App(answer))) as client:
        with pytest.raises(openai.APIConnectionError) as caught:
            async for _ in await ask(client, stream=True):
                pass
    lost = caught.value.__cause__
    assert lost is not None and "the app ended before its response" in str(lost)
    assert cause is None or isinstance(lost.__cause__, cause)


async def test_an_app_that_fails_behind_its_response(
    engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(receive: Any, send: Any) -> None:
        await send(START)
        await send(part(b"whole", more_body=False))
        raise ZeroDivisionError

    async with InProcessClient(engine, App(answer)) as client:
        assert (await client.get(URL)).text == "whole"
        await passes()
    assert "ZeroDivisionError" in caplog.text


async def test_over_httpx() -> None:
    """The library that earlier versions of the `openai` package stand on."""
    event = b'data: {"id": "a", "choices": [{"index": 0, "delta": {"content": "b"}}]}\n\n'

    async def answer(receive: Any, send: Any) -> None:
        await send(START)
        await send(part(event))
        await asyncio.Event().wait()

    app = App(answer)
    transport: Any = _Transport(app, httpx)
    async with openai_over(httpx.AsyncClient(transport=transport)) as client:
        async with await ask(client, stream=True) as stream:
            assert (await anext(stream)).choices[0].delta.content == "b"
        await until(lambda: app.ends == ["cancelled"])
        with pytest.raises(openai.APITimeoutError):
            async for _ in await ask(client.with_options(timeout=0.01), stream=True):
                pass
