"""Forms of packed weights: GPTQ, AWQ (GEMM), compressed-tensors, and floats of 8 and 4 bits.

What does not fit its config is refused, since a wrong reading would still compute something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aioengine.kernels.grouped import GroupedWeight
from aioengine.models.quantization.packed_floats import (
    FLOAT_MARKS,
    FLOAT_PARTS,
    FloatScaled,
    Fp4Experts,
    block_of,
    read_floats,
    read_fp4,
)

__all__ = ["Form", "Scaled", "form_of"]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns that the fields of an AWQ word are of."""
_GROUPS = (128, 64, 32, 16)
"""Sizes that operators know, the best first."""
_WORD_BITS = 32
_SHARED = ("num_bits", "type", "symmetric", "group_size", "strategy")
"""Of a scheme of compressed-tensors: entries that all schemes must agree on."""
_Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A weight [out, in]: (numbers - zeros) * scales, each of which is of so many inputs.

    `numbers` have no sign; `scales`, `zeros` [out, groups]; `order` [in]: an input's group.
    """

    numbers: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    order: Tensor | None = None

    def floats(self) -> Tensor:
        """The weight, float32."""
        numbers = self.numbers.float()
        if self.order is not None:
            zeros, scales = self.zeros[:, self.order], self.scales[:, self.order]
            return (numbers - zeros) * scales
        grouped = numbers.view(*self.scales.shape, -1)
        return ((grouped - self.zeros[..., None]) * self.scales[..., None]).view(numbers.shape)

    def grouped(self) -> GroupedWeight | None:
        """The weight in groups that operators know; None if it is not of such."""
        depth = self.numbers.shape[1]
        size = depth // self.scales.shape[1]
        group = next((each for each in _GROUPS if size % each == 0), None)
        if self.order is not None or group is None:
            return None
        scales, zeros = (x.repeat_interleave(size // group, 1) for x in (self.scales, self.zeros))
        numbers, lowest = self.numbers, None
        middle = 2 ** (self.bits - 1)
        if self.bits == 8:
            numbers = numbers - middle
            if not bool((zeros == middle).all()):
                lowest = (middle - zeros) * scales
        elif not bool((zeros == middle).all()):
            is_small = bool((zeros < 2**self.bits).all())
            lowest = (zeros * 16).to(torch.uint8) if is_small else -zeros * scales
        return GroupedWeight.of(numbers.to(torch.int8), scales, lowest, bits=self.bits, group=group)


@dataclass(frozen=True)
class Form:
    """One way of packing. `parts`: names of a weight's tensors; `marks`: those of them that only
    packed weights have, of which there is one; `joint`: what stands before them in a name."""

    parts: tuple[str, ...]
    marks: tuple[str, ...]
    refusal: Callable[[Mapping[str, Any]], str]
    read: Callable[[_Tensors, Mapping[str, Any]], Scaled | FloatScaled | Fp4Experts]
    joint: str = "."


def _fields(words: Tensor, bits: int) -> Tensor:
    """The numbers uint8 [..., n * fields] of words int32 [..., n], the lowest bits first."""
    if words.dtype is not torch.int32:
        raise ValueError(f"numbers are packed in {words.dtype} and not in torch.int32")
    found = words.contiguous().view(torch.uint8)
    return found if bits == 8 else torch.stack((found & 15, found >> 4), -1).flatten(-2)


def _floats(scales: Tensor) -> Tensor:
    if not scales.is_floating_point():
        raise ValueError(f"scales are of {scales.dtype}")
    return scales.float()


def _check(weight: Scaled, size: object) -> Scaled:
    """The weight, if all of it fits; `size`: of a group, if the config says it."""
    outputs, depth = weight.numbers.shape
    groups = weight.scales.shape[1]
    if weight.scales.shape != weight.zeros.shape or weight.scales.shape[0] != outputs or not groups:
        raise ValueError("scales and zeros are of other outputs")
    if isinstance(size, int) and size:
        size = depth if size < 0 else size
        if groups != -(-depth // size) or (weight.order is None and depth % size):
            raise ValueError(f"there are {groups} groups of {size} for {depth} inputs")
    if weight.order is None:
        if depth % groups:
            raise ValueError("groups do not fill the inputs")
    elif weight.order.shape != (depth,):
        raise ValueError("not every input has a group")
    elif not 0 <= int(weight.order.min()) <= int(weight.order.max()) < groups:
        raise ValueError("there is no such group")
    return weight


def _bits_refusal(bits: object) -> str:
    is_known = isinstance(bits, int) and bits in (4, 8)
    return "" if is_known else f"weights of {bits!r:.10} bits are not read here, but of 4 and 8"


def _refuse_gptq(packing: Mapping[str, Any]) -> str:
    form = packing.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2", "", None):
        return f"the form {str(form)[:40]!r} of GPTQ is not read here"
    return _bits_refusal(packing.get("bits"))


def _read_gptq(tensors: _Tensors, packing: Mapping[str, Any]) -> Scaled:
    bits = int(packing["bits"])
    numbers = _fields(tensors["qweight"].T, bits)
    zeros = _fields(tensors["qzeros"], bits).T
    if packing.get("checkpoint_format") != "gptq_v2":
        zeros = zeros.int() + 1
    scales = _floats(tensors["scales"].T)
    order = tensors.get("g_idx")
    if order is not None and order.shape == (0,):
        order = None
    if order is not None:
        size = numbers.shape[1] // max(scales.shape[1], 1)
        in_order = torch.arange(numbers.shape[1], dtype=order.dtype) // max(size, 1)
        order = None if torch.equal(order, in_order) else order.long()
    found = Scaled(numbers=numbers, scales=scales, zeros=zeros.float(), bits=bits, order=order)
    return _check(found, packing.get("group_size"))


def _refuse_awq(packing: Mapping[str, Any]) -> str:
    version = str(packing.get("version", "gemm")).lower()
    if version != "gemm":
        return f"the version {version[:40]!r} of AWQ is not read here"
    bits = packing.get("w_bit") if packing.get("bits") is None else packing["bits"]
    is_known = isinstance(bits, int) and bits == 4
    return "" if is_known else f"AWQ of {bits!r:.10} bits is not read here, but of 4"


def _read_awq(tensors: _Tensors, packing: Mapping[str, Any]) -> Scaled:
    places = torch.tensor(_AWQ_ORDER).argsort()

    def columns(words: Tensor) -> Tensor:
        return _fields(words, 4).view(len(words), -1, len(places))[..., places].flatten(-2)

    numbers, zeros = columns(tensors["qweight"]).T.contiguous(), columns(tensors["qzeros"]).T
    scales = _floats(tensors["scales"].T)
    found = Scaled(numbers=numbers, scales=scales, zeros=zeros.float(), bits=4)
    return _check(found, packing.get("group_size", packing.get("q_group_size")))


def _schemes(packing: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Read what config groups say of weights; nothing for one that is no object."""
    groups = packing.get("config_groups")
    found = groups.values() if isinstance(groups, Mapping) else ()
    weights = [each.get("weights") if isinstance(each, Mapping) else None for each in found]
    return [each if isinstance(each, Mapping) else {} for each in weights]


