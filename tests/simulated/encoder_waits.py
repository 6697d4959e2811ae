"""Waits of each family's encoder for the device. Run by run.py, not by itself.

What remains is in transformers' own code; it holds up the thread that launches encoders, no step.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioengine.config import EngineConfig
from aioengine.engine.loading import loader
from aioengine.processors.items import (
    PROCESSOR_ITEMS,
    ImageSize,
    MultiModalDataItems,
    VideoClip,
    VideoHeader,
)
from tests.parity.families import FAMILIES, save
from tests.simulated.device import DEVICE, LAUNCH_THREAD, SimulatedMode
from tests.support.tiny import tiny_image

WAITS = {
    "aria": 1,  # is a mask all ones?
    "blip2": 1,  # the same
    "chameleon": 2,  # a table on the host, there and back
    "idefics3": 4,  # which images are padding
    "llava-next": 1,  # sizes, to the device
    "llava-onevision": 1,
    "llava-pixtral": 2,  # sizes, there and back
    "mistral3": 2,
}
"""For one image; none where a family is not named."""


@pytest.fixture(autouse=True)
def _as_the_launch_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.current_thread(), "name", LAUNCH_THREAD)


def num_waits(folder: Path, text: str, modality: str, data: Any) -> int:
    """Load the family's model, and count what its encoder waits for over one item."""
    sizes = {"kv_cache_bytes": 8 << 20, "encoder_cache_bytes": 1 << 22, "max_model_len": 1024}
    loaded = loader.load(folder, EngineConfig(device="cuda", check_model=False, **sizes))
    processor = loaded.layout_processor
    with processor.own_media():
        media = MultiModalDataItems({modality: PROCESSOR_ITEMS[modality]([data])})
        items = processor.apply(text, media).items[modality]
    DEVICE.waits.clear()
    with SimulatedMode(), torch.inference_mode():
        (rows,) = loaded.runner.model.encode(modality, items)
        assert rows.device.type == "cuda"
    found = sum(DEVICE.waits.values())
    DEVICE.waits.clear()
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_an_image(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    save(family, tmp_path)
    image = tiny_image(0).resize(family.sizes[0])
    assert num_waits(tmp_path, family.place, "image", image) <= WAITS.get(name, 0)


@pytest.mark.parametrize("name", [name for name, each in FAMILIES.items() if each.video_place])
def test_a_video(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    save(family, tmp_path)
    (width, height), count = family.sizes[0], family.num_frames[0]
    header = VideoHeader(ImageSize(width, height), tuple(range(count)), count)
    clip = VideoClip(np.zeros((count, height, width, 3), dtype=np.uint8), header)
    assert num_waits(tmp_path, family.video_place, "video", clip) == 0
