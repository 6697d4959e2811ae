"""Rotary position embeddings applied by one operator instead of ten, where that is the same.

transformers' attention classes call a function of their module's, `apply_rotary_pos_emb` mostly. A
class whose function rotates the halves of a head against each other, wherever these lie, which a
trial in float64 tells, gets a forward of its own: the same code, for which that name means the
operator. Where a call is of another shape than the operator takes, the function is called as
before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aioengine.kernels.cpu.library import instruction_set, is_available
from aioengine.kernels.cpu.rotary import rotate
from aioengine.kernels.layer_plan import Angles
from aioengine.models.fusion.swap import subclass, swap
from aioengine.models.fusion.trial import agree, random_rows

__all__ = ["fuse_rotary", "make_angles_by"]

Apply = Callable[..., tuple[Tensor, Tensor]]
MakeAngles = Callable[[Tensor, Tensor], Sequence[Angles]]
"""Embeddings [T, hidden] and positions [T] or [3, T] -> a step's angles of each kind."""

_NAMES = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")
_RENAMING = "transformers.utils.deprecation"


class _Form(NamedTuple):
    """The order of what a function rotates, and the width of its angles.

    `in_pairs`: see `rotate`. `given`, `read`: how wide angles come and how much of that is read,
    in halves of a head.
    """

    in_pairs: bool
    given: int
    read: int


