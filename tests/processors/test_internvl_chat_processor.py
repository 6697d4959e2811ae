"""How original InternVL checkpoints cut images up: as the code on their pages does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from aioengine.processors.hf.internvl_chat import (
    InternVLChatImageProcessor,
    InternVLChatProcessor,
    choose_grid,
    grids,
)
from tests.parity.test_families import PARAMS, engine_for
from tests.parity.test_internvl_chat import KINDS, save_original
from tests.processors.hf_processors import tokenizer_with
from tests.support.tiny import tiny_image

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
SIDE = 28
edges = st.integers(1, 3000)


@settings(deadline=None)
@example(width=1, height=1, fewest=1, most=12)
@example(width=896, height=448, fewest=1, most=12)
@given(width=edges, height=edges, fewest=st.integers(1, 4), most=st.integers(1, 13))
def test_the_grid_is_transformers_own(width: int, height: int, fewest: int, most: int) -> None:
    mine = choose_grid(width, height, side=448, fewest=fewest, most=most)
    assert mine == get_optimal_tiled_canvas((height, width), (448, 448), fewest, most)


def test_grids() -> None:
    assert grids(1, 4) == ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1))
    assert grids(3, 2) == () and choose_grid(9, 1, side=4, fewest=3, most=2) == (1, 1)


def by_pillow(image: Image.Image, columns: int, rows: int, *, thumbnail: bool) -> torch.Tensor:
    """The published steps, one after the other."""
    whole = image.convert("RGB").resize((SIDE * columns, SIDE * rows))
    boxes = [
        (SIDE * column, SIDE * row, SIDE * (column + 1), SIDE * (row + 1))
        for row in range(rows)
        for column in range(columns)
    ]
    tiles = [whole.crop(box) for box in boxes]
    if thumbnail and len(tiles) > 1:
        tiles.append(image.convert("RGB").resize((SIDE, SIDE)))
    pixels = torch.stack([torch.from_numpy(np.array(tile)) for tile in tiles])
    return ((pixels.float() / 255 - MEAN) / STD).permute(0, 3, 1, 2)


@pytest.mark.parametrize("thumbnail", [True, False])
@pytest.mark.parametrize(
    ("size", "grid"),
    [((28, 28), (1, 1)), ((90, 31), (3, 1)), ((57, 170), (1, 3)), ((61, 40), (3, 2))],
)
def test_tiles(size: tuple[int, int], grid: tuple[int, int], thumbnail: bool) -> None:
    processor = InternVLChatImageProcessor(
        size={"height": SIDE, "width": SIDE}, use_thumbnail=thumbnail, max_dynamic_patch=6
    )
    image = tiny_image(1).resize(size)
    outputs = processor([image, image], return_tensors="pt")
    expected = by_pillow(image, *grid, thumbnail=thumbnail)
    assert outputs["num_patches"].tolist() == [len(expected)] * 2
    assert processor.count_tiles(*size, {}) == len(expected)
    torch.testing.assert_close(
        outputs["pixel_values"], torch.cat([expected, expected]), rtol=0, atol=1e-6
    )
    one = processor(image, dynamic_image_size=False, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(one, by_pillow(image, 1, 1, thumbnail=False), rtol=0, atol=1e-6)


def test_text() -> None:
    """What each image becomes, in its order."""
    tokenizer: Any = tokenizer_with("<img>", "</img>", "<IMG_CONTEXT>")
    image_processor = InternVLChatImageProcessor(
        size={"height": SIDE, "width": SIDE}, max_dynamic_patch=2
    )
    processor = InternVLChatProcessor(image_processor, tokenizer, num_image_token=3)
    images = [tiny_image(0).resize((56, 28)), tiny_image(1).resize((28, 28))]
    outputs = processor(text="a<image>.<image>\n\nb", images=images, return_tensors="pt")
    rows = "<IMG_CONTEXT>" * 3
    expected = f"a<img>{rows * 2}</img>.<img>{rows}</img>\n\nb"
    assert outputs["input_ids"][0].tolist() == tokenizer(expected)["input_ids"]
    assert outputs["pixel_values"].shape == (3, 3, SIDE, SIDE) and "num_patches" not in outputs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An original checkpoint with its chat template."""
    save_original(KINDS["internlm2"], tmp_path)
    template = (
        "{{ bos_token }}{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


async def test_chat_messages(folder: Path) -> None:
    """A published template takes texts only; what a user writes is no image's place."""
    content = [
        {"type": "image", "image": tiny_image(0).resize((60, 60))},
        {"type": "text", "text": "What is <image>?"},
    ]
    async with engine_for(folder) as engine:
        output = await engine.generate([{"role": "user", "content": content}], PARAMS)
        rows = "<IMG_CONTEXT>" * 4
        assert engine.tokenizer.decode(output.prompt_token_ids) == (
            f"<s><|im_start|>user\n<img>{rows}</img>\nWhat is <image>?<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
