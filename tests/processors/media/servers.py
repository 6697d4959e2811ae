"""Servers, names and certificates on loopback for the tests of the http client."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import inspect
import socket
import ssl
import subprocess
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from aioengine.config import MediaConfig

Writer = asyncio.StreamWriter
Respond = Callable[[asyncio.StreamReader, Writer], Awaitable[None]]
KIB = 1 << 10
NAME = "images.test"

PUBLIC = ["1.1.1.1", "8.8.8.8", "93.184.216.34", "2606:4700::1111", "2a00:1450:4001::1",
          "64:ff9b::1.1.1.1", "::ffff:1.1.1.1", "2002:101:101::1"]  # fmt: skip
NOT_PUBLIC = [
    "127.0.0.1", "127.255.0.9", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1", "172.31.255.255",
    "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.192", "192.0.2.1",
    "198.18.0.1", "198.51.100.7", "203.0.113.9", "192.88.99.1", "224.0.0.1", "239.1.1.1",
    "240.0.0.1", "255.255.255.255", "168.63.129.16", "::", "::1", "::127.0.0.1", "::ffff:10.0.0.1",
    "::ffff:169.254.169.254", "::ffff:0:10.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b:1::1.1.1.1",
    "2002:a00:1::1", "2002:a9fe:a9fe::", "2001:0:a00:1::1", "2001:db8::1", "2001:20::1",
    "3fff::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%1", "2606:4700::1%1", "fec0::1",
    "ff02::1", "ff0e::1", "100::1", "4000::1", "5f00::1", "0x7f.1", "2130706433", "name", "",
]  # fmt: skip


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test on asyncio's loop and on uvloop; it must leave no task behind."""

    async def whole(**fixtures: Any) -> None:
        await test(**fixtures)
        for _ in range(100):
            if len(asyncio.all_tasks()) == 1:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"left behind: {asyncio.all_tasks()}")

    @functools.wraps(test)
    def run(*, new_loop: Callable[[], asyncio.AbstractEventLoop], **fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(whole(**fixtures))

    signature = inspect.signature(test)
    extra = inspect.Parameter("new_loop", inspect.Parameter.KEYWORD_ONLY)
    changed = signature.replace(parameters=[*signature.parameters.values(), extra])
    run.__signature__ = changed  # type: ignore[attr-defined]
    loops = [asyncio.new_event_loop, uvloop.new_event_loop]
    return pytest.mark.parametrize("new_loop", loops, ids=["asyncio", "uvloop"])(run)


class Server:
    """What a server on 127.0.0.1 has seen."""

    def __init__(self) -> None:
        self.port = 0
        self.num_connections = 0
        self.heads: list[str] = []
        self.hung_up = asyncio.Event()


@contextlib.asynccontextmanager
async def serve(
    respond: Respond | bytes,
    *,
    tls: ssl.SSLContext | None = None,
    reads: bool = True,
    address: str = "127.0.0.1",
) -> AsyncIterator[Server]:
    """Answers each connection with the bytes, or as the function does, and closes it.

    `reads`: only once it has read the request's head.
    """
    server = Server()

    async def handle(reader: asyncio.StreamReader, writer: Writer) -> None:
        server.num_connections += 1
        try:
            if reads:
                server.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
            if isinstance(respond, bytes):
                writer.write(respond)
                await writer.drain()
            else:
                await respond(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            server.hung_up.set()
            writer.close()

    listening = await asyncio.start_server(handle, address, 0, ssl=tls)
    server.port = listening.sockets[0].getsockname()[1]
    async with listening:
        yield server


async def until_hung_up(reader: asyncio.StreamReader, writer: Writer) -> None:
    """Says nothing more, and notes when the client is gone."""
    while await reader.read(KIB):
        pass


def answer(body: bytes = b"", *headers: str, status: str = "200 OK", sized: bool = True) -> bytes:
    """A whole response; without a length if not `sized`."""
    lines = [f"HTTP/1.1 {status}", *headers]
    if sized:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def moved(place: str, status: str = "302 Found") -> bytes:
    """A redirect."""
    return answer(b"moved", f"Location: {place}", status=status)


async def endless(reader: asyncio.StreamReader, writer: Writer) -> None:
    """A body without end."""
    writer.write(answer(sized=False))
    while True:
        writer.write(b"x" * KIB)
        await writer.drain()
        await asyncio.sleep(0)


async def endless_gzip(reader: asyncio.StreamReader, writer: Writer) -> None:
    """A body of a kilobyte for every megabyte that it unpacks to, without end."""
    writer.write(answer(b"", "Content-Encoding: gzip", sized=False))
    packer = zlib.compressobj(9, wbits=31)
    while True:
        writer.write(packer.compress(b"\0" * KIB * KIB) + packer.flush(zlib.Z_SYNC_FLUSH))
        await writer.drain()
        await asyncio.sleep(0)


async def endless_trailer(reader: asyncio.StreamReader, writer: Writer) -> None:
    """A short compressed body, and what no decoder looks at behind it, without end."""
    writer.write(answer(gzip.compress(b"body", mtime=0), "Content-Encoding: gzip", sized=False))
    while True:
        writer.write(b"x" * KIB)
        await writer.drain()
        await asyncio.sleep(0)


async def too_long(reader: asyncio.StreamReader, writer: Writer) -> None:
    """Promises too much, and sends none of it."""
    writer.write(answer(b"", f"Content-Length: {10**12}", sized=False))
    await until_hung_up(reader, writer)


async def drips(reader: asyncio.StreamReader, writer: Writer) -> None:
    """A body that comes byte by byte."""
    writer.write(answer(b"", "Content-Length: 1000", sized=False))
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


def config_for(*servers: Server, hosts: tuple[str, ...] = (), timeout_s: float = 20) -> MediaConfig:
    """Allows the servers as NAME, or the hosts."""
    allowed = hosts or tuple(f"{NAME}:{server.port}" for server in servers)
    return MediaConfig(allowed_hosts=allowed, fetch_timeout_s=timeout_s)


CHUNKED = b"3\r\nbod\r\n1;ext=1\r\ny\r\n0\r\nTrailer: x\r\n\r\n"
BROKEN = [
    b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b"SSH-2.0-secret\r\n", answer(b"body")[:-1],
    answer(CHUNKED[:-9], "Transfer-Encoding: chunked", sized=False),
    answer(b"zz\r\nbody", "Transfer-Encoding: chunked", sized=False),
    answer(b"body", "Content-Length: 3"), answer(b"body", "Content-Length: -4", sized=False),
    answer(b"body", "Transfer-Encoding: gzip", sized=False),
    answer(b"", "Secret: " + "x" * 100_000), b"HTTP/1.1 101 Switching\r\n\r\n",
    b"HTTP/1.1 103 Early\r\n\r\n" * 9999,
    answer(gzip.compress(b"body", mtime=0)[:-9], "Content-Encoding: gzip"),
    answer(b"secret", "Content-Encoding: gzip"),
    answer(b"secret", "Content-Encoding: br"), answer(b"secret", "Content-Encoding: gzip, gzip"),
]  # fmt: skip


class Names:
    """A resolver: what it was asked, and what it says."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, list[list[str]]] = {}

    async def lookup(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        answers = self.answers.get(host, [["127.0.0.1"]])
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if not found:
            raise socket.gaierror("unknown")
        return found


class Certificates:
    """A server's TLS side for NAME, and a client's that trusts it; the names that it was sent."""

    def __init__(self, folder: Path) -> None:
        key, file = folder / "key.pem", folder / "certificate.pem"
        kind = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
        name = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"]
        out = ["-keyout", str(key), "-out", str(file)]
        command = ["openssl", "req", *kind.split(), *name, *out]
        subprocess.run(command, check=True, capture_output=True)
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.server.load_cert_chain(file, key)
        self.asked: list[str | None] = []
        self.server.sni_callback = lambda _, name, context: self.asked.append(name)
        self.client = ssl.create_default_context(cafile=str(file))