def _extra(packing: Mapping[str, Any]) -> str:
    """Say what more than the weights' form a config asks for."""
    found = [name for name in ("transform_config", "sparsity_config") if packing.get(name)]
    return f"{found[0]} is not followed here" if found else ""


def _refuse_compressed(packing: Mapping[str, Any]) -> str:
    form = packing.get("format")
    if form != "pack-quantized":
        return f"the format {str(form)[:40]!r} is not read here"
    schemes = _schemes(packing)
    if not schemes or (extra := _extra(packing)):
        return extra if schemes else "its config_groups do not say how"
    first = schemes[0]
    if any(scheme.get(key) != first.get(key) for scheme in schemes for key in _SHARED):
        return "weights in several ways are not read here"
    if first.get("type", "int") != "int":
        return "weights that are no integers are not read here"
    return _bits_refusal(first.get("num_bits"))


def _read_compressed(tensors: _Tensors, packing: Mapping[str, Any]) -> Scaled:
    scheme = _schemes(packing)[0]
    bits = int(scheme["num_bits"])
    outputs, depth = tensors["weight_shape"].tolist()
    numbers = _fields(tensors["weight_packed"], bits)
    scales = _floats(tensors["weight_scale"])
    if numbers.shape != (outputs, -(-depth * bits // _WORD_BITS) * _WORD_BITS // bits):
        raise ValueError(f"it has {list(numbers.shape)} numbers for {outputs} x {depth}")
    zeros = torch.full_like(scales, 2 ** (bits - 1))
    if "weight_zero_point" in tensors:
        zeros = _zeros(tensors["weight_zero_point"], bits, outputs)
    elif scheme.get("symmetric") is False:
        raise ValueError("it is not symmetric, and has no zeros")
    order = tensors.get("weight_g_idx")
    if order is not None and (order.shape == (0,) or bool((order == -1).any())):
        order = None  # the library's own sign of inputs in order
    order = None if order is None else order.long()
    numbers = numbers[:, :depth].contiguous()
    found = Scaled(numbers=numbers, scales=scales, zeros=zeros, bits=bits, order=order)
    return _check(found, scheme.get("group_size"))


def _zeros(zeros: Tensor, bits: int, outputs: int) -> Tensor:
    """Zero points [outputs, groups], packed along the outputs; earlier versions did not pack."""
    if zeros.dtype is torch.int8:
        signed: Tensor = zeros.float() + 2 ** (bits - 1)
        return signed
    found = _fields(zeros.T, bits).T
    if len(found) != -(-outputs * bits // _WORD_BITS) * _WORD_BITS // bits:
        raise ValueError("zeros are of other outputs")
    return found[:outputs].float()


def _refuse_fp8(packing: Mapping[str, Any]) -> str:
    kind = packing.get("fmt", packing.get("format", "e4m3"))
    if kind not in ("e4m3", None):
        return f"the floats {str(kind)[:40]!r} of fp8 are not read here"
    block = block_of(packing)
    return block if isinstance(block, str) else ""


def _read_fp8(tensors: _Tensors, packing: Mapping[str, Any]) -> FloatScaled:
    block = block_of(packing)
    assert not isinstance(block, str)
    return read_floats(tensors, block)


def _refuse_float_quantized(packing: Mapping[str, Any]) -> str:
    schemes = _schemes(packing)
    if not schemes or (extra := _extra(packing)):
        return extra if schemes else "its config_groups do not say how"
    first = schemes[0]
    if any(scheme != first for scheme in schemes):
        return "weights in several ways are not read here"
    if first.get("type") != "float" or first.get("num_bits") != 8:
        return "floats of other than 8 bits are not read here"
    strategy = first.get("strategy")
    if strategy not in ("tensor", "channel", "block") or first.get("symmetric") is False:
        return f"scales by {str(strategy)[:40]!r} are not read here"
    block = block_of({"weight_block_size": first.get("block_structure")})
    if strategy == "block" and not isinstance(block, tuple):
        return block or "the size of its blocks is not said"
    return ""


def _read_float_quantized(tensors: _Tensors, packing: Mapping[str, Any]) -> FloatScaled:
    scheme = _schemes(packing)[0]
    is_block = scheme["strategy"] == "block"
    block = block_of({"weight_block_size": scheme["block_structure"]}) if is_block else None
    assert not isinstance(block, str)
    return read_floats(tensors, block)


_FLOATS = FLOAT_PARTS, FLOAT_MARKS
_FORMS: Mapping[str, Form] = {
    "gptq": Form(("qweight", "qzeros", "scales", "g_idx"), ("qweight",), _refuse_gptq, _read_gptq),
    "awq": Form(("qweight", "qzeros", "scales"), ("qweight",), _refuse_awq, _read_awq),
    "compressed-tensors": Form(
        ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
        ("weight_packed",),
        _refuse_compressed,
        _read_compressed,
    ),
    "fp8": Form(*_FLOATS, _refuse_fp8, _read_fp8),
    "mxfp4": Form(
        ("blocks", "scales"), ("blocks",), lambda _: "", lambda parts, _: read_fp4(parts), "_"
    ),
}
_FLOAT_QUANTIZED = Form(*_FLOATS, _refuse_float_quantized, _read_float_quantized)


def form_of(packing: Mapping[str, Any]) -> Form | None:
    """The form that a config's field is about, if it is one of these."""
    method = packing.get("quant_method")
    if method == "compressed-tensors" and packing.get("format") == "float-quantized":
        return _FLOAT_QUANTIZED
    return _FORMS.get(method) if isinstance(method, str) else None
