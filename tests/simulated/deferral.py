"""What an operator's result looks like before it has been computed, and how it is computed later.

A result gets its memory when the operator is launched, filled with poison, and its numbers when it
is run. Its shape is found by running the operator over zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["later", "poison", "poison_memory", "shape_of"]

_zeros: dict[torch.dtype, Tensor] = {}


class UnknownShapeError(Exception):
    """The shape of a result cannot be found without its operands' numbers."""


def poison(tensor: Tensor) -> Tensor:
    """Fill with what no computation survives: NaN, or a number that is an index of nothing."""
    dtype = tensor.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if dtype == torch.bool else torch.iinfo(dtype).max)


@torch.inference_mode()
def poison_memory(memory: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """Fill a whole block of memory that was made for `dtype`."""
    poison(torch.empty(0, dtype=dtype).set_(memory))


def shape_of(func: Any, args: Any, options: Mapping[str, Any]) -> Any:
    """The result of an operator that writes to no operand, full of poison.

    Raises UnknownShapeError.
    """
    try:
        found = func(*tree_map(_as_zeros, args), **tree_map(_as_zeros, options))
    except Exception as error:  # zeros may be no operands for it, or its shapes may be wrong
        raise UnknownShapeError(str(func)) from error
    shared = {each.untyped_storage().data_ptr() for each in _zeros.values()}
    for each in tree_leaves(found):
        if isinstance(each, Tensor) and each.numel():
            if each.untyped_storage().data_ptr() in shared:
                raise UnknownShapeError(f"{func} returns its operand")
            poison(each)
    return found


def _as_zeros(value: Any) -> Any:
    """As a tensor, but of zeros that all tensors share."""
    if not isinstance(value, Tensor) or not value.numel():
        return value
    last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    zeros = _zeros.get(value.dtype)
    if zeros is None or len(zeros) <= last:
        with torch.inference_mode():
            zeros = _zeros[value.dtype] = torch.zeros(2 * last + 1, dtype=value.dtype)
    return zeros.as_strided(value.shape, value.stride())


def later(
    func: Any, args: Any, options: Mapping[str, Any], found: Any, where: str
) -> Callable[[], None]:
    """What computes an operator and puts its result into `found`; None: it writes to operands."""
    targets = [each for each in tree_leaves(found) if isinstance(each, Tensor)]

    def work() -> None:
        try:
            with torch.inference_mode(), torch._C._DisableTorchDispatch():
                result = func(*args, **options)
                made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
                for target, each in zip(targets, made if targets else (), strict=True):
                    if target.shape != each.shape:
                        raise UnknownShapeError(f"{tuple(each.shape)} not {tuple(target.shape)}")
                    target.copy_(each)
        except Exception as error:
            error.add_note(f"in {func} of {where}")
            raise

    return work
