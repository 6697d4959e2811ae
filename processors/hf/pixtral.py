"""Pixtral's HF processor where torchvision is missing, which transformers' own imports.

An image becomes its rows of patches, each row ended by a token, the last one by another.
"""

from __future__ import annotations

from typing import Any

from transformers.processing_utils import ProcessorMixin

__all__ = ["PixtralProcessor"]


class PixtralProcessor(ProcessorMixin):  # type: ignore[misc]
    """The parts and settings of transformers' class of this name, and the same replacements."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: Any = None,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
        **_: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.patch_size = patch_size
        self.spatial_merge_size = spatial_merge_size
        self.image_token = image_token
        self.image_break_token = image_break_token
        self.image_end_token = image_end_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)

    @property
    def _side(self) -> int:
        """Edge of the square of pixels that becomes one token."""
        return self.patch_size * self.spatial_merge_size

    def _process_images(self, images: Any, **options: Any) -> Any:
        return super()._process_images(images, **{**options, "patch_size": self._side})

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        """Build what stands in a prompt for one image."""
        height, width = image_inputs["image_sizes"][image_idx]
        row = self.image_token * (int(width) // self._side)
        rows = [row] * (int(height) // self._side)
        return self.image_break_token.join(rows) + self.image_end_token
