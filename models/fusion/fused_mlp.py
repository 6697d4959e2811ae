"""Fuse a feed-forward layer's activation and gating into its first matmul.

Names say which modules may be such layers (`layer_names`), trials which are: the activation is
known by what it does, and what becomes of random rows must be what the layer itself makes of them,
for one layer of each class. Between the two matmuls nothing is written then but what the second one
reads.

In a module that does more, as a layer with its feed-forward part written out, the activation moves
into the matmul before it, if the module is the same with it there.

Of a decoder whose last layer is called as it is, the feed-forward module computes those rows alone
that are read of it.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from aioengine.kernels.attention import AttentionArgs
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.kernels.layer_plan import FeedForwardPlan, rows_wanted
from aioengine.kernels.layer_slot import StepContext, attach_slot, slot_of
from aioengine.kernels.matmul import FORMULAS, Activation, TorchLinear
from aioengine.kernels.reference import ReferenceBackend
from aioengine.models.fusion.layer_names import FeedForward, layer_names_of
from aioengine.models.fusion.packed_linear import Packed, PackedPart
from aioengine.models.fusion.swap import is_hooked, subclass, swap
from aioengine.models.fusion.trial import ROUNDINGS, agree, random_rows, stand_ins

__all__ = ["ActivatedFeedForward", "ActivatedLinear", "Kind", "cut_last_layer", "fuse_activations"]

_TRIAL_ROWS = 8
_OURS = (NativeLinear, TorchLinear)
Ours: TypeAlias = NativeLinear | TorchLinear
"""Matmuls that take an activation."""
Kind: TypeAlias = type[NativeLinear] | type[TorchLinear]
"""Those of one device."""


class ActivatedFeedForward(nn.Module):
    """Made of a module by `fuse_activations`, never by itself."""

    fused: tuple[FeedForward, Ours, Activation]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`hidden_states` [..., dim] -> [..., dim]."""
        return _fused_forward(self, *self.fused, hidden_states)

    def plan(self, kind: Kind) -> FeedForwardPlan | None:
        """The layer as a plan, where its matmuls are of this kind."""
        names, up, activation = self.fused
        down = getattr(getattr(self, names.down), "packed", None)
        if not isinstance(up, kind) or not isinstance(down, kind):
            return None
        return FeedForwardPlan(up, activation, names.gate is not None, down)


class ActivatedLinear(nn.Linear):
    """A packed layer with the activation that its caller applies to it, made by the same."""

    activated: tuple[Ours, Activation]

    def forward(self, input: Tensor) -> Tensor:
        """`input` [..., in] -> [..., out]."""
        matmul, activation = self.activated
        return matmul(input, activation)


def fuse_activations(model: nn.Module) -> int:
    """Fuse the feed-forward layers of `model` whose matmuls are ours, in place; how many were."""
    count = 0
    tried: dict[Hashable, bool] = {}
    parents = Counter(id(child) for module in model.modules() for child in module.children())
    with torch.no_grad():
        for module in list(model.modules()):
            names = layer_names_of(module)
            layer, part = names.feed_forward, names.activated
            if layer is not None and _fuse_layer(module, layer, tried):
                count += 1
            elif part is not None and parents[id(getattr(module, part[1], None))] == 1:
                count += _fuse_part(module, *part, tried)
    return count


def _fuse_layer(module: nn.Module, names: FeedForward, tried: dict[Hashable, bool]) -> bool:
    """Fuse a module that is nothing but a feed-forward layer."""
    matmul = _matmul(module, names)
    activation = None if matmul is None else _activation(module, names.activation)
    if matmul is None or activation is None:
        return False
    kind = type(module)
    if (kind, activation) not in tried:
        up: nn.Linear = getattr(module, names.up)
        # Not rows that a norm with its first weights would leave as they are: one may stand before.
        x = 1 + 2 * random_rows(_TRIAL_ROWS, up.in_features, like=up.weight)
        fused = partial(_fused_forward, module, names, matmul, activation, x)
        tried[kind, activation] = agree(fused, lambda: module(x))
    if tried[kind, activation]:
        swap(module, ActivatedFeedForward, fused=(names, matmul, activation))
    return tried[kind, activation]


def _fuse_part(module: nn.Module, name: str, up: str, tried: dict[Hashable, bool]) -> bool:
    """Move the activation `name` of a module into its layer `up`."""
    matmul = _matmul(module, FeedForward("", name, up))
    activation = None if matmul is None else _activation(module, name)
    if matmul is None or activation is None:
        return False
    layer: nn.Linear = getattr(module, up)
    own, kind, key = getattr(module, name), type(layer), (type(module), activation, up)

    def fuse() -> None:
        swap(layer, ActivatedLinear, activated=(matmul, activation))
        setattr(module, name, nn.Identity())

    def fused_outputs() -> Tensor:
        fuse()
        try:
            return _outputs(module, layer)
        finally:
            swap(layer, kind)
            setattr(module, name, own)

    if key not in tried:
        # What follows the matmul rounds too.
        roundings = 2 * ROUNDINGS
        tried[key] = agree(fused_outputs, lambda: _outputs(module, layer), roundings=roundings)
    if tried[key]:
        fuse()
    return tried[key]


