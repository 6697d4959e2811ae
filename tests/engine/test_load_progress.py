"""What `start(progress=...)` tells of a load, and what it leaves behind."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from aioengine import AsyncEngine, LoadProgress
from aioengine.errors import ModelLoadError
from aioengine.models.runtime.load_progress import Reporter
from aioengine.models.runtime.weights import read_weights
from tests.models.test_defined_model import drawn, own_config, weights_of
from tests.models.test_hf_loading import load
from tests.support.engines import greedy
from tests.support.tiny import save_tiny_llava, tiny_llama, tiny_llava, tiny_tokenizer

STAGES = ["libraries", "processor", "weights", "memory", "workers"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("progress") / "llava"
    save_tiny_llava(path)
    return path


@pytest.fixture
def own_hook() -> Iterator[Any]:
    """A hook of the application's, which must still be there afterwards."""

    def hook(bar: Any, args: Any, options: Any) -> Any:
        return bar(*args, **options)

    before = transformers_logging.set_tqdm_hook(hook)
    yield hook
    assert transformers_logging.set_tqdm_hook(before) is hook


def new_engine(folder: Path, **options: Any) -> AsyncEngine:
    return AsyncEngine.from_pretrained(folder, device="cpu", kv_cache_bytes=1 << 20, **options)


async def loaded(folder: Path, **options: Any) -> list[LoadProgress]:
    """What is told while an engine starts."""
    engine, told = new_engine(folder, **options), list[LoadProgress]()
    await engine.start(progress=told.append)
    await engine.aclose()
    return told


def of(told: list[LoadProgress], stage: str) -> list[tuple[int, int]]:
    return [(each.done, each.total) for each in told if each.stage == stage]


async def test_every_stage_goes_from_nothing_to_its_end(folder: Path, own_hook: Any) -> None:
    told = await loaded(folder)
    assert [stage for stage, _ in groupby(told, key=lambda each: each.stage)] == STAGES
    num_weights = len(tiny_llava(torch.float32).state_dict())
    for stage in ("libraries", "processor", "memory", "workers"):
        assert of(told, stage) == [(0, 1), (1, 1)]
    counted = [(done, num_weights) for done in range(1, num_weights + 1)]
    assert of(told, "weights") == [(0, 1), *counted]


async def test_a_model_that_is_defined_here(tmp_path: Path) -> None:
    config = own_config()
    config.save_pretrained(tmp_path)
    weights = weights_of(drawn(config))
    save_file(weights, tmp_path / "model.safetensors")
    told = of(await loaded(tmp_path, max_model_len=64), "weights")
    assert told == [(0, 1), *((done, len(weights)) for done in range(1, len(weights) + 1))]


def test_weights_in_several_files_are_counted_as_one(tmp_path: Path) -> None:
    model = tiny_llama(torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    told: list[LoadProgress] = []
    with Reporter(told.append).listens():
        found = dict(read_weights(tmp_path))
    state = model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert told == [LoadProgress("weights", 1 + i, len(state)) for i in range(len(state))]


async def test_it_is_told_on_the_loop_s_thread(folder: Path) -> None:
    threads: set[int] = set()
    loops: set[asyncio.AbstractEventLoop] = set()

    def note(_: LoadProgress) -> None:
        threads.add(threading.get_ident())
        loops.add(asyncio.get_running_loop())

    engine = new_engine(folder)
    await engine.start(progress=note)
    await engine.aclose()
    assert threads == {threading.get_ident()}
    assert loops == {asyncio.get_running_loop()}


async def test_a_callback_that_raises_is_dropped(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[LoadProgress] = []

    def fail(progress: LoadProgress) -> None:
        calls.append(progress)
        raise ValueError("no room to draw")

    engine = new_engine(folder)
    with caplog.at_level(logging.ERROR, "aioengine"):
        await engine.start(progress=fail)
    assert (await engine.generate("a", greedy(2))).token_ids
    await engine.aclose()
    assert calls == [LoadProgress("libraries", 0, 1)]
    (record,) = (each for each in caplog.records if each.levelno >= logging.ERROR)
    assert "no room to draw" in caplog.text
    assert record.name == "aioengine.instruments"


async def test_two_engines_hear_of_their_own_load(folder: Path, tmp_path: Path) -> None:
    tiny_llama(torch.float32).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    both = await asyncio.gather(loaded(folder), loaded(tmp_path))
    totals = [of(told, "weights")[-1] for told in both]
    sizes = [len(model.state_dict()) for model in (tiny_llava(), tiny_llama())]
    assert totals == [(size, size) for size in sizes]
    assert len(set(totals)) == 2


def test_a_load_that_fails_ends_no_stage_and_restores_the_hook(
    folder: Path, tmp_path: Path, own_hook: Any
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights.popitem()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    told: list[LoadProgress] = []
    with pytest.raises(ModelLoadError, match="not in the checkpoint"):
        asyncio.run(new_engine(tmp_path).start(progress=told.append))
    assert told[-1].stage == "weights"


def test_bars_of_other_threads_are_not_the_load_s(folder: Path) -> None:
    told: list[LoadProgress] = []
    drawn: list[list[int]] = []

    def draw() -> None:
        drawn.append(list(transformers_logging.tqdm([1, 2, 3], desc="the application's")))

    def interfere(progress: LoadProgress) -> None:
        told.append(progress)
        another = threading.Thread(target=draw)
        another.start()
        another.join()

    with Reporter(interfere).listens():
        load(folder)
    assert drawn == [[1, 2, 3]] * len(told)
    assert {each.total for each in told} == {len(tiny_llava().state_dict())}


def test_a_hook_set_meanwhile_stays(folder: Path) -> None:
    def other(bar: Any, args: Any, options: Any) -> Any:
        return bar(*args, **options)

    def interfere(progress: LoadProgress) -> None:
        transformers_logging.set_tqdm_hook(other)

    try:
        with Reporter(interfere).listens():
            load(folder)
    finally:
        left = transformers_logging.set_tqdm_hook(None)
    assert left is other


async def test_a_line_of_the_log_for_each_turn_of_its_life(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aioengine.engine.async_engine")
    name = "aioengine.engine.async_engine"
    async with new_engine(folder, quantization="int8") as engine:
        output = await engine.generate("The secret is here", greedy())
        blocks = engine.statistics().kv_blocks_total
    lines = [record.getMessage() for record in caplog.records if record.name == name]
    loaded, ready, closed = lines
    assert loaded == f"{folder.name} is being loaded"
    assert ready.startswith(f"{folder.name} is ready after ")
    assert f"; cpu, {torch.get_num_threads()} threads; float32; quantization int8; " in ready
    assert f"KV cache {blocks} blocks, {blocks * engine.config.block_size} tokens, 1 MiB" in ready
    assert "; encoder cache " in ready
    counts = "1 finished, 0 aborted, 0 rejected, 0 failed"
    assert closed == f"{folder.name} is closed; requests: {counts}"
    told = "\n".join(lines)
    assert "secret" not in told and output.text not in told
    assert str(folder.parent) not in told
