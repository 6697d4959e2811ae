"""Worker processes: the same results and errors as a thread's, and nothing left of them."""

from __future__ import annotations

import asyncio
import importlib
import io
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
import uvloop
from PIL import Image

import aioengine
from aioengine.config import EngineConfig, MediaConfig
from aioengine.errors import (
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    MediaError,
    ModelLoadError,
)
from aioengine.media_pipeline import worker_pool as pool_module
from aioengine.media_pipeline.worker_pool import ProcessorPool
from aioengine.media_pipeline.worker_process import WorkerProcess
from aioengine.processors.embeddings import EmbeddingItems
from aioengine.processors.item_work import Promise, Worked, WorkItem, work_item
from aioengine.processors.items import (
    ImageProcessorItems,
    MultiModalDataItems,
)
from aioengine.processors.media.image import open_image
from aioengine.processors.processor import BaseMultiModalProcessor
from aioengine.types import Embeddings

FOLDER = aioengine.demo_model()
MEDIA = MediaConfig(max_image_pixels=4_000_000)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

STRANGE = '''
"""A processor that does what an option tells it, found by workers on the host's path alone."""

import faulthandler, os, sys

import torch
from aioengine.errors import InvalidRequestError
from aioengine.models.llava import *
from aioengine.models.llava import LlavaMultiModalProcessor


class Strange(LlavaMultiModalProcessor):
    def process(self, items, mm_kwargs):
        options = dict(mm_kwargs)
        do = options.pop("do", None)
        if do == "wait":
            with open(options.pop("at"), "wb") as pipe:  # until somebody reads
                pipe.write(str(os.getpid()).encode())
            with open(options.pop("until"), "rb") as pipe:
                pipe.read()
        elif do == "segfault":
            faulthandler._sigsegv()
        elif do == "leave":
            sys.exit(3)
        elif do == "print":
            print("nonsense" * 1000, flush=True)
            os.write(1, b"more nonsense")
            print(sys.stdin.read(), flush=True)
        elif do == "fail":
            raise KeyError("secret")
        elif do == "tell":
            raise InvalidRequestError(
                "told",
                parameter="do",
                value=(torch.get_num_threads(), sys.flags.safe_path, options, self.info.model_id),
            )
        return super().process(items, options)
'''


# ---- what is given to workers


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "strange_processor_of_pool_tests.py").write_text(STRANGE)
    sys.path.append(str(folder))
    yield importlib.import_module("strange_processor_of_pool_tests")
    sys.path.remove(str(folder))
    del sys.modules["strange_processor_of_pool_tests"]


def make_processor(kind: type[Any] | None = None) -> BaseMultiModalProcessor:
    from transformers import AutoConfig

    from aioengine.models.runtime.registry import resolve
    from aioengine.processors.info import load_context
    from aioengine.processors.registry import MULTIMODAL_REGISTRY

    hf_config = AutoConfig.from_pretrained(FOLDER)
    context = load_context(FOLDER, hf_config=hf_config, mm_processor_kwargs={"size": None})
    context.mm_processor_kwargs = {}
    found = MULTIMODAL_REGISTRY.create_processor(resolve(hf_config.architectures), context)
    return found if kind is None else kind(found.info, found.dummy_inputs)


@pytest.fixture(scope="module")
def front(strange: ModuleType) -> BaseMultiModalProcessor:
    return make_processor(strange.Strange)


def config(workers: int) -> EngineConfig:
    return EngineConfig(processor_workers=f"process:{workers}", media=MEDIA)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(front: BaseMultiModalProcessor) -> AsyncIterator[ProcessorPool]:
    pool = ProcessorPool(FOLDER, config(2), front)
    await pool.start()
    yield pool
    await pool.aclose()


