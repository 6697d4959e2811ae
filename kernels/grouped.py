"""Weights of 4 or 8 bits, in groups of inputs that share a scale, and matmuls with them on a CPU.

Inputs are rounded to 8 bits as well, at each call and row by row: the largest number of each group
becomes 127. Products are added up as integers within a group, which is exact, so a row comes to the
same bits in any company. Or inputs stay what they are (`has_full_inputs`), which is slower.

The operators are ours, in C++ (`kernels/cpu/`). Where these were not built, `TorchGroupedLinear`
computes the same from weights that it makes floats again at each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from aioengine.kernels.cpu.library import is_available
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.kernels.linear import PackedLinear

__all__ = [
    "GROUP",
    "GroupedWeight",
    "TorchGroupedLinear",
    "can_group",
    "e4m3_weight",
    "pack_grouped",
    "round_inputs",
    "round_weight",
]

GROUP = 32
"""Inputs of a group, where nothing else is asked for."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FITS = 4
"""Turns of a search; after four, weights drawn from a normal distribution gain a hundredth more."""
_CHUNK = 1 << 18
"""Numbers that are rounded at a time, which stay in a core's cache."""
_TINY = 1e-30


@dataclass(frozen=True, kw_only=True)
class GroupedWeight:
    """A weight [out, in] in groups.

    A weight is one of number * scale * factor and (number * scale + least) * factor for 8 bits, and
    for 4 bits one of (number - 8) * scale * factor, (number - zero / 16) * scale * factor, and
    (number * scale + least) * factor. `group`: 16, 32, 64 or 128. `levels`: 16 integers of 8 bits;
    numbers are some of these and take 4 bits, and a weight is number * scale * factor.
    """

    numbers: Tensor
    """[out, in] int8: 0 to 15 for 4 bits, -128 to 127 for 8 and of levels. Or finite
    float8_e4m3fn, with full inputs."""
    scales: Tensor
    """[out, groups] float16."""
    factors: Tensor
    """[out] float32."""
    lowest: Tensor | None = None
    """[out, groups]: zeros if it is uint8, leasts if it is float16."""
    bits: int
    group: int = GROUP
    has_full_inputs: bool = False
    levels: tuple[int, ...] | None = None

    @property
    def form(self) -> tuple[object, ...]:
        """The properties that weights share which one matmul may serve."""
        lowest = None if self.lowest is None else self.lowest.dtype
        kind = self.numbers.dtype, self.bits, self.group, lowest, self.levels
        return *kind, self.has_full_inputs, self.numbers.shape[1]

    def floats(self) -> Tensor:
        """The weights that the numbers stand for, [out, in] float32."""
        depth = self.numbers.shape[1]

        def each_input(of_groups: Tensor) -> Tensor:
            return of_groups.float().repeat_interleave(self.group, 1)[:, :depth]

        numbers, scales = self.numbers.float(), each_input(self.scales)
        if self.numbers.is_floating_point():
            assert self.lowest is not None
            found = numbers * (scales + each_input(self.lowest))
        elif self.lowest is None:
            is_raised = self.bits == 4 and self.levels is None
            found = (numbers - 8 if is_raised else numbers) * scales
        elif self.lowest.dtype is torch.uint8:
            found = (numbers - each_input(self.lowest) / 16) * scales
        else:
            found = numbers * scales + each_input(self.lowest)
        return found * self.factors[:, None]

    @property
    def is_finite(self) -> bool:
        """Return whether all weights that its scales allow for are numbers."""
        largest = 448 if self.numbers.is_floating_point() else 128 if self.bits == 8 else 16
        if self.levels is not None:
            largest = max(map(abs, self.levels))
        rows = [self.scales] if self.lowest is None else [self.scales, self.lowest]
        sizes = [each.float().abs().amax(1) * self.factors * largest for each in rows]
        return all(bool(each.isfinite().all()) for each in sizes)

    def taken(self, outputs: Tensor) -> GroupedWeight:
        """The weight of `outputs` [n] alone, in their order."""
        lowest = None if self.lowest is None else self.lowest[outputs]
        numbers, scales = self.numbers[outputs], self.scales[outputs]
        factors = self.factors[outputs]
        return replace(self, numbers=numbers, scales=scales, factors=factors, lowest=lowest)

    @classmethod
    def joined(cls, weights: Sequence[GroupedWeight]) -> GroupedWeight:
        """The weights of one form, one's outputs behind the other's."""
        first = weights[0]
        assert all(each.form == first.form for each in weights)
        if len(weights) == 1:
            return first
        lowest = [each.lowest for each in weights if each.lowest is not None]
        return replace(
            first,
            numbers=torch.cat([each.numbers for each in weights]),
            scales=torch.cat([each.scales for each in weights]),
            factors=torch.cat([each.factors for each in weights]),
            lowest=torch.cat(lowest) if lowest else None,
        )

    @classmethod
    def of(
        cls,
        numbers: Tensor,
        scales: Tensor,
        lowest: Tensor | None,
        *,
        bits: int,
        group: int,
        levels: tuple[int, ...] | None = None,
    ) -> GroupedWeight:
        """A weight whose scales and leasts are float32, brought to where float16 is exact enough.

        The largest of an output's scales lies between 1 and 2 then, times a power of two.
        """
        most = scales.abs().amax(1).clamp_min(_TINY)
        factors = torch.exp2(torch.floor(torch.log2(most)))
        if lowest is not None and lowest.dtype is not torch.uint8:
            lowest = (lowest / factors[:, None]).half()
        return cls(
            numbers=numbers,
            scales=(scales / factors[:, None]).half(),
            factors=factors,
            lowest=lowest,
            bits=bits,
            group=group,
            levels=levels,
        )


