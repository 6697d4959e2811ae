"""Nobody waits for what is not theirs: steps go on, faults and departures concern one request."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from aioengine import AsyncEngine, EngineState, MediaConfig, RequestOutput
from aioengine.errors import (
    EngineClosedError,
    EngineDeadError,
    ModelLoadError,
    OverloadedError,
    RequestAbortedError,
    WrongLoopError,
)
from aioengine.streams.cuda import CudaDevice
from tests.support.engines import (
    Spans,
    cancelled_at,
    encoded,
    engine_threads,
    greedy,
    other_tasks,
    running_engine,
    settled,
    until,
)
from tests.support.tiny import NUM_IMAGE_TOKENS, save_tiny_llava, tiny_image

URL = "https://example.com/a.png"
ITEM_BYTES = NUM_IMAGE_TOKENS * 48 * 8
BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_llava")
    save_tiny_llava(path, max_position_embeddings=8192)
    return path


def ids(length: int, first: int = 0) -> list[int]:
    """A text prompt of that many tokens; `first` makes it differ from others at once."""
    return [20 + first, *(20 + (first * 7 + 13 * i) % 200 for i in range(length - 1))]


class GatedFetcher:
    """Fetches nothing before `gate` is set, and remembers what became of each call."""

    def __init__(self, image: bytes) -> None:
        self.gate = asyncio.Event()
        self.num_calls = self.num_cancelled = 0
        self._image = image

    async def __call__(self, url: str) -> bytes:
        self.num_calls += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return self._image


@pytest.fixture
def fetcher() -> GatedFetcher:
    return GatedFetcher(encoded(tiny_image(50)))


def gate_decoding(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Media are not processed before the returned event is set."""
    gate = threading.Event()
    for processor in engine._core.loaded.processors:
        process = processor.process

        def wait_and_process(*args: Any, process: Callable[..., Any] = process) -> Any:
            assert gate.wait(20)
            return process(*args)

        monkeypatch.setattr(processor, "process", wait_and_process)
    return gate


# ---- decode goes on


async def test_streams_get_a_token_in_every_step_of_a_long_prefill(folder: Path) -> None:
    options = {"max_model_len": 5000, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
    async with running_engine(folder, **options) as engine:
        steps = Spans(engine)
        names = [f"stream {n}" for n in range(3)]
        tasks = [
            asyncio.create_task(engine.generate(ids(5, n + 1), greedy(110), request_id=name))
            for n, name in enumerate(names)
        ]
        for name in names:
            await steps.wait_for(name, 2)
        await engine.generate(ids(4000), greedy(1), request_id="long")
        prefill = steps.of("long")
        assert len(prefill) >= 4000 // 64
        assert all({*names} <= {*span.requests} for span in prefill)
        for task in tasks:
            assert len((await task).token_ids) == 110


async def test_text_passes_a_image_that_is_being_fetched(
    folder: Path, fetcher: GatedFetcher
) -> None:
    media = MediaConfig(fetcher=fetcher)
    async with running_engine(folder, media=media, max_num_seqs=1) as engine:
        image = asyncio.create_task(engine.generate("Look: <image>", greedy(), images=[URL]))
        await until(lambda: fetcher.num_calls == 1)
        for n in range(3):
            await engine.generate(ids(20, n + 1), greedy())
        assert not image.done()
        fetcher.gate.set()
        output = await image
        assert output.usage.encoder_items == 1
        direct = await engine.generate("Look: <image>", greedy(), images=[tiny_image(50)])
        assert direct.token_ids == output.token_ids


async def test_text_before_a_image_is_computed_while_it_is_decoded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "A long story comes before the picture. " * 3 + "<image> And then?"
    image = encoded(tiny_image(51))
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "block_size": BLOCK_SIZE}
    async with running_engine(folder, **options) as engine:
        alone = await engine.generate(prompt, greedy(), images=[image])
        await engine.reset_caches()
        gate, steps = gate_decoding(engine, monkeypatch), Spans(engine)
        task = asyncio.create_task(
            engine.generate(prompt, greedy(), images=[image], request_id="image")
        )
        try:
            await steps.wait_for("image", 2)
            # It is parked at the image: the one slot is free for text.
            for n in range(3):
                await engine.generate(ids(20, n + 1), greedy())
            assert not task.done()
            computed = sum(int(span.detail.split()[0]) for span in steps.of("image"))
            before = alone.prompt_token_ids.index(3)
            # Less than a block of it may be left to go with the image.
            assert 0 <= before - computed < BLOCK_SIZE
        finally:
            gate.set()
        assert (await task).token_ids == alone.token_ids


