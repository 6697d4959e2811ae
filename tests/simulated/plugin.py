"""A plugin of pytest with which tests of a GPU run on the simulated one. run.py loads it.

SIMULATED_GUARD names the library that guard.cpp was built into. A test fails where operators were
not ordered, memory was freed while read, or the launch thread waited for the device.
SIMULATED_MUTANT puts a fault into the project that has to be found: a name of MUTANTS.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

torch.ops.load_library(os.environ["SIMULATED_GUARD"])

from aioengine.engine import loader  # noqa: E402
from aioengine.execution.model_runner import ModelRunner  # noqa: E402
from aioengine.kernels import transfer  # noqa: E402
from aioengine.streams.cuda import TorchDriver  # noqa: E402
from tests.simulated import operators, order  # noqa: E402, F401
from tests.simulated.device import DEVICE, SimulatedMode, install  # noqa: E402

ENCODER_THREAD = "aioengine-encoder"


def _launch_on_it() -> None:
    """Have the launch threads and the loading of models make their tensors on the device."""
    start, attach, stop = TorchDriver.start, TorchDriver.attach, TorchDriver.stop
    load = loader.load

    def started(self: TorchDriver) -> None:
        SimulatedMode().__enter__()
        start(self)

    def attached(self: TorchDriver) -> None:
        if threading.current_thread().name == ENCODER_THREAD:
            SimulatedMode().__enter__()
        attach(self)

    def stopped(self: TorchDriver) -> None:
        with DEVICE.waiting_allowed():
            stop(self)

    def loaded(model: Any, config: Any) -> Any:
        if not config.device.startswith("cuda"):
            return load(model, config)
        with SimulatedMode(), DEVICE.waiting_allowed():
            return load(model, config)

    TorchDriver.start = started  # type: ignore[method-assign]
    TorchDriver.attach = attached  # type: ignore[method-assign]
    TorchDriver.stop = stopped  # type: ignore[method-assign]
    loader.load = loaded


def _no_event_is_waited_for() -> None:
    order.Event.synchronize = lambda self: None  # type: ignore[method-assign]


def _uploads_are_pageable() -> None:
    transfer.to_device.__code__ = _to_device_pageable.__code__


def _to_device_pageable(tensor: Any, device: Any) -> Any:
    return tensor.to(device)


def _rows_are_dropped_at_launch() -> None:
    step = ModelRunner.step

    def stepped(self: ModelRunner, plan: Any) -> Any:
        launched = step(self, plan)
        for key, rows in list(self._rows.items()):  # the encoder's thread may add some meanwhile
            self._rows[key] = rows.clone()
        return launched

    ModelRunner.step = stepped  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    "no event is waited for": _no_event_is_waited_for,
    "rows are dropped when a step is launched": _rows_are_dropped_at_launch,
    "uploads are pageable": _uploads_are_pageable,
}

install()
_launch_on_it()
if mutant := os.environ.get("SIMULATED_MUTANT"):
    MUTANTS[mutant]()


@pytest.fixture(autouse=True)
def _findings() -> Iterator[None]:
    """Fail a test by what the device has seen in it."""
    DEVICE.reset()
    yield
    launches, copies = sum(DEVICE.launches.values()), dict(DEVICE.copies)
    line = f"{launches} operators, copies {copies}, waits {dict(DEVICE.waits)}"
    sys.stdout.write(f"\nSIMULATED: {line}\n")
    findings = list(dict.fromkeys(DEVICE.order.findings))
    assert not findings, f"{len(findings)} findings, the first: {findings[:3]}"
    assert not DEVICE.waits, f"the launch thread waits: {dict(DEVICE.waits)}"
