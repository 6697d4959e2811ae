"""An HF processor with a video part, where torchvision is missing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from aioengine.errors import MediaError, ModelLoadError
from aioengine.processors.generic import GenericMultiModalProcessor
from aioengine.processors.generic_info import GenericDummyInputsBuilder, GenericProcessingInfo
from aioengine.processors.hf import substitutes
from aioengine.processors.hf.substitutes import lacks_video
from aioengine.processors.hf.video_processors import VIDEO_PROCESSORS
from aioengine.processors.info import load_context
from aioengine.processors.items import ImageProcessorItems, MultiModalDataItems
from tests.processors import hf_processors

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision is there"
)
SIZE = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Qwen2-VL's processing side, as it is saved where torchvision is there."""
    processor = hf_processors.qwen2_vl()
    processor.tokenizer.save_pretrained(tmp_path)
    processor.image_processor.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    write(tmp_path, "processor_config.json", {"processor_class": "Qwen2VLProcessor"})
    return tmp_path


def write(folder: Path, name: str, settings: Any) -> None:
    (folder / name).write_text(json.dumps(settings))


def config_of() -> Any:
    return transformers.Qwen2VLConfig(
        image_token_id=hf_processors.qwen2_vl().image_token_id,
        architectures=["Qwen2VLForConditionalGeneration"],
    )


def processor_of(folder: Path) -> GenericMultiModalProcessor:
    info = GenericProcessingInfo(load_context(folder, hf_config=config_of()))
    return GenericMultiModalProcessor(info, GenericDummyInputsBuilder(info))


def test_it_loads_with_frames_in_place_of_videos(folder: Path) -> None:
    with pytest.raises(ImportError):
        transformers.AutoProcessor.from_pretrained(folder)
    context = load_context(folder, hf_config=config_of())
    processor = context.hf_processor
    assert type(processor).__name__ == "Qwen2VLProcessor" and not lacks_video(processor)
    assert processor.chat_template == "{{ messages }}"
    image = Image.new("RGB", (90, 60), (200, 10, 10))
    text = "a <|image_pad|> b"
    mine = processor(text=text, images=[image], return_tensors="pt")
    theirs = hf_processors.qwen2_vl()(text=text, images=[image], return_tensors="pt")
    assert mine["input_ids"].tolist() == theirs["input_ids"].tolist()
    assert bool((mine["pixel_values"] == theirs["pixel_values"]).all())
    assert context.clone().hf_processor is not processor
    assert processor_of(folder).info.get_supported_mm_limits().keys() == {"image", "video"}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor"}),
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessorFast"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen2VLVideoProcessor"}),
        ("video_preprocessor_config.json", {}),
        (
            "processor_config.json",
            {"video_processor": {"video_processor_type": "Qwen2VLVideoProcessor"}},
        ),
    ],
)
def test_settings_are_found_where_transformers_finds_them(
    folder: Path, name: str, settings: Any
) -> None:
    nested = "video_processor" in settings
    part = {**(settings["video_processor"] if nested else settings), "size": SIZE, "merge_size": 1}
    named = {"processor_class": "Qwen2VLProcessor"}
    write(folder, name, {**named, "video_processor": part} if nested else part)
    found = load_context(folder, hf_config=config_of()).hf_processor.video_processor
    assert type(found) is VIDEO_PROCESSORS["Qwen2VLVideoProcessor"]
    assert dict(found.size) == SIZE and found.merge_size == 1 and found.patch_size == 14
    clip = np.zeros((3, 60, 80, 3), np.uint8)
    assert found([clip], return_tensors="pt")["video_grid_thw"].prod() <= 2 * 16


@pytest.mark.parametrize(
    "settings",
    [
        {"video_processor_type": "VideoLlama3VideoProcessor"},
        {
            "video_processor_type": "Qwen2VLVideoProcessor",
            "auto_map": {"AutoVideoProcessor": "own.Own"},
        },
    ],
)
def test_other_videos_are_refused_with_a_way_out(folder: Path, settings: Any) -> None:
    write(folder, "video_preprocessor_config.json", settings)
    check_refusal(folder)


@pytest.mark.parametrize("compared", [((5, 1), (5, 2)), ((6, 0), (6, 1))])
def test_versions_that_were_not_compared(
    folder: Path, compared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(substitutes, "_COMPARED", compared)
    check_refusal(folder)


def check_refusal(folder: Path) -> None:
    processor = processor_of(folder)
    assert lacks_video(processor.info.get_hf_processor())
    image = Image.new("RGB", (90, 60))
    items = MultiModalDataItems({"image": ImageProcessorItems([image])})
    assert processor.apply("a <|image_pad|>", items).placeholders["image"]
    with pytest.raises(MediaError, match=r"install it, or give the frames as images") as caught:
        processor.info.validate_num_items({"video": 1})
    assert caught.value.parameter == "videos"


def test_a_search_without_end_is_taken_for_a_missing_part(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(*_: Any, **__: Any) -> Any:
        raise RecursionError

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", search)
    assert processor_of(folder).info.get_hf_processor().image_processor is not None


def test_other_failures_are_the_caller_s_to_know(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        load_context(tmp_path, hf_config=config_of())
