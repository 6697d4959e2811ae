"""Names and bytes that try to pass for somebody else's: every item is exactly itself.

test_media.py says which incident is held by which test.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from aioengine import AsyncEngine, Embeddings, Prompt, RequestOutput
from aioengine.errors import InvalidRequestError, MediaError
from tests.engine.test_modalities import FILM, SOUND, mkv, samples, wav
from tests.support.engines import encoded, greedy
from tests.support.hostile import MIB, Attack, Tokens, company, outcome, repel
from tests.support.tiny import tiny_image

pytestmark = pytest.mark.asyncio(loop_scope="module")

HIDDEN = 48


def named(item: Any, uuid: str | None = None, **options: Any) -> Prompt:
    return Prompt(text="<image>", media={"image": [item]}, uuids={"image": [uuid]}, **options)


async def ask(engine: AsyncEngine, prompt: Any) -> RequestOutput:
    return await engine.generate(prompt, greedy(6))


async def tell_apart(engine: AsyncEngine, prompts: list[Any]) -> list[RequestOutput]:
    """Each prompt's answer with warm caches, which must be its answer with cold ones."""
    cold = []
    for prompt in prompts:
        await engine.reset_caches()
        cold.append((await ask(engine, prompt)).token_ids)
    await engine.reset_caches()
    warm = [await ask(engine, prompt) for prompt in prompts]
    assert [output.token_ids for output in warm] == cold
    assert [output.usage.encoder_cached_items for output in warm] == [0] * len(prompts)
    await engine.reset_caches()
    beside = await asyncio.gather(*(ask(engine, prompt) for prompt in prompts))
    assert [output.token_ids for output in beside] == cold
    return warm


async def test_equal_bytes_that_mean_other_pixels(engine: AsyncEngine) -> None:
    generator = np.random.default_rng(3)
    data = generator.integers(0, 256, 1800, dtype=np.uint8).tobytes()
    floats = generator.random((30, 40), dtype=np.float32)
    items = [
        Image.frombytes("L", (60, 30), data),
        Image.frombytes("L", (30, 60), data),
        Image.frombytes("RGB", (20, 30), data),
        Image.frombytes("RGB", (30, 20), data),
        np.frombuffer(data, np.uint8).reshape(30, 60),
        floats,
        floats.view(np.uint8),
        floats.reshape(40, 30),
    ]
    answers = [output.token_ids for output in await tell_apart(engine, [*map(named, items)])]
    assert answers[0] == answers[4]  # the same image in two forms: another item, one answer
    assert len(set(answers)) > 3


async def test_options_are_part_of_what_an_item_is(engine: AsyncEngine) -> None:
    item = encoded(tiny_image(40))
    options: list[dict[str, Any]] = [
        {},
        {"do_normalize": False},
        {"image_mean": [0.1, 0.2, 0.3]},
        {"image_mean": [0.3, 0.2, 0.1]},
        {"size": {"shortest_edge": 48}},
        {"images_kwargs": {"size": {"shortest_edge": 64}}},
    ]
    outputs = await tell_apart(engine, [named(item, mm_processor_kwargs=o) for o in options])
    assert len({output.token_ids for output in outputs}) == len(options)


async def test_a_suffix_is_no_option(engine: AsyncEngine) -> None:
    """What stands behind an image's end changes no pixel, but it is another file."""
    item = encoded(tiny_image(41))
    option = {"do_normalize": False}
    prompts = [
        named(item),
        named(item + b"do_normalize"),
        named(item + b"do_normalize\0"),
        named(item, mm_processor_kwargs=option),
        named(item + b"tenant"),
        named(item, cache_salt="tenant"),
        named(item + b"ten", cache_salt="ant"),
        named(item, cache_salt=""),
    ]
    answers = [output.token_ids for output in await tell_apart(engine, prompts)]
    assert len(set(answers)) == 2


async def test_sampling_of_a_video_is_part_of_its_identity(engine: AsyncEngine) -> None:
    film = mkv(np.random.default_rng(5).integers(0, 256, (8, 32, 48, 3), dtype=np.uint8))
    options: list[dict[str, Any]] = [
        {}, {"num_frames": 2}, {"num_frames": 3}, {"fps": 5}, {"videos_kwargs": {"num_frames": 7}},
    ]  # fmt: skip
    prompts = [
        Prompt(text=FILM, media={"video": [film]}, mm_processor_kwargs=each) for each in options
    ]
    outputs = await tell_apart(engine, prompts)
    lengths = [output.usage.prompt_tokens - outputs[1].usage.prompt_tokens for output in outputs]
    assert lengths == [2 * (frames - 2) for frames in (8, 2, 3, 4, 7)]


async def test_images_in_turn_under_one_text(engine: AsyncEngine) -> None:
    text = "There is a red circle above a blue square. <image> What is in the picture?"
    prompts = [Prompt(text=text, media={"image": [tiny_image(seed)]}) for seed in (42, 43, 44)]
    outputs = await tell_apart(engine, prompts)
    answers = [output.token_ids for output in outputs]
    assert len(set(answers)) == 3
    for _ in range(2):
        for prompt, answer in zip(prompts, answers, strict=True):
            again = await ask(engine, prompt)
            assert again.token_ids == answer and again.usage.cached_tokens > 0


