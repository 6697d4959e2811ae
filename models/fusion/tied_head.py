"""Embeddings, and output heads that share their weight: packed once, and both read that.

A packed weight multiplies faster than a plain one, and an embedding is a row of it as well: its
numbers lie apart, which takes a microsecond a token.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from aioengine.kernels.cpu.linear import NativeLinear
from aioengine.kernels.grouped import TorchGroupedLinear, pack_grouped
from aioengine.kernels.linear import PackedLinear, pack_linear
from aioengine.models.fusion.packed_linear import Packed, leave_empty, read_by_parents
from aioengine.models.quantization.grouped_layers import forget, grouped_of

__all__ = ["PackedRows", "pack_tables", "tables_of"]

Readable: TypeAlias = NativeLinear | TorchGroupedLinear


class PackedRows(nn.Embedding):
    """Embeddings that are read from a packed weight."""

    packed: Readable

    def forward(self, input: Tensor) -> Tensor:
        """Ids [...] -> rows [..., hidden], in the dtype of the weight."""
        rows = self.packed.rows(input.reshape(-1))
        return rows.to(self.weight.dtype).view(*input.shape, -1)


def tables_of(model: nn.Module) -> list[list[nn.Module]]:
    """Weights of embeddings that can be packed: all modules that have one, a head among them or
    none, and nobody else who computes with it."""
    owners: dict[int, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for weight in module._parameters.values():
            if weight is not None:
                owners[id(weight)].append(module)
    return [
        modules
        for modules in owners.values()
        if any(isinstance(each, nn.Embedding) for each in modules)
        and all(map(_is_plain, modules))
        and sum(isinstance(each, nn.Linear) for each in modules) < 2
        and not read_by_parents(model, modules)
    ]


def pack_tables(model: nn.Module) -> int:
    """Pack weights of embeddings that heads share or that are in groups; how many there are."""
    return sum(map(_pack, tables_of(model)))


def _is_plain(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not _reads_itself(type(module))
    return type(module) is nn.Linear


def _reads_itself(kind: type[nn.Embedding]) -> bool:
    """Return whether a class looks rows up in its weight, and not by its base's `forward`."""
    forward: Any = inspect.unwrap(kind.forward)
    return forward is not nn.Embedding.forward and "forward" not in forward.__code__.co_names


def _pack(modules: Sequence[nn.Module]) -> bool:
    """Pack the weight that all of them have; whether that is of use."""
    heads = [each for each in modules if isinstance(each, nn.Linear)]
    if not heads and grouped_of(modules[0]) is None:
        return False
    packed = _packed(modules, heads[0].bias if heads else None)
    if not isinstance(packed, Readable):
        return False
    for module in modules:
        if isinstance(module, nn.Linear):
            leave_empty(module, Packed, packed=packed)
            continue
        assert isinstance(module, nn.Embedding)
        # What scales its rows calls the next class's `forward`: this one's.
        kind = type(module)
        bases = (PackedRows,) if kind is nn.Embedding else (kind, PackedRows)
        leave_empty(module, type(kind.__name__, bases, {}), packed=packed)
    return True


def _packed(modules: Sequence[nn.Module], bias: Tensor | None) -> PackedLinear | None:
    weight = grouped_of(modules[0])
    if weight is not None:
        for module in modules:
            forget(module)
        return pack_grouped(weight, bias)
    plain = modules[0].weight
    assert isinstance(plain, Tensor)
    return pack_linear(plain, bias)