async def test_many_images_with_an_encoder_cache_for_two(folder: Path) -> None:
    def requests(engine: AsyncEngine) -> list[Any]:
        return [
            engine.generate(
                "One <image> two <image>.", greedy(), images=[tiny_image(n), tiny_image(n + 1)]
            )
            for n in range(8)
        ]

    async with running_engine(folder) as engine:
        expected = [await request for request in requests(engine)]
    async with running_engine(folder, encoder_cache_bytes=2 * ITEM_BYTES) as engine:
        outputs = await asyncio.gather(*requests(engine))
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        statistics = engine.statistics()
        assert statistics.encoder_cache_entries <= 2
        assert statistics.encoder_cache_used_bytes <= 2 * ITEM_BYTES


# ---- shared work


async def test_equal_images_in_flight_are_worked_on_once(
    folder: Path, fetcher: GatedFetcher
) -> None:
    async with running_engine(folder, media=MediaConfig(fetcher=fetcher)) as engine:
        tasks = [
            asyncio.create_task(engine.generate(text, greedy(), images=[URL] * text.count("<")))
            for text in ["<image>", "A <image>", "<image> B <image>", "<image>"]
        ]
        await until(lambda: fetcher.num_calls == 1)
        await asyncio.sleep(0)
        fetcher.gate.set()
        outputs = await asyncio.gather(*tasks)
        statistics = engine.statistics()
        assert fetcher.num_calls == 1
        assert statistics.stages["decode"].count == 1
        assert statistics.encoder_items_run == 1
        assert outputs[0].token_ids == outputs[3].token_ids
        await engine.generate("again <image>", greedy(), images=[tiny_image(50)])
        assert fetcher.num_calls == 1


async def test_a_shared_fetch_lives_as_long_as_someone_waits(
    folder: Path, fetcher: GatedFetcher
) -> None:
    async with running_engine(folder, media=MediaConfig(fetcher=fetcher)) as engine:

        def start() -> asyncio.Task[RequestOutput]:
            return asyncio.create_task(engine.generate("<image>", greedy(), images=[URL]))

        first, second = start(), start()
        await until(lambda: engine.statistics().waiting == 2 and fetcher.num_calls == 1)
        first.cancel()
        await asyncio.wait([first])
        assert fetcher.num_cancelled == 0
        second.cancel()
        await asyncio.wait([second])
        await until(lambda: fetcher.num_cancelled == 1)
        await settled(engine)
        third, fourth = start(), start()
        await until(lambda: fetcher.num_calls == 2)
        third.cancel()
        fetcher.gate.set()
        assert len((await fourth).token_ids) == 8
        assert fetcher.num_calls == 2 and fetcher.num_cancelled == 1


async def test_a_shared_decoding_lives_as_long_as_someone_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = encoded(tiny_image(52))
    async with running_engine(folder) as engine:
        gate = gate_decoding(engine, monkeypatch)

        def start(text: str) -> asyncio.Task[RequestOutput]:
            return asyncio.create_task(engine.generate(text, greedy(), images=[image]))

        first, second = start("A <image>"), start("B <image>")
        await until(lambda: engine.statistics().waiting == 2)
        first.cancel()
        gate.set()
        assert len((await second).token_ids) == 8
        assert engine.statistics().stages["decode"].count == 1
        with pytest.raises(asyncio.CancelledError):
            await first


# ---- readers


async def test_a_slow_reader_gets_merged_deltas_and_slows_nobody(folder: Path) -> None:
    async with (
        running_engine(folder) as engine,
        engine.stream(ids(5), greedy(40)) as slow,
        engine.stream(ids(5), greedy(40)) as quick,
    ):
        texts = [delta.text async for delta in quick]
        output = await slow.result()
        received = [delta async for delta in slow]
        assert len(received) == 1
        assert received[0].token_ids == output.token_ids
        assert received[0].text == output.text == "".join(texts)
        assert slow.statistics().deltas_pushed == 40
        assert slow.statistics().deltas_received == 1


