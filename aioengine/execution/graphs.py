"""Work that is captured once and replayed: launches that a device repeats in one, which costs the
host next to nothing.

What is captured is the launches and the addresses they read and write, none of the host's code. So
whoever captures work sees to it that its inputs come to the same addresses, and that nothing but
their numbers changes from one replay to the next.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Capture", "Graph", "RefusesWaits", "WaitError", "capture_on"]

Result = TypeVar("Result")


class Graph(Protocol):
    """Launches that were captured."""

    def replay(self) -> None:
        """Launch them once more, in the current stream."""


class Capture(Protocol):
    """Interface of a device that captures launches."""

    def capture(self, work: Callable[[], Result]) -> tuple[Graph, Result]:
        """Capture what `work` launches into the current stream, which does not run meanwhile.

        It has run before, so that all is made that is made once. What it returns is filled by each
        replay, and lies in memory that graphs of one capture share: replays of others overwrite
        what is not kept by anybody. Raises what `work` raises, and where it waits for the device.
        """


def capture_on(device: torch.device) -> Capture | None:
    """Return what captures launches on a device; None where nothing does."""
    return _TorchCapture() if device.type == "cuda" else None


_WAITING = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::equal",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::unique_consecutive",
}
"""Operators whose results, or their sizes, the host reads."""
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_"}
_COPYING = {"aten::_to_copy", "aten::to", "aten::copy_"}


class WaitError(RuntimeError):
    """Work that cannot be captured, as the host waits in it."""


class RefusesWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, on this thread, an operator raises WaitError that makes the host wait for the device,
    or that copies what no replay would."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        waits = name in _WAITING or (name == "aten::repeat_interleave" and len(args) == 1)
        if name in _INDEXING:
            indices = [each for each in tree_leaves(args[1]) if isinstance(each, Tensor)]
            masks = (torch.bool, torch.uint8)
            waits = any(x.dtype in masks or x.device != tensors[0].device for x in indices)
        found = None if waits else func(*args, **(kwargs or {}))
        if name in _COPYING and isinstance(found, Tensor):
            waits = len({each.device.type for each in (*tensors, found)}) > 1
        if waits:
            raise WaitError(f"{name} makes the host wait for the device, or copies from it")
        return found


class _TorchCapture:
    """CUDA graphs, in one pool of memory. For the launch thread, inside its queue."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, work: Callable[[], Result]) -> tuple[Graph, Result]:
        """See `Capture`."""
        # Before it is captured: what fails then is hard to clear away.
        with RefusesWaits():  # type: ignore[no-untyped-call]
            work()
        cuda: Any = torch.cuda
        cuda.current_stream().synchronize()
        if self._pool is None:
            self._pool = cuda.graph_pool_handle()
        graph = cuda.CUDAGraph()
        # What is collected may be pinned memory, whose end would be marked in the capture.
        collects = gc.isenabled()
        gc.disable()
        try:
            # Of this thread alone: that of the encoder may allocate memory meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
                graph.capture_end()
            except BaseException:
                self._clear_away(graph)
                raise
        finally:
            if collects:
                gc.enable()
        return graph, result

    def _clear_away(self, graph: Any) -> None:
        """End a capture that has failed: the allocator must not wait for its end."""
        with suppress(Exception):  # which says once more that it has failed
            graph.capture_end()
        torch_c: Any = torch._C
        device = torch.cuda.current_device()
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            with suppress(Exception):  # that may have been done
                getattr(torch_c, name)(device, self._pool)
        self._pool = None
