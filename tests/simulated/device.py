"""A GPU that is simulated on a build of PyTorch without CUDA.

A `SimulatedTensor` says that it is on `cuda:0` and holds a tensor of the CPU, on which its
operators are computed at once. So the numbers are real, and what is checked is what a CPU would
forgive: operators over tensors of two devices raise, everything that makes the host wait is
counted with its place, and every operator is reported to order.py, which knows which streams may
run side by side.

What is not seen: errors inside kernels, which kernel PyTorch would have taken, and time. Operators
run when they are launched, so a missing event does not change numbers here; order.py finds it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from tests.simulated.order import Event, Order, Stream

__all__ = ["DEVICE", "MixedDevicesError", "SimulatedMode", "SimulatedTensor", "to_simulated"]

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda", 0)
LAUNCH_THREAD = "aioengine-device"
SEGMENT_BYTES = 2 << 20
aten = torch.ops.aten

WAITING = {
    aten._local_scalar_dense.default: "item()",
    aten.nonzero.default: "nonzero()",
    aten.masked_select.default: "masked_select()",
    aten.equal.default: "equal()",
    aten.is_nonzero.default: "bool()",
    aten.repeat_interleave.Tensor: "repeat_interleave() without its output's size",
    aten._unique2.default: "unique()",
    aten.unique_consecutive.default: "unique_consecutive()",
}
"""Operators whose result the host waits for."""
INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
ALLOCATING = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
}
"""Operators that launch nothing."""
WHOLE = {aten.rms_norm.default}
"""Operators that are made of others here, and one kernel where PyTorch has CUDA."""
PINNING = {aten.is_pinned.default, aten.pin_memory.default, aten._pin_memory.default}


class MixedDevicesError(RuntimeError):
    """An operator was given tensors of the host and of the device."""


class SimulatedDevice:
    """The one device of a process: its order, its current streams, and what was counted."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.order = Order()
        self.default = Stream(self.order, is_default=True)
        self.waits: Counter[tuple[str, str]] = Counter()
        """What made the launch thread wait, and where -> how often; loads and ends are left out."""
        self.launches: Counter[int] = Counter()
        """Stream -> operators launched."""
        self.copies: Counter[str] = Counter()
        """"to the device" and "to the host" -> copies that nobody waits for."""
        self.pinned = WeakIdKeyDictionary()
        self._local = threading.local()
        self.num_bytes = self.most_bytes = 0
        """Bytes of the device's memory that tensors are over, and the most since a reset."""
        self._num_tensors: Counter[int] = Counter()  # by address of their memory

    @property
    def stream(self) -> Stream:
        """The thread's current stream."""
        return getattr(self._local, "stream", self.default)

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Launch into a stream, on this thread."""
        before, self._local.stream = self.stream, stream
        try:
            yield
        finally:
            self._local.stream = before

    @contextmanager
    def waiting_allowed(self) -> Iterator[None]:
        """Load or close on this thread, which may wait."""
        self._local.may_wait = True
        try:
            yield
        finally:
            self._local.may_wait = False

    def reset(self) -> None:
        """Forget what was found and counted."""
        self.order.findings.clear()
        for counter in (self.waits, self.launches, self.copies):
            counter.clear()

    def hold(self, tensor: SimulatedTensor) -> None:
        """Count a tensor over its memory, until it is gone."""
        storage = tensor.elem.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if not address:
            return
        with self.lock:
            if not self._num_tensors[address]:
                self.order.allocate(address, self.stream.number)
                self.num_bytes += num_bytes
                self.most_bytes = max(self.most_bytes, self.num_bytes)
            self._num_tensors[address] += 1
        weakref.finalize(tensor, self._let_go, address, num_bytes).atexit = False

    def _let_go(self, address: int, num_bytes: int) -> None:
        with self.lock:
            self._num_tensors[address] -= 1
            if not self._num_tensors[address]:
                del self._num_tensors[address]
                self.num_bytes -= num_bytes
                self.order.free(address)

    def reset_peak(self) -> None:
        """Begin anew to look for the most bytes."""
        self.most_bytes = self.num_bytes

    def wait(self, what: str) -> None:
        """Count that the launch thread waits for the device."""
        may_wait = getattr(self._local, "may_wait", False)
        if threading.current_thread().name == LAUNCH_THREAD and not may_wait:
            self.waits[what, place()] += 1

    def launch(self, operator: Any, reads: list[Any], writes: list[Any]) -> None:
        """Note an operator in the current stream."""
        self.launches[self.stream.number] += 1
        self.order.launch(
            self.stream.number, str(operator), place(), _addresses(reads), _addresses(writes)
        )


DEVICE = SimulatedDevice()


def _addresses(values: list[Any]) -> set[int]:
    storages = [t.elem.untyped_storage() for t in values if isinstance(t, SimulatedTensor)]
    return {each.data_ptr() for each in storages if each.nbytes()}


def place() -> str:
    """File and line of the project's nearest code; transformers' where it is nearer to none."""
    frame, other = sys._getframe(1), "?"
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(f"{ROOT}/") and "/.venv/" not in name and "/simulated/" not in name:
            return f"{name.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
        if other == "?" and "/transformers/" in name:
            other = f"{name.rpartition('site-packages/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return other


class SimulatedTensor(Tensor):
    """A tensor of the device, with its numbers in `elem` on the CPU."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> SimulatedTensor:
        assert not isinstance(elem, SimulatedTensor)
        with torch.inference_mode(False):
            made = Tensor._make_wrapper_subclass(
                cls,
                elem.shape,
                strides=elem.stride(),
                storage_offset=elem.storage_offset(),
                dtype=elem.dtype,
                layout=elem.layout,
                device=CUDA,
                requires_grad=False,
            )
        made.elem = elem
        DEVICE.hold(made)
        return made

    def tolist(self) -> Any:
        """The numbers as lists, for which the host waits."""
        DEVICE.wait("tolist()")
        return self.elem.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"SimulatedTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class SimulatedMode(TorchDispatchMode):
    """Inside, on this thread, tensors that are asked for on "cuda" are simulated."""

    def __enter__(self) -> Any:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda")
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Compute an operator, and note what it does on the device."""
    name = func.name()
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    if is_composite and func not in PINNING | WHOLE:
        with SimulatedMode():
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
    with DEVICE.lock:
        if func in PINNING:
            return _pin(func, args[0])
        if func is aten._to_copy.default:
            return _convert(func, args[0], kwargs)
        if func is aten.copy_.default:
            return _copy(func, *args, **kwargs)
        return _compute(func, args, kwargs)


def _pin(func: Any, tensor: Tensor) -> Any:
    if func is aten.is_pinned.default:
        return tensor in DEVICE.pinned
    pinned = tensor.clone()
    DEVICE.pinned[pinned] = True
    return pinned


def _convert(func: Any, source: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """`Tensor.to`: another dtype, another device or both."""
    is_there = isinstance(source, SimulatedTensor)
    device = kwargs.get("device")
    goes_there = is_there if device is None else torch.device(device).type == "cuda"
    others = {
        key: value
        for key, value in kwargs.items()
        if key not in ("device", "pin_memory", "non_blocking")
    }
    out = func(_bare(source), **others)
    if not goes_there:
        if is_there:
            DEVICE.wait("to the host, by .to() or .cpu()")
            DEVICE.order.synchronize(DEVICE.order.record(DEVICE.stream.number))
        return out
    made = SimulatedTensor(out)
    if not is_there:
        _count_copy("to the device", source, kwargs.get("non_blocking", False))
    DEVICE.launch(func, [source], [made])
    return made


def _copy(func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    _bare(target).copy_(_bare(source))
    is_there = isinstance(target, SimulatedTensor)
    if is_there != isinstance(source, SimulatedTensor):
        direction = "to the device" if is_there else "to the host"
        _count_copy(direction, source if is_there else target, non_blocking)
    if is_there or isinstance(source, SimulatedTensor):
        DEVICE.launch(func, [source], [target])
    return target


def _count_copy(direction: str, host: Tensor, non_blocking: bool) -> None:
    if non_blocking and host in DEVICE.pinned:
        DEVICE.copies[direction] += 1
    else:
        DEVICE.wait(f"{direction}, in memory that is not pinned or not non_blocking")


def _compute(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    there = [each for each in leaves if isinstance(each, SimulatedTensor)]
    if there:
        _look(func, args, leaves)
    device, options = kwargs.get("device"), dict(kwargs)
    is_made_there = bool(there) if device is None else torch.device(device).type == "cuda"
    if device is not None:
        options["device"] = "cpu"
    is_pinned = bool(options.pop("pin_memory", False))
    found = func(*tree_map(_bare, args), **tree_map(_bare, options))
    if is_pinned and isinstance(found, Tensor):
        DEVICE.pinned[found] = True
    if not is_made_there:
        return found
    written = [each for each in tree_leaves(_written(func, args, kwargs)) if _is_there(each)]
    by_elem = {id(each.elem): each for each in written}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, SimulatedTensor):
            return value
        known = by_elem.get(id(value))
        return SimulatedTensor(value) if known is None else known

    out = tree_map(wrap, found)
    if not (func in ALLOCATING or _is_view(func)):
        DEVICE.launch(func, there, [*written, *filter(_is_there, tree_leaves(out))])
    return out


def _look(func: Any, args: Any, leaves: list[Any]) -> None:
    """Count what the host waits for, and refuse tensors of two devices."""
    if func in WAITING:
        DEVICE.wait(WAITING[func])
    if func in INDEXING:
        for index in tree_leaves(args[1]):
            if isinstance(index, Tensor) and not isinstance(index, SimulatedTensor):
                DEVICE.wait("an index on the host")
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                DEVICE.wait("a mask as an index")
        return
    for each in leaves:
        # A number in a tensor without dimensions is passed by value.
        if isinstance(each, Tensor) and not isinstance(each, SimulatedTensor) and each.dim():
            raise MixedDevicesError(f"{func} mixes tensors of the host and of the device")


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes to, by its schema."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return found


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _is_there(value: Any) -> bool:
    return isinstance(value, SimulatedTensor)


def _bare(value: Any) -> Any:
    return value.elem if isinstance(value, SimulatedTensor) else value


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
                    moved = SimulatedTensor(parameter.data)
                    made[id(parameter)] = nn.Parameter(moved, requires_grad=False)
                each._parameters[name] = made[id(parameter)]
        for name, buffer in each._buffers.items():
            if buffer is not None and not isinstance(buffer, SimulatedTensor):
                each._buffers[name] = SimulatedTensor(buffer)
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
        DEVICE.order.synchronize()

    stand_ins: dict[str, Any] = {
        "Stream": new_stream,
        "Event": lambda **options: Event(DEVICE.order, **options),
        "current_stream": lambda _device=None: DEVICE.stream,
        "stream": DEVICE.using,
        "synchronize": synchronize,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
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
