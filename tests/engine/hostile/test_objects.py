"""Objects that claim to hold an image, and paths that are none of a user's business.

Files are the application's own, and may still be broken. Mappings and texts in messages may be its
users' JSON, whoever passes them on.
"""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from aioengine import AsyncEngine, MediaConfig, Prompt, RequestOutput
from aioengine.asgi import openai_app
from aioengine.errors import InvalidRequestError, MediaError, PromptTooLongError
from tests.asgi.serving import serving
from tests.support.engines import encoded, greedy, running_engine, settled, until
from tests.support.hostile import MIB, Attack, Tokens, bounded_memory, outcome, repel
from tests.support.tiny import tiny_image

pytestmark = pytest.mark.asyncio(loop_scope="module")

PNG = encoded(tiny_image(90))
BASE64 = base64.b64encode(PNG * 9).decode()


class Endless:
    """A file without an end, which counts what it gave."""

    def __init__(self, chunk: bytes = b"x" * MIB) -> None:
        self._chunk, self.num_bytes = chunk, 0

    def read(self, size: int) -> bytes:
        self.num_bytes += len(self._chunk)
        return self._chunk


class Reads:
    """A file whose `read` returns this."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def read(self, size: int) -> Any:
        return self._value


class Raises:
    """A file whose `read` raises."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def read(self, size: int) -> Any:
        raise self._error


class AsyncFile:
    """A file whose `read` has to be awaited."""

    async def read(self, size: int) -> bytes:
        raise AssertionError("nobody awaits it")


class BadlyBehaved(Exception):
    """The error of a library."""


class NoException(BaseException):
    """What some libraries raise."""


class Trap:
    """An object whose attributes cannot be looked at."""

    def __getattr__(self, name: str) -> Any:
        raise BadlyBehaved("/tmp/secret")


def closed() -> io.BytesIO:
    file = io.BytesIO(PNG)
    file.close()
    return file


def at_its_end() -> io.BytesIO:
    file = io.BytesIO(PNG)
    file.seek(0, io.SEEK_END)
    return file


def recursive() -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    mapping["bytes"] = mapping["path"] = mapping
    return mapping


OBJECTS: dict[str, tuple[Callable[[], Any], str]] = {
    "read raises": (lambda: Raises(BadlyBehaved("/tmp/secret")), "could not be read: Badly"),
    "read raises no Exception": (lambda: Raises(NoException("/tmp/x")), "could not be read: NoE"),
    "closed": (closed, "closed file"),
    "at its end": (at_its_end, "at its end"),
    "empty": (io.BytesIO, "empty"),
    "text": (lambda: io.StringIO("x" * 99), "mode 'rb'"),
    "read returns text": (lambda: Reads("text"), "mode 'rb'"),
    "read returns None": (lambda: Reads(None), "returned NoneType"),
    "read returns a number": (lambda: Reads(5), "returned int"),
    "read returns itself": (lambda: Reads(Reads(b"")), "returned Reads"),
    "asynchronous": (AsyncFile, "returned a coroutine"),
    "no attribute can be read": (Trap, "could not be read: BadlyBehaved"),
    "number of bytes": (lambda: {"bytes": 5}, "int under 'bytes'"),
    "text for bytes": (lambda: {"bytes": BASE64}, "str under 'bytes'"),
    "list for bytes": (lambda: {"bytes": [1, 2]}, "list under 'bytes'"),
    "numpy number for bytes": (lambda: {"bytes": np.float64(5)}, "float64 under 'bytes'"),
    "recursive": (recursive, "dict under 'bytes'"),
    "recursive path": (lambda: {"path": recursive()}, "dict under 'path'"),
    "empty mapping": (dict, "mapping must hold bytes"),
    "nothing in a mapping": (lambda: {"bytes": None, "path": None}, "mapping must hold"),
    "another mapping": (lambda: {"url": "x"}, "mapping must hold bytes"),
    "samples for an image": (lambda: {"array": [1.0], "sampling_rate": 1}, "must be"),
    "wrapped in itself": (lambda: SimpleNamespace(as_py=lambda: Trap()), "could not be read"),
    "number in an array": (lambda: np.array(5), "must be"),
    "base64 without its head": (lambda: BASE64, "looks like base64"),
}


