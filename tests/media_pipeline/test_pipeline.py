"""What media wait for, and what they do not: limits, cached items, names, layouts from outputs."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio.from_thread
import anyio.to_thread
import numpy as np
import pytest
import torch
from PIL import Image

from aioengine import AsyncEngine, MediaConfig, Prompt
from aioengine.errors import (
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    MediaError,
    ModelLoadError,
)
from aioengine.models.llava import Llava, LlavaMultiModalProcessor, LlavaProcessingInfo
from aioengine.processors import MULTIMODAL_REGISTRY
from aioengine.processors.generic import GenericMultiModalProcessor
from aioengine.processors.generic_info import GenericDummyInputsBuilder, GenericProcessingInfo
from tests.support.engines import greedy, other_tasks, running_engine, settled, until
from tests.support.tiny import save_tiny_llava, tiny_image

URL = "https://example.com/"
TEXT = "USER: <image> tell ASSISTANT:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_llava")
    save_tiny_llava(path)
    return path


def png(number: int, size: tuple[int, int] = (40, 30)) -> bytes:
    buffer = io.BytesIO()
    tiny_image(number).resize(size).save(buffer, "PNG")
    return buffer.getvalue()


class Server:
    """A fetcher that counts, and waits for `gate` where a URL says so."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.running = self.most_running = 0
        self.gate = asyncio.Event()

    async def __call__(self, url: str) -> bytes:
        self.asked.append(url)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if "slow" in url:
                await self.gate.wait()
            if "broken" in url:
                raise OSError("no such image")
            return png(int(url.rpartition("/")[2]))
        finally:
            self.running -= 1


def named(item: Any, uuid: str | None, **options: Any) -> Prompt:
    return Prompt(text=TEXT, media={"image": [item]}, uuids={"image": [uuid]}, **options)


async def test_a_known_name_skips_fetching_and_decoding(folder: Path) -> None:
    server = Server()
    async with running_engine(folder, media=MediaConfig(fetcher=server)) as engine:
        first = await engine.generate(named(URL + "1", "cat"), greedy(8))
        assert server.asked == [URL + "1"]
        for item in (URL + "1", None):
            again = await engine.generate(named(item, "cat"), greedy(8))
            assert again.token_ids == first.token_ids
        assert server.asked == [URL + "1"]
        assert engine.statistics().stages["decode"].count == 1
        other = await engine.generate(named(URL + "2", "dog"), greedy(8))
        assert other.token_ids != first.token_ids and len(server.asked) == 2
        for options in ({"cache_salt": "tenant"}, {"mm_processor_kwargs": {"do_normalize": False}}):
            with pytest.raises(MediaError, match="nothing is cached under its uuid"):
                await engine.generate(named(None, "cat", **options), greedy(8))
        await engine.reset_caches()
        with pytest.raises(MediaError, match="nothing is cached under its uuid"):
            await engine.generate(named(None, "cat"), greedy(8))


async def test_a_name_for_two_images(folder: Path) -> None:
    async with running_engine(folder) as engine:
        small, large = png(1), png(2, (300, 20))  # at hand: each is looked at
        alone = [
            (await engine.generate(TEXT, greedy(8), images=[image])).token_ids
            for image in (small, large)
        ]
        await engine.reset_caches()
        both = await asyncio.gather(
            *(engine.generate(named(image, "name"), greedy(8)) for image in (small, large))
        )
        assert [output.token_ids for output in both] == alone


async def test_a_named_image_outlives_the_cache(folder: Path) -> None:
    """Nothing is left to make its features from, so the request holds them."""
    async with running_engine(folder, encoder_cache_bytes=16 * 48 * 8) as engine:
        expected = await engine.generate(named(png(1), "cat"), greedy(8))
        stream = engine.stream(named(None, "cat"), greedy(8))
        async with stream:
            engine._core.input_processor.media.cache.clear()
            engine._core.scheduler.media.cache.clear()
            engine._core.scheduler.pool.clear()
            assert (await stream.result()).token_ids == expected.token_ids


