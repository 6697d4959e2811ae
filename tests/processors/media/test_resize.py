"""Resizing ahead of the HF processor: only where it changes no bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import CLIPImageProcessorPil, LlavaImageProcessorPil, SiglipImageProcessorPil

from aioengine.processors.media.resize import resize_ahead, resizes_first


def processor_of(image_processor: Any) -> Any:
    from transformers import ProcessorMixin

    processor = ProcessorMixin.__new__(ProcessorMixin)
    processor.image_processor = image_processor
    processor._merge_kwargs = lambda kind, **kwargs: {"images_kwargs": kwargs}
    return processor


PROCESSORS = [
    CLIPImageProcessorPil(size={"shortest_edge": 30}, crop_size={"height": 30, "width": 30}),
    CLIPImageProcessorPil(size={"shortest_edge": 64}, do_center_crop=False),
    SiglipImageProcessorPil(size={"height": 30, "width": 44}),
    SiglipImageProcessorPil(size={"height": 16, "width": 16}, resample=Image.Resampling.LANCZOS),
    SiglipImageProcessorPil(do_resize=False),
    CLIPImageProcessorPil(size={"shortest_edge": 30, "longest_edge": 50}, do_center_crop=False),
    LlavaImageProcessorPil(size={"shortest_edge": 30}, crop_size={"height": 30, "width": 30}),
]


def never(image_processor: Any, options: Any) -> bool:
    return False


def own_step(image_processor: Any, options: Any) -> bool:
    return isinstance(image_processor, LlavaImageProcessorPil)


def ahead(image_processor: Any, pil_image: Image.Image, **options: Any) -> Image.Image:
    processor = processor_of(image_processor)
    result = resize_ahead(processor, {"images": [pil_image]}, options, own_step)["images"]
    assert isinstance(result, list)
    pil_image = result[0]
    assert isinstance(pil_image, Image.Image)
    return pil_image


@pytest.fixture(autouse=True)
def plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # The processors above are stand-ins whose merging is their own.
    monkeypatch.setattr("aioengine.processors.media.resize._hands_images_on", lambda _: True)


@settings(max_examples=80, deadline=None)
@given(
    which=st.integers(0, len(PROCESSORS) - 1),
    size=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    seed=st.integers(0, 99),
)
def test_bit_for_bit(which: int, size: tuple[int, int], seed: int) -> None:
    image_processor = PROCESSORS[which]
    if which == 5:  # Its limit on the longest edge leaves nothing of a thin image.
        assume(min(size) >= 10)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    pil_image = Image.fromarray(pixels)

    def run(image: Image.Image) -> np.ndarray[Any, Any]:
        return np.asarray(image_processor(image, return_tensors="np")["pixel_values"][0])

    assert np.array_equal(run(ahead(image_processor, pil_image)), run(pil_image))


def test_shrinks_where_it_may() -> None:
    pil_image = Image.new("RGB", (200, 100))
    assert ahead(PROCESSORS[0], pil_image).size == (60, 30)
    assert ahead(PROCESSORS[2], pil_image).size == (44, 30)
    assert ahead(PROCESSORS[6], pil_image).size == (60, 30)
    for image_processor in PROCESSORS[4:6]:
        assert ahead(image_processor, pil_image) is pil_image
    assert ahead(PROCESSORS[0], pil_image, do_resize=False) is pil_image
    assert ahead(PROCESSORS[0], pil_image, input_data_format="channels_last") is pil_image
    assert ahead(PROCESSORS[0], pil_image, size={"shortest_edge": 20}).size == (40, 20)


def test_leaves_other_images_alone() -> None:
    grey, array = Image.new("L", (200, 100)), np.zeros((9, 9, 3))
    keyed = Image.new("RGB", (200, 100))
    keyed.info["transparency"] = (0, 0, 0)
    images = [grey, array, keyed]
    result = resize_ahead(processor_of(PROCESSORS[0]), {"images": images}, {})["images"]
    assert isinstance(result, list)
    assert all(mine is given for mine, given in zip(result, images, strict=True))


def test_an_overridden_step_ends_the_promise() -> None:
    class Pads(CLIPImageProcessorPil):
        def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
            return super()._preprocess(*args, **kwargs)

    assert resizes_first(PROCESSORS[0], {}, never)
    assert not resizes_first(Pads(), {}, never)
    assert not resizes_first(object(), {}, own_step)
    assert not resizes_first(PROCESSORS[6], {}, never)
    pil_image = Image.new("RGB", (200, 100))
    assert ahead(Pads(), pil_image) is pil_image
