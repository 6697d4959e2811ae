"""Weights on their way to a GPU: in pieces, through pinned memory, with nothing kept on the host.

Weights that are read from files are pages of these files. Moved as they are, each would be a copy
that the host waits for, at a fraction of the bus's speed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

__all__ = ["WeightUpload", "move_weights"]

PIECE_BYTES = 16 << 20
"""Of a copy. Pinned memory of this size is used again, and stays with PyTorch afterwards."""
MAX_PIECES = 4
"""That may be on their way at a time."""


class WeightUpload:
    """Copies tensors to `device` in the current stream; at its end all of them are there.

    A context manager. For any device but a GPU it is `Tensor.to`.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._on_the_way: deque[Any] = deque()

    def __call__(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device, of the same dtype."""
        if self._device.type != "cuda" or tensor.device.type != "cpu":
            return tensor.to(self._device)
        target = torch.empty_like(tensor, device=self._device)
        # Dense ones lie in memory alike on both sides, whatever their strides.
        is_alike = target.stride() == tensor.stride()
        sources, places = (_pieces(each) if is_alike else [each] for each in (tensor, target))
        for source, place in zip(sources, places, strict=True):
            self._send(source, place)
        return target

    def _send(self, source: Tensor, target: Tensor) -> None:
        if len(self._on_the_way) == MAX_PIECES:
            self._on_the_way.popleft().synchronize()
        target.copy_(source.pin_memory(), non_blocking=True)
        self._on_the_way.append(torch.cuda.current_stream(self._device).record_event())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait, so that other streams may read what was copied."""
        if self._on_the_way:
            self._on_the_way[-1].synchronize()
            self._on_the_way.clear()


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Views of a dense tensor's memory, one after the other."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return torch.split(flat, max(1, PIECE_BYTES // tensor.element_size()))


def move_weights(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Move parameters and buffers, which need no gradients; shared ones stay shared. Returns
    `model`, and frees each weight on the host once it is copied."""
    if torch.device(device).type != "cuda":
        return model.to(device)
    moved: dict[int, Tensor] = {}
    with WeightUpload(device) as upload, torch.no_grad():
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is None or tensor.device.type != "cpu":
                        continue
                    if id(tensor) not in moved:
                        there = upload(tensor.detach())
                        is_parameter = isinstance(tensor, nn.Parameter)
                        moved[id(tensor)] = nn.Parameter(there, False) if is_parameter else there
                    held[name] = moved[id(tensor)]  # type: ignore[assignment]
    return model
