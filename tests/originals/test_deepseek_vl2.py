"""DeepSeek-VL2's own modules and processor beside the reference written without them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from aioengine.errors import MediaError
from aioengine.processors.hf.deepseek_vl2 import DeepseekVL2Processor
from tests.originals import deepseek_vl2 as original
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
from tests.parity.test_deepseek_vl2 import (
    CANDIDATES,
    MODELS,
    SIDE,
    YARN,
    build,
    processor_of,
    published,
    save,
    settings_of,
)
from tests.parity.whole import unpaged
from tests.processors.conftest import make_tokenizer

GRIDS = [(across, down) for across in range(1, 10) for down in range(1, 9 // across + 1)]
PUBLISHED = [(384 * m, 384 * n) for m, n in sorted(GRIDS, key=lambda grid: grid[0] * grid[1])]
"""Tiles of 384 pixels, up to nine, as in the paper's section 2."""


def make(candidates: Sequence[original.Size], patch: int) -> DeepseekVL2Processor:
    tokenizer = make_tokenizer("bytes")
    tokenizer.chat_template = None
    return DeepseekVL2Processor(
        tokenizer, candidate_resolutions=candidates, patch_size=patch, downsample_ratio=2
    )


def has_no_canvas(size: original.Size, candidates: Sequence[original.Size]) -> bool:
    try:
        original.chosen(size, candidates)
    except ValueError:
        return True
    return False


