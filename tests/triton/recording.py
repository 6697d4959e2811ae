"""A capture that is replayed on a CPU: launches are written down, and done over the same memory.

As on a device, nothing of the work runs while it is captured, and all that it makes is unwritten
until a replay. What a replay finds wrong:

- an input whose memory was given back since (a stale address);
- a launch that reads a number on the host, so that its value would be baked in;
- an intermediate of another replay: all of them are overwritten before each one.

A value that is baked in otherwise comes out as a token that is not the launched step's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import GridExecutor

Result = TypeVar("Result")

READING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.item.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
}


EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class StaleAddressError(RuntimeError):
    """An input of captured work that is no more."""


class HostReadError(RuntimeError):
    """The host reads what the device has not computed."""


class _Outside:
    """Memory that captured work did not make: it is found again as long as somebody keeps it."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._shape = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._dtype = tensor.dtype

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise StaleAddressError("an input of captured work was given back")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._shape)


class RecordedGraph:
    """Launches in order, each of which runs over the memory it was captured with."""

    def __init__(self, launches: list[Callable[[], None]], made: list[Tensor]) -> None:
        self.launches, self.made, self.num_replays = launches, made, 0

    def replay(self) -> None:
        for each in self.made:
            _poison(each)
        with torch.inference_mode():
            for launch in self.launches:
                launch()
        self.num_replays += 1


class Recording(TorchDispatchMode):
    """Captures for tests: see `aioengine.execution.graphs.Capture`."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[RecordedGraph] = []
        self._launches: list[Callable[[], None]] = []
        self._made: dict[int, Tensor] = {}  # by the address of their memory

    def capture(self, work: Callable[[], Result]) -> tuple[RecordedGraph, Result]:
        self._launches, self._made = [], {}
        # Of a CPU's tensor, it passes every dispatch mode.
        with self, _kernels_to(self._note_kernel), patch.object(Tensor, "tolist", _refuse):
            result = work()
        for each in self._made.values():
            _poison(each)
        graph = RecordedGraph(self._launches, [*self._made.values()])
        self.graphs.append(graph)
        return graph, result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READING:
            raise HostReadError(f"{func} reads a number on the host")
        kept = tree_map(self._kept, (args, kwargs))
        if not func._schema.is_mutable:
            found = func(*args, **kwargs)
            given = {_address(each) for each in tree_leaves((args, kwargs)) if _is_tensor(each)}
            outs = [each for each in tree_leaves(found) if _is_tensor(each)]
            if all(_address(each) in given for each in outs):  # views
                return found
            if func in EMPTY:  # what follows from it meanwhile is nobody's, but has to be possible
                found.zero_()
            for each in outs:
                self._made[_address(each)] = each

            def compute() -> None:
                given, named = tree_map(_found, kept)
                again = tree_leaves(func(*given, **named))
                for out, new in zip(outs, filter(_is_tensor, again), strict=True):
                    out.copy_(new)

            if func not in EMPTY:
                self._launches.append(compute)
            return found
        copies = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
        shaped = func(*copies[0], **copies[1])
        written = _written(func, args, kwargs)
        made = [each for each in tree_leaves(shaped) if _is_tensor(each)]
        is_fresh = not any(each.alias_info is not None for each in func._schema.returns)
        if is_fresh:
            for each in made:
                self._made[_address(each)] = each

        def change() -> None:
            given, named = tree_map(_found, kept)
            again = func(*given, **named)
            for out, new in zip(made, tree_leaves(again), strict=True) if is_fresh else ():
                out.copy_(new)

        self._launches.append(change)
        if is_fresh:
            return shaped
        return written[0] if isinstance(shaped, Tensor) else tuple(written)

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_inside = _address(value) in self._made
        return value if is_inside else _Outside(value)

    def _note_kernel(self, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        kept = tree_map(self._kept, (args, kwargs))

        def launch() -> None:
            given, named = tree_map(_found, kept)
            run(*given, **named)

        self._launches.append(launch)


@contextmanager
def _kernels_to(note: Callable[[Callable[..., Any], Any, Any], None]) -> Iterator[None]:
    """Kernels that are launched meanwhile are written down, and not run."""
    run = GridExecutor.__call__

    def noted(grid: Any, *args: Any, **kwargs: Any) -> None:
        note(lambda *given, **named: run(grid, *given, **named), args, kwargs)

    GridExecutor.__call__ = noted
    try:
        yield
    finally:
        GridExecutor.__call__ = run


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _refuse(tensor: Tensor) -> None:
    raise HostReadError("tolist() reads numbers on the host")


def _found(value: Any) -> Any:
    return value.tensor() if isinstance(value, _Outside) else value


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operator writes."""
    found = []
    for index, each in enumerate(func._schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(each.name)
            found += [x for x in tree_leaves(value) if _is_tensor(x)]
    return found


def _poison(tensor: Tensor) -> None:
    """Fill all memory of a tensor with what nobody can have meant."""
    with torch.inference_mode():
        raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        raw.fill_(0xFF)  # NaN, or -1
