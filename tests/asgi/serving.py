"""Serving an ASGI application on 127.0.0.1 in the test's own loop, and asking it."""

from __future__ import annotations

import asyncio
import base64
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from typing import Any

import uvicorn
from openai import AsyncOpenAI

from tests.support.engines import DEADLINE_S, encoded
from tests.support.tiny import tiny_image


def free_socket() -> socket.socket:
    """A socket that is bound to a free port of 127.0.0.1."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    return bound


class GuestServer(uvicorn.Server):
    """Leaves the process's signal handlers alone. uvicorn would put back what it found when it was
    started: in a fixture that is a handler of a run that is over, which makes every later Ctrl-C a
    KeyboardInterrupt."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(app: Any, *, send_buffer: int = 0, **options: Any) -> AsyncIterator[str]:
    """The URL of `app`, served by uvicorn; at the end the server has shut down.

    `send_buffer`: bytes that the system takes for a client who does not read; 0: as ever.
    """
    config = uvicorn.Config(app, log_level="warning", **{"lifespan": "auto", **options})
    server = GuestServer(config)
    with closing(free_socket()) as bound:
        if send_buffer:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        port = bound.getsockname()[1]
        running = asyncio.create_task(server.serve(sockets=[bound]))
        async with asyncio.timeout(DEADLINE_S):
            while not server.started and not running.done():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            async with asyncio.timeout(DEADLINE_S):
                await running


@asynccontextmanager
async def openai_client(url: str, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client as it comes, without its own second tries."""
    settings = {"api_key": "none", "max_retries": 0, **options}
    async with AsyncOpenAI(base_url=f"{url}/v1", **settings) as client:
        yield client


def image_url(seed: int, width: int = 60, height: int = 50) -> str:
    """An image as a `data:` URL."""
    data = encoded(tiny_image(seed, width, height))
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def image_part(seed: int, **size: int) -> dict[str, Any]:
    """A part of a chat message."""
    return {"type": "image_url", "image_url": {"url": image_url(seed, **size)}}


PYTHON = re.compile(
    r"\w\((?!s\))|\b(True|False|None|NoneType|dict|str|SamplingParams|StructuredOutputs)\b|\w=[^=]|engine\.|async"
)


def assert_for_clients(message: str) -> None:
    """No text for those who call the engine in Python."""
    assert PYTHON.search(message) is None, message
