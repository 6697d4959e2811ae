"""An engine is a guest in its application: it changes nothing there and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop

from aioengine import AsyncEngine, MediaConfig
from aioengine.errors import MediaError
from tests.support.engines import Spans, engine_threads, greedy, running_engine, settled
from tests.support.tiny import save_tiny_llava, tiny_image


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_llava")
    save_tiny_llava(path)
    return path


def process_settings() -> dict[str, Any]:
    """What the whole process shares, and an embedded library must leave alone."""
    return {
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "wakeup": signal.set_wakeup_fd(-1),
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "random state": torch.get_rng_state().tolist(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "excepthooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "path": list(sys.path),
    }


async def use(engine: AsyncEngine) -> tuple[int, ...]:
    output = await engine.generate("What? <image>", greedy(), images=[tiny_image(1)])
    return output.token_ids


def test_the_process_is_left_as_it_was(folder: Path) -> None:
    """Without a loop around the snapshots, as a loop sets a wake-up descriptor of its own."""
    asyncio.run(_start_and_use(folder))  # imports are not the engine's to undo
    before = process_settings()
    asyncio.run(_start_and_use(folder))
    assert process_settings() == before


async def _start_and_use(folder: Path) -> tuple[int, ...]:
    async with running_engine(folder) as engine:
        return await use(engine)


FIRST_START = """
import asyncio, gc, locale, logging, multiprocessing, os, random, resource, signal, socket
import sys, threading, warnings

def settings():
    mask = os.umask(0)
    os.umask(mask)
    root = logging.getLogger()
    return {
        "environment": dict(os.environ),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "filters": list(warnings.filters),
        "warnings": warnings.showwarning,
        "locale": locale.setlocale(locale.LC_ALL),
        "logging": (root.level, list(root.handlers), root.manager.disable, logging.raiseExceptions),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "collector": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks), gc.get_debug()),
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "path": list(sys.path),
        "finders": list(sys.meta_path),
        "folder": (os.getcwd(), mask),
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "socket timeout": socket.getdefaulttimeout(),
        "random state": random.getstate(),
        "loop policy": type(asyncio.get_event_loop_policy()),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
    }

before = settings()
from aioengine import AsyncEngine, SamplingParams, demo_model, demo_images

assert settings() == before

async def main():
    options = {"device": "cpu", "kv_cache_bytes": 32 << 20}
    async with AsyncEngine.from_pretrained(demo_model(), **options) as engine:
        parts = [{"type": "image", "image": demo_images()[0]}, {"type": "text", "text": "What?"}]
        await engine.generate([{"role": "user", "content": parts}], SamplingParams(max_tokens=4))

asyncio.run(main())
after = settings()

# What importing torch, transformers and what they import does, and nobody can spare a host:
# torch._inductor names its cache folder for processes that it might start,
after["environment"].pop("TORCHINDUCTOR_CACHE_DIR", None)
# modules add filters for warnings of their own,
assert after["filters"][-len(before["filters"]):] == before["filters"]
after["filters"] = before["filters"]
# and transformers finds modules under their former names.
added = [finder for finder in after["finders"] if finder not in before["finders"]]
assert all(type(finder).__module__.startswith("transformers.") for finder in added)
after["finders"] = before["finders"]

import torch

