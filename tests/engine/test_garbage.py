"""Collections stay short from the call of `start()` on, and the collector is as the host had it."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from aioengine import EngineConfig
from aioengine.engine.loading import devices, garbage
from aioengine.models.runtime.load_progress import Reporter

MAX_COLLECTION_S = 0.020
"""Thread CPU time of one collection. A full one over torch and transformers takes 0.2 s."""

BEGIN = """
import asyncio, gc, json, sys, threading, time, weakref
from collections import defaultdict
from types import MethodType

longest = defaultdict(float)
local = threading.local()

def watch(phase, info):
    if phase == "start":
        local.begin = time.thread_time()
    elif hasattr(local, "begin"):
        name = f"{threading.current_thread().name} {info['generation']}"
        longest[name] = max(longest[name], time.thread_time() - local.begin)

from aioengine import AsyncEngine, SamplingParams, demo_model, demo_images

def new_engine():
    return AsyncEngine.from_pretrained(demo_model(), device="cpu", kv_cache_bytes=32 << 20)

SHORT = SamplingParams(temperature=0, max_tokens=4)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
"""

COLLECTIONS = (
    BEGIN
    + """
images = [path.read_bytes() for path in demo_images()]

def image_prompt(number):
    parts = [{"type": "image", "image": images[number % len(images)]}]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Describe it."}]}]

async def ask(engine, number):
    kind = number % 4
    if kind == 0:
        await engine.generate("Hello " * (number % 9 + 1), SHORT)
    elif kind == 1:
        await engine.generate(image_prompt(number), SHORT)
    elif kind == 2:
        async with engine.stream(image_prompt(number), SHORT) as stream:
            async for _ in stream:
                pass
    else:
        task = asyncio.create_task(engine.generate(image_prompt(number), ENDLESS))
        await asyncio.wait([task], timeout=0.001 * (number % 20))
        task.cancel()
        await asyncio.wait([task])

async def stream(engine):
    while True:
        async with engine.stream("Once", ENDLESS) as stream:
            async for _ in stream:
                pass

async def main(num_requests):
    before = gc.get_threshold()
    first = new_engine()
    gc.callbacks.append(watch)
    await first.start()
    streaming = asyncio.create_task(stream(first))
    second = new_engine()
    await second.start()
    assert gc.isenabled() and gc.get_threshold() == before
    for begin in range(0, num_requests, 10):
        await asyncio.gather(*(ask(second, begin + number) for number in range(10)))
    assert second.statistics().finished >= num_requests // 2
    await second.aclose()
    streaming.cancel()
    await asyncio.wait([streaming])
    await first.aclose()
    gc.collect()  # nor is the host's own next full collection a long one
    assert gc.isenabled() and gc.get_threshold() == before and gc.callbacks == [watch]
    print(json.dumps(longest))

asyncio.run(main(int(sys.argv[1])))
"""
)

WEIGHTS = (
    BEGIN
    + """
def alive(weights):
    return sum(weight() is not None for weight in weights)

kept, streams = [], []  # a host may keep either
threads = []  # in which weights were let go of

def note(weight):
    threads.append(threading.current_thread().name)

def fail(runner, plan):
    raise RuntimeError("the device is gone")

async def load_and_close(die=False):
    engine = new_engine()
    await engine.start()
    model = engine._core.loaded.runner.model.model
    weights = [weakref.ref(weight, note) for weight in model.parameters()]
    assert alive(weights) > 100
    del model
    early = asyncio.create_task(engine.generate("Hello", SHORT))
    await asyncio.sleep(0)
    early.cancel()  # while it is prepared
    await asyncio.wait([early])
    del early
    streams.append(engine.stream("Hello", SHORT))
    await streams[-1].result()
    if die:
        engine._core.loaded.runner.step = MethodType(fail, engine._core.loaded.runner)
        await asyncio.gather(engine.generate("Hello", SHORT), return_exceptions=True)
    await engine.aclose()
    assert engine.statistics().finished == 1
    if die:
        kept.append(engine)
    return weights