async def test_fetches_have_a_limit(folder: Path) -> None:
    server = Server()
    config = MediaConfig(fetcher=server, max_concurrent_fetches=3)
    async with running_engine(folder, media=config) as engine:
        requests = [
            asyncio.create_task(engine.generate(TEXT, greedy(2), images=[f"{URL}slow/{n}"]))
            for n in range(8)
        ]
        await until(lambda: server.running == 3)
        text = await engine.generate("no picture", greedy(2))
        held = await engine.generate(TEXT, greedy(2), images=[png(1)])
        assert len(text.token_ids) == len(held.token_ids) == 2
        server.gate.set()
        await asyncio.gather(*requests)
        assert server.most_running == 3 and len(server.asked) == 8


async def test_a_failed_fetch_ends_its_siblings_at_once(folder: Path) -> None:
    server = Server()
    async with running_engine(folder, media=MediaConfig(fetcher=server)) as engine:
        before = other_tasks()
        images = [URL + "slow/1", URL + "broken/2", URL + "slow/3"]
        with pytest.raises(MediaError) as caught:
            await engine.generate("<image>" * 3, greedy(2), images=images)
        assert caught.value.parameter == "images[1]"
        await until(lambda: server.running == 0)
        assert other_tasks() == before


class Gate:
    """Holds up every decoding on the worker threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.num_held = threading.Event(), 0
        plain = LlavaMultiModalProcessor.process

        def process(processor: Any, items: Any, options: Any) -> Any:
            self.num_held += 1
            assert self.open.wait(20)
            return plain(processor, items, options)

        monkeypatch.setattr(LlavaMultiModalProcessor, "process", process)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    gate.open.set()
    yield gate
    gate.open.set()


async def test_cached_images_never_queue_behind_others(folder: Path, gate: Gate) -> None:
    async with running_engine(folder) as engine:
        expected = await engine.generate(TEXT, greedy(4), images=[png(0)])
        engine._core.scheduler.media.cache.clear()
        gate.open.clear()
        slow = [
            asyncio.create_task(engine.generate(TEXT, greedy(2), images=[png(n)]))
            for n in range(1, 9)
        ]
        await until(lambda: gate.num_held == 3)  # one before, and both workers are busy
        hit = await engine.generate(TEXT, greedy(4), images=[png(0)])
        assert hit.token_ids == expected.token_ids and not any(task.done() for task in slow)
        gate.open.set()
        await asyncio.gather(*slow)


async def test_images_that_come_together_are_encoded_together(folder: Path, gate: Gate) -> None:
    async with running_engine(folder) as engine:
        engine._core.device.gather_s = 30.0
        before = engine.statistics().stages["encode"].count
        gate.open.clear()
        outputs = [
            asyncio.create_task(engine.generate(TEXT, greedy(2), images=[png(number)]))
            for number in range(3)
        ]
        await until(lambda: len(engine._core.encoder_jobs._jobs) == 3)
        gate.open.set()
        await asyncio.gather(*outputs)
        assert engine.statistics().stages["encode"].count == before + 1


async def test_nobody_waits_for_who_has_left(folder: Path, gate: Gate) -> None:
    async with running_engine(folder) as engine:
        engine._core.device.gather_s = 0.1
        await engine.generate(TEXT, greedy(2), images=[png(0)])
        engine._core.scheduler.media.cache.clear()
        gate.open.clear()
        slow = asyncio.create_task(engine.generate(TEXT, greedy(2), images=[png(1)]))
        await until(lambda: engine._core.encoder_jobs._jobs)
        ready = asyncio.create_task(engine.generate(TEXT, greedy(2), images=[png(0)]))
        await until(lambda: engine._core.encoder_jobs._features)  # which are cached
        ready.cancel()
        await asyncio.wait([ready])
        assert not engine._core.encoder_jobs._features
        again = await engine.generate(TEXT, greedy(2), images=[png(0)])
        assert len(again.token_ids) == 2 and not slow.done()
        gate.open.set()
        await slow


@pytest.fixture
def after_processing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlavaMultiModalProcessor, "layout_needs_hf_outputs", True)


async def test_a_layout_from_the_outputs(
    folder: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [png(1), png(2), png(1)]
    async with running_engine(folder) as engine:
        expected = await engine.generate("<image> a <image><image>", greedy(8), images=images)
    monkeypatch.setattr(LlavaMultiModalProcessor, "layout_needs_hf_outputs", True)
    async with running_engine(folder) as engine:
        gate.open.clear()
        outputs = [
            asyncio.create_task(
                engine.generate("<image> a <image><image>", greedy(8), images=images)
            )
            for _ in range(3)
        ]
        await until(lambda: gate.num_held == 4)  # two before
        gate.open.set()
        for output in await asyncio.gather(*outputs):
            assert output.token_ids == expected.token_ids
            assert output.prompt_token_ids == expected.prompt_token_ids
        assert engine.statistics().stages["process"].count == 2
        await settled(engine)


async def test_a_image_that_cannot_be_processed_ends_its_request_only(
    folder: Path, after_processing: None
) -> None:
    async with running_engine(folder) as engine:
        good, broken = png(1), png(2)[:-40]
        results = await asyncio.gather(
            engine.generate("<image><image>", greedy(4), images=[good, broken]),
            engine.generate(TEXT, greedy(4), images=[good]),
            return_exceptions=True,
        )
        assert isinstance(results[0], MediaError) and results[0].parameter == "images[1]"
        assert not isinstance(results[1], BaseException)


async def test_a_waiter_may_leave_shared_work(
    folder: Path, gate: Gate, after_processing: None
) -> None:
    async with running_engine(folder) as engine:
        gate.open.clear()
        first, second = (
            asyncio.create_task(engine.generate(TEXT, greedy(4), images=[png(1)])) for _ in "ab"
        )
        await until(lambda: gate.num_held == 1)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        gate.open.set()
        assert len((await second).token_ids) == 4 and gate.num_held == 1
        await settled(engine)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_processed_images_outlive_the_process(folder: Path, tmp_path: Path) -> None:
    options = {"mm_processor_cache_dir": tmp_path / "processed"}
    image = png(1)
    async with running_engine(folder, **options) as engine:
        expected = await engine.generate(TEXT, greedy(8), images=[image])
        await until(lambda: not engine._core.input_processor.media._stores)
    files = files_in(tmp_path)
    assert len(files) == 1 and files[0].suffix == ".safetensors"
    async with running_engine(folder, **options) as engine:
        again = await engine.generate(TEXT, greedy(8), images=[image])
        assert again.token_ids == expected.token_ids
        assert not engine.statistics().stages["decode"].count
        salted = Prompt(text=TEXT, media={"image": [image]}, cache_salt="tenant")
        assert (await engine.generate(salted, greedy(8))).token_ids == expected.token_ids
        assert engine.statistics().stages["decode"].count == 1
    content = files[0].read_bytes()
    files[0].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    async with running_engine(folder, **options) as engine:
        again = await engine.generate(TEXT, greedy(8), images=[image])
        assert again.token_ids == expected.token_ids
        assert engine.statistics().stages["decode"].count == 1
        await until(lambda: not engine._core.input_processor.media._stores)
        await engine.reset_caches()
    assert not files_in(tmp_path)


async def test_another_processor_finds_nothing_on_disk(folder: Path, tmp_path: Path) -> None:
    changed = tmp_path / "model"
    shutil.copytree(folder, changed)
    options = {"mm_processor_cache_dir": tmp_path / "processed"}
    async with running_engine(changed, **options) as engine:
        await engine.generate(TEXT, greedy(2), images=[png(1)])
    path = changed / "processor_config.json"
    config = json.loads(path.read_text())
    config["image_processor"]["image_mean"] = [0.1, 0.2, 0.3]
    path.write_text(json.dumps(config))
    async with running_engine(changed, **options) as engine:
        await engine.generate(TEXT, greedy(2), images=[png(1)])
        assert engine.statistics().stages["decode"].count == 1


async def test_a_folder_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match="mm_processor_cache_dir"):
        async with running_engine(folder, mm_processor_cache_dir=tmp_path / "file"):
            raise AssertionError


async def test_worker_processes_give_the_same(folder: Path) -> None:
    images = [png(1), png(2), tiny_image(3), np.asarray(tiny_image(4))]
    text = "<image> and <image>, <image> or <image>"
    async with running_engine(folder) as engine:
        expected = await engine.generate(text, greedy(8), images=images)
    async with running_engine(folder, processor_workers="process:1", thread_niceness=3) as engine:
        output, broken = await asyncio.gather(
            engine.generate(text, greedy(8), images=images),
            engine.generate(TEXT, greedy(8), images=[png(5)[:-40]]),
            return_exceptions=True,
        )
        assert not isinstance(output, BaseException) and output.token_ids == expected.token_ids
        assert isinstance(broken, MediaError) and broken.parameter == "images[0]"
        assert engine.statistics().stages["process"].count == 4
        with pytest.raises(InvalidRequestError, match="must be plain values"):
            await engine.generate(
                Prompt(text=TEXT, media={"image": [png(1)]}, mm_processor_kwargs={"a": object()})
            )
        workers: Any = engine._core.input_processor.media._workers
        (process_id,) = workers.process_ids
        if sys.platform == "linux":
            assert niceness(process_id) == min(19, niceness(0) + 3)
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is the whole process's there")
@pytest.mark.parametrize("steps", [0, 3])
async def test_threads_are_as_nice_as_configured(folder: Path, steps: int) -> None:
    expected = min(19, niceness(0) + steps)
    async with running_engine(folder, thread_niceness=steps) as engine:
        workers: Any = engine._core.input_processor.media._workers
        assert await asyncio.wrap_future(workers._pool.submit(niceness, 0)) == expected
        assert await engine._core.device.submit_step(lambda: niceness(0)) == expected


async def test_threads_of_workers_compute_alone(folder: Path) -> None:
    """A team of OpenMP in each of them would let the device's sleep where it should spin."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        async with running_engine(folder) as engine:
            workers: Any = engine._core.input_processor.media._workers
            assert await asyncio.wrap_future(workers._pool.submit(torch.get_num_threads)) == 1
            assert await asyncio.to_thread(torch.get_num_threads) == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def niceness(process_id: int) -> int:
    """Of a process, or of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, process_id)


async def test_closed_while_its_workers_start(folder: Path) -> None:
    engine = AsyncEngine.from_pretrained(folder, device="cpu", processor_workers="process:2")
    start = asyncio.create_task(engine.start())
    await until(
        lambda: engine._core is not None and engine._core.input_processor.media._workers._workers
    )
    workers: Any = engine._core.input_processor.media._workers
    process_ids = workers.process_ids
    await engine.aclose()
    with pytest.raises(EngineClosedError, match="while it was starting"):
        await start
    for process_id in process_ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


async def test_threads_of_the_application_may_all_wait_for_the_engine(
    folder: Path, tmp_path: Path
) -> None:
    """Handlers in anyio's threads, as in a web service, that call the engine and wait."""
    path = tmp_path / "image.png"
    path.write_bytes(png(1))
    limiter = anyio.to_thread.current_default_thread_limiter()
    async with running_engine(folder) as engine, asyncio.timeout(60):

        def handler() -> int:
            output = anyio.from_thread.run(lambda: engine.generate(TEXT, greedy(2), images=[path]))
            return len(output.token_ids)

        count = int(limiter.total_tokens)
        handlers = [anyio.to_thread.run_sync(handler) for _ in range(count)]
        assert await asyncio.gather(*handlers) == [2] * count


