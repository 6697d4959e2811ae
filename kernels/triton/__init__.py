"""Kernels in Triton, for GPUs. Triton comes with PyTorch, and is imported where one is chosen."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

__all__ = ["are_right_on", "new_backend", "operators_on", "sampler"]

logger = logging.getLogger(__name__)


def new_backend() -> Any:
    """An attention backend of these kernels. Raises RuntimeError where Triton is not installed."""
    if find_spec("triton") is None:
        raise RuntimeError("Triton is not installed; it comes with PyTorch's builds for CUDA")
    return import_module("aioengine.kernels.triton.backend").TritonBackend()


def operators_on(device: torch.device) -> Any:
    """The class of a plan's operators for a device that is no CPU."""
    if are_right_on(device):
        return import_module("aioengine.kernels.triton.operators").TritonOperators
    return import_module("aioengine.kernels.torch_operators").TorchOperators


def sampler() -> Any:
    """The module that draws tokens."""
    return import_module("aioengine.kernels.triton.sample")


@cache
def are_right_on(device: torch.device) -> bool:
    """Return whether the kernels run on a device and come to what PyTorch does there; tried once.

    A warning says why not, unless Triton is not installed.
    """
    if find_spec("triton") is None:
        return False
    try:
        import_module("aioengine.kernels.triton.trial").run_trial(device)
    except Exception as error:  # of a compiler, a driver, a chip that is too old
        reason = f"{type(error).__name__}: {error!s:.200}"
        logger.warning("kernels in Triton do not run on %s, and are left out (%s)", device, reason)
        return False
    return True
