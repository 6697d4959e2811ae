"""Families that transformers' classes carry without anything of their own here.

Their HF processor says what each item becomes in the text, and their model has `get_image_features`
(or the same for videos or audio) with rows for exactly these places. Some rows are more than the
embeddings of placeholders: those that are added before chosen layers of the decoder (Granite 4
Vision: features of several layers of the vision tower, each for a layer of the decoder), and
markers around and between rows that have embeddings of their own (Ovis2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aioengine.errors import InvalidRequestError, UnsupportedModalityError
from aioengine.models.runtime.interfaces import PromptMedia
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.processors.generic import GenericMultiModalProcessor
from aioengine.processors.generic_info import (
    CONTRACTS,
    GenericDummyInputsBuilder,
    GenericProcessingInfo,
)
from aioengine.processors.prompt.updates import PromptUpdateDetails
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = [
    "GenericModel",
    "LayerRowsInfo",
    "LayerRowsModel",
    "MarkedInfo",
    "MarkedModel",
    "MarkedProcessor",
]

_TOWERS = ("clip_vision_model", "siglip_vision_model")
"""Whose layers give hidden states and nothing else."""


@MULTIMODAL_REGISTRY.register_processor(
    GenericMultiModalProcessor, info=GenericProcessingInfo, dummy_inputs=GenericDummyInputsBuilder
)
class GenericModel(TransformersModel):
    """transformers' module as it is, but for layers of a vision tower that nobody reads."""

    def unread_layers(self) -> Sequence[nn.Module]:
        """Layers after the last one whose hidden states are features (`vision_feature_layer`)."""
        config = self.hf_config
        chosen = getattr(config, "vision_feature_layer", None)
        tower = getattr(self.model.model, "vision_tower", None)
        if chosen is None or tower is None or config.vision_config.model_type not in _TOWERS:
            return ()
        layers = next(each for each in tower.modules() if isinstance(each, nn.ModuleList))
        # Hidden state 0 is what goes into the first layer.
        states = len(layers) + 1
        used = max(each % states for each in ([chosen] if isinstance(chosen, int) else chosen))
        return [*layers][used:]


class LayerRowsInfo(GenericProcessingInfo):
    """Rows that are given are as wide as the encoder's."""

    def get_hidden_size(self) -> int:
        return super().get_hidden_size() * (1 + len(_row_layers(self.get_hf_config())))


@MULTIMODAL_REGISTRY.register_processor(info=LayerRowsInfo)
class LayerRowsModel(GenericModel):
    """Rows of `hidden_size` for the embeddings, which are zeros, and as many again for each chosen
    layer: they travel as further columns of one wide row."""

    @property
    def row_size(self) -> int:
        return self.hidden_size * (1 + len(_row_layers(self.hf_config)))

    def unread_layers(self) -> Sequence[nn.Module]:
        """No layer: `vision_feature_layer` is not what is read here."""
        return ()

    def call_decoder(self, decoder: nn.Module, embeds: Tensor, positions: Tensor) -> Tensor:
        """Do as the base class; embeddings as wide as rows carry those of chosen layers."""
        width = self.hidden_size
        if embeds.shape[-1] == width:
            return super().call_decoder(decoder, embeds, positions)
        first, *deeper = torch.split(embeds, width, dim=-1)
        layers: Any = decoder.layers
        with ExitStack() as hooks:
            for index, rows in zip(_row_layers(self.hf_config), deeper, strict=True):
                # With zeros where there are no rows, every position may be added to.
                add = partial(_add, rows[None])
                hooks.enter_context(layers[index].register_forward_pre_hook(add))
            return self.run_decoder(decoder, first, positions)


def _add(rows: Tensor, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, *others = args
    return hidden + rows, *others


def _row_layers(hf_config: Any) -> list[int]:
    """The decoder's layers that are given rows, in the order of the rows' columns."""
    chosen = [layer for _, layer in hf_config.deepstack_layer_map]
    return sorted({*chosen, *hf_config.spatial_target_layers})


class MarkedInfo(GenericProcessingInfo):
    """Every token of a replacement takes a row."""

    def count_rows(self, modality: str, token_ids: Sequence[int]) -> int:
        return len(token_ids)


class MarkedProcessor(GenericMultiModalProcessor):
    """Each placeholder becomes an item's markers and rows, all of which are the item's."""

    info: MarkedInfo

    def _details(self, modality: str, full: str | list[int], ids: list[int]) -> PromptUpdateDetails:
        return PromptUpdateDetails(full=full, features=ids)

    def _text_around_rows(self, modality: str, num_rows: int) -> str:
        raise UnsupportedModalityError(
            f"the model takes no {modality} embeddings: its markers between rows have some of "
            "their own",
            parameter=f"{modality}s",
        )


@MULTIMODAL_REGISTRY.register_processor(MarkedProcessor, info=MarkedInfo)
class MarkedModel(GenericModel):
    """Markers have the last rows of a table of visual embeddings, and not those of their ids.

    They are rows of the item's, so that its key stands for them in caches too. Elsewhere in a
    prompt they would have these embeddings where it has an image, and others where it has none.
    """

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """See the base class. Raises ValueError where rows and their places are not as many."""
        name = next(each.ids_name for each in CONTRACTS if each.modality == modality)
        found = super().encode(modality, items)
        return [self._mark(item[name], rows) for item, rows in zip(items, found, strict=True)]

    def positions(
        self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()
    ) -> tuple[Tensor, int] | None:
        """See the base class. Raises InvalidRequestError for markers outside of items."""
        inside = {i for item in items for i in range(item.span.offset, item.span.end)}
        marks = set(self._markers) if items else set()
        if any(each in marks and i not in inside for i, each in enumerate(token_ids)):
            raise InvalidRequestError(
                "a marker of images stands in the prompt outside of them; leave it to the image's "
                "placeholder, or send a prompt without images",
                parameter="prompt",
            )
        return None

    @property
    def _markers(self) -> Sequence[int]:
        """The ids of markers, in the order of their embeddings."""
        found: Sequence[int] = self.hf_config.visual_indicator_token_ids
        return found

    def _mark(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        """Put `rows` and the markers' embeddings at `token_ids` [L], which came with the item."""
        of = {marker: index for index, marker in enumerate(self._markers)}
        table = self.model.model.visual_embeddings_table.weight[-len(of) :]
        ids = token_ids.tolist()
        if sum(each not in of for each in ids) != len(rows):
            raise ValueError(f"{len(rows)} rows for a replacement of {len(ids)} tokens")
        rest = iter(range(len(of), len(of) + len(rows)))
        places = [of[each] if each in of else next(rest) for each in ids]
        return torch.cat([table.to(rows), rows])[torch.tensor(places, device=rows.device)]
