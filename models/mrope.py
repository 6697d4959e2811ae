"""Families whose positions have three axes: time, height and width (M-RoPE).

Wang et al., "Qwen2-VL" (2024). A prompt's positions depend on the grids of its images and videos,
and are computed once, by transformers' own `get_rope_index`; the text behind them counts on from
the largest. Qwen3-VL also gives rows to its decoder's first layers ("DeepStack", Meng et al.,
2024): they travel beside the first ones, as further columns of one wide row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from aioengine.errors import InvalidRequestError
from aioengine.models.generic import GenericModel
from aioengine.models.runtime.interfaces import PromptMedia
from aioengine.models.runtime.whole_pass import WholePrompt
from aioengine.processors.generic_info import GenericProcessingInfo
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["DeepStackInfo", "DeepStackModel", "MRopeModel"]


class MRopeModel(GenericModel):
    """Every token has a position in time, height and width: [3, L] for a prompt."""

    def positions(
        self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()
    ) -> tuple[Tensor, int]:
        """See the base class. Raises InvalidRequestError for rows that came without their grid."""
        length = len(token_ids)
        if not items:
            return torch.arange(length).expand(3, -1), 0
        self._check_apart(items)
        kinds = WholePrompt(token_ids=tuple(token_ids), items=tuple(items)).kinds()
        grids: dict[str, list[Tensor]] = {}
        for item in items:
            for name, values in self._grids_of(item).items():
                grids.setdefault(name, []).append(values)
        joined = {name: torch.cat(values) for name, values in grids.items()}
        ids = torch.tensor([list(token_ids)])
        positions, delta = self.model.model.get_rope_index(ids, kinds[None], **joined)
        return positions[:, 0], int(delta)

    def _check_apart(self, items: Sequence[PromptMedia]) -> None:
        for one, other in pairwise(items):
            # transformers tells two items apart by the token between them.
            if one.modality == other.modality and one.span.end == other.span.offset:
                raise InvalidRequestError(
                    f"two {one.modality}s stand side by side in the prompt; the model wants its "
                    "markers around each, as its chat template puts them",
                    parameter="prompt",
                )

    def _grids_of(self, item: PromptMedia) -> dict[str, Tensor]:
        name = f"{item.modality}_grid_thw"
        grid = item.features.get(name)
        if grid is None:
            raise InvalidRequestError(
                f"{item.modality} embeddings need {name}, their number of patches in time, height "
                f"and width: Embeddings(rows, {name}=[[t, h, w]])",
                parameter=f"{item.modality}s",
            )
        found = {name: grid.reshape(-1, 3).long()}
        seconds = item.features.get("second_per_grid_ts")
        if seconds is not None:
            found["second_per_grid_ts"] = seconds.reshape(-1)
        return found


class DeepStackInfo(GenericProcessingInfo):
    """Rows that are given are as wide as the encoder's."""

    def get_hidden_size(self) -> int:
        return _row_size(self.get_hf_config(), super().get_hidden_size())


@MULTIMODAL_REGISTRY.register_processor(info=DeepStackInfo)
class DeepStackModel(MRopeModel):
    """Encoder rows that reach the first layers too, not the embeddings alone.

    Rows of `hidden_size` for the embeddings, and as many again for each of the first layers.
    """

    @property
    def row_size(self) -> int:
        return _row_size(self.hf_config, self.hidden_size)

    def call_decoder(self, decoder: nn.Module, embeds: Tensor, positions: Tensor) -> Tensor:
        """Do as the base class; embeddings as wide as rows carry those of further layers."""
        width = self.hidden_size
        if embeds.shape[-1] == width:
            return super().call_decoder(decoder, embeds, positions)
        first, *deeper = torch.split(embeds, width, dim=-1)
        found = self.run_plan(decoder, first, positions, deeper)
        if found is not None:
            return found
        # With zeros where there are no rows, every position may be added to: nothing is indexed.
        everywhere = torch.ones(1, len(embeds), dtype=torch.bool, device=embeds.device)
        rows = {"visual_pos_masks": everywhere, "deepstack_visual_embeds": deeper}
        return self.run_decoder(decoder, first, positions, **rows)


def _row_size(hf_config: Any, hidden_size: int) -> int:
    return hidden_size * (1 + len(hf_config.vision_config.deepstack_visual_indexes))
