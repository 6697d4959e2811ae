"""Layers that keep a state, run over a flat batch of many requests' tokens.

transformers' mixers read and write their state through a cache: the last inputs of a convolution,
and a recurrent state. Such a module keeps its own forward, which is called with a cache of ours
(`LayerCache`) that holds the states of the requests at hand: once for all requests that have one
token, and once for longer chunks, or parts of them that snapshots end, of each length. Some mixers
(Mamba's first kind, as in Jamba) begin anew at every call with several tokens: their chunks are run
token by token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aioengine.kernels.layer_slot import StepHolder
from aioengine.models.fusion.swap import subclass, swap
from aioengine.models.fusion.trial import random_rows
from aioengine.models.state.memory import PartName, StateSpec, StateStep

__all__ = ["CACHES", "LayerCache", "StateSlot", "attach_states", "call_mixer", "named_arguments"]

CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params", "cache")
"""What transformers calls the argument through which a module keeps something between calls."""
_SLOT = "_aioengine_state"
_NUM_TRIED = 8
_NEAR = 0.05
"""What is left between two ways to compute the same, as a part of it: rounding in 16 bits."""


@dataclass(slots=True)
class LayerCache:
    """Stands for transformers' cache in one call of one layer, whose states are there.

    `values`: [n, ...] each, of n requests: copies that the layer may write into, and after its call
    what it keeps.
    """

    values: dict[PartName, Tensor] = field(default_factory=dict)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs [n, channels, width] of a convolution."""
        return self.values.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A recurrence's state [n, ...]."""
        return self.values.get(("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Keep the last of the inputs [n, channels, T]; return them behind those before them."""
        state = self.values["conv", state_idx]
        joined = torch.cat([state, conv_states], dim=-1)
        self.values["conv", state_idx] = joined[..., -state.shape[-1] :]
        return joined

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Keep a recurrence's state."""
        self.values["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        """No: what is kept is the state behind the last token alone."""
        return False

    def has_previous_state(self, layer_idx: int | None = None) -> bool:
        """Yes: before the first token it is zeros."""
        return True


@lru_cache(maxsize=256)
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a forward's arguments behind `self`."""
    return tuple(inspect.signature(forward).parameters)[1:]


def named_arguments(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """The hidden states that a mixer is called with, and its other arguments but for masks: here
    no sequence is padded."""
    names = _names(forward)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    hidden = given.pop(names[0])
    return hidden, {name: None if "mask" in name else each for name, each in given.items()}


def call_mixer(
    module: nn.Module, kind: type[nn.Module], hidden: Tensor, others: Mapping[str, Any], cache: Any
) -> tuple[Tensor, ...]:
    """The forward of `kind` on [n, T, dim], with `cache`: its output or outputs [n, T, ...]."""
    name = next(name for name in CACHES if name in _names(kind.forward))
    found = kind.forward(module, hidden, **{**others, name: cache})
    return found if isinstance(found, tuple) else (found,)


class _Piece(NamedTuple):
    """Rows [start, end) of a chunk; `copy`: the place of the snapshot behind them."""

    start: int
    end: int
    copy: int | None


@dataclass(frozen=True, slots=True, eq=False)
class StateSlot:
    """One layer's place: its `name` under the decoder, and the model's current step.

    `kind`: the class of the module before it was attached. `goes_on`: whether a call with several
    tokens takes up the state that it is given.
    """

    name: str
    kind: type[nn.Module]
    holder: StepHolder
    goes_on: bool

    def run(
        self, module: nn.Module, hidden: Tensor, others: Mapping[str, Any]
    ) -> tuple[Tensor, ...]:
        """The layer on a step's tokens [1, T, dim]; outside a step, on whole sequences."""
        step: StateStep | None = None if self.holder.current is None else self.holder.current.states
        if step is None:
            return call_mixer(module, self.kind, hidden, others, None)
        memory, rows = step.memory.layers[self.name], hidden[0]
        found: list[tuple[Tensor, ...]] = []
        if step.num_single:
            cache = LayerCache({part: each[step.places] for part, each in memory.items()})
            out = call_mixer(module, self.kind, rows[: step.num_single, None], others, cache)
            found.append(tuple(each[:, 0] for each in out))
            for part, each in memory.items():
                each[step.places] = cache.values[part]
                if step.copied is not None:
                    each[step.copies] = cache.values[part][step.copied]
        if step.chunks:
            found.append(self._run_chunks(module, rows, others, memory, step))
        return tuple(torch.cat(parts)[None] for parts in zip(*found, strict=True))

    def _run_chunks(
        self,
        module: nn.Module,
        rows: Tensor,
        others: Mapping[str, Any],
        memory: Mapping[PartName, Tensor],
        step: StateStep,
    ) -> tuple[Tensor, ...]:
        """The layer on a step's longer chunks, a piece of each at a time: those that are equally
        long are one call."""
        places = [place for _, _, place, _ in step.chunks]
        states = [{part: each[place][None] for part, each in memory.items()} for place in places]
        pieces = [self._cut(*_parts(first, last, ends)) for first, last, _, ends in step.chunks]
        found: list[tuple[int, tuple[Tensor, ...]]] = []
        for round_ in zip_longest(*pieces):
            groups: dict[int, list[int]] = {}
            for index, piece in enumerate(round_):
                if piece is not None:
                    groups.setdefault(piece.end - piece.start, []).append(index)
            for group in groups.values():
                chosen = [round_[index] for index in group]
                hidden = torch.stack([rows[each.start : each.end] for each in chosen])
                cache = LayerCache(
                    {part: torch.cat([states[index][part] for index in group]) for part in memory}
                )
                out = call_mixer(module, self.kind, hidden, others, cache)
                for at, (index, piece) in enumerate(zip(group, chosen, strict=True)):
                    found.append((piece.start, tuple(each[at] for each in out)))
                    states[index] = {part: each[at : at + 1] for part, each in cache.values.items()}
                    if piece.copy is not None:
                        _store(memory, piece.copy, states[index])
        for place, state in zip(places, states, strict=True):
            _store(memory, place, state)
        ordered = (each for _, each in sorted(found, key=lambda pair: pair[0]))
        return tuple(torch.cat(parts) for parts in zip(*ordered, strict=True))

    def _cut(self, *parts: _Piece) -> list[_Piece]:
        """The pieces that a call can take: single tokens, where it takes up no state with more."""
        if self.goes_on:
            return [*parts]
        return [
            _Piece(token, token + 1, part.copy if token + 1 == part.end else None)
            for part in parts
            for token in range(part.start, part.end)
        ]


def _parts(first: int, last: int, snapshots: Sequence[tuple[int, int]]) -> list[_Piece]:
    """The rows [first, last) in pieces that snapshots end."""
    parts: list[_Piece] = []
    for end, place in snapshots:
        parts.append(_Piece(first, end, place))
        first = end
    return parts if first == last else [*parts, _Piece(first, last, None)]


def _store(memory: Mapping[PartName, Tensor], place: int, state: Mapping[PartName, Tensor]) -> None:
    for part, each in memory.items():
        each[place] = state[part][0]


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run in the place of a mixer's own forward."""
    slot: StateSlot = getattr(module, _SLOT)
    found = slot.run(module, *named_arguments(slot.kind.forward, args, kwargs))
    return found if len(found) > 1 else found[0]


@torch.no_grad()
def _goes_on(module: nn.Module, spec: StateSpec, like: Tensor) -> bool:
    """Try whether a call with several tokens takes up a state, as one with a single token does."""
    rows = random_rows(_NUM_TRIED, spec.width, like=like)[None]

    def run(pieces: Sequence[Tensor]) -> Tensor:
        cache = LayerCache(
            {
                part.name: like.new_zeros(1, *part.shape, dtype=part.dtype or like.dtype)
                for part in spec.parts
            }
        )
        found = [call_mixer(module, type(module), each, {}, cache)[0] for each in pieces]
        return torch.cat(found, dim=1).flatten().double()

    singly, halves = (run(torch.split(rows, size, dim=1)) for size in (1, _NUM_TRIED // 2))
    return bool((halves - singly).norm() <= _NEAR * singly.norm())


def attach_states(
    decoder: nn.Module, specs: Sequence[StateSpec], holder: StepHolder, like: Tensor
) -> None:
    """Run these modules of `decoder` over flat batches of the dtype and device of `like`; mutates
    them."""
    goes_on: dict[type[nn.Module], bool] = {}
    for spec in specs:
        module = decoder.get_submodule(spec.name)
        kind = type(module)
        if kind not in goes_on:
            goes_on[kind] = _goes_on(module, spec, like)
        slot = StateSlot(spec.name, kind, holder, goes_on[kind])
        swap(module, subclass(kind, _forward), **{_SLOT: slot})
