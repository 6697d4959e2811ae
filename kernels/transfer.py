"""Between host and device without waiting: the numbers of a step, sent in one copy, and others.

Whoever needs numbers of the host in a step puts them into its `StepBuffer` first, and gets a
`Staged` each; `send` copies all of them at once, and from then on they are tensors of the device,
parts of one buffer at a fixed address. Of the same sizes put in the same order, each lies where it
lay in the step before. What has another size in every step (`put_varying`) lies behind all else, so
that this holds for the others, and for where it begins.

On a CPU there is no buffer: what is put is there at once, and no operator of PyTorch's is called
for it, as each of them has to get the interpreter's lock back.

On CUDA the host's side is a ring of pinned buffers: one is written anew only when the copy out of
it has been done.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Staged", "StepBuffer", "Varying", "to_device", "to_host", "upload"]

_CODES = {torch.float64: "d", torch.int64: "q", torch.int32: "i", torch.bool: "b"}
"""What can be put, as the `array` module names it. The widest comes first: so all are aligned."""
_ALIGNMENT = 16
"""Bytes, of what varies, which kernels are told of at an address that is known to them."""
_RING = 3
"""Buffers of the host: of two steps in flight, and of the one that is being written."""


class Staged:
    """Numbers on their way to the device. `tensor` is there after `StepBuffer.send`, and holds
    until the next step's are sent."""

    __slots__ = ("_buffer", "_tensor", "shape")

    def __init__(self, buffer: StepBuffer, shape: Sequence[int]) -> None:
        self._buffer = buffer
        self._tensor: Tensor | None = None
        self.shape = shape

    @property
    def tensor(self) -> Tensor:
        """The numbers, on the device."""
        if self._tensor is None:
            self._buffer._spread()
        assert self._tensor is not None, "what was put has not been sent"
        return self._tensor


class Varying:
    """Numbers int32 on their way to the device, whose count varies from step to step. They begin
    with number `first` of `base`, which is there after `StepBuffer.send`."""

    __slots__ = ("_all", "first")

    def __init__(self, numbers: Staged, first: int) -> None:
        self._all = numbers
        self.first = first

    @property
    def base(self) -> Tensor:
        """All numbers of the step whose count varies, on the device."""
        return self._all.tensor


