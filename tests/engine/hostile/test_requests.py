"""Hostile prompts, messages and options: refused for what they are, and nobody held up meanwhile.

test_media.py says which incident is held by which test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioengine import AsyncEngine, MediaConfig, Prompt, RequestOutput
from aioengine.errors import (
    AioEngineError,
    InvalidRequestError,
    PlaceholderMismatchError,
    PromptTooLongError,
    UnsupportedModalityError,
)
from tests.engine.test_modalities import FILM, SOUND
from tests.support.engines import encoded, greedy, running_engine
from tests.support.hostile import MIB, Attack, Tokens, bounded_memory, company, outcome, repel
from tests.support.tiny import IMAGE, tiny_image

pytestmark = pytest.mark.asyncio(loop_scope="module")


# ---- text and messages


async def test_marks_in_plain_text(engine: AsyncEngine, expected: Tokens) -> None:
    """Text that spells placeholders where there are no media is text, or a mismatch."""
    marks = ["<|vision_start|><|image_pad|><|vision_end|>", SOUND, FILM, "[IMG][IMG_END]"]
    for text in marks:
        found = await outcome(engine, text)
        assert isinstance(found, RequestOutput | PlaceholderMismatchError)
    mismatched = ["<image>" * 3, "<s><image></s>", [1, IMAGE, 5], [IMAGE] * 16, "a<image"]
    attacks = [Attack(m, PlaceholderMismatchError, "prompt") for m in mismatched[:-1]]
    await repel(engine, expected, attacks)
    assert isinstance(await outcome(engine, mismatched[-1]), RequestOutput)


async def test_marks_in_the_answer(engine: AsyncEngine, expected: Tokens) -> None:
    """A model that says a placeholder's token has said a token, not asked for an image."""
    say = greedy(6, allowed_token_ids=[IMAGE])
    output = await engine.generate("<image> and", say, images=[tiny_image(53)])
    assert output.token_ids == (IMAGE,) * 6
    again = [1, *output.token_ids]
    await repel(engine, expected, [Attack(again, PlaceholderMismatchError, "prompt")])


def said(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **more}]


LOOP = "{% for i in range(10**9) %}{% for j in range(10**9) %}x{% endfor %}{% endfor %}"


async def test_messages_bring_no_template(engine: AsyncEngine, expected: Tokens) -> None:
    keys = {
        "chat_template": LOOP,
        "chat_template_kwargs": {"tokenize": True, "chat_template": LOOP},
        "tools": [{"name": LOOP}],
        "documents": [LOOP],
        "k" * MIB: 1,
    }
    attacks = [
        Attack(said("a", **{key: value}), InvalidRequestError, "messages[0]")
        for key, value in keys.items()
    ]
    role = [{"role": LOOP, "content": "a"}]
    attacks.append(Attack(role, InvalidRequestError, "messages[0].role"))
    await repel(engine, expected, attacks)
    for content in (LOOP, [{"type": "text", "text": LOOP, "chat_template": LOOP}]):
        output = await engine.generate(said(content), greedy(2))
        assert "range(10**9)" in engine.tokenizer.decode(output.prompt_token_ids)


def itself() -> list[Any]:
    parts: list[Any] = []
    parts.append(parts)
    return parts


ODD_CONTENTS: dict[str, tuple[Callable[[], Any], str]] = {
    "number": (lambda: 5, ""),
    "true": (lambda: True, ""),
    "nothing": (lambda: None, ""),
    "mapping": (lambda: {"type": "text"}, ""),
    "set": (lambda: {1}, ""),
    "an iterator": (lambda: iter(range(1_000_000)), ""),
    "very many numbers": (lambda: range(1_000_000), ""),
    "lists": (lambda: [[["a"]]], "[0]"),
    "itself": (itself, "[0]"),
    "number in a list": (lambda: ["a", 5], "[1]"),
}


@pytest.mark.parametrize("name", ODD_CONTENTS)
async def test_odd_messages(engine: AsyncEngine, expected: Tokens, name: str) -> None:
    make, place = ODD_CONTENTS[name]
    attack = Attack(said(make()), InvalidRequestError, f"messages[0].content{place}")
    await repel(engine, expected, [attack])


