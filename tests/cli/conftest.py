"""Tiny models on disk for the commands, and a way to run one as a shell would."""

from __future__ import annotations

import asyncio
import io
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine.cli import main
from tests.support.tiny import save_tiny_llava, tiny_image, tiny_llama, tiny_tokenizer

SIZES = ("--device", "cpu", "--dtype", "float64", "--kv-cache-bytes", "8MiB", "--block-size", "16")
"""As the engines of `expect` have them."""

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@dataclass(frozen=True)
class Done:
    """A command that has ended: its exit status, and what it wrote."""

    status: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture(autouse=True)
def _logging_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server owns its process and sets up its logging; this process goes on."""
    names = ("aioengine", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
    loggers = [logging.getLogger(name) for name in names]
    before = [(each.level, each.propagate, each.handlers[:]) for each in loggers]
    monkeypatch.delenv("AIOENGINE_API_KEY", raising=False)
    yield
    for each, (level, propagate, handlers) in zip(loggers, before, strict=True):
        each.setLevel(level)
        each.propagate, each.handlers = propagate, handlers


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes images and has a chat template."""
    path = tmp_path_factory.mktemp("cli") / "llava"
    save_tiny_llava(path)
    return path


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of text alone that was never taught to chat."""
    path = tmp_path_factory.mktemp("cli") / "llama"
    tiny_llama(torch.float32).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def image_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two image files."""
    paths = [tmp_path_factory.mktemp("cli") / f"{seed}.png" for seed in range(2)]
    for seed, path in enumerate(paths):
        tiny_image(seed).save(path)
    return paths


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Command]:
    """Runs `aioengine ARGUMENTS...` in this process, with `stdin` piped into it."""

    def run(*arguments: object, stdin: str | None = None) -> Done:
        given = Unread() if stdin is None else io.StringIO(stdin)
        monkeypatch.setattr(sys, "stdin", given)
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = int(str(end.code))
        written = capsys.readouterr()
        return Done(status, written.out, written.err)

    return run


Expect = Callable[..., RequestOutput]


@pytest.fixture(scope="module")
def expect() -> Iterator[Expect]:
    """What the engine itself gives: `expect(folder, prompt, params, images=[...])`."""
    engines: dict[Path, AsyncEngine] = {}

    async def ask(folder: Path, prompt: Any, params: Any = GREEDY, **media: Any) -> RequestOutput:
        if folder not in engines:
            engines[folder] = AsyncEngine.from_pretrained(
                folder, device="cpu", dtype="float64", kv_cache_bytes=8 << 20, block_size=16
            )
            await engines[folder].start()
        return await engines[folder].generate(prompt, params, **media)

    async def close() -> None:
        for engine in engines.values():
            await engine.aclose()

    with asyncio.Runner() as runner:
        yield lambda *arguments, **media: runner.run(ask(*arguments, **media))
        runner.run(close())


class Unread(io.StringIO):
    """A standard input that nobody may read."""

    def read(self, *_: object) -> str:
        raise AssertionError("standard input was read")

    readline = read
