"""`aioengine serve`: what it says, and how it comes to its end."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit
from typing import Any

import httpx
import pytest

from aioengine import AsyncEngine, EngineState, MediaConfig, demo_model
from aioengine.asgi import service_app
from aioengine.cli import serve
from aioengine.cli.http_protocol import HttpBounds
from aioengine.cli.server import DrainingServer, bind
from aioengine.errors import EngineClosedError, InvalidRequestError
from tests.cli.conftest import SIZES, Command
from tests.support.engines import DEADLINE_S, encoded, other_tasks, running_engine, until
from tests.support.tiny import tiny_image

OWN = ("aioengine.cli.server", "aioengine.cli.http_protocol")
KEY = {"authorization": "Bearer secret"}


def test_from_a_shell(folder: Path) -> None:
    """A process of its own, told to stop in the middle of a stream."""
    serve = [sys.executable, "-m", "aioengine", "serve", str(folder), "--port", "0"]
    # However slow the machine is: the stream ends by itself, and the drain after it.
    process = subprocess.Popen(
        [*serve, "--served-model-name", "tiny", "--drain-timeout", "1e6", *SIZES],
        env={**os.environ, "AIOENGINE_API_KEY": "secret", "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        api, page = (process.stdout.readline().split()[-1] for _ in range(2))
        with httpx.Client(headers=KEY, timeout=DEADLINE_S) as client:
            assert client.get(f"{api}/models").json()["data"][0]["id"] == "tiny"
            assert client.get(f"{api}/models", headers={"authorization": ""}).status_code == 401
            assert client.get(page).headers["content-type"].startswith("text/html")
            events = list(stream(client, api, lambda: process.send_signal(signal.SIGTERM)))
        output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 300
    told = errors.splitlines()
    assert told[0] == f"INFO:     {folder.name} is being loaded"
    assert any(line.startswith(f"INFO:     {folder.name} is ready after ") for line in told)
    assert any(line.startswith("loaded in ") for line in told)
    assert f"INFO:     {folder.name} is closed; requests: 1 finished, 0 aborted" in errors
    assert "secret" not in output + errors
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{api}/models")


def stream(client: httpx.Client, api: str, begun: Callable[[], object]) -> Iterator[str]:
    """The events of a long answer; `begun()` is called after the first."""
    body = {
        "messages": [{"role": "user", "content": "Describe the picture."}],
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with client.stream("POST", f"{api}/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")
                begun()
                begun = bool


@asynccontextmanager
async def served(
    folder: Path, drain_timeout_s: float = 1e6, **options: Any
) -> AsyncIterator[tuple[DrainingServer, AsyncEngine, str]]:
    """A server in this process, its engine and its URL; at the end it has come to its end."""
    opened = asyncio.Event()
    async with running_engine(folder, **options) as engine:
        bound = bind("127.0.0.1", 0)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        server = DrainingServer(
            service_app(engine),
            engine,
            drain_timeout_s=drain_timeout_s,
            log_level="critical",
            announce=opened.set,
        )
        running = asyncio.create_task(server.serve([bound]))
        async with asyncio.timeout(DEADLINE_S):
            await opened.wait()
            yield server, engine, url
            await running


async def never(_: str) -> bytes:
    """A fetcher that holds its request for ever."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def ask(url: str) -> httpx.Response:
    """A request that is never answered, for the engine waits for its image."""
    image = {"type": "image_url", "image_url": {"url": "http://a.example/image.png"}}
    body = {"messages": [{"role": "user", "content": [image]}]}
    async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
        return await client.post(f"{url}/v1/chat/completions", json=body)


@pytest.mark.parametrize(
    ("drain_timeout_s", "num_signals"), [(0.05, 1), (1e6, 2)], ids=["a limit", "a second signal"]
)
async def test_what_does_not_finish_is_ended(
    folder: Path, drain_timeout_s: float, num_signals: int
) -> None:
    media = MediaConfig(fetcher=never)
    async with served(folder, drain_timeout_s, media=media) as (server, engine, url):
        asked = asyncio.create_task(ask(url))
        await until(lambda: num_live(engine) == 1)
        for _ in range(num_signals):
            server.handle_exit(signal.SIGINT, None)
    (answer,) = await asyncio.gather(asked, return_exceptions=True)
    if num_signals == 1:
        assert isinstance(answer, httpx.Response)
        assert answer.status_code == 503
    else:
        assert isinstance(answer, httpx.Response | httpx.TransportError)
    assert engine.state is EngineState.CLOSED
    assert not other_tasks(), "the application's lifespan has ended too"


