"""Blocks of GGUF files: as floats, and as weights in groups.

The layouts are ggml's (ggml/src/ggml-common.h). A block's numbers are exactly those of a weight in
groups of 4 or 8 bits; scales, which some blocks have in two stages, are rounded to float16 there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aioengine.errors import ModelLoadError
from aioengine.kernels.grouped import GroupedWeight
from aioengine.models.quantization.gguf_file import GgufFile
from aioengine.models.quantization.packed_floats import FP4_LEVELS

__all__ = ["BLOCKS", "FLOATS", "check_tensors", "kind_name", "read_floats", "read_grouped"]

FLOATS: Mapping[int, torch.dtype] = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Types that are no blocks."""
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    """Numbers of blocks [n, of a block] as `GroupedWeight` has them, and scales and leasts of their
    groups [n, groups], float32."""

    numbers: Tensor
    scales: Tensor
    leasts: Tensor | None = None


@dataclass(frozen=True)
class _Kind:
    """A type of blocks: its name, numbers and bytes of a block, and what weights of it become."""

    name: str
    unit: int
    size: int
    bits: int
    group: int
    read: Callable[[Tensor], _Numbers]
    levels: tuple[int, ...] | None = None


def kind_name(kind: int) -> str:
    """A type's name, for messages."""
    return BLOCKS[kind].name if kind in BLOCKS else f"type {kind}"


def check_tensors(file: GgufFile) -> None:
    """Raise ModelLoadError for tensors of types that are not read, or beyond the file's end."""
    for name, place in file.tensors.items():
        if place.kind in FLOATS:
            unit, size = 1, FLOATS[place.kind].itemsize
        elif place.kind in BLOCKS:
            unit, size = BLOCKS[place.kind].unit, BLOCKS[place.kind].size
        else:
            known = ", ".join(each.name for each in BLOCKS.values())
            raise ModelLoadError(
                f"the tensor {name[:80]!r} of {file.path.name!r} is of {kind_name(place.kind)}, "
                f"which is not read; floats and {known} are. Take another file of the model"
            )
        try:
            file.bytes_of(name, unit, size)
        except (ValueError, RuntimeError) as error:
            raise ModelLoadError(
                f"{file.path.name!r} is cut short or damaged ({error}): fetch it again"
            ) from error


def read_floats(file: GgufFile, name: str) -> Tensor:
    """A tensor as float32, in its shape."""
    place = file.tensors[name]
    if place.kind in FLOATS:
        dtype = FLOATS[place.kind]
        blocks = file.bytes_of(name, 1, dtype.itemsize)
        return blocks.contiguous().view(dtype).float().view(place.shape)
    return read_grouped(file, name).floats().view(place.shape)


def read_grouped(file: GgufFile, name: str) -> GroupedWeight:
    """A tensor of blocks in groups; dimensions before the last are outputs."""
    place = file.tensors[name]
    kind = BLOCKS[place.kind]
    found = kind.read(file.bytes_of(name, kind.unit, kind.size))
    outputs = found.numbers.numel() // place.shape[-1]
    leasts = found.leasts
    return GroupedWeight.of(
        found.numbers.reshape(outputs, -1).to(torch.int8),
        found.scales.reshape(outputs, -1),
        None if leasts is None else leasts.reshape(outputs, -1),
        bits=kind.bits,
        group=kind.group,
        levels=kind.levels,
    )


