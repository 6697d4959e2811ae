"""Decoder layers computed operator after operator, without the modules in between.

The usual layer (norm, attention with rotary embeddings, sum, norm, feed-forward, sum) comes down to
three operators once its matmuls, norms and rotations are ours: what comes before attention,
attention, and what comes after it (`kernels.cpu.fused_layer`). For a few tokens its modules, their
views and copies take longer than small operators: so a layer whose parts are all of that kind calls
the operators itself. Queries, keys and values stay where their matmul wrote them. With norms of
PyTorch's, as in float32, it calls the operators one by one.

A layer is taken for one by what it holds, and by a trial: on random rows, with an attention that
stands in, its own forward and this one must come to the same bits. What a layer is called with that
this one does not know, its own forward answers.

The last layer attends with all rows of a step, as their keys and values stay; what comes after that
it computes for the rows alone that are read.

Where all that a decoder does, by another trial, is to call such layers, they are called without it
(`run_fused_decoder`). What its own forward does around them (arguments merged with the config,
masks that nobody reads, a wrapper around each layer) takes as long as a small layer where there are
few tokens, the more so as matmuls of megabytes leave nothing of Python in the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aioengine.kernels.attention import AttentionArgs
from aioengine.kernels.cpu.backend import CpuBackend
from aioengine.kernels.cpu.fused_layer import Layers, UsualLayer, listed
from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.kernels.cpu.norm import rms_norm
from aioengine.kernels.cpu.rotary import rotate
from aioengine.kernels.layer_slot import LayerSlot, Slot, slot_of
from aioengine.models.fusion.fused_mlp import ActivatedFeedForward
from aioengine.models.fusion.fused_rms_norm import FusedRMSNorm
from aioengine.models.fusion.packed_linear import Packed, PackedPart
from aioengine.models.fusion.swap import subclass, swap
from aioengine.models.fusion.trial import StandIn, agree, random_rows, stand_ins

__all__ = ["fuse_decoder_layers", "layer_by_layer", "run_fused_decoder"]

Forward = Callable[..., Tensor]

_LAYER = "_aioengine_layer"
_STACK = "_aioengine_stack"
_TRIAL_POSITIONS = (0, 1, 7, 2, 300)
_TRIAL_ROWS = len(_TRIAL_POSITIONS)


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """The parts of a layer in the order of their use."""

    attention_norm: FusedRMSNorm
    qkv: NativeLinear  # queries, keys and values
    sizes: list[int]  # of their rows
    head_dim: int
    attention: nn.Module
    args: AttentionArgs  # that it calls its slot with
    out: NativeLinear
    feed_forward_norm: FusedRMSNorm
    feed_forward: ActivatedFeedForward
    is_last: bool  # whatever comes after it, if anything, takes rows one by one
    usual: UsualLayer | None = None  # the same for the fused operators, if they take it

    def compute(
        self, x: Tensor, cos: Tensor, sin: Tensor, slot: Slot, wanted: Tensor | None = None
    ) -> Tensor:
        """`x` [T, hidden], `cos` and `sin` [T, head_dim] -> [T, hidden].

        `wanted`: the rows that are read, None for all; the others are what they came as.
        """
        query, key, value = self._project(x, cos, sin)
        found = slot.attend(query, key, value, self.args).flatten(-2)
        if wanted is None or len(wanted) == len(x):
            return self._feed(x, found)
        return x.index_copy(0, wanted, self._feed(x[wanted], found[wanted]))

    def wanted(self, slot: Slot | None) -> Tensor | None:
        """The rows that are read of what it computes in this step, None for all."""
        return slot.wanted if self.is_last and isinstance(slot, LayerSlot) else None

    def _project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.usual is not None:
            return self.usual.project(x, cos, sin)
        # Without hooks (`_find`) a module's call is its forward.
        normed = self.attention_norm.forward(x)
        query, key, value = (
            part.view(len(x), -1, self.head_dim)
            for part in torch.split(self.qkv(normed), self.sizes, -1)
        )
        return *rotate(query, key, cos, sin), value

    def _feed(self, x: Tensor, attended: Tensor) -> Tensor:
        if self.usual is not None:
            return self.usual.feed(x, attended)
        x = self.out(attended).add_(x)
        return self.feed_forward.forward(self.feed_forward_norm.forward(x)).add_(x)

    def find_usual(self) -> UsualLayer | None:
        """The layer as the fused operators take it, if they do."""
        norm, feed_norm = self.attention_norm, self.feed_forward_norm
        names, up, activation = self.feed_forward.fused
        down = getattr(getattr(self.feed_forward, names.down), "packed", None)
        if norm.fused[0] is not rms_norm or feed_norm.fused[0] is not rms_norm:
            return None
        if not isinstance(down, NativeLinear):
            return None
        return UsualLayer(
            norm=norm.weight,
            epsilon=norm.fused[1],
            qkv=self.qkv,
            heads=(self.sizes[0] // self.head_dim, self.sizes[1] // self.head_dim),
            scale=self.args.scale,
            softcap=self.args.softcap or 0.0,
            window=self.args.window or 0,
            out=self.out,
            feed_norm=feed_norm.weight,
            feed_epsilon=feed_norm.fused[1],
            up=up,
            activation=activation,
            is_gated=names.gate is not None,
            down=down,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Stack:
    """The parts of a decoder in the order of their use.

    `at_once`: the layers as one operator takes them, if it does, with the `slots` that they had;
    they share their step and the metadata of one KV group.
    """

    rotary: nn.Module
    layers: list[_Layer]
    norm: nn.Module
    slots: list[Slot | None]
    at_once: Layers | None

    def compute(self, embeds: Tensor, positions: Tensor) -> Tensor | None:
        """See `run_fused_decoder`."""
        x, slots = embeds[None], [slot_of(layer.attention) for layer in self.layers]
        angles = self.rotary(x, positions[None])
        if None in slots or not _fits(x, angles, self.layers[0].head_dim):
            return None
        cos, sin = angles[0][0], angles[1][0]
        # The last layer's rows may not all be read, which is its own affair.
        last = self.layers[-1].wanted(slots[-1])
        count = len(slots) if last is None else len(slots) - 1
        found = self._run_at_once(embeds, cos, sin, count) if slots == self.slots else None
        x, first = (embeds, 0) if found is None else (found, count)
        for layer, slot in zip(self.layers[first:], slots[first:], strict=True):
            assert slot is not None
            x = layer.compute(x, cos, sin, slot, layer.wanted(slot))
        normed: Tensor = self.norm(x[None])[0]
        return normed

    def _run_at_once(self, x: Tensor, cos: Tensor, sin: Tensor, count: int) -> Tensor | None:
        """The rows after the first `count` layers; None if they have to be computed one by one."""
        slot = self.slots[0]
        if self.at_once is None or not isinstance(slot, LayerSlot):
            return None
        step = slot.holder.current
        # Another backend, or one made of it, wants to be called for each layer.
        if step is None or type(step.backend) is not CpuBackend:
            return None
        slots = [each for each in self.slots[:count] if isinstance(each, LayerSlot)]
        caches = [step.caches[each.layer] for each in slots]
        meta = step.metadata[slot.group]
        return step.backend.run_layers(x, cos, sin, self.at_once, caches, meta)


def run_fused_decoder(decoder: nn.Module, embeds: Tensor, positions: Tensor) -> Tensor | None:
    """The last hidden states [T, hidden] of `embeds` [T, hidden], tokens at `positions` [T].

    None for a decoder that does more than call layers which `fuse_decoder_layers` has taken.
    """
    stack: _Stack | None = getattr(decoder, _STACK, None)
    return None if stack is None else stack.compute(embeds, positions)


@contextmanager
def layer_by_layer(root: nn.Module) -> Iterator[None]:
    """Meanwhile, decoders in `root` call their layers one by one."""
    stacks = {
        module: getattr(module, _STACK) for module in root.modules() if hasattr(module, _STACK)
    }
    for module in stacks:
        setattr(module, _STACK, None)
    try:
        yield
    finally:
        for module, stack in stacks.items():
            setattr(module, _STACK, stack)


def fuse_decoder_layers(decoder: nn.Module) -> int:
    """Have the layers of `decoder` that qualify call their operators themselves, in place.

    Attention layers must have their slots. Returns how many do.
    """
    count = 0
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    stacks = (each for each in decoder.modules() if isinstance(each, nn.ModuleList) and len(each))
    last = {id(stack[-1]) for stack in stacks}
    with torch.inference_mode():
        for module in list(decoder.modules()):
            found = _find(module, is_last=id(module) in last)
            if found is None:
                continue
            layer = _tried(module, found)
            if layer is None:
                continue
            kind = type(module)
            if kind not in kinds:
                kinds[kind] = _fused_class(kind)
            swap(module, kinds[kind], **{_LAYER: layer})
            count += 1
        setattr(decoder, _STACK, _tried_stack(decoder))
    return count


def _fused_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class whose layers compute what they are made of."""
    own: Forward = kind.forward

    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        layer: _Layer = getattr(self, _LAYER)
        slot = slot_of(layer.attention)
        if args or slot is None or not _fits(hidden_states, position_embeddings, layer.head_dim):
            kwargs["position_embeddings"] = position_embeddings
            return own(self, hidden_states, *args, **kwargs)
        assert position_embeddings is not None
        cos, sin = position_embeddings
        return layer.compute(hidden_states[0], cos[0], sin[0], slot, layer.wanted(slot))[None]

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