async def test_while_it_drains_it_takes_nothing_new_and_finishes_the_old(folder: Path) -> None:
    fetched = asyncio.Event()

    async def fetch(_: str) -> bytes:
        await fetched.wait()
        return encoded(tiny_image())

    media = MediaConfig(fetcher=fetch)
    async with served(folder, media=media) as (server, engine, url):
        asked = asyncio.create_task(ask(url))
        await until(lambda: num_live(engine) == 1)
        server.handle_exit(signal.SIGTERM, None)
        await until(lambda: engine.state is EngineState.DRAINING)
        with pytest.raises(EngineClosedError):
            await engine.generate("a")
        fetched.set()
        answer = await asked
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_a_body_that_is_still_coming_is_too_late(folder: Path, path: str) -> None:
    """It would keep the server for a minute, and be refused then, in the client's own shape."""
    async with served(folder) as (server, _, url):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
        writer.write(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 100"), "it is read"
        await reader.readline()
        server.handle_exit(signal.SIGTERM, None)
        assert (await reader.readline()).startswith(b"HTTP/1.1 503")
        found, body = (await reader.read()).split(b"\r\n\r\n")
        assert b"retry-after: 1\r\n" in found
        error = json.loads(body)
        if path == "/v1/messages":
            assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")
        else:
            error = error["error"]
            assert error["type"] == "service_unavailable_error"
            assert error["code"] == "engine_closed"
        writer.close()


async def test_a_dead_engine_ends_the_server(folder: Path) -> None:
    async with served(folder) as (_, engine, _):
        engine._core.die(RuntimeError("the device is gone"))


def num_live(engine: AsyncEngine) -> int:
    assert engine._core.tracker is not None
    return engine._core.tracker.num_live


def test_the_exit_status_of_a_server_whose_engine_has_died(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    startup = DrainingServer.startup

    async def die(self: DrainingServer, sockets: Any = None) -> None:
        await startup(self, sockets)
        self._engine._core.die(RuntimeError("the device is gone"))

    monkeypatch.setattr(DrainingServer, "startup", die)
    done = command("serve", folder, "--port", "0", *SIZES)
    assert done.status == 1
    assert done.err.splitlines()[-1] == "aioengine: the engine has died; start the server anew"


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is told to stop as soon as it is open."""

    async def stop(self: DrainingServer, counter: int) -> bool:
        return True

    monkeypatch.setattr(DrainingServer, "on_tick", stop)


@pytest.mark.usefixtures("passing")
@pytest.mark.parametrize(
    ("host", "shown", "key"),
    [
        ("127.0.0.1", "http://127.0.0.1:", None),
        ("0.0.0.0", "http://0.0.0.0:", None),
        ("0.0.0.0", "http://0.0.0.0:", "secret"),
        ("::1", "http://[::1]:", None),
    ],
)
def test_what_it_says(
    command: Command,
    folder: Path,
    host: str,
    shown: str,
    key: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if key is not None:
        monkeypatch.setenv("AIOENGINE_API_KEY", key)
    done = command("serve", folder, "--host", host, "--port", "0", "--log-level", "error", *SIZES)
    assert done.status == 0, done.err
    api, page, trial = done.out.splitlines()
    url = api.removeprefix("API          ").removesuffix("/v1")
    assert url.startswith(shown)
    assert not url.endswith(":0")
    assert page == f"status page  {url}/"
    assert trial == f"try it       {url}/try"
    loaded, *warnings = done.err.splitlines()
    assert loaded.startswith("loaded in ")
    assert len(warnings) == (host == "0.0.0.0" and key is None)


# uvicorn leaves its socket to the end of the process, which it expects to come at once.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_port_that_is_taken_is_told_before_the_load(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncEngine, "start", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = command("serve", folder, "--port", port)
    assert (done.status, done.out) == (1, "")
    assert done.err == (
        f"aioengine: cannot listen on 127.0.0.1, port {port}: Address already in use\n"
    )
    gc.collect()


async def test_a_port_that_another_server_was_quicker_to_open(folder: Path) -> None:
    """Both were bound while both were loading; only one can listen."""
    with bind("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        late = bind("127.0.0.1", port)
        bound.listen()
        async with running_engine(folder) as engine:
            server = DrainingServer(
                service_app(engine),
                engine,
                drain_timeout_s=0,
                log_level="critical",
                announce=lambda: None,
            )
            with late, pytest.raises(InvalidRequestError, match=f"127.0.0.1, port {port}: "):
                await server.serve([late])
    assert not other_tasks()


@pytest.mark.parametrize("name", ["uvicorn", "httptools", "starlette.applications"])
def test_what_is_not_installed(
    command: Command, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in list(sys.modules):
        if module.startswith(("aioengine.asgi", *OWN, "uvicorn.protocols")):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    done = command("serve", folder)
    assert (done.status, done.out) == (1, "")
    assert done.err == f'aioengine: serve needs {name}: pip install "aioengine[serve]"\n'


@pytest.fixture
def served_with(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """What `aioengine serve` makes of its arguments: the application's options, and "config"."""

    def run(*arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def make(engine: AsyncEngine, **options: Any) -> Any:
            found.update(options, config=engine.config)
            raise InvalidRequestError("enough", parameter="test")

        monkeypatch.setattr(import_module("aioengine.asgi"), "service_app", make)
        assert command("serve", folder, *arguments).err == "aioengine: enough\n"
        return found

    return run


@pytest.mark.parametrize(
    ("flags", "variable", "expected"),
    [
        ((), None, None),
        (("one",), None, {"1": "one"}),
        (("one", "two"), "other", {"1": "one", "2": "two"}),
        (("me=one", "you=two", "three"), None, {"me": "one", "you": "two", "3": "three"}),
        (("b25l==", "me=dHdv==", "=", "a b=c"), None, {
            "1": "b25l==", "me": "dHdv==", "3": "=", "4": "a b=c",
        }),
        ((), "one", {"1": "one"}),
        ((), " me=one\n you=two  three", {"me": "one", "you": "two", "3": "three"}),
    ],
)  # fmt: skip
def test_keys(
    served_with: Callable[..., dict[str, Any]],
    flags: tuple[str, ...],
    variable: str | None,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("AIOENGINE_API_KEY", variable)
    assert served_with(*(f"--api-key={key}" for key in flags))["api_key"] == expected


def test_two_keys_of_one_name(command: Command, folder: Path) -> None:
    done = command("serve", folder, "--api-key", "me=one", "--api-key", "me=two")
    assert done.err == "aioengine: two API keys have the name 'me'; give each its own\n"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), 16 * 64),
        (("--max-num-seqs", "4"), 64),
        (("--max-num-seqs", "4", "--max-queued-requests", "3"), 3),
        (("--max-queued-requests", "none"), None),
    ],
)
def test_the_queue_is_bounded(
    served_with: Callable[..., dict[str, Any]], flags: tuple[str, ...], expected: int | None
) -> None:
    assert served_with(*flags)["config"].max_queued_requests == expected


