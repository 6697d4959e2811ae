"""Routed experts on a device that nobody waits for: rows in blocks, each block one expert's.

How many rows an expert gets is known on the device alone. So the rows are laid out in blocks of one
size: each expert's are filled up to whole blocks, and of those there is a bound that depends on
sizes alone. Nothing is read back, and shapes do not depend on what the router says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

__all__ = ["ExpertBlocks"]

MAX_BLOCK = 128
"""Rows of a block, at most. Few make more copies of weights, many more rows of zeros."""
MAX_WEIGHT_BYTES = 256 << 20
"""Of weights that are copied at a time."""
_GROUPED_MULTIPLE = 8
"""Of both sides of a bfloat16 weight that the grouped kernel reads."""
_GROUPED_CHIPS = (9, 10)
"""Major compute capabilities of those that have it; on others PyTorch reads the groups back."""


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """Layout of the rows of a step's (token, expert) pairs.

    `places` int64 [T, k]: of each pair's row. `experts` int64 [n]: of each
    block. `ends` int32 [E]: the row behind each expert's last block. `size`: rows of a block.
    """

    places: Tensor
    experts: Tensor
    ends: Tensor
    size: int

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int) -> Self:
        """Lay out the pairs of `chosen` int64 [T, k], the experts of each token."""
        flat = chosen.flatten()
        num_pairs = len(flat)
        size = min(MAX_BLOCK, 1 << (4 * num_pairs // num_experts).bit_length())
        count = (num_pairs + min(num_pairs, num_experts) * (size - 1)) // size
        order = flat.argsort(stable=True)
        sizes = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
        sizes = sizes.scatter_add(0, flat, torch.ones_like(flat))
        num_blocks = (sizes + (size - 1)) // size
        block_ends = num_blocks.cumsum(0)
        # How far each expert's rows move from where sorting alone would put them.
        shift = (block_ends - num_blocks) * size - (sizes.cumsum(0) - sizes)
        ranks = torch.arange(num_pairs, device=flat.device)
        places = torch.empty_like(order).index_copy(0, order, ranks + shift[flat[order]])
        blocks = torch.arange(count, device=flat.device)
        experts = torch.searchsorted(block_ends, blocks, right=True).clamp(max=num_experts - 1)
        return cls(places.view_as(chosen), experts, (block_ends * size).to(torch.int32), size)

    def take(self, hidden: Tensor) -> Tensor:
        """Copy each token's row of `hidden` [T, in] to its blocks: [n, size, in], else zeros."""
        width = hidden.shape[1]
        pairs = hidden[:, None].expand(-1, self.places.shape[1], -1).reshape(-1, width)
        rows = hidden.new_zeros(len(self.experts) * self.size, width)
        return rows.index_copy(0, self.places.flatten(), pairs).view(-1, self.size, width)

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply `rows` [n, size, in] by their experts' parts of `weight` [E, in, out].

        `bias` [E, out] is added. Returns [n, size, out]; rows behind the last block mean nothing.
        """
        if _is_grouped(weight):
            flat = grouped_mm(rows.flatten(0, 1), weight, offs=self.ends)
            out = flat.view(*rows.shape[:2], -1)
        else:
            each = max(1, MAX_WEIGHT_BYTES // (weight[0].numel() * weight.element_size()))
            parts = zip(torch.split(rows, each), torch.split(self.experts, each), strict=True)
            out = torch.cat([torch.bmm(part, weight[experts]) for part, experts in parts])
        return out if bias is None else out + bias[self.experts][:, None]

    def combine(self, rows: Tensor, shares: Tensor) -> Tensor:
        """Sum each token's `rows` [n, size, out] by its `shares` [T, k]: [T, out]."""
        pairs = rows.flatten(0, 1)[self.places]
        return (pairs * shares[..., None]).sum(1)


def _is_grouped(weight: Tensor) -> bool:
    """Return whether PyTorch has a kernel for groups of such a `weight` that reads nothing back."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cuda"
        and all(size % _GROUPED_MULTIPLE == 0 for size in weight.shape[1:])
        and torch.cuda.get_device_capability(weight.device)[0] in _GROUPED_CHIPS
    )
