"""An item's way to another process: what is taken apart is put together again, to the bit."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from aioengine.config import MediaConfig
from aioengine.errors import InvalidRequestError, MediaError
from aioengine.processors.inputs import PlaceholderRange
from aioengine.processors.item_work import (
    Described,
    Promise,
    WorkItem,
    describe,
    pack_value,
    rebuild,
    unpack_value,
)
from aioengine.processors.items import AudioClip, VideoClip
from aioengine.processors.media.open import open_media
from aioengine.processors.processor import Layout
from aioengine.types import Embeddings

RATE = 8000
CONFIG = MediaConfig()
PROCESSOR: Any = SimpleNamespace(
    merged_kwargs=dict, info=SimpleNamespace(get_sample_rate=lambda: RATE)
)

# ---- values

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(plain)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    there = json.loads(json.dumps(pack_value(value, "x")))
    assert repr(unpack_value(there)) == repr(value)


def test_a_member_of_an_enumeration_is_its_number() -> None:
    packed = pack_value({"resample": Image.Resampling.BICUBIC}, "x")
    assert unpack_value(packed) == {"resample": 3}


@pytest.mark.parametrize("value", [b"x", {1: 2}, {"a": object()}, [(np.float32(1),)], {1, 2}])
def test_other_values_are_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^options.* cannot be given to a worker"):
        pack_value(value, "options")


# ---- promises


@given(st.data())
def test_a_promise_is_what_the_layout_says_of_its_item(data: Any) -> None:
    length = data.draw(st.integers(1, 12))
    offset = data.draw(st.integers(0, 5))
    mask = data.draw(st.lists(st.booleans(), min_size=length, max_size=length).filter(any))
    is_embed = data.draw(st.sampled_from([None, torch.tensor(mask)]))
    ids = data.draw(st.lists(st.integers(0, 3), min_size=20, max_size=20))
    others = [PlaceholderRange(18, 2)] * 2
    placed = PlaceholderRange(offset, length, is_embed)
    layout = Layout(token_ids=ids, placeholders={"image": [*others, placed]})
    promise = Promise.of(layout, "image", 2)
    assert Promise.unpack(json.loads(json.dumps(promise.pack()))) == promise
    again = promise.to_layout("image", 2)
    found = again.placeholders["image"][2]
    assert (found.offset, found.length) == (0, length)
    assert found.embed_runs == placed.embed_runs
    assert Promise.of(again, "image", 2) == promise


# ---- sources


def wav() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(2)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        samples = np.random.default_rng(0).integers(-30000, 30000, 2000, dtype=np.int16)
        writer.writeframes(samples.tobytes())
    return file.getvalue()


def frames() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (40, 20, 30, 3), dtype=np.uint8)


def image(mode: str = "RGB") -> Image.Image:
    return Image.fromarray(frames()[0]).convert(mode)


def png() -> bytes:
    file = io.BytesIO()
    image().save(file, "PNG")
    return file.getvalue()


SOURCES: dict[str, tuple[str, str, Callable[[], object]]] = {
    "png": ("image", "encoded", png),
    "array": ("image", "array", lambda: frames()[0]),
    "chw": ("image", "array", lambda: torch.from_numpy(frames()[0]).permute(2, 0, 1)),
    "grey": ("image", "array", lambda: frames()[0, ..., 0] / np.float16(255)),
    "wide": ("image", "image", lambda: image().resize((70_000, 400))),
    "cmyk": ("image", "image", lambda: image("CMYK")),
    "wav": ("audio", "encoded", wav),
    "samples": ("audio", "samples", lambda: (np.sin(np.arange(5000)), RATE)),
    "stereo": ("audio", "samples", lambda: (torch.randn(2, 5000) / 8, RATE)),
    "frames": ("video", "frames", frames),
    "images": ("video", "frames", lambda: [image()] * 3),
}


def to_and_fro(source: Any, modality: str) -> Any:
    """As from one process to another."""
    kind, meta, buffers = describe(source)
    data = bytearray(b"".join(bytes(buffer) for buffer in buffers))
    described = Described(kind, json.loads(json.dumps(meta)), [memoryview(data)])
    work = WorkItem(source=None, modality=modality, index=0, parameter=f"{modality}s[7]")
    return rebuild(described, work, CONFIG, PROCESSOR)


def opened(modality: str, content: object) -> Any:
    source = open_media(
        modality,
        content,
        CONFIG,
        parameter=f"{modality}s[7]",
        options={},
        get_sample_rate=lambda: RATE,
    )
    source.identity()
    return source


@pytest.mark.parametrize(("modality", "kind", "make"), SOURCES.values(), ids=SOURCES)
def test_a_source_decodes_to_the_same(modality: str, kind: str, make: Callable[[], object]) -> None:
    source = opened(modality, make())
    assert describe(source).kind == kind
    again = to_and_fro(source, modality)
    expected, found = source.decode(), again.decode()
    again.verify()
    if isinstance(expected, AudioClip):
        assert np.array_equal(found.samples, expected.samples)
        assert found.samples.dtype == expected.samples.dtype
        assert found.sample_rate == expected.sample_rate
    elif isinstance(expected, VideoClip):
        assert np.array_equal(found.frames, expected.frames)
        assert found.header == expected.header
    else:
        assert found.mode == expected.mode == "RGB"
        assert found.size == expected.size
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("content", [png()[:-40], np.full((4, 4), 7.5)])
def test_a_source_fails_as_the_other_does(content: object) -> None:
    source = opened("image", content)
    with pytest.raises(MediaError) as expected:
        source.decode()
    with pytest.raises(MediaError) as found:
        to_and_fro(source, "image").decode()
    assert str(found.value) == str(expected.value)
    assert (found.value.parameter, found.value.value) == ("images[7]", expected.value.value)


def test_a_image_goes_in_small_pieces() -> None:
    source = opened("image", image().resize((3000, 2000)))
    sizes = [len(bytes(piece)) for piece in describe(source).buffers]
    assert sum(sizes) == 3000 * 2000 * 3
    assert max(sizes) < 1 << 18


def test_embeddings() -> None:
    given_ones = Embeddings(torch.randn(3, 4), grid=torch.tensor([1, 2]), flag=torch.tensor(True))
    found = to_and_fro(given_ones, "image")
    assert isinstance(found, Embeddings)
    assert torch.equal(found.rows, given_ones.rows)
    assert found.extra.keys() == {"grid", "flag"}
    assert torch.equal(found.extra["grid"], given_ones.extra["grid"])
    assert bool(found.extra["flag"]) is True
