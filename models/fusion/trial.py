"""Trials of a fused form against the plain one, on the same random rows.

Every pass decides by them what is right. A plain module that does not take what it is given, or
gives something else than a tensor, has failed its trial and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from aioengine.kernels.attention import AttentionArgs
from aioengine.kernels.layer_slot import attach_slot, slot_of

__all__ = ["ROUNDINGS", "StandIn", "agree", "is_near", "largest_error", "random_rows", "stand_ins"]

ROUNDINGS = 8
"""Units in the last place of the largest output that two ways of computing may be apart."""


def random_rows(
    *shape: int, dtype: torch.dtype = torch.float32, like: Tensor | None = None, seed: int = 0
) -> Tensor:
    """Normal numbers [*shape], the same for a `seed`; inputs of one trial want one each.

    `like`: what they have the dtype and the device of.
    """
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return rows.to(dtype) if like is None else rows.to(like.device, like.dtype)


def agree(
    found: Callable[[], Tensor], wanted: Callable[[], Tensor], *, roundings: float = ROUNDINGS
) -> bool:
    """Return whether both give one shape, and numbers that are `roundings` apart at most.

    The units are those of what is `found`; 0 asks for the same numbers.
    """
    try:
        ours, theirs = found(), wanted()
        size = float(theirs.abs().masked_fill(theirs.isinf(), 0).max())
        bound = roundings * torch.finfo(ours.dtype).eps * size
        return ours.shape == theirs.shape and largest_error(ours, theirs) <= bound
    except Exception:
        return False  # it wants other arguments, or is of another kind


def is_near(found: Tensor, wanted: Tensor) -> bool:
    """Return whether the difference is what rounding makes in the layers of a whole model, or less:
    a twentieth in 16 bits, a ten thousandth where the numbers are wider."""
    near = min(0.05, 1000 * max(torch.finfo(wanted.dtype).eps, 1e-7))
    return bool((found.double() - wanted.double()).norm() <= near * wanted.double().norm())


def largest_error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, in float64; infinities of one sign are none."""
    difference = (found.double() - wanted.double()).masked_fill(found == wanted, 0)
    return float(difference.abs().max())


class StandIn:
    """Attention for a trial: of every row all of its query, key and value, and no other row.

    Queries are multiplied by the scale, which a module may also do itself.

    `args`: what it was called with last.
    """

    args = AttentionArgs(scale=1.0)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        """See `Slot.attend`."""
        self.args = args
        group = query.shape[1] // key.shape[1]
        seen = key * 2 + value * 4
        return query * args.scale + seen.repeat_interleave(group, dim=1)


@contextmanager
def stand_ins(root: nn.Module) -> Iterator[None]:
    """Meanwhile, a `StandIn` each takes the attention calls of the modules in `root`."""
    slots = {module: slot for module in root.modules() if (slot := slot_of(module)) is not None}
    for module in slots:
        attach_slot(module, StandIn())
    try:
        yield
    finally:
        for module, slot in slots.items():
            attach_slot(module, slot)
