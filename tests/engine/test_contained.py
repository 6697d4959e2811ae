"""What foreign code in a thread may raise, and what is somebody else's: neither reaches others."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine import AsyncEngine, Embeddings, MediaConfig, Prompt
from aioengine.errors import EngineError, InvalidRequestError
from aioengine.media_pipeline import workers
from aioengine.models.llava import LlavaMultiModalProcessor
from aioengine.processors.media import http
from tests.support.engines import encoded, greedy, running_engine, settled, until
from tests.support.tiny import save_tiny_llava, tiny_image

TEXT = "USER: <image> tell ASSISTANT:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_llava")
    save_tiny_llava(path)
    return path


class PanicError(BaseException):
    """As Rust code raises it through its bindings: no Exception."""


def break_stage(
    engine: AsyncEngine, stage: str, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    def broken(*_: Any) -> Any:
        raise kind("with a secret")

    owner: Any = {
        "header": engine._core.input_processor.media,
        "layout": engine._core.input_processor,
        "work": workers,
    }[stage]
    name = {"header": "_open", "layout": "_lay_out", "work": "work_item"}[stage]
    monkeypatch.setattr(owner, name, broken)


COMPANY = greedy(100)
KINDS = [PanicError, SystemExit, KeyboardInterrupt, StopIteration, asyncio.CancelledError]


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[int, ...]:
    """The tokens of the company, without a fault."""

    async def generate() -> tuple[int, ...]:
        async with running_engine(folder) as engine:
            return (await engine.generate("company", COMPANY)).token_ids

    return asyncio.run(generate())


@pytest.mark.parametrize("stage", ["header", "layout", "work"])
@pytest.mark.parametrize("kind", [*KINDS, concurrent.futures.CancelledError])
async def test_whatever_a_thread_ends_with_ends_one_request(
    folder: Path,
    alone: tuple[int, ...],
    stage: str,
    kind: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_engine(folder) as engine:
        others = asyncio.create_task(engine.generate("company", COMPANY))
        await until(lambda: engine.statistics().running == 1)
        with monkeypatch.context() as patch:
            break_stage(engine, stage, patch, kind)
            async with asyncio.timeout(10):
                with pytest.raises((EngineError, InvalidRequestError)) as caught:
                    await engine.generate(TEXT, greedy(2), images=[tiny_image(5)])
        assert "secret" not in str(caught.value)
        assert (await others).token_ids == alone
        assert len((await engine.generate(TEXT, greedy(2), images=[tiny_image(5)])).token_ids) == 2
        await settled(engine)


@pytest.mark.parametrize("needs_outputs", [True, False])
async def test_an_equal_image_of_somebody_else_may_change(
    folder: Path, needs_outputs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, gate = threading.Event(), threading.Event()
    plain = LlavaMultiModalProcessor.process

    def process(processor: Any, items: Any, options: Any) -> Any:
        began.set()
        assert gate.wait(20)
        return plain(processor, items, options)

    mine, theirs = tiny_image(1), tiny_image(1)
    async with running_engine(folder) as engine:
        expected = await engine.generate(TEXT, greedy(4), images=[tiny_image(1)])
    monkeypatch.setattr(LlavaMultiModalProcessor, "layout_needs_hf_outputs", needs_outputs)
    async with running_engine(folder) as engine:
        monkeypatch.setattr(LlavaMultiModalProcessor, "process", process)
        first = asyncio.create_task(engine.generate(TEXT, greedy(4), images=[theirs]))
        await until(began.is_set)
        second = asyncio.create_task(engine.generate(TEXT, greedy(4), images=[mine]))
        third = asyncio.create_task(engine.generate(TEXT, greedy(4), images=[mine.copy()]))
        await asyncio.sleep(0.1)
        theirs.paste((0, 0, 0), (0, 0, 20, 20))
        gate.set()
        with pytest.raises(InvalidRequestError, match="was changed"):
            await first
        assert (await second).token_ids == (await third).token_ids == expected.token_ids


async def test_extras_that_change_after_the_call(folder: Path) -> None:
    async with running_engine(folder) as engine:
        grid = torch.tensor([1, 2, 3])
        hidden = engine.processor.info.get_hidden_size()
        item = Embeddings(torch.zeros(4, hidden), grid=grid)
        async with engine.stream("<image>", greedy(4), images=[item]) as stream:
            grid.fill_(99)
            await stream.result()
        (cached,) = engine._core.input_processor.media.cache._items.values()
        assert cached["grid"].tolist() == [1, 2, 3]


async def test_names_are_looked_up_whatever_the_application_s_threads_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def getaddrinfo(host: str, *_: Any, **__: Any) -> Any:
        asked.append(host)
        raise OSError

    monkeypatch.setattr(http.socket, "getaddrinfo", getaddrinfo)
    loop, release = asyncio.get_running_loop(), threading.Event()
    held = [loop.run_in_executor(None, release.wait, 30) for _ in range(64)]
    try:
        media = MediaConfig(allowed_hosts=("a.test",), fetch_timeout_s=20)
        async with running_engine(folder, media=media) as engine:
            with pytest.raises(InvalidRequestError):
                await engine.generate(TEXT, greedy(2), images=["https://a.test/x.png"])
        assert asked == ["a.test"]
    finally:
        release.set()
        await asyncio.gather(*held)


async def test_a_name_is_forgotten_with_what_it_stood_for(folder: Path) -> None:
    """Given to embeddings, a uuid does not stand for the image before any more."""
    async with running_engine(folder) as engine:
        hidden = engine.processor.info.get_hidden_size()
        for item in (encoded(tiny_image(1)), Embeddings(torch.zeros(4, hidden))):
            named = Prompt(text=TEXT, media={"image": [item]}, uuids={"image": ["mine"]})
            await engine.generate(named, greedy(2))
        with pytest.raises(InvalidRequestError, match="nothing is cached"):
            nameless = Prompt(text=TEXT, media={"image": [None]}, uuids={"image": ["mine"]})
            await engine.generate(nameless, greedy(2))
