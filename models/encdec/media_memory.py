"""Causal decoders whose cross-attention reads a prompt's media, in layers of their own.

An image is one token of the text, and no row of it stands among the embeddings. Which images a
token sees is a mask by token, made of the prompt's own tokens: here every token sees a run of rows,
and what follows the prompt sees what its last token does. The rows of all images of a prompt are
one entry of the encoder cache, and their keys and values lie in blocks of cross-attention, as those
of an encoder-decoder do (`base`); a prompt without images has neither. What is cached of the text
goes by the images too: some models show the tokens before an image something of it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from aioengine.errors import UnsupportedModalityError
from aioengine.kernels.attention import AttentionBackend
from aioengine.kernels.metadata import SeenRows
from aioengine.models.runtime import encoding
from aioengine.models.runtime.interfaces import PromptInputs, PromptMedia, PromptMemory
from aioengine.models.runtime.probe import NUM_PROBE_ROWS, LayerSpecs, probe_layers
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.processors.generic import GenericMultiModalProcessor
from aioengine.processors.generic_info import GenericDummyInputsBuilder, GenericProcessingInfo
from aioengine.processors.info import BaseProcessingInfo
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = [
    "MediaMemoryInfo",
    "MediaMemoryModel",
    "MediaMemoryProcessor",
    "SetAside",
    "lay_out_memory",
    "no_embeddings",
]

_USUAL_COUNT = 4
"""Images that a prompt may have where nothing is said: there must be blocks for all of them."""


class SetAside(BaseProcessingInfo):
    """A limit for the images of a prompt, `limit_mm_per_prompt` or a few: memory for them is set
    aside."""

    def get_allowed_mm_limits(self) -> dict[str, int | None]:
        allowed = super().get_allowed_mm_limits()
        return {name: _USUAL_COUNT if most is None else most for name, most in allowed.items()}


class MediaMemoryInfo(SetAside, GenericProcessingInfo):
    """An HF processor that says what an image's placeholder becomes: one token."""


class MediaMemoryProcessor(GenericMultiModalProcessor):
    """A placeholder is one token, and stays it."""

    info: MediaMemoryInfo

    def write(self, text: str) -> str:
        """The text as the HF processor lays it out, which may look at where images are."""
        _, (written,), *_ = self.info.get_hf_processor().prepare_inputs_layout(
            images=None, text=[text]
        )
        return str(written)

    def _text_around_rows(self, modality: str, num_rows: int) -> str:
        raise no_embeddings(modality)


def no_embeddings(modality: str) -> UnsupportedModalityError:
    """The refusal of rows that were computed elsewhere."""
    return UnsupportedModalityError(
        f"the model takes no {modality} embeddings: what each token reads of a prompt's media is "
        f"laid out with their encoder's rows; give the {modality} itself",
        parameter=f"{modality}s",
    )


