"""Decoders run from a plan, without the modules in between.

A layer whose parts are ours (`layer_parts`) becomes a `LayerPlan`, if on random rows, with an
attention that stands in, its own forward and the device's operators come to the same bits (on a
device whose modules round otherwise: to a few roundings). From then on its forward is the plan's,
but for calls with something that the plan does not know.

Where all that a decoder does, by another trial, is to call such layers, it becomes a `DecoderPlan`
and is not called itself (`run_decoder_plan`). What its forward does around its layers (arguments
merged with the config, masks that nobody reads, a wrapper around each layer) takes as long as a
small layer where there are few tokens. Which angles a layer rotates by is seen in the trial.

The last layer attends with all rows of a step, as their keys and values stay; what comes after that
it computes for the rows alone that are read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from aioengine.kernels.attention import AttentionArgs
from aioengine.kernels.cpu.decode_queue import DecodeParts
from aioengine.kernels.cpu.layer_operators import NativeOperators
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.kernels.layer_plan import (
    Angles,
    CrossPlan,
    DecoderPlan,
    LayerPlan,
    Operators,
    rows_wanted,
    run_layer,
    run_plan,
    slots_of,
)
from aioengine.kernels.layer_slot import LayerSlot, Slot, StepContext, StepHolder, slot_of
from aioengine.kernels.matmul import TorchLinear
from aioengine.kernels.reference import ReferenceBackend
from aioengine.kernels.triton import operators_on
from aioengine.models.fusion.decode_parts import find_decode_parts
from aioengine.models.fusion.fused_mlp import Kind
from aioengine.models.fusion.layer_parts import NORMS, attentions_of, find_layer
from aioengine.models.fusion.rotary import make_angles_by
from aioengine.models.fusion.swap import is_hooked, subclass, swap
from aioengine.models.fusion.trial import ROUNDINGS, StandIn, agree, random_rows, stand_ins

__all__ = ["decode_parts_of", "layer_by_layer", "plan_decoder", "run_decoder_plan"]

Forward = Callable[..., Tensor]
_Call = tuple[tuple[Any, ...], dict[str, Any]]
_LAYER = "_aioengine_layer"
_DECODER = "_aioengine_decoder"
_ROWS = "deepstack_visual_embeds"
_MEMORY = "encoder_hidden_states"
_FOR_ATTENTION = {"attention_mask", "cache_position", "past_key_values", "position_ids"}
_FOR_ATTENTION |= {"use_cache"}
"""Arguments of layers that only their attention reads, which has its slot."""
_NO_ANGLES: Callable[..., list[Angles]] = lambda *_: []  # noqa: E731
_TRIAL_POSITIONS = (0, 1, 7, 2, 300)
_TRIAL_ROWS = len(_TRIAL_POSITIONS)


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """A layer's plan, and the operators that know it alone."""

    plan: LayerPlan
    attention: nn.Module
    operators: Operators
    is_last: bool  # whatever comes after it, if anything, takes rows one by one

    def compute(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` [T, hidden], `cos` and `sin` [T, head_dim] -> [T, hidden]; attention has its slot.

        Rows that nobody reads are what they came as.
        """
        slot = slot_of(self.attention)
        assert slot is not None
        wanted = rows_wanted(slot, len(x)) if self.is_last else None
        angles = self.operators.prepare([(cos, sin)])
        found = run_layer(self.operators, 0, self.plan, x, angles, iter([slot]), wanted)
        return found if wanted is None else x.index_copy(0, wanted, found)


@dataclass(frozen=True, slots=True, eq=False)
class _Decoder:
    """A decoder's plan, its operators, and what it may be called with.

    `axes`: numbers of dimensions that positions may have. `takes_rows`: whether rows may be added
    behind the first layers.
    """

    plan: DecoderPlan
    operators: Operators
    axes: frozenset[int]
    takes_rows: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Rotary:
    """A decoder's angles: calls of one module, with what each is given beside positions.

    `axes`: how many positions a token of a text has there, None for one that stands by itself.
    """

    module: nn.Module
    axes: int | None
    calls: Sequence[_Call]

    def __call__(self, embeds: Tensor, positions: Tensor) -> list[Angles]:
        x, ids = embeds[None], positions[None] if positions.dim() == 1 else positions[:, None]
        if self.axes is not None and positions.dim() == 1:
            ids = ids.expand(self.axes, 1, -1)
        found = [self.module(x, ids, *args, **named) for args, named in self.calls]
        assert all(len(cos) == 1 for cos, _ in found), "the module does not merge the axes"
        return [(cos[0], sin[0]) for cos, sin in found]


def _places(decoder: nn.Module) -> Tensor | None:
    """The rows that learned positions add to embeddings, from position 0 on."""
    module = getattr(decoder, "embed_positions", None)
    weight, offset = getattr(module, "weight", None), getattr(module, "offset", 0)
    if not isinstance(weight, Tensor) or not isinstance(offset, int):
        return None
    return weight.detach()[offset:]


def run_decoder_plan(
    decoder: nn.Module, embeds: Tensor, positions: Tensor, rows: Sequence[Tensor] = ()
) -> Tensor | None:
    """The last hidden states [T, hidden] of `embeds` [T, hidden], tokens at `positions`.

    `positions` [T] or [3, T]; `rows` [T, hidden] each, added behind the first layers. None for a
    decoder that has no plan, or none for such arguments.
    """
    found: _Decoder | None = getattr(decoder, _DECODER, None)
    if found is None or positions.dim() not in found.axes or (rows and not found.takes_rows):
        return None
    return run_plan(found.plan, found.operators, embeds, positions, rows)


def decode_parts_of(model: Any, decoder: nn.Module) -> tuple[NativeOperators, DecodeParts] | None:
    """The parts of transformers' `model` that steps without Python in between take; None where its
    `decoder` has no plan that they know."""
    found: _Decoder | None = getattr(decoder, _DECODER, None)
    return None if found is None else find_decode_parts(model, found.plan, found.operators)


@contextmanager
def layer_by_layer(root: nn.Module) -> Iterator[None]:
    """Meanwhile, decoders in `root` call their layers one by one."""
    plans = {
        module: getattr(module, _DECODER) for module in root.modules() if hasattr(module, _DECODER)
    }
    for module in plans:
        setattr(module, _DECODER, None)
    try:
        yield
    finally:
        for module, plan in plans.items():
            setattr(module, _DECODER, plan)


def plan_decoder(decoder: nn.Module) -> int:
    """Have the layers of `decoder` that qualify run from plans, in place, and it all if it does.

    Attention layers must have their slots. Returns how many layers do.
    """
    count = 0
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    stacks = (each for each in decoder.modules() if isinstance(each, nn.ModuleList) and len(each))
    last = {id(stack[-1]) for stack in stacks}
    with torch.inference_mode():
        for module in list(decoder.modules()):
            layer = _tried(module, is_last=id(module) in last)
            if layer is None:
                continue
            kind = type(module)
            if layer.plan.cross is None and kind not in kinds:
                kinds[kind] = _planned_class(kind)
            # What also reads an encoder's rows runs with all others, or as it is.
            swap(module, kinds.get(kind, kind), **{_LAYER: layer})
            count += 1
        setattr(decoder, _DECODER, _tried_decoder(decoder))
    return count


def _planned_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class whose layers run from their plans."""
    own: Forward = kind.forward

    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        layer: _Layer = getattr(self, _LAYER)
        is_known = not args and slot_of(layer.attention) is not None
        for name, value in kwargs.items():
            is_known = is_known and (name in _FOR_ATTENTION or value is None or value is False)
        if not is_known or not _fits(hidden_states, position_embeddings, layer.plan.head_dim):
            kwargs["position_embeddings"] = position_embeddings
            return own(self, hidden_states, *args, **kwargs)
        assert position_embeddings is not None
        cos, sin = position_embeddings
        return layer.compute(hidden_states[0], cos[0], sin[0])[None]

    return subclass(kind, forward)


def _fits(x: Tensor, angles: tuple[Tensor, Tensor] | None, head_dim: int) -> bool:
    """Return whether they are [1, T, hidden], contiguous, and [1, T, head_dim] twice, of one
    dtype."""
    if angles is None or x.dim() != 3 or x.shape[0] != 1 or len(angles) != 2:
        return False
    if not x.is_contiguous():
        return False
    shape = (1, x.shape[1], head_dim)
    return all(each.shape == shape and each.dtype == x.dtype for each in angles)


def _tried(module: nn.Module, *, is_last: bool) -> _Layer | None:
    """The layer with its attention's arguments, if it comes to the module's own bits."""
    attentions = attentions_of(module)
    weight = next(module.parameters(), None)
    if not attentions or weight is None:
        return None
    matmul, operators, roundings = _device(weight)
    guess = find_layer(module, matmul)
    if guess is None:
        return None
    x = random_rows(1, _TRIAL_ROWS, guess.out.num_outputs, like=weight)
    cos, sin = random_rows(2, _TRIAL_ROWS, guess.head_dim, like=weight, seed=1)
    memory = None if guess.cross is None else _memory(guess.cross, like=weight)
    with stand_ins(module):
        slots = [slot_of(each) for each in attentions]
        try:
            wanted = module(
                x,
                attention_mask=None,
                # So far that queries that are scaled by their position tell themselves apart.
                position_ids=torch.arange(_TRIAL_ROWS, device=x.device)[None] << 20,
                use_cache=False,
                position_embeddings=(cos[None], sin[None]),
                **({} if memory is None else {_MEMORY: memory[None]}),
            )
            wanted = wanted[0]
            wanted = wanted[0] if wanted.dim() == 3 else wanted
        except Exception:
            return None  # it wants other arguments
        for angles, is_scaled in product((0, None), (False, True)):
            args = [_args_of(*pair, is_scaled) for pair in zip(attentions, slots, strict=True)]
            cross = None if guess.cross is None else replace(guess.cross, attention=args[1])
            plan = replace(guess, attention=args[0], cross=cross, angles=angles)
            layer = _Layer(plan, attentions[0], operators([plan]), is_last)
            found = partial(_run_tried, layer, x[0], (cos, sin), slots, memory)
            if agree(found, lambda: wanted, roundings=roundings):
                return layer
    return None


def _args_of(attention: nn.Module, slot: Slot | None, is_scaled: bool) -> AttentionArgs:
    """Arguments of the layer's attention, its queries as they come out of their matmul.

    `is_scaled`: the module has scaled them before.
    """
    assert isinstance(slot, StandIn)
    factor = getattr(attention, "scaling", 1.0) if is_scaled else 1.0
    return slot.args._replace(scale=slot.args.scale * factor)


def _run_tried(
    layer: _Layer, x: Tensor, angles: Angles, slots: Sequence[Any], memory: Tensor | None
) -> Tensor:
    prepared = layer.operators.prepare([angles])
    return run_layer(layer.operators, 0, layer.plan, x, prepared, iter(slots), None, memory)


def _memory(cross: CrossPlan, like: Tensor) -> Tensor:
    """An encoder's rows for a trial, [T, dim]."""
    return random_rows(_TRIAL_ROWS, cross.out.num_outputs, like=like, seed=3)


def _device(weight: Tensor) -> tuple[Kind, Callable[..., Operators], int]:
    """The matmuls and operators of a weight's device, and how far its modules may round otherwise.

    The units are those of `agree`.
    """
    if weight.device.type == "cpu":
        return NativeLinear, NativeOperators, 0
    return TorchLinear, operators_on(weight.device), ROUNDINGS


def _tried_decoder(decoder: nn.Module) -> _Decoder | None:
    """The plan of a decoder that does nothing but call its layers, if all of these have one."""
    modules, rotary = getattr(decoder, "layers", None), getattr(decoder, "rotary_emb", None)
    norm = getattr(decoder, "norm", getattr(decoder, "layer_norm", None))
    if not isinstance(modules, nn.ModuleList) or not modules or not isinstance(norm, NORMS):
        return None
    layers: list[_Layer | None] = [getattr(module, _LAYER, None) for module in modules]
    around = [each for each in (decoder, rotary, norm) if isinstance(each, nn.Module)]
    if None in layers or any(map(is_hooked, around)):
        return None
    plans = [layer.plan for layer in layers if layer is not None]
    holder = plans[0].slot.holder if isinstance(plans[0].slot, LayerSlot) else StepHolder()
    places = _places(decoder)
    if places is None and not isinstance(rotary, nn.Module):
        return None
    _, kind, roundings = _device(norm.weight)
    num_places = None if places is None else len(places)
    trial = _Trial(decoder, plans[0], norm.weight, roundings, holder, num_places)
    with stand_ins(decoder):
        if (seen := trial.watch(rotary, modules)) is None:
            return None
        axes_of_text, calls, angles, output = seen
        planned = tuple(
            plan if plan.angles is None else replace(plan, angles=index)
            for plan, index in zip(plans, angles, strict=True)
        )
        slow = _Rotary(rotary, axes_of_text, calls) if rotary is not None else _NO_ANGLES
        by = getattr(kind, "angles_of", None)
        make_angles = make_angles_by(by, rotary, slow, norm.weight, axes_of_text)
        plan = DecoderPlan(planned, norm.fused[1], make_angles, places)
        operators = kind(planned, plan.norm)
        if not trial.agrees(plan, operators, wanted=output):
            return None
        has_axes = places is None and trial.agrees(plan, operators, axes=2)
        takes_rows = trial.agrees(plan, operators, has_rows=True)
    return _Decoder(plan, operators, frozenset([1, 2] if has_axes else [1]), takes_rows)


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """A decoder on random rows, with attention that stands in."""

    decoder: nn.Module
    layer: LayerPlan  # the first
    weight: Tensor  # rows have its dtype and device
    roundings: int
    holder: StepHolder
    num_places: int | None  # that there are, where positions are learned

    @property
    def embeds(self) -> Tensor:
        """[T, hidden]."""
        return random_rows(_TRIAL_ROWS, self.layer.out.num_outputs, like=self.weight)

    @property
    def memory(self) -> Tensor | None:
        """[T, dim], where there is cross-attention."""
        return None if self.layer.cross is None else _memory(self.layer.cross, like=self.weight)

    def positions(self, axes: int) -> Tensor:
        """[T], or [3, T] with other ones on each axis."""
        first = torch.tensor(_TRIAL_POSITIONS, device=self.weight.device)
        if self.num_places is not None:
            first = first % self.num_places
        return first if axes == 1 else torch.stack([first, first.flip(0), first + 3])

    def run(self, axes: int = 1, rows: Sequence[Tensor] = ()) -> Tensor:
        """Run the decoder's own forward, [T, hidden]."""
        positions = self.positions(axes)
        given: dict[str, Any] = {"inputs_embeds": self.embeds[None], "use_cache": False}
        given["position_ids"] = positions[None] if axes == 1 else positions[:, None]
        if rows:
            given[_ROWS] = [*rows]
            given["visual_pos_masks"] = torch.ones(
                1, _TRIAL_ROWS, dtype=torch.bool, device=self.weight.device
            )
        if self.memory is not None:
            given[_MEMORY] = self.memory[None]
        # Some modules ask the step for the positions of its tokens.
        step = StepContext((), (), ReferenceBackend(), positions)
        with self.holder.hold(step):
            output: Tensor = self.decoder(**given).last_hidden_state[0]
        return output

    def agrees(
        self,
        plan: DecoderPlan,
        operators: Operators,
        *,
        axes: int = 1,
        has_rows: bool = False,
        wanted: Tensor | None = None,
    ) -> bool:
        """Return whether the plan comes to the decoder's own bits, which `wanted` are if given."""
        if has_rows and _ROWS not in inspect.signature(self.decoder.forward).parameters:
            return False
        count = 2 if has_rows else 0
        width = self.layer.out.num_outputs
        rows = random_rows(count, _TRIAL_ROWS, width, like=self.weight, seed=2).unbind(0)
        slots = [StandIn() for _ in slots_of(plan.layers)]
        given = self.embeds, self.positions(axes), rows, slots, self.memory
        found = partial(run_plan, plan, operators, *given)
        own = partial(self.run, axes, rows) if wanted is None else wanted.clone
        return agree(found, own, roundings=self.roundings)

    def watch(
        self, rotary: nn.Module | None, layers: nn.ModuleList
    ) -> tuple[int | None, list[_Call], list[int], Tensor] | None:
        """Find how the rotary module is called, and which call's angles each layer is given.

        The axes of positions where these have a dimension of their own, the calls' arguments
        without embeddings and positions, and what the decoder has made. None where that is not how
        it goes.
        """
        axes: set[int | None] = set()
        calls: list[_Call] = []
        made: list[Any] = []
        kinds: list[int] = []

        def note_call(_: nn.Module, args: Any, named: dict[str, Any], output: Any) -> None:
            others = {key: value for key, value in named.items() if not isinstance(value, Tensor)}
            ids = named["position_ids"] if "position_ids" in named else args[1]
            axes.add(len(ids) if ids.dim() == 3 else None)
            calls.append((args[2 - len(named) + len(others) :], others))
            made.append(output)

        def note_layer(_: nn.Module, args: Any, named: dict[str, Any]) -> None:
            given = named.get("position_embeddings")
            found = (i for i, each in enumerate(made) if each is given)
            kinds.append(next(found) if rotary is not None else 0)

        hooks: list[Any] = []
        if rotary is not None:
            hooks.append(rotary.register_forward_hook(note_call, with_kwargs=True))
        hooks += [each.register_forward_pre_hook(note_layer, with_kwargs=True) for each in layers]
        try:
            output = self.run()
        except Exception:
            return None
        finally:
            for hook in hooks:
                hook.remove()
        if len(kinds) != len(layers) or len(axes) != (rotary is not None):
            return None
        return axes.pop() if axes else None, calls, kinds, output