def test_bodies_are_bounded(served_with: Callable[..., dict[str, Any]]) -> None:
    found = served_with()
    assert (found["max_body_bytes"], found["max_bodies_bytes"]) == (64 << 20, 256 << 20)
    found = served_with("--max-body-bytes", "1MiB", "--max-bodies-bytes", "3MiB")
    assert (found["max_body_bytes"], found["max_bodies_bytes"]) == (1 << 20, 3 << 20)


async def test_heads_are_bounded(folder: Path) -> None:
    """By what the server itself is made with, at 64 KiB, 10 s and 1,024 connections."""
    bounds = HttpBounds()
    assert (bounds.max_head_bytes, bounds.head_timeout_s) == (64 << 10, 10)
    assert bounds.max_connections == min(1024, getrlimit(RLIMIT_NOFILE)[0] // 2)
    async with served(folder) as (server, _, url):
        async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
            for size, status in ((60 << 10, 200), (70 << 10, 431)):
                found = await client.get(f"{url}/health", headers={"x": "a" * size})
                assert found.status_code == status
        server.should_exit = True


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), ["loopback"]),
        (("--host", "localhost"), ["loopback"]),
        (("--host", "::1", "--trusted-hosts", "a.example"), ["loopback", "a.example"]),
        (("--host", "0.0.0.0"), None),
        (("--host", "0.0.0.0", "--trusted-hosts", "a.example"), ["loopback", "a.example"]),
    ],
)
def test_hosts_that_requests_may_name(
    served_with: Callable[..., dict[str, Any]], flags: tuple[str, ...], expected: Any
) -> None:
    found = served_with(*flags)
    assert found["trusted_hosts"] == expected
    assert found["allowed_origins"] == []
    assert served_with("--allowed-origins", "https://a.example")["allowed_origins"]


@pytest.mark.parametrize("given", [("--api-key", ""), ("--api-key", " "), ()])
def test_an_empty_key_is_not_no_key(
    command: Command, folder: Path, given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not given:
        monkeypatch.setenv("AIOENGINE_API_KEY", "")
    done = command("serve", folder, *given)
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("aioengine: the API key is empty")


def test_the_word_demo_is_a_name_of_the_shipped_model(folder: Path) -> None:
    shipped, other = AsyncEngine.from_pretrained(demo_model()), AsyncEngine.from_pretrained(folder)
    assert serve._own_names(shipped) == ["demo_llava", "demo"]
    assert serve._own_names(other) == [folder.name]