async def test_an_equal_image_that_was_drawn_on_is_nobody_else_s(folder: Path, gate: Gate) -> None:
    mine, theirs = tiny_image(1), tiny_image(1)
    async with running_engine(folder) as engine:
        expected = await engine.generate(TEXT, greedy(4), images=[tiny_image(1)])
        await engine.reset_caches()
        gate.open.clear()
        first = asyncio.create_task(engine.generate(TEXT, greedy(4), images=[mine]))
        await until(lambda: gate.num_held == 2)
        second = asyncio.create_task(engine.generate(TEXT, greedy(4), images=[theirs]))
        await until(lambda: engine._core.tracker.num_preparing == 0)
        mine.paste((0, 0, 0), (0, 0, 20, 20))
        gate.open.set()
        with pytest.raises(MediaError, match="was changed"):
            await first
        assert (await second).token_ids == expected.token_ids


async def test_options_that_change_after_the_call(folder: Path, gate: Gate) -> None:
    async with running_engine(folder) as engine:
        options = {"image_mean": [0.5, 0.5, 0.5]}
        prompt = Prompt(text=TEXT, media={"image": [png(1)]}, mm_processor_kwargs=options)
        expected = await engine.generate(prompt, greedy(8))
        await engine.reset_caches()
        gate.open.clear()
        task = asyncio.create_task(engine.generate(prompt, greedy(8)))
        await until(lambda: gate.num_held == 2)
        options["image_mean"][0] = 18.0
        gate.open.set()
        assert (await task).token_ids == expected.token_ids


