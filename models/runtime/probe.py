"""A model's attention layers, found by running its decoder without weights or memory.

The model is built on PyTorch's `meta` device, where tensors have shapes and no data, and its
decoder runs on three tokens while every attention layer that asks for our function reports what it
was called with. This takes a fraction of a second at any size, happens before weights are read,
and fails early and by name where a layer computes its attention some other way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aioengine.errors import ModelLoadError
from aioengine.kernels.attention import AttentionArgs
from aioengine.kernels.layer_slot import attach_slot
from aioengine.models.latent.layers import LatentSizes
from aioengine.models.latent.probe import Expansions, is_same_view
from aioengine.models.runtime.attention import (
    check_window,
    chunk_of,
    encoders_in,
    route_attention,
)
from aioengine.models.runtime.whole_pass import spare_layers, without_layers
from aioengine.models.state.memory import StateSpec
from aioengine.models.state.probe import Watch
from aioengine.types import KVGroup

__all__ = [
    "NUM_PROBE_ROWS",
    "NUM_PROBE_TOKENS",
    "LayerSpec",
    "LayerSpecs",
    "group_layers",
    "probe_layers",
]

NUM_PROBE_TOKENS = 3
NUM_PROBE_ROWS = 5
"""Of an encoder's output, where the decoder attends to one."""
_SHOWN = 8
_ROUTES = "top_k_index"
"""The argument by which transformers' experts are given each token's choice."""
_MASK, _BIAS = "attention_mask", "position_bias"
"""What T5's kind calls a bias that follows from distances, as some call any bias."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer, as its own calls describe it.

    `name`: its module's path under the decoder. `kind`: "self", or "cross" where keys are the
    encoder's. `window`: how many past tokens a query sees, its own included; None for all. `chunk`:
    it sees none before the last multiple of this position; None for no such bound. `sinks`:
    whether it passes a sink logit per head. `shares`: the layer, by name, whose keys and values it
    is given instead of any of its own; it has no pages then, and reads that layer's. `latent`: what
    its keys and values are made of, where the pages hold that: as one key, without a value.
    """

    name: str
    kind: str
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool
    shares: str | None = None
    latent: LatentSizes | None = None
    chunk: int | None = None

    def of_latents(self, sizes: LatentSizes) -> LayerSpec:
        """Return the layer with pages of latents."""
        width = sizes.latent + sizes.turned
        return replace(self, num_kv_heads=1, key_dim=width, value_dim=0, latent=sizes)