@pytest.mark.parametrize("name", OBJECTS)
async def test_objects_without_an_image(engine: AsyncEngine, expected: Tokens, name: str) -> None:
    make, words = OBJECTS[name]
    attacks = [
        Attack("<image>", MediaError, "images[0]", {"images": [make()]}),
        Attack("<image><image>", MediaError, "images[1]", {"images": [PNG, make()]}),
        Attack("<image>", MediaError, "images[0]", {"images": make()}),
    ]
    for error in await repel(engine, expected, attacks):
        assert words in str(error) and BASE64[:30] not in str(error)


@pytest.mark.parametrize("chunk", [b"x" * MIB, b"x" * 10 * MIB, b"x"])
async def test_a_file_without_an_end(folder: Path, chunk: bytes) -> None:
    """It is read up to the limit, and no further than one more piece."""
    most = MIB if len(chunk) > 1 else 50_000
    async with running_engine(folder, media=MediaConfig(max_image_bytes=most)) as engine:
        file = Endless(chunk)
        with bounded_memory(32 * MIB):
            error = await outcome(engine, "<image>", images=[file])
        assert isinstance(error, MediaError) and "media.max_image_bytes" in str(error)
        assert file.num_bytes <= most + len(chunk)


class Blocks:
    """A file whose read waits, as a socket's does, and then goes on."""

    def __init__(self) -> None:
        self.began, self.go, self.num_reads = threading.Event(), threading.Event(), 0

    def read(self, size: int) -> bytes:
        self.num_reads += 1
        self.began.set()
        self.go.wait(60)
        return b"x"


async def test_a_read_that_does_not_return_holds_up_nobody(engine: AsyncEngine) -> None:
    file = Blocks()
    asked = asyncio.create_task(engine.generate("<image>", greedy(2), images=[file]))
    await until(file.began.is_set)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await settled(engine)
    assert isinstance(await outcome(engine, "<image>", images=[PNG]), RequestOutput)
    file.go.set()  # what was left behind reads no further
    await until(lambda: file.num_reads == 1)


# ---- who may name a path


def forms(path: str) -> list[dict[str, Any]]:
    """A local path in every place that JSON has for it."""
    pair = {"bytes": None, "path": path}
    return [
        {"type": "image", "path": path},
        {"type": "image", "url": path},
        {"type": "image", "image": path},
        {"type": "image", "image": pair},
        {"type": "image", "image": {"path": path}},
        {"type": "image", "image": {"url": path}},
        {"type": "image", "image_url": {"url": path}},
        {"type": "image", "image": [path]},
        {"type": "image", "image": [pair]},
        {"type": "image_url", "image_url": {"url": path}},
        {"type": "image_url", "image_url": {"path": path}},
        {"type": "image_url", "image_url": path},
        {"type": "video", "video": [path]},
        {"type": "video", "video": [pair]},
        {"type": "video", "path": path},
        {"type": "audio", "audio": pair},
        {"type": "audio", "audio": [path, 16000]},
        {"type": "input_audio", "input_audio": {"path": path, "data": path, "format": "wav"}},
    ]


def paths(folder: Path) -> tuple[str, str]:
    """A file that could be served, and one that is not there."""
    secret = folder / "secret.png"
    secret.write_bytes(PNG)
    return str(secret), str(folder / "nothing.png")


async def test_a_path_in_messages_is_never_read(
    engine: AsyncEngine, folder: Path, expected: Tokens
) -> None:
    """Refused in the same words, whether the file is there or not."""
    found = []
    for path in paths(folder):
        errors = []
        for part in forms(path):
            error = await outcome(engine, [{"role": "user", "content": [part]}])
            assert isinstance(error, InvalidRequestError), part
            errors.append(str(error).replace(path, ""))
        found.append(errors)
    assert found[0] == found[1]
    allowed = await outcome(engine, "<image>", images=[{"bytes": None, "path": paths(folder)[0]}])
    assert isinstance(allowed, RequestOutput)  # the same from the application


async def test_a_path_in_a_mapping_for_a_prompt_is_never_read(
    engine: AsyncEngine, folder: Path
) -> None:
    secret, _ = paths(folder)
    for item in (secret, [secret], {"path": secret}, [{"bytes": None, "path": secret}]):
        prompt = {"prompt": "<image>", "multi_modal_data": {"image": item}}
        assert isinstance(await outcome(engine, prompt), MediaError)
        half = {"encoder_prompt": prompt, "decoder_prompt": None}
        assert isinstance(await outcome(engine, half), InvalidRequestError)


