"""Layers whose weights are known in groups, which passes look for.

A layer keeps its plain weight until a pass packs it; `attach` says beside it what the weight is in
groups, and a pass that finds this packs that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from aioengine.kernels.grouped import GroupedWeight

__all__ = [
    "attach",
    "forget",
    "grouped_of",
    "joined_groups",
    "keep_inputs",
    "rounds_inputs",
    "stand_in",
    "unpacked_names",
]

_NAME = "aioengine_grouped_weight"


def attach(module: nn.Module, weight: GroupedWeight) -> None:
    """Say what the weight of a linear layer or of embeddings is in groups; mutates the module."""
    setattr(module, _NAME, weight)


def grouped_of(module: nn.Module) -> GroupedWeight | None:
    """A module's weight in groups, if it is known."""
    found: GroupedWeight | None = getattr(module, _NAME, None)
    return found


def forget(module: nn.Module) -> None:
    """Forget what a module's weight is in groups, if it is known; mutates the module."""
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
    """Return whether a module rounds what it multiplies its weight in groups with."""
    weight = grouped_of(module)
    return weight is not None and not weight.has_full_inputs


def unpacked_names(model: nn.Module) -> list[str]:
    """Names of modules that no pass has packed, though their plain weights are gone."""
    return [
        name
        for name, module in model.named_modules()
        if grouped_of(module) is not None and not any(module.weight.stride())
    ]


def keep_inputs(model: nn.Module) -> None:
    """Have inputs of layers whose weights are known in groups stay what they are."""
    for module in model.modules():
        weight = grouped_of(module)
        if weight is not None:
            attach(module, replace(weight, has_full_inputs=True))


def stand_in(weight: Tensor) -> nn.Parameter:
    """A parameter of a weight's shape, dtype and device, which takes no memory; all NaN."""
    empty = torch.full((1, 1), torch.nan, dtype=weight.dtype, device=weight.device)
    return nn.Parameter(empty.expand(weight.shape), requires_grad=False)
