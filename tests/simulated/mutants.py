"""Faults put into the engine that the simulated device has to find: run by test_simulated.py.

By the clocks, when operators run as they are launched; and by what comes out, when they run later.
A mutant says by which of the two it has to be found: some leave no trace in one of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aioengine import AsyncEngine, SamplingParams
from aioengine.execution.model_runner import ModelRunner
from aioengine.kernels.transfer import StepBuffer, to_host
from aioengine.models.runtime import encoding
from aioengine.streams.cuda import TorchDriver
from aioengine.streams.device import ENCODER
from aioengine.types import Launched
from tests.simulated.device import DEVICE, LAUNCH_THREAD, SimulatedMode
from tests.simulated.order import Event
from tests.simulated.plugin import ORDER
from tests.support.tiny import save_tiny_llava, tiny_image

CUDA = torch.device("cuda", 0)
SEEDS = range(40)
"""Orders that are tried until one shows the fault."""
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
DEADLINE_S = 60
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mutants")
    save_tiny_llava(path, torch.float64)
    return path


@pytest.fixture(autouse=True)
def _order_as_before() -> Iterator[None]:
    yield
    DEVICE.reset()
    DEVICE.run_later(None if ORDER is None else int(ORDER))


class _Passed:
    """A mark that nobody waits for."""

    def synchronize(self) -> None:
        pass


def no_event_is_waited_for(patch: Patch) -> None:
    patch.setattr(TorchDriver, "mark", lambda self, name: _Passed())


def encoder_is_not_waited_for(patch: Patch) -> None:
    mark = TorchDriver.mark
    patch.setattr(
        TorchDriver, "mark", lambda self, name: _Passed() if name == ENCODER else mark(self, name)
    )


def rows_are_dropped_at_launch(patch: Patch) -> None:
    step = ModelRunner.step

    def stepped(self: ModelRunner, plan: Any) -> Any:
        launched = step(self, plan)
        for key, rows in list(self._rows.items()):  # the encoder's thread may add some meanwhile
            self._rows[key] = rows.clone()
        return launched

    patch.setattr(ModelRunner, "step", stepped)


def tokens_are_read_at_launch(patch: Patch) -> None:
    step = ModelRunner.step

    def stepped(self: ModelRunner, plan: Any) -> Any:
        result = step(self, plan).read()
        return Launched(lambda: result)

    patch.setattr(ModelRunner, "step", stepped)


def uploads_are_pageable(patch: Patch) -> None:
    empty = torch.empty
    patch.setattr(
        torch, "empty", lambda *args, pin_memory=False, **options: empty(*args, **options)
    )


def features_belong_to_another_stream(patch: Patch) -> None:
    upload = encoding.to_device

    def to_device(tensor: Tensor, device: torch.device) -> Tensor:
        if tensor.device.type == "cuda":
            return tensor
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            made = upload(tensor, device)
        torch.cuda.current_stream().wait_stream(side)
        return made

    patch.setattr(encoding, "to_device", to_device)


@dataclass(frozen=True)
class Mutant:
    """`at_once`: what the clocks and counts show; `later`: whether orders give wrong tokens."""

    put: Callable[[Patch], None]
    at_once: str = ""
    later: bool = True


MUTANTS = (
    Mutant(no_event_is_waited_for, "race"),
    Mutant(encoder_is_not_waited_for, "race"),
    Mutant(rows_are_dropped_at_launch, "freed while read"),
    Mutant(features_belong_to_another_stream, "freed while read"),
    Mutant(uploads_are_pageable, "wait", later=False),
    Mutant(tokens_are_read_at_launch),
)


async def answers(folder: Path) -> Sequence[Sequence[int]]:
    """Tokens of a text alone and of four images, two of which are equal."""
    sizes = {"kv_cache_bytes": 8 << 20, "max_model_len": 128, "check_model": False}
    options = {**sizes, "dtype": "float64", "enable_prefix_caching": False}
    async with AsyncEngine.from_pretrained(folder, device="cuda", **options) as engine:
        text = "USER: <image>\nWhat is it? ASSISTANT:"
        images = [[tiny_image(seed)] for seed in (0, 1, 2, 1)]
        asked = [engine.generate(text, PARAMS, images=each) for each in images]
        outputs = await asyncio.gather(engine.generate("USER: why?", PARAMS), *asked)
        return [output.token_ids for output in outputs]


def outcome(folder: Path) -> Any:
    """The tokens, or the error in their place."""

    async def run() -> Any:
        async with asyncio.timeout(DEADLINE_S):
            return await answers(folder)

    try:
        return asyncio.run(run())
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.200}"


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    DEVICE.run_later(None)
    tokens = outcome(folder)
    assert len(set(map(tuple, tokens))) == 4
    return tokens


def seen() -> set[str]:
    """What the device has noted, which is forgotten."""
    found = {each.kind for each in DEVICE.order.findings}
    found |= {"wait"} if DEVICE.waits or DEVICE.encoder_waits else set()
    DEVICE.reset()
    return found


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.put.__name__)
def test_by_what_the_device_notes(
    folder: Path, expected: Any, mutant: Mutant, monkeypatch: Patch
) -> None:
    DEVICE.run_later(None)
    mutant.put(monkeypatch)
    assert outcome(folder) == expected
    noted = dict(DEVICE.encoder_waits), dict(DEVICE.waits)
    print(f"{mutant.put.__name__}: {noted}")  # noqa: T201
    found = seen()
    assert mutant.at_once in found if mutant.at_once else not found


@pytest.mark.parametrize("mutant", [None, *MUTANTS], ids=lambda each: each and each.put.__name__)
def test_by_what_comes_out(
    folder: Path, expected: Any, mutant: Mutant | None, monkeypatch: Patch
) -> None:
    if mutant is not None:
        mutant.put(monkeypatch)
    wrong = {}
    for seed in SEEDS if mutant is not None and mutant.later else SEEDS[:1]:
        DEVICE.run_later(seed)
        found = outcome(folder)
        noted = dict(DEVICE.encoder_waits), dict(DEVICE.early)
        print(f"{mutant and mutant.put.__name__}, {seed}: {noted}")  # noqa: T201
        DEVICE.reset()
        if found != expected:
            wrong[seed] = found
            break
    print(f"{mutant and mutant.put.__name__}: {wrong}")  # noqa: T201
    assert bool(wrong) == (mutant is not None and mutant.later)


@pytest.mark.parametrize("is_reused_too_soon", [False, True])
def test_a_ring_of_buffers(is_reused_too_soon: bool, monkeypatch: Patch) -> None:
    """Steps' numbers lie in pinned memory, which the host writes again behind an event, or not."""
    monkeypatch.setattr(threading.current_thread(), "name", LAUNCH_THREAD)
    if is_reused_too_soon:
        monkeypatch.setattr(Event, "synchronize", lambda event: None)
    is_right = []
    for seed in SEEDS:
        DEVICE.run_later(seed)
        with SimulatedMode():
            buffer, results = StepBuffer(CUDA), []
            for number in range(7):
                staged = buffer.put([number] * 3)
                buffer.send()
                results += to_host([staged.tensor * 2])
            torch.cuda.synchronize()
        found = [result.tolist() for result in results]
        is_right.append(found == [[2 * number] * 3 for number in range(7)])
    DEVICE.waits.clear()
    assert not all(is_right) if is_reused_too_soon else all(is_right)
