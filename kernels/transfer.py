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
from collections.abc import Iterable, Iterator, Sequence
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

    __slots__ = ("shape", "tensor")
    tensor: Tensor

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape


class Varying:
    """Numbers int32 on their way to the device, whose count varies from step to step. They begin
    with number `first` of `base`, which is there after `StepBuffer.send`."""

    __slots__ = ("base", "first")
    base: Tensor

    def __init__(self, first: int) -> None:
        self.first = first


class _HostBuffer:
    """Memory that is written on the host. `copied`: the end of the last copy out of it, on CUDA."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self.copied: Any = torch.cuda.Event() if is_pinned else None  # type: ignore[no-untyped-call]


class StepBuffer:
    """One engine's buffer on a `device`, used by its launch thread, in one stream.

    It grows where it has to. `layout`: the sizes of what was sent last, by which it lies where it
    does. `is_fixed`: there is a buffer on a CPU too.
    """

    layout: tuple[tuple[int, ...], ...] = ()

    def __init__(self, device: torch.device | str, *, is_fixed: bool = False) -> None:
        self.device = torch.device(device)
        self._parts: dict[torch.dtype, list[tuple[Tensor, Staged]]] = {each: [] for each in _CODES}
        self._varying: list[tuple[Tensor, Varying]] = []
        self._ring: deque[_HostBuffer] = deque()
        self._there = torch.empty(0, dtype=torch.uint8)
        self._is_here = self.device.type == "cpu" and not is_fixed

    def put(self, values: Iterable[float] | Tensor, dtype: torch.dtype = torch.int64) -> Staged:
        """Take numbers [n], or a tensor of the CPU of any shape, as `dtype`: float64, int64, int32
        or bool. A tensor must stay as it is until they are sent."""
        if isinstance(values, Tensor):
            numbers, shape = values if values.dtype == dtype else values.to(dtype), values.shape
        else:
            numbers = _listed(values, dtype)
            shape = numbers.shape
        staged = Staged(shape)
        if self._is_here:
            staged.tensor = numbers
        else:
            self._parts[dtype].append((numbers.flatten(), staged))
        return staged

    def put_varying(self, values: Iterable[int]) -> Varying:
        """Take numbers [n] as int32, of another count in every step."""
        numbers = _listed(values, torch.int32)
        staged = Varying(sum(before.numel() for before, _ in self._varying))
        if self._is_here:
            staged.base = numbers
        else:
            self._varying.append((numbers, staged))
        return staged

    def reserve(self, num_bytes: int) -> None:
        """Have room for steps of this size, which move nothing to another address."""
        if not self._is_here:
            self._fit(num_bytes)

    def send(self) -> None:
        """Copy what was put since the last time to the device, in the current stream."""
        if self._is_here:
            return
        self.layout = tuple(
            tuple(numbers.numel() for numbers, _ in parts) for parts in self._parts.values()
        )
        sizes = [
            sum(counts) * dtype.itemsize
            for dtype, counts in zip(self._parts, self.layout, strict=True)
        ]
        begin = -(-sum(sizes) // _ALIGNMENT) * _ALIGNMENT
        total = begin + sum(numbers.nbytes for numbers, _ in self._varying)
        self._fit(total)
        here, there = self._ring[0], self._there
        self._ring.rotate(-1)
        if here.copied is not None:
            here.copied.synchronize()
        for (dtype, parts), section in self._sections(here.tensor, sizes):
            torch.cat([numbers for numbers, _ in parts], out=section.view(dtype))
        if self._varying:
            tail = here.tensor[begin:total].view(torch.int32)
            torch.cat([numbers for numbers, _ in self._varying], out=tail)
        if total and there is not here.tensor:
            there[:total].copy_(here.tensor[:total], non_blocking=True)
        if here.copied is not None:
            torch.cuda.current_stream(self.device).record_event(here.copied)
        for (dtype, parts), section in self._sections(there, sizes):
            found = torch.split(section.view(dtype), [numbers.numel() for numbers, _ in parts])
            for (_, staged), tensor in zip(parts, found, strict=True):
                staged.tensor = tensor.view(staged.shape) if len(staged.shape) != 1 else tensor
            parts.clear()
        for _, varying in self._varying:
            varying.base = there[begin:total].view(torch.int32)
        self._varying.clear()

    def _sections(
        self, buffer: Tensor, sizes: list[int]
    ) -> Iterator[tuple[tuple[torch.dtype, list[tuple[Tensor, Staged]]], Tensor]]:
        """The numbers of each dtype, if any, and their bytes of a buffer; `sizes`: in bytes."""
        sections = torch.split(buffer[: sum(sizes)], sizes)
        for (dtype, parts), section in zip(self._parts.items(), sections, strict=True):
            if parts:
                yield (dtype, parts), section

    def _fit(self, num_bytes: int) -> None:
        if self._ring and self._there.numel() >= num_bytes:
            return
        size = max(num_bytes, 2 * self._there.numel(), 1)
        # A tensor made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            count = _RING if self.device.type == "cuda" else 1
            self._ring = deque(_HostBuffer(size, self.device) for _ in range(count))
            is_here = self.device.type == "cpu"
            there = None if is_here else torch.empty(size, dtype=torch.uint8, device=self.device)
            self._there = self._ring[0].tensor if there is None else there


def _listed(values: Iterable[float], dtype: torch.dtype) -> Tensor:
    """Numbers as a tensor of the CPU, [n]."""
    listed = array(_CODES[dtype], values)
    return torch.frombuffer(listed, dtype=dtype) if listed else torch.empty(0, dtype=dtype)


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
    # The widest numbers first, so that each lies at a multiple of its size.
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
    parts = [tensors[i].contiguous().view(-1).view(torch.uint8) for i in order]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
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
