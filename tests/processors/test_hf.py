"""An HF processor with a video part, where torchvision is missing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from PIL import Image

from aioengine.errors import ModelLoadError, UnsupportedModalityError
from aioengine.processors.generic import GenericMultiModalProcessor
from aioengine.processors.generic_info import GenericDummyInputsBuilder, GenericProcessingInfo
from aioengine.processors.hf import lacks_video
from aioengine.processors.info import load_context
from aioengine.processors.items import ImageProcessorItems, MultiModalDataItems
from tests.processors import hf_processors

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision is there"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Qwen2-VL's processing side, as it is saved where torchvision is there."""
    processor = hf_processors.qwen2_vl()
    processor.tokenizer.save_pretrained(tmp_path)
    processor.image_processor.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    settings = {"processor_class": "Qwen2VLProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    return tmp_path


def config_of() -> Any:
    return transformers.Qwen2VLConfig(
        image_token_id=hf_processors.qwen2_vl().image_token_id,
        architectures=["Qwen2VLForConditionalGeneration"],
    )


def test_it_loads_without_its_video_part(folder: Path) -> None:
    with pytest.raises(ImportError):
        transformers.AutoProcessor.from_pretrained(folder)
    context = load_context(folder, hf_config=config_of())
    processor = context.hf_processor
    assert type(processor).__name__ == "Qwen2VLProcessor" and lacks_video(processor)
    assert processor.chat_template == "{{ messages }}"
    picture = Image.new("RGB", (90, 60), (200, 10, 10))
    text = "a <|image_pad|> b"
    mine = processor(text=text, images=[picture], return_tensors="pt")
    theirs = hf_processors.qwen2_vl()(text=text, images=[picture], return_tensors="pt")
    assert mine["input_ids"].tolist() == theirs["input_ids"].tolist()
    assert bool((mine["pixel_values"] == theirs["pixel_values"]).all())
    assert context.clone().hf_processor is not processor


def test_videos_are_refused_with_a_way_out(folder: Path) -> None:
    info = GenericProcessingInfo(load_context(folder, hf_config=config_of()))
    processor = GenericMultiModalProcessor(info, GenericDummyInputsBuilder(info))
    picture = Image.new("RGB", (90, 60))
    items = MultiModalDataItems({"image": ImageProcessorItems([picture])})
    assert processor.apply("a <|image_pad|>", items).placeholders["image"]
    with pytest.raises(UnsupportedModalityError, match="needs torchvision"):
        processor.validate_num_items({"video": 1})


def test_other_failures_are_the_caller_s_to_know(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        load_context(tmp_path, hf_config=config_of())