def _find(module: nn.Module, *, is_last: bool) -> _Layer | None:
    """The parts of a layer, if it holds those of the usual one, all ours, and nothing else."""
    children = [*module.children()]
    if len(children) != 4:
        return None
    attention, feed_forward, first, second = sorted(children, key=_rank)
    if slot_of(attention) is None or not isinstance(feed_forward, ActivatedFeedForward):
        return None
    if not isinstance(first, FusedRMSNorm) or not isinstance(second, FusedRMSNorm):
        return None
    if any(each._forward_hooks or each._forward_pre_hooks for each in module.modules()):
        return None
    parts = [child for child in attention.children() if isinstance(child, PackedPart)]
    others = [child for child in attention.children() if not isinstance(child, PackedPart)]
    head_dim = getattr(attention, "head_dim", None)
    if len(parts) != 3 or len(others) != 1 or not isinstance(head_dim, int):
        return None
    merged, (out,) = parts[0].merged, others
    is_whole = all(part.merged is merged for part in parts) and len(merged.sizes) == 3
    is_whole = is_whole and merged.sizes[1] == merged.sizes[2]
    if not is_whole or [part.index for part in parts] != [0, 1, 2]:
        return None
    if not isinstance(merged.packed, NativeLinear) or not isinstance(out, Packed):
        return None
    if not isinstance(out.packed, NativeLinear) or any(size % head_dim for size in merged.sizes):
        return None
    return _Layer(
        attention_norm=first,
        qkv=merged.packed,
        sizes=merged.sizes,
        head_dim=head_dim,
        attention=attention,
        args=StandIn.args,
        out=out.packed,
        feed_forward_norm=second,
        feed_forward=feed_forward,
        is_last=is_last,
    )


