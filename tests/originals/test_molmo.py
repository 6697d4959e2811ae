"""Molmo's own modules and processor beside the reference written without them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from aioengine.errors import MediaError
from aioengine.models.molmo.molmo import MolmoConfig
from aioengine.processors.hf.molmo import MolmoImageProcessor, MolmoProcessor
from tests.originals import molmo as original
from tests.originals.arithmetic import Array, within
from tests.originals.calling import (
    MAX_TOKENS,
    TABLE_ERROR,
    arrays,
    drawn,
    generated,
    many,
    picture,
    sizes,
    some,
    tensor,
)
from tests.parity.test_molmo import OLMO, save, tiny_config, tiny_tokenizer
from tests.parity.test_molmo import drawn as build
from tests.parity.whole import unpaged

IDS = dict(
    zip(
        ("start", "end", "patch", "column"),
        tiny_tokenizer().convert_tokens_to_ids(
            ["<im_start>", "<im_end>", "<im_patch>", "<im_col>"]
        ),
        strict=True,
    )
)


def processor_of(crops: original.Crops) -> MolmoProcessor:
    images = MolmoImageProcessor(
        max_crops=crops.most,
        overlap_margins=crops.margins,
        base_image_input_size=(crops.side, crops.side),
        image_patch_size=crops.patch,
    )
    return MolmoProcessor(images, tiny_tokenizer())


def leaves_nothing(size: tuple[int, int], crops: original.Crops) -> bool:
    """Tell whether a published resize would be to no pixels, which it fails at."""
    try:
        original.fitted_size(size[1], size[0], (crops.side, crops.side))
        tiling = original.tiling(size[1], size[0], crops)
        original.fitted_size(size[1], size[0], crops.canvas(tiling))
    except ValueError:
        return True
    return False


@given(sizes(900, 6000), st.sampled_from([1, 2, 5, 12, 12, 36]))
@example((112, 112), 12)
@example((112, 500), 12)
@example((111, 113), 12)
@example((336, 336), 12)
@example((1, 1), 12)
@many
def test_tilings_and_tokens(size: tuple[int, int], most: int) -> None:
    crops = original.Crops(most=most)
    processor = processor_of(crops)
    width, height = size
    assert processor.image_processor.geometry.tiling(height, width) == original.tiling(
        height, width, crops
    )
    if leaves_nothing(size, crops):
        with pytest.raises(MediaError, match="too narrow"):
            processor.layout_tokens(height, width, {})
        return
    tokens, places = original.layout(height, width, crops, IDS)
    assert processor.layout_tokens(height, width, {}) == tokens
    assert len(places) == tokens.count(IDS["patch"])


TINY = (
    original.Crops(side=32, patch=4, margins=(2, 2), most=4),
    original.Crops(side=32, patch=4, margins=(2, 2), most=12),
    original.Crops(side=32, patch=4, margins=(4, 2), most=6),
    original.Crops(side=32, patch=4, margins=(0, 4), most=6),
    original.Crops(side=32, patch=4, margins=(0, 0), most=5),
)


PIXEL_ERROR = 5e-4
"""Of a resize in float32, whose places have rounding errors: a thirtieth of one of 256 levels."""


def check_crops(size: tuple[int, int], crops: original.Crops) -> None:
    """Compare all that the encoder gets, and where its rows go."""
    processor, image = processor_of(crops), picture(size)
    made = processor.image_processor(image, {})
    patches, masks = original.cut(np.asarray(image), crops)
    assert made["pixel_values"].shape == patches.shape
    np.testing.assert_allclose(made["pixel_values"].numpy(), patches, rtol=0, atol=PIXEL_ERROR)
    np.testing.assert_allclose(made["image_masks"].numpy(), masks, rtol=0, atol=1e-6)
    tokens, places = original.layout(size[1], size[0], crops, IDS)
    where = made["image_input_idx"].numpy()
    found = {int(where[at]): at for at in zip(*np.nonzero(where >= 0), strict=True)}
    patch_tokens = [index for index, token in enumerate(tokens) if token == IDS["patch"]]
    assert [found[index] for index in patch_tokens] == places
    assert len(found) == len(places)


@given(sizes(120, 400), st.sampled_from(TINY))
@example((1, 1), TINY[0])
@example((16, 16), TINY[0])
@example((33, 95), TINY[1])
@example((2, 33), TINY[0])  # one pixel wide
@example((33, 2), TINY[0])
@some
def test_crops_their_order_and_their_masks(size: tuple[int, int], crops: original.Crops) -> None:
    if leaves_nothing(size, crops):
        with pytest.raises(MediaError, match="too narrow"):
            processor_of(crops).image_processor(picture(size), {})
        return
    check_crops(size, crops)


@pytest.mark.parametrize("size", [(640, 480), (101, 997), (1500, 301)])
def test_crops_by_the_published_settings(size: tuple[int, int]) -> None:
    check_crops(size, original.Crops())


# A grid of an odd number of patches is completed by zeros.
GRIDS = {"even": {}, "odd": {"image_input_size": [28, 28], "image_num_pos": 50}}
LAYERS = (-1, -3)


def rows_of(weights: dict[str, Array], patches: Array, masks: Array, eps: float) -> Array:
    """Return the reference's features of crops, [crops, pooled, hidden]."""
    found = []
    vision = within(weights, "model.vision_backbone")
    for crop, mask in zip(patches, masks, strict=True):
        features = original.encoded(crop, within(vision, "image_vit"), 2, eps, LAYERS)
        features = original.marked(features, mask, vision["pad_embed"])
        pooled = original.pooled(features, within(vision, "image_pooling_2d"), 2)
        found.append(original.projected(pooled, within(vision, "image_projector")))
    return np.stack(found)