@pytest.mark.parametrize("kind", ["itself", "deep", "odd"])
async def test_options_that_cannot_be_kept(folder: Path, kind: str) -> None:
    options: dict[str, Any] = {}
    options["a"] = options if kind == "itself" else threading.Lock()
    if kind == "deep":
        options = {"a": [[[[[[[[[[[1]]]]]]]]]]]}
    async with running_engine(folder) as engine:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.generate(
                Prompt(text=TEXT, media={"image": [png(1)]}, mm_processor_kwargs=options)
            )
        assert caught.value.parameter == "mm_processor_kwargs"


async def test_errors_of_the_engine_are_each_waiter_s_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine(folder) as engine:
        pipeline = engine._core.input_processor.media

        async def broken(work: Any) -> Any:
            await asyncio.sleep(0.05)
            raise EngineError("the workers are gone")

        monkeypatch.setattr(pipeline._workers, "run", broken)
        requests = [engine.generate(TEXT, greedy(2), images=[png(1)]) for _ in range(3)]
        found = await asyncio.gather(*requests, return_exceptions=True)
        assert all(type(error) is EngineError for error in found)
        assert len({id(error) for error in found}) == 3


async def test_the_generic_processor_serves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [png(1), png(2, (30, 90))]
    async with running_engine(folder) as engine:
        expected = await engine.generate("<image> or <image>", greedy(8), images=images)
    generic = (GenericMultiModalProcessor, GenericProcessingInfo, GenericDummyInputsBuilder)
    monkeypatch.setitem(MULTIMODAL_REGISTRY._entries, Llava, generic)
    async with running_engine(folder) as engine:
        output = await engine.generate("<image> or <image>", greedy(8), images=images)
    assert output.token_ids == expected.token_ids
    assert output.prompt_token_ids == expected.prompt_token_ids


async def test_the_largest_item_is_found_by_a_trial(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine(folder) as engine:
        said = engine._core.loaded.limits
        expected = await engine.generate(TEXT, greedy(8), images=[png(1)])
    monkeypatch.setattr(LlavaProcessingInfo, "get_mm_max_tokens_per_item", lambda *_: None)
    async with running_engine(folder) as engine:
        assert engine._core.loaded.limits == said
        output = await engine.generate(TEXT, greedy(8), images=[png(1)])
        assert output.token_ids == expected.token_ids


def test_images_are_what_the_test_says() -> None:
    assert Image.open(io.BytesIO(png(2, (300, 20)))).size == (300, 20)
