"""Stand-ins for torch.cuda's functions, which speak of the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.simulated.device import DEVICE, SimulatedTensor
from tests.simulated.order import Event, Stream

__all__ = ["install", "to_simulated"]

SEGMENT_BYTES = 2 << 20


def _reserved(num_bytes: int) -> int:
    """Bytes of whole segments of an allocator."""
    return -(-num_bytes // SEGMENT_BYTES) * SEGMENT_BYTES


def to_simulated(module: nn.Module) -> nn.Module:
    """Move a module's parameters and buffers to the device, in place; shared ones stay shared."""
    made: dict[int, nn.Parameter] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None and not isinstance(parameter.data, SimulatedTensor):
                if id(parameter) not in made:
                    moved = SimulatedTensor(parameter.data.clone())
                    made[id(parameter)] = nn.Parameter(moved, requires_grad=False)
                each._parameters[name] = made[id(parameter)]
        for name, buffer in each._buffers.items():
            if buffer is not None and not isinstance(buffer, SimulatedTensor):
                each._buffers[name] = SimulatedTensor(buffer.clone())
    return module


def install(module_to: Callable[..., Any] = nn.Module.to) -> None:
    """Put stand-ins in the place of torch.cuda's functions, for the rest of this process."""
    torch._C._set_only_lift_cpu_tensors(True)

    def stream(priority: int = 0, **_: object) -> Stream:
        return Stream(DEVICE.order, priority=priority)

    def new_stream(_device: object = None, *, priority: int = 0, **_: object) -> Stream:
        return stream(priority)

    new_stream.priority_range = lambda: (0, -3)  # type: ignore[attr-defined]

    def synchronize(_device: object = None) -> None:
        DEVICE.wait("torch.cuda.synchronize()")
        if DEVICE.order.queues is not None:
            DEVICE.order.queues.run_all()
        DEVICE.order.synchronize()

    def set_device(device: torch.device) -> None:
        if device.index is None:
            raise ValueError(f"Expected a torch.device with a specified index, but got {device}")

    stand_ins: dict[str, Any] = {
        "Stream": new_stream,
        "Event": lambda **options: Event(DEVICE.order, **options),
        "current_stream": lambda _device=None: DEVICE.stream,
        "stream": DEVICE.using,
        "synchronize": synchronize,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": set_device,
        "mem_get_info": lambda _device=None: (8 << 30, 16 << 30),
        "memory_allocated": lambda _device=None: DEVICE.num_bytes,
        "max_memory_allocated": lambda _device=None: DEVICE.most_bytes,
        "memory_reserved": lambda _device=None: _reserved(DEVICE.num_bytes),
        "max_memory_reserved": lambda _device=None: _reserved(DEVICE.most_bytes),
        "reset_peak_memory_stats": lambda _device=None: DEVICE.reset_peak(),
        "empty_cache": lambda: None,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda _device=None: (9, 0),
        "get_device_name": lambda _device=None: "a simulated GPU",
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device = kwargs.get("device", args[0] if args else None)
        is_device = isinstance(device, str | torch.device)
        if is_device and torch.device(device).type == "cuda":
            with torch.inference_mode(False), torch.no_grad():
                return to_simulated(self)
        moved: nn.Module = module_to(self, *args, **kwargs)
        return moved

    nn.Module.to = to  # type: ignore[assignment, method-assign]
