"""Rounding of a decoder's weights to 4 or 8 bits, as it is loaded.

Linear layers get what is asked for; embeddings and the output head, on which a model's words depend
most, 8 bits in either case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from aioengine.kernels.grouped import GroupedWeight, round_weight
from aioengine.models.quantization.grouped_layers import attach, grouped_of, stand_in

__all__ = ["Rounding", "round_weights"]

_TABLE_BITS = 8


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """A width to round weights to; `has_full_inputs`: what they multiply is not rounded."""

    bits: int
    has_full_inputs: bool = False

    def of(self, layer: nn.Linear | nn.Embedding, bits: int) -> GroupedWeight:
        """A module's weight in groups."""
        found = round_weight(layer.weight, bits)
        return replace(found, has_full_inputs=self.has_full_inputs)


def round_weights(
    model: Any, decoder: nn.Module, layers: Iterable[nn.Linear], rounding: Rounding, *, keep: bool
) -> None:
    """Round the weights of `decoder`, a part of transformers' `model`; mutates them.

    `layers`: those of the model that passes will pack. `keep`: the plain weights are what the
    rounded ones stand for, so that the modules compute with these; otherwise they are gone.
    """
    inside = {id(module) for module in decoder.modules()}
    head = model.get_output_embeddings()
    for layer in layers:
        is_known = grouped_of(layer) is not None  # as the checkpoint has it
        if id(layer) in inside and layer is not head and not is_known:
            _round([layer], rounding.of(layer, rounding.bits), keep)
    for group in _tables(model):
        _round(group, rounding.of(group[0], _TABLE_BITS), keep)


def _tables(model: Any) -> list[list[nn.Linear | nn.Embedding]]:
    """Embeddings and the output head, those together that have one weight.

    None of a weight that others have too, in another role.
    """
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    kinds = (isinstance(tables[0], nn.Embedding), type(tables[1]) is nn.Linear)
    found: list[list[nn.Linear | nn.Embedding]] = []
    for table, is_kind in zip(tables, kinds, strict=True):
        is_known = is_kind and grouped_of(table) is not None
        if not is_kind or is_known or any(table in group for group in found):
            continue
        owners = [each for each in model.modules() if _has(each, table.weight)]
        if all(isinstance(each, nn.Embedding) or each is tables[1] for each in owners):
            found.append(owners)
    return found


def _has(module: nn.Module, weight: nn.Parameter) -> bool:
    return any(each is weight for each in module._parameters.values())


def _round(layers: Sequence[nn.Linear | nn.Embedding], weight: GroupedWeight, keep: bool) -> None:
    plain = layers[0].weight
    left = stand_in(plain)
    if keep:
        left = nn.Parameter(weight.floats().to(plain.dtype), requires_grad=False)
    for layer in layers:
        layer.weight = left
        attach(layer, weight)