async def test_one_name_for_many_payloads(engine: AsyncEngine, expected: Tokens) -> None:
    rows = torch.full((4, HIDDEN), 0.25)
    payloads = [encoded(tiny_image(45)), encoded(tiny_image(46)), tiny_image(47), Embeddings(rows)]
    plain = [(await ask(engine, named(item))).token_ids for item in payloads]
    await engine.reset_caches()
    for item, answer in zip(payloads, plain, strict=True):
        assert (await ask(engine, named(item, "mine"))).token_ids == answer
        broken = Attack(named(b"broken", "mine"), MediaError, "images[0]")
        await repel(engine, expected, [broken])
        assert (await ask(engine, named(item, "mine"))).token_ids == answer
    await engine.reset_caches()
    beside = await asyncio.gather(*(ask(engine, named(item, "mine")) for item in payloads))
    assert [output.token_ids for output in beside] == plain


async def test_a_name_for_rows_is_no_name_for_the_image_before(engine: AsyncEngine) -> None:
    rows = Embeddings(torch.full((4, HIDDEN), 0.25))
    before = await ask(engine, named(tiny_image(48), "mine"))
    now = await ask(engine, named(rows, "mine"))
    found = await outcome(engine, named(None, "mine"), params=greedy(6))
    if isinstance(found, RequestOutput):
        assert found.token_ids == now.token_ids != before.token_ids
    else:
        assert isinstance(found, MediaError) and found.parameter == "images[0]"


async def test_a_name_is_never_content(engine: AsyncEngine, expected: Tokens) -> None:
    await engine.reset_caches()
    secret, other = encoded(tiny_image(49)), encoded(tiny_image(50))
    answers = [(await ask(engine, named(item))).token_ids for item in (secret, other)]
    keys = list(engine._core.input_processor.media.cache._items)
    assert len(keys) == 2
    digest = hashlib.sha256(secret).hexdigest()
    names = [*keys, digest, f"image {digest}", "", ".", "../..", "a/b", "a\\b", "\0", "content"]
    names += ["u" * MIB, "\ud800", '{"content": 1}', "{}", "%s%n", "None"]
    for name in names:
        found = await outcome(engine, named(None, name))
        assert isinstance(found, MediaError) and found.parameter == "images[0]"
        assert (await ask(engine, named(other, name))).token_ids == answers[1]
    assert (await ask(engine, named(secret))).token_ids == answers[0]
    nothing = [Attack(named(None, f"{name} "), MediaError, "images[0]") for name in names]
    await repel(engine, expected, nothing)


async def test_a_name_in_two_modalities(engine: AsyncEngine) -> None:
    film = np.random.default_rng(6).integers(0, 256, (3, 32, 48, 3), dtype=np.uint8)
    media = {"image": [tiny_image(51)], "audio": [wav(samples(1))], "video": [mkv(film)]}
    text = f"<image> {SOUND} {FILM}"
    plain = await ask(engine, Prompt(text=text, media=media))
    await engine.reset_caches()
    uuids = {modality: ["same"] for modality in media}
    for items in (media, {key: [None] for key in media}, media):
        output = await ask(engine, Prompt(text=text, media=items, uuids=uuids))
        assert output.token_ids == plain.token_ids
    await engine.reset_caches()
    await ask(engine, named(media["image"][0], "only"))
    for modality, place in (("audio", SOUND), ("video", FILM)):
        prompt = Prompt(text=place, media={modality: [None]}, uuids={modality: ["only"]})
        found = await outcome(engine, prompt)
        assert isinstance(found, MediaError) and found.parameter == f"{modality}s[0]"


async def test_tenants_share_no_features(engine: AsyncEngine, expected: Tokens) -> None:
    item = encoded(tiny_image(52))
    await engine.reset_caches()
    await ask(engine, named(item, "cat", cache_salt="one"))
    for salt in ("two", "", None, "one\0", "on"):
        before = engine.statistics()
        await repel(engine, expected, [
            Attack(named(None, "cat", cache_salt=salt), MediaError, "images[0]")
        ])  # fmt: skip
        await engine.reset_caches()
        await ask(engine, named(item, "cat", cache_salt="one"))
        found = await ask(engine, named(item, "cat", cache_salt=salt))
        after = engine.statistics()
        assert found.usage.cached_tokens == found.usage.encoder_cached_items == 0
        decoded = after.stages["decode"].count - before.stages["decode"].count
        assert decoded == 2 + 4  # the company's two images, twice


async def test_a_salt_of_any_text(engine: AsyncEngine, expected: Tokens) -> None:
    item = tiny_image(53)
    plain = (await ask(engine, named(item))).token_ids
    for salt in ("s" * MIB, "\0", "../..", "\ud800"):
        found = await outcome(engine, named(item, cache_salt=salt), params=greedy(6))
        if isinstance(found, RequestOutput):
            assert found.token_ids == plain and found.usage.encoder_cached_items == 0
        else:
            assert isinstance(found, InvalidRequestError) and found.parameter == "cache_salt"
    assert await company(engine) == expected
