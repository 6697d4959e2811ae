"""Layers whose weights are known in groups, which passes look for.

A layer keeps its plain weight until a pass packs it; `attach` says beside it what the weight is in
groups, and a pass that finds this packs that. Routed experts have their weights in one parameter
[E, out, in], which is known as one of [E * out, in].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from aioengine.kernels.grouped import GroupedWeight

__all__ = [
    "attach",
    "expert_weights",
    "forget",
    "grouped_of",
    "joined_groups",
    "keep_inputs",
    "known_groups",
    "rounds_inputs",
    "stand_in",
    "unpacked_names",
]

_NAME = "aioengine_grouped_weights"
_EXPERT_NAMES = ("gate_up_proj", "up_proj", "down_proj")


def attach(module: nn.Module, weight: GroupedWeight, name: str = "weight") -> None:
    """Say what a parameter of a module is in groups, mostly its weight; mutates the module."""
    module.__dict__.setdefault(_NAME, {})[name] = weight


def known_groups(module: nn.Module) -> Mapping[str, GroupedWeight]:
    """A module's parameters that are known in groups, by name."""
    found: Mapping[str, GroupedWeight] = module.__dict__.get(_NAME, {})
    return found


def grouped_of(module: nn.Module, name: str = "weight") -> GroupedWeight | None:
    """A module's parameter in groups, if it is known."""
    return known_groups(module).get(name)


def forget(module: nn.Module) -> None:
    """Forget what a module's parameters are in groups, if they are known; mutates the module."""
    module.__dict__.pop(_NAME, None)


def joined_groups(modules: Sequence[nn.Module]) -> GroupedWeight | None:
    """The weights of several layers as one, None unless all are known; they are forgotten."""
    weights = [each for each in map(grouped_of, modules) if each is not None]
    if len(weights) < len(modules):
        return None
    for module in modules:
        forget(module)
    return GroupedWeight.joined(weights)


def rounds_inputs(module: nn.Module) -> bool:
    """Return whether a module rounds what it multiplies a weight in groups with."""
    return any(not weight.has_full_inputs for weight in known_groups(module).values())


def unpacked_names(model: nn.Module) -> list[str]:
    """Names of modules that no pass has packed, though their plain weights are gone."""
    return [
        path
        for path, module in model.named_modules()
        if any(not any(getattr(module, name).stride()) for name in known_groups(module))
    ]


def keep_inputs(model: nn.Module) -> None:
    """Have inputs of layers whose weights are known in groups stay what they are."""
    for module in model.modules():
        for name, weight in known_groups(module).items():
            attach(module, replace(weight, has_full_inputs=True), name)


def expert_weights(module: nn.Module) -> dict[str, Tensor]:
    """The weights of a layer of routed experts, by name, as [E, out, in]; none of other layers.

    A layer is one of experts if transformers looks up a function for it (`ALL_EXPERTS_FUNCTIONS`).
    """
    is_transposed = getattr(module, "is_transposed", None)
    found = {
        name: each
        for name in _EXPERT_NAMES
        if (each := module._parameters.get(name)) is not None and each.dim() == 3
    }
    config = getattr(module, "config", None)
    is_asking = getattr(config, "_experts_implementation", None) is not None
    if not is_asking or is_transposed is None or "down_proj" not in found or len(found) != 2:
        return {}
    return {name: each.mT if is_transposed else each for name, each in found.items()}


def stand_in(weight: Tensor) -> nn.Parameter:
    """A parameter of a weight's shape, dtype and device, which takes no memory; all NaN."""
    empty = torch.full((1,) * weight.dim(), torch.nan, dtype=weight.dtype, device=weight.device)
    return nn.Parameter(empty.expand(weight.shape), requires_grad=False)
