"""The engine's own client against real servers on loopback, on both loops: every guard, one by one.

Loopback is not public, so `_is_public` is replaced where something is to be fetched at all; names
are invented ones, and `_lookup` answers for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import shutil
import socket
import zlib
from pathlib import Path

import pytest

from aioengine.config import MediaConfig
from aioengine.errors import MediaError, MediaUnavailableError
from tests.processors.media.servers import (
    BROKEN,
    CHUNKED,
    KIB,
    NAME,
    NOT_PUBLIC,
    PUBLIC,
    Certificates,
    Names,
    Respond,
    Writer,
    answer,
    config_for,
    drips,
    endless,
    endless_gzip,
    endless_trailer,
    moved,
    on_both_loops,
    serve,
    too_long,
    until_hung_up,
)

pytest.importorskip("httpx")

from aioengine.processors.media import http
from aioengine.processors.media.http import fetch_url


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Invented names; every one is 127.0.0.1 unless told otherwise."""
    names = Names()
    monkeypatch.setattr(http, "_lookup", names.lookup)
    return names


@pytest.fixture
def loopback(names: Names, monkeypatch: pytest.MonkeyPatch) -> Names:
    """127.0.0.0/8 counts as public, nothing else does."""
    monkeypatch.setattr(http, "_is_public", lambda address: address.startswith("127."))
    return names


async def get(url: str, config: MediaConfig, max_bytes: int = 100 * KIB) -> bytes:
    # As a task of its own, so that the eye on the loop in tests/conftest.py knows whose it is.
    fetching = fetch_url(url, config, max_bytes=max_bytes, parameter="images[1]")
    return await asyncio.create_task(fetching)


async def refuse(
    url: str, config: MediaConfig, max_bytes: int = 100 * KIB, *, passes: bool | None = False
) -> str:
    """The text of the error, after which the same request may succeed later, or not."""
    with pytest.raises(MediaError) as caught:
        await get(url, config, max_bytes)
    error = caught.value
    assert passes is None or type(error) is (MediaUnavailableError if passes else MediaError)
    assert error.parameter == "images[1]"
    assert str(error).startswith("images[1] could not be fetched: ")
    assert error.__cause__ is None and error.__context__ is None
    assert "127.0" not in str(error) and "secret" not in str(error)
    return str(error)


@on_both_loops
async def test_a_image_is_fetched(loopback: Names) -> None:
    async with serve(answer(b"body", "Set-Cookie: a=b")) as server:
        config = config_for(server)
        url = f"http://Images.TEST:{server.port}/a%20b.png?size=3&name=\u00e9#part"
        assert await get(url, config) == b"body"
        assert await get(f"http://{NAME}:{server.port}", config) == b"body"
    first, second = (head.split("\r\n") for head in server.heads)
    assert first[0] == "GET /a%20b.png?size=3&name=%C3%A9 HTTP/1.1"
    assert second[0] == "GET / HTTP/1.1"
    headers = [line.lower() for line in first[1:-2]]
    assert headers.count(f"host: {NAME}:{server.port}") == 1
    assert "accept-encoding: identity" in headers
    assert not any(line.startswith(("cookie", "authorization", "proxy")) for line in headers)
    assert second[1:] == first[1:]


@pytest.mark.parametrize(
    "response",
    [answer(b"body"), answer(b"body", sized=False), answer(b"body" + b"more" * 99)[:-396],
     answer(b"body", status="203 Changed"),
     b"HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + answer(b"body"),
     answer(CHUNKED, "Transfer-Encoding: chunked", sized=False), b"HTTP/1.0 200\r\n\r\nbody",
     answer(gzip.compress(b"body", mtime=0), "Content-Encoding: GZip"),
     answer(gzip.compress(b"body", mtime=0) + b"more", "Content-Encoding: x-gzip"),
     answer(b"".join(gzip.compress(half, mtime=0) for half in (b"bo", b"dy")),
            "Content-Encoding: gzip"),
     answer(gzip.compress(b"body", mtime=0) + b"\0" * 8, "Content-Encoding: gzip"),
     answer(zlib.compress(b"body"), "Content-Encoding: deflate", sized=False)],
)  # fmt: skip
@on_both_loops
async def test_bodies(loopback: Names, response: bytes) -> None:
    if b"Length: 400" in response:
        response = response.replace(b"Length: 400", b"Length: 4") + b"and more than it said"
    async with serve(response) as server:
        assert await get(f"http://{NAME}:{server.port}/", config_for(server)) == b"body"