async def test_closing_a_stream_ends_its_request(folder: Path) -> None:
    async with running_engine(folder) as engine:
        async with engine.stream(ids(5), greedy(400)) as stream:
            async for _ in stream:
                break
        await settled(engine)
        assert engine.statistics().aborted == 1
        assert engine.statistics().stages["step"].count < 50


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_a_stream_that_is_dropped_ends_its_request(folder: Path, is_elsewhere: bool) -> None:
    async with running_engine(folder) as engine:
        streams = [engine.stream(ids(5), greedy(400))]
        assert await streams[0].receive()
        with pytest.warns(ResourceWarning, match="and its request is ended"):
            if is_elsewhere:  # the collector runs in any thread
                await asyncio.to_thread(streams.clear)
            else:
                streams.clear()
        await settled(engine)
        assert engine.statistics().aborted == 1
        assert engine.statistics().stages["step"].count < 50


async def test_a_stream_may_be_closed_before_its_request_has_begun(folder: Path) -> None:
    async with running_engine(folder) as engine:
        engine.stream(ids(5), greedy()).close()
        engine.stream("<image>", greedy(), images=[tiny_image(1)]).close()
        await settled(engine)
        assert len((await engine.generate(ids(5), greedy())).token_ids) == 8


# ---- endings


async def test_abort_in_every_state(folder: Path, fetcher: GatedFetcher) -> None:
    media = MediaConfig(fetcher=fetcher)
    async with running_engine(folder, media=media, max_num_seqs=1) as engine:
        running = engine.stream(ids(5), greedy(400), request_id="running")
        await running.receive()
        waiting = engine.stream(ids(5), greedy(), request_id="waiting")
        fetching = engine.stream("<image>", greedy(), images=[URL], request_id="fetching")
        fresh = engine.stream(ids(5), greedy(), request_id="fresh")
        streams = [running, waiting, fetching]
        await engine.abort("fresh")
        await until(lambda: engine._core.scheduler.num_waiting == 1 and fetcher.num_calls == 1)
        for stream in streams:
            await engine.abort(stream.request_id)
        for stream in [fresh, *streams]:
            with pytest.raises(RequestAbortedError):
                await stream.result()
        await engine.abort("running")
        await engine.abort("never heard of")
        await settled(engine)
        assert engine.statistics().aborted == 4
        assert fetcher.num_cancelled == 1


async def test_closing_with_requests_in_every_state(folder: Path, fetcher: GatedFetcher) -> None:
    options = {"media": MediaConfig(fetcher=fetcher), "max_num_seqs": 2, "device": "cpu"}
    engine = AsyncEngine.from_pretrained(folder, max_model_len=512, **options)
    before = other_tasks()
    await engine.start()
    streams = [engine.stream(ids(5, n + 1), greedy(400)) for n in range(4)]
    await streams[0].receive()
    streams += [engine.stream("<image>", greedy(), images=[URL]) for _ in range(2)]
    big = [encoded(tiny_image(n, 1200, 1200), "JPEG") for n in range(6)]
    streams += [engine.stream("<image>", greedy(), images=[data]) for data in big]
    await until(lambda: fetcher.num_calls == 1 and engine._core.scheduler.num_waiting > 0)
    streams.append(engine.stream(ids(5), greedy()))
    start = time.perf_counter()
    await engine.aclose()
    assert time.perf_counter() - start < 1.0
    for stream in streams:
        with pytest.raises(RequestAbortedError):
            await stream.result()
    assert other_tasks() == before
    assert engine_threads() == []
    assert fetcher.num_cancelled == 1
    await engine.aclose()
    with pytest.raises(EngineClosedError):
        await engine.generate("a")


async def test_closing_leaves_no_timer_that_holds_the_model(folder: Path) -> None:
    engine = AsyncEngine.from_pretrained(folder, max_model_len=512, device="cpu")
    await engine.start()
    jobs = engine._core.encoder_jobs
    # As behind an image that is ready, while another one is made ready.
    jobs._gathering = asyncio.get_running_loop().call_later(600, jobs._tell)
    del jobs
    runner = weakref.ref(engine._core.loaded.runner)
    await engine.aclose()
    assert runner() is None


