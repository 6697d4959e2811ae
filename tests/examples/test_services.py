"""The embedding examples over real sockets, with clients who leave in the middle."""

from __future__ import annotations

import asyncio
import base64
import json
import runpy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

import aioengine
from aioengine import AsyncEngine, SamplingParams
from aioengine.streams.pace import Pace
from tests.asgi.serving import free_socket, openai_client, serving
from tests.support.engines import DEADLINE_S, settled, until

FOLDER = Path(__file__).parents[2] / "examples"
PARAMS = SamplingParams(temperature=0, max_tokens=96)


@asynccontextmanager
async def running(name: str) -> AsyncIterator[tuple[str, AsyncEngine]]:
    """The URL of an example, and its engine."""
    script = runpy.run_path(str(FOLDER / f"embed_in_{name}.py"))
    if name != "aiohttp":
        async with serving(script["app"]) as url:
            yield url, script["engine"]
        return
    app = script["make_app"]()
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        socket = free_socket()
        await web.SockSite(runner, socket).start()
        yield f"http://127.0.0.1:{socket.getsockname()[1]}", app[script["ENGINE"]]
    finally:
        await runner.cleanup()


def image() -> bytes:
    return aioengine.demo_images()[0].read_bytes()


def messages() -> list[dict[str, Any]]:
    url = f"data:image/png;base64,{base64.b64encode(image()).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "Describe the picture."},
    ]
    return [{"role": "user", "content": content}]


REQUESTS: dict[str, tuple[str, Any]] = {
    "fastapi": ("/chat", lambda: json.dumps(messages()).encode()),
    "aiohttp": ("/chat", lambda: json.dumps(messages()).encode()),
    "starlette": ("/describe", image),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_answers(name: str, assets: Path) -> None:
    path, body = REQUESTS[name]
    async with running(name) as (url, engine), _client(url) as client:
        expected = await engine.generate(messages(), PARAMS)
        response = await client.post(path, content=body(), timeout=DEADLINE_S)
        assert response.status_code == 200
        text = response.text
        if path == "/chat":
            events = [json.loads(event[6:]) for event in text.split("\n\n") if event]
            text = "".join(event["text"] for event in events)
        assert text == expected.text and text.strip()
        if name != "aiohttp":
            async with openai_client(url) as openai:
                answer = await openai.chat.completions.create(
                    model=(await openai.models.list()).data[0].id,
                    messages=messages(),  # type: ignore[arg-type]
                    temperature=0,
                    max_tokens=96,
                )
            assert answer.choices[0].message.content == expected.text


@pytest.mark.parametrize("name", REQUESTS)
async def test_what_is_no_image(name: str, assets: Path) -> None:
    path, _ = REQUESTS[name]
    async with running(name) as (url, engine), _client(url) as client:
        bad = messages()
        bad[0]["content"][0]["image_url"]["url"] = "data:image/png;base64,AAAA"
        body = json.dumps(bad).encode() if path == "/chat" else b"no image"
        response = await client.post(path, content=body, timeout=DEADLINE_S)
        assert response.status_code == (400 if path == "/chat" else 200)
        assert "content[0]" in response.text or "images[0]" in response.text
        await settled(engine)


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_client_who_leaves_frees_all_within_a_step(
    name: str, tiny_assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aioengine, "ASSETS", tiny_assets)
    path, body = REQUESTS[name]
    async with running(name) as (url, engine):
        _make_endless(engine)
        reader, writer = await _post(url, path, body())
        await _read_some(reader)
        steps = 0

        def count(span: Any) -> None:
            nonlocal steps
            steps += span.stage == "step"

        writer.transport.abort()
        await until(lambda: engine.statistics().aborted == 1)
        engine.instruments.listeners.append(count)
        schedule, planned = engine._core.scheduler.schedule, []
        monkeypatch.setattr(
            engine._core.scheduler, "schedule", lambda: planned.append(schedule()) or planned[-1]
        )
        await settled(engine)
        assert not any(planned)  # none for a request that is gone
        assert steps <= 1 + Pace.MOST_AHEAD  # those in flight
        assert engine.statistics().finished == 0


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers={"content-type": "application/json"})


def _make_endless(engine: AsyncEngine) -> None:
    """No answer ends by itself before the client has left."""
    stream = engine.stream

    def endless(prompt: Any, params: Any, **options: Any) -> Any:
        return stream(prompt, replace(params, max_tokens=None, ignore_eos=True), **options)

    engine.stream = endless  # type: ignore[method-assign]


async def _post(
    url: str, path: str, body: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


async def _read_some(reader: asyncio.StreamReader) -> None:
    """The response's head, and the beginning of its body."""
    async with asyncio.timeout(DEADLINE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0]
        assert await reader.read(8)