@pytest.mark.parametrize("response", BROKEN, ids=range(len(BROKEN)))
@on_both_loops
async def test_broken_responses(loopback: Names, response: bytes) -> None:
    async with serve(response) as server:
        text = await refuse(f"http://{NAME}:{server.port}/", config_for(server), passes=None)
    assert any(word in text for word in ("broke", "corrupt", "encoding"))


@pytest.mark.parametrize(
    "response", [b"", b"HTTP/1.1 200 OK\r\n", answer(b"body")[:-1], answer(b"body")[:9]]
)
@on_both_loops
async def test_a_connection_that_ends_early_may_be_whole_another_time(
    loopback: Names, response: bytes
) -> None:
    async with serve(response) as server:
        text = await refuse(f"http://{NAME}:{server.port}/", config_for(server), passes=True)
    assert "the connection broke" in text


@on_both_loops
async def test_a_connection_that_is_reset(loopback: Names) -> None:
    async def reset(reader: asyncio.StreamReader, writer: Writer) -> None:
        writer.write(answer(b"begun", "Content-Length: 99", sized=False))
        await writer.drain()
        writer.transport.abort()

    async with serve(reset) as server:
        await refuse(f"http://{NAME}:{server.port}/", config_for(server), passes=True)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
@on_both_loops
async def test_statuses_that_may_pass(loopback: Names, status: int) -> None:
    async with serve(answer(b"secret", status=f"{status} secret")) as server:
        text = await refuse(f"http://{NAME}:{server.port}/", config_for(server), passes=True)
    assert str(status) in text


