"""The front, over replicas that are made to fail at any moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from aioengine import errors
from aioengine.ray_serve.calls import HttpRequest, Route
from aioengine.ray_serve.front import Front
from tests.support.engines import DEADLINE_S, until

JSON_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/json"), (b"x-request-id", b"engine's")],
}
EVENTS_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}
END = {"type": "http.response.body", "body": b"", "more_body": False}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def piece(text: str) -> dict[str, Any]:
    """A part of a body."""
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}


def from_a_replica(error: Exception) -> Exception:
    """An exception of a replica's code as it arrives in another process."""
    return RayTaskError("respond", "traceback", error).as_instanceof_cause()


Script = list[Any]
"""What a replica does with a call: messages to yield, exceptions to raise, events to wait for."""


class Replicas:
    """A handle whose calls play one script after the other."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.calls: list[tuple[HttpRequest, Route]] = []
        self.num_cancelled = 0

    def options(self, *, method_name: str, stream: bool) -> Replicas:
        assert method_name == "respond" and stream
        return self

    def remote(self, request: HttpRequest, *, route: Route) -> Call:
        self.calls.append((request, route))
        route.tried.append(f"replica {len(self.calls)}")
        return Call(self, self.scripts[len(self.calls) - 1])


class Call:
    """A call's streaming response."""

    def __init__(self, replicas: Replicas, script: Script) -> None:
        self._replicas = replicas
        self._script = script

    async def __aiter__(self) -> AsyncIterator[Any]:
        for step in self._script:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                await step.wait()
            else:
                yield step

    def cancel(self) -> None:
        self._replicas.num_cancelled += 1


def served(replicas: Replicas, **options: Any) -> Callable[[Scope, Receive, Send], Any]:
    """The front as Serve calls it: with a request, for a response that is sent then."""
    front = Front(
        replicas, **{"max_body_bytes": 1 << 20, "body_timeout_s": 5, "max_attempts": 3, **options}
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = await front(Request(scope, receive))
        await response(scope, receive, send)

    return app


def client(replicas: Replicas, **options: Any) -> httpx.AsyncClient:
    """Of a front over the replicas."""
    transport = httpx.ASGITransport(app=served(replicas, **options), raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url="http://front/v1")


LOST = [
    ActorDiedError(),
    ActorUnavailableError("unavailable", b"\0" * 16),
    from_a_replica(errors.EngineDeadError("the device failed")),
    from_a_replica(errors.EngineClosedError("it drains")),
]


@pytest.mark.parametrize("lost", LOST, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "begin",
    [[], [EVENTS_START], [EVENTS_START, piece("")], [JSON_START, piece('{"a":')]],
    ids=["nothing", "status", "empty", "half a JSON"],
)
async def test_what_has_shown_nothing_is_made_again(lost: Exception, begin: Script) -> None:
    replicas = Replicas([*begin, lost], [lost], [JSON_START, piece('{"b":'), piece("1}"), END])
    async with client(replicas) as http:
        response = await http.post("/chat/completions", json=CHAT)
    assert response.status_code == 200
    assert response.json() == {"b": 1}
    assert len(replicas.calls) == 3
    first, *others = replicas.calls
    assert all(each == first for each in others), "the same request, by the same route"
    assert first[1].tried == ["replica 1", "replica 2", "replica 3"]


@pytest.mark.parametrize("lost", LOST, ids=lambda error: type(error).__name__)
async def test_a_stream_that_has_begun_ends_with_a_typed_error(lost: Exception) -> None:
    replicas = Replicas([EVENTS_START, piece("data: 1\n\n"), piece("data: 2\n\n"), lost])
    async with client(replicas) as http:
        response = await http.post("/chat/completions", json=CHAT)
    assert response.status_code == 200
    first, second, last, end = response.text.split("\n\n")
    assert (first, second, end) == ("data: 1", "data: 2", "")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "engine_dead"
    assert error["type"] == "service_unavailable_error"
    assert len(replicas.calls) == 1


async def test_attempts_end() -> None:
    replicas = Replicas(*([ActorDiedError()] for _ in range(2)))
    async with client(replicas, max_attempts=2) as http:
        response = await http.post("/chat/completions", json=CHAT)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_dead"
    assert int(response.headers["retry-after"]) > 0
    assert len(replicas.calls) == 2


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BackPressureError(num_queued_requests=9, max_queued_requests=8), 429),
        (DeploymentUnavailableError("engines"), 503),
        (from_a_replica(ZeroDivisionError("a fault of ours")), 500),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_other_errors_are_not_tried_again(error: Exception, status: int) -> None:
    replicas = Replicas([error])
    async with client(replicas) as http:
        response = await http.post("/chat/completions", json=CHAT)
    assert response.status_code == status
    assert response.json()["error"]["message"]
    assert "fault of ours" not in response.text
    assert len(replicas.calls) == 1


