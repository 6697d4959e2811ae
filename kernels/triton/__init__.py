"""Kernels in Triton, for GPUs. Triton comes with PyTorch, and is imported where one is chosen."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["new_backend"]


def new_backend() -> Any:
    """An attention backend of these kernels. Raises RuntimeError where Triton is not installed."""
    if find_spec("triton") is None:
        raise RuntimeError("Triton is not installed; it comes with PyTorch's builds for CUDA")
    return import_module("aioengine.kernels.triton.backend").TritonBackend()
