"""Molmo 2: Molmo's successor, in which all tokens of all images see each other both ways.

Allen Institute for AI, "Molmo2: Open Weights and Data for Vision-Language Models with Video
Understanding and Grounding" (2026). transformers' own class. Rows are added to the embeddings of
their tokens. Videos, which need torchvision, are not built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aioengine.errors import InvalidRequestError, ModelLoadError
from aioengine.models.generic import GenericModel
from aioengine.models.molmo.molmo import AddedRows
from aioengine.models.runtime.interfaces import MultiModalEmbeddings, PromptMedia
from aioengine.models.runtime.whole_pass import WholePrompt, run_whole
from aioengine.processors.generic import GenericMultiModalProcessor
from aioengine.processors.generic_info import GenericDummyInputsBuilder, GenericProcessingInfo
from aioengine.processors.info import ProcessingContext
from aioengine.processors.prompt.updates import PromptUpdateDetails
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = ["Molmo2", "Molmo2MultiModalProcessor", "Molmo2ProcessingInfo"]


class Molmo2ProcessingInfo(GenericProcessingInfo):
    """Images only, by an image processor that needs no torchvision.

    Raises ModelLoadError for a processor that does not fit the tower.
    """

    def __init__(self, ctx: ProcessingContext) -> None:
        super().__init__(ctx)
        tower = self.get_hf_config().vision_config
        try:
            geometry = self.get_part("image").geometry({})
        except InvalidRequestError as error:
            raise ModelLoadError(f"the saved image processor: {error}") from error
        if list(tower.image_size) != [geometry.crop_size] * 2 or (
            tower.patch_size != geometry.patch_size
        ):
            raise ModelLoadError(
                f"the processor's crops of {geometry.crop_size} pixels in patches of "
                f"{geometry.patch_size} are not the tower's: {list(tower.image_size)} in "
                f"{tower.patch_size}"
            )

    @classmethod
    def load_hf_processor(
        cls, source: str, hf_config: Any, options: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        """transformers' processor with its saved settings, but for its parts."""
        from aioengine.processors.hf.molmo2 import Molmo2ImageProcessor, Molmo2Processor

        files = {"revision": options.get("revision")}
        parts = [
            Molmo2ImageProcessor.from_pretrained(source, **files),
            None,
            cls.load_tokenizer(source, hf_config, options),
        ]
        settings, rest = Molmo2Processor.get_processor_dict(source, **files)
        return Molmo2Processor.from_args_and_dict(parts, {**settings, **kwargs}, **rest)

    def _dummies(self, modality: str, settings: Mapping[str, Any]) -> Iterator[Any]:
        height, width = self.get_part(modality).largest_size(settings)
        yield from GenericDummyInputsBuilder(self)._get_dummy_images(
            width=width, height=height, num_images=1
        )


class Molmo2MultiModalProcessor(GenericMultiModalProcessor):
    """Every prompt begins with the first token, and an image's markers are of its range."""

    def _apply_hf_processor_tokens_only(self, prompt_tokens: list[int]) -> list[int]:
        tokenizer = self.info.get_tokenizer()
        found = tokenizer.bos_token_id
        first = tokenizer.eos_token_id if found is None else found
        return prompt_tokens if prompt_tokens[:1] == [first] else [first, *prompt_tokens]

    def _details(self, modality: str, full: str | list[int], ids: list[int]) -> PromptUpdateDetails:
        # What sees each other both ways begins and ends with an image's markers.
        embed_id = self.info.get_embed_token_id(modality, ids)
        return PromptUpdateDetails.select_token_id(full, embed_id)


@MULTIMODAL_REGISTRY.register_processor(Molmo2MultiModalProcessor, info=Molmo2ProcessingInfo)
class Molmo2(AddedRows, GenericModel):
    """All from the first image's first token to the last one's last is computed in one step."""

    def blocks(self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()) -> Tensor | None:
        """One block of all images; the text between them is causal."""
        if not items:
            return None
        ids = torch.full((len(token_ids),), -1)
        for item in items:
            ids[item.span.offset : item.span.offset + item.span.length] = 0
        return ids

    def reference_logits(self, prompt: WholePrompt, rows: Sequence[int]) -> Tensor:
        """See the base class. transformers counts an image's row ends and marks to the image."""
        kinds = torch.zeros(1, len(prompt.token_ids), dtype=torch.int64)
        for item in prompt.items:
            kinds[0, item.span.offset : item.span.end] = 1
        return run_whole(self.model, prompt, rows, mm_token_type_ids=kinds)

    def embed_multimodal(self, **kwargs: Any) -> MultiModalEmbeddings:
        """See `TransformersModel.embed_multimodal`; takes what the processor makes of each image.

        A token's patches are numbered within their image, and here within the batch.
        """
        counts, grids = kwargs.pop("image_num_crops"), kwargs["image_grids"]
        before = (counts.cumsum(0) - counts) * kwargs["pixel_values"].shape[1]
        sizes = grids[:, 0] * grids[:, 1] + grids[:, 2] * grids[:, 3]
        numbers = kwargs["image_token_pooling"]
        shifted = numbers + before.repeat_interleave(sizes)[:, None]
        kwargs["image_token_pooling"] = torch.where(numbers >= 0, shifted, numbers)
        return super().embed_multimodal(**kwargs)
