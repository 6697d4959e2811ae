"""The device that a configuration means, its queues, and the load of a model on it."""

from __future__ import annotations

import asyncio
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from aioengine.config import EngineConfig
from aioengine.engine.loading.garbage import import_libraries
from aioengine.models.runtime.load_progress import Reporter, stage
from aioengine.streams.cpu import CpuDevice
from aioengine.streams.cuda import CudaDevice, TorchDriver
from aioengine.streams.device import Device
from aioengine.streams.loop_bridge import run_apart

if TYPE_CHECKING:
    from aioengine.engine.loading.loader import Loaded

__all__ = ["load_model", "open_device"]


async def open_device(config: EngineConfig) -> Device:
    """The queues of the device that the configuration means."""
    loop = asyncio.get_running_loop()
    if config.device == "cpu":
        return CpuDevice(loop, niceness=config.thread_niceness)
    device = await run_apart(_find_device, config.device)
    if device.type == "cpu":
        return CpuDevice(loop, niceness=config.thread_niceness)
    return CudaDevice(loop, TorchDriver(device))


def _find_device(name: str) -> Any:
    """The `torch.device`; imports the libraries, which takes seconds."""
    import_libraries()
    return import_module("aioengine.execution.memory_budget").find_device(name)


def load_model(model: str | os.PathLike[str], config: EngineConfig, reporter: Reporter) -> Loaded:
    """Import the libraries and load the model. Blocks for seconds; raises as `loader.load`."""
    with reporter.listens():
        with stage("libraries"):
            import_libraries()
        # In no variable: what a library catches while it is imported, and keeps, holds this frame.
        return cast("Loaded", import_module("aioengine.engine.loading.loader").load(model, config))
