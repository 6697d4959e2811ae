"""A GPU that is simulated on a build of PyTorch without CUDA.

A `SimulatedTensor` says that it is on `cuda:0` and holds a tensor of the CPU, on which its
operators are computed. So the numbers are real, and what is checked is what a CPU would forgive:
operators over tensors of two devices raise, everything that makes the host wait is counted with its
place, and every operator is reported to order.py, which knows which streams may run side by side.

Operators run when they are launched, or, after `run_later(seed)`, in a random order that streams
and events allow (queues.py). Results are full of poison until then, and so is pinned memory that
copies go to; memory that nobody refers to any more is poisoned in its stream's turn, where the
allocator could give it away. So a missing event, or memory reused too soon, gives wrong tokens.

What is not seen: errors inside kernels, which kernel PyTorch would have taken, and time.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.simulated.deferral import UnknownShapeError, later, poison, poison_memory, shape_of
from tests.simulated.order import Order, Stream
from tests.simulated.queues import Queues
from tests.simulated.schemas import (
    ALLOCATING,
    FRESH,
    INDEXING,
    PINNING,
    WAITING,
    WHOLE,
    is_view,
    returned,
    written_by,
)

__all__ = ["DEVICE", "MixedDevicesError", "SimulatedMode", "SimulatedTensor"]

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda", 0)
LAUNCH_THREAD = "aioengine-device"
ENCODER_THREAD = "aioengine-encoder"
LAUNCH_THREADS = (LAUNCH_THREAD, ENCODER_THREAD)
aten = torch.ops.aten


class MixedDevicesError(RuntimeError):
    """An operator was given tensors of the host and of the device."""


@dataclass(slots=True)
class _Block:
    """Memory of the device: the stream that it goes back to, and how many tensors are over it."""

    memory: torch.UntypedStorage
    dtype: torch.dtype
    owner: int
    num_tensors: int = 0


class SimulatedDevice:
    """The one device of a process: its order, its current streams, and what was counted."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.order = Order()
        self.default = Stream(self.order, is_default=True)
        self.waits: Counter[tuple[str, str]] = Counter()
        """What made the launch thread wait, and where -> how often; loads and ends are left out."""
        self.encoder_waits: Counter[tuple[str, str]] = Counter()
        """The same of work for the encoder's stream."""
        self.early: Counter[str] = Counter()
        """Operators that had to be computed at once, since their shapes were not known before."""
        self.launches: Counter[int] = Counter()
        """Stream -> operators launched."""
        self.copies: Counter[str] = Counter()
        """"to the device" and "to the host" -> copies that nobody waits for."""
        self._pinned: dict[int, StorageWeakRef] = {}
        self._local = threading.local()
        self.num_bytes = self.most_bytes = 0
        """Bytes of the device's memory that tensors are over, and the most since a reset."""
        self._blocks: dict[int, _Block] = {}  # by address

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

    def run_later(self, seed: int | None) -> None:
        """Run operators in an order of the seed's from now on; None: when they are launched."""
        if self.order.queues is not None:
            self.order.queues.run_all()
        self.order.queues = None if seed is None else Queues(seed, self.lock)

    def reset(self) -> None:
        """Forget what was found and counted."""
        self.order.findings.clear()
        for counter in (self.waits, self.encoder_waits, self.launches, self.copies, self.early):
            counter.clear()
        if self.order.queues is not None:
            self.order.queues.failure = None
            self.order.queues.run_all()

    def hold(self, tensor: SimulatedTensor) -> None:
        """Count a tensor over its memory, until it is gone."""
        memory = tensor.elem.untyped_storage()
        address = memory.data_ptr()
        if not address:
            return
        with self.lock:
            block = self._blocks.get(address)
            if block is None:
                owner = self.stream.number
                block = self._blocks[address] = _Block(memory, tensor.elem.dtype, owner)
                self.order.allocate(address, owner)
                self.num_bytes += memory.nbytes()
                self.most_bytes = max(self.most_bytes, self.num_bytes)
            block.num_tensors += 1
        weakref.finalize(tensor, self._let_go, address).atexit = False

    def _let_go(self, address: int) -> None:
        with self.lock:
            block = self._blocks[address]
            block.num_tensors -= 1
            if block.num_tensors:
                return
            del self._blocks[address]
            self.num_bytes -= block.memory.nbytes()
            self.order.free(address)
            if self.order.queues is not None:
                # From here on the allocator could give it to the next operator of its stream.
                work = partial(poison_memory, block.memory, block.dtype)
                self.order.queues.put(block.owner, work)

    def pin(self, tensor: Tensor) -> None:
        """Note that a host tensor's memory is pinned."""
        for key in [key for key, known in self._pinned.items() if known.expired()]:
            del self._pinned[key]
        memory = tensor.untyped_storage()
        self._pinned[memory._cdata] = StorageWeakRef(memory)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a host tensor's memory is pinned."""
        known = self._pinned.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()

    def reset_peak(self) -> None:
        """Begin anew to look for the most bytes."""
        self.most_bytes = self.num_bytes

    def wait(self, what: str) -> None:
        """Have the host wait for the current stream, and count it on a launch thread."""
        self.stream.record_event().synchronize()
        self.note(what)

    def note(self, what: str) -> None:
        """Count something that a launch thread must not do among its waits."""
        may_wait = getattr(self._local, "may_wait", False)
        if threading.current_thread().name in LAUNCH_THREADS and not may_wait:
            is_encoder = self.stream.number and not self.stream.priority
            waits = self.encoder_waits if is_encoder else self.waits
            waits[what, place()] += 1

    def launch(self, operator: Any, where: str, reads: list[Any], writes: list[Any]) -> None:
        """Note an operator in the current stream."""
        self.launches[self.stream.number] += 1
        self.order.launch(
            self.stream.number, str(operator), where, _addresses(reads), _addresses(writes)
        )
        if self.order.queues is not None:
            self.order.queues.go_on()


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
        return DEVICE.is_pinned(tensor)
    pinned = tensor.clone()
    DEVICE.pin(pinned)
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
    if is_there and not goes_there:
        DEVICE.wait("to the host, by .to() or .cpu()")
    if not goes_there:
        return func(_bare(source), **others)
    is_queued = is_there or _count_copy("to the device", source, kwargs.get("non_blocking", False))
    where = place()
    made = SimulatedTensor(_result(func, (_bare(source),), others, where, at_once=not is_queued))
    DEVICE.launch(func, where, [source], [made])
    return made


