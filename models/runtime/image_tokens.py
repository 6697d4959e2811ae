"""Processing of images that stand in a prompt as one token, repeated for each encoder row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aioengine.errors import ModelLoadError
from aioengine.processors.embeddings import repeat_token
from aioengine.processors.info import ImageDummyInputsBuilder, ImageInfo
from aioengine.processors.inputs import MultiModalFieldConfig, MultiModalKwargs
from aioengine.processors.items import ImageProcessorItems, MultiModalDataItems
from aioengine.processors.processor import BaseMultiModalProcessor
from aioengine.processors.prompt.updates import PromptReplacement, PromptUpdate

__all__ = ["ImageTokenDummyInputsBuilder", "ImageTokenProcessor"]


class ImageTokenDummyInputsBuilder(ImageDummyInputsBuilder):
    """White images of the most rows, beside a placeholder for each."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        image_token: str = self.info.get_hf_processor().image_token
        return image_token * mm_counts.get("image", 0)


class ImageTokenProcessor(BaseMultiModalProcessor):
    """The config's `image_token_id` becomes as many of itself as the image has rows."""

    info: ImageInfo

    @property
    def image_token_id(self) -> int:
        """Token that stands for one encoder row. Raises ModelLoadError where none is named."""
        token_id = getattr(self.info.get_hf_config(), "image_token_id", None)
        if not isinstance(token_id, int):
            raise ModelLoadError(
                f"config.json has image_token_id (or image_token_index) {token_id!r:.40}; name the "
                f"token that stands for an image's rows"
            )
        return token_id

    def repeat_image_token(
        self, mm_items: MultiModalDataItems, **options: Any
    ) -> Callable[[int], list[int]]:
        """The tokens of each image by its size; `options`: what its number of rows depends on."""

        def count(item_idx: int) -> int:
            size = mm_items.get_items("image", ImageProcessorItems).get_image_size(item_idx)
            return self.info.get_num_image_tokens(
                image_width=size.width, image_height=size.height, **options
            )

        return repeat_token(mm_items, "image", self.image_token_id, count)

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
        tokens, target = self.repeat_image_token(mm_items), [self.image_token_id]
        return [PromptReplacement(modality="image", target=target, replacement=tokens)]