def pil_image(width: int = 90, height: int = 60, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def work_on(content: object, parameter: str = "images[3]", **options: Any) -> WorkItem:
    """An item as the intake gives it: opened, and its content identified."""
    source: Any = content
    if not isinstance(content, Embeddings):
        source = open_image(content, MEDIA, parameter=parameter)
        source.identity()
    promise = options.pop("promise", None)
    return WorkItem(
        source=source,
        modality="image",
        index=3,
        parameter=parameter,
        mm_kwargs=options,
        promise=promise,
    )


def promise_for(front: BaseMultiModalProcessor) -> Promise:
    """What the layout of a prompt with four images has for the last one."""
    headers = [open_image(pil_image(seed=i), MEDIA, parameter="x").header() for i in range(4)]
    items = MultiModalDataItems({"image": ImageProcessorItems(headers)})
    text = front.dummy_inputs.get_dummy_text({"image": 4})
    return Promise.of(front.layout(text, items, {}), "image", 3)


def same(one: Worked, other: Worked) -> bool:
    assert list(one.item) == list(other.item)
    for name in one.item:
        assert one.item[name].dtype == other.item[name].dtype
        assert torch.equal(one.item[name], other.item[name])
        assert one.item.keep_on_cpu(name) == other.item.keep_on_cpu(name)
    return True


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(pil_image(), "JPEG", exif=exif)


def see_through() -> Image.Image:
    image = pil_image().convert("P")
    image.info["transparency"] = 5
    return image


def of_float64() -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).random((50, 40, 4))


IMAGES: dict[str, Callable[[], object]] = {
    "png": lambda: encoded(pil_image()),
    "jpeg": lambda: encoded(pil_image(300, 200), "JPEG"),
    "turned": rotated,
    "memory": lambda: pil_image(1000, 700),
    "opened": lambda: Image.open(io.BytesIO(rotated())),
    "palette": see_through,
    "alpha": lambda: pil_image().convert("RGBA"),
    "deep": lambda: Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30)),
    "array": lambda: np.asarray(pil_image()),
    "grey": lambda: np.asarray(pil_image())[..., 0],
    "strided": lambda: np.asarray(pil_image())[::2, ::-1],
    "floats": of_float64,
    "big-endian": lambda: of_float64().astype(">f4"),
    "tensor": lambda: torch.from_numpy(of_float64()).permute(2, 0, 1).to(torch.bfloat16),
}


@pytest.mark.parametrize("make", IMAGES.values(), ids=IMAGES)
async def test_results_are_a_threads(
    make: Callable[[], object], pool: ProcessorPool, front: BaseMultiModalProcessor
) -> None:
    work = work_on(make(), promise=promise_for(front))
    worked = await pool.run(work)
    assert same(work_item(front, work), worked)
    assert worked.began <= worked.decoded <= worked.processed


async def test_embeddings_too(pool: ProcessorPool, front: BaseMultiModalProcessor) -> None:
    rows = torch.randn(promise_for(front).length, front.info.get_hidden_size())
    given = Embeddings(rows, grid=[1, 2, 3], scale=0.5, flag=True)
    items = EmbeddingItems([given], modality="image", hidden_size=rows.shape[1])
    work = work_on(Embeddings(items.get(0), **items.extra[0]), promise=promise_for(front))
    worked = await pool.run(work)
    assert same(work_item(front, work), worked)
    assert worked.item.keys() == {"image_embeds", "grid", "scale", "flag"}


async def test_options_go_with_the_item(
    pool: ProcessorPool, front: BaseMultiModalProcessor
) -> None:
    options = {"do_normalize": False, "images_kwargs": {"image_mean": (0.1, 0.2, 0.3)}}
    work = work_on(pil_image(), **options)
    worked = await pool.run(work)
    assert same(work_item(front, work), worked)
    assert not torch.equal(
        worked.item["pixel_values"], work_item(front, work_on(pil_image())).item["pixel_values"]
    )


async def test_a_worker_is_set_up_as_it_should_be(pool: ProcessorPool) -> None:
    options = {"a": (1, [2, (3,)]), "b": {"c": None, "d": float("inf"), "e\ud800": True}}
    with pytest.raises(InvalidRequestError) as caught:
        await pool.run(work_on(pil_image(), do="tell", **options))
    assert caught.value.value == (1, True, options, str(FOLDER))


# ---- errors


async def error_of(work: WorkItem, run: Callable[[WorkItem], Any]) -> Exception:
    """What it raises here or in a worker; a thread's error as the engine hands it on."""
    with pytest.raises(Exception) as caught:
        result = run(work)
        if asyncio.iscoroutine(result):
            await result
    return aioengine.errors.typed(caught.value)


def cut_jpeg() -> bytes:
    return encoded(pil_image(300, 200), "JPEG")[:-500]


