"""What operators do to memory and to the host, as their schemas and a few lists say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.simulated.deferral import UnknownShapeError

__all__ = [
    "ALLOCATING",
    "FRESH",
    "INDEXING",
    "PINNING",
    "WAITING",
    "WHOLE",
    "is_view",
    "returned",
    "written_by",
]

aten = torch.ops.aten

WAITING = {
    aten._local_scalar_dense.default: "item()",
    aten.nonzero.default: "nonzero()",
    aten.masked_select.default: "masked_select()",
    aten.equal.default: "equal()",
    aten.is_nonzero.default: "bool()",
    aten.repeat_interleave.Tensor: "repeat_interleave() without its output's size",
    aten._unique2.default: "unique()",
    aten.unique_consecutive.default: "unique_consecutive()",
    aten.bincount.default: "bincount()",
}
"""Operators whose result the host waits for."""
INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
ALLOCATING = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten._unsafe_view.default,
}
"""Operators that launch nothing."""
FRESH = ALLOCATING - {
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten._unsafe_view.default,
}
"""Those that give out memory as it is."""
WHOLE = {aten.rms_norm.default}
"""Operators that are made of others here, and one kernel where PyTorch has CUDA."""
PINNING = {aten.is_pinned.default, aten.pin_memory.default, aten._pin_memory.default}


def written_by(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes to, by its schema."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return found


def is_view(func: Any) -> bool:
    returns = func._schema.returns
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def returned(func: Any, args: Any, options: Mapping[str, Any]) -> Any:
    """What an operator returns that writes to operands: these. Raises UnknownShapeError."""
    by_name: dict[str, Any] = {}
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else options.get(argument.name)
            by_name[min(argument.alias_info.before_set)] = value
    found = []
    for each in func._schema.returns:
        if each.alias_info is None:
            raise UnknownShapeError(f"{func} makes and writes")
        found.append(by_name[min(each.alias_info.before_set)])
    return tuple(found) if len(found) > 1 else found[0] if found else None
