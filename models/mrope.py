"""Families whose positions have three axes: time, height and width (M-RoPE).

Wang et al., "Qwen2-VL" (2024). A prompt's positions depend on the grids of its images and videos,
and are computed once, by transformers' own `get_rope_index`; the text behind them counts on from
the largest. Qwen3-VL also gives rows to its decoder's first layers ("DeepStack", Meng et al.,
2024): they travel beside the first ones, as further columns of one wide row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import pairwise, product
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from aioengine.errors import InvalidRequestError, ModelLoadError
from aioengine.kernels.transfer import to_device
from aioengine.models.generic import GenericModel
from aioengine.models.runtime.interfaces import MultiModalEmbeddings, PromptMedia
from aioengine.models.runtime.whole_pass import WholePrompt, run_whole
from aioengine.processors.generic import GenericMultiModalProcessor
from aioengine.processors.generic_info import GenericProcessingInfo
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = [
    "DeepStackInfo",
    "DeepStackModel",
    "MRopeModel",
    "ModalExpertsModel",
    "ModalExpertsProcessor",
    "row_size",
]

_Grids: TypeAlias = tuple[tuple[int, ...], ...]
"""Patches in time, height and width of each image."""
_NUM_KNOWN_GRIDS = 8
_EXPERTS = "moe_mm_token_type_ids"
"""The argument by which a decoder is told whose experts each token goes to."""
_MEDIA_IDS = tuple(
    f"{each}{part}_token_id" for each, part in product(("image", "video"), ("", "_start", "_end"))
)


class MRopeModel(GenericModel):
    """Every token has a position in time, height and width: [3, L] for a prompt."""

    def patch(self) -> None:
        """See the base class; where the encoder's embeddings want grids on the device, put them
        there."""
        super().patch()
        embeddings = getattr(self._encoder(), "embeddings", None)
        if isinstance(embeddings, nn.Module):
            embeddings.register_forward_pre_hook(_gather_arguments)

    def positions(
        self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()
    ) -> tuple[Tensor, int] | None:
        """See the base class. Raises InvalidRequestError for rows that came without their grid."""
        if not hasattr(self._inner, "get_rope_index"):
            return None
        length = len(token_ids)
        if not items:
            return torch.arange(length).expand(self._num_axes, -1), 0
        self._check_apart(items)
        kinds = WholePrompt(token_ids=tuple(token_ids), items=tuple(items)).kinds()
        grids: dict[str, list[Tensor]] = {}
        for item in items:
            for name, values in self._grids_of(item).items():
                grids.setdefault(name, []).append(values)
        joined = {name: torch.cat(values) for name, values in grids.items()}
        ids = torch.tensor([list(token_ids)])
        positions, delta = self._inner.get_rope_index(ids, kinds[None], **joined)
        return positions[:, 0], int(delta)

    def encoder_arguments(self, kwargs: Mapping[str, object]) -> dict[str, object]:
        """Grids, and what follows from them alone, by transformers' own functions on the host.

        The encoder would read them back from the device, some of them in every layer. One that
        does not merge patches itself asks for other things, and is given the grids alone.
        """
        if not hasattr(self._encoder(), "spatial_merge_size"):
            return {}
        for modality in ("image", "video"):
            name = f"{modality}_grid_thw"
            grid = kwargs.get(name)
            if isinstance(grid, Tensor):
                layout = self._layouts(tuple(map(tuple, grid.reshape(-1, 3).tolist())))
                return {name: grid, **{f"{modality}_{key}": each for key, each in layout.items()}}
        return {}

    @cached_property
    def _layouts(self) -> Callable[[_Grids], Mapping[str, Tensor]]:
        """`_layout_of` of this encoder, which knows the last grids: it is up to a hundred operators
        of PyTorch's, for each of which the interpreter's lock is given up."""
        made = partial(_layout_of, self._encoder(), self.device)
        return lru_cache(maxsize=_NUM_KNOWN_GRIDS)(made)

    @property
    def _num_axes(self) -> int:
        """Positions of a token; HunYuan VL counts images on a fourth axis."""
        rope = getattr(self.text_config, "rope_parameters", None) or {}
        return len(rope.get("mrope_section", ())) or 3

    @property
    def _inner(self) -> Any:
        """The module below the head; of a backbone itself."""
        return getattr(self.model, "model", self.model)

    def _encoder(self) -> nn.Module | None:
        # Some classes have it on the inner model only, some call it otherwise.
        owner = self.model if hasattr(self.model, "visual") else self._inner
        return getattr(owner, "visual", None)

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
        """Features of an item that `get_rope_index` asks for: grids, or crops' sizes in patches."""
        asked = inspect.signature(self._inner.get_rope_index).parameters
        name = f"{item.modality}_grid_thw"
        if name in asked and name not in item.features:
            raise InvalidRequestError(
                f"{item.modality} embeddings need {name}, their number of patches in time, height "
                f"and width: Embeddings(rows, {name}=[[t, h, w]])",
                parameter=f"{item.modality}s",
            )
        found = {each: item.features[each] for each in asked if each in item.features}
        if not found:
            raise InvalidRequestError(
                f"{item.modality} embeddings do not tell where their rows lie: give the "
                f"{item.modality} itself",
                parameter=f"{item.modality}s",
            )
        if name in found:
            found[name] = found[name].reshape(-1, 3).long()
        return found


class DeepStackInfo(GenericProcessingInfo):
    """Rows that are given are as wide as the encoder's."""

    def get_hidden_size(self) -> int:
        return row_size(self.get_hf_config(), super().get_hidden_size())


