"""Checkpoints of packed weights, read as they are: see `packed_forms`.

transformers loads a model from plain weights, under names that it may change on the way. So it is
given what the packed ones stand for, and each layer's weight is recognised by its numbers: what is
known of it in groups is attached, and a pass packs that. A weight that no group form fits (inputs
in another order, groups of another size) stays plain: it computes the same, and takes more memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from aioengine.errors import ModelLoadError
from aioengine.kernels.experts import can_pack_experts
from aioengine.kernels.grouped import GroupedWeight, can_group
from aioengine.models.quantization.grouped_layers import attach, expert_weights
from aioengine.models.quantization.packed_floats import Fp4Experts
from aioengine.models.quantization.packed_forms import Form, form_of

__all__ = ["PackedWeights", "packing_of", "read_packed", "unreadable"]

_Place = Callable[[], Tensor]
_OF_EXPERTS = 3
"""Dimensions of the weights of experts."""
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class PackedWeights:
    """Weights of a checkpoint: plain ones by name, and what is known of some in groups."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.plain: dict[str, Tensor] = {}
        self._dtype = dtype
        self._known: dict[tuple[object, ...], list[tuple[Tensor, GroupedWeight]]] = {}

    def add_plain(self, name: str, weight: Tensor) -> None:
        """Add a weight that is not packed."""
        self.plain[name] = weight.to(self._dtype)

    def add_grouped(self, name: str, weight: GroupedWeight, num_experts: int | None = None) -> None:
        """Add a packed weight; that of several experts is [E, in, out] in the model."""
        # What it stands for is rounded as the groups' scales are.
        plain = weight.floats().to(self._dtype)
        if num_experts is not None:
            plain = plain.view(num_experts, -1, plain.shape[-1]).mT.contiguous()
        self.plain[name] = plain
        if can_group(self._dtype):
            self._known.setdefault(_key(plain), []).append((plain, weight))

    def attach(self, model: nn.Module) -> int:
        """Say of layers what their weights are in groups; of how many weights it is known."""
        count = 0
        for module in model.modules():
            for name, weight in _weights_of(module):
                found = self._find(weight)
                if found is None and weight.dim() == _OF_EXPERTS:
                    found = self._joined(expert_weights(module)[name])
                if found is not None:
                    attach(module, found, name)
                    count += 1
        return count

    def _find(self, weight: Tensor) -> GroupedWeight | None:
        for plain, grouped in self._known.get(_key(weight), ()):
            if torch.equal(plain, weight):
                return grouped
        return None

    def _joined(self, experts: Tensor) -> GroupedWeight | None:
        """Experts' weights [E, out, in] that were joined of one or two matrices for each."""
        found: list[GroupedWeight] = []
        for weight in experts:
            whole = self._find(weight)
            parts = [whole] if whole is not None else [self._find(x) for x in weight.chunk(2)]
            for part in parts:
                if part is None or (found and part.form != found[0].form):
                    return None
                found.append(part)
        return GroupedWeight.joined(found)


def _weights_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The weights of a module that may be known in groups, by name."""
    if type(module) is nn.Linear or isinstance(module, nn.Embedding):
        return [("weight", module.weight)] if module.weight.device.type == "cpu" else []
    experts = expert_weights(module).items()
    return [(name, getattr(module, name)) for name, each in experts if can_pack_experts(each)]


def _key(weight: Tensor) -> tuple[object, ...]:
    """A few numbers of a weight, by which it is looked for."""
    some = weight.detach().flatten()[:: max(1, weight.numel() // 16)][:16]
    return tuple(weight.shape), weight.dtype, tuple(some.tolist())


def packing_of(hf_config: Any) -> Mapping[str, Any] | None:
    """A config's field about packed weights that are read here, if it has one."""
    for config in (hf_config, hf_config.get_text_config(decoder=True)):
        packing = getattr(config, "quantization_config", None)
        if isinstance(packing, Mapping) and form_of(packing) is not None:
            return None if unreadable(packing) else packing
    return None


def unreadable(packing: Mapping[str, Any]) -> str:
    """Say why a field about packed weights is not read here; nothing where it is."""
    form = form_of(packing)
    name = str(packing.get("quant_method"))[:40]
    return f"{name!r} is not read here" if form is None else form.refusal(packing)


def read_packed(
    folder: str | os.PathLike[str], packing: Mapping[str, Any], dtype: torch.dtype
) -> PackedWeights:
    """Read all safetensors files of a folder. Raises ModelLoadError for what does not fit."""
    form = form_of(packing)
    assert form is not None
    found = PackedWeights(dtype)
    parts: dict[str, dict[str, _Place]] = {}
    with ExitStack() as stack:
        for name, place in _places(Path(folder), stack):
            layer, _, part = name.rpartition(form.joint)
            if part in form.parts:
                parts.setdefault(layer, {})[part] = place
            else:
                found.plain[name] = place()
        # One by one: what a layer's parts take is free again before the next ones are read.
        for layer, places in parts.items():
            tensors = {part: place() for part, place in places.items()}
            if any(mark in tensors for mark in form.marks):
                _add(found, layer, tensors, form, packing)
            else:  # of something else: transformers says whether it knows them
                found.plain |= {
                    f"{layer}{form.joint}{part}": each for part, each in tensors.items()
                }
    _check_plain(found)
    return found


def _check_plain(found: PackedWeights) -> None:
    """Raise ModelLoadError for numbers that would be taken for weights as they are."""
    bare = sorted(
        name
        for name, each in found.plain.items()
        if each.dtype.itemsize == 1 and (each.is_floating_point() or name.endswith(".weight"))
    )
    if not bare:
        return
    shape = list(found.plain[bare[0]].shape)
    if len(shape) == _OF_EXPERTS:
        raise ModelLoadError(
            f"the packed weight {bare[0]!r} {shape} is of all experts at once, which is not read "
            "in this form. Take the checkpoint that is not quantized, or one with a weight for "
            "each expert"
        )
    raise ModelLoadError(
        f"the packed weight {bare[0]!r} has no scale beside it. Fetch the checkpoint again, or "
        "take the one that is not quantized"
    )


def _add(
    found: PackedWeights,
    layer: str,
    tensors: Mapping[str, Tensor],
    form: Form,
    packing: Mapping[str, Any],
) -> None:
    try:
        weight = form.read(tensors, packing)
        grouped = weight.grouped()
        if not (weight.floats().isfinite().all() if grouped is None else grouped.is_finite):
            raise ValueError("its scales are no finite numbers")
    except (KeyError, RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ModelLoadError(
            f"the packed weight {layer!r} does not fit its config.json "
            f"({type(error).__name__}: {error!s:.120}). Fetch both from one place again"
        ) from error
    if grouped is None:
        found.add_plain(f"{layer}.weight", weight.floats())
    elif isinstance(weight, Fp4Experts):
        found.add_grouped(layer, grouped, weight.num_experts)
    else:
        found.add_grouped(f"{layer}.weight", grouped)


def _places(folder: Path, stack: ExitStack) -> Iterator[tuple[str, _Place]]:
    for path in _files(folder):
        file = stack.enter_context(safe_open(path, framework="pt"))
        for name in file.keys():  # noqa: SIM118, it is no mapping
            yield name, partial(file.get_tensor, name)


def _files(folder: Path) -> list[Path]:
    """The files that transformers would read: a folder may hold the weights twice."""
    one, index = folder / _ONE, folder / _INDEX
    if one.exists() or not index.exists():
        return [one] if one.exists() else sorted(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        return sorted(folder / Path(name).name for name in names)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{_INDEX} has no weight_map: fetch the file again") from error