class LayerSpecs(tuple[LayerSpec, ...]):
    """A decoder's attention layers, in the order in which they run; `states`: those of its layers
    that keep a state."""

    states: tuple[StateSpec, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """Arguments that a layer was called with."""

    spec: LayerSpec
    key: Tensor
    value: Tensor

    def has_pages_of(self, other: _Call) -> bool:
        """Return whether `other` has been given the very same keys and values, and keeps them as
        long."""
        return (
            self.spec.kind == other.spec.kind
            and self.spec.window == other.spec.window
            and self.spec.chunk == other.spec.chunk
            and is_same_view(self.key, other.key)
            and is_same_view(self.value, other.value)
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Recorder:
    """A slot that notes how its module calls it."""

    name: str
    module: nn.Module
    calls: list[_Call]
    expansions: Expansions
    takes_bias: bool
    takes_mask: bool

    def check_tensors(self, names: Sequence[str], num_keys: int) -> None:
        """Raise ModelLoadError where more than queries, keys and values makes the scores: masks and
        biases that a layer makes of hidden states, which a flat batch would lose in silence.

        `names`: of the further tensors that it gives its attention, over `num_keys` keys.
        """
        is_cross = num_keys == NUM_PROBE_ROWS
        known = [
            "position_ids",
            *[_BIAS] * self.takes_bias,
            *[_MASK] * (self.takes_mask and is_cross),
        ]
        lost = [name for name in names if name not in known]
        if lost:
            raise ModelLoadError(
                f"layer {self.name} ({type(self.module).__name__}) gives its attention "
                f"{' and '.join(lost)} of its own, which would be lost on a flattened batch"
            )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        num_tokens, num_heads, key_dim = query.shape
        if key.shape[0] not in (num_tokens, NUM_PROBE_ROWS):
            raise ModelLoadError(f"layer {self.name} attends to other tokens than its own")
        spec = LayerSpec(
            name=self.name,
            kind="self" if key.shape[0] == num_tokens else "cross",
            num_heads=num_heads,
            num_kv_heads=key.shape[1],
            key_dim=key_dim,
            value_dim=value.shape[2],
            scale=args.scale,
            window=args.window,
            softcap=args.softcap,
            sinks=args.sinks is not None,
            chunk=chunk_of(self.module),
        )
        if spec.kind == "self" and spec.window is None:
            check_window(self.module)
        sizes = self.expansions.sizes_of(self.module, query, key, value)
        if sizes is not None:
            spec = spec.of_latents(sizes)
        # Held until the run is over, so that equal storages are the same one.
        self.calls.append(_Call(spec, key, value))
        return query.new_empty(num_tokens, num_heads, value.shape[2])


def probe_layers(
    decoder: nn.Module,
    run: Callable[[nn.Module, Tensor, Tensor], Any],
    hidden_size: int,
    *,
    takes_bias: bool = False,
    takes_mask: bool = False,
) -> LayerSpecs:
    """The attention layers of `decoder`, in the order in which they run, and its states.

    `decoder` lies on the meta device and is used up: its modules keep the probe's slots. `run`
    calls it with embeddings [T, hidden] and positions [T]. `takes_bias`: a bias by distance is put
    into the kernels; `takes_mask`: what a token sees by cross-attention is. Raises ModelLoadError
    where a layer does not go through our attention function, or gives it more than that takes, or
    the decoder cannot be run this way.
    """
    calls: list[_Call] = []
    route_attention(decoder)
    expansions = Expansions(decoder)
    for name, module in decoder.named_modules():
        attach_slot(module, _Recorder(name, module, calls, expansions, takes_bias, takes_mask))
        if _ROUTES in inspect.signature(type(module).forward).parameters:
            vars(module)["forward"] = _pass_by
    dtype = next(decoder.parameters()).dtype
    embeds = torch.empty(NUM_PROBE_TOKENS, hidden_size, device="meta", dtype=dtype)
    positions = torch.arange(NUM_PROBE_TOKENS, device="meta")
    watch = Watch(decoder)
    was_run: set[str] = set()
    for name in encoders_in(decoder, ()):
        note = partial(_note, was_run, name)
        decoder.get_submodule(name).register_forward_pre_hook(note)
    start = partial(_run_once, decoder, run, embeds, positions)
    if getattr(decoder, "_is_stateful", False):
        _try_few(decoder, watch, start, calls)
    start()
    routed = [call.spec.name for call in calls]
    found = _find_states(decoder, watch, routed)
    watch.end()
    # Encoders of media attend by themselves, and no text runs them.
    media = [name for name in encoders_in(decoder, routed) if name not in was_run]
    _require_routing(decoder, routed, [each.name for each in found], media)
    specs = LayerSpecs(_with_owner(call, calls[:index]) for index, call in enumerate(calls))
    specs.states = tuple(each for each in found if each.parts)
    return specs


def _run_once(
    decoder: nn.Module,
    run: Callable[[nn.Module, Tensor, Tensor], Any],
    embeds: Tensor,
    positions: Tensor,
) -> None:
    try:
        with torch.no_grad():
            run(decoder, embeds, positions)
    except ModelLoadError:
        raise
    # Whatever a model's own code raises here, the answer is the same: it does not run flattened.
    except Exception as error:
        raise ModelLoadError(
            f"{type(decoder).__name__} cannot be run on a flattened batch: {error}"
        ) from error


def _try_few(
    decoder: nn.Module, watch: Watch, start: Callable[[], None], calls: list[_Call]
) -> None:
    """Raise ModelLoadError where a layer of each kind shows that a state cannot be held: layers
    that keep one run in loops, which takes seconds for all of them."""
    spare = spare_layers(decoder, {})
    try:
        with without_layers(decoder, spare, on_meta=True):
            start()
    except ModelLoadError:
        return  # all of them will say so
    finally:
        routed = [call.spec.name for call in calls]
        calls.clear()
        watch.drop(spare)
    _find_states(decoder, watch, routed)


def _find_states(decoder: nn.Module, watch: Watch, routed: Sequence[str]) -> tuple[StateSpec, ...]:
    """Find what is called with a cache and puts no keys and values into it, with or without parts.

    Raises ModelLoadError where not all of it can be held.
    """
    found = watch.find_states([*routed, *_silent_attention(decoder, routed)])
    _check_states(decoder, routed, [each for each in found if each.parts])
    return found


def _note(names: set[str], name: str, _module: nn.Module, _args: Any) -> None:
    names.add(name)


def _pass_by(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Run in the place of experts: some ask which of them are chosen, which no shape tells."""
    return torch.empty_like(hidden_states)


def _with_owner(call: _Call, earlier: Sequence[_Call]) -> LayerSpec:
    """The call's layer, with the name of the first one whose keys and values it was given."""
    owner = next((other.spec.name for other in earlier if call.has_pages_of(other)), None)
    return replace(call.spec, shares=owner)


def _check_states(decoder: nn.Module, routed: Sequence[str], states: Sequence[StateSpec]) -> None:
    """Raise ModelLoadError where not all that a decoder keeps of a request can be held.

    A convolution or a state-space mixer that nobody knew of would start anew at every chunk and
    every decode step, and nothing but the tokens would show it.
    """
    missing = ""
    if not states and getattr(decoder, "_is_stateful", False):
        missing = "and not in layers that take a cache"
    if states and not routed:
        missing = f"in {states[0].name} and its like, and has no attention layer beside them"
    if missing:
        raise ModelLoadError(
            f"{type(decoder).__name__} keeps a state between calls that the engine does not hold, "
            f"{missing}. Run this model with transformers"
        )


def _silent_attention(decoder: nn.Module, routed: Sequence[str]) -> list[str]:
    """The modules that call themselves attention, hold no other one, and have not reported."""
    return [
        name
        for name, module in decoder.named_modules()
        if name
        and _is_attention(module)
        and not any(_is_attention(child) for child in module.modules() if child is not module)
        and not any(_is_within(path, name) for path in routed)
    ]


def _require_routing(
    decoder: nn.Module, routed: Sequence[str], keepers: Sequence[str], media: Sequence[str]
) -> None:
    """Every decoder layer that keeps no state, and every module that calls itself attention, must
    have reported, but for what lies in encoders of `media`."""
    expected: list[str] = []
    num_layers = getattr(getattr(decoder, "config", None), "num_hidden_layers", None)
    lists = [name for name, module in decoder.named_modules() if isinstance(module, nn.ModuleList)]
    for name in lists:
        # What a layer is made of may be a list as long.
        is_inner = any(name != outer and _is_within(name, outer) for outer in lists)
        module = decoder.get_submodule(name)
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and not is_inner:
            layers = [f"{name}.{index}" for index in range(len(module))]
            # A list of as many other things (an encoder's stages, say) attends nowhere.
            if any(_is_within(path, layer) for path in routed for layer in layers):
                expected += layers
    known = [*routed, *keepers]
    silent = [
        name
        for name in _silent_attention(decoder, routed)
        if not any(_is_within(name, each) for each in media)
    ]
    silent += [name for name in expected if not any(_is_within(path, name) for path in known)]
    if silent or not routed:
        raise ModelLoadError(
            f"{type(decoder).__name__} does not route attention through transformers' "
            f"AttentionInterface in: {', '.join(silent[:_SHOWN]) or 'any layer'}"
        )
    if len(set(routed)) != len(routed):
        raise ModelLoadError(f"{type(decoder).__name__} runs an attention layer more than once")


def _is_attention(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Attention")


def _is_within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def group_layers(
    specs: Sequence[LayerSpec],
) -> tuple[tuple[KVGroup, ...], tuple[tuple[int, int], ...]]:
    """The KV groups, in order of first appearance, and each layer's (group, index within it).

    Groups of cross-attention come last. A layer that shares another's keys and values has that
    layer's place, and takes none of its own.
    """
    members: dict[KVGroup, int] = {}
    places: list[tuple[int, int]] = []
    owned: dict[str, tuple[int, int]] = {}
    order: dict[KVGroup, int] = {}
    keys = [
        KVGroup(s.kind, s.num_kv_heads, s.key_dim, s.value_dim, s.window, 0, s.chunk) for s in specs
    ]
    for key in sorted(keys, key=lambda key: key.kind == "cross"):
        order.setdefault(key, len(order))
    for spec, key in zip(specs, keys, strict=True):
        if spec.shares is None:
            owned[spec.name] = order[key], members.get(key, 0)
            members[key] = members.get(key, 0) + 1
        places.append(owned[spec.shares or spec.name])
    groups = tuple(replace(key, num_layers=members[key]) for key in order)
    return groups, tuple(places)
