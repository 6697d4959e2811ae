"""The states that layers keep, found by running them without weights or memory.

A layer is called on the meta device with a cache that notes what is put into it: a sequence first,
which shows the shapes; then, with states of these shapes, a chunk behind it, and single tokens of
two requests, as the engine will call it.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aioengine.errors import ModelLoadError
from aioengine.models.state.layers import CACHES, LayerCache, call_mixer, named_arguments
from aioengine.models.state.memory import PartName, StatePart, StateSpec

__all__ = ["Watch", "settings_of"]

_SHAPES = ((1, 5), (2, 1))
"""Requests and tokens of the calls that are tried: a chunk, and single tokens."""
_LENGTH = 3
_DTYPE = torch.bfloat16
"""Of the calls: a state that is not of it has a dtype of its own in any model."""


class _Noting(LayerCache):
    """A cache of a sequence's first call, which keeps what it is given."""

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """See the base class."""
        width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        state = conv_states.new_empty(*conv_states.shape[:-1], width)
        self.values["conv", state_idx] = state
        return torch.cat([state, conv_states], dim=-1)


class Watch:
    """Notes, of every module of a decoder that takes a cache, how wide the rows are that it is
    called with."""

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = decoder
        self._parts: dict[Hashable, tuple[StatePart, ...]] = {}
        self._widths: dict[str, int] = {}
        self._hooks = [
            module.register_forward_pre_hook(partial(self._note, name), with_kwargs=True)
            for name, module in decoder.named_modules()
            if name
            and not inspect.signature(type(module).forward).parameters.keys().isdisjoint(CACHES)
        ]

    def _note(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden, _ = named_arguments(type(module).forward, args, kwargs)
        is_rows = isinstance(hidden, Tensor) and hidden.dim() == 3
        self._widths[name] = hidden.shape[-1] if is_rows else 0

    def find_states(self, attends: Sequence[str]) -> tuple[StateSpec, ...]:
        """Find what modules keep of a request that have been called meanwhile, hold no other that
        was, and are none of `attends`, which put keys and values into their cache.

        One may leave its cache alone: its spec has no parts. Raises ModelLoadError for one that
        asks its cache, or its caller, for something else.
        """
        takers = [
            name for name in self._widths if not any(_is_within(path, name) for path in attends)
        ]
        found = {name: self._widths[name] for name in takers}
        return tuple(
            StateSpec(name, width, self._parts_of(name, width))
            for name, width in found.items()
            if not any(other != name and _is_within(other, name) for other in takers)
        )

    def drop(self, layers: Sequence[str]) -> None:
        """Forget what was noted of these layers, which only handed on what they were given."""
        for name in layers:
            self._widths.pop(name, None)

    def end(self) -> None:
        """Note no more calls."""
        for hook in self._hooks:
            hook.remove()

    def _parts_of(self, name: str, width: int) -> tuple[StatePart, ...]:
        """Find what a module keeps; of those that are alike one is asked."""
        kind = _kind_of(self._decoder.get_submodule(name), width)
        if kind not in self._parts:
            self._parts[kind] = _parts_of(self._decoder, name, width)
        return self._parts[kind]


def settings_of(layer: nn.Module) -> dict[tuple[str, str], Hashable]:
    """The numbers and names that a layer's modules were made with."""
    return {
        (path, name): value
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str)
    }


def _kind_of(module: nn.Module, width: int) -> Hashable:
    """Describe what a module is made of, but for its number among the layers."""
    settings = settings_of(module).items()
    return (
        width,
        tuple((path, type(each)) for path, each in module.named_modules()),
        tuple((path, tuple(each.shape), each.dtype) for path, each in module.named_parameters()),
        frozenset(each for each in settings if not each[0][1].startswith("layer_i")),
    )


def _is_within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _parts_of(decoder: nn.Module, name: str, width: int) -> tuple[StatePart, ...]:
    module = decoder.get_submodule(name)
    own = next(iter(module.parameters())).dtype
    try:
        if not width:
            raise TypeError("it is not called with hidden states")
        found = _noted(module.to(_DTYPE), width)
    except Exception as error:  # a model's own code may raise anything here
        raise ModelLoadError(
            f"{type(decoder).__name__} keeps a state in {name} ({type(module).__name__}) that the "
            f"engine cannot hold: {type(error).__name__}: {error!s:.200}. Run this model with "
            "transformers"
        ) from error
    finally:
        module.to(own)
    return tuple(
        StatePart(part, tuple(each.shape[1:]), None if each.dtype == _DTYPE else each.dtype)
        for part, each in found.items()
    )


def _noted(module: nn.Module, width: int) -> dict[PartName, Tensor]:
    """Note what the module puts into its cache; also try what will be asked of it."""
    cache: LayerCache = _Noting()
    _call(module, cache, 1, _LENGTH, width)
    kept = dict(cache.values)
    for count, length in _SHAPES:
        states = {part: each.expand(count, *each.shape[1:]).clone() for part, each in kept.items()}
        cache = LayerCache(states)
        _call(module, cache, count, length, width)
        for part, each in cache.values.items():
            like = kept.get(part)
            if like is None or each.shape != (count, *like.shape[1:]) or each.dtype != like.dtype:
                raise TypeError(f"its {part[0]} state changes its shape or dtype")
    return kept


def _call(module: nn.Module, cache: Any, count: int, length: int, width: int) -> None:
    hidden = torch.empty(count, length, width, device="meta", dtype=_DTYPE)
    with torch.no_grad():
        found = call_mixer(module, type(module), hidden, {}, cache)
    if any(not isinstance(each, Tensor) or each.shape[:2] != (count, length) for each in found):
        raise TypeError("it gives something else than rows of its tokens")
