"""Encoders' layers that are one operator each.

A layer whose parts are ours, and that is given no mask, becomes a plan (`layer_parts`), if on
random rows, with an attention that stands in, it comes to what its own forward does. Between the
operators that it consists of, Python has to ask for the interpreter's lock again, which any thread
of the application may hold for milliseconds.

Two kinds of calls are known: rows [n, T, hidden] of n sequences, and rows [T, hidden] of sequences
that lie one after the other, with their ends and the angles of their positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from aioengine.kernels.cpu.encoder_attention import is_faster
from aioengine.kernels.cpu.layer_operators import NativeOperators
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.kernels.layer_plan import FeedForwardPlan, LayerPlan
from aioengine.kernels.layer_slot import attach_slot
from aioengine.models.fusion.encoder_attention import FULL_ATTENTION_NAME
from aioengine.models.fusion.layer_parts import find_layer
from aioengine.models.fusion.swap import subclass, swap
from aioengine.models.fusion.trial import ROUNDINGS, StandIn, agree, random_rows

__all__ = ["plan_encoders"]

_LAYER = "_aioengine_encoder_layer"
_ENDS, _ANGLES = "cu_seqlens", "position_embeddings"
_HARMLESS = frozenset({"dropout", "output_hidden_states", "return_dict", "use_cache"})
"""Arguments that change nothing of what a layer computes."""
_TRIAL_ROWS = 5


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """A layer's plan, and how it is called. `is_flat`: rows [T, hidden] with their ends."""

    plan: LayerPlan
    operators: NativeOperators
    is_flat: bool


def plan_encoders(model: nn.Module) -> int:
    """Have the encoder layers of `model` that qualify run from plans, in place; how many do."""
    count = 0
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    with torch.inference_mode():
        for module in list(model.modules()):
            layer = _tried(module)
            if layer is None:
                continue
            kind = type(module)
            if kind not in kinds:
                kinds[kind] = _planned_class(kind)
            swap(module, kinds[kind], **{_LAYER: layer})
            count += 1
    return count


def _planned_class(kind: type[nn.Module]) -> type[nn.Module]:
    own = kind.forward
    names = list(inspect.signature(own).parameters)[2:]

    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer: _Layer = getattr(self, _LAYER)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        found = _compute(layer, hidden_states, given)
        return own(self, hidden_states, *args, **kwargs) if found is None else found

    return subclass(kind, forward)


def _compute(layer: _Layer, x: Tensor, given: dict[str, Any]) -> Tensor | None:
    """The layer's result; None for a call that the plan does not know."""
    ends, angles = given.pop(_ENDS, None), given.pop(_ANGLES, None)
    others = (value for name, value in given.items() if name not in _HARMLESS)
    if any(value is not None and value is not False for value in others):
        return None
    if x.dim() != (2 if layer.is_flat else 3) or not x.numel():
        return None
    if (angles is None) != (layer.plan.angles is None) or (ends is None) == layer.is_flat:
        return None
    if angles is not None and not all(_fits(each, x) for each in angles):
        return None
    lengths: list[int] = ends.diff().tolist() if layer.is_flat else []
    if any(length <= 0 for length in lengths):
        return None
    return layer.operators.encode(x.contiguous(), angles or (), lengths)


def _fits(angles: Tensor, x: Tensor) -> bool:
    """Return whether the operators rotate `x` by such cosines or sines."""
    return angles.dim() == 2 and angles.dtype in (x.dtype, torch.float32)


def _tried(module: nn.Module) -> _Layer | None:
    """The layer's plan, if it comes to the module's own numbers."""
    attentions = [each for each in module.children() if _attends_fully(each)]
    weight = next(module.parameters(), None)
    if len(attentions) != 1 or weight is None or weight.device.type != "cpu":
        return None
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return None  # in float16 some layers bound what they give
    guess = find_layer(module, NativeLinear, attentions)
    if guess is None or not isinstance(guess.feed_forward, FeedForwardPlan):
        return None
    x = random_rows(1, _TRIAL_ROWS, guess.out.num_outputs, like=weight)
    # Most families rotate in float32, whatever their dtype.
    cos, sin = random_rows(2, _TRIAL_ROWS, guess.head_dim, like=weight, seed=1).float()
    takes = inspect.signature(type(module).forward).parameters
    is_flat = _ENDS in takes
    arguments: dict[str, Any] = {"attention_mask": None} if "attention_mask" in takes else {}
    if is_flat:
        x = x[0]
        arguments = {_ENDS: torch.tensor([0, 2, _TRIAL_ROWS]), _ANGLES: (cos, sin)}
    with _standing_in(attentions[0]) as stand_in:
        try:
            wanted = module(x, **arguments)
        except Exception:
            return None  # it wants other arguments
    for angles, is_scaled in product((0, None) if is_flat else (None,), (False, True)):
        scale = stand_in.args.scale
        if is_scaled:
            scale *= getattr(attentions[0], "scaling", 1.0)
        args = stand_in.args._replace(scale=scale)
        plan = replace(guess, attention=args, angles=angles)
        layer = _Layer(plan, NativeOperators([plan], by_pages=_by_pages(plan, weight)), is_flat)
        given = (cos, sin) if angles is not None else None
        found = partial(_compute_with, layer, stand_in, x.flatten(0, -2), given)
        if isinstance(wanted, Tensor) and agree(
            found, lambda: wanted.flatten(0, -2), roundings=ROUNDINGS
        ):
            return layer
    return None


def _attends_fully(module: nn.Module) -> bool:
    """Return whether it is attention of all rows to all, which asks for our function."""
    config = getattr(module, "config", None)
    return getattr(config, "_attn_implementation", None) == FULL_ATTENTION_NAME


@contextmanager
def _standing_in(attention: nn.Module) -> Iterator[StandIn]:
    stand_in = StandIn()
    attach_slot(attention, stand_in)
    try:
        yield stand_in
    finally:
        attach_slot(attention, None)


def _compute_with(
    layer: _Layer, stand_in: StandIn, x: Tensor, angles: tuple[Tensor, Tensor] | None
) -> Tensor:
    """The layer's result of `x` [T, hidden] where a stand-in attends."""
    operators = layer.operators
    query, key, value = operators.project(0, x, () if angles is None else angles)
    attended = stand_in.attend(query, key, value, layer.plan.attention).flatten(-2)
    return operators.add_feed(0, operators.add_attended(0, x, attended))


def _by_pages(plan: LayerPlan, weight: Tensor) -> bool:
    """Return whether our attention is the faster one."""
    query = weight.new_zeros(1, plan.num_heads, 1, plan.head_dim)
    key = weight.new_zeros(1, plan.num_kv_heads, 1, plan.head_dim)
    return is_faster(query, key, key)
