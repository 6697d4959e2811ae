"""The one way in which a pass puts a faster form in a module's place.

The module stays the object it was, so that whoever holds it, hooks it or finds it by its path goes
on as before; its class changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

__all__ = ["is_hooked", "pass_on", "route", "subclass", "swap"]

_COLLECTING = "transformers.utils.output_capturing"


def swap(module: nn.Module, kind: type[nn.Module], **attributes: object) -> None:
    """Make `module` one of `kind`, with these attributes."""
    module.__class__ = kind
    for name, value in attributes.items():
        setattr(module, name, value)


def is_hooked(module: nn.Module) -> bool:
    """Return whether somebody listens to a module's calls.

    The hooks that transformers leaves behind a model's first call do not count: they collect hidden
    states where these are asked for, and a module that is swapped goes on giving them.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(getattr(hook, "__module__", None) != _COLLECTING for hook in hooks)


def route(modules: Iterable[Any], name: str, field: str = "_attn_implementation_internal") -> None:
    """Make modules ask for the function `name`, of attention by default; mutates their `config`.

    `field`: where a config names it. A config object may be shared with others, which must go on as
    before: each is copied once, and only the copy changes.
    """
    copies: dict[int, Any] = {}
    for module in modules:
        config = module.config
        if id(config) not in copies:
            routed = copies[id(config)] = copy.copy(config)
            # The public setter would walk into sub-configs that are still shared.
            setattr(routed, field, name)
        module.config = copies[id(config)]


def subclass(kind: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    """A class like `kind`, of its name, its kin and its source, but for its `forward`."""
    kept = ("__module__", "__qualname__", "__firstlineno__")  # the last since Python 3.13
    names = {name: vars(kind)[name] for name in kept if name in vars(kind)}
    return type(kind.__name__, (kind,), {**names, "forward": forward})


def pass_on(layer: nn.Module) -> None:
    """Have `layer` hand on the hidden states that it is given, and free its weights.

    Hidden states are collected of the modules of a class, so it stays one of that class.
    """
    for name in [name for name, _ in layer.named_children()]:
        delattr(layer, name)
    layer._parameters.clear()
    swap(layer, subclass(type(layer), _pass_on))


def _pass_on(_: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden_states