@MULTIMODAL_REGISTRY.register_processor(info=DeepStackInfo)
class DeepStackModel(MRopeModel):
    """Encoder rows that reach the first layers too, not the embeddings alone.

    Rows of `hidden_size` for the embeddings, and as many again for each of the first layers.
    """

    @property
    def row_size(self) -> int:
        return row_size(self.hf_config, self.hidden_size)

    def patch(self) -> None:
        """Do as the base class; further rows are added to every position."""
        super().patch()
        decoder: Any = self.decoder()
        decoder._deepstack_process = _add_everywhere

    def call_decoder(self, decoder: nn.Module, embeds: Tensor, positions: Tensor) -> Tensor:
        """Do as the base class; embeddings as wide as rows carry those of further layers."""
        width = self.hidden_size
        if embeds.shape[-1] == width:
            return super().call_decoder(decoder, embeds, positions)
        first, *deeper = torch.split(embeds, width, dim=-1)
        found = self.run_plan(decoder, first, positions, deeper)
        if found is not None:
            return found
        # With zeros where there are no rows, every position may be added to.
        everywhere = torch.ones(1, len(embeds), dtype=torch.bool, device=embeds.device)
        rows = {"visual_pos_masks": everywhere, "deepstack_visual_embeds": deeper}
        return self.run_decoder(decoder, first, positions, **rows)


class ModalExpertsProcessor(GenericMultiModalProcessor):
    """Processing as the HF processor has it, with the model's ids of media and their markers.

    Raises ModelLoadError where the HF processor has others.
    """

    known_by_token = frozenset((_EXPERTS,))

    def _check_against_hf(self, modality: str) -> None:
        super()._check_against_hf(modality)
        processor, config = self.info.get_hf_processor(), self.info.get_hf_config()
        for name in _MEDIA_IDS:
            if getattr(processor, name, None) != getattr(config, name, None):
                raise ModelLoadError(
                    f"{self.info.describe_processor()} has another {name} than config.json; "
                    "tokens would go to other experts"
                )


@MULTIMODAL_REGISTRY.register_processor(ModalExpertsProcessor)
class ModalExpertsModel(MRopeModel):
    """Experts for text, and others for tokens of media and their markers, which ids tell.

    A marker that the model itself generates goes to the experts of media, as in transformers'
    forward over the whole; its `generate` sends it to those of text.
    """

    def embed(
        self, input_ids: Tensor, rows: MultiModalEmbeddings | None, is_multimodal: Tensor | None
    ) -> Tensor:
        """Do as the base class; a further column is 1 where a token goes to experts of media."""
        embeds = super().embed(input_ids, rows, is_multimodal)
        others = torch.isin(input_ids, to_device(self._media_ids, input_ids.device))
        if is_multimodal is not None:
            others = others | is_multimodal.to(input_ids.device)
        return torch.cat([embeds, others[:, None].to(embeds.dtype)], dim=-1)

    def call_decoder(self, decoder: nn.Module, embeds: Tensor, positions: Tensor) -> Tensor:
        """Do as the base class; the probe's embeddings have no further column."""
        width = self.hidden_size
        if embeds.shape[-1] == width:
            return super().call_decoder(decoder, embeds, positions)
        kinds = {_EXPERTS: embeds[None, :, width].int()}
        return self.run_decoder(decoder, embeds[:, :width], positions, **kinds)

    def reference_logits(self, prompt: WholePrompt, rows: Sequence[int]) -> Tensor:
        """See the base class. transformers is told each token's experts."""
        others = torch.isin(torch.tensor(prompt.token_ids), self._media_ids) | (prompt.kinds() > 0)
        return run_whole(self.model, prompt, rows, **{_EXPERTS: others.long()[None]})

    @property
    def _media_ids(self) -> Tensor:
        """The ids of media and their markers."""
        found = (getattr(self.hf_config, name, None) for name in _MEDIA_IDS)
        return torch.tensor([each for each in found if each is not None])


def _add_everywhere(hidden: Tensor, _mask: Tensor, rows: Tensor) -> Tensor:
    """`hidden` [1, T, size] and `rows` [T, size]: transformers indexes by a mask, which a GPU's
    host waits for."""
    return hidden + rows.to(hidden.dtype)


def _gather_arguments(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A module's arguments, all on the first one's device."""
    return tuple(to_device(each, args[0].device) for each in args)


def _layout_of(encoder: Any, device: torch.device, grids: _Grids) -> Mapping[str, Tensor]:
    """Keyword arguments that spare the encoder of images or videos the reading of their grids.

    The ends of sequences stay on the host, as attention is called once for each; what tensors on
    `device` are indexed by or added to goes there.
    """
    grid, merge = torch.tensor(grids), encoder.spatial_merge_size
    ends = {"cu_seqlens": get_vision_cu_seqlens(grid)}
    used = {"position_ids": get_vision_position_ids(grid, merge)}
    if hasattr(encoder, "window_size"):
        sizes = merge, encoder.window_size, encoder.patch_size
        used["window_index"], ends["cu_window_seqlens"] = get_vision_window_index(grid, *sizes)
    if hasattr(encoder, "interpolation_mode"):
        used["interp_indices"], used["interp_weights"] = (
            get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=encoder.num_grid_per_side,
                mode=encoder.interpolation_mode,
                align_corners=encoder.interpolation_align_corners,
                spatial_merge_size=merge,
            )
        )
    return {**ends, **{name: to_device(each, device) for name, each in used.items()}}


def row_size(hf_config: Any, hidden_size: int) -> int:
    """Width of encoder rows that carry those of the first layers."""
    return hidden_size * (1 + len(hf_config.vision_config.deepstack_visual_indexes))