@on_both_loops
async def test_a_resolver_that_is_out_of_order(
    loopback: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that nobody knows is told as one whose address is refused, and not as this."""
    config = config_for(hosts=("*",))
    private = await refuse("http://10.0.0.1/", config)
    for code, passes in ((socket.EAI_AGAIN, True), (socket.EAI_NONAME, False)):

        async def fails(host: str, port: int, code: int = code) -> list[str]:
            raise socket.gaierror(code, "secret")

        monkeypatch.setattr(http, "_lookup", fails)
        assert (await refuse(f"http://{NAME}/", config, passes=passes) == private) is not passes


@pytest.mark.parametrize("status", [204, 206, 304, 400, 401, 403, 404, 410])
@on_both_loops
async def test_other_statuses(loopback: Names, status: int) -> None:
    body = b"" if status in (204, 304) else b"secret"
    async with serve(answer(body, status=f"{status} secret")) as server:
        text = await refuse(f"http://{NAME}:{server.port}/", config_for(server))
    assert str(status) in text


@pytest.mark.parametrize(
    "url",
    ["ftp://images.test/", "//images.test/", "http:images.test", "http:///a", "http://",
     "http://user@images.test/", "http://user:word@images.test/", "http://@images.test/",
     "http://images.test\\@internal/", "http://internal\\@images.test/", "http:\\\\a.test/",
     "http://images.test#@internal/@", "http://images.test?@internal\\", "http://a b.test/",
     "http://images.test/\r\nHost: internal", " http://images.test/", "http://images.test/\t",
     "ht\ntp://images.test/", "http://images.test/\x00", "http://images.test\u2028/",
     "http://images%2etest/", "http://images.test%00/", "http://images.test\u200b/",
     "http://images.test:port/", "http://images.test:+80/", "http://images.test:99999/",
     "http://images.test:8_0/", "http://images.test:0/", "http://images.test:\u0661/",
     "http://-a.test/", "http://a..test/", "http://a.test./", "http://.test/", "http://*/",
     "http://" + "a" * 64 + ".test/", "http://" + "a." * 130 + "test/", "http://a.test\u2100/",
     "http://[images.test]/", "http://[::1/", "http://::1/", "http://[fe80::1%25lo]/",
     "http://[::1]x/", "http://2130706433/", "http://0x7f.1/", "http://0X7F000001/",
     "http://017700000001/", "http://0177.0.0.1/", "http://127.1/", "http://127.0.1/",
     "http://1.2.3.4.5/", "http://1.2.3.4.0x5/", "http://256.0.0.1/", "http://a.1/",
     "http://\uff11\uff12\uff17.0.0.1/", "http://\u2460\u2461\u2466.0.0.1/", "http://",
     "http://images.test/" + "x" * 70_000],
)  # fmt: skip
@on_both_loops
async def test_urls_that_two_parsers_might_read_in_two_ways(names: Names, url: str) -> None:
    config = MediaConfig(allowed_hosts=("*", "images.test", "internal"))
    text = await refuse(url, config)
    # A "#" or "?" before the "@" ends the host for both; then it is an address that is not public.
    if "#@" not in url:
        assert "not a plain http(s) URL" in text and not names.asked


@on_both_loops
async def test_parsers_that_disagree(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    real = http.urlsplit
    for other in ("http://other.test/", "https://a.test/", "http://a.test:81/", "http://x@a.test/"):
        monkeypatch.setattr(http, "urlsplit", lambda text, other=other: real(other))
        assert "not a plain" in await refuse("http://a.test/", MediaConfig(allowed_hosts=("*",)))
    assert not names.asked


def test_public_addresses() -> None:
    assert [address for address in PUBLIC if not http._is_public(address)] == []
    assert [address for address in NOT_PUBLIC if http._is_public(address)] == []


@on_both_loops
async def test_addresses_in_urls_and_from_names(names: Names) -> None:
    config = MediaConfig(allowed_hosts=("*",))
    texts = set()
    for address in NOT_PUBLIC[:-4]:
        names.answers[NAME] = [[address]]
        texts.add(await refuse(f"http://{NAME}/", config))
        if "%" not in address:
            host = f"[{address}]" if ":" in address else address
            texts.add(await refuse(f"http://{host}/", config))
            # One private address among public ones.
            names.answers[NAME] = [["1.1.1.1", address, "2606:4700::1111"]]
            texts.add(await refuse(f"https://{NAME}/", config))
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("entry", "yes", "no"),
    [("*", ["http://a.test", "https://b.test", "http://a.test:80", "http://1.1.1.1"],
      ["http://a.test:8080", "http://a.test:443", "https://a.test:80"]),
     ("*:81", ["http://a.test:81", "https://b.test:81"], ["http://a.test"]),
     ("A.test", ["http://a.TEST/x", "https://a.test:443"],
      ["http://b.a.test", "http://ba.test", "http://a.test.b", "http://a.test:81"]),
     ("a.test:81", ["http://a.test:81", "https://a.test:81"], ["http://a.test", "http://b.test:81"]),
     ("a.test:80", ["http://a.test", "https://a.test:80"], ["https://a.test"]),
     ("*.a.test", ["http://b.a.test", "http://c.b.a.test"], ["http://a.test", "http://ba.test"]),
     ("*.a.test:81", ["http://b.a.test:81"], ["http://b.a.test"]),
     ("b\u00fccher.test", ["http://B\u00dcCHER.test", "http://xn--bcher-kva.test"], ["http://b.test"]),
     ("1.1.1.1", ["http://1.1.1.1"], ["http://11.1.1.1", "http://1.1.1.1:81"]),
     ("[2606:4700::1111]", ["http://[2606:4700:0::1111]"], ["http://[2606:4700::1112]"])],
)  # fmt: skip
def test_allowed_hosts(entry: str, yes: list[str], no: list[str]) -> None:
    assert [url for url in yes if not http._allows(entry, http._parse(url))] == []
    assert [url for url in no if http._allows(entry, http._parse(url))] == []


@on_both_loops
async def test_what_is_not_allowed_is_not_looked_up(names: Names) -> None:
    config = MediaConfig(allowed_hosts=("a.test", "*.b.test"))
    for url in ("http://c.test", "http://b.test", "http://a.test:81", "http://127.0.0.1"):
        text = await refuse(url, config)
        assert "media.allowed_hosts" in text and "media.fetcher" in text
    for entry in ("a.test?", "*.1.1.1.1", "1.1"):
        text = await refuse("http://z.test", MediaConfig(allowed_hosts=(entry,)))
        assert "media.allowed_hosts has an entry" in text
    assert not names.asked


@on_both_loops
async def test_the_checked_address_is_the_one_dialled(loopback: Names) -> None:
    async with serve(answer(b"body")) as server:
        # The second answer would be refused; and the first of these two does not listen.
        loopback.answers[NAME] = [["127.0.0.2", "127.0.0.1"], ["10.0.0.1"]]
        assert await get(f"http://{NAME}:{server.port}/", config_for(server)) == b"body"
        assert loopback.asked == [NAME]
        # No connection is made if any address is refused.
        loopback.answers[NAME] = [["127.0.0.1", "10.0.0.1"]]
        await refuse(f"http://{NAME}:{server.port}/", config_for(server))
        assert server.num_connections == 1


@on_both_loops
async def test_the_real_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(answer(b"body")) as server:
        config = config_for(hosts=(f"localhost:{server.port}", f"127.0.0.1:{server.port}"))
        refused = await refuse(f"http://localhost:{server.port}/", config)
        assert refused == await refuse(f"http://127.0.0.1:{server.port}/", config)
        monkeypatch.setattr(http, "_is_public", lambda address: True)
        assert await get(f"http://localhost:{server.port}/", config) == b"body"
        assert await get(f"http://127.0.0.1:{server.port}/", config) == b"body"


@on_both_loops
async def test_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_is_public", lambda address: address == "::1")
    with contextlib.suppress(OSError):  # not every machine has it
        async with serve(answer(b"body"), address="::1") as server:
            url, config = f"http://[0:0::1]:{server.port}/", config_for(hosts=(f"*:{server.port}",))
            assert await get(url, config) == b"body"
            assert f"Host: [0:0::1]:{server.port}\r\n" in server.heads[0]


@on_both_loops
async def test_no_map_of_the_network(loopback: Names, certificates: Certificates) -> None:
    async with serve(b"secret", reads=False) as server, serve(b"", tls=certificates.server) as tls:
        port = server.port
        config = config_for(hosts=(f"*:{port}", f"*:{tls.port}"))
        loopback.answers = {"private.test": [["10.0.0.1"]], "unknown.test": [[]]}
        texts = {await refuse(f"http://{name}:{port}/", config) for name in loopback.answers}
        texts.add(await refuse(f"http://10.0.0.1:{port}/", config))
        texts.add(await refuse(f"https://{NAME}:{port}/", config))  # no TLS there
        texts.add(await refuse(f"https://{NAME}:{tls.port}/", config))  # nobody vouches for it
        # What is public and closed may open, and says nothing about what is inside.
        loopback.answers = {"closed.test": [["127.0.0.2"]]}
        closed = await refuse(f"http://closed.test:{port}/", config, passes=True)
    assert len(texts) == 1 and "media.fetcher" in texts.pop() and "later" in closed


@on_both_loops
async def test_redirects(loopback: Names) -> None:
    async def lead(reader: asyncio.StreamReader, writer: Writer) -> None:
        step = len(server.heads)
        places = [f"http://{NAME}:{server.port}/1", f"//{NAME}:{server.port}/2?x", "/3", "4", "?5"]
        statuses = ["301 x", "302 x", "303 x", "307 x", "308 x"]
        writer.write(moved(places[step - 1], statuses[step - 1]) if step < 6 else answer(b"body"))
        await writer.drain()

    async with serve(lead) as server:
        assert await get(f"http://{NAME}:{server.port}/", config_for(server)) == b"body"
    paths = [head.split()[1] for head in server.heads]
    assert paths == ["/", "/1", "/2?x", "/3", "/4", "/4?5"]
    assert loopback.asked == [NAME] * 6
    async with serve(moved("/again")) as server:
        text = await refuse(f"http://{NAME}:{server.port}/", config_for(server))
        assert "more than 5 times" in text and server.num_connections == 6


@pytest.mark.parametrize(
    "place",
    ["http://169.254.169.254/latest", "http://[::ffff:10.0.0.1]/", "http://private.test/",
     "https://private.test/", "http://images.test:22/", "//images.test:22/", "file:///etc/passwd",
     "ftp://images.test/", "gopher://images.test/", "data:;base64,AAAA", "http://2130706433/",
     "http://user@images.test/", "http://images.test\\@10.0.0.1/", "/\\10.0.0.1/", "a b",
     "/\u2028", ""],
)  # fmt: skip
@on_both_loops
async def test_a_redirect_is_checked_like_a_url(loopback: Names, place: str) -> None:
    loopback.answers["private.test"] = [["127.0.0.1", "10.0.0.1"]]
    async with serve(moved(place) if place else answer(status="302 x")) as server:
        config = config_for(hosts=("*", f"{NAME}:{server.port}"))
        text = await refuse(f"http://{NAME}:{server.port}/", config)
        assert server.num_connections == 1
    assert "169.254" not in text and "private" not in text


@on_both_loops
async def test_redirects_to_nowhere_and_to_two_places(loopback: Names) -> None:
    twice = answer(b"", "Location: /a", "Location: /b", status="302 x")
    for response in (answer(status="302 x"), twice, moved("/a").replace(b"/a", b"/\xff")):
        async with serve(response) as server:
            text = await refuse(f"http://{NAME}:{server.port}/", config_for(server))
            assert "redirected" in text and server.num_connections == 1


@pytest.mark.parametrize("respond", [endless, endless_gzip, endless_trailer, too_long])
@on_both_loops
async def test_too_many_bytes_stop_the_transfer(loopback: Names, respond: Respond) -> None:
    async with serve(respond) as server:
        text = await refuse(f"http://{NAME}:{server.port}/", config_for(server))
        assert f"more bytes than the limit ({100 * KIB})" in text
        await asyncio.wait_for(server.hung_up.wait(), 20)


@on_both_loops
async def test_exactly_at_the_limit(loopback: Names) -> None:
    body = bytes(range(256)) * 400
    tiny = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    responses = [
        answer(body),
        answer(body, sized=False),
        answer(tiny, "Transfer-Encoding: chunked", sized=False),
        answer(gzip.compress(body, mtime=0), "Content-Encoding: gzip"),
    ]
    for response in responses:
        async with serve(response) as server:
            url, config = f"http://{NAME}:{server.port}/", config_for(server)
            assert await get(url, config, len(body)) == body
            assert "more bytes" in await refuse(url, config, len(body) - 1)


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("respond", [until_hung_up, drips])
@on_both_loops
async def test_slow_servers(loopback: Names, respond: Respond, scheme: str) -> None:
    async with serve(respond, reads=False) as server:
        config = config_for(server, timeout_s=0.3)
        is_late = respond is until_hung_up or scheme == "http"
        text = await refuse(f"{scheme}://{NAME}:{server.port}/", config, passes=is_late)
        assert "media.fetch_timeout_s (0.3 s)" in text or respond is drips
        await asyncio.wait_for(server.hung_up.wait(), 20)


@on_both_loops
async def test_a_slow_resolver(loopback: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hangs(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(http, "_lookup", hangs)
    text = await refuse(f"http://{NAME}/", config_for(hosts=("*",), timeout_s=0.05), passes=True)
    assert "fetch_timeout_s" in text


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("head", [b"", answer(b"begun", "Content-Length: 99", sized=False)])
@on_both_loops
async def test_cancellation_closes_the_connection(
    loopback: Names, scheme: str, head: bytes
) -> None:
    reached = asyncio.Event()

    async def respond(reader: asyncio.StreamReader, writer: Writer) -> None:
        await reader.read(1)  # of the request, or of the TLS handshake
        writer.write(head if scheme == "http" else b"")
        reached.set()
        await until_hung_up(reader, writer)

    async with serve(respond, reads=False) as server:
        task = asyncio.create_task(get(f"{scheme}://{NAME}:{server.port}/", config_for(server)))
        await reached.wait()
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.hung_up.wait(), 20)


@on_both_loops
async def test_proxies_of_the_environment_are_ignored(
    loopback: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(answer(b"body")) as server, serve(answer(b"proxy")) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert await get(f"http://{NAME}:{server.port}/", config_for(server)) == b"body"
        assert proxy.num_connections == 0


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    """Made anew, with the openssl program."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program to make a certificate")
    return Certificates(tmp_path)