def _copy(func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    is_there = isinstance(target, SimulatedTensor)
    if not is_there and not isinstance(source, SimulatedTensor):
        return target.copy_(source)
    is_over = is_there != isinstance(source, SimulatedTensor)
    host, direction = (source, "to the device") if is_there else (target, "to the host")
    is_queued = not is_over or _count_copy(direction, host, non_blocking)
    where = place()
    _result(func, (_bare(target), _bare(source)), {}, where, at_once=not is_queued)
    DEVICE.launch(func, where, [source], [target])
    return target


def _count_copy(direction: str, host: Tensor, non_blocking: bool) -> bool:
    """Note a copy between host and device; whether nobody waits for it."""
    if non_blocking and DEVICE.is_pinned(host):
        DEVICE.copies[direction] += 1
        return True
    DEVICE.wait(f"{direction}, in memory that is not pinned or not non_blocking")
    return False


def _compute(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    there = [each for each in leaves if isinstance(each, SimulatedTensor)]
    has_waited = bool(there) and _look(func, args, leaves)
    device, options = kwargs.get("device"), dict(kwargs)
    is_made_there = bool(there) if device is None else torch.device(device).type == "cuda"
    if device is not None and is_made_there:
        options["device"] = "cpu"
    is_pinned = bool(options.pop("pin_memory", False))
    if not is_made_there:
        found = func(*args, **options)
        if is_pinned:
            DEVICE.pin(poison(found) if DEVICE.order.queues and func in ALLOCATING else found)
        return found
    where = place()
    given = tree_map(_given, args), tree_map(_given, options)
    found = _result(func, *given, where, at_once=has_waited)
    written = [each for each in tree_leaves(written_by(func, args, kwargs)) if _is_there(each)]
    by_elem = {id(each.elem): each for each in written}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, SimulatedTensor):
            return value
        known = by_elem.get(id(value))
        return SimulatedTensor(value) if known is None else known

    out = tree_map(wrap, found)
    if not (func in ALLOCATING or is_view(func)):
        DEVICE.launch(func, where, there, [*written, *filter(_is_there, tree_leaves(out))])
    return out


def _result(
    func: Any, args: Any, options: Mapping[str, Any], where: str, *, at_once: bool = False
) -> Any:
    """Compute an operator over tensors of the CPU now, or have it computed in the stream's turn."""
    queues = DEVICE.order.queues
    if queues is None or at_once or is_view(func):
        return func(*args, **options)
    if func in ALLOCATING:
        found = func(*args, **options)
        return poison(found) if func in FRESH else found
    written = written_by(func, args, options)
    try:
        found = returned(func, args, options) if written else shape_of(func, args, options)
    except UnknownShapeError:
        DEVICE.early[str(func)] += 1
        DEVICE.stream.record_event().synchronize()
        return func(*args, **options)
    targets = None if written else found
    queues.put(DEVICE.stream.number, later(func, args, options, targets, where))
    return found


def _look(func: Any, args: Any, leaves: list[Any]) -> bool:
    """Whether the host waits for an operator, which is counted; refuses tensors of two devices."""
    if func in INDEXING:
        has_waited = False
        for index in tree_leaves(args[1]):
            if isinstance(index, Tensor) and not isinstance(index, SimulatedTensor):
                DEVICE.wait("an index on the host")
                has_waited = True
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                DEVICE.wait("a mask as an index")
                has_waited = True
        return has_waited
    for each in leaves:
        # A number in a tensor without dimensions is passed by value.
        if isinstance(each, Tensor) and not isinstance(each, SimulatedTensor) and each.dim():
            raise MixedDevicesError(f"{func} mixes tensors of the host and of the device")
    if func in WAITING:
        DEVICE.wait(WAITING[func])
    return func in WAITING


def _is_there(value: Any) -> bool:
    return isinstance(value, SimulatedTensor)


def _given(value: Any) -> Any:
    """An operand; numbers of the host are passed by value."""
    is_here = isinstance(value, Tensor) and not isinstance(value, SimulatedTensor)
    return value.clone() if is_here and DEVICE.order.queues is not None else _bare(value)


def _bare(value: Any) -> Any:
    return value.elem if isinstance(value, SimulatedTensor) else value
