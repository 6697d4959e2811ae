"""Weights of floats of 8 and 4 bits with scales.

Of 8 bits (e4m3) with scales of tensors, of outputs, or of blocks: DeepSeek's and Qwen's `fp8`
(blocks of 128 x 128), AutoFP8's, and compressed-tensors' `float-quantized`. What is said of inputs
is not followed: they stay what they are.

Of 4 bits (e2m1) in blocks of 32 with a power of two each: GPT-OSS' experts in `mxfp4` (Open Compute
Project, "Microscaling formats (MX) specification", 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from aioengine.kernels.grouped import GroupedWeight, e4m3_weight

__all__ = [
    "FLOAT_MARKS",
    "FLOAT_PARTS",
    "FP4_LEVELS",
    "FloatScaled",
    "Fp4Experts",
    "block_of",
    "read_floats",
    "read_fp4",
]

FLOAT_MARKS = ("weight_scale_inv", "weight_scale")
"""Tensors beside a weight that is packed; either is multiplied by."""
FLOAT_PARTS = ("weight", *FLOAT_MARKS, "input_scale", "activation_scale")
FP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of e2m1, by their codes."""
_FP4_GROUP = 32
_NAN_SCALE = 255
_GROUPS = (128, 64, 32, 16)
_WIDEST = 128
_SIZE_BITS = _NAN_BITS = 0x7F
_FAR = 2.0**12
"""Times another scale: beyond that, this one would be kept to fewer than 13 bits."""


