"""Encoders' layers that are one operator each.

A layer whose parts are ours becomes a plan (`layer_parts`), if on random rows, with an attention
that stands in, it comes to what its own forward does. Between the operators that it consists of,
Python has to ask for the interpreter's lock again, which any thread of the application may hold for
milliseconds.

Two kinds of calls are known: rows [n, T, hidden] of n sequences, and rows of sequences that lie one
after the other: [T, hidden] with their ends, or [1, T, hidden] with a mask of blocks. Any other
mask is for the layer's own forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
_ENDS, _ANGLES, _MASK = "cu_seqlens", "position_embeddings", "attention_mask"
_LENGTHS = "_aioengine_lengths"
"""What is known of a mask or of ends, as all layers are given the same."""
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
    ends, angles, mask = (given.pop(name, None) for name in (_ENDS, _ANGLES, _MASK))
    others = (value for name, value in given.items() if name not in _HARMLESS)
    if any(value is not None and value is not False for value in others):
        return None
    if x.dim() != (2 if layer.is_flat else 3) or not x.numel():
        return None
    if (angles is None) != (layer.plan.angles is None) or (ends is None) == layer.is_flat:
        return None
    if angles is not None and not all(_fits(each, x, layer.plan.head_dim) for each in angles):
        return None
    if layer.is_flat:
        lengths = None if mask is not None else _differences(ends)
    else:
        lengths = _lengths(mask, *x.shape[:2])
    if lengths is None or any(length <= 0 for length in lengths):
        return None
    # Not a view more than there has to be: each is an operator of PyTorch's, for which the
    # interpreter's lock is given up.
    rows = x if x.is_contiguous() else x.contiguous()
    return layer.operators.encode(rows, angles or (), lengths)


def _fits(angles: Tensor, x: Tensor, head_dim: int) -> bool:
    """Return whether the operators rotate the rows of `x` by such cosines or sines."""
    is_known = angles.dtype in (x.dtype, torch.float32)
    return is_known and angles.shape == (x.numel() // x.shape[-1], head_dim)


def _differences(ends: Tensor) -> list[int]:
    """Lengths of sequences that end there, the first end being 0."""
    found: list[int] | None = getattr(ends, _LENGTHS, None)
    if found is None:
        found = ends.diff().tolist()
        setattr(ends, _LENGTHS, found)
    return found


def _lengths(mask: Tensor | None, count: int, length: int) -> list[int] | None:
    """Lengths of the sequences, one after the other, that a mask of `count` times `length` rows
    keeps apart; None where it says something else."""
    if mask is None:
        return [length] * count
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return None
    known: dict[tuple[int, int], list[int] | None] = getattr(mask, _LENGTHS, {})
    if (count, length) not in known:
        known = {(count, length): _blocks(mask, count, length)}
        setattr(mask, _LENGTHS, known)
    return known[count, length]


def _blocks(mask: Tensor, count: int, length: int) -> list[int] | None:
    """The same of a mask [n, heads, T or 1, T] that nobody has looked at yet."""
    is_seen = mask
    if mask.dtype is not torch.bool:
        is_seen = mask == 0
        if not bool((is_seen | (mask <= torch.finfo(mask.dtype).min)).all()):
            return None
    if bool(is_seen.all()):
        return [length] * count
    if is_seen.shape != (1, 1, length, length):
        return None
    square = is_seen[0, 0]
    first = square.int().argmax(-1)  # key that a row sees
    is_block = torch.equal(square, first[:, None] == first) and bool((first.diff() >= 0).all())
    found: list[int] = torch.unique_consecutive(first, return_counts=True)[1].tolist()
    return found if is_block else None


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
    turns = random_rows(2, _TRIAL_ROWS, guess.head_dim, like=weight, seed=1)
    takes = inspect.signature(type(module).forward).parameters
    is_flat = _ENDS in takes
    x = x[0] if is_flat else x
    # Most families rotate in float32, whatever their dtype.
    for cos, sin in (turns.float(), turns):
        known = {_ENDS: torch.tensor([0, 2, _TRIAL_ROWS]), _ANGLES: (cos, sin), _MASK: None}
        arguments = {name: each for name, each in known.items() if name in takes}
        with _standing_in(attentions[0]) as stand_in, suppress(Exception):  # it may want others
            wanted = module(x, **arguments)
            break
    else:
        return None
    for angles, is_scaled in product((0, None) if _ANGLES in takes else (None,), (False, True)):
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
