"""Rotary position embeddings applied by one operator instead of ten, where that is the same.

transformers' attention classes call a function of their module's, `apply_rotary_pos_emb`. A class
whose function rotates the halves of a head against each other, which a trial in float64 tells, gets
a forward of its own: the same code, for which that name means the operator. Where a call is of
another shape than the operator takes, the function is called as before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from aioengine.kernels.cpu.library import instruction_set, is_available
from aioengine.kernels.cpu.rotary import rotate
from aioengine.models.fusion.swap import subclass, swap
from aioengine.models.fusion.trial import agree, random_rows

__all__ = ["fuse_rotary"]

Apply = Callable[..., tuple[Tensor, Tensor]]

_NAME = "apply_rotary_pos_emb"
_RENAMING = "transformers.utils.deprecation"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fuse_rotary(model: nn.Module) -> int:
    """Have attention layers of `model` rotate queries and keys on a CPU by the operator, in place.

    Returns how many do: 0 where the operators were not built.
    """
    if not is_available():
        return 0
    count = 0
    kinds: dict[type[nn.Module], type[nn.Module] | None] = {}
    for module in model.modules():
        if type(module) not in kinds:
            kinds[type(module)] = _with_operator(type(module))
        kind = kinds[type(module)]
        if kind is not None and "forward" not in vars(module):
            swap(module, kind)
            count += 1
    return count


def _with_operator(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class for whose forward the function's name means the operator."""
    forward = _undeprecated(kind.forward)
    # A decorated one is another function's code, and its globals are another module's.
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return None
    apply = forward.__globals__.get(_NAME)
    if _NAME not in forward.__code__.co_names or not isinstance(apply, FunctionType):
        return None
    if not _is_usual(apply):
        return None
    known = {**forward.__globals__, _NAME: _fused(apply)}
    made = FunctionType(
        forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return subclass(kind, made)


def _undeprecated(forward: Any) -> Any:
    """A forward without what renames old arguments, which decoder layers do not pass."""
    while getattr(forward, "__globals__", {}).get("__name__") == _RENAMING:
        forward = forward.__wrapped__
    return forward


def _fused(apply: Apply) -> Apply:
    dtypes = _DTYPES if instruction_set() != "generic" else _DTYPES[:2]

    @wraps(apply)
    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        if more or named or q.dtype not in dtypes or not _fits(q, k, cos, sin):
            return apply(q, k, cos, sin, *more, **named)
        query, key = rotate(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
        return query.transpose(0, 1)[None], key.transpose(0, 1)[None]

    return rotated


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether they are [1, heads, T, D] twice and [1, T, D] twice, of one dtype on the
    CPU."""
    if q.dim() != 4 or k.dim() != 4 or cos.shape != (1, *q.shape[2:]) or sin.shape != cos.shape:
        return False
    if q.shape[0] != 1 or k.shape[0] != 1 or k.shape[2:] != q.shape[2:] or q.shape[-1] % 2:
        return False
    given = (q, k, cos, sin)
    return all(x.dtype == q.dtype and x.is_cpu and x.stride(-1) == 1 for x in given)


def _is_usual(apply: Apply) -> bool:
    """Return whether it rotates the first half of each head against the second."""
    q, k = (random_rows(1, heads, 3, 16, dtype=torch.float64, seed=heads) for heads in (4, 2))
    cos, sin = random_rows(2, 1, 3, 16, dtype=torch.float64)

    def rotated() -> Tensor:
        halves = (x.chunk(2, -1) for x in (q, k))
        turned = (torch.cat((-second, first), -1) for first, second in halves)
        return torch.cat([x * cos + y * sin for x, y in zip((q, k), turned, strict=True)], 1)

    return agree(rotated, lambda: torch.cat(apply(q, k, cos, sin), 1))
