"""Checkpoints of packed weights, read as they are: GPTQ, AWQ and compressed-tensors.

transformers loads a model from plain weights, under names that it may change on the way. So it is
given what the packed ones stand for, and each layer's weight is recognised by its numbers: what is
known of it in groups is attached, and a pass packs that. A weight that no group form fits (inputs
in another order, groups of another size) stays plain: it computes the same, and takes more memory.

The forms are those that AutoGPTQ, AutoAWQ (GEMM) and compressed-tensors write.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from aioengine.errors import ModelLoadError
from aioengine.kernels.grouped import GroupedWeight, can_group
from aioengine.models.quantization.grouped_layers import attach

__all__ = ["PackedWeights", "packing_of", "read_packed", "unreadable"]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns that the fields of an AWQ word are of."""
_GROUPS = (128, 64, 32)
"""Sizes that operators know, the best first."""
_WORD_BITS = 32
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class _Scaled:
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
            if not bool((zeros == middle).all()):
                return None
            numbers = numbers - middle
        elif not bool((zeros == middle).all()):
            is_small = bool((zeros < 2**self.bits).all())
            lowest = (zeros * 16).to(torch.uint8) if is_small else -zeros * scales
        return GroupedWeight.of(numbers.to(torch.int8), scales, lowest, bits=self.bits, group=group)


class PackedWeights:
    """Weights of a checkpoint: plain ones by name, and what is known of some in groups."""

    def __init__(self, dtype: torch.dtype, *, has_full_inputs: bool = False) -> None:
        self.plain: dict[str, Tensor] = {}
        self._dtype = dtype
        self._has_full_inputs = has_full_inputs
        self._known: dict[tuple[object, ...], list[tuple[Tensor, GroupedWeight]]] = {}

    def add(self, name: str, weight: _Scaled) -> None:
        """Add a packed weight."""
        grouped = weight.grouped() if can_group(self._dtype) else None
        # What it stands for is rounded as the groups' scales are.
        plain = (weight.floats() if grouped is None else grouped.floats()).to(self._dtype)
        self.plain[name] = plain
        if grouped is not None:
            grouped = replace(grouped, has_full_inputs=self._has_full_inputs)
            self._known.setdefault(_key(plain), []).append((plain, grouped))

    def attach(self, model: nn.Module) -> int:
        """Say of each linear layer whose weight is known what it is in groups; how many are."""
        count = 0
        for module in model.modules():
            if type(module) is not nn.Linear or module.weight.device.type != "cpu":
                continue
            for plain, grouped in self._known.get(_key(module.weight), ()):
                if torch.equal(plain, module.weight):
                    attach(module, grouped)
                    count += 1
                    break
        return count


