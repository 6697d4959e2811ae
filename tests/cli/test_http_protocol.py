"""Bounds on heads, on their time and on connections; and all else as HTTP/1.1 has it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aioengine.asgi import service_app
from aioengine.cli.http_protocol import HttpBounds, protocol_factory
from tests.asgi.serving import serving
from tests.support.engines import DEADLINE_S, running_engine, until

GET = b"GET /one HTTP/1.1\r\nHost: a\r\n\r\n"
LARGE = GET.replace(b"/one", b"/large")
HEAD = b"POST /echo HTTP/1.1\r\nHost: a\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


class App:
    """Answers with path and body; `/held` waits for `release`, `/early` reads no body, `/large`
    has megabytes to say."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.num_live = 0
        self.num_left = 0
        self.hosts: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_live += 1
        self.hosts = [value for name, value in scope["headers"] if name == b"host"]
        body = b"" if scope["path"] == "/early" else await self._body(receive)
        if scope["path"] == "/held":
            await self.release.wait()
        found = scope["path"].encode() + b" " + body
        num_before = 64 if scope["path"] == "/large" else 0
        piece = b"x" * (1 << 20)
        headers = [(b"content-length", b"%d" % (num_before * len(piece) + len(found)))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(num_before):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": found})
        self.num_live -= 1

    async def _body(self, receive: Any) -> bytes:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_left += 1
                return b""
            body += message["body"]
            if not message["more_body"]:
                return body


class Client:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer."""
        async with asyncio.timeout(DEADLINE_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(head[0].split()[1]), headers, body

    async def is_closed(self) -> bool:
        """Wait for the server to close; nothing more may come."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.read() == b""


class Server:
    """The application behind the protocol, with small bounds."""

    def __init__(self, app: App, url: str) -> None:
        self.app = app
        self._port = int(url.rpartition(":")[2])
        self._clients: list[Client] = []

    async def connect(self, data: bytes = b"") -> Client:
        """A new client, who sends `data`."""
        client = Client(*await asyncio.open_connection("127.0.0.1", self._port))
        self._clients.append(client)
        await client.send(data)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.writer.close()


@asynccontextmanager
async def serve(*, send_buffer: int = 0, **bounds: Any) -> AsyncIterator[Server]:
    app = App()
    http: Any = protocol_factory(HttpBounds(**{"linger_s": 0.1, **bounds}))
    async with serving(app, send_buffer=send_buffer, http=http) as url:
        server = Server(app, url)
        try:
            yield server
        finally:
            app.release.set()
            server.close()


async def refused(client: Client, status: int) -> None:
    found, headers, body = await client.answer()
    assert found == status
    assert headers["connection"] == "close"
    error = json.loads(body)["error"]
    codes = {400: "invalid_value", 408: "timeout", 503: "overloaded"}
    assert error["message"] and error["code"] == codes.get(status, "request_too_large")
    assert (headers.get("retry-after") == "1") == (status == 503)
    assert (error["type"] == "service_unavailable_error") == (status == 503)
    assert await client.is_closed()


ENDLESS = {
    "one header": (HEAD + b"X: ", b"x" * 1000),
    "many headers": (HEAD, b"X: y\r\n" * 100),
    "a long path": (b"GET /", b"x" * 1000),
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\nX: ", b"x" * 1000),
    "many trailers": (CHUNKED + b"1\r\na\r\n0\r\n", b"X: y\r\n" * 100),
    "an extension of a chunk": (CHUNKED + b"1;x=", b"x" * 1000),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_an_endless_head(name: str) -> None:
    """It is cut at the bound; a client who goes on sending still reads why."""
    begin, more = ENDLESS[name]
    async with serve() as server:
        client = await server.connect(GET + begin)
        assert (await client.answer())[0] == 200
        for _ in range(200):
            await client.send(more)
        await refused(client, 431)
        assert (await (await server.connect(GET)).answer())[0] == 200


async def test_a_stop_while_a_refused_client_goes_on_sending() -> None:
    """Its answer is said already; the server waits for it no longer than it lingers."""
    http: Any = protocol_factory(HttpBounds(linger_s=0.5, max_head_bytes=4096))
    begin, more = ENDLESS["many trailers"]
    async with serving(App(), http=http) as url:
        client = await Server(App(), url).connect(begin + more * 20)
        await refused(client, 431)
    assert await client.is_closed()
    client.writer.close()


@pytest.mark.parametrize("behind", [b"", GET, GET * 3], ids=["first", "second", "fourth"])
async def test_the_bound_of_a_head(behind: bytes) -> None:
    fits = HEAD + b"Content-Length: 1\r\nX: "
    async with serve(max_head_bytes=4096) as server:
        for surplus, status in ((0, 200), (1, 431)):
            client = await server.connect(behind)
            for _ in range(len(behind) // len(GET)):
                assert (await client.answer())[0] == 200
            await client.send(fits + b"x" * (4096 - len(fits) - 4 + surplus) + b"\r\n\r\na")
            assert (await client.answer())[0] == status


@pytest.mark.parametrize("sent", [b"G", GET[:-1], GET + GET[:-1]], ids=["a byte", "half", "second"])
async def test_a_head_that_does_not_come(sent: bytes) -> None:
    async with serve(head_timeout_s=0.05) as server:
        client = await server.connect(sent)
        if sent.startswith(GET):
            assert (await client.answer())[0] == 200
        await refused(client, 408)


async def test_time_does_not_begin_anew_with_each_byte() -> None:
    async with serve(head_timeout_s=0.2) as server:
        client = await server.connect(HEAD)

        async def trickle() -> None:
            while True:
                await client.send(b"x")
                await asyncio.sleep(0.01)

        trickling = asyncio.create_task(trickle())
        assert (await client.answer())[0] == 408
        trickling.cancel()


@pytest.mark.parametrize("sent", [b"", b"\r\n"], ids=["nothing", "an empty line"])
async def test_a_silent_connection_is_closed(sent: bytes) -> None:
    async with serve(head_timeout_s=0.05) as server:
        assert await (await server.connect(sent)).is_closed()
        client = await server.connect(GET)
        assert (await client.answer())[0] == 200
        await client.send(b"\r\n")
        assert await client.is_closed()


async def test_at_the_bound_the_oldest_without_a_head_makes_room() -> None:
    async with serve(max_connections=3) as server:
        busy = await server.connect(GET.replace(b"/one", b"/held"))
        await until(lambda: server.app.num_live == 1)
        silent = [await server.connect(sent) for sent in (GET[:9], b"")]
        kept = await server.connect(GET)  # in the place of the first
        assert (await kept.answer())[0] == 200
        assert await silent[0].is_closed()
        for _ in range(4):  # the second, then the one that is kept alive, then each other
            last = await server.connect(GET)
            assert (await last.answer())[0] == 200
        assert await silent[1].is_closed() and await kept.is_closed()
        server.app.release.set()
        assert (await busy.answer())[2] == b"/held "


async def test_where_all_have_requests_under_way_the_new_one_is_refused() -> None:
    async with serve(max_connections=2) as server:
        held = GET.replace(b"/one", b"/held")
        busy = [await server.connect(held) for _ in range(2)]
        await until(lambda: server.app.num_live == 2)
        await refused(await server.connect(GET), 503)
        await refused(await server.connect(), 503)
        server.app.release.set()
        assert [(await client.answer())[0] for client in busy] == [200, 200]
        assert (await (await server.connect(GET)).answer())[0] == 200


async def test_who_does_not_read_makes_room() -> None:
    """A client need not even have a key to have answers written that it never reads."""
    async with serve(send_buffer=4096, max_connections=2) as server:
        for _ in range(2):
            await server.connect(LARGE)
        async with asyncio.timeout(DEADLINE_S):
            while (await (await server.connect(GET)).answer())[0] == 503:
                """Their answers still fit into the system's buffers."""


@pytest.mark.parametrize("target", [b"http://a.example", b"HTTPS://a.example:81"])
async def test_the_host_of_an_absolute_target_is_the_one_that_counts(target: bytes) -> None:
    async with serve() as server:
        await (await server.connect(GET.replace(b"/one", target + b"/one"))).answer()
        assert server.app.hosts == [target.partition(b"://")[2]]
        await (await server.connect(GET)).answer()
        assert server.app.hosts == [b"a"]


@pytest.mark.parametrize(("files", "expected"), [(256, 128), (20_000, 1024), (-1, 1024)])
def test_connections_leave_room_for_files(
    files: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys.modules[HttpBounds.__module__], "getrlimit", lambda _: (files, files), raising=True
    )
    assert HttpBounds().max_connections == expected


async def test_what_is_no_http_stays_a_400() -> None:
    async with serve() as server:
        await refused(await server.connect(b"no HTTP at all\r\n\r\n"), 400)
        client = await server.connect(CHUNKED + b"1\r\na\r\n")
        await until(lambda: server.app.num_live == 1)
        await client.send(b"no number\r\n")
        await refused(client, 400)
        assert server.app.num_left == 1


async def test_an_answer_that_is_under_way_is_completed() -> None:
    """Also when what the client sends behind its request is refused."""
    for surplus in (b"x" * 9000, b"\0\0\r\n\r\n", b"GET /"):
        async with serve(max_head_bytes=4096, head_timeout_s=0.05) as server:
            client = await server.connect(GET.replace(b"/one", b"/held"))
            await until(lambda: server.app.num_live == 1)
            await client.send(surplus)
            await asyncio.sleep(0.1)  # past the time of a head
            server.app.release.set()
            assert (await client.answer())[2] == b"/held "
            assert await client.is_closed()


async def test_requests_in_one_piece_are_answered_in_order() -> None:
    """However many, and however the bytes are cut."""
    requests, expected = b"", []
    for number in range(300):
        body = b"%d" % number * (number % 50)
        if number % 3 == 0:
            requests += GET
            expected.append(b"/one ")
        elif number % 3 == 1:
            requests += HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            expected.append(b"/echo " + body)
        else:
            chunk = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
            requests += CHUNKED + chunk + b"0\r\nT: t\r\n\r\n"
            expected.append(b"/echo " + body)
    async with serve(max_head_bytes=2048, head_timeout_s=DEADLINE_S) as server:
        for size in (len(requests), 1000, 7):
            client = await server.connect()
            for start in range(0, len(requests), size):
                client.writer.write(requests[start : start + size])
                if size == 7:
                    await asyncio.sleep(0)
            assert [(await client.answer())[2] for _ in expected] == expected


async def test_a_flood_of_requests_waits_outside() -> None:
    """Nothing is read while answers are owed, so that nothing piles up."""
    async with serve(max_head_bytes=4096) as server:
        client = await server.connect(GET.replace(b"/one", b"/held"))
        await until(lambda: server.app.num_live == 1)
        flood = GET * 1_500_000
        sending = asyncio.create_task(client.send(flood))
        _, pending = await asyncio.wait([sending], timeout=0.2)
        assert pending
        server.app.release.set()
        for _ in range(1000):
            assert (await client.answer())[0] == 200
        sending.cancel()


async def test_large_bodies_and_those_who_ask_first() -> None:
    async with serve(max_head_bytes=1024) as server:
        body = bytes(range(256)) * 8192
        client = await server.connect(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert (await client.answer())[2] == b"/echo " + body
        await client.send(HEAD + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n")
        assert (await client.answer())[0] == 100
        await client.send(b"abc")
        assert (await client.answer())[2] == b"/echo abc"
        await client.send(GET)
        assert (await client.answer())[0] == 200


async def test_a_body_that_nobody_reads_ends_the_connection() -> None:
    """The client reads its answer all the same."""
    async with serve(linger_s=DEADLINE_S) as server:
        begin = HEAD.replace(b"/echo", b"/early") + b"Content-Length: 40000000\r\n\r\n"
        client = await server.connect(begin)
        sending = asyncio.create_task(client.send(b"x" * 40_000_000))
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await client.is_closed()
        await sending
    async with serve(linger_s=0.05) as server:
        client = await server.connect(begin)
        assert (await client.answer())[0] == 200
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    await client.send(b"x" * 100_000)


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
"""As the JDK's HttpClient asks for HTTP/2, in every first request of a connection."""
ASKING = {
    "length": HEAD + UPGRADE + b"Content-Length: 5\r\n\r\nhello",
    "chunked": HEAD + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "no body": GET[:-2] + UPGRADE + b"\r\n",
}


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("name", ASKING)
async def test_a_wish_for_another_protocol_is_ignored(name: str, size: int) -> None:
    sent = ASKING[name] + ASKING["length"].replace(b"hello", b"again") + GET
    async with serve() as server:
        client = await server.connect()
        for start in range(0, len(sent), size):
            await client.send(sent[start : start + size])
            await asyncio.sleep(0)
        bodies = [(await client.answer())[2] for _ in range(3)]
        first = b"/one " if name == "no body" else b"/echo hello"
        assert bodies == [first, b"/echo again", b"/one "]


async def test_the_bounds_hold_behind_a_wish_for_another_protocol() -> None:
    async with serve(head_timeout_s=0.1) as server:
        client = await server.connect(ASKING["length"])
        assert (await client.answer())[2] == b"/echo hello"
        await client.send(GET[:-2] + b"X: " + b"a" * (1 << 17))
        await refused(client, 431)
        client = await server.connect(ASKING["length"] + GET[:-2])
        assert (await client.answer())[2] == b"/echo hello"
        await refused(client, 408)
        client = await server.connect(ASKING["length"])
        assert (await client.answer())[2] == b"/echo hello"
        await client.send(b"\0\0\0\0\r\n\r\n")
        await refused(client, 400)
        for framing in (b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked, gzip"):
            client = await server.connect(HEAD + UPGRADE + framing + b"\r\n\r\nhello")
            await refused(client, 400)


@pytest.mark.parametrize(("length", "status"), [(2000, 413), (900, 408)])
async def test_a_body_that_is_refused_ends_the_connection(
    folder: Path, length: int, status: int
) -> None:
    """For its length before it comes, or for its time."""
    http: Any = protocol_factory(HttpBounds(linger_s=DEADLINE_S))
    async with running_engine(folder) as engine:
        app = service_app(engine, max_body_bytes=1000, body_timeout_s=0.05)
        async with serving(app, http=http) as url:
            server = Server(App(), url)
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
            client = await server.connect(head % length + b"{")
            await refused(client, status)
            server.close()
