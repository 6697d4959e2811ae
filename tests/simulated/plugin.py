"""A plugin of pytest with which tests of a GPU run on the simulated one. run.py loads it.

SIMULATED_GUARD names the library that guard.cpp was built into. A test fails where operators were
not ordered, memory was freed while read, or the launch thread waited for the device.
SIMULATED_ORDER, a number, has operators run later, in an order that it is the seed of.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

torch.ops.load_library(os.environ["SIMULATED_GUARD"])

from aioengine.engine.loading import loader  # noqa: E402
from aioengine.streams.cuda import TorchDriver  # noqa: E402
from tests.simulated import operators  # noqa: E402, F401
from tests.simulated.device import DEVICE, ENCODER_THREAD, SimulatedMode  # noqa: E402
from tests.simulated.stand_ins import install  # noqa: E402


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


ORDER = os.environ.get("SIMULATED_ORDER")
install()
_launch_on_it()
DEVICE.run_later(None if ORDER is None else int(ORDER))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "encoders_may_wait: waits of the encoder's work are printed")


@pytest.fixture(autouse=True)
def _findings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test by what the device has seen in it."""
    DEVICE.reset()
    yield
    launches, copies = sum(DEVICE.launches.values()), dict(DEVICE.copies)
    line = f"{launches} operators, copies {copies}, waits {dict(DEVICE.waits)}, "
    line += f"of encoders {dict(DEVICE.encoder_waits)}, at once {dict(DEVICE.early)}"
    sys.stdout.write(f"\nSIMULATED: order {ORDER}, {line}\n")
    findings = list(dict.fromkeys(DEVICE.order.findings))
    assert not findings, f"{len(findings)} findings, the first: {findings[:3]}"
    assert not DEVICE.waits, f"the launch thread waits: {dict(DEVICE.waits)}"
    if request.node.get_closest_marker("encoders_may_wait") is None:
        assert not DEVICE.encoder_waits, f"encoders wait: {dict(DEVICE.encoder_waits)}"
