"""LLaVA 1.5 and its kin: a CLIP or SigLIP tower, a projector, and any decoder.

Liu et al., "Improved Baselines with Visual Instruction Tuning" (2023). Every image is resized and
cropped to the tower's square, so all images take the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioengine.errors import InvalidRequestError, ModelLoadError
from aioengine.models.generic import GenericModel
from aioengine.models.runtime.image_tokens import ImageTokenDummyInputsBuilder, ImageTokenProcessor
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.processors.info import ImageInfo, ProcessingContext
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["Llava", "LlavaMultiModalProcessor", "LlavaProcessingInfo"]

# Vision tower -> rows that it has beside one for each patch (CLIP's class token).
_EXTRA_ROWS = {"clip_vision_model": 1, "siglip_vision_model": 0}


class LlavaProcessingInfo(ImageInfo):
    """Sizes and token counts. Raises ModelLoadError for towers that are not built."""

    def __init__(self, ctx: ProcessingContext) -> None:
        super().__init__(ctx)
        tower = self.get_hf_config().vision_config.model_type
        if tower not in _EXTRA_ROWS:
            raise ModelLoadError(
                f"this architecture with a vision tower of type {tower!r} is not supported; "
                f"supported towers: {', '.join(sorted(_EXTRA_ROWS))}"
            )

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        """Encoder rows of one image; its size plays no part."""
        hf_config = self.get_hf_config()
        vision_config = hf_config.vision_config
        patches_per_side = vision_config.image_size // vision_config.patch_size
        num_rows = int(patches_per_side) ** 2 + _EXTRA_ROWS[vision_config.model_type]
        # "default" drops the first row, which is a patch where the tower has no class token.
        return num_rows - int(hf_config.vision_feature_select_strategy == "default")


class LlavaMultiModalProcessor(ImageTokenProcessor):
    """`<image>` becomes as many of itself as the image has rows."""

    info: LlavaProcessingInfo

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        outputs = super()._call_hf_processor(prompt, mm_data, mm_kwargs)
        width, height = self.info.get_image_size_with_most_features()
        for pixels in outputs["pixel_values"]:
            if tuple(pixels.shape[-2:]) != (height, width):
                # The tower has a position for each of its own patches, and no others.
                raise InvalidRequestError(
                    f"the processor makes images of {pixels.shape[-1]} x {pixels.shape[-2]} "
                    f"pixels, and the model takes {width} x {height} only; leave the sizes in "
                    "mm_processor_kwargs as they are",
                    parameter="mm_processor_kwargs",
                )
        return outputs

    def _preprocess_resizes_first(self, image_processor: Any, options: Mapping[str, Any]) -> bool:
        # LLaVA's own image processor differs from the stock one only in padding to a square first.
        own = type(image_processor).__name__ == "LlavaImageProcessorPil"
        return own and not options.get("do_pad", image_processor.do_pad)


@MULTIMODAL_REGISTRY.register_processor(
    LlavaMultiModalProcessor, info=LlavaProcessingInfo, dummy_inputs=ImageTokenDummyInputsBuilder
)
class Llava(GenericModel):
    """Images of one size. With a Pixtral tower, whose images keep theirs, the generic model."""

    @classmethod
    def chosen_for(cls, hf_config: Any) -> type[TransformersModel]:
        return GenericModel if hf_config.vision_config.model_type == "pixtral" else cls