@pytest.mark.parametrize("during", ["step", "encode"])
async def test_a_dead_device_is_told_to_everyone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    # Beside the image the texts must not end: no steps are taken ahead through gathered keys.
    backend = "auto" if during == "step" else "gather"
    options = {"max_model_len": 1024, "device": "cpu", "attention_backend": backend}
    async with AsyncEngine.from_pretrained(folder, **options) as engine:
        open_streams = [engine.stream(ids(5, n + 1), greedy(1000)) for n in range(2)]
        await open_streams[0].receive()

        def fail(*args: Any) -> Any:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(engine._core.loaded.runner, during, fail)
        if during == "step":
            monkeypatch.setattr(engine._core.loaded.runner, "put", fail)
        open_streams.append(engine.stream("<image>", greedy(400), images=[tiny_image(1)]))
        for stream in open_streams:
            with pytest.raises(EngineDeadError) as caught:
                await stream.result()
            assert str(caught.value.__cause__) == "the device is gone"
        for call in (engine.generate("a"), engine.abort("a"), engine.reset_caches()):
            with pytest.raises(EngineDeadError) as caught:
                await call
            assert str(caught.value.__cause__) == "the device is gone"
    assert engine_threads() == []


async def test_calls_before_the_start_and_after_the_end(folder: Path) -> None:
    engine = AsyncEngine.from_pretrained(folder, max_model_len=512, device="cpu")

    async def check() -> None:
        for call in (engine.generate("a"), engine.abort("a"), engine.reset_caches()):
            with pytest.raises(EngineClosedError):
                await call
        for attribute in ("tokenizer", "processor"):
            with pytest.raises(EngineClosedError):
                getattr(engine, attribute)
        with pytest.raises(EngineClosedError):
            engine.stream("a")

    await check()
    with pytest.raises(EngineClosedError):
        engine.statistics()
    async with engine:
        assert engine.statistics().running == 0
    await check()
    assert engine.statistics().running == 0
    with pytest.raises(EngineClosedError):
        await engine.start()


async def test_one_that_is_closed_before_its_start_stays_closed(folder: Path) -> None:
    engine = AsyncEngine.from_pretrained(folder)
    await engine.aclose()
    await engine.aclose()
    assert engine.state is EngineState.CLOSED
    with pytest.raises(EngineClosedError):
        await engine.start()


async def test_a_start_that_is_cancelled_leaves_nothing(folder: Path) -> None:
    before = other_tasks()
    for index in itertools.count():
        engine = AsyncEngine.from_pretrained(folder, max_model_len=512, device="cpu")
        try:
            await cancelled_at(engine.start(), index)
        except asyncio.CancelledError:
            asyncio.current_task().uncancel()
            left = engine_threads(), other_tasks() - before
        else:
            break
        finally:
            await engine.aclose()
        assert left == ([], set()), f"at await number {index}"
    assert index > 0
    assert engine_threads() == []


async def test_a_start_that_fails_leaves_nothing(tmp_path: Path, folder: Path) -> None:
    for path, options in (
        (tmp_path, {}),
        (folder, {"device": "cuda:99"}),
        (folder, {"kv_cache_bytes": 1}),
    ):
        engine = AsyncEngine.from_pretrained(path, **options)
        with pytest.raises(ModelLoadError):
            await engine.start()
        assert engine_threads() == []
        await engine.aclose()