@dataclass(frozen=True, kw_only=True)
class FloatScaled:
    """A weight [out, in]: `numbers` of finite float8_e4m3fn times their block's scale.

    `scales` [blocks of outputs, blocks of inputs] float32; `block`: outputs and inputs of one.
    """

    numbers: Tensor
    scales: Tensor
    block: tuple[int, int]

    def _of_outputs(self) -> Tensor:
        outputs = self.numbers.shape[0]
        return self.scales.repeat_interleave(self.block[0], 0)[:outputs]

    def floats(self) -> Tensor:
        """The weight, float32."""
        scales = self._of_outputs().repeat_interleave(self.block[1], 1)
        found: Tensor = self.numbers.float() * scales[:, : self.numbers.shape[1]]
        return found

    def grouped(self) -> GroupedWeight | None:
        """The weight in groups that operators know; None if it is not of such."""
        depth, size = self.numbers.shape[1], self.block[1]
        size = _WIDEST if size >= depth else size
        group = next((each for each in _GROUPS if size % each == 0), None)
        if group is None:
            return None
        scales = self._of_outputs().repeat_interleave(size // group, 1)
        count = -(-depth // group)
        scales = scales.expand(-1, count) if scales.shape[1] == 1 else scales[:, :count]
        codes = self.numbers.view(torch.uint8) & _SIZE_BITS
        is_zero = pad(codes, (0, count * group - depth)).view(-1, count, group).amax(-1) == 0
        scales = scales.masked_fill(is_zero, 0)  # which nothing is multiplied by
        return None if _are_far_apart(scales) else e4m3_weight(self.numbers, scales, group)


def _are_far_apart(scales: Tensor) -> bool:
    """Return whether an output's largest scale is too large to keep others beside it."""
    most = scales.abs().amax(1, keepdim=True)
    return bool(((scales != 0) & (scales.abs() * _FAR < most)).any())


@dataclass(frozen=True, kw_only=True)
class Fp4Experts:
    """Weights of experts: `numbers` [E, out, in] int8 of `FP4_LEVELS` times their block's scale.

    `scales` [E, out, blocks] float32.
    """

    numbers: Tensor
    scales: Tensor

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return len(self.numbers)

    def floats(self) -> Tensor:
        """The weights [E * out, in], float32."""
        return self.grouped().floats()

    def grouped(self) -> GroupedWeight:
        """The weights in groups."""
        is_zero = ~self.numbers.view(*self.scales.shape, _FP4_GROUP).any(-1)
        scales = self.scales.masked_fill(is_zero, 0)  # which nothing is multiplied by
        return GroupedWeight.of(
            self.numbers.flatten(0, 1),
            scales.flatten(0, 1),
            None,
            bits=4,
            group=_FP4_GROUP,
            levels=FP4_LEVELS,
        )


def read_fp4(tensors: Mapping[str, Tensor]) -> Fp4Experts:
    """Read experts' weights in blocks. Raises ValueError for what does not fit."""
    blocks, scales = tensors["blocks"], tensors["scales"]
    if blocks.dtype is not torch.uint8 or scales.dtype is not torch.uint8:
        raise ValueError(f"its blocks and scales are {blocks.dtype} and {scales.dtype}, not uint8")
    if blocks.dim() != 4 or blocks.shape[3] * 2 != _FP4_GROUP or scales.shape != blocks.shape[:3]:
        raise ValueError(f"it has {list(scales.shape)} scales for {list(blocks.shape)} bytes")
    if bool((scales == _NAN_SCALE).any()):
        raise ValueError("some of its scales are NaN")
    levels = torch.tensor(FP4_LEVELS, dtype=torch.int8)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(2)
    return Fp4Experts(numbers=levels[codes.int()], scales=torch.exp2(scales.float() - 128))


def block_of(packing: Mapping[str, Any]) -> tuple[int, int] | str | None:
    """Read outputs and inputs of a block from a config; None: a scale for all or for each output.

    Text says why the field is not read.
    """
    size = packing.get("weight_block_size")
    if isinstance(size, str):
        size = [int(each) for each in size.split("x") if each.isdecimal()]
    if size is None:
        return None
    is_pair = isinstance(size, list | tuple) and len(size) == 2
    if not is_pair or not all(type(each) is int and each > 0 for each in size):
        return f"blocks of {size!r:.20} are not read here, but of two numbers"
    return size[0], size[1]


def read_floats(tensors: Mapping[str, Tensor], block: tuple[int, int] | None) -> FloatScaled:
    """Read a weight whose scale is beside it. Raises ValueError for what does not fit."""
    numbers = tensors["weight"]
    found = [tensors[name] for name in FLOAT_MARKS if name in tensors]
    if len(found) > 1:
        raise ValueError(f"it has both {' and '.join(FLOAT_MARKS)}")
    scales = found[0]
    if numbers.dtype is not torch.float8_e4m3fn:
        raise ValueError(f"its numbers are {numbers.dtype} and not float8_e4m3fn")
    if numbers.dim() != 2:
        raise ValueError(f"its numbers are {list(numbers.shape)} and not [outputs, inputs]")
    if bool(((numbers.view(torch.uint8) & _NAN_BITS) == _NAN_BITS).any()):
        raise ValueError("some of its numbers are NaN")
    if not scales.is_floating_point() or not bool(scales.isfinite().all()):
        raise ValueError("its scales are no finite floats")
    outputs, depth = numbers.shape
    scales = scales.float()
    if block is None and scales.shape == (-(-outputs // _WIDEST), -(-depth // _WIDEST)):
        block = _WIDEST, _WIDEST  # as is usual, where nothing is said
    if block is None:
        if scales.numel() != 1 and scales.shape not in ((outputs,), (outputs, 1)):
            raise ValueError(f"it has {list(scales.shape)} scales for {outputs} outputs")
        size = outputs if scales.numel() == 1 else 1
        return FloatScaled(numbers=numbers, scales=scales.reshape(-1, 1), block=(size, depth))
    if scales.shape != (-(-outputs // block[0]), -(-depth // block[1])):
        raise ValueError(f"it has {list(scales.shape)} scales of blocks for {outputs} x {depth}")
    block = min(block[0], outputs), min(block[1], depth)
    return FloatScaled(numbers=numbers, scales=scales, block=block)
