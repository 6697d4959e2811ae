"""What the ASGI app owes to any client: keys, bounds, probes, hosts that mount it, slow readers."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import django
import httpx
import litestar
import numpy as np
import pytest
from django.conf import settings
from django.core.asgi import get_asgi_application
from PIL import Image
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.routing import Mount

from aioengine import AsyncEngine, EngineState
from aioengine.asgi import openai_app, service_app
from aioengine.asgi.error_responses import api_error
from aioengine.errors import EngineError, InvalidRequestError
from tests.asgi.serving import image_part, serving
from tests.support.engines import DEADLINE_S, encoded, greedy, running_engine, settled, until

ASK = {
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 4,
    "temperature": 0,
    "ignore_eos": True,
}
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def client_of(app: Any, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving(app) as url,
        httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, **options) as client,
    ):
        yield client


def mounted(engine: AsyncEngine, **options: Any) -> Starlette:
    return Starlette(routes=[Mount("/v1", openai_app(engine, **options))])


async def test_keys(engine: AsyncEngine) -> None:
    def basic(password: str) -> str:
        return "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()

    async with client_of(service_app(engine, api_key="sëcret")) as client:
        for authorization in (
            None, "", "Bearer",  "Bearer secret", "Bearer sëcret2", "sëcret",
            "Basic", "Basic !", basic(""), basic("s"),
        ):  # fmt: skip
            headers = {} if authorization is None else {"authorization": authorization.encode()}
            for method, path in (
                ("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/"),
                ("GET", "/status/events"), ("GET", "/status/trace"), ("GET", "/v1/metrics"),
            ):  # fmt: skip
                response = await client.request(method, path, headers=headers)
                assert response.status_code == 401, (authorization, path)
                assert response.json()["error"]["code"] == "invalid_api_key"
                # A line each: Chromium asks its user for the first of a line only.
                found = response.headers.get_list("www-authenticate")
                assert found == ['Basic realm="aioengine"', "Bearer"]
        for authorization in ("Bearer sëcret", "bearer  sëcret", basic("sëcret")):
            headers = {"authorization": authorization.encode()}
            response = await client.post(CHAT, json=ASK, headers=headers)
            assert response.status_code == 200
            assert (await client.get("/", headers=headers)).status_code == 200
        assert (await client.get("/health")).status_code == 200  # for probes, which have no key
        assert engine.statistics().finished == 3


async def test_bodies_that_are_refused(engine: AsyncEngine) -> None:
    app = mounted(engine, max_body_bytes=10_000, body_timeout_s=0.2)
    async with client_of(app) as client:
        large = json.dumps({**ASK, "user": "x" * 20_000})
        assert (await client.post(CHAT, content=large)).status_code == 413

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(large), 1000):
                yield large[start : start + 1000].encode()

        assert (await client.post(CHAT, content=pieces())).status_code == 413

        async def slow() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(0.5)

        assert (await client.post(CHAT, content=slow())).status_code == 408
        for content in (b"", b"[1]", b"{", b"\xff\xfe"):
            response = await client.post(CHAT, content=content)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "invalid_json"
        for path, method, status in (
            ("/v1/nothing", "GET", 404),
            ("/nothing", "GET", 404),
            (CHAT, "GET", 405),
            ("/v1/models/a/b", "GET", 404),
        ):
            response = await client.request(method, path)
            assert response.status_code == status, path
        assert (await client.get("/v1/nothing")).json()["error"]["message"]
        assert (await client.post(CHAT, json=ASK)).status_code == 200


HOSTILE_PARTS: list[Any] = [
    {"type": "image", "image": [[1, 2], [3, 4]]},
    {"type": "image", "image": {"url": 3}},
    {"type": "image", "image": "/etc/passwd"},
    {"type": "image_url", "image_url": 7},
    {"type": "image_url"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 200_000}},
    {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    {"type": ["a"]},
    7,
    None,
]


async def test_hostile_parts(engine: AsyncEngine) -> None:
    async with client_of(mounted(engine)) as client:
        for part in HOSTILE_PARTS:
            body = {**ASK, "messages": [{"role": "user", "content": [part]}]}
            response = await client.post(CHAT, json=body)
            assert response.status_code in (400, 422), part
            assert response.json()["error"]["param"].startswith("messages[0].content[0]"), part


async def test_fields_of_the_wrong_kind(engine: AsyncEngine) -> None:
    """Whatever stands there, the answer is an answer or a refusal, and nothing breaks."""
    names = [*ASK, "n", "stop", "seed", "logprobs", "stream", "model", "user", "response_format"]
    async with client_of(mounted(engine)) as client:
        for name in names:
            for value in ({}, [], [[]], "x", -1.5, 1e308, True, "\ud800"):
                response = await client.post(CHAT, content=json.dumps({**ASK, name: value}))
                assert response.status_code in (200, 400, 404), (name, value, response.text)
        assert (await client.post(CHAT, json=ASK)).status_code == 200


async def test_a_body_of_many_megabytes(engine: AsyncEngine) -> None:
    """That nothing of it holds the loop is the business of every test's detector."""
    noise = np.random.default_rng(0).integers(0, 256, (1800, 1800, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), compress_level=0)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    messages = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]},
    ]
    expected = await engine.generate(messages, greedy(4))
    await engine.reset_caches()
    async with client_of(mounted(engine)) as client:
        body = json.dumps({**ASK, "messages": messages})
        assert len(body) > 12_000_000
        response = await client.post(CHAT, content=body)
        assert response.json()["choices"][0]["message"]["content"] == expected.text


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_media_that_is_refused_is_let_go_of(engine: AsyncEngine, is_streamed: bool) -> None:
    """At once, and not when somebody collects garbage: it may be most of a server's memory."""
    item = {"url": f"data:image/png;base64,{base64.b64encode(bytes(3 << 20)).decode()}"}
    message = {"role": "user", "content": [{"type": "image_url", "image_url": item}] * 2}
    body = json.dumps({**ASK, "messages": [message], "stream": is_streamed}).encode()
    parts, sent = [body], []

    async def receive() -> Any:
        if not parts:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": parts.pop(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    def is_held() -> bool:
        found = (gc.get_referents(each) for each in gc.get_objects())
        return any(type(one) is bytes and len(one) == 3 << 20 for each in found for one in each)

    gc.collect()
    gc.disable()
    try:
        await mounted(engine)(scope_of(body), receive, send)
        assert sent[0]["status"] == 422
        await settled(engine)
        async with asyncio.timeout(DEADLINE_S):  # the other one may just be looked at in a thread
            while await asyncio.to_thread(is_held):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


