"""Encoders of text: every token of a prompt sees every other one, and nothing is generated.

A prompt is one block, computed whole in one step. Where the module tells two texts of a prompt
apart by a type of each token, types are a second row beside the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from typing import ClassVar

import torch
from torch import Tensor

from aioengine.errors import ModelLoadError
from aioengine.kernels.attention import AttentionArgs, split_by_sequence
from aioengine.kernels.dense import dense_attention
from aioengine.kernels.layer_slot import StepHolder, attach_slot
from aioengine.models.runtime.interfaces import PromptInputs, PromptMedia
from aioengine.models.runtime.probe import LayerSpec
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.models.text import TextModel

__all__ = ["EncoderModel", "with_second_text"]


@dataclass(frozen=True, slots=True, eq=False)
class WindowSlot:
    """Attention of a layer whose tokens see as many before them as behind, of one KV `group`.

    A prompt is in one step as a whole, so that no pages are written or read.
    """

    group: int
    holder: StepHolder

    def attend(self, query: Tensor, key: Tensor, value: Tensor, args: AttentionArgs) -> Tensor:
        """Compute each sequence by itself; see `Slot`."""
        step = self.holder.current
        assert step is not None and args.window is not None
        found = query.new_empty(*query.shape[:2], value.shape[-1])
        for first, stop in split_by_sequence(step.metadata[self.group]):
            q, k, v = (each[None, first:stop].transpose(1, 2) for each in (query, key, value))
            places = torch.arange(stop - first, device=query.device)
            is_near = (places[:, None] - places).abs() < args.window
            attended = dense_attention(q, k, v, is_near, scale=args.scale)
            found[first:stop] = attended[0].transpose(0, 1)
        return found


class EncoderModel(TextModel):
    """An encoder that gives hidden states, with or without the head of a classifier."""

    is_causal: ClassVar[bool] = False

    @cached_property
    def has_types(self) -> bool:
        """Return whether tokens have types."""
        takes = "token_type_ids" in signature(type(self.decoder()).forward).parameters
        return takes and int(getattr(self.text_config, "type_vocab_size", 0) or 0) > 1

    def layers(self) -> tuple[LayerSpec, ...]:
        """See the base class; these tokens see later ones. Raises ModelLoadError where a layer has
        more than a window."""
        found = TransformersModel.layers(self)
        if any(each.window is not None and (each.softcap or each.sinks) for each in found):
            raise ModelLoadError(
                f"{type(self.model).__name__} has layers with a window to both sides that cap "
                "scores or have sinks, which is not computed. Run this model with transformers"
            )
        return found

    def patch(self) -> None:
        """See the base class. Layers with a window have it to both sides."""
        super().patch()
        for index, spec in enumerate(self.specs):
            if spec.window is not None:
                slot = WindowSlot(self.layer_groups[index][0], self._holder)
                attach_slot(self.decoder().get_submodule(spec.name), slot)

    def positions(
        self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()
    ) -> tuple[Tensor, int] | None:
        """See the base class. With types, they are the second of two rows [2, L]."""
        found = super().positions(token_ids, items)
        if not self.has_types:
            return found
        length = len(token_ids)
        return torch.stack([torch.arange(length), torch.zeros(length, dtype=torch.int64)]), 0

    def blocks(self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()) -> Tensor:
        """See the base class."""
        return torch.zeros(len(token_ids), dtype=torch.int32)

    def position_arguments(self, positions: Tensor) -> dict[str, Tensor]:
        """See the base class."""
        if positions.dim() == 1:
            return super().position_arguments(positions)
        places, types = positions
        return {**super().position_arguments(places), "token_type_ids": types[None]}


def with_second_text(inputs: PromptInputs | None, start: int) -> PromptInputs | None:
    """Give the tokens from `start` on the type of a second text, where the model knows types; 0:
    there is none."""
    if not start or inputs is None or inputs.positions is None or inputs.positions[0].dim() == 1:
        return inputs
    rows, delta = inputs.positions
    rows = rows.clone()
    rows[1, start:] = 1
    return replace(inputs, positions=(rows, delta))