async def test_arrow_in_messages_is_text_too(engine: AsyncEngine, folder: Path) -> None:
    secret, _ = paths(folder)
    for value in (secret, {"bytes": None, "path": secret}):
        scalar = SimpleNamespace(as_py=lambda value=value: value)
        part = {"type": "image", "image": scalar}
        error = await outcome(engine, [{"role": "user", "content": [part]}])
        assert isinstance(error, MediaError) and "local paths" in str(error)
        assert isinstance(await outcome(engine, "<image>", images=[scalar]), RequestOutput)


async def test_numpy_in_messages_is_text_too(engine: AsyncEngine, folder: Path) -> None:
    path = folder / "a.png"
    tiny_image(0).save(path)
    for item in (
        np.array(str(path)),
        np.array(str(path), dtype=object),
        np.array({"bytes": None, "path": str(path)}, dtype=object),
    ):
        content = [{"type": "image", "image": item}, {"type": "text", "text": "a"}]
        with pytest.raises(MediaError, match="local paths"):
            await engine.generate([{"role": "user", "content": content}], greedy())


async def test_a_path_over_http_is_never_read(engine: AsyncEngine, folder: Path) -> None:
    app = Starlette(routes=[Mount("/v1", openai_app(engine))])
    answers = []
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        for path in paths(folder):
            texts = []
            for part in forms(path):
                body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
                answer = await client.post("/v1/chat/completions", json=body)
                assert answer.status_code in (400, 422), part
                texts.append(answer.json()["error"]["message"].replace(path, ""))
            answers.append(texts)
        prompt = {"prompt": "<image>", "multi_modal_data": {"image": {"path": paths(folder)[0]}}}
        for given in (prompt, [prompt]):
            answer = await client.post("/v1/completions", json={"prompt": given})
            assert answer.status_code == 400
        body = {"messages": [{"role": "user", "content": "hi"}], "images": [paths(folder)[0]]}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 400
    assert answers[0] == answers[1]


# ---- prompts


@pytest.mark.parametrize(
    "prompt",
    [
        ["a", "b"],
        [[1, 2], [3]],
        [Prompt(text="a")],
        [{"prompt": "a"}, {"prompt": "b"}],
        (("a",),),
    ],
)
async def test_one_call_takes_one_prompt(engine: AsyncEngine, prompt: Any) -> None:
    error = await outcome(engine, prompt)
    assert isinstance(error, InvalidRequestError) and error.parameter == "prompt"
    assert "asyncio.gather" in str(error) and "engine.map" in str(error)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"role": "user", "content": "hi"}, "a list of messages"),
        ({"text": "a"}, "'text', which is none of prompt"),
        ({"promt": "a"}, "did you mean 'prompt'?"),
        ({5: "a"}, "which is none of prompt"),
        ({"prompt": 5}, "made of text"),
        ({}, "exactly one"),
        ({"prompt": "a", "multi_modal_data": 5}, "mapping"),
        ({"prompt": "a", "multi_modal_data": {5: b"x"}}, "no modality"),
        ({"encoder_prompt": "a", "decoder_prompt": "b"}, "encoder-decoder"),
        ({"encoder_prompt": [{"role": "user", "content": "a"}]}, "encoder_prompt must be text"),
        ({"encoder_prompt": {"prompt_embeds": [[0.0]]}}, "neither messages nor embeddings"),
        (
            {
                "encoder_prompt": {"prompt": "a", "cache_salt": "x"},
                "decoder_prompt": {"prompt": "b", "cache_salt": "y"},
            },
            "cache_salt twice",
        ),
    ],
)
async def test_mappings_that_are_no_prompt(engine: AsyncEngine, prompt: Any, words: str) -> None:
    error = await outcome(engine, prompt)
    assert isinstance(error, InvalidRequestError) and words in str(error)


async def test_items_without_an_end(engine: AsyncEngine) -> None:
    def endless() -> Any:
        while True:
            yield PNG

    error = await outcome(engine, "<image>", images=endless())
    assert isinstance(error, InvalidRequestError) and error.parameter == "images"
    many = await outcome(engine, "<image>", images=np.broadcast_to(np.uint8(0), (9999, 8, 8, 3)))
    assert isinstance(many, PromptTooLongError)