def _outputs(module: nn.Module, layer: nn.Linear) -> Tensor:
    """Call a module that holds `layer` with random rows, and no mask where it asks for one."""
    norms = [each for each in module.children() if isinstance(each, nn.LayerNorm)]
    width = norms[0].normalized_shape[0] if norms else layer.in_features
    x = random_rows(1, _TRIAL_ROWS, width, like=layer.weight)
    is_masked = "attention_mask" in inspect.signature(module.forward).parameters
    with stand_ins(module):
        output = module(x, attention_mask=None) if is_masked else module(x)
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _matmul(module: nn.Module, names: FeedForward) -> Ours | None:
    """The matmul of `up`, or of `gate` and `up` together, if it is packed, ours and not hooked."""
    up = getattr(module, names.up, None)
    gate = up if names.gate is None else getattr(module, names.gate, None)
    if any(
        isinstance(each, nn.Module) and is_hooked(each)
        for each in (up, gate, getattr(module, names.activation, None))
    ):
        return None
    if names.gate is None:
        packed = up.packed if isinstance(up, Packed) else None
        return packed if isinstance(packed, _OURS) else None
    if not isinstance(up, PackedPart) or not isinstance(gate, PackedPart):
        return None
    merged = gate.merged
    if merged is not up.merged or (gate.index, up.index) != (0, 1):
        return None
    matmul = merged.packed
    is_halved = len(merged.sizes) == 2 and merged.sizes[0] == merged.sizes[1]
    return matmul if is_halved and isinstance(matmul, _OURS) and matmul.can_gate else None


def _activation(module: nn.Module, name: str) -> Activation | None:
    """The activation that the child `name` computes, if it is one of those that are built in."""
    function: Callable[[Tensor], Tensor] = getattr(module, name)
    if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
        return None  # a norm, say
    x = torch.linspace(-12, 12, 1001, dtype=torch.float32)
    for activation, formula in FORMULAS.items():
        if agree(lambda: function(x.clone()), partial(formula, x)):
            return activation
    return None


def _fused_forward(
    module: nn.Module, names: FeedForward, matmul: Ours, activation: Activation, x: Tensor
) -> Tensor:
    inner = matmul(x, activation, is_gated=names.gate is not None)
    found: Tensor = getattr(module, names.down)(inner)
    return found


def cut_last_layer(decoder: nn.Module) -> int:
    """Have the last layer's feed-forward module compute the rows alone that are read of it.

    Only where that layer is called as it is, not from a plan. Other rows are 0 then. Attention
    layers must have their slots. Returns how many modules do: those with which the decoder comes
    to the same rows, and which it calls once, behind all of its attention.
    """
    weight = getattr(getattr(decoder, "norm", None), "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return 0
    stacks = [each for each in decoder.modules() if isinstance(each, nn.ModuleList) and len(each)]
    count = 0
    for layer in (each[-1] for each in stacks):
        attentions = [each for each in layer.children() if _is_last(slot_of(each))]
        inner = [each for each in layer.children() if [*each.children()]]
        inner = [each for each in inner if all(map(_is_plain, each.modules()))]
        if len(attentions) == 1 and len(inner) == 1:
            with torch.inference_mode():
                count += _cut(decoder, attentions[0], inner[0], weight)
    return count


def _is_last(slot: object) -> bool:
    """Return whether no attention comes behind a slot's, and rows are known that are read there."""
    return bool(getattr(slot, "is_last", False)) and hasattr(slot, "wanted")


def _is_plain(module: nn.Module) -> bool:
    return slot_of(module) is None and not is_hooked(module)


def _cut(decoder: nn.Module, attention: nn.Module, module: nn.Module, like: Tensor) -> bool:
    """Have `module` compute the rows that are read behind `attention`, if that is the same."""
    own = type(module)
    plain: Callable[..., Any] = own.forward
    find = weakref.ref(attention)  # a class lives until a collection, and would keep its weights

    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        is_usual = hidden_states.dim() == 3 and len(hidden_states) == 1 and not args and not named
        before = find() if is_usual else None
        rows = None if before is None else rows_wanted(slot_of(before), hidden_states.shape[1])
        if rows is None:
            return plain(self, hidden_states, *args, **named)
        found = torch.zeros_like(hidden_states)
        if len(rows):
            found[:, rows] = plain(self, hidden_states[:, rows])
        return found

    rows = torch.tensor([1, 3])
    calls: list[bool] = []  # of attention, and of the module
    hook = module.register_forward_pre_hook(lambda *_: calls.append(False))
    try:
        wanted = _hidden_states(decoder, calls, None, like)
        is_behind = calls.count(False) == 1 and not calls[-1]
        swap(module, subclass(own, forward))
        found = partial(_hidden_states, decoder, calls, rows, like)
        if is_behind and agree(lambda: found()[rows], lambda: wanted[rows], roundings=2):
            return True
    except Exception:
        pass  # it wants other arguments
    finally:
        hook.remove()
    swap(module, own)
    return False


@dataclass(frozen=True, slots=True, eq=False)
class _Watch:
    """Attention for a trial, a row's value for all of its heads, that notes its calls."""

    calls: list[bool]
    wanted: Tensor | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        """See `Slot.attend`."""
        self.calls.append(True)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def _hidden_states(
    decoder: nn.Module, calls: list[bool], wanted: Tensor | None, like: Tensor
) -> Tensor:
    """The last hidden states [T, hidden] of a decoder's own forward on random rows."""
    slots = {each: slot for each in decoder.modules() if (slot := slot_of(each)) is not None}
    x = random_rows(1, _TRIAL_ROWS, len(like), like=like)
    positions = torch.arange(_TRIAL_ROWS)
    step = StepContext((), (), ReferenceBackend(), positions)
    holders = {slot.holder for slot in slots.values() if hasattr(slot, "holder")}
    for each in slots:
        attach_slot(each, _Watch(calls, wanted))
    try:
        with ExitStack() as stack:
            for holder in holders:
                stack.enter_context(holder.hold(step))
            output = decoder(inputs_embeds=x, position_ids=positions[None], use_cache=False)
    finally:
        for each, slot in slots.items():
            attach_slot(each, slot)
    found: Tensor = output.last_hidden_state[0]
    return found