class NoStreams:
    """The driver of a GPU that cannot be used."""

    def start(self) -> None:
        raise RuntimeError("no kernel image is available")

    def attach(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def queue(self, name: str) -> Any:
        raise NotImplementedError

    def mark(self, name: str) -> Any:
        raise NotImplementedError


async def test_a_device_that_cannot_be_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def open_broken(name: str) -> CudaDevice:
        return CudaDevice(asyncio.get_running_loop(), NoStreams())

    async def without_torch(name: str) -> CudaDevice:
        raise ImportError("No module named 'torch'")

    for open_device, reason in ((open_broken, "kernel image"), (without_torch, "No module")):
        monkeypatch.setattr("aioengine.engine.async_engine.open_device", open_device)
        with pytest.raises(ModelLoadError, match=reason):
            await AsyncEngine.from_pretrained(folder).start()
        assert engine_threads() == []


# ---- several engines


async def test_two_engines_in_one_loop(folder: Path, tmp_path: Path) -> None:
    save_tiny_llava(tmp_path, seed=1)

    def request(engine: AsyncEngine) -> Any:
        return engine.generate("What? <image>", greedy(), images=[tiny_image(3)])

    async with running_engine(folder) as one, running_engine(tmp_path) as two:
        alone = [(await request(engine)).token_ids for engine in (one, two)]
        assert alone[0] != alone[1]
        await one.reset_caches()
        outputs = await asyncio.gather(*(request(engine) for engine in (one, two) * 3))
        assert [output.token_ids for output in outputs] == alone * 3


async def _serve(folder: Path, barrier: threading.Barrier) -> list[tuple[int, ...]]:
    async with running_engine(folder) as engine:
        await asyncio.to_thread(barrier.wait, 30)
        outputs = await asyncio.gather(
            *(engine.generate(f"{n} <image>", greedy(), images=[tiny_image(n)]) for n in range(4))
        )
        return [output.token_ids for output in outputs]


def test_engines_in_two_threads_on_two_kinds_of_loop(folder: Path) -> None:
    expected = asyncio.run(_serve(folder, threading.Barrier(1)))
    barrier = threading.Barrier(2)
    found: dict[str, Any] = {}

    def run(kind: str) -> None:
        factory = uvloop.new_event_loop if kind == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            found[kind] = runner.run(_serve(folder, barrier))

    threads = [threading.Thread(target=run, args=(kind,)) for kind in ("asyncio", "uvloop")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {"asyncio": expected, "uvloop": expected}


async def test_a_call_from_another_loop(folder: Path) -> None:
    async with running_engine(folder) as engine:

        async def elsewhere() -> None:
            for call in (
                engine.generate("a"),
                engine.abort("a"),
                engine.reset_caches(),
                engine.aclose(),
            ):
                with pytest.raises(WrongLoopError):
                    await call
            with pytest.raises(WrongLoopError):
                engine.stream("a")

        await asyncio.to_thread(asyncio.run, elsewhere())
        with pytest.raises(WrongLoopError):
            await asyncio.to_thread(engine.stream, "a")
        assert len((await engine.generate(ids(5), greedy())).token_ids) == 8


# ---- queues


async def test_too_many_waiting_requests(folder: Path) -> None:
    async with running_engine(folder, max_num_seqs=1, max_queued_requests=2) as engine:
        async with engine.stream(ids(5), greedy(400)) as running:
            await running.receive()
            queued = [engine.stream(ids(5), greedy()) for _ in range(2)]
            with pytest.raises(OverloadedError):
                await engine.generate(ids(5), greedy())
            with pytest.raises(OverloadedError):
                engine.stream(ids(5), greedy())
            assert engine.statistics().waiting == 2
        for stream in queued:
            assert len((await stream.result()).token_ids) == 8


async def test_a_smaller_priority_number_goes_first(folder: Path) -> None:
    async with running_engine(folder, max_num_seqs=1) as engine:
        steps = Spans(engine)
        async with engine.stream(ids(5), greedy(400)) as first:
            await first.receive()
            tasks = [
                asyncio.create_task(
                    engine.generate(ids(5), greedy(), request_id=str(n), priority=priority)
                )
                for n, priority in enumerate([5, 0, 0, -1])
            ]
            await until(lambda: engine._core.scheduler.num_waiting == 4)
        await asyncio.gather(*tasks)
        served = [name for span in steps.spans for name in span.requests if len(name) == 1]
        assert list(dict.fromkeys(served)) == ["3", "1", "2", "0"]


# ---- memory


async def test_resetting_caches_changes_no_running_output(folder: Path) -> None:
    async with running_engine(folder, max_num_batched_tokens=24) as engine:

        def requests() -> list[Any]:
            return [
                engine.generate(f"{n} <image> {n}", greedy(30), images=[tiny_image(n)])
                for n in range(4)
            ]

        expected = [(await request).token_ids for request in requests()]
        await engine.reset_caches()
        assert engine.statistics().kv_blocks_cached == 0
        assert engine.statistics().encoder_cache_entries == 0
        running = asyncio.gather(*requests())
        num_resets = 0
        while not running.done():
            await engine.reset_caches()
            num_resets += 1
            await asyncio.sleep(0.001)  # a loop that never rests keeps the GIL from the engine
        assert [output.token_ids for output in await running] == expected
        assert num_resets > 10


async def test_preemption_changes_no_tokens(folder: Path) -> None:
    block_bytes = 2 * 16 * 2 * (12 + 12) * 8
    options = {"max_model_len": 160, "kv_cache_bytes": 13 * block_bytes}

    def requests(engine: AsyncEngine) -> list[Any]:
        return [
            engine.generate(f"{n} <image> tell.", greedy(50), images=[tiny_image(n)])
            for n in range(4)
        ]

    async with running_engine(folder) as engine:
        expected = [(await request).token_ids for request in requests(engine)]
    async with running_engine(folder, **options) as engine:
        assert engine.statistics().kv_blocks_total == 13
        outputs = await asyncio.gather(*requests(engine))
        assert [output.token_ids for output in outputs] == expected
        assert engine.statistics().preemptions > 0
