"""A family written from the model guide alone, and families of other shapes than LLaVA's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from aioengine.errors import MediaError
from aioengine.processors import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ImageProcessorItems,
    ImageSize,
    MultiModalDataItems,
    MultiModalFieldConfig,
    MultiModalKwargs,
    ProcessorInputs,
    PromptIndexTargets,
    PromptInsertion,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)
from aioengine.processors.registry import MultiModalRegistry
from tests.processors.conftest import context_of

REGISTRY = MultiModalRegistry()


class GuideInfo(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        hf_config = self.get_hf_config()
        image_size = hf_config.vision_config.image_size
        patch_size = hf_config.vision_config.patch_size
        num_image_tokens = (image_size // patch_size) ** 2 + 1
        if self.get_hf_processor().vision_feature_select_strategy == "default":
            num_image_tokens -= 1
        return int(num_image_tokens)

    def get_image_size_with_most_features(self) -> ImageSize:
        width = height = self.get_hf_config().vision_config.image_size
        return ImageSize(width=width, height=height)


class GuideDummyInputs(BaseDummyInputsBuilder):
    info: GuideInfo

    def get_dummy_processor_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> ProcessorInputs:
        num_images = mm_counts.get("image", 0)
        image_token = self.info.get_hf_processor().image_token
        hf_config = self.get_hf_config()  # as the guide writes it, and not on the info
        assert hf_config is self.info.get_hf_config()
        width, height = self.info.get_image_size_with_most_features()
        images = self._get_dummy_images(width=width, height=height, num_images=num_images)
        return ProcessorInputs(prompt_text=image_token * num_images, mm_data={"image": images})


class GuideProcessor(BaseMultiModalProcessor):
    info: GuideInfo

    def _get_mm_fields_config(
        self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return dict(pixel_values=MultiModalFieldConfig.batched("image"))

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        image_token_id = self.info.get_hf_config().image_token_index

        def get_replacement(item_idx: int) -> list[int]:
            images = mm_items.get_items("image", ImageProcessorItems)
            image_size = images.get_image_size(item_idx)
            num_image_tokens = self.info.get_num_image_tokens(
                image_width=image_size.width, image_height=image_size.height
            )
            return [image_token_id] * num_image_tokens

        return [
            PromptReplacement(
                modality="image", target=[image_token_id], replacement=get_replacement
            )
        ]


@REGISTRY.register_processor(GuideProcessor, info=GuideInfo, dummy_inputs=GuideDummyInputs)
class GuideModel:
    pass


class PrependingProcessor(GuideProcessor):
    """Puts each image's rows, by the size that came out, before the prompt, in a frame."""

    layout_needs_hf_outputs = True

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        def get_insertion(item_idx: int) -> PromptUpdateDetails:
            side = out_mm_kwargs.get_item("image", item_idx)["pixel_values"].shape[-1] // 14
            rows = ([7] * side + [8]) * side
            return PromptUpdateDetails(
                full=[9, *rows, 10], features=rows, is_embed=lambda _, ids: torch.tensor(ids) == 7
            )

        return [
            PromptInsertion(
                modality="image", target=PromptIndexTargets.start(), insertion=get_insertion
            )
        ]


@REGISTRY.register_processor(PrependingProcessor, info=GuideInfo, dummy_inputs=GuideDummyInputs)
class PrependingModel:
    pass


def pil_images(*sizes: tuple[int, int]) -> MultiModalDataItems:
    images = [Image.new("RGB", size, (index * 40, 9, 9)) for index, size in enumerate(sizes)]
    return MultiModalDataItems({"image": ImageProcessorItems(images)})


def test_the_guides_example(llava_folder: Path) -> None:
    processor = REGISTRY.create_processor(GuideModel, context_of(llava_folder))
    items = pil_images((40, 30), (9, 90))
    mine = processor.apply("a <image> b <image>", items)
    theirs = processor.info.get_hf_processor()(
        text="a <image> b <image>", images=items["image"].get_all(), return_tensors="pt"
    )
    assert mine.token_ids == theirs["input_ids"][0].tolist()
    pixels = MultiModalKwargs(mine.items)["pixel_values"]
    assert isinstance(pixels, torch.Tensor) and torch.equal(pixels, theirs["pixel_values"])
    assert [placed.num_embeds for placed in mine.placeholders["image"]] == [4, 4]


def test_a_layout_from_the_outputs(llava_folder: Path) -> None:
    processor = REGISTRY.create_processor(PrependingModel, context_of(llava_folder))
    items = pil_images((40, 30), (9, 90))
    outputs = processor.process(items, {})
    layout = processor.layout([11, 12], items, {}, outputs)
    block = [9, 7, 7, 8, 7, 7, 8, 10]
    assert layout.token_ids == [*block, *block, 11, 12]
    places = [(placed.offset, placed.embed_runs) for placed in layout.placeholders["image"]]
    assert places == [(1, ((0, 2), (3, 5))), (9, ((0, 2), (3, 5)))]
    assert processor.apply([11, 12], items).token_ids == layout.token_ids
    processor.verify_layout(layout, items, outputs, {})
    with pytest.raises(MediaError, match="promised"):
        larger = {"size": {"shortest_edge": 42}, "crop_size": {"height": 42, "width": 42}}
        processor.verify_layout(layout, items, processor.process(items, larger), {})


def test_a_processor_that_loses_an_item(llava_folder: Path) -> None:
    class Loses(GuideProcessor):
        def _call_hf_processor(self, prompt: str, mm_data: Any, mm_kwargs: Any) -> Any:
            outputs = super()._call_hf_processor(prompt, mm_data, mm_kwargs)
            return {"pixel_values": outputs["pixel_values"][:1]}

    info = GuideInfo(context_of(llava_folder))
    with pytest.raises(MediaError, match="2 image items were processed to 1"):
        Loses(info, GuideDummyInputs(info)).process(pil_images((5, 5), (6, 6)), {})