@on_both_loops
async def test_certificates_are_checked_for_the_name(
    loopback: Names, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(answer(b"body"), tls=certificates.server) as server:
        config = config_for(hosts=(f"*:{server.port}",))
        # Not by anybody whom the authorities know.
        await refuse(f"https://{NAME}:{server.port}/", config)
        monkeypatch.setattr(http, "_ssl_context", lambda: certificates.client)
        assert await get(f"https://{NAME}:{server.port}/", config) == b"body"
        assert certificates.asked == [NAME, NAME]
        # The same server and address under other names.
        await refuse(f"https://other.test:{server.port}/", config)
        await refuse(f"https://127.0.0.1:{server.port}/", config)
        assert len(server.heads) == 1


@on_both_loops
async def test_https_does_not_lead_to_http(
    loopback: Names, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_ssl_context", lambda: certificates.client)
    async with serve(answer(b"body")) as plain:
        place = f"http://{NAME}:{plain.port}/"
        async with serve(moved(place), tls=certificates.server) as server:
            text = await refuse(f"https://{NAME}:{server.port}/", config_for(server, plain))
        assert "https to http" in text and plain.num_connections == 0
        # The other way is fine.
        async with serve(answer(b"safe"), tls=certificates.server) as server:
            place = f"https://{NAME}:{server.port}/"
            async with serve(moved(place)) as first:
                config = config_for(server, first)
                assert await get(f"http://{NAME}:{first.port}/", config) == b"safe"