_FORMS = (_Form(False, 2, 2), _Form(False, 1, 1), _Form(True, 2, 1))
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
    known = {}
    for name in _NAMES:
        apply = forward.__globals__.get(name)
        if name in forward.__code__.co_names and isinstance(apply, FunctionType):
            form = next((each for each in _FORMS if _is_of(apply, each)), None)
            known.update({} if form is None else {name: _fused(apply, form)})
    if not known:
        return None
    made = FunctionType(
        forward.__code__,
        {**forward.__globals__, **known},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return subclass(kind, made)


AnglesOf = Callable[[Tensor, Tensor, float, torch.dtype, Tensor | None], Angles]
"""Angles of positions [T] or [A, T], by frequencies [D / 2], times a number, in a dtype; and by
which of the axes each frequency turns, int64 [D / 2], where positions have some."""
_SOME_POSITIONS = (0, 1, 2, 7, 40, 333, 4001, 31_999)


class _Kind(NamedTuple):
    """Frequencies of angles. `axes`: see `AnglesOf`; None where positions have none."""

    frequencies: Tensor
    scaling: float
    axes: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _FastAngles:
    """Angles by an operator; of positions on other than `num_axes` axes as the module makes
    them."""

    angles_of: AnglesOf
    kinds: Sequence[_Kind]
    num_axes: int | None
    slow: MakeAngles

    def __call__(self, embeds: Tensor, positions: Tensor) -> Sequence[Angles]:
        has_axes = positions.dim() == 2
        if has_axes and len(positions) != self.num_axes:
            return self.slow(embeds, positions)
        found = []
        for frequencies, scaling, axes in self.kinds:
            own = axes if has_axes else None
            found.append(self.angles_of(positions, frequencies, scaling, embeds.dtype, own))
        return found


def make_angles_by(
    angles_of: AnglesOf | None,
    module: nn.Module | None,
    slow: MakeAngles,
    like: Tensor,
    num_axes: int | None = None,
) -> MakeAngles:
    """Find what makes a decoder's angles by an operator, where these are the ones of its rotary
    `module`, whose frequencies are its buffers; else `slow`.

    `like`: of the embeddings' dtype. `num_axes`: that positions may have.
    """
    if angles_of is None or module is None or not hasattr(module, "rope_type"):
        return slow
    if like.dtype not in _DTYPES:
        return slow
    buffers = dict(module.named_buffers())
    known = {name: each for name, each in buffers.items() if name.endswith("inv_freq")}
    kinds = [
        _Kind(each.float().contiguous(), float(getattr(module, _scaling_of(name), 1.0)))
        for name, each in known.items()
        if each.dim() == 1
    ]
    positions = torch.tensor(_SOME_POSITIONS, device=like.device)
    chosen = []
    for expected in slow(like.new_zeros(len(positions), 1), positions):
        fits = (kind for kind in kinds if _makes(angles_of, kind, positions, expected))
        chosen.append(next(fits, None))
    found = [kind for kind in chosen if kind is not None]
    if len(found) != len(chosen):
        return slow
    of_axes = None if num_axes is None else _on_axes(angles_of, found, slow, like, num_axes)
    if of_axes is None:
        return _FastAngles(angles_of, found, None, slow)
    return _FastAngles(angles_of, of_axes, num_axes, slow)


def _on_axes(
    angles_of: AnglesOf, kinds: Sequence[_Kind], slow: MakeAngles, like: Tensor, num_axes: int
) -> list[_Kind] | None:
    """The kinds with the axes that their frequencies turn by; None where one turns by several."""
    first = torch.tensor(_SOME_POSITIONS, device=like.device)
    embeds = like.new_zeros(len(first), 1)
    alone = first * torch.eye(num_axes, dtype=first.dtype, device=like.device)[..., None]
    several = torch.stack([first.roll(axis) + axis for axis in range(num_axes)])
    # A position of 0 turns nothing, so what is turned has its position on the other axis.
    turned = [[sin != 0 for _, sin in slow(embeds, each)] for each in alone]
    found = []
    for kind, parts, expected in zip(
        kinds, zip(*turned, strict=True), slow(embeds, several), strict=True
    ):
        by_axis = torch.stack(parts)[..., : len(kind.frequencies)].any(1)
        own = kind._replace(axes=by_axis.int().argmax(0))
        if not _makes(angles_of, own, several, expected):
            return None
        found.append(own)
    return found


def _makes(angles_of: AnglesOf, kind: _Kind, positions: Tensor, expected: Angles) -> bool:
    """Return whether angles of `positions` by the operator are the `expected` ones."""
    dtype = expected[0].dtype

    def made() -> Tensor:
        return torch.stack(angles_of(positions, kind.frequencies, kind.scaling, dtype, kind.axes))

    return agree(made, torch.stack(expected).clone)


def _scaling_of(name: str) -> str:
    """The attribute with what the angles by a buffer are multiplied with."""
    return name.removesuffix("inv_freq") + "attention_scaling"


def _undeprecated(forward: Any) -> Any:
    """A forward without what renames old arguments, which decoder layers do not pass."""
    while getattr(forward, "__globals__", {}).get("__name__") == _RENAMING:
        forward = forward.__wrapped__
    return forward


def _fused(apply: Apply, form: _Form) -> Apply:
    """The function by the operator."""
    dtypes = _DTYPES if instruction_set() != "generic" else _DTYPES[:2]

    @wraps(apply)
    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        angles = [cos, sin]
        if form.read < form.given:
            angles = [x[..., : x.shape[-1] * form.read // form.given] for x in angles]
        if more or named or q.dtype not in dtypes or not _fits(q, k, angles, form.read):
            return apply(q, k, cos, sin, *more, **named)
        heads = q[0].transpose(0, 1), k[0].transpose(0, 1)
        query, key = rotate(*heads, *(x[0] for x in angles), in_pairs=form.in_pairs)
        return query.transpose(0, 1)[None], key.transpose(0, 1)[None]

    return rotated


def _fits(q: Tensor, k: Tensor, angles: Sequence[Tensor], num_halves: int) -> bool:
    """Return whether they are [1, heads, T, D] twice and [1, T, D] or half as wide twice, of one
    dtype on the CPU."""
    cos, sin = angles
    if q.dim() != 4 or k.dim() != 4 or cos.shape[:-1] != (1, q.shape[2]) or sin.shape != cos.shape:
        return False
    # What reads angles of a whole head rotates a part of it by fewer, as Phi-3 does.
    if q.shape[-1] not in (cos.shape[-1], 2 * cos.shape[-1] // num_halves):
        return False
    if q.shape[0] != 1 or k.shape[0] != 1 or k.shape[2:] != q.shape[2:] or q.shape[-1] % 2:
        return False
    given = (q, k, cos, sin)
    return all(x.dtype == q.dtype and x.is_cpu and x.stride(-1) == 1 for x in given)


def _is_of(apply: Apply, form: _Form) -> bool:
    """Return whether a function rotates heads so, by angles of any numbers."""
    q, k = (random_rows(1, heads, 3, 16, dtype=torch.float64, seed=heads) for heads in (4, 2))
    given = random_rows(2, 1, 3, 8 * form.given, dtype=torch.float64)
    cos, sin = given[..., : 8 * form.read].repeat(1, 1, 1, 2 // form.read)

    def rotated() -> Tensor:
        found = []
        for x in (q, k):
            halves = (x[..., ::2], x[..., 1::2]) if form.in_pairs else x.chunk(2, -1)
            turned = torch.cat((-halves[1], halves[0]), -1)
            found.append(torch.cat(halves, -1) * cos + turned * sin)
        return torch.cat(found, 1)

    return agree(rotated, lambda: torch.cat(apply(q, k, *given), 1))
