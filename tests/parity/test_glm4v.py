"""GLM-4V with videos: greedy tokens equal transformers'.

A video's frames stand at the placeholder of images, each between an image's markers and behind
it the second at which it was taken. transformers 5.23 tells images from videos by that token's
id, finds rows of the one for places of both, and so refuses a prompt that has both
("Image features and image tokens do not match"): there its parts, put together, are the reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from tests.parity.families import FAMILIES, MAX_TOKENS, Case, _expect, hf_processor, save
from tests.parity.test_families import Model, check_all, engine_for
from tests.support.tiny import tiny_image
from tests.support.versions import NO_VIDEOS, skip_up_to

skip_up_to(5, 18, NO_VIDEOS)

VIDEO = "<|begin_of_video|><|video|><|end_of_video|>"
IMAGE = FAMILIES["glm4v"].place


def film(seed: int, num_frames: int, width: int, height: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), np.uint8)


@torch.inference_mode()
def expect_of_both(model: Any, processor: Any, text: str, image: Any, video: Any) -> Case:
    """transformers' encoders, positions, decoder and head, one after the other, without a cache."""
    metadata = hf.video_utils.VideoMetadata(
        total_num_frames=len(video), frames_indices=list(range(len(video)))
    )
    inputs = processor(
        text=text, images=[image], videos=[video], video_metadata=[metadata],
        do_sample_frames=False, return_tensors="pt",
    )  # fmt: skip
    inner, ids, kinds = model.model, inputs["input_ids"], inputs["mm_token_type_ids"]
    grids = {name: inputs[name] for name in ("image_grid_thw", "video_grid_thw")}
    positions, delta = inner.get_rope_index(ids, kinds, **grids)
    pixels = inputs["pixel_values"].double(), inputs["pixel_values_videos"].double()
    rows = (
        torch.cat(inner.get_image_features(pixels[0], grids["image_grid_thw"]).pooler_output),
        torch.cat(inner.get_video_features(pixels[1], grids["video_grid_thw"]).pooler_output),
    )
    length, found = ids.shape[1], []
    for _ in range(MAX_TOKENS):
        embeds = model.get_input_embeddings()(ids)
        for kind, each in enumerate(rows, start=1):
            embeds[:, :length][kinds == kind] = each
        more = torch.arange(length, ids.shape[1]) + int(delta)
        places = torch.cat([positions, more.expand(3, 1, -1)], dim=-1)
        output = inner.language_model(inputs_embeds=embeds, position_ids=places, use_cache=False)
        found.append(int(model.lm_head(output.last_hidden_state[0, -1]).argmax()))
        ids = torch.cat([ids, torch.tensor([[found[-1]]])], dim=1)
        if found[-1] == 2:
            break
    return Case(text, (image,), tuple(found), (video,))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("glm4v")
    reference = save(FAMILIES["glm4v"], folder)

    processor = hf_processor(folder)
    a, b, c = film(0, 6, 60, 60), film(1, 4, 56, 112), film(2, 3, 120, 60)
    pil_image = tiny_image(7).resize((60, 60))
    prompts = (
        (f"USER: {VIDEO}\nWhat happens? ASSISTANT:", (a,)),
        (f"USER: {VIDEO}\nWhat happens? ASSISTANT:", (b,)),
        (f"First {VIDEO} then {VIDEO} compare", (c, a)),
        (f"{VIDEO}{VIDEO}", (b, b)),
    )
    films = [
        Case(text, (), _expect(reference, processor, text, (), videos), videos)
        for text, videos in prompts
    ]
    with pytest.raises(ValueError, match="Image features and image tokens do not match"):
        _expect(reference, processor, IMAGE + VIDEO, (pil_image,), (a,))
    films += [
        expect_of_both(reference, processor, text, pil_image, b)
        for text in (f"Is {IMAGE} in {VIDEO} ?", f"{VIDEO}: is {IMAGE} in it?")
    ]
    return Model("glm4v", folder, (), tuple(films))


def test_the_cases_differ(model: Model) -> None:
    assert len({case.expected for case in model.videos}) >= 5


@pytest.mark.parametrize("budget", [1024, 13, 5, 1])
async def test_videos(model: Model, budget: int) -> None:
    async with engine_for(model.folder, max_num_batched_tokens=budget) as engine:
        await check_all(engine, model.videos)
        await check_all(engine, model.videos)  # with prefix and encoder caches warm


async def test_videos_without_a_prefix_cache(model: Model) -> None:
    options = {"max_num_batched_tokens": 31, "enable_prefix_caching": False}
    async with engine_for(model.folder, **options) as engine:
        for case in model.videos:
            await check_all(engine, (case,))
        await check_all(engine, model.videos)
        assert engine.statistics().encoder_items_run == 4