@given(sizes(1500, 6000), st.randoms(use_true_random=False), st.sampled_from([1, 2, 3, 4]))
@example((384, 384), None, 1)
@example((768, 768), None, 1)
@example((385, 384), None, 1)
@example((1, 1), None, 1)
@many
def test_canvases_and_tokens(size: original.Size, random: Any, images: int) -> None:
    candidates = list(PUBLISHED)
    if random is not None:
        random.shuffle(candidates)
        candidates.sort(key=lambda canvas: canvas != (384, 384))
    processor = make(candidates, 14)
    cropping = images <= original.MAX_TILED_IMAGES
    if cropping and has_no_canvas(size, candidates):
        with pytest.raises(MediaError, match="too narrow"):
            processor.count_tiles(size, cropping=True)
        return
    wide, high = original.chosen(size, candidates, images)
    grid = (wide // 384, high // 384)
    assert processor.count_tiles(size, cropping=cropping) == grid
    assert processor.tile_side == original.cells(384, 14, 2) == 14


@given(sizes(150, 600), st.sampled_from([1, 2, 3]))
@example((1, 1), 1)
@example((SIDE, SIDE), 1)
@example((SIDE + 1, SIDE - 1), 2)
@some
def test_tiles_and_their_order(size: original.Size, images: int) -> None:
    processor, image = make(CANDIDATES, 7), picture(size)
    cropping = images <= original.MAX_TILED_IMAGES
    if cropping and has_no_canvas(size, CANDIDATES):
        with pytest.raises(MediaError, match="too narrow"):
            processor(images=[image], cropping=cropping)
        return
    made = processor(images=[image], cropping=cropping)
    wanted = original.tiles(image, CANDIDATES, images).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(made["pixel_values"].numpy(), wanted, rtol=0, atol=1e-6)
    wide, high = original.chosen(size, CANDIDATES, images)
    assert made["images_spatial_crop"].tolist() == [[wide // SIDE, high // SIDE]]


@pytest.mark.parametrize("patches", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("ratio", "depth"), [(2, 2), (2, 3), (3, 2)])
@torch.inference_mode()
def test_blocks_of_patches(patches: int, ratio: int, depth: int) -> None:
    settings = settings_of("tiny")
    changes = {"downsample_ratio": ratio, "depth": depth}
    settings["projector_config"] = {**settings["projector_config"], **changes}
    projector = build(settings).projector
    features = drawn(patches * patches, 32)
    rows = projector(tensor(features)[None])[0].numpy()
    wanted = original.projected(features, arrays(projector), ratio)
    np.testing.assert_allclose(rows, wanted, rtol=0, atol=1e-11)


def rows_of(
    weights: dict[str, Array], tiles: Array, grid: original.Size, whole_first: bool
) -> Array:
    """Return the rows of one image in `grid` tiles, [placeholders, hidden]."""
    vision, projector = within(weights, "vision"), within(weights, "projector")
    features = [
        original.projected(original.encoded(tile, vision, 7, 2), projector, 2) for tile in tiles
    ]
    return original.arranged(
        np.stack(features),
        grid,
        weights["image_newline"],
        weights["view_seperator"],
        whole_first=whole_first,
    )


@pytest.mark.parametrize("place", ["head", "tail"])
@pytest.mark.parametrize("grid", [(1, 1), (3, 1), (1, 3), (2, 2), (2, 3)])
@torch.inference_mode()
def test_rows_of_an_image(grid: original.Size, place: str) -> None:
    settings = settings_of("tiny")
    settings["global_view_pos"] = place
    model = build(settings)
    tiles = drawn(1 + grid[0] * grid[1], SIDE, SIDE, 3)
    pixels = tensor(tiles.transpose(0, 3, 1, 2))
    (rows,) = model.get_image_features(pixels, torch.tensor([grid]))
    wanted = rows_of(arrays(model), tiles, grid, whole_first=place == "head")
    assert len(wanted) == original.placeholders(grid, original.cells(SIDE, 7, 2))
    np.testing.assert_allclose(rows.numpy(), wanted, rtol=0, atol=1e-11)


LINEAR = {"type": "linear", "factor": 3.0}
LANGUAGES: dict[str, dict[str, Any]] = {
    "tiny": MODELS["tiny"],
    "tiny-grouped-heads": {**MODELS["tiny"], "num_key_value_heads": 2},
    "tiny-linear": {**MODELS["tiny"], "rope_scaling": LINEAR},
    "tiny-linear-mscale": {**MODELS["tiny"], "rope_scaling": {**LINEAR, "mscale_all_dim": 1.0}},
    "small": {**MODELS["small"], "rope_scaling": None},
    "small-theta": {**MODELS["small"], "rope_scaling": None, "rope_theta": 250.0},
    "small-yarn": MODELS["small"],
    "small-yarn-defaults": {
        **MODELS["small"],
        "rope_scaling": {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 700},
    },
    "small-linear": {**MODELS["small"], "rope_scaling": {**LINEAR, "mscale_all_dim": 0.7}},
    "small-groups": {
        **MODELS["small"], "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
    },
    "base": MODELS["base"],
    "base-yarn": {**MODELS["base"], "rope_scaling": {**YARN, "mscale": 1.0}},
}  # fmt: skip


def language_of(settings: dict[str, Any]) -> original.Language:
    known = {each.name for each in fields(original.Language)}
    found = {name: value for name, value in settings.items() if name in known and value is not None}
    return original.Language(**{"use_mla": True, **found})


def language_weights(model: Any) -> dict[str, Array]:
    named = {name: tensor.double().numpy() for name, tensor in published(model).items()}
    return within(named, "language")


@pytest.mark.parametrize("name", LANGUAGES)
@torch.inference_mode()
def test_the_decoder_and_its_positions(name: str) -> None:
    settings = LANGUAGES[name]
    model = build({**settings_of("tiny"), "language_config": settings})
    weights, x = language_weights(model), drawn(41, 48)
    hidden = unpaged(model)(None, torch.arange(41), tensor(x))
    logits = model.compute_logits(hidden).numpy()
    wanted = original.decoded(x, weights, language_of(settings))
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=5 * TABLE_ERROR)


def expected(
    folder: Path, name: str, ids: list[int], images: list[Image.Image], place: int
) -> list[int]:
    """Answer greedily from the files of a checkpoint, by the reference alone."""
    weights = arrays(folder / "model.safetensors")
    language, settings = within(weights, "language"), language_of(MODELS[name])
    table = language["model.embed_tokens.weight"]
    prompt: list[Array] = []
    left = iter(images)
    for token in ids:
        if token != place:
            prompt.append(table[token])
            continue
        image = next(left)
        wide, high = original.chosen(image.size, CANDIDATES, len(images))
        tiles = original.tiles(image, CANDIDATES, len(images))
        prompt += list(rows_of(weights, tiles, (wide // SIDE, high // SIDE), whole_first=True))
    found: list[int] = []
    for _ in range(MAX_TOKENS):
        x = np.stack([*prompt, *table[found]])
        found.append(int(original.decoded(x, language, settings)[-1].argmax()))
    return found


@pytest.mark.parametrize("name", MODELS)
async def test_answers_of_the_engine(name: str, tmp_path: Path) -> None:
    settings = settings_of(name)
    save(build(settings), settings, tmp_path)
    images = [picture(size) for size in ((41, 29), (97, 33), (15, 70), (7, 7), (3, 80))]
    prompts = [
        ("USER: <image>\nWhat? ASSISTANT:", images[:1]),
        ("<image>", images[1:2]),
        ("<image> and <image>", images[2:4]),
        ("<image><image><image> Which?", images[2:]),
        ("tell a story", []),
    ]
    outputs = await generated(tmp_path, prompts)
    answers = [list(output.token_ids) for output in outputs]
    processor = processor_of(tmp_path)
    assert answers == [
        expected(
            tmp_path, name, processor.tokenizer(text)["input_ids"], images, processor.image_token_id
        )
        for text, images in prompts
    ]
    assert len(set(itertools.chain(*answers))) > 4


async def test_an_image_of_which_nothing_would_be_seen_is_refused(tmp_path: Path) -> None:
    settings = settings_of("tiny")
    save(build(settings), settings, tmp_path)
    for size in ((1, 85), (85, 1)):
        with pytest.raises(MediaError, match="too narrow"):
            await generated(tmp_path, [("<image>", [picture(size)])])
    outputs = await generated(tmp_path, [("<image>", [picture((1, 84))])])
    assert len(outputs[0].token_ids) == MAX_TOKENS