ERRORS: dict[str, tuple[Callable[[], object], dict[str, Any]]] = {
    "cut": (cut_jpeg, {}),
    "too bright": (lambda: np.full((8, 8, 3), 2.0), {}),
    "processor": (pil_image, {"size": "nonsense"}),
    "unknown size": (pil_image, {"size": {"a": 1}}),
    "our own fault": (pil_image, {"do": "fail"}),
    "of another kind": (pil_image, {"do": "tell", "x": 1}),
    "no such layout": (pil_image, {"promise": Promise(2, ((0, 2),))}),
    "no such runs": (pil_image, {"promise": Promise(3, ((0, 1), (2, 3)))}),
}


@pytest.mark.parametrize(("make", "options"), ERRORS.values(), ids=ERRORS)
async def test_errors_are_a_threads(
    make: Callable[[], object],
    options: dict[str, Any],
    pool: ProcessorPool,
    front: BaseMultiModalProcessor,
) -> None:
    work = work_on(make(), **options)
    expected = await error_of(work, lambda work: work_item(front, work))
    found = await error_of(work, pool.run)
    assert type(found) is type(expected)
    assert str(found) == str(expected)
    if isinstance(expected, InvalidRequestError) and options.get("do") != "tell":
        assert isinstance(found, InvalidRequestError)
        assert (found.parameter, found.value) == (expected.parameter, expected.value)
    assert same(await pool.run(work_on(pil_image())), work_item(front, work_on(pil_image())))


async def test_an_unexpected_error_tells_where_it_was_and_nothing_else(pool: ProcessorPool) -> None:
    with pytest.raises(EngineError, match="KeyError") as caught:
        await pool.run(work_on(pil_image(), do="fail"))
    cause = str(caught.value.__cause__)
    assert "strange_processor_of_pool_tests.py" in cause
    assert not cause.count("secret") - cause.count('KeyError("secret")')  # the source line has it


async def test_a_image_that_changes_is_refused(pool: ProcessorPool) -> None:
    image = pil_image()
    work = work_on(image)
    image.putpixel((0, 0), (1, 2, 3))
    with pytest.raises(MediaError, match=r"^images\[3\] .* was changed"):
        await pool.run(work)


async def test_options_that_are_no_plain_values_are_refused(pool: ProcessorPool) -> None:
    for value in (object(), np.zeros(2), b"", {1: 2}, {"x": [{3}]}):
        with pytest.raises(
            InvalidRequestError, match="cannot be given to a worker process"
        ) as caught:
            await pool.run(work_on(pil_image(), some=value))
        assert str(caught.value.parameter).startswith("mm_processor_kwargs['some']")
    assert pool.statistics().queued == 0


async def test_what_libraries_print_disturbs_nobody(
    pool: ProcessorPool, front: BaseMultiModalProcessor
) -> None:
    worked = await pool.run(work_on(pil_image(), do="print"))
    assert same(worked, work_item(front, work_on(pil_image())))


# ---- life and death


class Gate:
    """A pair of named pipes: an item that waits in a worker, and says so."""

    def __init__(self, folder: Path) -> None:
        self.at, self.until = folder / "at", folder / "until"
        for path in (self.at, self.until):
            os.mkfifo(path)
        self.options = {"do": "wait", "at": str(self.at), "until": str(self.until)}

    async def reached(self) -> int:
        """Waits until a worker works on the item; its process id."""
        return int(await asyncio.to_thread(self.at.read_bytes))

    def open(self) -> None:
        """Lets the worker go on."""
        self.until.write_bytes(b"")


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@contextmanager
def watched(process_id: int) -> Iterator[Callable[[], bool]]:
    """Whether a process ends, be it nobody's child of ours; waits for it."""
    fd = os.pidfd_open(process_id)
    try:
        yield lambda: bool(select.select([fd], [], [], 60)[0])
    finally:
        os.close(fd)