def scope_of(body: bytes) -> dict[str, Any]:
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "method": "POST",
        "http_version": "1.1", "scheme": "http", "path": CHAT, "raw_path": CHAT.encode(),
        "query_string": b"", "root_path": "", "client": ("a", 1), "server": ("b", 80),
        "headers": [(b"content-length", str(len(body)).encode())],
    }  # fmt: skip


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_send_that_fails_is_a_client_who_left(
    engine: AsyncEngine, is_streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As ASGI has it since 2.4: nothing more is sent, nothing logged, nothing raised."""
    body = json.dumps({**ASK, "max_tokens": 60, "stream": is_streamed}).encode()
    sent = []

    async def receive() -> Any:
        if not sent and not received:
            received.append(body)
            return {"type": "http.request", "body": body, "more_body": False}
        return await asyncio.Future()

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            raise OSError("the client has gone")

    received: list[bytes] = []
    await mounted(engine)(scope_of(body), receive, send)
    assert sent == ["http.response.start", "http.response.body"]
    assert not caplog.records
    await settled(engine)


async def test_a_host_that_plays_the_body_again_and_again(engine: AsyncEngine) -> None:
    body = json.dumps(ASK).encode()
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async with asyncio.timeout(DEADLINE_S):
        await mounted(engine)(scope_of(body), receive, send)
    assert sent[0]["status"] == 200 and json.loads(sent[1]["body"])["choices"]


async def test_a_client_who_leaves_a_host_with_middleware(
    engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    class Middle(BaseHTTPMiddleware):
        async def dispatch(self, request: Any, call_next: Any) -> Any:
            return await call_next(request)

    app = Starlette(routes=[Mount("/v1", openai_app(engine))], middleware=[Middleware(Middle)])
    async with client_of(app) as client:
        asking = asyncio.create_task(client.post(CHAT, json={**ASK, "max_tokens": 400}))
        await until(lambda: engine.statistics().running == 1)
        asking.cancel()
        await until(lambda: engine.statistics().aborted == 1)
        await settled(engine)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_an_ask_is_let_in_or_refused_as_a_whole(folder: Path) -> None:
    async with (
        running_engine(folder, max_num_seqs=2, max_queued_requests=2) as engine,
        client_of(mounted(engine)) as client,
    ):
        for body, status in (
            ({"prompt": ["a"] * 4}, 200),
            ({"prompt": ["a"] * 5}, 400),
            ({"prompt": ["a", "b"], "n": 3}, 400),
            ({"prompt": ["a"] * 100, "n": 100}, 400),
        ):
            asked = {"max_tokens": 2, "temperature": 1, **body}
            response = await client.post("/v1/completions", json=asked)
            assert response.status_code == status, response.text
            if status == 400:
                assert response.json()["error"]["param"] == "n"
        assert engine.statistics().aborted == 0


async def test_refusals_do_not_repeat_what_was_sent(engine: AsyncEngine) -> None:
    long = "\x7f" * 2_000_000
    async with client_of(mounted(engine)) as client:
        for body in (
            {**ASK, "model": long},
            {**ASK, "temperature": long},
            {**ASK, long: 1},
            {**ASK, "messages": [{"role": "user", "content": [{"type": long}]}]},
            {**ASK, "allowed_token_ids": [10**4000]},
            {**ASK, "messages": [{}] * 5000},
            {**ASK, "messages": [{"role": "user", "content": [{}] * 5000}]},
        ):
            response = await client.post(CHAT, content=json.dumps(body, ensure_ascii=False))
            assert response.status_code in (400, 404), response.text[:200]
            assert len(response.text) < 10_000


def test_the_log_does_not_repeat_what_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    """An error from anywhere may hold a prompt in its text; its kind and its place are enough."""

    prompt = "words of a prompt"

    def fail() -> None:
        raise EngineError("an error of the engine") from ValueError(prompt)

    with pytest.raises(EngineError) as caught:
        fail()
    assert api_error(caught.value).status == 500
    assert "words of a prompt" not in caplog.text
    assert "in fail" in caplog.text and "EngineError" in caplog.text


def test_an_empty_key_is_no_key(folder: Path) -> None:
    with pytest.raises(InvalidRequestError):
        openai_app(AsyncEngine.from_pretrained(folder), api_key="")


async def test_probes(engine: AsyncEngine) -> None:
    async with client_of(service_app(engine)) as client:
        await client.post(CHAT, json=ASK)
        for path in ("/metrics", "/v1/metrics"):
            scraped = await client.get(path)
            assert scraped.headers["content-type"].startswith("text/plain")
            assert (
                'aioengine_requests_total{model="tiny-llava",outcome="finished"} 1.0'
                in scraped.text
            )
        assert (await client.get("/health")).json() == {"status": "running"}
        await engine.drain()
        unwell = await client.get("/health")
        assert unwell.status_code == 503 and unwell.json() == {"status": "draining"}
        engine.resume()


async def test_no_path_leads_round_in_a_circle(engine: AsyncEngine) -> None:
    async with serving(service_app(engine)) as url, httpx.AsyncClient(base_url=url) as client:
        for path in ("/v1", "/v1/", "/nothing/"):
            assert (await client.get(path)).status_code == 404


async def test_names_of_the_model(engine: AsyncEngine) -> None:
    async with client_of(mounted(engine, model_names=["one", "org/two"])) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["one", "org/two"]
        assert (await client.get("/v1/models/org/two")).json()["id"] == "org/two"
        for name, status in (("one", 200), ("org/two", 200), ("tiny-llava", 404)):
            response = await client.post(CHAT, json={**ASK, "model": name})
            assert response.status_code == status
            if status == 200:
                assert response.json()["model"] == name


async def test_served_by_itself_it_starts_and_closes_the_engine(folder: Path) -> None:
    engine = AsyncEngine.from_pretrained(folder, device="cpu", max_model_len=512)
    async with client_of(service_app(engine)) as client:
        assert engine.state is EngineState.RUNNING
        assert (await client.post(CHAT, json=ASK)).status_code == 200
    assert engine.state is EngineState.CLOSED


async def test_a_running_engine_is_left_to_its_owner(engine: AsyncEngine) -> None:
    async with client_of(openai_app(engine)) as client:
        assert (await client.post("/chat/completions", json=ASK)).status_code == 200
    assert engine.state is EngineState.RUNNING


async def test_before_its_host_has_started_the_engine(folder: Path) -> None:
    engine = AsyncEngine.from_pretrained(folder)
    async with client_of(mounted(engine)) as client:
        response = await client.post(CHAT, json=ASK)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_closed"
        assert (await client.get("/v1/health")).json() == {"status": "new"}
        assert (await client.get("/v1/metrics")).status_code == 200


async def test_mounted_in_litestar(engine: AsyncEngine) -> None:
    mount = litestar.asgi("/v1", is_mount=True, copy_scope=True)
    app = litestar.Litestar(
        route_handlers=[mount(openai_app(engine))],
        logging_config=None,  # the default one would set this process's root logger to INFO
    )
    async with client_of(app) as client:
        assert (await client.post(CHAT, json=ASK)).status_code == 200


async def test_beside_django(engine: AsyncEngine) -> None:
    if not settings.configured:
        settings.configure(ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__, SECRET_KEY="tests only")
        django.setup()
    pages, api = get_asgi_application(), Mount("/v1", openai_app(engine))

    async def application(scope: Any, receive: Any, send: Any) -> None:
        is_api = scope["type"] == "http" and scope["path"].startswith("/v1/")
        await (Starlette(routes=[api]) if is_api else pages)(scope, receive, send)

    async with client_of(application) as client:
        assert (await client.post(CHAT, json=ASK)).status_code == 200
        assert (await client.get("/else")).status_code == 404


urlpatterns: list[Any] = []
"""Of Django, which serves nothing here."""


async def test_a_slow_reader_slows_nobody(engine: AsyncEngine) -> None:
    """One that does not read at all, while others are served; then it gets everything."""
    messages = [{"role": "user", "content": [image_part(1)]}]
    body = {
        **ASK,
        "messages": messages,
        "max_tokens": 150,
        "logprobs": True,
        "top_logprobs": 20,
        "stream": True,
    }
    expected = await engine.generate(messages, greedy(150))
    async with serving(mounted(engine), send_buffer=4096) as url:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", int(url.rpartition(":")[2])))
        data = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        await loop.sock_sendall(slow, f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        # The engine is done with it though nothing of it was read, and serves others.
        await until(lambda: engine.statistics().finished == 2)
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as quick:
            assert (await quick.post(CHAT, json=ASK)).status_code == 200
        await settled(engine)
        reader, writer = await asyncio.open_connection(sock=slow, limit=1 << 24)
        async with asyncio.timeout(DEADLINE_S):
            received = (await reader.read()).decode()
        writer.close()
    # Without the sizes of HTTP's chunks, which stand on lines of their own.
    lines = [line for line in received.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line[6:]) for line in lines]
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == expected.text
    positions = [
        position
        for chunk in chunks
        for position in (chunk["choices"][0].get("logprobs") or {"content": []})["content"]
    ]
    assert len(positions) == 150
    assert received.rstrip().endswith("0") and "data: [DONE]" in received