def _half(blocks: Tensor, at: int) -> Tensor:
    """A float16 of each block [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _halves(packed: Tensor) -> Tensor:
    """The lower halves of bytes [n, m], then the upper ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fields(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Fields of bytes [n, m]: those at the first shift, then those at the next."""
    return torch.cat([(packed >> shift) & mask for shift in shifts], -1)


def _bits_of(packed: Tensor) -> Tensor:
    """The bits [n, 8 * m] of bytes [n, m], the lowest first."""
    return ((packed[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)


def _q4_0(blocks: Tensor) -> _Numbers:
    return _Numbers(numbers=_halves(blocks[:, 2:]), scales=_half(blocks, 0))


def _q4_1(blocks: Tensor) -> _Numbers:
    return _Numbers(
        numbers=_halves(blocks[:, 4:]), scales=_half(blocks, 0), leasts=_half(blocks, 2)
    )


def _q5_0(blocks: Tensor) -> _Numbers:
    numbers = _halves(blocks[:, 6:]) | _bits_of(blocks[:, 2:6]) << 4
    return _Numbers(numbers=numbers.to(torch.int8) - 16, scales=_half(blocks, 0))


def _q5_1(blocks: Tensor) -> _Numbers:
    numbers = _halves(blocks[:, 8:]) | _bits_of(blocks[:, 4:8]) << 4
    return _Numbers(numbers=numbers, scales=_half(blocks, 0), leasts=_half(blocks, 2))


def _q8_0(blocks: Tensor) -> _Numbers:
    return _Numbers(numbers=blocks[:, 2:].view(torch.int8), scales=_half(blocks, 0))


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and leasts of eight groups [n, 8] in 12 bytes, as Q4_K and Q5_K have them."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6) << 4), -1)
    leasts = torch.cat((middle & 63, (high >> 4) | (middle >> 6) << 4), -1)
    return scales.float(), leasts.float()


def _q4_k(blocks: Tensor) -> _Numbers:
    scales, leasts = _six_bits(blocks[:, 4:16])
    quarters = blocks[:, 16:].reshape(-1, 4, 32)
    return _Numbers(
        numbers=_halves(quarters).flatten(1),
        scales=_half(blocks, 0) * scales,
        leasts=-_half(blocks, 2) * leasts,
    )


def _q5_k(blocks: Tensor) -> _Numbers:
    scales, leasts = _six_bits(blocks[:, 4:16])
    fifth = _fields(blocks[:, 16:48], tuple(range(8)), 1)
    numbers = _halves(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1) | fifth << 4
    return _Numbers(
        numbers=numbers, scales=_half(blocks, 0) * scales, leasts=-_half(blocks, 2) * leasts
    )


def _q6_k(blocks: Tensor) -> _Numbers:
    low = _halves(blocks[:, :128].reshape(-1, 2, 64))
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), (0, 2, 4, 6), 3)
    numbers = (low | high << 4).flatten(1).to(torch.int8) - 32
    scales = blocks[:, 192:208].view(torch.int8).float()
    return _Numbers(numbers=numbers, scales=_half(blocks, 208) * scales)


def _q2_k(blocks: Tensor) -> _Numbers:
    numbers = _fields(blocks[:, 16:80].reshape(-1, 2, 32), (0, 2, 4, 6), 3).flatten(1)
    packed = blocks[:, :16]
    return _Numbers(
        numbers=numbers,
        scales=_half(blocks, 80) * (packed & 15).float(),
        leasts=-_half(blocks, 82) * (packed >> 4).float(),
    )


def _q3_k(blocks: Tensor) -> _Numbers:
    low = _fields(blocks[:, 32:96].reshape(-1, 2, 32), (0, 2, 4, 6), 3).flatten(1)
    high = _fields(blocks[:, :32], tuple(range(8)), 1)
    packed = blocks[:, 96:108]
    scales = _halves(packed[:, :8]) | _fields(packed[:, 8:], (0, 2, 4, 6), 3) << 4
    # From -4 to 3; those of 4 bits stand for 8 less.
    return _Numbers(
        numbers=(low | high << 2) + 4, scales=_half(blocks, 108) * (scales.float() - 32)
    )


def _iq4_nl(blocks: Tensor) -> _Numbers:
    levels = torch.tensor(_IQ4, dtype=torch.int8)
    return _Numbers(numbers=levels[_halves(blocks[:, 2:]).int()], scales=_half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> _Numbers:
    levels = torch.tensor(_IQ4, dtype=torch.int8)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), -1).flatten(1)
    high = torch.stack([(blocks[:, 2:4] >> shift) & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)
    scales = (low | high << 4).float() - 32
    numbers = levels[_halves(blocks[:, 8:].reshape(-1, 8, 16)).flatten(1).int()]
    return _Numbers(numbers=numbers, scales=_half(blocks, 0) * scales)


def _mxfp4(blocks: Tensor) -> _Numbers:
    levels = torch.tensor(FP4_LEVELS, dtype=torch.int8)
    scales = torch.exp2(blocks[:, :1].float() - 128)
    return _Numbers(numbers=levels[_halves(blocks[:, 1:]).int()], scales=scales)


BLOCKS: Mapping[int, _Kind] = {
    2: _Kind("Q4_0", 32, 18, 4, 32, _q4_0),
    3: _Kind("Q4_1", 32, 20, 4, 32, _q4_1),
    6: _Kind("Q5_0", 32, 22, 8, 32, _q5_0),
    7: _Kind("Q5_1", 32, 24, 8, 32, _q5_1),
    8: _Kind("Q8_0", 32, 34, 8, 32, _q8_0),
    10: _Kind("Q2_K", 256, 84, 4, 16, _q2_k),
    11: _Kind("Q3_K", 256, 110, 4, 16, _q3_k),
    12: _Kind("Q4_K", 256, 144, 4, 32, _q4_k),
    13: _Kind("Q5_K", 256, 176, 8, 32, _q5_k),
    14: _Kind("Q6_K", 256, 210, 8, 16, _q6_k),
    20: _Kind("IQ4_NL", 32, 18, 4, 32, _iq4_nl, _IQ4),
    23: _Kind("IQ4_XS", 256, 136, 4, 32, _iq4_xs, _IQ4),
    39: _Kind("MXFP4", 32, 17, 4, 32, _mxfp4, FP4_LEVELS),
}
"""By ggml's number. Those that need tables or have fewer bits than two are not read."""
