"""Linear layers of a loaded model, packed where they are.

A module that is packed stays the object it was, so that whoever holds it, hooks it or finds it by
its path goes on as before; its class changes, and its plain weight is freed at once, so that a
model never takes twice its memory. In the weight's place there is a stand-in of the same shape,
dtype and device, which takes no memory and has no values: all its numbers are NaN, so that nobody
computes with it unnoticed.

A layer is left alone where
  its weight is another module's too (a head that is tied to the embeddings),
  the class that calls it reads the weight itself instead of calling the layer, or
  `aioengine.kernels.linear` has no way for it.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn

from aioengine.kernels.linear import PackedLinear, pack_linear
from aioengine.models.fusion.merged_linear import Merged, joined, shared_inputs

__all__ = ["Pack", "Packed", "PackedPart", "leave_empty", "own_layers", "pack_layers", "source_of"]

Pack = Callable[[Tensor, Tensor | None], PackedLinear | None]
Layer = TypeVar("Layer", nn.Linear, nn.Conv1d)


class Packed(nn.Linear):
    """A linear layer whose weight is packed. Made of one by `pack_layers`, never by itself."""

    packed: PackedLinear

    def forward(self, input: Tensor) -> Tensor:
        """`input` [..., in] -> [..., out]."""
        return self.packed(input)


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
            weight, bias = joined(layers)
            packed = pack(weight, bias)
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


def own_layers(
    model: nn.Module, kind: type[Layer], without: Collection[int] = ()
) -> dict[int, Layer]:
    """The layers of a class, by their ids, whose weights nobody else has or computes with.

    Subclasses are left out: one does something else, or is there to be told from others.
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
    for parent in model.modules():
        for name, child in parent.named_children():
            if id(child) in found and _reads_weight(source_of(type(parent)), name):
                del found[id(child)]
    return found


def _groups(model: nn.Module, without: Collection[int]) -> Iterator[list[nn.Linear]]:
    """Layers that can be packed, those together that are given the same tensor."""
    free = own_layers(model, nn.Linear, without)
    parents = Counter(id(child) for module in model.modules() for child in module.children())
    owners = [each for each in model.modules() if any(id(x) in free for x in each.children())]
    shared = {kind: shared_inputs(source_of(kind) or "") for kind in {type(x) for x in owners}}
    for parent in owners:
        for names in shared[type(parent)]:
            found = [id(getattr(parent, name, None)) for name in names]
            layers = [free[each] for each in found if each in free and parents[each] == 1]
            if len(layers) > 1 and _are_alike(layers):
                for layer in layers:
                    del free[id(layer)]
                yield layers
    yield from ([layer] for layer in free.values())


def _are_alike(layers: Sequence[nn.Linear]) -> bool:
    """Return whether one input fits all, and one matmul may serve them."""
    return len({(x.in_features, x.weight.dtype, x.weight.device) for x in layers}) == 1


def source_of(owner: type[nn.Module]) -> str | None:
    """A class's own code; None for those of torch, whose fast paths read what they hold."""
    if owner in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
        return ""
    if owner.__module__.startswith("torch.nn."):
        return None
    return _classes(owner.__module__).get(owner.__qualname__, "")


@cache
def _classes(module: str) -> Mapping[str, str]:
    """The code of a module's classes by their qualified names (`inspect` parses all for each)."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        return {}
    lines = source.splitlines(keepends=True)
    found: dict[str, str] = {}

    def collect(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.ClassDef):
                found[prefix + child.name] = "".join(lines[child.lineno - 1 : child.end_lineno])
                inner = f"{prefix}{child.name}."
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{prefix}{child.name}.<locals>."
            collect(child, inner)

    collect(ast.parse(source), "")
    return found


def _reads_weight(source: str | None, name: str) -> bool:
    """Return whether a class computes with the weight of its child `name` itself.

    Its dtype, device and shape may be read, of the stand-in too.
    """
    if source is None:
        return True
    harmless = rf"(?<!isinstance\(self\.{name})\.weight\b(?!\.(?:dtype|device|shape)\b)"
    return re.search(rf"\bself\.{name}{harmless}", source) is not None


def leave_empty(layer: Layer, kind: type[Layer], **attributes: object) -> None:
    """Make the layer one of `kind`, and free its weight."""
    weight = layer.weight
    empty = torch.full((1, 1), torch.nan, dtype=weight.dtype, device=weight.device)
    layer.__class__ = kind
    for name, value in attributes.items():
        setattr(layer, name, value)
    layer.weight = nn.Parameter(empty.expand(weight.shape), requires_grad=False)


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