def descendants() -> set[int]:
    """Child processes of this one, dead ones that nobody waited for too."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        # A thread may end between the listing and the reading.
        with suppress(FileNotFoundError, ProcessLookupError):
            found |= set(map(int, (task / "children").read_text().split()))
    return found


def descriptors() -> set[str]:
    """What this process has open."""
    return {
        f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}"
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    }


async def restarted(pool: ProcessorPool, workers: int = 2) -> None:
    """Waits until all workers are up again, by keeping them all busy once."""
    while pool.statistics().workers < workers:
        await pool.run(work_on(pil_image()))
    await asyncio.gather(*(pool.run(work_on(pil_image())) for _ in range(8)))


async def test_a_killed_worker_fails_its_item_alone(
    pool: ProcessorPool, front: BaseMultiModalProcessor, gate: Gate
) -> None:
    deaths = pool.statistics().deaths
    doomed = asyncio.create_task(pool.run(work_on(pil_image(), **gate.options)))
    process_id = await gate.reached()
    others = [asyncio.create_task(pool.run(work_on(pil_image(seed=i)))) for i in range(5)]
    os.kill(process_id, signal.SIGKILL)
    with pytest.raises(MediaError) as caught:
        await doomed
    text = "images[3] could not be processed: its worker process was ended by signal 9"
    assert (str(caught.value), caught.value.parameter) == (text, "images[3]")
    for number, other in enumerate(others):
        assert same(await other, work_item(front, work_on(pil_image(seed=number))))
    await restarted(pool)
    assert process_id not in pool.process_ids
    assert pool.statistics().deaths == deaths + 1


async def test_cancelled_items(pool: ProcessorPool, tmp_path: Path) -> None:
    gates = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        gates.append(Gate(tmp_path / str(number)))
    running = [
        asyncio.create_task(pool.run(work_on(pil_image(), **gate.options))) for gate in gates
    ]
    before = {await gate.reached() for gate in gates}
    queued = [asyncio.create_task(pool.run(work_on(pil_image(), do="segfault"))) for _ in range(3)]
    last = asyncio.create_task(pool.run(work_on(pil_image())))
    await asyncio.sleep(0)
    assert pool.statistics().queued == 4
    for task in (*running, *queued):
        task.cancel()
    results = await asyncio.gather(*running, *queued, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    statistics = pool.statistics()
    assert (statistics.working, statistics.queued) == (2, 1)
    for gate in gates:
        await asyncio.to_thread(gate.open)
    assert await last
    # The same workers: they finished, and what was dropped crashed nobody.
    assert set(pool.process_ids) == before


async def test_first_come_first_served(
    pool: ProcessorPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    work = WorkerProcess.work

    def note(worker: WorkerProcess, item: WorkItem) -> Any:
        begun.append(item.parameter)
        return work(worker, item)

    monkeypatch.setattr(WorkerProcess, "work", note)
    names = [f"images[{number}]" for number in range(12)]
    await asyncio.gather(*(pool.run(work_on(pil_image(), name)) for name in names))
    assert begun == names


async def test_nothing_leaks(pool: ProcessorPool) -> None:
    """Over many items, one that crashes its worker, and workers that die idle."""
    await restarted(pool)
    before, shared = descriptors(), set(os.listdir("/dev/shm"))
    for number in range(50):
        await pool.run(work_on(pil_image(seed=number)))
    assert descriptors() == before
    with pytest.raises(MediaError, match="was ended by signal 11"):
        await pool.run(work_on(pil_image(), do="segfault"))
    await restarted(pool)
    for process_id in pool.process_ids:
        os.kill(process_id, signal.SIGKILL)
    # Handed over before the pool can know of it, so nobody is to blame.
    await asyncio.gather(*(pool.run(work_on(pil_image())) for _ in range(4)))
    await restarted(pool)
    assert len(descriptors()) == len(before)
    assert set(os.listdir("/dev/shm")) == shared
    assert descendants() == set(pool.process_ids)


async def test_contents_do_not_stay_in_memory(pool: ProcessorPool) -> None:
    await pool.run(work_on(pil_image(1500, 1000)))
    with pytest.raises(MediaError):
        await pool.run(work_on(cut_jpeg()))
    sizes = [
        worker._memory.read(0) and os.fstat(worker._memory.fd).st_size for worker in pool._workers
    ]
    assert not any(sizes)


# ---- pools of their own


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
async def test_a_whole_life(run: Any, front: BaseMultiModalProcessor, gate: Gate) -> None:
    """On a fresh loop, closed while one item is worked on and others wait."""

    async def life() -> None:
        pool = ProcessorPool(FOLDER, config(1), front, job_limit_s=3600)
        with pytest.raises(EngineClosedError):
            await pool.run(work_on(pil_image()))
        await pool.start()
        assert same(await pool.run(work_on(pil_image())), work_item(front, work_on(pil_image())))
        (process_id,) = pool.process_ids
        tasks = [asyncio.create_task(pool.run(work_on(pil_image(), **gate.options)))]
        assert await gate.reached() == process_id
        tasks += [asyncio.create_task(pool.run(work_on(pil_image()))) for _ in range(3)]
        await asyncio.sleep(0)
        assert pool.statistics().queued == 3
        await asyncio.gather(pool.aclose(), pool.aclose())
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineClosedError) for result in results), results
        with pytest.raises(EngineClosedError):
            await pool.run(work_on(pil_image()))
        assert pool.statistics().workers == 0
        assert process_id not in descendants()

    def on_its_own_loop() -> None:
        run(life())

    uvloop.new_event_loop().close()  # opens what it keeps for the process
    before = descriptors()
    await asyncio.to_thread(on_its_own_loop)
    assert descriptors() == before


async def test_an_item_that_takes_too_long(front: BaseMultiModalProcessor, gate: Gate) -> None:
    pool = ProcessorPool(FOLDER, config(1), front, job_limit_s=1.5)
    await pool.start()
    try:
        work = work_on(pil_image(), **gate.options)
        with pytest.raises(MediaError, match=r"^images\[3\] could .* longer than 1.5 s$"):
            await asyncio.gather(pool.run(work), gate.reached())
    finally:
        await pool.aclose()


async def test_cancelled_while_it_starts(
    front: BaseMultiModalProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, prepare, prepared = descendants(), WorkerProcess.prepare, asyncio.Event()

    async def tell(worker: WorkerProcess, setup: bytes) -> None:
        prepared.set()
        await prepare(worker, setup)

    monkeypatch.setattr(WorkerProcess, "prepare", tell)
    pool = ProcessorPool(FOLDER, config(2), front)
    start = asyncio.create_task(pool.start())
    await prepared.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert descendants() == before
    await pool.aclose()


async def test_closed_as_soon_as_it_is_started(
    front: BaseMultiModalProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def prepare(worker: WorkerProcess, setup: bytes) -> None:
        pass

    monkeypatch.setattr(WorkerProcess, "prepare", prepare)
    before, children = descriptors(), descendants()
    pool = ProcessorPool(FOLDER, config(2), front)
    await pool.start()
    await pool.aclose()
    assert (descriptors(), descendants()) == (before, children)
    assert pool.process_ids == ()


async def test_a_pool_that_nobody_closes_ends_with_its_loop(
    front: BaseMultiModalProcessor,
) -> None:
    process_ids: list[int] = []

    async def forgets() -> None:
        pool = ProcessorPool(FOLDER, config(1), front)
        await pool.start()
        process_ids.extend(pool.process_ids)

    await asyncio.to_thread(lambda: asyncio.run(forgets()))
    assert not set(process_ids) & descendants()


async def test_a_folder_without_a_model(tmp_path: Path, front: BaseMultiModalProcessor) -> None:
    before, children = len(descriptors()), descendants()
    pool = ProcessorPool(tmp_path, config(1), front)
    with pytest.raises(ModelLoadError, match=r"a processor worker could not start: .*Error"):
        await pool.start()
    with pytest.raises(EngineClosedError):
        await pool.run(work_on(pil_image()))
    await pool.aclose()
    assert (len(descriptors()), descendants()) == (before, children)


async def test_no_interpreter(
    front: BaseMultiModalProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for executable, reason in (("/nowhere/python", "could not start"), ("", "needs a POSIX")):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(ModelLoadError, match=reason):
            await ProcessorPool(FOLDER, config(1), front).start()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ModelLoadError, match="exit status 1; see its standard error"):
        await ProcessorPool(FOLDER, config(1), front).start()


async def test_classes_that_a_worker_cannot_find(front: BaseMultiModalProcessor) -> None:
    class Local(type(front)):  # type: ignore[misc]
        pass

    local = Local(front.info, front.dummy_inputs)
    with pytest.raises(ModelLoadError, match="Local at the top of a module"):
        ProcessorPool(FOLDER, config(1), local)
    main = type("Main", (type(front),), {"__module__": "__main__"})
    sys.modules["__main__"].Main = main  # type: ignore[attr-defined]
    with pytest.raises(ModelLoadError, match="which __main__ is not"):
        ProcessorPool(FOLDER, config(1), main(front.info, front.dummy_inputs))


async def test_options_of_the_engine_that_are_no_plain_values() -> None:
    front = make_processor()
    front.info.ctx.mm_processor_kwargs = {"x": object()}
    with pytest.raises(ModelLoadError, match="mm_processor_kwargs"):
        ProcessorPool(FOLDER, config(1), front)


async def test_items_are_refused_while_no_worker_starts(
    front: BaseMultiModalProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ProcessorPool(FOLDER, config(1), front)
    await pool.start()
    prepare, failures = WorkerProcess.prepare, asyncio.Event()
    pauses: list[int] = []

    async def refuse(worker: WorkerProcess, setup: bytes) -> None:
        raise ModelLoadError("no more memory")

    async def no_pause(failed: int) -> None:
        pauses.append(failed)
        if failed >= pool_module.MAX_START_FAILURES:
            failures.set()
            await released.wait()

    released = asyncio.Event()
    monkeypatch.setattr(WorkerProcess, "prepare", refuse)
    monkeypatch.setattr(pool, "_pause", no_pause)
    doomed = asyncio.create_task(pool.run(work_on(pil_image(), do="leave")))
    queued = asyncio.create_task(pool.run(work_on(pil_image())))
    with pytest.raises(MediaError, match="exit status 3"):
        await doomed
    for run in (queued, pool.run(work_on(pil_image()))):
        with pytest.raises(EngineError, match=r"no processor worker .*: no more memory") as caught:
            await run
        assert not isinstance(caught.value, ModelLoadError)
        await failures.wait()
    assert pauses == [0, 1, 2, 3]
    # It goes on trying, and one that starts makes all well again.
    serve, serving = pool._serve, asyncio.Event()

    async def tell(worker: WorkerProcess) -> bool:
        serving.set()
        return await serve(worker)

    monkeypatch.setattr(pool, "_serve", tell)
    monkeypatch.setattr(WorkerProcess, "prepare", prepare)
    released.set()
    await serving.wait()
    assert await pool.run(work_on(pil_image()))
    await pool.aclose()


# ---- hosts


HOST = """
import asyncio, os, sys