async def test_requests_and_responses_pass_through_whole() -> None:
    refused = {**JSON_START, "status": 404}
    replicas = Replicas([refused, piece("{}"), END])
    async with client(replicas) as http:
        response = await http.request(
            "PUT", "/none?a=b%20c", content=b"\0body", headers={"X-Mine": "1"}
        )
    assert (response.status_code, response.text) == (404, "{}")
    assert "x-request-id" not in response.headers
    (request, _), *_ = replicas.calls
    assert (request.method, request.path, request.query_string, request.body) == (
        *("PUT", "/v1/none", b"a=b%20c", b"\0body"),
    )
    assert (b"x-mine", b"1") in request.headers


async def test_bodies_are_bounded() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 60_000

    replicas = Replicas()
    async with client(replicas, max_body_bytes=100_000) as http:
        for content in (b"x" * 100_001, endless()):
            response = await http.post("/chat/completions", content=content)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
    assert not replicas.calls


async def test_large_bodies_find_their_affinity_beside_the_loop() -> None:
    """tests/conftest.py sees whether the loop was held."""
    image = "data:image/png;base64," + "A" * (48 << 20)
    part = {"type": "image_url", "image_url": {"url": image}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    replicas = Replicas(*([JSON_START, piece("{}"), END] for _ in range(2)))
    async with client(replicas, max_body_bytes=64 << 20) as http:
        for _ in range(2):
            await http.post("/chat/completions", content=json.dumps(body).encode())
    routes = [route.affinity for _, route in replicas.calls]
    assert routes[0] == routes[1]
    assert routes[0].keys


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"messages": 3}'])
async def test_bodies_that_are_refused_are_a_replicas_to_refuse(content: bytes) -> None:
    replicas = Replicas([{**JSON_START, "status": 400}, piece("{}"), END])
    async with client(replicas) as http:
        response = await http.post("/chat/completions", content=content)
    assert response.status_code == 400


@pytest.mark.parametrize("begin", [[], [EVENTS_START, piece("data: 1\n\n")]], ids=len)
async def test_a_client_that_leaves_ends_its_request(begin: Script) -> None:
    """Serve cancels the call; a client that has its first event is seen to leave by Starlette."""
    replicas = Replicas([*begin, asyncio.Event()])
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": b"{}"})
    sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    scope = HttpRequest("POST", "/v1/chat/completions").scope
    call = asyncio.ensure_future(served(replicas)(scope, messages.get, sent.put))
    async with asyncio.timeout(DEADLINE_S):
        if begin:
            assert (await sent.get())["status"] == 200
            assert (await sent.get())["body"] == b"data: 1\n\n"
            messages.put_nowait({"type": "http.disconnect"})
            await call
        else:
            await until(lambda: replicas.calls)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        await until(lambda: replicas.num_cancelled)


async def test_a_prefix_of_the_route_is_not_the_replicas_business() -> None:
    replicas = Replicas([JSON_START, piece("{}"), END])
    transport = httpx.ASGITransport(app=served(replicas), root_path="/models/small")
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
        await http.get("/models/small/v1/models")
    (request, _), *_ = replicas.calls
    assert request.path == "/v1/models"


async def test_metrics_of_a_replica_by_chance_are_refused() -> None:
    replicas = Replicas()
    async with client(replicas) as http:
        response = await http.get("/metrics")
    assert response.status_code == 404
    assert not replicas.calls


async def test_a_finished_request_is_not_cancelled() -> None:
    replicas = Replicas([EVENTS_START, piece("data: [DONE]\n\n"), END])
    async with client(replicas) as http:
        response = await http.post("/chat/completions", json=CHAT)
    assert response.text == "data: [DONE]\n\n"
    assert replicas.num_cancelled == 0
