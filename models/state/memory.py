"""Memory of states, and what of it a step uses.

All that the layers keep of a request lies in one row of bytes, so that zeros and copies are one
operator each, whatever the number of layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "PartName",
    "StateMemory",
    "StatePart",
    "StateSpec",
    "StateStep",
    "state_bytes",
]

PartName = tuple[str, int]
"""("conv" or "recurrent", which of its kind)."""
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a layer's state, of a request. `dtype`: None for the model's."""

    name: PartName
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes in a row, for a model in `dtype`."""
        own = math.prod(self.shape) * (self.dtype or dtype).itemsize
        return -(-own // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A layer that keeps a state. `name`: its module's path under the decoder; `width`: of the rows
    that it is given."""

    name: str
    width: int
    parts: tuple[StatePart, ...]


def state_bytes(specs: Sequence[StateSpec], dtype: torch.dtype) -> int:
    """Bytes of a request's state in all layers, of a model in `dtype`."""
    return sum(part.num_bytes(dtype) for spec in specs for part in spec.parts)


class StateMemory:
    """Rows for `num_places` states. `layers`: layer -> part -> [num_places, ...], views of them."""

    def __init__(
        self,
        specs: Sequence[StateSpec],
        num_places: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers: dict[str, Mapping[PartName, Tensor]] = {}
        width = state_bytes(specs, dtype)
        self._rows = torch.empty(num_places, width, dtype=torch.uint8, device=device)
        offset = 0
        for spec in specs:
            parts: dict[PartName, Tensor] = {}
            for part in spec.parts:
                kind = part.dtype or dtype
                own = math.prod(part.shape) * kind.itemsize
                piece = self._rows[:, offset : offset + own]
                parts[part.name] = piece.view(kind).view(num_places, *part.shape)
                offset += part.num_bytes(dtype)
            self.layers[spec.name] = parts

    def begin(self, zeros: Tensor | None, sources: Tensor | None, places: Tensor | None) -> None:
        """Clear the rows `zeros` [n], and copy rows `sources` [m] to `places` [m]."""
        if sources is not None:
            self._rows[places] = self._rows[sources]
        if zeros is not None:
            self._rows[zeros] = 0


@dataclass(frozen=True, slots=True, eq=False)
class StateStep:
    """Places of one step's states.

    Its first `num_single` tokens are of as many requests, whose states lie at `places` [n]; of the
    rows `copied` [m] of them, copies go to `copies` [m], unless there are none. `chunks`: first and
    last row, place, and (row, place) of each snapshot that ends before a row.
    """

    memory: StateMemory
    num_single: int
    places: Tensor
    copied: Tensor | None
    copies: Tensor | None
    chunks: tuple[tuple[int, int, int, tuple[tuple[int, int], ...]], ...]
