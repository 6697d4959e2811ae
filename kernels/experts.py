"""Routed experts: on a CPU with packed weights, elsewhere so that nobody waits for the device.

Rows are sorted by expert (`ExpertRows`), and one operator multiplies each expert's: on a CPU with
its own panels (`PackedExperts`), on a GPU PyTorch's kernel for groups, where it has one.

Elsewhere on a device, how many rows an expert gets is known there alone. So they are laid out in
blocks of one size (`ExpertBlocks`): each expert's are filled up to whole blocks, and of those there
is a bound that depends on sizes alone. Nothing is read back, and shapes do not depend on what the
router says.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from aioengine.kernels.cpu.linear import PANEL, NativeLinear, native_way
from aioengine.kernels.grouped import GroupedWeight, TorchGroupedLinear, pack_grouped
from aioengine.kernels.matmul import NO_LIMIT, Activation, Gating, activated

__all__ = [
    "ExpertBlocks",
    "ExpertRows",
    "PackedExperts",
    "TorchExperts",
    "can_pack_experts",
    "lay_out_experts",
    "pack_experts",
    "pack_grouped_experts",
]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_BLOCK = 128
"""Rows of a block, at most. Few make more copies of weights, many more rows of zeros."""
MAX_WEIGHT_BYTES = 256 << 20
"""Of weights that are copied at a time."""
_GROUPED_MULTIPLE = 8
"""Of both sides of a bfloat16 weight that the grouped kernel reads."""
_GROUPED_CHIPS = (9, 10)
"""Major compute capabilities of those that have it; on others PyTorch reads the groups back."""


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Layout of the rows of a step's (token, expert) pairs, sorted by expert.

    `order` int64 [T * k]: the pair of each row; `experts`: its expert. `ends` [E]: the row behind
    each expert's last one, int64 on a CPU and int32 on a GPU, as is asked there. `num_chosen`:
    experts of a token, k.
    """

    order: Tensor
    experts: Tensor
    ends: Tensor
    num_chosen: int

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int) -> Self:
        """Lay out the pairs of `chosen` int64 [T, k], the experts of each token."""
        experts, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(num_experts, device=chosen.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=chosen.is_cuda)
        return cls(order, experts, ends, chosen.shape[1])

    def take(self, hidden: Tensor) -> Tensor:
        """Copy each token's row of `hidden` [T, in] to its pairs' places: [T * k, in]."""
        return hidden[self.order // self.num_chosen]

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply `rows` [n, in] by their experts' parts of `weight` [E, in, out] on a GPU.

        `bias` [E, out] is added. Returns [n, out].
        """
        out = grouped_mm(rows, weight, offs=self.ends)
        return out if bias is None else out + bias[self.experts]

    def combine(self, rows: Tensor, shares: Tensor) -> Tensor:
        """Sum each token's `rows` [T * k, out] by its `shares` [T, k]: [T, out]."""
        pairs = torch.empty_like(rows).index_copy_(0, self.order, rows)
        pairs = pairs.view(*shares.shape, rows.shape[1])
        return (pairs * shares[..., None]).sum(1)


class PackedExperts:
    """Weights [out, in] of several experts and their biases [out], packed as one for a CPU.

    `operands`: what the operators take, as of `NativeLinear`. `num_outputs`: of one expert.
    """

    def __init__(self, packed: NativeLinear, num_experts: int) -> None:
        self.operands = packed.operands
        self.num_experts = num_experts
        self.num_outputs = packed.num_outputs // num_experts
        self._multiply = torch.ops.aioengine_cpu.expert_linear.default
        self.nbytes = packed.nbytes

    @property
    def can_gate(self) -> bool:
        """Return whether each half of an expert's outputs fills whole panels."""
        return self.num_outputs % (2 * PANEL) == 0

    def __call__(
        self,
        rows: Tensor,
        ends: Tensor,
        activation: Activation = Activation.NONE,
        is_gated: bool = False,
        gating: Gating = NO_LIMIT,
    ) -> Tensor:
        """`rows` [n, in], sorted by expert, and `ends` as in `ExpertRows` -> [n, out].

        The rest is as in `NativeLinear`; gated, [n, out / 2]. Raises RuntimeError for `ends` that
        do not rise to n.
        """
        found: Tensor = self._multiply(
            rows, ends, *self.operands, self.num_outputs, int(activation), is_gated, *gating
        )
        return found

    def taken(self, first: int, last: int) -> PackedExperts:
        """The experts [first, last) of weights in panels that have no factors and no bias."""
        packed, *others = self.operands
        assert packed.dim() > 1 and not any(each is not None for each in others)
        panels = self.num_outputs // PANEL
        found = copy.copy(self)
        found.operands = packed[first * panels : last * panels], None, None
        found.num_experts = len(found.operands[0]) // panels
        return found


class TorchExperts:
    """The same by PyTorch, an expert after the other, of weights in groups."""

    can_gate = True

    def __init__(self, weight: GroupedWeight, bias: Tensor | None, num_experts: int) -> None:
        outputs = torch.arange(len(weight.numbers)).chunk(num_experts)
        biases = [None] * num_experts if bias is None else [*bias.flatten().chunk(num_experts)]
        self._experts: Sequence[TorchGroupedLinear] = [
            TorchGroupedLinear(weight.taken(which), own)
            for which, own in zip(outputs, biases, strict=True)
        ]
        self.nbytes = sum(each.nbytes for each in self._experts)

    def __call__(
        self,
        rows: Tensor,
        ends: Tensor,
        activation: Activation = Activation.NONE,
        is_gated: bool = False,
        gating: Gating = NO_LIMIT,
    ) -> Tensor:
        """See `PackedExperts`."""
        own = torch.tensor_split(rows, ends[:-1])
        out = torch.cat([f(x) for f, x in zip(self._experts, own, strict=True)])
        return activated(out, activation, is_gated, gating)


def can_pack_experts(weight: Tensor) -> bool:
    """Return whether `weight` [E, out, in] is one that `pack_experts` takes, where it is built."""
    return weight.device.type == "cpu" and weight.shape[1] % PANEL == 0


def pack_experts(weight: Tensor, bias: Tensor | None) -> PackedExperts | None:
    """`weight` [E, out, in] and `bias` [E, out], ready to be multiplied with on a CPU.

    None where PyTorch's own matmuls are the faster ones, or panels are not filled.
    """
    if not can_pack_experts(weight) or weight.dtype not in _DTYPES:
        return None
    flat = None if bias is None else bias.flatten()
    packed = native_way(weight.reshape(-1, weight.shape[-1]).contiguous(), flat)
    return None if packed is None else PackedExperts(packed, len(weight))


def pack_grouped_experts(
    weight: GroupedWeight, bias: Tensor | None, num_experts: int
) -> PackedExperts | TorchExperts:
    """The same of weights [E * out, in] in groups, `out` a multiple of 32."""
    packed = pack_grouped(weight, None if bias is None else bias.flatten())
    if isinstance(packed, NativeLinear):
        return PackedExperts(packed, num_experts)
    return TorchExperts(weight, bias, num_experts)


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """Layout of the rows of a step's (token, expert) pairs.

    `places` int64 [T, k]: of each pair's row. `experts` int64 [n]: of each block. `size`: rows of a
    block.
    """

    places: Tensor
    experts: Tensor
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
        return cls(places.view_as(chosen), experts, size)

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
        each = max(1, MAX_WEIGHT_BYTES // (weight[0].numel() * weight.element_size()))
        parts = zip(torch.split(rows, each), torch.split(self.experts, each), strict=True)
        out = torch.cat([torch.bmm(part, weight[experts]) for part, experts in parts])
        return out if bias is None else out + bias[self.experts][:, None]

    def combine(self, rows: Tensor, shares: Tensor) -> Tensor:
        """Sum each token's `rows` [n, size, out] by its `shares` [T, k]: [T, out]."""
        pairs = rows.flatten(0, 1)[self.places]
        return (pairs * shares[..., None]).sum(1)


def lay_out_experts(chosen: Tensor, weights: Sequence[Tensor]) -> ExpertRows | ExpertBlocks:
    """Lay out the pairs of `chosen` int64 [T, k] for `weights` [E, in, out] on a device."""
    kind = ExpertRows if all(map(_is_grouped, weights)) else ExpertBlocks
    return kind.of(chosen, len(weights[0]))


def _is_grouped(weight: Tensor) -> bool:
    """Return whether PyTorch has a kernel for groups of such a `weight` that reads nothing back."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cuda"
        and all(size % _GROUPED_MULTIPLE == 0 for size in weight.shape[1:])
        and torch.cuda.get_device_capability(weight.device)[0] in _GROUPED_CHIPS
    )
