"""Between host and device without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["to_device", "to_host", "upload"]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`, without waiting for it."""
    # From pinned memory the copy is queued and the host goes on; torch gives the memory to others
    # when the copy is done.
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(tensor: Tensor) -> Tensor:
    """A tensor on its way to the host: to be read when the work launched so far is done."""
    if tensor.device.type == "cpu":
        return tensor
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)


def upload(
    values: Sequence[int] | Sequence[float] | Sequence[bool],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Numbers of the host as a tensor on `device`."""
    return to_device(torch.tensor(values, dtype=dtype), device)
