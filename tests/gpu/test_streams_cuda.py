"""The two streams: the encoder runs beside decode, and a job's handle ends after its work."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest
import torch

from aioengine.streams.cuda import CudaDevice, TorchDriver
from aioengine.streams.device import DECODER, ENCODER
from aioengine.types import Launched


class Clock:
    """Moments on the device, in milliseconds since the first."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def mark(self, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append((name, event))

    def times(self) -> dict[str, float]:
        torch.cuda.synchronize()
        first = self.events[0][1]
        return {name: first.elapsed_time(event) for name, event in self.events}


async def test_the_encoder_runs_beside_decode() -> None:
    device = CudaDevice(asyncio.get_running_loop(), TorchDriver(torch.device("cuda", 0)))
    clock = Clock()
    small = torch.randn(64, 64, device="cuda")
    large = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()

    def encode() -> None:
        clock.mark("encode begins")
        result = large
        for _ in range(400):
            result = (result @ large).clamp(-1, 1)
        clock.mark("encode ends")

    def step(number: int) -> None:
        clock.mark(f"step {number} begins")
        result = small
        for _ in range(20):
            result = (result @ small).clamp(-1, 1)
        clock.mark(f"step {number} ends")

    encoding = device.submit_encode(encode)
    for number in range(10):
        await device.submit_step(lambda n=number: step(n))
    beside = not encoding.done()
    await encoding
    await device.aclose()
    times = clock.times()
    assert beside, "ten steps ended on the host before the encoder's run did"
    assert times["encode begins"] < times["step 9 begins"]
    assert times["step 9 ends"] < times["encode ends"]


async def test_a_handle_ends_when_the_work_is_done() -> None:
    device = CudaDevice(asyncio.get_running_loop(), TorchDriver(torch.device("cuda", 0)))
    large = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()

    def job() -> Launched[float]:
        result = large
        for _ in range(200):
            result = (result @ large).clamp(-1, 1)
        target = torch.empty((), pin_memory=True)
        target.copy_(result.sum(), non_blocking=True)
        return Launched(lambda: float(target))

    found = await asyncio.gather(*(device.submit_step(job) for _ in range(3)))
    await device.aclose()
    assert len(set(found)) == 1 and found[0] != 0


@pytest.mark.parametrize("with_cuda_python", [True, False])
async def test_either_kind_of_stream(
    with_cuda_python: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_cuda_python:
        pytest.importorskip("cuda.bindings.driver")
    else:
        import sys

        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    monkeypatch.setattr("aioengine.streams.cuda._UNUSED", defaultdict(list))
    driver = TorchDriver(torch.device("cuda", 0))
    device = CudaDevice(asyncio.get_running_loop(), driver)
    seen: list[int] = []
    for submit in (device.submit_step, device.submit_encode):
        await submit(lambda: seen.append(torch.cuda.current_stream().cuda_stream))
    priorities = {name: each.priority for name, each in driver._streams.items()}
    await device.aclose()
    assert len(set(seen)) == 2 and torch.cuda.default_stream().cuda_stream not in seen
    assert priorities[DECODER] < priorities[ENCODER]
