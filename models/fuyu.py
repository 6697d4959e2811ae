"""Fuyu: a Persimmon decoder that reads an image's patches themselves, row by row.

Bavishi et al., "Fuyu-8B: A Multimodal Architecture for AI Agents" (2023). There is no tower: a
patch becomes a row by one linear layer. The image stands before the text, each of its rows of
patches ended by a token of its own; between image and text stands `<s>`, and behind the text the
token that begins the answer. Without an image a text is what the tokenizer makes of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aioengine.errors import InvalidRequestError, MediaError, UnsupportedModalityError
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.processors.embeddings import EmbeddingItems
from aioengine.processors.hf.substitutes import merge_image_options
from aioengine.processors.info import ImageDummyInputsBuilder, OneImageInfo
from aioengine.processors.inputs import MultiModalFieldConfig, MultiModalKwargs
from aioengine.processors.items import ImageProcessorItems, ImageSize, MultiModalDataItems
from aioengine.processors.processor import BaseMultiModalProcessor, Layout
from aioengine.processors.prompt.updates import (
    PromptIndexTargets,
    PromptInsertion,
    PromptUpdate,
    PromptUpdateDetails,
    ResolvedUpdates,
)
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["Fuyu", "FuyuMultiModalProcessor", "FuyuProcessingInfo"]

_PATCH, _ROW_END, _TEXT_START, _ANSWER = "|SPEAKER|", "|NEWLINE|", "<s>", "<0x04>"


class FuyuProcessingInfo(OneImageInfo):
    """One image in a prompt, and how many patches it has."""

    def get_token_id(self, token: str) -> int:
        """Return the token id of one of the pieces around an image and a text."""
        return int(self.get_tokenizer().convert_tokens_to_ids(token))

    def get_image_options(self, mm_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The image processor's options for a request, as HF merges them; not its own settings.

        Raises InvalidRequestError for what HF does not take.
        """
        return merge_image_options(self.get_hf_processor(), mm_kwargs or {})

    def get_image_feature_grid_size(
        self, *, image_width: int, image_height: int, mm_kwargs: Mapping[str, Any] | None = None
    ) -> tuple[int, int]:
        """Columns and rows of patches, after an image larger than `size` is shrunk into it.

        Raises MediaError where nothing is left of it.
        """
        image_processor = self.get_image_processor()
        options = self.get_image_options(mm_kwargs)
        most_width, most_height = _width_and_height(options.get("size") or image_processor.size)
        is_larger = image_width > most_width or image_height > most_height
        if is_larger and options.get("do_resize", image_processor.do_resize):
            scale = min(most_height / image_height, most_width / image_width)
            image_width, image_height = int(image_width * scale), int(image_height * scale)
        if image_width < 1 or image_height < 1:
            raise MediaError(
                f"the image is too narrow: shrunk into {most_width} x {most_height} pixels, "
                "nothing is left of it",
                parameter="images",
            )
        side = self.get_patch_side()
        return math.ceil(image_width / side), math.ceil(image_height / side)

    def get_patch_side(self) -> int:
        """Edge of a patch, in pixels: what the model's one layer takes."""
        return int(self.get_hf_config().patch_size)

    def get_image_size_with_most_features(self) -> ImageSize:
        """Greatest size that the image processor leaves as it is."""
        return _width_and_height(self.get_image_processor().size)

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        """Placeholder tokens of an image: its patches, and an end for each row of them."""
        num_columns, num_rows = self.get_image_feature_grid_size(
            image_width=image_width, image_height=image_height
        )
        return (num_columns + 1) * num_rows


class FuyuMultiModalProcessor(BaseMultiModalProcessor):
    """An image's patches before the text; rows stand at patches only, not at the row ends."""

    info: FuyuProcessingInfo

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        # Of transformers 5.23's two image processors only the one with torchvision can cut patches,
        # so images are cut here; a text has no part in it.
        options = {**self.info.get_image_options(mm_kwargs), "return_tensors": None}
        outputs = self.info.get_image_processor()(mm_data["images"], **options)
        pixels = torch.as_tensor(outputs["images"][0][0])
        shape = (
            int(outputs["image_unpadded_heights"][0][0]),
            int(outputs["image_unpadded_widths"][0][0]),
        )
        return {"pixel_values": self._patches(pixels, *shape)[None]}

    def _patches(self, pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """The patches [n, side * side * 3] of `pixels` [3, H, W], as far as they have an image.

        Raises ValueError where that is less than whole patches.
        """
        side = self.info.get_patch_side()
        num_rows, num_columns = math.ceil(height / side), math.ceil(width / side)
        taken = pixels[:, : num_rows * side, : num_columns * side]
        cells = taken.reshape(len(pixels), num_rows, side, num_columns, side)
        return cells.permute(1, 3, 2, 4, 0).reshape(num_rows * num_columns, -1)

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {"pixel_values": MultiModalFieldConfig.batched("image")}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        patch, row_end, text_start = map(self.info.get_token_id, (_PATCH, _ROW_END, _TEXT_START))

        def get_insertion(item_idx: int) -> PromptUpdateDetails:
            images = mm_items["image"]
            if isinstance(images, EmbeddingItems):
                raise UnsupportedModalityError(
                    "the model takes no image embeddings: how its rows lie depends on the image",
                    parameter="images",
                )
            assert isinstance(images, ImageProcessorItems)
            width, height = images.get_image_size(item_idx)
            num_columns, num_rows = self.info.get_image_feature_grid_size(
                image_width=width, image_height=height, mm_kwargs=hf_processor_mm_kwargs
            )
            rows = ([patch] * num_columns + [row_end]) * num_rows
            return PromptUpdateDetails.select_token_id([*rows, text_start], patch, features=rows)

        return [
            PromptInsertion(
                modality="image", target=PromptIndexTargets.start(), insertion=get_insertion
            )
        ]

    def _expand(
        self,
        token_ids: list[int],
        text: str | None,
        updates: ResolvedUpdates,
        literals: Sequence[tuple[int, int]] = (),
    ) -> Layout:
        if not updates.num_items:
            return Layout(token_ids=token_ids, placeholders={})
        # The HF processor puts no BOS before a text that has an image, and so an image, whose
        # place is before everything, is in nobody's way: nothing in the text stands for it.
        start = self.tokenize("")[:1]
        plain = token_ids[len(start) :] if token_ids[: len(start)] == start else token_ids
        return super()._expand(plain, None, updates)

    def _apply_hf_processor_tokens_only(self, prompt_tokens: list[int]) -> list[int]:
        """Behind the text of an image the answer begins."""
        return [*prompt_tokens, self.info.get_token_id(_ANSWER)]


def _width_and_height(size: Any) -> ImageSize:
    """Read an option's value, or raise InvalidRequestError."""
    try:
        return ImageSize(width=int(size["width"]), height=int(size["height"]))
    except (KeyError, TypeError, ValueError):
        raise InvalidRequestError(
            "size in mm_processor_kwargs must have a height and a width",
            parameter="mm_processor_kwargs",
        ) from None


@MULTIMODAL_REGISTRY.register_processor(
    FuyuMultiModalProcessor, info=FuyuProcessingInfo, dummy_inputs=ImageDummyInputsBuilder
)
class Fuyu(TransformersModel):
    """The image comes before the text; beyond the processor's `size` it is shrunk into it."""
