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

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from aioengine.kernels.linear import PackedLinear, pack_linear

__all__ = ["Packed", "pack_layers"]

Pack = Callable[[Tensor, Tensor | None], PackedLinear | None]


class Packed(nn.Linear):
    """A linear layer whose weight is packed. Made of one by `pack_layers`, never by itself."""

    packed: PackedLinear

    def forward(self, input: Tensor) -> Tensor:
        """`input` [..., in] -> [..., out]."""
        return self.packed(input)


def pack_layers(model: nn.Module, pack: Pack = pack_linear) -> int:
    """Pack the linear layers of `model` that qualify, one by one; mutates them.

    Returns how many bytes they take. The modules must not be in use meanwhile.
    """
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    num_bytes = 0
    with torch.no_grad():
        for layer in list(_layers(model)):
            packed = pack(layer.weight, layer.bias) if owners[id(layer.weight)] == 1 else None
            if packed is not None:
                _turn(layer, packed)
                num_bytes += packed.nbytes
        _release_files(model, num_bytes)
    return num_bytes


def _layers(model: nn.Module) -> Iterator[nn.Linear]:
    """Plain linear layers, of classes that do nothing but call them."""
    kinds = {type(module) for module in model.modules()}
    sources = {kind: _source(kind) for kind in kinds}
    kept = {
        id(child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if _reads_weight(sources[type(parent)], name)
    }
    for module in model.modules():
        # A subclass does something else, or is there to be told from others.
        if type(module) is nn.Linear and id(module) not in kept:
            yield module


def _source(owner: type[nn.Module]) -> str | None:
    """A class's own code; None for those of torch, whose fast paths read what they hold."""
    if owner in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
        return ""
    if owner.__module__.startswith("torch.nn."):
        return None
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):
        return ""


def _reads_weight(source: str | None, name: str) -> bool:
    """Whether a class computes with the weight of its child `name` itself.

    Its dtype, device and shape may be read, of the stand-in too.
    """
    if source is None:
        return True
    harmless = rf"(?<!isinstance\(self\.{name})\.weight\b(?!\.(?:dtype|device|shape)\b)"
    return re.search(rf"\bself\.{name}{harmless}", source) is not None


def _turn(layer: nn.Linear, packed: PackedLinear) -> None:
    """Make the layer a packed one, and free its weight."""
    weight = layer.weight
    empty = torch.full((1, 1), torch.nan, dtype=weight.dtype, device=weight.device)
    layer.__class__ = Packed
    assert isinstance(layer, Packed)
    layer.packed = packed
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