assert torch.get_default_dtype() == torch.float32
assert torch.is_grad_enabled()
print(torch.get_num_threads(), [name for name in before if before[name] != after[name]])
"""


def test_a_first_start_leaves_the_process_as_it_was() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("KMP_DUPLICATE_LIB_OK", "TORCHINDUCTOR_CACHE_DIR"):
        environment.pop(name, None)  # as imports may have left them here
    command = [sys.executable, "-c", FIRST_START]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "1 []"


async def test_nothing_changes_while_it_runs(folder: Path) -> None:
    def settings() -> dict[str, Any]:
        return {
            "signals": [signal.getsignal(number) for number in signal.valid_signals()],
            "threads": torch.get_num_threads(),
            "dtype": torch.get_default_dtype(),
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "switch interval": sys.getswitchinterval(),
            "handler": asyncio.get_running_loop().get_exception_handler(),
            "factory": asyncio.get_running_loop().get_task_factory(),
        }

    before = settings()
    async with running_engine(folder) as engine:
        task = asyncio.create_task(use(engine))
        while not task.done():
            assert settings() == before
            await asyncio.sleep(0.002)  # a loop that never rests keeps the GIL from the engine
        await task
    assert settings() == before


async def test_no_processes_and_no_ports(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def note(name: str) -> Callable[..., Any]:
        def refuse(*args: Any, **options: Any) -> Any:
            used.append(name)
            raise AssertionError(name)

        return refuse

    for owner, name in (
        (os, "fork"),
        (os, "posix_spawn"),
        (subprocess, "Popen"),
        (multiprocessing.Process, "start"),
        (socket.socket, "bind"),
        (socket.socket, "connect"),
    ):
        monkeypatch.setattr(owner, name, note(name))
    async with running_engine(folder) as engine:
        await use(engine)
    assert used == []


def test_it_can_be_made_in_any_thread_and_started_in_another(folder: Path) -> None:
    expected = asyncio.run(_start_and_use(folder))
    found: list[Any] = []

    async def start(engine: AsyncEngine) -> None:
        async with engine:
            found.append(await use(engine))

    for run in (asyncio.run, uvloop.run):
        made: list[AsyncEngine] = []
        options = {"device": "cpu", "dtype": "float64", "max_model_len": 512}
        maker = threading.Thread(
            target=lambda made=made, options=options: made.append(
                AsyncEngine.from_pretrained(folder, **options)
            )
        )
        maker.start()
        maker.join()
        runner = threading.Thread(target=lambda run=run, made=made: run(start(made[0])))
        runner.start()
        runner.join(60)
    assert found == [expected, expected]
    assert engine_threads() == []


def test_it_runs_on_uvloop_as_on_asyncio(folder: Path) -> None:
    assert uvloop.run(_start_and_use(folder)) == asyncio.run(_start_and_use(folder))


def test_it_runs_in_a_debugging_loop(folder: Path) -> None:
    asyncio.run(_start_and_use(folder), debug=True)


@pytest.mark.parametrize("timeout_s", [0, 0.002, 0.01, 0.05])
async def test_time_limits_leave_the_engine_healthy(folder: Path, timeout_s: float) -> None:
    async with running_engine(folder) as engine:
        expected = await use(engine)
        await engine.reset_caches()

        async def give_up(number: int) -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    images = [tiny_image(number)]
                    await engine.generate(f"{number} <image>", greedy(400), images=images)

        kept, *_ = await asyncio.gather(use(engine), *(give_up(number) for number in range(6)))
        assert kept == expected
        await settled(engine)
        assert await use(engine) == expected


async def test_a_failing_task_group_takes_its_requests_with_it(folder: Path) -> None:
    async with running_engine(folder) as engine:
        steps = Spans(engine)

        async def fail() -> None:
            await steps.wait_for("long", 3)
            raise ValueError("the application's own")

        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(engine.generate("a", greedy(400), request_id="long"))
                tasks.create_task(engine.generate("<image>", greedy(400), images=[tiny_image(2)]))
                tasks.create_task(fail())
        assert caught.group_contains(ValueError)
        await settled(engine)
        assert engine.statistics().aborted == 2
        assert len(await use(engine)) == 8


async def test_the_applications_own_fetcher_runs_in_its_own_loop(folder: Path) -> None:
    loops = []

    async def fetcher(url: str) -> bytes:
        loops.append(asyncio.get_running_loop())
        raise OSError("no network here")

    async with running_engine(folder, media=MediaConfig(fetcher=fetcher)) as engine:
        with pytest.raises(MediaError):
            await engine.generate("<image>", greedy(), images=["https://example.com/a.png"])
    assert loops == [asyncio.get_running_loop()]


def test_importing_is_light_and_changes_nothing() -> None:
    code = """
import json, signal, sys, threading
before = [signal.getsignal(s) for s in signal.valid_signals()]
import aioengine
from aioengine import AsyncEngine, EngineConfig, SamplingParams, Prompt, TokenStream, errors
AsyncEngine.from_pretrained("nowhere", max_num_seqs=4)
heavy = {"torch", "transformers", "numpy", "PIL", "tokenizers"} & sys.modules.keys()
print(json.dumps({
    "heavy": sorted(heavy),
    "threads": threading.active_count(),
    "signals": before == [signal.getsignal(s) for s in signal.valid_signals()],
}))
"""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert json.loads(done.stdout) == {"heavy": [], "threads": 1, "signals": True}
    assert done.stderr == ""
