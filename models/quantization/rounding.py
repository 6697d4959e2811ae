"""Rounding of a decoder's weights to 4 or 8 bits, as it is loaded.

Linear layers and routed experts get what is asked for; embeddings and the output head, on which a
model's words depend most, 8 bits in either case.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from aioengine.errors import ModelLoadError
from aioengine.kernels.experts import can_pack_experts
from aioengine.kernels.grouped import GroupedWeight, round_weight
from aioengine.models.quantization.grouped_layers import (
    attach,
    expert_weights,
    grouped_of,
    known_groups,
    stand_in,
)

__all__ = ["Rounding", "round_weights"]

_TABLE_BITS = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """A width to round weights to; `has_full_inputs`: what they multiply is not rounded."""

    bits: int
    has_full_inputs: bool = False

    def of(self, weight: Tensor, bits: int) -> GroupedWeight:
        """A weight [out, in] in groups. Raises ModelLoadError where some of it is no number."""
        found = round_weight(weight, bits)
        if not found.is_finite:
            raise ModelLoadError(
                f"a weight of {list(weight.shape)} cannot be rounded to {bits} bits: some of its "
                "numbers are not finite. Fetch the checkpoint again, or leave quantization out"
            )
        return replace(found, has_full_inputs=self.has_full_inputs)


def round_weights(
    model: Any,
    decoder: nn.Module,
    layers: Iterable[nn.Linear],
    tables: Iterable[Sequence[nn.Module]],
    rounding: Rounding,
    *,
    keep: bool,
) -> None:
    """Round the weights of `decoder`, a part of transformers' `model`; mutates them.

    `layers`, `tables`: what passes will pack of the whole model, tables with all modules that have
    one weight. `keep`: the plain weights are what the rounded ones stand for, so that the modules
    compute with these; otherwise they are gone.
    """
    inside = {id(module) for module in decoder.modules()}
    head = model.get_output_embeddings()
    outer = (model.get_input_embeddings(), head)
    for layer in layers:
        if grouped_of(layer) is None and (id(layer) in inside or layer is head):  # or it is known
            bits = _TABLE_BITS if layer is head else rounding.bits
            _round([layer], rounding.of(layer.weight, bits), keep)
    for table in tables:
        if grouped_of(table[0]) is None and any(each in table for each in outer):
            assert isinstance(table[0].weight, Tensor)
            _round(table, rounding.of(table[0].weight, _TABLE_BITS), keep)
    for module in decoder.modules():
        experts = expert_weights(module)
        if not all(map(can_pack_experts, experts.values())):
            continue  # a layer is packed whole or not at all
        for name, weight in experts.items():
            if grouped_of(module, name) is None:
                _round_experts(module, name, weight, rounding, keep)
    _log_share(decoder)


def _log_share(decoder: nn.Module) -> None:
    """Say how many of a decoder's weights are in groups: layers of kinds unknown here are not."""
    known = total = 0
    for module in decoder.modules():
        own = {name: x for name, x in module._parameters.items() if x is not None and x.dim() > 1}
        total += sum(each.numel() for each in own.values())
        known += sum(own[name].numel() for name in known_groups(module) if name in own)
    level = logging.INFO if known * 2 > total else logging.WARNING
    logger.log(level, "%.0f %% of the decoder's weights are rounded", 100 * known / max(total, 1))


def _round(layers: Sequence[nn.Module], weight: GroupedWeight, keep: bool) -> None:
    plain = layers[0].weight
    assert isinstance(plain, Tensor)
    left = stand_in(plain)
    if keep:
        left = nn.Parameter(weight.floats().to(plain.dtype), requires_grad=False)
    for layer in layers:
        layer.weight = left
        attach(layer, weight)


def _round_experts(
    module: nn.Module, name: str, weight: Tensor, rounding: Rounding, keep: bool
) -> None:
    """Round experts' weights [E, out, in], one expert at a time."""
    found = GroupedWeight.joined([rounding.of(each, rounding.bits) for each in weight])
    plain = getattr(module, name)
    left = stand_in(plain)
    if keep:
        rounded = found.floats().to(plain.dtype).view(weight.shape)
        left = nn.Parameter(rounded.mT if module.is_transposed else rounded, requires_grad=False)
    setattr(module, name, left)
    attach(module, found, name)
