"""Keys and their cache salts, requests of web pages, and what is refused before its body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from aioengine import AsyncEngine, SamplingParams
from aioengine.asgi import openai_app, service_app
from aioengine.asgi.keys import KEY_NAME
from aioengine.errors import InvalidRequestError
from tests.asgi.serving import image_part, serving
from tests.asgi.test_transcriptions import clip
from tests.parity.listener_families import WORDS, save_listener, tokenizer_for
from tests.support.engines import DEADLINE_S, running_engine, until

CHAT = "/v1/chat/completions"
ASK = {
    "messages": [{"role": "user", "content": [image_part(1), {"type": "text", "text": "a" * 60}]}],
    "max_tokens": 1,
}
OWN = {"host": "localhost:8000"}


def key(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving(app) as url,
        httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client,
    ):
        yield client


async def cached(client: httpx.AsyncClient, headers: Any, **body: Any) -> bool:
    """Whether a request finds anything in the prefix cache."""
    response = await client.post(CHAT, json={**ASK, **body}, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


# ---- keys


@pytest.mark.parametrize("keys", [["one", "twö"], {"a": "one", "b": "twö"}], ids=["list", "named"])
async def test_several_keys(engine: AsyncEngine, keys: Any) -> None:
    async with client_of(service_app(engine, api_key=keys)) as client:
        for secret, status in (("one", 200), ("twö", 200), ("a", 401), ("onetwö", 401)):
            headers = {"authorization": f"Bearer {secret}".encode()}
            assert (await client.get("/v1/models", headers=headers)).status_code == status


@pytest.mark.parametrize("keys", ["", [], {}, ["one", ""], {"a": ""}])
def test_an_empty_key_is_no_key(folder: Path, keys: Any) -> None:
    with pytest.raises(InvalidRequestError, match="api_key"):
        openai_app(AsyncEngine.from_pretrained(folder), api_key=keys)


@pytest.mark.parametrize(
    "key", [" one", "one ", "a\nb", "a\0b", "\udcff", {"a": "one", "b": "one"}]
)
def test_a_key_that_nobody_could_use_is_refused_and_not_shown(folder: Path, key: Any) -> None:
    """As is one with two names, of which only one could count."""
    with pytest.raises(InvalidRequestError, match="api_key") as caught:
        openai_app(AsyncEngine.from_pretrained(folder), api_key=key)
    assert not isinstance(key, str) or key.strip() not in str(caught.value)


# ---- what the cache tells


async def test_a_key_does_not_see_what_another_has_asked(engine: AsyncEngine) -> None:
    async with client_of(service_app(engine, api_key=["one", "two"])) as client:
        assert not await cached(client, key("one"))
        encoded = engine.statistics().encoder_items_run
        assert not await cached(client, key("two"))
        assert engine.statistics().encoder_items_run == encoded + 1, "nor by the time it takes"
        assert await cached(client, key("one"))
        assert await cached(client, key("two"))


async def test_a_clients_own_salt_narrows_and_never_widens(engine: AsyncEngine) -> None:
    async with client_of(service_app(engine, api_key=["one", "two"])) as client:
        assert not await cached(client, key("one"), cache_salt="mine")
        assert await cached(client, key("one"), cache_salt="mine")
        assert not await cached(client, key("one"))
        assert not await cached(client, key("one"), cache_salt="")
        assert not await cached(client, key("two"), cache_salt="mine")


async def test_without_keys_all_share(engine: AsyncEngine) -> None:
    async with client_of(service_app(engine)) as client:
        assert not await cached(client, {})
        assert await cached(client, key("any"))
        assert not await cached(client, {}, cache_salt="mine")


async def test_a_host_decides_who_shares(engine: AsyncEngine) -> None:
    """By whatever the scope says, the name of the key included; None shares with none that has a
    salt, whatever a client says."""
    names: list[Any] = []

    def salt(scope: Any) -> str | None:
        names.append(scope[KEY_NAME])
        tenant: str | None = dict(scope["headers"]).get(b"x-tenant", b"").decode() or None
        return tenant

    app = service_app(engine, api_key={"a": "one", "b": "two"}, cache_salt=salt)
    async with client_of(app) as client:
        blue = {"x-tenant": "blue"}
        assert not await cached(client, key("one") | blue)
        assert await cached(client, key("two") | blue)
        assert names == ["a", "b"]
        for own in (None, "blue", '["blue", null]', '["blue",null]'):
            assert not await cached(client, key("one"), cache_salt=own)
        # Nor do the two parts run together.
        assert not await cached(client, key("one") | {"x-tenant": "b"}, cache_salt="lue")
        assert not await cached(client, key("one") | {"x-tenant": "bl"}, cache_salt="ue")


async def test_a_clip_is_a_keys_own_too(tmp_path: Path) -> None:
    save_listener("whisper", tmp_path, tokenizer_for("whisper", (*WORDS, "<|startofprev|>")))
    file = clip(0.5)[0]
    async with (
        running_engine(tmp_path, max_model_len=None) as engine,
        client_of(service_app(engine, api_key=["one", "two"])) as client,
    ):
        runs = []
        for secret in ("one", "one", "two", "two"):
            response = await client.post(
                "/v1/audio/transcriptions", files={"file": file}, headers=key(secret)
            )
            assert response.status_code == 200, response.text
            runs.append(engine.statistics().encoder_items_run)
    assert runs == [1, 1, 2, 2]


# ---- pages of others


async def test_a_probe_of_http_1_0_names_no_host(engine: AsyncEngine) -> None:
    async with serving(service_app(engine, trusted_hosts=["loopback"])) as url:
        host, port = url.removeprefix("http://").split(":")
        for version, status in ((b"1.0", b"200"), (b"1.1", b"421")):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /health HTTP/%s\r\nConnection: close\r\n\r\n" % version)
            answer = await asyncio.wait_for(reader.readline(), DEADLINE_S)
            writer.close()
            assert answer.split()[1] == status


@pytest.mark.parametrize(
    ("host", "is_served"),
    [
        ("localhost", True), ("LOCALHOST:80", True), ("localhost.", True), ("127.0.0.1:8000", True),
        ("127.9.9.9", True), ("[::1]", True), ("[::1]:8000", True), ("api.example:1", True),
        ("x.wild.example", True),
        ("evil.example", False), ("evil.example:8000", False), ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False), ("128.0.0.1", False), ("[::2]", False), ("", False),
        ("[::1]evil.example", False), ("[localhost]evil.example", False),
        ("localhost:8.evil", False),
        ("0.0.0.0", False), ("2130706433", False), ("wild.example", False),
        ("notapi.example", False), ("api.example.evil", False),
    ],
)  # fmt: skip
async def test_hosts(engine: AsyncEngine, host: str, is_served: bool) -> None:
    trusted = ["loopback", "api.example", "*.wild.example"]
    async with client_of(service_app(engine, trusted_hosts=trusted)) as client:
        for path in ("/health", "/", "/v1/models"):
            response = await client.get(path, headers={"host": host})
            assert response.status_code == (200 if is_served else 421), path
            if not is_served:
                assert response.json()["error"]["code"] == "untrusted_host"
                assert "trusted" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "host",
    ["", "localhost:8000", "http://a.example", "a.example/", "*a.example", "[a.example]", "a b"],
)
def test_what_is_no_host(folder: Path, host: str) -> None:
    """It would never be met, and everybody refused."""
    with pytest.raises(InvalidRequestError, match="trusted_hosts"):
        service_app(AsyncEngine.from_pretrained(folder), trusted_hosts=["loopback", host])


async def test_addresses_of_ip_6_in_brackets_or_not(engine: AsyncEngine) -> None:
    for trusted in ("2001:db8::1", "[2001:DB8::1]"):
        async with client_of(service_app(engine, trusted_hosts=trusted)) as client:
            response = await client.get("/health", headers={"host": "[2001:db8::1]:8000"})
            assert response.status_code == 200


FOREIGN = "https://evil.example"
APP = "https://app.example"


@pytest.mark.parametrize(
    ("headers", "is_served"),
    [
        ({}, True),
        ({"sec-fetch-site": "same-origin", "origin": "http://localhost:8000"}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"origin": "http://localhost:8000"}, True),
        ({"sec-fetch-site": "cross-site", "origin": APP}, True),
        ({"origin": APP.upper()}, True),
        ({"sec-fetch-site": "cross-site", "origin": FOREIGN}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site", "origin": "http://localhost:3000"}, False),
        ({"origin": FOREIGN}, False),
        ({"origin": "http://localhost:3000"}, False),
        ({"origin": "null"}, False),
        ({"origin": APP + ".evil"}, False),
    ],
)
async def test_origins(engine: AsyncEngine, headers: dict[str, str], is_served: bool) -> None:
    async with client_of(service_app(engine, allowed_origins=[APP])) as client:
        response = await client.post(CHAT, json=ASK, headers=OWN | headers)
        assert response.status_code == (200 if is_served else 403)
        if not is_served:
            assert response.json()["error"]["code"] == "foreign_origin"
        assert (await client.get("/v1/models", headers=OWN | headers)).status_code == 200
    # A host that has not asked for it has rules of its own.
    async with client_of(openai_app(engine)) as client:
        response = await client.post("/chat/completions", json=ASK, headers=OWN | headers)
        assert response.status_code == 200


async def test_pages_of_allowed_origins_may_read(engine: AsyncEngine) -> None:
    def allowed(response: httpx.Response) -> str | None:
        return response.headers.get("access-control-allow-origin")

    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    for origins, origin, expected in (
        ([APP], APP, APP),
        ([APP], FOREIGN, None),
        (["*"], FOREIGN, "*"),
        ([], APP, None),
    ):
        app = service_app(engine, allowed_origins=origins, api_key="secret")
        async with client_of(app) as client:
            asked = await client.options(CHAT, headers={"origin": origin, **preflight})
            assert (asked.status_code == 200) == (expected is not None)
            assert allowed(asked) == expected
            deletes = {**preflight, "access-control-request-method": "DELETE"}
            asked = await client.options("/v1/files/a", headers={"origin": origin, **deletes})
            assert (asked.status_code == 200) == (expected is not None)
            for headers in ({}, key("secret")):  # errors are for reading, too
                answer = await client.get("/v1/models", headers={"origin": origin, **headers})
                assert answer.status_code == (200 if headers else 401)
                assert allowed(answer) == expected


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "", "null"])
def test_what_is_no_origin(folder: Path, origin: str) -> None:
    with pytest.raises(InvalidRequestError, match="allowed_origins"):
        service_app(AsyncEngine.from_pretrained(folder), allowed_origins=[APP, origin])


# ---- before a body is read


def encode(body: Any) -> bytes:
    return json.dumps(body).encode()


def test_the_budget_where_nothing_is_said(folder: Path) -> None:
    def budget(**options: Any) -> int:
        app = openai_app(AsyncEngine.from_pretrained(folder), **options)
        return int(app.state.bodies.max_bytes)

    assert budget() == 256 << 20
    assert budget(max_bodies_bytes=100, max_body_bytes=50) == 100
    assert budget(max_bodies_bytes=50, max_body_bytes=100) == 100, "one body fits"


async def refuse_reading() -> Any:
    raise AssertionError("the body was read")


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/audio/transcriptions"])
@pytest.mark.parametrize("case", ["key", "room", "length", "budget"])
async def test_who_is_refused_is_refused_before_the_body(
    folder: Path, path: str, case: str
) -> None:
    async with running_engine(folder, max_num_seqs=1, max_queued_requests=1) as engine:
        app = openai_app(engine, api_key="secret", max_body_bytes=1 << 20, max_bodies_bytes=1 << 20)
        budget = app.state.bodies
        budget.take(1 << 20 if case == "budget" else 0)
        length = (2 << 20) if case == "length" else 1 << 19
        headers = [
            (b"content-length", b"%d" % length),
            (b"content-type", b"multipart/form-data; boundary=a"),
            (b"authorization", b"Bearer other" if case == "key" else b"Bearer secret"),
        ]
        streams = [engine.stream("a", SamplingParams(max_tokens=400)) for _ in range(2)]
        if case != "room":
            [stream.close() for stream in streams]
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        before = budget.num_bytes
        await app({**scope, "http_version": "1.1"}, refuse_reading, send)
        for stream in streams:
            stream.close()
        assert budget.num_bytes == before
    status, found = {"key": 401, "room": 429, "length": 413, "budget": 429}[case], sent[0]
    assert found["status"] == status
    assert (b"retry-after" in dict(found["headers"])) == (status == 429)


@pytest.mark.parametrize("end", ["answered", "refused", "left", "left while it was read"])
async def test_a_body_counts_until_its_request_has_ended(engine: AsyncEngine, end: str) -> None:
    app = openai_app(engine)
    budget = app.state.bodies
    text = "a" * (1 << 18)
    body = encode({"prompt": "a", "user": text, "max_tokens": 400, "ignore_eos": True})
    if end == "refused":
        body = encode({"prompt": text})
    seen: list[int] = []
    parts = [body[: 1 << 17], body[1 << 17 :]]

    async def receive() -> Any:
        if len(parts) == (end == "left while it was read"):
            if end in ("answered", "refused"):
                await asyncio.Event().wait()
            if end == "left":
                await until(lambda: engine.statistics().running == 1)
            seen.append(budget.num_bytes)
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Any) -> None:
        seen.append(budget.num_bytes)

    headers = [(b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": "POST", "path": "/completions", "headers": headers}
    await app({**scope, "http_version": "1.1"}, receive, send)
    assert seen and seen[0] == len(body) - (1 << 16)
    assert budget.num_bytes == 0
