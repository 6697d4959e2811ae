"""Linear layers of a loaded model, packed where they are, those of one input as one.

The plain weight of a module that is packed is freed at once, so that a model never takes twice its
memory. In the weight's place there is a stand-in of the same shape, dtype and device, which takes
no memory and has no values: all its numbers are NaN, so that nobody computes with it unnoticed.

Queries, keys and values of one attention, or the two halves of a gated layer, are one matmul: their
names say where that pays (`layer_names`). Whichever of the layers is called first computes the
outputs of all, and the others hand theirs out if they are called with that very tensor. With
another one they compute again. Each output is handed out once; what nobody has asked for goes when
the input goes.

A layer is left alone where
  its weight is another module's too (a head that is tied to the embeddings),
  the class that holds it reads the weight itself instead of calling the layer, or
  `aioengine.kernels.linear` has no way for it.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from aioengine.kernels.grouped import pack_grouped
from aioengine.kernels.linear import PackedLinear, pack_linear
from aioengine.models.fusion.layer_names import layer_names_of
from aioengine.models.fusion.swap import swap
from aioengine.models.quantization.grouped_layers import grouped_of, joined_groups, stand_in

__all__ = [
    "Merged",
    "Pack",
    "Packed",
    "PackedPart",
    "leave_empty",
    "own_layers",
    "pack_layers",
    "read_by_parents",
]

Pack = Callable[[Tensor, Tensor | None], PackedLinear | None]
Layer = TypeVar("Layer", nn.Linear, nn.Conv1d, nn.Embedding)


class Packed(nn.Linear):
    """A linear layer whose weight is packed. Made of one by `pack_layers`, never by itself."""

    packed: PackedLinear

    def forward(self, input: Tensor) -> Tensor:
        """`input` [..., in] -> [..., out]."""
        return self.packed(input)


class Merged:
    """One matmul for several layers. `sizes`: of the outputs, one after the other."""

    def __init__(self, packed: PackedLinear, sizes: Sequence[int]) -> None:
        self.packed = packed
        self.sizes = list(sizes)
        # What was computed last: of which input, and the parts that were not handed out yet.
        self._last: tuple[weakref.ref[Tensor], list[Tensor | None]] | None = None

    def part(self, index: int, x: Tensor) -> Tensor:
        """Layer `index`'s output of `x` [..., in]: [..., sizes[index]], contiguous."""
        last = self._last
        if last is None or last[0]() is not x or last[1][index] is None:
            outputs: list[Tensor | None] = [*torch.split(self.packed(x), self.sizes, -1)]
            last = self._last = (weakref.ref(x, self._forget), outputs)
        found = last[1][index]
        assert found is not None
        last[1][index] = None
        if self._last is last and not any(each is not None for each in last[1]):
            self._last = None
        return found.contiguous()

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        last = self._last
        if last is not None and last[0] is gone:
            self._last = None


class PackedPart(nn.Linear):
    """One of several linear layers whose weights are packed as one."""

    merged: Merged
    index: int

    def forward(self, input: Tensor) -> Tensor:
        """`input` [..., in] -> [..., out]."""
        return self.merged.part(self.index, input)


def pack_layers(
    model: nn.Module, pack: Pack = pack_linear, *, without: Sequence[nn.Module] = ()
) -> int:
    """Pack the linear layers of `model` that qualify, but `without`, one by one; mutates them.

    Returns how many bytes they take. The modules must not be in use meanwhile.
    """
    num_bytes = 0
    with torch.no_grad():
        for layers in list(_groups(model, {id(module) for module in without})):
            packed = _pack_joined(layers, pack)
            if packed is None:
                continue
            num_bytes += packed.nbytes
            if len(layers) == 1:
                leave_empty(layers[0], Packed, packed=packed)
                continue
            merged = Merged(packed, [layer.out_features for layer in layers])
            for index, layer in enumerate(layers):
                leave_empty(layer, PackedPart, merged=merged, index=index)
        _release_files(model, num_bytes)
    return num_bytes


def _pack_joined(layers: Sequence[nn.Linear], pack: Pack) -> PackedLinear | None:
    """All layers as one matmul: in groups where that is what their weights are."""
    grouped = joined_groups(layers)
    if grouped is not None:
        return pack_grouped(grouped, joined_biases(layers))
    return pack(*joined(layers))