def _rank(module: nn.Module) -> int:
    if slot_of(module) is not None:
        return 0
    return 1 if isinstance(module, ActivatedFeedForward) else 2


def _tried(module: nn.Module, layer: _Layer) -> _Layer | None:
    """The layer with its attention's options, if it comes to the module's own bits."""
    dtype, width = layer.attention_norm.weight.dtype, len(layer.attention_norm.weight)
    x = random_rows(1, _TRIAL_ROWS, width, dtype=dtype)
    cos, sin = random_rows(2, _TRIAL_ROWS, layer.head_dim, dtype=dtype, seed=1)
    with stand_ins(module):
        stand_in = slot_of(layer.attention)
        assert isinstance(stand_in, StandIn)
        try:
            wanted = module(
                x,
                attention_mask=None,
                position_ids=torch.arange(_TRIAL_ROWS)[None],
                use_cache=False,
                position_embeddings=(cos[None], sin[None]),
            )
        except Exception:
            return None  # it wants other arguments
        layer = replace(layer, args=stand_in.args)
        first, second = layer.attention_norm, layer.feed_forward_norm
        for found in (layer, replace(layer, attention_norm=second, feed_forward_norm=first)):
            each = replace(found, usual=found.find_usual())
            fused = partial(each.compute, x[0], cos, sin, stand_in)
            if agree(fused, lambda: wanted[0], roundings=0):
                return each
    return None


def _tried_stack(decoder: nn.Module) -> _Stack | None:
    """The parts of a decoder that does nothing but call its layers, if all of these qualify."""
    modules = getattr(decoder, "layers", None)
    rotary, norm = getattr(decoder, "rotary_emb", None), getattr(decoder, "norm", None)
    if not isinstance(modules, nn.ModuleList) or not modules or rotary is None or norm is None:
        return None
    layers: list[_Layer | None] = [getattr(module, _LAYER, None) for module in modules]
    around = (decoder, rotary, norm)
    if None in layers or any(each._forward_hooks or each._forward_pre_hooks for each in around):
        return None
    fused = [layer for layer in layers if layer is not None]
    slots = [slot_of(layer.attention) for layer in fused]
    weight = fused[0].attention_norm.weight
    embeds = random_rows(_TRIAL_ROWS, len(weight), dtype=weight.dtype)
    positions = torch.tensor(_TRIAL_POSITIONS)
    stack = _Stack(rotary, fused, norm, slots, _at_once(fused, slots))

    def plain() -> Tensor:
        given = {"inputs_embeds": embeds[None], "position_ids": positions[None]}
        output: Tensor = decoder(**given, use_cache=False).last_hidden_state[0]
        return output

    def found() -> Tensor:
        output = stack.compute(embeds, positions)
        assert output is not None
        return output

    with stand_ins(decoder):
        return stack if agree(found, plain, roundings=0) else None


def _at_once(layers: Sequence[_Layer], slots: Sequence[Slot | None]) -> Layers | None:
    """The layers as one operator takes them, if they are such and all write to one KV group."""
    usual = [layer.usual for layer in layers if layer.args.sinks is None]
    found = [layer for layer in usual if layer is not None]
    plain = [slot for slot in slots if isinstance(slot, LayerSlot) and slot.stores]
    if not found or len(found) < len(layers) or len(plain) < len(slots):
        return None
    if any(slot.distance_bias is not None for slot in plain):
        return None
    places = {(id(slot.holder), slot.group) for slot in plain}
    return listed(found) if len(places) == 1 else None
