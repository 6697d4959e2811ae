"""The FastAPI example, in this process: no server and no port."""

from __future__ import annotations

import asyncio
import base64
import json
import runpy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import aioengine
from aioengine import AsyncEngine

SCRIPT = Path(__file__).parents[2] / "examples" / "embed_in_fastapi.py"
Message = dict[str, Any]


@pytest.fixture
async def app(assets: Path) -> AsyncIterator[FastAPI]:
    """The application between start-up and shut-down, and its engine."""
    script = runpy.run_path(str(SCRIPT))
    application: FastAPI = script["app"]
    application.state.engine = script["engine"]
    async with application.router.lifespan_context(application):
        yield application


@pytest.fixture
def messages(assets: Path) -> list[Message]:
    """A question with an image, as JSON can carry it."""
    image = aioengine.demo_images()[0].read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "Describe the picture."},
    ]
    return [{"role": "user", "content": content}]


async def post(app: FastAPI, body: object) -> httpx.Response:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post("/chat", json=body)


def data(response: httpx.Response) -> list[Any]:
    """What the `data:` lines hold."""
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    return [json.loads(event.rpartition("data: ")[2]) for event in events]


def text_of(response: httpx.Response) -> str:
    """The text that the events make up; how many events is a matter of timing."""
    return "".join(event["text"] for event in data(response))


async def at_rest(engine: AsyncEngine) -> None:
    """Return when no request is left and everything is given back."""
    while True:
        now = engine.statistics()
        if not (now.running or now.waiting) and now.kv_blocks_free == now.kv_blocks_total:
            return
        await asyncio.sleep(0)


async def test_streams_events(app: FastAPI, messages: list[Message]) -> None:
    response = await post(app, messages)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert text_of(response).strip()
    assert app.state.engine.statistics().finished == 1


async def test_what_cannot_be_a_image_is_a_bad_request(app: FastAPI) -> None:
    url = "data:image/png;base64," + base64.b64encode(b"no image").decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    response = await post(app, [{"role": "user", "content": [part]}])
    assert response.status_code == 400
    assert "content[0]" in response.json()["detail"]
    await at_rest(app.state.engine)


class Client:
    """One side of an ASGI connection: sends a body, and leaves after so many chunks.

    What is sent to a client who has gone is lost without notice before ASGI 2.4, OSError since.
    """

    def __init__(self, body: object, *, spec_version: str, leave_after: int) -> None:
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec_version},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/chat",
            "raw_path": b"/chat",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"test"), (b"content-type", b"application/json")],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        self.num_chunks = 0
        self._leave_after = leave_after
        self._body: bytes | None = json.dumps(body).encode()
        self._left = asyncio.Event()
        if leave_after == 0:
            self._left.set()

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._left.is_set():
            if self.scope["asgi"]["spec_version"] >= "2.4":
                raise OSError("the client has gone")
            return
        if message["type"] == "http.response.body":
            self.num_chunks += 1
            if self.num_chunks == self._leave_after:
                self._left.set()


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
async def test_a_client_who_leaves_ends_the_request(
    app: FastAPI, messages: list[Message], spec_version: str
) -> None:
    engine: AsyncEngine = app.state.engine
    whole = await post(app, messages)
    client = Client(messages, spec_version=spec_version, leave_after=1)
    try:
        await app(client.scope, client.receive, client.send)
    except Exception as error:
        assert spec_version == "2.4", error
    await at_rest(engine)
    now = engine.statistics()
    assert (now.finished, now.aborted, now.failed) == (1, 1, 0)
    assert text_of(await post(app, messages)) == text_of(whole)


async def test_a_client_who_left_before_the_first_token(
    app: FastAPI, messages: list[Message]
) -> None:
    client = Client(messages, spec_version="2.3", leave_after=0)
    await app(client.scope, client.receive, client.send)
    await at_rest(app.state.engine)
    assert app.state.engine.statistics().finished == 0
