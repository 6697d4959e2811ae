"""Encoder layers whose output nobody reads, left out.

A config may say which of a tower's hidden states are its features (`vision_feature_layer`): the
second last, say, and then the last layer runs for nothing. Such layers hand on what they are given,
and their weights are freed. Their number stays, so that hidden states have the places they had.

Only where the code that calls the tower takes of its output no more than those hidden states, and
where the layers are called the way that was tried.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PassedOn", "trim_encoders"]

_CALLERS = ("get_image_features", "get_video_features")


class PassedOn(nn.Module):
    """Stand-in for a layer: its output is its input, alone or as the first of a tuple."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """`hidden_states` as they are."""
        return (hidden_states,) if self.gives_tuple else hidden_states

    gives_tuple: bool


def trim_encoders(model: nn.Module) -> int:
    """Free the layers of towers in `model` that are computed for nothing; mutates them.

    Returns how many there were.
    """
    count = 0
    for owner in list(model.modules()):
        config = getattr(owner, "config", None)
        chosen = getattr(config, "vision_feature_layer", None)
        chosen = [chosen] if isinstance(chosen, int) else chosen
        if not isinstance(chosen, list | tuple) or not chosen:
            continue
        for tower in _towers(owner):
            layers = _layers(tower)
            if layers is None or not all(isinstance(each, int) for each in chosen):
                continue
            # Hidden state 0 is what goes into the first layer.
            states = len(layers) + 1
            used = max(each if each >= 0 else states + each for each in chosen)
            for layer in list(layers)[max(used, 0) :]:
                count += _pass_on(layer)
    return count


def _towers(owner: nn.Module) -> Iterator[nn.Module]:
    """Children that `owner` encodes media with, and of whose outputs it reads hidden states only.

    All methods that encode must say so.
    """
    methods = [getattr(type(owner), name, None) for name in _CALLERS]
    try:
        sources = [inspect.getsource(inspect.unwrap(method)) for method in methods if method]
    except (OSError, TypeError):  # no code to read
        return
    for name, child in owner.named_children():
        calls = [source for source in sources if f"self.{name}(" in source]
        if calls and all(_reads_states_only(source, name) for source in calls):
            yield child


def _reads_states_only(source: str, name: str) -> bool:
    found = re.findall(rf"(\w+)(?:: [^=\n]+)? = self\.{name}\(", source)
    if len(found) != 1 or source.count(f"self.{name}(") != 1:
        return False
    # The output may be read by the index that the config names, given the rows, and returned.
    output = re.escape(found[0])
    index = r"(?:vision_feature_layer|layer_idx)"
    left = re.sub(
        rf"\b{output}(?::[^=\n]+)? = self\.{name}\(|\breturn {output}\n"
        rf"|\b{output}\.hidden_states\[{index}\]|\b{output}\.pooler_output = ",
        "",
        source,
    )
    return re.search(rf"\b{output}\b", left) is None and "hidden_states[" in source


def _layers(tower: nn.Module) -> nn.ModuleList | None:
    """The tower's one list of as many layers as its config says."""
    number = getattr(getattr(tower, "config", None), "num_hidden_layers", None)
    lists = [module for module in tower.modules() if isinstance(module, nn.ModuleList)]
    found = [each for each in lists if len(each) == number]
    return found[0] if len(found) == 1 and len(lists) == 1 else None


def _pass_on(layer: nn.Module) -> bool:
    """Make a layer hand on its input, if a trial shows what it returns."""
    weight = next(layer.parameters())
    norm = next((each for each in layer.modules() if isinstance(each, nn.LayerNorm)), None)
    if norm is None:
        return False
    hidden = torch.zeros(1, 2, norm.normalized_shape[0], dtype=weight.dtype, device=weight.device)
    try:
        with torch.no_grad():
            output = layer(hidden, None)
    except (TypeError, RuntimeError, ValueError, AttributeError):
        return False  # it wants more than its input and a mask
    gives_tuple = isinstance(output, tuple)
    first = output[0] if gives_tuple else output
    if not isinstance(first, Tensor) or first.shape != hidden.shape:
        return False
    hooks = layer._forward_hooks
    for name in [name for name, _ in layer.named_children()]:
        delattr(layer, name)
    layer._parameters.clear()
    layer.__class__ = _passed_on(type(layer))
    setattr(layer, "gives_tuple", gives_tuple)  # noqa: B010
    assert layer._forward_hooks is hooks
    return True


def _passed_on(kind: type[nn.Module]) -> type[nn.Module]:
    # Hidden states are collected of the modules of a class, so it is to be one of that class.
    return type(kind.__name__, (PassedOn, kind), {})