def _key(weight: Tensor) -> tuple[object, ...]:
    """A few numbers of a weight, by which it is looked for."""
    some = weight.detach().flatten()[:: max(1, weight.numel() // 16)][:16]
    return tuple(weight.shape), weight.dtype, tuple(some.tolist())


def packing_of(hf_config: Any) -> Mapping[str, Any] | None:
    """A config's field about packed weights that are read here, if it has one."""
    for config in (hf_config, hf_config.get_text_config(decoder=True)):
        packing = getattr(config, "quantization_config", None)
        if isinstance(packing, Mapping) and packing.get("quant_method") in _FORMS:
            return None if unreadable(packing) else packing
    return None


def unreadable(packing: Mapping[str, Any]) -> str:
    """Say why a field about packed weights is not read here; nothing where it is."""
    method = packing.get("quant_method")
    form = _FORMS.get(method) if isinstance(method, str) else None
    return f"{str(method)[:40]!r} is not read here" if form is None else form.refusal(packing)


def read_packed(
    folder: str | os.PathLike[str],
    packing: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    has_full_inputs: bool = False,
) -> PackedWeights:
    """Read all safetensors files of a folder. Raises ModelLoadError for what does not fit."""
    form = _FORMS[packing["quant_method"]]
    found = PackedWeights(dtype, has_full_inputs=has_full_inputs)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _tensors(Path(folder)):
        layer, _, part = name.rpartition(".")
        if part in form.parts:
            parts.setdefault(layer, {})[part] = tensor
        else:
            found.plain[name] = tensor
    for layer, tensors in parts.items():
        if form.parts[0] not in tensors:
            # Scales of something else: transformers says whether it knows them.
            found.plain |= {f"{layer}.{part}": tensor for part, tensor in tensors.items()}
            continue
        try:
            weight = form.read(tensors, packing)
            found.add(f"{layer}.weight", weight)
        except (KeyError, RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ModelLoadError(
                f"the packed weight {layer!r} does not fit its config.json "
                f"({type(error).__name__}: {error!s:.120}). Fetch both from one place again"
            ) from error
    return found


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no mapping
                yield name, file.get_tensor(name)


def _files(folder: Path) -> list[Path]:
    """The files that transformers would read: a folder may hold the weights twice."""
    index = folder / _INDEX
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return sorted(folder / Path(name).name for name in names)
    one = folder / _ONE
    return [one] if one.exists() else sorted(folder.glob("*.safetensors"))


# ---- the forms


@dataclass(frozen=True)
class _Form:
    """One way of packing. `parts`: names of a weight's tensors, that of the numbers first."""

    parts: tuple[str, ...]
    refusal: Callable[[Mapping[str, Any]], str]
    read: Callable[[_Tensors, Mapping[str, Any]], _Scaled]


def _fields(words: Tensor, bits: int) -> Tensor:
    """The numbers [..., n * fields] of words int32 [..., n], the lowest bits of a word first."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    fields: Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return fields.view(*words.shape[:-1], words.shape[-1] * len(shifts))


def _check(weight: _Scaled) -> _Scaled:
    outputs, depth = weight.numbers.shape
    groups = weight.scales.shape[1]
    if weight.scales.shape != weight.zeros.shape or weight.scales.shape[0] != outputs:
        raise ValueError("scales and zeros are of other outputs")
    if weight.order is None and depth % groups:
        raise ValueError("groups do not fill the inputs")
    if (
        weight.order is not None
        and not 0 <= int(weight.order.min()) <= int(weight.order.max()) < groups
    ):
        raise ValueError("there is no such group")
    return weight


def _bits_refusal(bits: object) -> str:
    return "" if bits in (4, 8) else f"weights of {str(bits)[:10]} bits are not read here"


def _refuse_gptq(packing: Mapping[str, Any]) -> str:
    form = packing.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2", "", None):
        return f"the form {str(form)[:40]!r} of GPTQ is not read here"
    return _bits_refusal(packing.get("bits"))


def _read_gptq(tensors: _Tensors, packing: Mapping[str, Any]) -> _Scaled:
    bits = int(packing["bits"])
    numbers = _fields(tensors["qweight"].T.contiguous(), bits)
    zeros = _fields(tensors["qzeros"], bits).T
    if packing.get("checkpoint_format") != "gptq_v2":
        zeros = zeros + 1
    scales = tensors["scales"].T.float()
    order = tensors.get("g_idx")
    if order is not None and not order.numel():
        order = None
    if order is not None:
        size = numbers.shape[1] // scales.shape[1]
        in_order = torch.arange(numbers.shape[1], dtype=order.dtype) // max(size, 1)
        order = None if torch.equal(order, in_order) else order.long()
    return _check(
        _Scaled(numbers=numbers, scales=scales, zeros=zeros.float(), bits=bits, order=order)
    )


def _refuse_awq(packing: Mapping[str, Any]) -> str:
    version = str(packing.get("version", "gemm")).lower()
    if version != "gemm":
        return f"the version {version[:40]!r} of AWQ is not read here"
    bits = packing.get("bits", packing.get("w_bit"))
    return "" if bits == 4 else f"AWQ of {str(bits)[:10]} bits is not read here"


def _read_awq(tensors: _Tensors, packing: Mapping[str, Any]) -> _Scaled:
    del packing
    places = torch.tensor(_AWQ_ORDER).argsort()

    def columns(words: Tensor) -> Tensor:
        return _fields(words, 4).view(len(words), -1, len(places))[..., places].flatten(-2)

    numbers, zeros = columns(tensors["qweight"]).T.contiguous(), columns(tensors["qzeros"]).T
    scales = tensors["scales"].T.float()
    return _check(_Scaled(numbers=numbers, scales=scales, zeros=zeros.float(), bits=4))


def _schemes(packing: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = packing.get("config_groups")
    found = groups.values() if isinstance(groups, Mapping) else ()
    return [each.get("weights") or {} for each in found if isinstance(each, Mapping)]


def _refuse_compressed(packing: Mapping[str, Any]) -> str:
    form = packing.get("format")
    if form != "pack-quantized":
        return f"the format {str(form)[:40]!r} is not read here"
    schemes = _schemes(packing)
    if len({scheme.get("num_bits") for scheme in schemes}) != 1:
        return "weights of several widths are not read here"
    if any(scheme.get("type", "int") != "int" for scheme in schemes):
        return "weights that are no integers are not read here"
    return _bits_refusal(schemes[0].get("num_bits"))


def _read_compressed(tensors: _Tensors, packing: Mapping[str, Any]) -> _Scaled:
    bits = int(_schemes(packing)[0]["num_bits"])
    outputs, depth = tensors["weight_shape"].tolist()
    numbers = _fields(tensors["weight_packed"], bits)[:outputs, :depth]
    scales = tensors["weight_scale"].float()
    zeros = torch.full_like(scales, 2 ** (bits - 1))
    if "weight_zero_point" in tensors:
        zeros = _fields(tensors["weight_zero_point"].T.contiguous(), bits).T[:outputs].float()
    order = tensors.get("weight_g_idx")
    order = None if order is None or not order.numel() else order.long()
    found = _Scaled(numbers=numbers, scales=scales, zeros=zeros, bits=bits, order=order)
    return _check(replace(found, numbers=numbers.contiguous()))


_FORMS: Mapping[str, _Form] = {
    "gptq": _Form(("qweight", "qzeros", "scales", "g_idx"), _refuse_gptq, _read_gptq),
    "awq": _Form(("qweight", "qzeros", "scales"), _refuse_awq, _read_awq),
    "compressed-tensors": _Form(
        ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
        _refuse_compressed,
        _read_compressed,
    ),
}