@pytest.mark.parametrize("grid", GRIDS)
@torch.inference_mode()
def test_rows_of_crops(grid: str) -> None:
    config = tiny_config(**GRIDS[grid])
    model = build(config)
    count = config.image_num_pos - 1
    patches = drawn(3, count, 48)
    masks = np.random.default_rng(1).choice([-1.0, 0.0, 0.3, 1.0], (3, count))
    rows = model.get_image_features(tensor(patches), tensor(masks)).numpy()
    wanted = rows_of(arrays(model), patches, masks, config.image_norm_eps)
    np.testing.assert_allclose(rows, wanted, rtol=0, atol=1e-11)


def decoded(weights: dict[str, Array], x: Array, config: Any) -> Array:
    return original.decoded(
        x,
        within(weights, "model.transformer"),
        config.num_attention_heads,
        config.rope_theta,
        config.layer_norm_eps,
        norm_after=config.norm_after,
        clip=config.clip_qkv or np.inf,
    )


CLIP = {"clip_qkv": 0.4}
DECODERS = {"qwen2": {}, "olmo": OLMO, "clipped": CLIP, "olmo-clipped": {**OLMO, **CLIP}}


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("theta", [10000.0, 1000000.0])
@torch.inference_mode()
def test_the_decoder_and_its_positions(kind: str, theta: float) -> None:
    config = tiny_config(rope_theta=theta, **DECODERS[kind])
    model = build(config)
    weights, x = arrays(model), drawn(37, config.hidden_size)
    hidden = unpaged(model)(None, torch.arange(37), tensor(x))
    logits = model.compute_logits(hidden).numpy()
    np.testing.assert_allclose(logits, decoded(weights, x, config), rtol=0, atol=TABLE_ERROR)


def expected(folder: Path, text: str, images: list[Image.Image], config: MolmoConfig) -> list[int]:
    """Answer greedily from the files of a checkpoint, by the reference alone."""
    weights, crops = arrays(folder / "model.safetensors"), TINY[0]
    tokenizer = tiny_tokenizer()
    table = np.concatenate([weights[f"model.transformer.wte.{n}embedding"] for n in ("", "new_")])
    ids, rows = [tokenizer.eos_token_id], []
    for image in images:
        tokens, places = original.layout(image.height, image.width, crops, IDS)
        features = rows_of(weights, *original.cut(np.asarray(image), crops), config.image_norm_eps)
        ids += tokens
        rows += [features[place] for place in places]
    ids += tokenizer.encode(f" {text}", add_special_tokens=False)
    prompt = table[ids]
    at = np.array(ids) == IDS["patch"]
    if rows:
        features, every = np.stack(rows)[None], [(0, row) for row in range(len(rows))]
        prompt = original.embedded(prompt, features, every, at)
    found: list[int] = []
    for _ in range(MAX_TOKENS):
        x = np.concatenate([prompt, table[found]]) if found else prompt
        found.append(int(decoded(weights, x, config)[-1].argmax()))
    return found


@pytest.mark.parametrize("changes", [{}, OLMO], ids=["qwen2", "olmo"])
async def test_answers_of_the_engine(changes: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config(**changes)
    save(tmp_path, config)
    a, b, c, d = (picture(size) for size in ((41, 29), (97, 33), (15, 70), (7, 7)))
    prompts = [("What?", [a]), ("What?", [b]), ("Say", [c, d]), ("b", [d]), ("Tell", [])]
    outputs = await generated(tmp_path, prompts, max_model_len=1024)
    answers = [list(output.token_ids) for output in outputs]
    assert answers == [expected(tmp_path, text, images, config) for text, images in prompts]
    assert len(set(itertools.chain(*answers))) > 4