async def test_odd_lists_of_messages(engine: AsyncEngine, expected: Tokens) -> None:
    attacks = [
        Attack(Prompt(messages=messages), InvalidRequestError, place)
        for messages, place in (
            ([], "messages"),
            ([None], "messages[0]"),
            ([said("a")], "messages[0]"),
        )
    ]
    attacks.append(Attack(Prompt(messages=range(1_000_000)), PromptTooLongError, "prompt"))
    await repel(engine, expected, attacks)


async def test_very_many_parts(engine: AsyncEngine, expected: Tokens) -> None:
    """They add no token, and cost all the same. The eye on the loop looks on."""
    part = {"type": "text", "text": ""}
    for messages in (said([part] * 400_000), said([part] * 1000) * 400):
        await outcome(engine, messages)
    assert await company(engine) == expected


async def test_very_many_images(folder: Path, expected: Tokens) -> None:
    """Each takes a token at least, so it is known at once that the prompt is too long."""
    asked: list[str] = []

    async def fetcher(url: str) -> bytes:
        asked.append(url)
        return encoded(tiny_image(54))

    urls = [f"https://a.test/{number}" for number in range(600)]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    async with running_engine(folder, media=MediaConfig(fetcher=fetcher)) as engine:
        for prompt, request in (
            ("<image>" * len(urls), {"images": urls}),
            ("<image>", {"images": urls}),
            (said(parts), {}),
            ([IMAGE] * len(urls), {"images": urls}),
        ):
            found = await outcome(engine, prompt, **request)
            assert isinstance(found, InvalidRequestError)
        assert await company(engine) == expected
    assert len(asked) == 0, f"{len(asked)} fetched"


async def test_modalities_of_any_name(engine: AsyncEngine, expected: Tokens) -> None:
    for name in ("thermal", "m" * MIB, "", 5, None, ("image",)):
        found = await outcome(engine, Prompt(text="a", media={name: [b"x"]}))
        assert isinstance(found, UnsupportedModalityError)
    assert await company(engine) == expected


# ---- options of the HF processor


def with_options(options: Any, seed: int) -> Prompt:
    media = {"image": [tiny_image(seed)]}
    return Prompt(text="<image>", media=media, mm_processor_kwargs=options)


def side(number: Any) -> dict[str, Any]:
    return {"height": number, "width": number}


async def all_ours(engine: AsyncEngine, prompts: Sequence[Prompt]) -> None:
    """Each is served, or refused as its caller's fault; the engine never blames itself."""
    wrong = {}
    for number, prompt in enumerate(prompts):
        try:
            await outcome(engine, prompt)
        except (AssertionError, AioEngineError) as error:
            wrong[number] = f"{error!r:.150}"
    assert not wrong


GIGABYTES: dict[str, dict[str, Any]] = {
    "size": {"size": side(4000)},
    "shortest edge": {"size": {"shortest_edge": 4000}},
    "longest edge": {"size": {"longest_edge": 4000}, "do_center_crop": False},
    "crop": {"crop_size": side(4000)},
    "scoped": {"images_kwargs": {"size": side(4000)}},
    "both ways": {"size": {"height": 1, "width": 2_000_000}},
}


@pytest.mark.parametrize("name", GIGABYTES)
async def test_options_ask_for_gigabytes(folder: Path, expected: Tokens, name: str) -> None:
    """An image made larger than one may come is refused before there is room for it."""
    media = MediaConfig(max_image_pixels=100_000)
    async with running_engine(folder, media=media) as engine:
        await engine.generate(with_options({}, 60), greedy(2))
        with bounded_memory(48 * MIB):
            found = await outcome(engine, with_options(GIGABYTES[name], 60))
        assert isinstance(found, InvalidRequestError)
        assert await company(engine) == expected


