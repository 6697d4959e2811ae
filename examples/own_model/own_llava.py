"""A model family from outside the package, in four steps, and an engine that serves it.

1. the model:       media to embeddings, and embeddings into those of the text
2. the info:        how many items a prompt may have, and how many tokens one becomes
3. dummy inputs:    the largest items there are, to measure memory with
4. the processor:   what the HF processor's outputs are, and what it does to the text

The checkpoint is the demo model's, but its `architectures` name a class that nobody ships.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlavaForConditionalGeneration

from aioengine import AsyncEngine, SamplingParams, demo_images, demo_model
from aioengine.models import (
    MultiModalEmbeddings,
    SupportsMultiModal,
    TransformersModel,
    merge_multimodal_embeddings,
    register_model,
)
from aioengine.processors import (
    MULTIMODAL_REGISTRY,
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ImageProcessorItems,
    ImageSize,
    MultiModalDataItems,
    MultiModalFieldConfig,
    MultiModalKwargs,
    ProcessorInputs,
    PromptReplacement,
    PromptUpdate,
)

ARCHITECTURE = "YourModelForImage2Seq"


class YourInfo(BaseProcessingInfo):
    """Step 2. Every image is resized to the tower's square, so all become equally many tokens."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        vision_config = self.get_hf_config().vision_config
        processor = self.get_hf_processor()
        num_patches = (vision_config.image_size // vision_config.patch_size) ** 2
        is_cut = processor.vision_feature_select_strategy == "default"
        return int(num_patches + processor.num_additional_image_tokens - is_cut)

    def get_image_size_with_most_features(self) -> ImageSize:
        side = self.get_hf_config().vision_config.image_size
        return ImageSize(width=side, height=side)

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        width, height = self.get_image_size_with_most_features()
        return {"image": self.get_num_image_tokens(image_width=width, image_height=height)}


class YourDummyInputs(BaseDummyInputsBuilder):
    """Step 3."""

    info: YourInfo

    def get_dummy_processor_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> ProcessorInputs:
        num_images = mm_counts.get("image", 0)
        width, height = self.info.get_image_size_with_most_features()
        images = self._get_dummy_images(width=width, height=height, num_images=num_images)
        image_token = self.info.get_hf_processor().image_token
        return ProcessorInputs(prompt_text=image_token * num_images, mm_data={"image": images})


class YourProcessor(BaseMultiModalProcessor):
    """Step 4."""

    info: YourInfo

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
        image_token_id = self.info.get_hf_config().image_token_index

        def get_replacement(item_idx: int) -> list[int]:
            images = mm_items.get_items("image", ImageProcessorItems)
            width, height = images.get_image_size(item_idx)
            num_tokens = self.info.get_num_image_tokens(image_width=width, image_height=height)
            return [image_token_id] * num_tokens

        return [
            PromptReplacement(
                modality="image", target=[image_token_id], replacement=get_replacement
            )
        ]


@register_model(ARCHITECTURE)
@MULTIMODAL_REGISTRY.register_processor(YourProcessor, info=YourInfo, dummy_inputs=YourDummyInputs)
class YourModelForImage2Seq(TransformersModel, SupportsMultiModal):
    """Step 1. The decoder behind it is transformers', over the engine's paged attention."""

    @classmethod
    def hf_class(cls, hf_config: Any) -> Any:
        return LlavaForConditionalGeneration

    def get_multimodal_embeddings(self, **kwargs: object) -> MultiModalEmbeddings | None:
        pixel_values = kwargs.get("pixel_values")
        if not isinstance(pixel_values, torch.Tensor):
            return None
        return self._process_image_input(pixel_values.to(self.device, self.dtype))

    def _process_image_input(self, pixel_values: torch.Tensor) -> torch.Tensor:
        inner = self.model.model
        hidden_states = inner.vision_tower(pixel_values, output_hidden_states=True).hidden_states
        image_features = hidden_states[self.hf_config.vision_feature_layer]
        if self.hf_config.vision_feature_select_strategy == "default":
            image_features = image_features[:, 1:]
        embeddings: torch.Tensor = inner.multi_modal_projector(image_features)
        return embeddings

    def get_input_embeddings(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
    ) -> torch.Tensor:
        inputs_embeds: torch.Tensor = self.model.get_input_embeddings()(input_ids)
        if multimodal_embeddings is not None:
            inputs_embeds = merge_multimodal_embeddings(
                input_ids=input_ids,
                inputs_embeds=inputs_embeds,
                multimodal_embeddings=multimodal_embeddings,
                placeholder_token_id=self.hf_config.image_token_index,
            )
        return inputs_embeds


def write_checkpoint(folder: Path) -> None:
    """The demo model's files, and a config that asks for the class above."""
    for path in demo_model().iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((demo_model() / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [ARCHITECTURE]}))


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name))
        async with AsyncEngine.from_pretrained(name) as engine:
            output = await engine.generate(
                "USER: <image>\nDescribe the picture. ASSISTANT:",
                SamplingParams(temperature=0, max_tokens=96),
                images=[demo_images()[0]],
            )
    print(output.text)


if __name__ == "__main__":
    asyncio.run(main())