class _HostBuffer:
    """Memory that is written on the host. `copied`: the end of the last copy out of it, on CUDA."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.view = _bytes_of(self.tensor)
        self.copied: Any = torch.cuda.Event() if is_pinned else None  # type: ignore[no-untyped-call]


_Part = tuple[Any, int, Staged]
"""Bytes of numbers, or their tensor; how many numbers; and where they will be."""


class StepBuffer:
    """One engine's buffer on a `device`, used by its launch thread, in one stream.

    It grows where it has to, `num_moves` times so far. `layout`: the sizes of what was sent last,
    by which it lies where it does. `is_fixed`: there is a buffer on a CPU too.

    Few operators of PyTorch's are called, and none for each of the numbers: beside a host's thread
    that runs Python, each may wait for the interpreter's lock.
    """

    layout: tuple[tuple[int, ...], ...] = ()
    num_moves = 0

    def __init__(self, device: torch.device | str, *, is_fixed: bool = False) -> None:
        self.device = torch.device(device)
        self._parts: dict[torch.dtype, list[_Part]] = {each: [] for each in _CODES}
        self._varying: list[array[int]] = []
        self._all_varying = Staged(self, ())
        self._num_varying = 0
        self._sent: tuple[dict[torch.dtype, list[_Part]], Staged, int, int]
        self._sent = {}, self._all_varying, 0, 0
        self._ring: deque[_HostBuffer] = deque()
        self._there = torch.empty(0, dtype=torch.uint8)
        self._is_here = self.device.type == "cpu" and not is_fixed

    def put(self, values: Iterable[float] | Tensor, dtype: torch.dtype = torch.int64) -> Staged:
        """Take numbers [n], or a tensor of the CPU of any shape, as `dtype`: float64, int64, int32
        or bool. A tensor must stay as it is until they are sent."""
        if isinstance(values, Tensor):
            given = values if values.dtype == dtype else values.to(dtype)
            staged = Staged(self, given.shape)
            if self._is_here:
                staged._tensor = given
            else:
                self._parts[dtype].append((given.contiguous(), given.numel(), staged))
            return staged
        listed: array[Any] = array(_CODES[dtype], [*values])  # much faster than from an iterator
        staged = Staged(self, (len(listed),))
        if self._is_here:
            staged._tensor = _tensor_of(listed, dtype)
        else:
            self._parts[dtype].append((memoryview(listed).cast("B"), len(listed), staged))
        return staged

    def put_varying(self, values: Iterable[int]) -> Varying:
        """Take numbers [n] as int32, of another count in every step."""
        listed = array(_CODES[torch.int32], [*values])
        if self._is_here:
            return Varying(self.put(_tensor_of(listed, torch.int32), torch.int32), 0)
        first = self._num_varying
        self._varying.append(listed)
        self._num_varying += len(listed)
        return Varying(self._all_varying, first)

    def reserve(self, num_bytes: int) -> None:
        """Have room for steps of this size, which move nothing to another address."""
        if not self._is_here:
            self._fit(num_bytes)

    def send(self) -> None:
        """Copy what was put since the last time to the device, in the current stream."""
        if self._is_here:
            return
        parts, self._parts = self._parts, {each: [] for each in _CODES}
        self.layout = tuple(tuple(count for _, count, _ in found) for found in parts.values())
        size = sum(
            sum(counts) * dtype.itemsize for dtype, counts in zip(parts, self.layout, strict=True)
        )
        begin = -(-size // _ALIGNMENT) * _ALIGNMENT
        total = begin + self._num_varying * torch.int32.itemsize
        self._fit(total)
        here, there = self._ring[0], self._there
        self._ring.rotate(-1)
        if here.copied is not None:
            here.copied.synchronize()
        at = 0
        for dtype, found in parts.items():
            for numbers, count, _ in found:
                end = at + count * dtype.itemsize
                if count:
                    is_tensor = isinstance(numbers, Tensor)
                    here.view[at:end] = _bytes_of(numbers) if is_tensor else numbers
                at = end
        at = begin
        for listed in self._varying:
            end = at + len(listed) * listed.itemsize
            here.view[at:end] = memoryview(listed).cast("B")
            at = end
        if total and there is not here.tensor:
            there[:total].copy_(here.tensor[:total], non_blocking=True)
        if here.copied is not None:
            torch.cuda.current_stream(self.device).record_event(here.copied)
        self._sent = parts, self._all_varying, begin, total
        self._varying, self._num_varying = [], 0
        self._all_varying = Staged(self, ())

    def _spread(self) -> None:
        """Give what was sent last its tensors."""
        parts, varying, begin, total = self._sent
        at = 0
        for dtype, found in parts.items():
            if not found:
                continue
            counts = [count for _, count, _ in found]
            end = at + sum(counts) * dtype.itemsize
            tensors = torch.split(self._there[at:end].view(dtype), counts)
            for (_, _, staged), tensor in zip(found, tensors, strict=True):
                is_flat = len(staged.shape) == 1
                staged._tensor = tensor if is_flat else tensor.view(staged.shape)
            at = end
        varying._tensor = self._there[begin:total].view(torch.int32)

    def _fit(self, num_bytes: int) -> None:
        if self._ring and self._there.numel() >= num_bytes:
            return
        self.num_moves += 1
        size = max(num_bytes, 2 * self._there.numel(), 1)
        # A tensor made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            count = _RING if self.device.type == "cuda" else 1
            self._ring = deque(_HostBuffer(size, self.device) for _ in range(count))
            is_here = self.device.type == "cpu"
            there = None if is_here else torch.empty(size, dtype=torch.uint8, device=self.device)
            self._there = self._ring[0].tensor if there is None else there


def _tensor_of(listed: array[Any], dtype: torch.dtype) -> Tensor:
    """Numbers as a tensor of the CPU, [n], in the same memory."""
    return torch.frombuffer(listed, dtype=dtype) if listed else torch.empty(0, dtype=dtype)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor of the CPU, which has to lie close together, as bytes."""
    numbers: Any = tensor.numpy()
    return memoryview(numbers).cast("B")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`, without waiting for it."""
    # From pinned memory the copy is queued and the host goes on; torch gives the memory to others
    # when the copy is done.
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors on their way to the host, in one copy: to be read when the work launched so far is
    done. Those of the host are what is given."""
    if not tensors or tensors[0].device.type == "cpu":
        return [*tensors]
    if len(tensors) == 1:
        (source,) = tensors
        is_pinned = source.device.type == "cuda"
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=is_pinned)
        return [target.copy_(source, non_blocking=True)]
    # The widest numbers first, so that each lies at a multiple of its size.
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
    parts = [tensors[i].contiguous().view(-1).view(torch.uint8) for i in order]
    whole = torch.cat(parts)
    target = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=whole.device.type == "cuda")
    target.copy_(whole, non_blocking=True)
    pieces = torch.split(target, [part.numel() for part in parts])
    found = {i: piece.view(tensors[i].dtype) for i, piece in zip(order, pieces, strict=True)}
    return [found[i].view(tensor.shape) for i, tensor in enumerate(tensors)]


def upload(
    values: Sequence[int] | Sequence[float] | Sequence[bool],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Numbers of the host as a tensor on `device`."""
    return to_device(torch.tensor(values, dtype=dtype), device)