def own_layers(
    model: nn.Module, kind: type[Layer], without: Collection[int] = ()
) -> dict[int, Layer]:
    """The layers of a class, by their ids, whose weights nobody else has or computes with.

    Subclasses are left out: one does something else, or exists to be distinguished from others.
    """
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    found = {
        id(module): module
        for module in model.modules()
        if type(module) is kind and owners[id(module.weight)] == 1 and id(module) not in without
    }
    for key in read_by_parents(model, found.values()):
        del found[key]
    return found


def read_by_parents(model: nn.Module, modules: Iterable[nn.Module]) -> set[int]:
    """Ids of those of `modules` whose weights a class computes with that holds them."""
    wanted, found = set(map(id, modules)), set[int]()
    for parent in model.modules():
        kind: Any = type(parent)
        names = [name for name, child in parent.named_children() if id(child) in wanted]
        found |= {id(getattr(parent, name)) for name in names if _reads_weight(kind, name)}
    return found


_READS_WEIGHT = r"(?<!isinstance\()\bself\.{}\.weight\b(?!\.(?:dtype|device|shape)\b)"
"""Code that computes with a child's weight; its dtype, device and shape the stand-in has too."""


@lru_cache(maxsize=1024)
def _reads_weight(kind: Any, name: str) -> bool:
    """Return whether a class computes with the weight of the child of that name."""
    pattern = _READS_WEIGHT.format(name)
    return _is_of_torch(kind) or re.search(pattern, _code(kind)) is not None


def _is_of_torch(kind: type[nn.Module]) -> bool:
    """Return whether a class is torch's own, whose fast paths read their children's weights."""
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return kind.__module__.startswith("torch.nn.") and kind not in containers


@lru_cache(maxsize=1024)  # to find a method's end its file is tokenized
def _code(kind: Any) -> str:
    """The methods of a class and of its bases, but torch's; nothing where they have no source."""
    bases = [base for base in kind.__mro__ if not base.__module__.startswith("torch.")]
    methods = [each for base in bases for each in vars(base).values() if inspect.isfunction(each)]
    with suppress(OSError):
        return "".join(map(inspect.getsource, methods))
    return ""


def _groups(model: nn.Module, without: Collection[int]) -> Iterator[list[nn.Linear]]:
    """Layers that can be packed, those together whose names say that they have one input."""
    free = own_layers(model, nn.Linear, without)
    parents = Counter(id(child) for module in model.modules() for child in module.children())
    for path, parent in list(model.named_modules()):
        for names in layer_names_of(parent, path.rpartition(".")[2]).merged:
            found = [id(getattr(parent, name, None)) for name in names]
            layers = [free[each] for each in found if each in free and parents[each] == 1]
            if len(layers) > 1 and _are_alike(layers):
                for layer in layers:
                    del free[id(layer)]
                yield layers
    yield from ([layer] for layer in free.values())


def _are_alike(layers: Sequence[nn.Linear]) -> bool:
    """Return whether one input fits all, and one matmul may serve them."""
    known = [grouped_of(x) for x in layers]
    forms = [None if each is None else each.form for each in known]
    shapes = [(x.in_features, x.weight.dtype, x.weight.device) for x in layers]
    return len(set(zip(shapes, forms, strict=True))) == 1


def joined(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight [sum of out, in] and bias [sum of out] of all; zeros for biases that some lack."""
    if len(layers) == 1:
        return layers[0].weight, layers[0].bias
    weights: tuple[Tensor, ...] = tuple(layer.weight for layer in layers)
    return torch.cat(weights), joined_biases(layers)


def joined_biases(layers: Sequence[nn.Linear]) -> Tensor | None:
    """The biases of all, zeros for those that some lack; None where all do."""
    if all(layer.bias is None for layer in layers):
        return None
    biases: list[Tensor] = [
        layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias
        for layer in layers
    ]
    return torch.cat(biases)


def leave_empty(layer: Layer, kind: type[Layer], **attributes: object) -> None:
    """Make the layer one of `kind`, and free its weight."""
    swap(layer, kind, **attributes)
    layer.weight = stand_in(layer.weight)


def _release_files(model: nn.Module, num_packed: int) -> None:
    """Copy what is left of the weights, if it is less than the `num_packed` bytes that are gone.

    Weights that were not converted while loading are views of their file, all of which stays in
    memory until the last of them is gone. A file of which most is still in use is left.
    """
    left = [
        tensor
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() >= tensor.nbytes
    ]
    if sum(tensor.nbytes for tensor in left) > num_packed:
        return
    copies: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
    for tensor in left:
        key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
        if key not in copies:
            copies[key] = tensor.detach().clone()
        tensor.data = copies[key]
