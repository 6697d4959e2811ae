"""A request's options: which are an honest caller's, and which would cost more than an item may."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st

from aioengine.config import MediaConfig
from aioengine.errors import InvalidRequestError
from aioengine.processors.mm_kwargs import MAX_VALUES, check_cost, copy_options

CONFIG = MediaConfig()
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(-1e9, 1e9) | st.text("ab"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab"), inner, max_size=4),
    max_leaves=20,
)

# transformers' own, whose sizes are edges, or numbers of pixels.
CLIP = hf.CLIPImageProcessorPil(
    size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}
)
QWEN = hf.Qwen2VLImageProcessorPil()
TILES = SimpleNamespace(size={"height": 448, "width": 448}, max_patches=12)
WHISPER = SimpleNamespace(feature_size=80, chunk_length=30, n_samples=480_000)


def check(part: Any, options: dict[str, Any], modality: str = "image", **known: Any) -> None:
    name = {"audio": "feature_extractor", "video": "video_processor"}.get(modality)
    processor = SimpleNamespace(**{name or "image_processor": part})
    check_cost(copy_options(options), processor, modality, CONFIG, **known)


@given(st.dictionaries(st.text("ab", max_size=3), PLAIN, max_size=4))
def test_plain_values_are_copied_as_they_are(options: dict[str, Any]) -> None:
    copied = copy_options(options)
    assert copied == options and repr(copied) == repr(options)
    assert all(copied[name] is not value for name, value in options.items() if value == [1, [2]])


def test_nothing_is_shared_with_the_caller() -> None:
    options = {"a": {"b": [1, (2, [3])]}}
    copied = copy_options(options)
    options["a"]["b"].append(4)
    assert copied == {"a": {"b": [1, (2, [3])]}}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] * 9
    return value


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"a": [0] * MAX_VALUES}, "more than 1000 values"),
        ({"a": nested(6)}, "more than 1000 values"),
        ({"a": [[[[[[[[[1]]]]]]]]]}, "nested at most 8"),
        ({"a": "x" * 70_000}, "characters"),
        ({"x" * 101: 1}, "names"),
        ({5: 1}, "names"),
        ({"a": 2**63}, "bits"),
        ({"a": float("nan")}, "finite"),
        ({"a": [1e400]}, "finite"),
        ({"a": b"x"}, "plain values: bytes"),
        ({"a": {1}}, "plain values: set"),
    ],
)
def test_values_that_options_do_not_have(options: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        copy_options(options)
    assert caught.value.parameter == "mm_processor_kwargs"


@pytest.mark.parametrize(
    ("part", "options", "size"),
    [
        (
            CLIP,
            {"size": {"shortest_edge": 672}, "crop_size": {"height": 672, "width": 672}},
            (9, 9),
        ),
        (
            CLIP,
            {"size": 560, "do_rescale": True, "image_mean": [0.5] * 3, "resample": 3},
            (640, 480),
        ),
        (CLIP, {"images_kwargs": {"size": {"height": 800, "width": 1333}}}, (640, 480)),
        (QWEN, {"min_pixels": 256 * 28 * 28, "max_pixels": 1280 * 28 * 28}, (1920, 1080)),
        (QWEN, {"size": {"shortest_edge": 3136, "longest_edge": 12_845_056}}, (1920, 1080)),
        (QWEN, {"size": {"shortest_edge": 200_704, "longest_edge": 1_003_520}}, (1920, 1080)),
        (TILES, {"max_patches": 40, "min_patches": 1, "crop_to_patches": True}, (4000, 100)),
        (
            CLIP,
            {"size": {"longest_edge": 4 * 512}, "max_image_size": {"longest_edge": 512}},
            (9, 9),
        ),
        (None, {"size": {"height": 384, "width": 384}, "anything": "else"}, (100, 100)),
    ],
)
def test_honest_options(part: Any, options: dict[str, Any], size: tuple[int, int]) -> None:
    check(part, options, size=size)


@pytest.mark.parametrize(
    ("part", "options", "size"),
    [
        (CLIP, {"size": {"height": 9000, "width": 9000}}, (9, 9)),
        (CLIP, {"size": {"height": 1, "width": 10**8}}, (9, 9)),
        (CLIP, {"size": {"shortest_edge": 2000}}, (20, 1)),  # as an edge, with that aspect: 80 M
        (CLIP, {"size": {"shortest_edge": 600}}, (200, 1)),
        (CLIP, {"size": 9000}, (9, 9)),
        (CLIP, {"images_kwargs": {"crop_size": 9000}}, (9, 9)),
        (CLIP, {"size_divisor": 10_000}, (9, 9)),
        (CLIP, {"pad_size": {"height": 10**5}}, (9, 9)),
        (QWEN, {"size": {"shortest_edge": 10**8, "longest_edge": 10**9}}, (9, 9)),
        (QWEN, {"min_pixels": 10**8}, (9, 9)),
        (QWEN, {"merge_size": 10**6}, (9, 9)),
        (QWEN, {"temporal_patch_size": 10**4}, (9, 9)),
        (TILES, {"max_patches": 1000}, (9, 9)),
        (TILES, {"image_grid_pinpoints": [[336, 672], [10**5, 10**5]]}, (9, 9)),
        (CLIP, {"image_seq_length": 10**6}, (9, 9)),
        (CLIP, {"text_kwargs": {"max_length": 10**6}}, (9, 9)),
        (CLIP, {"pad_to_multiple_of": 10**6}, (9, 9)),
    ],
)
def test_options_that_ask_for_too_much(
    part: Any, options: dict[str, Any], size: tuple[int, int]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(part, options, size=size)
    assert caught.value.parameter == "mm_processor_kwargs"


def test_other_numbers_are_measured_by_the_processor_s_own() -> None:
    check(WHISPER, {"chunk_length": 60, "feature_size": 128}, "audio")
    with pytest.raises(InvalidRequestError, match="chunk_length"):
        check(WHISPER, {"chunk_length": 10**6}, "audio")
    check(WHISPER, {"audio_kwargs": {"n_samples": 960_000}}, "audio")


def test_frames_share_what_a_video_may_have() -> None:
    frames = {"size": (640, 480), "num_frames": 100}
    check(CLIP, {"size": {"height": 1000, "width": 1000}}, "video", **frames)
    with pytest.raises(InvalidRequestError):
        check(CLIP, {"size": {"height": 2000, "width": 2000}}, "video", **frames)
    check(CLIP, {"num_frames": 100_000, "fps": 1000}, "video", **frames)  # the sampling's business