async def main():
    found, sizes = {}, []
    gc.callbacks.append(lambda phase, info: None)
    first = await load_and_close()  # whose own objects are frozen
    gc.disable()
    found["closed"] = alive(first) + alive(await load_and_close())
    found["on_the_loop"] = sum(name != "aioengine-device" for name in threads)
    gc.enable()
    dead = await load_and_close(die=True)
    gc.collect()
    found["dead"] = alive(dead)
    for _ in range(5):
        await load_and_close()
        gc.collect()
        sizes.append(len(gc.get_objects()) + gc.get_freeze_count())
    found["grown"] = sizes[-1] - sizes[0]
    print(json.dumps(found))

asyncio.run(main())
"""
)


def printed(code: str, *arguments: str) -> dict[str, float]:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_no_collection_is_long() -> None:
    longest = printed(COLLECTIONS, "100")
    assert any(name.startswith("aioengine") for name in longest)  # the load's, at least
    assert max(longest.values()) < MAX_COLLECTION_S, longest


def test_a_closed_engine_lets_go_of_its_model() -> None:
    found = printed(WEIGHTS)
    assert (found["closed"], found["dead"]) == (0, 0)
    assert found["on_the_loop"] == 0, "gigabytes take a second"
    assert found["grown"] < 100


def test_what_a_library_catches_and_keeps_holds_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[ImportError] = []

    def import_libraries() -> None:
        try:
            raise ImportError("an extra that is not there")
        except ImportError as error:
            kept.append(error)

    model: set[int] = set()
    gone = weakref.ref(model)
    loading = SimpleNamespace(load=lambda *_: models.pop())
    models = [model]
    del model
    monkeypatch.setattr(devices, "import_libraries", import_libraries)
    monkeypatch.setattr(devices, "import_module", lambda name: loading)
    devices.load_model("", EngineConfig(), Reporter(None))
    assert kept and gone() is None


# ---- the host's settings


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """As in a process that has not loaded yet: what was frozen and imported, in order."""
    log: list[Any] = []
    thresholds = gc.get_threshold()
    monkeypatch.setattr(garbage, "_are_frozen", False)
    monkeypatch.setattr(garbage, "LIBRARIES", ("a library",))
    monkeypatch.setattr(garbage, "import_module", lambda name: log.append(gc.get_threshold()))
    monkeypatch.setattr(gc, "freeze", lambda: log.append("freeze"))
    yield log
    gc.enable()
    gc.set_threshold(*thresholds)


def test_no_full_collections_during_the_import(imports: list[Any]) -> None:
    gc.set_threshold(50_000, 20, 30)
    garbage.import_libraries()
    during, frozen = imports
    assert during[:2] == (700, 10) and during[2] > 1 << 30
    assert frozen == "freeze"
    assert gc.isenabled() and gc.get_threshold() == (50_000, 20, 30)


def test_once_in_a_process(imports: list[Any]) -> None:
    before = gc.get_threshold()
    garbage.import_libraries()
    garbage.import_libraries()
    assert imports[1:] == ["freeze", before]


def test_an_import_that_fails(imports: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError(name)

    before = gc.get_threshold()
    with monkeypatch.context() as patch:
        patch.setattr(garbage, "import_module", fail)
        with pytest.raises(ModuleNotFoundError, match="a library"):
            garbage.import_libraries()
    assert gc.get_threshold() == before and not imports
    garbage.import_libraries()
    assert imports[1:] == ["freeze"]


@pytest.mark.parametrize("how", [gc.disable, lambda: gc.set_threshold(0)])
def test_a_host_without_collections(imports: list[Any], how: Any) -> None:
    how()
    before = gc.isenabled(), gc.get_threshold()
    garbage.import_libraries()
    assert imports == [before[1]]
    assert (gc.isenabled(), gc.get_threshold()) == before


def test_a_host_that_changes_its_thresholds_meanwhile(
    imports: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "import_module", lambda name: gc.set_threshold(800, 5, 5))
    garbage.import_libraries()
    assert gc.get_threshold() == (800, 5, 5)


def test_two_at_once(imports: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_threshold()
    begun, go_on = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        begun.set()
        assert go_on.wait(20)

    monkeypatch.setattr(garbage, "import_module", wait)
    threads = [threading.Thread(target=garbage.import_libraries) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert begun.wait(20)
    go_on.set()
    for thread in threads:
        thread.join()
    assert imports == ["freeze"]
    assert gc.get_threshold() == before
