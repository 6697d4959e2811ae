"""An HF processor that writes each item's number in its prompt (MiniCPM-V 4.6)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers as hf

from aioengine.processors.generic import GenericMultiModalProcessor
from aioengine.processors.hf.substitutes import lenient
from aioengine.processors.items import PROCESSOR_ITEMS, MultiModalDataItems
from tests.processors.hf_processors import context_for, processor_for, tokenizer_with
from tests.support.tiny import tiny_image
from tests.support.versions import skip_up_to

MARKS = ("image_start", "image_end", "slice_start", "slice_end", "image_id_start", "image_id_end")


def hf_processor() -> Any:
    """Without torchvision there is no video part, whose settings its constructor reads."""
    marks = {f"{each}_token": f"<|{each}|>" for each in MARKS}
    tokenizer = tokenizer_with(image_token="<|image|>", video_token="<|video|>", **marks)
    images = hf.MiniCPMV4_6ImageProcessorPil(patch_size=4, scale_resolution=64)
    part = SimpleNamespace(slice_mode=False, downsample_mode=images.downsample_mode)
    made = lenient(hf.MiniCPMV4_6Processor)(images, part, tokenizer)
    made.video_processor = None
    return made


@pytest.fixture(scope="module")
def processor() -> GenericMultiModalProcessor:
    skip_up_to(5, 22, "MiniCPM-V 4.6 is newer")
    return processor_for(context_for(hf_processor()))


@pytest.mark.parametrize("options", [{}, {"use_image_id": False}, {"use_image_id": True}])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_items_are_numbered(
    processor: GenericMultiModalProcessor, count: int, options: dict[str, Any]
) -> None:
    images = [tiny_image(i).resize((60 + 20 * i, 50)) for i in range(count)]
    prompt = "a <|image|>" * count + " b"
    items = MultiModalDataItems({"image": PROCESSOR_ITEMS["image"](images)})
    mine = processor.apply(prompt, items, options)
    theirs = hf_processor()(text=prompt, images=images, return_tensors="pt", **options)
    assert list(mine.token_ids) == theirs["input_ids"][0].tolist()
    text = processor.info.get_tokenizer().decode(mine.token_ids)
    last = f"<|image_id_start|>{count - 1}<|image_id_end|>"
    assert (last in text) == options.get("use_image_id", True)
