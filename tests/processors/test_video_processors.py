"""Video processors without torchvision against transformers' own.

Where torchvision can be imported those run beside ours; elsewhere what they gave is in
video_goldens.json (see make_video_goldens.py).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from aioengine.errors import MediaError
from aioengine.processors.generic import GenericDummyInputsBuilder, GenericMultiModalProcessor
from aioengine.processors.hf.video_processors import MODEL_TYPES, VIDEO_PROCESSORS
from aioengine.processors.inputs import MultiModalKwargs
from aioengine.processors.items import PROCESSOR_ITEMS, MultiModalDataItems
from tests.processors.make_video_goldens import (
    CASES,
    GOLDENS,
    WHOLES,
    clip,
    describe,
    settings_of,
)

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
HAS_AVX2 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
RECORDED: Mapping[str, Any] = json.loads(GOLDENS.read_text())


def theirs(kind: str, name: str) -> Any:
    """What transformers' own class gives, asked here or recorded."""
    if not HAS_TORCHVISION:
        return RECORDED[kind][name]
    classes = {each: getattr(hf, each) for each in VIDEO_PROCESSORS}
    if kind == "tensors":
        return {key: describe(value) for key, value in CASES[name].run(classes).items()}
    if kind == "settings":
        return settings_of(classes[name]())
    return WHOLES[name].info(classes).process_item("video", clip(), {})[1]


@pytest.mark.parametrize("name", CASES)
def test_every_bit_is_theirs(name: str) -> None:
    if name.endswith("/bilinear") and not HAS_TORCHVISION and not HAS_AVX2:
        pytest.skip("torchvision's bilinear filter has other roundings on this CPU")
    mine, expected = CASES[name].run(VIDEO_PROCESSORS), theirs("tensors", name)
    assert mine.keys() == expected.keys()
    for key, value in mine.items():
        assert describe(value) == expected[key], key


def test_every_class_of_the_table_is_tried() -> None:
    assert {case.name for case in CASES.values()} == VIDEO_PROCESSORS.keys()
    assert {whole.part for whole in WHOLES.values()} == VIDEO_PROCESSORS.keys()


@pytest.mark.parametrize("name", VIDEO_PROCESSORS)
def test_defaults_are_theirs(name: str) -> None:
    assert settings_of(VIDEO_PROCESSORS[name]()) == theirs("settings", name)
    valid = VIDEO_PROCESSORS[name].valid_kwargs.__annotations__
    if HAS_TORCHVISION:
        assert valid.keys() == getattr(hf, name).valid_kwargs.__annotations__.keys()


def test_model_types_are_theirs() -> None:
    assert dict(MODEL_TYPES) == RECORDED["model_types"]


@pytest.mark.parametrize("name", WHOLES)
def test_a_video_becomes_the_same_text(name: str) -> None:
    mine = WHOLES[name].info(VIDEO_PROCESSORS).process_item("video", clip(), {})[1]
    assert mine == theirs("texts", name)


@pytest.mark.parametrize("name", WHOLES)
def test_videos_go_all_the_way(name: str) -> None:
    info = WHOLES[name].info(VIDEO_PROCESSORS)
    # Its constructor has HF's own `__call__` run beside it.
    processor = GenericMultiModalProcessor(info, GenericDummyInputsBuilder(info))
    hears = {"audio": None} if name == "gemma-4" else {}
    assert info.get_supported_mm_limits() == {"image": None, "video": None, **hears}
    items = MultiModalDataItems({"video": PROCESSOR_ITEMS["video"]([clip(), clip()])})
    mark = info.get_placeholder("video")
    mine = processor.apply(f"see {mark} and {mark}.", items)
    text = theirs("texts", name)
    assert mine.token_ids == processor.tokenize(f"see {text} and {text}.")
    embed = info.get_tokenizer().convert_tokens_to_ids(WHOLES[name].embed)
    assert [each.num_embeds for each in mine.placeholders["video"]] == [
        info.encode(text).count(embed)
    ] * 2
    features = MultiModalKwargs.reduce(mine.items["video"])
    expected, _ = info.process_item("video", clip(), {})
    pixels = features["pixel_values_videos"]
    assert isinstance(pixels, torch.Tensor)
    assert pixels.equal(torch.cat([expected["pixel_values_videos"]] * 2))
    assert info.get_mm_max_tokens_per_item(0, {"video": 1})["video"] > 0


def test_options_of_a_request_reach_it() -> None:
    info = WHOLES["qwen2-vl"].info(VIDEO_PROCESSORS)
    processor = GenericMultiModalProcessor(info, GenericDummyInputsBuilder(info))
    items = MultiModalDataItems({"video": PROCESSOR_ITEMS["video"]([clip()])})
    small = {"videos_kwargs": {"size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}}}
    prompt = info.get_placeholder("video")
    few, many = (processor.apply(prompt, items, each) for each in (small, {}))
    assert 0 < few.placeholders["video"][0].length < many.placeholders["video"][0].length
    with pytest.raises(MediaError):
        processor.apply(prompt, items, {"videos_kwargs": {"resample": 5}})


def test_settings_are_part_of_the_processor_s_own() -> None:
    whole = WHOLES["qwen3-vl"]
    cls = VIDEO_PROCESSORS[whole.part]
    one, other = (
        whole.make(cls(size={"shortest_edge": edge, "longest_edge": 1 << 20}))
        for edge in (4096, 4097)
    )
    assert one.to_json_string() != other.to_json_string()
    assert '"video_processor_type": "Qwen3VLVideoProcessor"' in one.to_json_string()


@pytest.mark.parametrize(
    ("videos", "options", "message"),
    [
        (np.zeros((2, 30, 30, 3), np.float32), {}, "float32"),
        (np.zeros((2, 30, 30, 3), np.uint8), {"do_sample_frames": True}, "do_sample_frames"),
        (np.zeros((2, 30, 30, 3), np.uint8), {"device": "meta"}, "device"),
        (np.zeros((2, 30, 30, 3), np.uint8), {"resample": 0}, "resample"),
        (np.zeros((2, 30, 30, 3), np.uint8), {"size": {"longest_edge": 20}}, "size"),
    ],
)
@pytest.mark.parametrize("name", ["Qwen2VLVideoProcessor", "LlavaOnevisionVideoProcessor"])
def test_what_it_would_do_otherwise_is_refused(
    name: str, videos: Any, options: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        VIDEO_PROCESSORS[name]()([videos], **options)


def test_frames_that_cannot_be_written_and_come_channels_first() -> None:
    case = CASES["InternVLVideoProcessor/odd"]
    (video,) = case.videos()
    video.setflags(write=False)
    processor = VIDEO_PROCESSORS[case.name].from_dict(dict(case.settings))
    expected = processor([video], return_tensors="pt")["pixel_values_videos"]
    turned = np.ascontiguousarray(np.moveaxis(video, -1, 1))
    assert processor([turned], return_tensors="pt")["pixel_values_videos"].equal(expected)