@pytest.mark.parametrize("scope", ["", "text_kwargs"])
@pytest.mark.parametrize(
    "options",
    [
        {"padding": "max_length", "max_length": 2_000_000},
        {"padding": True, "pad_to_multiple_of": 2_000_000},
    ],
    ids=["length", "multiple"],
)
async def test_options_of_the_text_ask_for_gigabytes(
    engine: AsyncEngine, expected: Tokens, options: dict[str, Any], scope: str
) -> None:
    """The text beside the media is a dummy, but options would have it padded."""
    await engine.generate(with_options({}, 61), greedy(2))
    with bounded_memory(48 * MIB):
        await outcome(engine, with_options({scope: options} if scope else options, 61))
    assert await company(engine) == expected


NO_SIZES: tuple[Any, ...] = (
    0, -1, 10**9, 10**30, float("nan"), float("inf"), 0.5, "x" * 100, None, True, [], [10**9] * 2,
    10**5000, {}, side(0), side(-5), side(10**9), side(float("nan")), side("a"), side(None),
    {"shortest_edge": 0}, {"shortest_edge": 10**12}, {"no_such": 1}, {"height": 32},
)  # fmt: skip


@pytest.mark.parametrize("name", ["size", "crop_size"])
async def test_sizes_that_are_none(engine: AsyncEngine, expected: Tokens, name: str) -> None:
    with bounded_memory(128 * MIB):
        await all_ours(engine, [with_options({name: size}, 100) for size in NO_SIZES])
    assert await company(engine) == expected


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"rescale_factor": float("nan")},
        {"rescale_factor": 1e300},
        {"image_mean": [float("nan")] * 3},
        {"image_std": [0.0, 0.0, 0.0]},
        {"images_kwargs": {"image_mean": [float("inf")] * 3}},
    ],
    ids=["factor", "huge factor", "mean", "deviation", "scoped"],
)
async def test_options_that_are_no_numbers(
    engine: AsyncEngine, expected: Tokens, options: dict[str, Any]
) -> None:
    """What they make of an image is no number either, and must not be served as an answer."""
    assert isinstance(await outcome(engine, with_options(options, 62)), InvalidRequestError)
    assert await company(engine) == expected


def wide(depth: int, width: int) -> Any:
    value: Any = [1]
    for _ in range(depth):
        value = [value] * width
    return value


def deep(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


OPTIONS_WITHOUT_END: dict[str, Callable[[], Any]] = {
    "many": lambda: {"a": [0] * 200_000},
    "many names": lambda: dict.fromkeys(map(str, range(50_000)), 0),
    "shared lists": lambda: {"a": wide(5, 9)},
    "a tensor": lambda: {"a": torch.zeros(1, 1).expand(5000, 5000)},
    "an array": lambda: {"a": np.broadcast_to(np.float32(0), (5000, 5000))},
    "deep": lambda: deep(100_000),
}


@pytest.mark.parametrize("name", OPTIONS_WITHOUT_END)
async def test_options_without_end(engine: AsyncEngine, expected: Tokens, name: str) -> None:
    """Refused or served, but neither copied nor hashed on the loop, whose eye looks on."""
    options = OPTIONS_WITHOUT_END[name]()
    with bounded_memory(48 * MIB):
        await outcome(engine, with_options(options, 63))
    assert await company(engine) == expected


ODD_OPTIONS: tuple[dict[Any, Any], ...] = (
    {"a": 10**5000}, {5: 1}, {None: 1}, {"\ud800": "\ud800"}, {"a": float("nan")}, {"a": object()},
    {"k" * 100_000: 1, "size": side(0)}, {"a": {"k" * 100_000: object()}}, {"a": "v" * MIB},
    {"text": "b"}, {"images": [1]}, {"return_tensors": "np"}, {"self": 1, "__class__": 2},
    {"device": "cuda:99"}, {"device": "meta"}, {"images_kwargs": 5}, {"images_kwargs": None},
    {"images_kwargs": {"a": {}}}, {"resample": 10**9}, {"data_format": "channels_last"},
    {"input_data_format": "channels_first"}, {"do_convert_rgb": None}, {"chat_template": LOOP},
    {"num_additional_image_tokens": 10**9}, {"patch_size": 0}, {"image_token": "b"}, {"a": b"b"},
)  # fmt: skip


async def test_odd_options(engine: AsyncEngine, expected: Tokens) -> None:
    await all_ours(engine, [with_options(options, 200) for options in ODD_OPTIONS])
    assert await company(engine) == expected