import numpy as np

with open(sys.argv[2], "a") as file:
    file.write("the host runs\\n")

from aioengine import EngineConfig, demo_model
from aioengine.models.runtime.registry import resolve
from aioengine.media_pipeline.worker_pool import ProcessorPool
from aioengine.processors.info import load_context
from aioengine.processors.media.image import open_image
from aioengine.processors.registry import MULTIMODAL_REGISTRY
from aioengine.processors.item_work import WorkItem
from transformers import AutoConfig

sys.path.append(sys.argv[1])
from strange_processor_of_pool_tests import Strange


async def main():
    hf_config = AutoConfig.from_pretrained(demo_model())
    context = load_context(demo_model(), hf_config=hf_config)
    found = MULTIMODAL_REGISTRY.create_processor(resolve(hf_config.architectures), context)
    front = Strange(found.info, found.dummy_inputs)
    config = EngineConfig(processor_workers="process:2")
    pool = ProcessorPool(demo_model(), config, front)
    await pool.start()
    print(*pool.process_ids, flush=True)
    array = np.zeros((8, 8, 3), np.uint8)
    work = WorkItem(
        source=open_image(array, config.media, parameter="images[0]"),
        modality="image",
        index=0,
        parameter="images[0]",
        mm_kwargs={"do": "wait", "at": sys.argv[3], "until": sys.argv[4]},
    )
    await pool.run(work)

asyncio.run(main())
"""


async def test_a_killed_host(tmp_path: Path, strange: ModuleType, gate: Gate) -> None:
    """No worker outlives it, neither an idle one nor one deep in an item.

    The host's script has no guard, and would start workers forever if they ran it too.
    """
    script, runs = tmp_path / "host.py", tmp_path / "runs"
    script.write_text(HOST)
    folder = Path(str(strange.__file__)).parent
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, *map(str, (script, folder, runs, gate.at, gate.until))],
        env={**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as host:
        assert host.stdout is not None
        busy = await gate.reached()
        workers = [int(word) for word in host.stdout.readline().split()]
        assert busy in workers and len(workers) == 2
        with watched(workers[0]) as first_ends, watched(workers[1]) as second_ends:
            host.kill()
            host.wait()
            assert await asyncio.to_thread(first_ends)
            assert await asyncio.to_thread(second_ends)
    assert runs.read_text() == "the host runs\n"
