"""SmolVLM: greedy tokens equal transformers' `generate`, for images and videos."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf

from aioengine.errors import MediaError
from aioengine.processors.hf import smolvlm
from aioengine.processors.hf.smolvlm import SmolVLMProcessor, SmolVLMVideoProcessor
from tests.parity.families import Case, Family, _expect, cases, hf_processor, id_of, llama, save
from tests.parity.test_families import PARAMS, Model, check_all, engine_for
from tests.processors.make_smolvlm_goldens import SETTINGS, processor_of
from tests.support.engines import settled
from tests.support.versions import NO_VIDEOS, skip_up_to

skip_up_to(5, 18, NO_VIDEOS)


def model_of(tokenizer: Any) -> Any:
    config = hf.SmolVLMConfig(
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
        },
        text_config=llama(tokenizer),
        image_token_id=id_of(tokenizer, "<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    return hf.SmolVLMForConditionalGeneration(config)


FAMILY = Family(
    processor=lambda: processor_of(SmolVLMProcessor, SmolVLMVideoProcessor),
    model=model_of,
    place="<image>",
)


def film(seed: int, num_frames: int, width: int, height: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), np.uint8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("smolvlm")
    reference = save(FAMILY, folder)
    SmolVLMVideoProcessor(**SETTINGS).save_pretrained(folder)

    processor = hf_processor(folder)
    assert type(processor).__name__ == "SmolVLMProcessor"
    a, b, c = film(0, 3, 60, 40), film(1, 5, 30, 61), film(2, 3, 44, 44)
    prompts = (
        ("User: <video>What happens? Assistant:", (a,)),
        ("User: <video>What happens? Assistant:", (b,)),
        ("First <video> then <video> compare", (c, a)),  # HF would fill up a shorter one
    )
    films = tuple(
        Case(text, (), _expect(reference, processor, text, (), videos), videos)
        for text, videos in prompts
    )
    return Model("smolvlm", folder, cases(FAMILY, reference, processor), films)


def test_the_cases_differ(model: Model) -> None:
    assert len({case.expected for case in model.cases}) >= 5
    assert len({case.expected for case in model.videos}) == 3


@pytest.mark.parametrize("budget", [1024, 13, 5, 1])
async def test_tokens_equal_generate(model: Model, budget: int) -> None:
    async with engine_for(model.folder, max_num_batched_tokens=budget) as engine:
        for case in model.cases[:2]:
            output = await engine.generate(case.text, PARAMS, images=case.images)
            case.check(output.token_ids)
        await engine.reset_caches()
        together = model.cases + (model.videos if budget > 1 else ())
        await check_all(engine, together)
        await check_all(engine, together)  # with prefix and encoder caches warm
        await settled(engine)
        now = engine.statistics()
        assert now.prefix_hit_tokens > 0 and now.kv_blocks_free == now.kv_blocks_total


async def test_tokens_equal_generate_without_a_prefix_cache(model: Model) -> None:
    options = {"max_num_batched_tokens": 31, "enable_prefix_caching": False}
    async with engine_for(model.folder, **options) as engine:
        await check_all(engine, model.cases + model.videos)
        await check_all(engine, model.cases + model.videos)  # with the encoder cache warm
        assert engine.statistics().encoder_items_run == 6


async def test_a_image_beside_a_video(model: Model) -> None:
    """HF's processor loses the image: a video's tensors have the same names. Here it tells."""
    (video,), text = model.videos[0].videos, "Is <image> in <video> ?"
    async with engine_for(model.folder) as engine:
        found = {
            (await engine.generate(text, PARAMS, images=case.images, videos=[video])).token_ids
            for case in model.cases[:3]
        }
        assert len(found) == 3


async def test_versions_that_were_not_compared(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smolvlm, "_COMPARED", ((5, 1), (5, 2)))
    async with engine_for(model.folder) as engine:
        await check_all(engine, model.cases[:2])
        case = replace(model.videos[0])
        with pytest.raises(MediaError, match="torchvision"):
            await engine.generate(case.text, PARAMS, videos=case.videos)


PUBLISHED_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


async def test_videos_in_chats(model: Model, tmp_path: Path) -> None:
    """The published template has no place for them; transformers' own for that case has."""
    shutil.copytree(model.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(PUBLISHED_TEMPLATE)
    content = [
        {"type": "video", "video": model.videos[0].videos[0]},
        {"type": "image", "image": model.cases[0].images[0]},
        {"type": "text", "text": "What happens?"},
    ]
    async with engine_for(tmp_path) as engine:
        found = engine.processor.info.get_hf_processor().chat_template
        place = "{% elif line['type'] == 'video' %}{{ '<video>' }}"
        assert found.replace(place, "") == PUBLISHED_TEMPLATE != found
        output = await engine.generate([{"role": "user", "content": content}], PARAMS)
        text = engine.tokenizer.decode(output.prompt_token_ids)
        assert text.count("Frame from") == 3 and text.index("Frame from") < text.index("What")
        assert output.usage.encoder_items == 2
