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
