"""What goes wrong in one place stays there: wake-ups, deliveries, encoder output, life cycles."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from aioengine import AsyncEngine, Embeddings, MediaConfig, SamplingParams
from aioengine.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineError,
    MediaError,
    RequestAbortedError,
    WrongLoopError,
)
from aioengine.media_pipeline.pipeline import MediaPipeline
from tests.support.engines import until
from tests.support.tiny import NUM_IMAGE_TOKENS, save_tiny_llava, tiny_image

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
TEXT = [1, 20, 30]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults")
    save_tiny_llava(path)
    return path


def engine_for(folder: Path, **options: Any) -> AsyncEngine:
    settings = {"kv_cache_bytes": 1 << 20, "block_size": 4, "device": "cpu", **options}
    return AsyncEngine.from_pretrained(folder, **settings)


# ---- the step loop


async def test_two_steps_that_end_before_the_loop_gets_its_turn(folder: Path) -> None:
    """At a run-ahead of one, both results are there at once, and nothing wakes the loop again."""
    async with engine_for(folder) as engine:
        engine._core.device.run_ahead = 1
        submit, num_steps = engine._core.device.submit_step, 0

        def slow_host(job: Any) -> Any:
            nonlocal num_steps
            future = submit(job)
            num_steps += 1
            if num_steps == 2:
                asyncio.get_running_loop().call_soon(time.sleep, 0.2)
            return future

        engine._core.device.submit_step = slow_host  # type: ignore[method-assign]
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        async with asyncio.timeout(30):
            assert len((await engine.generate(TEXT, params)).token_ids) == 2


async def test_a_step_behind_one_that_fails_is_no_complaint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with engine_for(folder) as engine:
        engine._core.device.run_ahead = 1
        can_go_on = threading.Event()
        num_failed = 0

        def fail(*args: Any) -> Any:
            nonlocal num_failed
            assert can_go_on.wait(30)
            num_failed += 1
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(engine._core.loaded.runner, "step", fail)
        submit, num_steps = engine._core.device.submit_step, 0

        def count(job: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 2:
                can_go_on.set()
            return submit(job)

        monkeypatch.setattr(engine._core.device, "submit_step", count)
        with pytest.raises(EngineDeadError):
            await engine.generate(TEXT, GREEDY)
        await until(lambda: num_failed == 2)
        monkeypatch.undo()
    gc.collect()
    assert not complaints


async def test_closing_with_a_device_that_takes_nothing_more_is_no_complaint(folder: Path) -> None:
    complaints: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    engine = engine_for(folder)
    await engine.start()

    def refuse(job: Any) -> asyncio.Future[Any]:
        future = loop.create_future()
        future.set_exception(RuntimeError("the device is gone"))
        return future

    engine._core.device.submit_step = refuse  # type: ignore[method-assign]
    await engine.aclose()
    gc.collect()
    assert not complaints


async def test_a_listener_that_leaves_and_fails_breaks_nothing(folder: Path) -> None:
    async with engine_for(folder) as engine:

        def listener(span: object) -> None:
            engine.instruments.listeners.clear()
            raise RuntimeError

        engine.instruments.listeners.append(listener)
        assert len((await engine.generate(TEXT, GREEDY)).token_ids) == 4


async def test_a_tokenizer_that_cannot_decode_ends_its_request_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_for(folder) as engine:

        class Broken:
            def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
                raise OverflowError

        good = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
        running = asyncio.ensure_future(engine.generate(TEXT, good))
        monkeypatch.setattr(engine._core.input_processor._readers, "_decoder", Broken())
        with pytest.raises(EngineError) as caught:
            await engine.generate(TEXT, GREEDY)
        assert isinstance(caught.value.__cause__, OverflowError)
        assert len((await running).token_ids) == 40
        assert engine.statistics().failed == 1


# ---- the encoder's output


@pytest.mark.parametrize("wrong", ["width", "rank", "count", "kind", "few"])
async def test_encoder_output_of_any_wrong_shape_ends_its_requests_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    outputs: dict[str, list[Any]] = {
        "width": [torch.zeros(NUM_IMAGE_TOKENS, 7)],
        "rank": [torch.zeros(NUM_IMAGE_TOKENS)],
        "count": [],
        "kind": [None],
        "few": [torch.zeros(NUM_IMAGE_TOKENS - 1, 48)],
    }
    async with engine_for(folder) as engine:
        expected = await engine.generate(TEXT, GREEDY)
        model = engine._core.loaded.runner.model
        monkeypatch.setattr(model, "encode", lambda modality, items: outputs[wrong])
        with pytest.raises(MediaError) as caught:
            await engine.generate("<image>", GREEDY, images=[tiny_image(1)])
        assert caught.value.parameter == "images[0]"
        assert ("select_token_id" in str(caught.value)) is (wrong == "few")
        assert (await engine.generate(TEXT, GREEDY)).token_ids == expected.token_ids
        assert engine.statistics().encoder_cache_entries == 0


async def test_rows_do_not_keep_their_batch_in_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_for(folder) as engine:
        model = engine._core.loaded.runner.model
        encode = model.encode

        def views(modality: str, items: Any) -> list[torch.Tensor]:
            return [torch.stack([*encode(modality, items), *encode(modality, items)])[0]]

        monkeypatch.setattr(model, "encode", views)
        await engine.generate("<image>", GREEDY, images=[tiny_image(1)])
        for rows in engine._core.loaded.runner._rows.values():
            assert rows.untyped_storage().nbytes() == rows.nbytes


# ---- images that change under way


def _numpy() -> tuple[Any, Any]:
    array = np.array(tiny_image(1))
    return array, lambda: array.fill(0)


def _tensor() -> tuple[Any, Any]:
    tensor = torch.from_numpy(np.array(tiny_image(1))).permute(2, 0, 1).contiguous()
    return tensor, tensor.zero_


def _pillow() -> tuple[Any, Any]:
    image = tiny_image(1).copy()
    return image, lambda: image.paste((0, 0, 0), (0, 0, *image.size))


def _embeddings() -> tuple[Any, Any]:
    rows = torch.randn(NUM_IMAGE_TOKENS, 48, generator=torch.Generator().manual_seed(0))
    return Embeddings(rows), rows.zero_


@pytest.mark.parametrize("make", [_numpy, _tensor, _pillow, _embeddings])
async def test_a_image_that_is_written_to_poisons_no_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    """Its key was made from the old content: what is cached under it has to be of that, too."""
    async with engine_for(folder, enable_prefix_caching=False) as engine:
        item, _ = make()
        expected = await engine.generate("<image>", GREEDY, images=[item])
        await engine.reset_caches()
        item, change = make()
        asked, gate, features = (
            asyncio.Event(),
            asyncio.Event(),
            engine._core.input_processor.media.features,
        )

        async def gated(*args: Any) -> Any:
            asked.set()
            await gate.wait()
            return await features(*args)

        monkeypatch.setattr(engine._core.input_processor.media, "features", gated)
        changed = asyncio.ensure_future(engine.generate("<image>", GREEDY, images=[item]))
        await asked.wait()
        change()
        gate.set()
        (outcome,) = await asyncio.gather(changed, return_exceptions=True)
        if isinstance(item, Image.Image):
            assert isinstance(outcome, MediaError) and "changed" in str(outcome)
        else:
            assert not isinstance(outcome, BaseException)
            assert outcome.token_ids == expected.token_ids
        again = await engine.generate("<image>", GREEDY, images=[make()[0]])
        assert again.token_ids == expected.token_ids


# ---- life and death


async def test_closing_while_starting(folder: Path) -> None:
    engine = engine_for(folder)
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0)
    await engine.aclose()
    with pytest.raises(EngineClosedError):
        await starting
    with pytest.raises(EngineClosedError):
        await engine.generate(TEXT, GREEDY)


async def test_closing_while_workers_are_starting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(folder)

    async def close(_: MediaPipeline) -> None:
        await engine.aclose()

    monkeypatch.setattr(MediaPipeline, "start", close)
    async with asyncio.timeout(60):
        with pytest.raises(EngineClosedError, match="closed while it was starting"):
            await engine.start()


async def test_two_who_close_wait_for_the_same_end(folder: Path) -> None:
    engine = engine_for(folder)
    await engine.start()
    main, device = engine._core._main, engine._core.device
    await asyncio.gather(engine.aclose(), engine.aclose())
    assert main is not None and main.done()
    assert not device._thread.is_alive()  # type: ignore[attr-defined]


async def test_somebody_cancels_every_task_of_the_loop(folder: Path) -> None:
    engine = engine_for(folder)
    await engine.start()
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    async with engine.stream(TEXT, endless) as stream:
        await stream.receive()
        assert engine._core._main is not None
        engine._core._main.cancel()
        with pytest.raises(RequestAbortedError):
            await stream.result()
    with pytest.raises(EngineClosedError):
        await engine.generate(TEXT, GREEDY)
    await engine.aclose()


async def test_resetting_while_closing_is_no_cancellation(folder: Path) -> None:
    engine = engine_for(folder)
    await engine.start()
    await engine.generate("<image>", GREEDY, images=[tiny_image(1)])
    await asyncio.gather(engine.reset_caches(), engine.aclose())


async def test_closing_waits_for_a_fetcher_to_clean_up(folder: Path) -> None:
    cleaned = False

    async def fetcher(url: str) -> bytes:
        nonlocal cleaned
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            cleaned = True
        return b""

    engine = engine_for(folder, media=MediaConfig(fetcher=fetcher))
    await engine.start()
    asking = asyncio.ensure_future(
        engine.generate("<image>", GREEDY, images=["https://example.com/a.png"])
    )
    await until(lambda: engine._core.input_processor.media._fetches._jobs)
    await asyncio.sleep(0)
    await engine.aclose()
    assert cleaned
    with pytest.raises(RequestAbortedError):
        await asking


async def test_a_stream_is_for_its_own_loop(folder: Path) -> None:
    async with engine_for(folder) as engine, engine.stream(TEXT, GREEDY) as stream:

        def elsewhere() -> list[type[BaseException]]:
            caught: list[type[BaseException]] = []
            for call in (stream.close, engine.statistics, lambda: asyncio.run(stream.result())):
                try:
                    call()
                except WrongLoopError as error:
                    caught.append(type(error))
            return caught

        assert await asyncio.to_thread(elsewhere) == [WrongLoopError] * 3
        assert len((await stream.result()).token_ids) == 4
