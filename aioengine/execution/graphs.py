"""Work that is captured once and replayed: launches that a device repeats in one, which costs the
host next to nothing.

What is captured is the launches and the addresses they read and write, none of the host's code. So
whoever captures work sees to it that its inputs come to the same addresses, and that nothing but
their numbers changes from one replay to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["Capture", "Graph", "capture_on"]

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
    """What captures launches on a device; None where nothing does."""
    return _TorchCapture() if device.type == "cuda" else None


class _TorchCapture:
    """CUDA graphs, in one pool of memory. For the launch thread, inside its queue."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, work: Callable[[], Result]) -> tuple[Graph, Result]:
        """See `Capture`."""
        cuda: Any = torch.cuda
        cuda.current_stream().synchronize()
        if self._pool is None:
            self._pool = cuda.graph_pool_handle()
        graph = cuda.CUDAGraph()
        # Of this thread alone: that of the encoder may allocate memory meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = work()
        except BaseException:
            with suppress(Exception):  # it says once more that the capture has failed
                graph.capture_end()
            raise
        graph.capture_end()
        return graph, result
