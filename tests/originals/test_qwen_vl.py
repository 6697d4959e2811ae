"""Qwen-VL's own modules and processor beside the reference written without them."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from aioengine.errors import InvalidRequestError
from aioengine.models.qwen_vl.modeling import QwenTower
from aioengine.processors.hf.qwen_vl import QwenVLProcessor
from tests.originals import qwen_vl as original
from tests.originals import rotary
from tests.originals.arithmetic import Array, within
from tests.originals.calling import (
    MAX_TOKENS,
    PARAMS,
    TABLE_ERROR,
    arrays,
    drawn,
    generated,
    picture,
    sizes,
    some,
    tensor,
)
from tests.parity.test_qwen_vl import RANKS, START, TINY, build, save, tokenizer
from tests.parity.whole import engine_for, unpaged
from tests.support.tiny import draw_weights

HEADS, BASE, TRAINED = TINY["num_attention_heads"], TINY["rotary_emb_base"], TINY["seq_length"]
VISUAL = TINY["visual"]
LONG = 1024
"""A `seq_length` that holds two images of 256 places."""


@given(sizes(200, 2000), st.sampled_from([28, 56, 448]))
@example((1, 1), 448)
@example((448, 448), 448)
@some
def test_pixels(size: tuple[int, int], side: int) -> None:
    image = picture(size)
    made = QwenVLProcessor(tokenizer(), side)(images=[image])["pixel_values"]
    wanted = original.preprocessed(image, side).transpose(2, 0, 1)
    np.testing.assert_allclose(made[0].numpy(), wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("image_size", "n_queries", "output_dim"),
    [(28, 4, 128), (112, 256, 256), (119, 256, 128), (70, 25, 256), (224, 256, 128)],
    ids=["tiny", "as-trained", "17x17-patches", "few-queries", "32x32-patches"],
)
@torch.inference_mode()
def test_rows_of_an_image(image_size: int, n_queries: int, output_dim: int) -> None:
    visual = {**VISUAL, "image_size": image_size, "n_queries": n_queries, "output_dim": output_dim}
    tower: Any = QwenTower(visual, output_dim)
    draw_weights(tower)
    tower = tower.double().eval()
    pixels = drawn(image_size, image_size, 3)
    rows = tower(tensor(pixels.transpose(2, 0, 1))[None])[0].numpy()
    wanted = original.seen(pixels, arrays(tower), visual["patch_size"], visual["heads"])
    assert wanted.shape == (n_queries, output_dim)
    np.testing.assert_allclose(rows, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("patches", [16, 81, 256, 289, 1024])
@torch.inference_mode()
def test_the_resampler_with_its_published_positions(patches: int) -> None:
    """Whatever is beside them: with drawn positions a mixed-up order of theirs would show too."""
    tower: Any = QwenTower({**VISUAL, "n_queries": 256, "output_dim": 256}, 256)
    draw_weights(tower)
    pool = tower.double().eval().attn_pool
    pool.pos_embed.copy_(tensor(original.sincos(256, 16)))
    features = drawn(patches, VISUAL["width"])
    rows = pool(tensor(features)[None])[0].numpy()
    np.testing.assert_allclose(rows, original.resampled(features, arrays(pool)), atol=1e-11)


def decoded(weights: dict[str, Array], x: Array, trained: int = TRAINED) -> Array:
    return original.decoded(x, weights, HEADS, BASE, trained)


@pytest.mark.parametrize("length", [1, 37, TRAINED])
@torch.inference_mode()
def test_the_decoder_and_its_positions(length: int) -> None:
    """Up to `seq_length`, where dynamic NTK and logn begin: longer ones are refused."""
    model = build()
    weights, x = arrays(model), drawn(length, TINY["hidden_size"])
    hidden = unpaged(model)(None, torch.arange(length), tensor(x))
    logits = model.compute_logits(hidden).numpy()
    np.testing.assert_allclose(logits, decoded(weights, x), rtol=0, atol=5 * TABLE_ERROR)


def test_where_long_prompts_are_scaled() -> None:
    """The rules that are not built begin with the first token beyond `seq_length`."""
    assert rotary.ntk_base(BASE, 32, TRAINED, TRAINED) == BASE
    assert rotary.ntk_base(BASE, 32, TRAINED + 1, TRAINED) == BASE * 3 ** (32 / 30)
    factors = rotary.logn(np.arange(TRAINED + 1.0), TRAINED)
    assert (factors[:TRAINED] == 1).all() and factors[TRAINED] > 1


def expected(
    weights: dict[str, Array], text: str, images: list[Image.Image], n_queries: int
) -> list[int]:
    """Answer greedily by the reference alone: `*` in a text stands for an image."""
    table = weights["transformer.wte.weight"]
    tower = within(weights, "transformer.visual")
    ids: list[int] = []
    rows = []
    parts = text.split("*")
    for part, image in itertools.zip_longest(parts, images):
        ids += tokenizer()(part)["input_ids"]
        if image is not None:
            ids += original.placeholders(START, n_queries)
            pixels = original.preprocessed(image, VISUAL["image_size"])
            rows.append(original.seen(pixels, tower, VISUAL["patch_size"], VISUAL["heads"]))
    prompt = table[ids]
    if rows:
        prompt[np.array(ids) == START + 2] = np.concatenate(rows)
    found: list[int] = []
    for _ in range(MAX_TOKENS):
        x = np.concatenate([prompt, table[found]]) if found else prompt
        found.append(int(decoded(weights, x, LONG)[-1].argmax()))
    return found


@pytest.mark.parametrize("n_queries", [4, 256])
async def test_answers_of_the_engine(n_queries: int, tmp_path: Path) -> None:
    """With as many places as the published model has, 256, and with few of them."""
    settings = copy.deepcopy(TINY)
    settings["visual"]["n_queries"] = n_queries
    settings["seq_length"] = LONG
    model = build(settings)
    save(model, settings, tmp_path)
    images = [picture(size) for size in ((41, 29), (1, 50), (97, 33), (7, 7))]
    place = "Picture 1: <img></img>\n"
    prompts = [
        (f"{place}What?", images[:1]),
        (f"{place}What?", images[1:2]),
        (f"{place}and {place}Which?", images[2:]),
        ("no picture here, tell a story", []),
    ]
    outputs = await generated(tmp_path, prompts)
    weights = arrays(tmp_path / "model.safetensors")
    answers = [list(output.token_ids) for output in outputs]
    assert answers == [
        expected(weights, text.replace("<img></img>", "*"), images, n_queries)
        for text, images in prompts
    ]
    assert len(set(itertools.chain(*answers))) > 4
    first = tokenizer()(prompts[0][0].partition("<img>")[0])["input_ids"]
    end = len(first) + n_queries + 2
    assert list(outputs[0].prompt_token_ids[len(first) : end]) == original.placeholders(
        START, n_queries
    )


async def test_what_the_rules_for_long_prompts_would_change_is_refused(tmp_path: Path) -> None:
    save(build(), TINY, tmp_path)
    async with engine_for(tmp_path) as engine:
        ids = [index % len(RANKS) for index in range(TRAINED + 1)]
        with pytest.raises(InvalidRequestError):
            await engine.generate(ids, PARAMS)