@MULTIMODAL_REGISTRY.register_processor(
    MediaMemoryProcessor, info=MediaMemoryInfo, dummy_inputs=GenericDummyInputsBuilder
)
class MediaMemoryModel(TransformersModel):
    """Cross-attention over rows of media. A subclass says how its module is given these."""

    _block_size = 1
    feature_names: ClassVar[tuple[str, ...]]
    """Names under which the HF processor gives what the encoder takes of an image."""
    blind_see_all: ClassVar[bool] = False
    """Whether tokens to which the model's mask shows nothing attend to all there is."""

    @property
    @abstractmethod
    def piece_rows(self) -> int:
        """Rows of a piece of an image, which tokens see whole."""

    @property
    @abstractmethod
    def pieces_per_item(self) -> int:
        """Pieces of an image."""

    @abstractmethod
    def media_mask(self, token_ids: Sequence[int], items: Sequence[PromptMedia]) -> Tensor:
        """Compute what each token is shown, bool [L, pieces of all items]."""

    @abstractmethod
    def encode_media(self, **features: Tensor) -> Tensor:
        """Rows [..., rows, row_size] of an item, by its `feature_names`."""

    @abstractmethod
    def memory_arguments(self, memory: Tensor, sighted: Tensor) -> dict[str, Any]:
        """Build the decoder's arguments for the step's rows `memory` [R, row_size], and for the
        tokens that are shown something, `sighted` bool [T]."""

    def layers(self) -> LayerSpecs:
        return probe_layers(self.decoder(), self.call_decoder, self.hidden_size, takes_mask=True)

    def most_memory_rows(self, num_items: int, block_size: int) -> int:
        """Rows that the memory of so many items may take; see `lay_out_memory`."""
        rows = self.piece_rows * self.pieces_per_item
        per_item = rows + block_size
        if num_items == 1:
            return rows
        return num_items * per_item * (2 if self.blind_see_all else 1)

    def bind(self, caches: Sequence[tuple[Tensor, Tensor]], backend: AttentionBackend) -> None:
        super().bind(caches, backend)
        self._block_size = caches[0][0].shape[1]

    def prompt_inputs(
        self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()
    ) -> PromptInputs | None:
        if not items:
            return None
        mask = self.media_mask(token_ids, items)
        return PromptInputs(
            memory=lay_out_memory(
                mask, self.piece_rows, self._block_size, blind_see_all=self.blind_see_all
            )
        )

    def encode(self, modality: str, items: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """The memory [R, row_size] of each prompt: `media`, its items' features, and `index`, which
        of their rows it has; or all rows of an item by itself."""
        found = []
        for item in items:
            parts = item.get("media", [item])
            rows = torch.cat([self._encode_item(part) for part in parts])
            index = item.get("index")
            found.append(rows if index is None else rows[self._place(index)])
        return found

    def _encode_item(self, item: Mapping[str, Any]) -> Tensor:
        features = {name: self._place(item[name]) for name in self.feature_names}
        return self.encode_media(**features).flatten(0, -2)

    def _place(self, value: Tensor) -> Any:
        return encoding.place(value, self.dtype, self.device)

    def memory(self, items: Sequence[Tensor]) -> Tensor:
        """The rows of `items` one after the other: [R, row_size], or one of zeros."""
        if items:
            return torch.cat(list(items))
        return torch.zeros(1, self.row_size, dtype=self.dtype, device=self.device)

    def call_decoder(self, decoder: nn.Module, embeds: Tensor, positions: Tensor) -> Tensor:
        """Do as the base class, with the step's memory; the probe has one of `NUM_PROBE_ROWS`."""
        step = self._holder.current
        memory = embeds.new_zeros(NUM_PROBE_ROWS, self.row_size) if step is None else step.memory
        assert memory is not None
        sighted = None if step is None else step.metadata[-1].sighted
        if sighted is None:
            sighted = torch.ones(len(embeds), dtype=torch.bool, device=embeds.device)
        return self.run_decoder(
            decoder, embeds, positions, **self.memory_arguments(memory, sighted)
        )


def lay_out_memory(
    mask: Tensor, piece_rows: int, block_size: int, *, blind_see_all: bool
) -> PromptMemory:
    """Lay out the rows that a prompt's tokens see, so that each sees a run that begins a block.

    `mask` bool [L, pieces]: the pieces that each token is shown, of `piece_rows` rows each. Pieces
    that belong to two runs, neither of which begins the other, are there twice; those that nobody
    sees are left out. `blind_see_all`: tokens that are shown nothing see all pieces.
    """
    # What some token is shown comes first, so that it begins the run of those that see all.
    order = sorted(range(mask.shape[1]), key=(~mask.any(0)).tolist().__getitem__)
    runs: list[tuple[int, bool, tuple[int, ...]]] = []
    rows, counts = torch.unique_consecutive(mask, dim=0, return_counts=True)
    for row, end in zip(rows.tolist(), counts.cumsum(0).tolist(), strict=True):
        is_sighted = any(row)
        sees_all = blind_see_all and not is_sighted
        runs.append((end, is_sighted, tuple(each for each in order if row[each] or sees_all)))
    places: dict[tuple[int, ...], int] = {}
    kept: list[tuple[int, tuple[int, ...]]] = []
    for pieces in sorted({pieces for *_, pieces in runs}, key=lambda each: (-len(each), each)):
        places[pieces] = _place(kept, pieces, piece_rows, block_size)
    num_rows = max((first + len(pieces) * piece_rows for first, pieces in kept), default=0)
    index = torch.zeros(num_rows, dtype=torch.int64)
    for first, pieces in kept:
        placed = torch.tensor(pieces)[:, None] * piece_rows + torch.arange(piece_rows)
        index[first : first + placed.numel()] = placed.flatten()
    seen = (
        (end, SeenRows(0, places[pieces], len(pieces) * piece_rows, is_sighted))
        for end, is_sighted, pieces in runs
    )
    return PromptMemory(index, tuple(seen))


def _place(
    kept: list[tuple[int, tuple[int, ...]]],
    pieces: tuple[int, ...],
    piece_rows: int,
    block_size: int,
) -> int:
    """Find where a run of pieces begins, in rows: among those of `kept`, or put behind these."""
    if not pieces:
        return 0
    end = 0
    for first, others in kept:
        for skipped in range(len(others) - len(pieces) + 1):
            place = first + skipped * piece_rows
            if place % block_size == 0 and others[skipped : skipped + len(pieces)] == pieces:
                return place
        end = first + len(others) * piece_rows
    place = end + -end % block_size
    kept.append((place, pieces))
    return place