def e4m3_weight(numbers: Tensor, scales: Tensor, group: int) -> GroupedWeight:
    """A weight of finite `numbers` [out, in] float8_e4m3fn times `scales` [out, groups] float32.

    A scale is kept as the sum of two float16, times a power of two of its output: it is off by
    2^-22 of the output's largest.
    """
    most = scales.abs().amax(1).clamp_min(_TINY)
    factors = torch.exp2(torch.floor(torch.log2(most)))
    relative = scales / factors[:, None]
    nearest = relative.half()
    return GroupedWeight(
        numbers=numbers,
        scales=nearest,
        factors=factors,
        lowest=(relative - nearest.float()).half(),
        bits=8,
        group=group,
        has_full_inputs=True,
    )


def can_group(dtype: torch.dtype) -> bool:
    """Return whether layers of `dtype` can have weights in groups."""
    return dtype in _DTYPES


def round_weight(weight: Tensor, bits: int, group: int = GROUP) -> GroupedWeight:
    """`weight` [out, in] in 4 or 8 bits, rounded to the nearest.

    Of 4 bits, scales and zeros are searched for: those that fit the numbers best by least squares,
    and the numbers that are nearest then, in turns.
    """
    search = {4: _search_4_bits, 8: _round_8_bits}[bits]
    outputs, depth = weight.shape
    count = -(-depth // group)
    found = [
        search(pad(rows.detach().float(), (0, count * group - depth)).view(len(rows), count, group))
        for rows in torch.split(weight, max(1, _CHUNK // depth))
    ]
    numbers, scales, zeros = (
        None if each[0] is None else torch.cat(each) for each in zip(*found, strict=True)
    )
    assert numbers is not None and scales is not None
    numbers = numbers.view(outputs, -1)[:, :depth].contiguous()
    return GroupedWeight.of(numbers, scales, zeros, bits=bits, group=group)


_Rounded = tuple[Tensor, Tensor, Tensor | None]
"""Numbers int8 [out, groups, group], scales and zeros [out, groups]."""


def _round_8_bits(x: Tensor) -> _Rounded:
    """`x` [out, groups, group] in 8 bits."""
    scales = x.abs().amax(-1) / 127
    return (x / scales.clamp_min(_TINY)[..., None]).round_().to(torch.int8), scales, None


def _search_4_bits(x: Tensor) -> _Rounded:
    """`x` [out, groups, group] in 4 bits.

    Between the fits the zero is any number; in the end it is one of those that there are.
    """
    least, most = (each.clamp(lo, hi) for each, lo, hi in _ends(x))
    scale = ((most - least) / 15).clamp_min_(_TINY)
    error = torch.full_like(scale, torch.inf)
    kept: tuple[Tensor, ...] = ()
    for _ in range(_FITS):
        zero = (least / scale * -16).round_().clamp_(0, 255)
        numbers = (x / scale + zero / 16).round_().clamp_(0, 15)
        off = ((numbers - zero / 16) * scale - x).square_().sum(-1, keepdim=True)
        now = numbers, scale, zero
        is_better = off < error
        kept = tuple(map(torch.where, repeat(is_better), now, kept)) if kept else now
        error = torch.minimum(off, error)
        # The line through the weights over their numbers.
        middle, mean = numbers.mean(-1, keepdim=True), x.mean(-1, keepdim=True)
        numbers = numbers - middle
        spread = numbers.square().sum(-1, keepdim=True)
        slope = (numbers * (x - mean)).sum(-1, keepdim=True) / spread.clamp_min(_TINY)
        scale = torch.where(spread > 0, slope, scale).clamp_min_(_TINY)
        least = (mean - scale * middle).clamp_max_(0)
    numbers, scale, zero = kept
    return numbers.to(torch.int8), scale.squeeze(-1), zero.squeeze(-1).to(torch.uint8)


def _ends(x: Tensor) -> tuple[tuple[Tensor, float, float], ...]:
    """Least and largest numbers of groups, between which there is a 0."""
    return (
        (x.amin(-1, keepdim=True), -torch.inf, 0.0),
        (x.amax(-1, keepdim=True), 0.0, torch.inf),
    )


def round_inputs(x: Tensor, group: int) -> Tensor:
    """`x` [..., in] as matmuls with grouped weights round it: float32 [..., in].

    The twin of what the operators do, for tests and for where they were not built.
    """
    depth = x.shape[-1]
    padded = pad(x.float(), (0, -depth % group))
    rows = padded.view(*padded.shape[:-1], padded.shape[-1] // group, group)
    most = rows.abs().amax(-1, keepdim=True)
    is_zero = most < _TINY
    most = most + (rows - rows).sum(-1, keepdim=True)  # NaN where something is not finite
    turn = torch.div(torch.full_like(most, 127), most)  # `127 / most` would round twice
    numbers = (rows * torch.where(is_zero, 0, turn)).round_()
    found: Tensor = numbers * torch.where(is_zero, 0, most / 127)
    return found.view(padded.shape)[..., :depth]


class TorchGroupedLinear:
    """A grouped weight multiplied by PyTorch. See `PackedLinear`."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.detach().float()
        held = (weight.numbers, weight.scales, weight.factors, weight.lowest, self._bias)
        self.nbytes = sum(each.nbytes for each in held if each is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [..., in] -> [..., out], of its dtype."""
        weight = self._weight
        inputs = x.float() if weight.has_full_inputs else round_inputs(x, weight.group)
        return linear(inputs, weight.floats(), self._bias).to(x.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """The weights [n, in] of the outputs `ids` [n], float32."""
        return self._weight.taken(ids).floats()


def pack_grouped(weight: GroupedWeight, bias: Tensor | None = None) -> PackedLinear:
    """A grouped weight and `bias` [out], ready to be multiplied with; neither is changed."""
    if is_available():
        is_float = weight.numbers.is_floating_point()
        return NativeLinear.of_groups(
            weight.numbers.view(torch.uint8) if is_float else weight.numbers,
            weight.scales,
            weight.lowest,
            weight.factors,
            None if bias is None else bias.detach(),
            bits=weight.bits,
            group=weight.group,
            has_full_inputs=weight.has_full_inputs,
            levels=weight.levels,
        )
    return TorchGroupedLinear(weight, bias)
