"""Media of chat messages: every key that holds them, and parts that `images=` fills."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from aioengine import AsyncEngine, Prompt
from aioengine.errors import (
    InvalidRequestError,
    MediaError,
    PlaceholderMismatchError,
    UnsupportedModalityError,
)
from tests.engine.test_modalities import samples, save_media_family, wav
from tests.support.engines import encoded, greedy, running_engine
from tests.support.tiny import tiny_image

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}[sound]{% elif part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
PICTURE, OTHER = tiny_image(80), tiny_image(81)
PNG = encoded(PICTURE)
BASE64 = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{BASE64}"
WAV = wav(samples(8))
BARE: dict[str, Any] = {"type": "image"}
TEXT = {"type": "text", "text": "and"}


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


async def tokens(engine: AsyncEngine, prompt: Any, **media: Any) -> tuple[int, ...]:
    await engine.reset_caches()
    return (await engine.generate(prompt, greedy(8), **media)).token_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media_family")
    save_media_family(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "given.png").write_bytes(PNG)
    return path


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    async with running_engine(folder) as engine:
        yield engine


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "image": lambda path: {"type": "image", "image": PICTURE},
    "image, URL": lambda path: {"type": "image", "image": URL},
    "image, mapping with a URL": lambda path: {"type": "image", "image": {"url": URL}},
    "image, path": lambda path: {"type": "image", "image": path},
    "image, file": lambda path: {"type": "image", "image": io.BytesIO(PNG)},
    "image, datasets": lambda path: {"type": "image", "image": {"bytes": PNG, "path": "x"}},
    "image, datasets, path": lambda path: {"type": "image", "image": {"path": path}},
    "url": lambda path: {"type": "image", "url": URL},
    "path": lambda path: {"type": "image", "path": path},
    "base64": lambda path: {"type": "image", "base64": BASE64},
    "base64 with its head": lambda path: {"type": "image", "base64": URL},
    "data": lambda path: {"type": "image", "data": PNG},
    "data, base64": lambda path: {"type": "image", "data": BASE64},
    "image_url in image": lambda path: {"type": "image", "image_url": {"url": URL}},
    "image_url": lambda path: {"type": "image_url", "image_url": {"url": URL}},
    "image_url, text": lambda path: {"type": "image_url", "image_url": URL},
    "image_url with empty keys": lambda path: {
        "type": "image_url", "image_url": {"url": URL}, "image": None, "uuid": None
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
async def test_every_key(engine: AsyncEngine, folder: Path, name: str) -> None:
    part = PARTS[name](folder / "given.png")
    expected = await tokens(engine, "<image>and", images=[PICTURE])
    assert await tokens(engine, chat(part, TEXT)) == expected
    assert await tokens(engine, chat(BARE, TEXT), images=[OTHER]) != expected


async def test_sound_under_its_keys(engine: AsyncEngine) -> None:
    expected = await tokens(engine, "[sound]and", audios=[WAV])
    spelt = base64.b64encode(WAV).decode()
    for part in (
        {"type": "input_audio", "input_audio": {"data": spelt, "format": "wav"}},
        {"type": "audio", "base64": spelt},
        {"type": "audio", "audio": {"array": samples(8), "sampling_rate": 1600}},
    ):
        assert await tokens(engine, chat(part, TEXT)) == expected
    assert await tokens(engine, chat({"type": "audio"}, TEXT), audios=WAV) == expected


async def test_parts_without_content_are_filled_in_order(engine: AsyncEngine) -> None:
    expected = await tokens(engine, "<image><image>and<image>", images=[PICTURE, OTHER, PICTURE])
    held = {"type": "image", "image": OTHER}
    for parts, images in (
        ((BARE, BARE, TEXT, BARE), [PICTURE, OTHER, PICTURE]),
        ((BARE, held, TEXT, BARE), (each for each in [PNG, PICTURE])),
        ((BARE, held, TEXT, {"type": "image", "image": PICTURE}), PNG),
    ):
        assert await tokens(engine, chat(*parts), images=images) == expected
    both = Prompt(messages=chat(BARE, BARE, TEXT, BARE), media={"image": [PICTURE]})
    assert await tokens(engine, both, images=[OTHER, PNG]) == expected
    reversed_order = await tokens(engine, chat(BARE, held, TEXT, BARE), images=[OTHER, PICTURE])
    assert reversed_order != expected


async def test_parts_of_several_messages_and_modalities(engine: AsyncEngine) -> None:
    expected = await tokens(engine, "<image>and[sound]", images=[PICTURE], audios=[WAV])
    messages = [*chat(BARE, TEXT), {"role": "user", "content": [{"type": "audio"}]}]
    assert await tokens(engine, messages, images=PICTURE, audios=WAV) == expected


@pytest.mark.parametrize(
    ("messages", "media", "parameter", "words"),
    [
        (chat(BARE, BARE), {"images": [PNG]}, "images", "2 image parts .* 1 items"),
        (chat(BARE), {"images": [PNG] * 3}, "images", "1 image parts .* 3 items"),
        (chat(TEXT), {"images": PNG}, "images", "0 image parts .* 1 items"),
        ([{"role": "user", "content": "hi"}], {"images": PNG}, "images", "0 image parts"),
        (chat(TEXT, BARE), {}, "messages[0].content[1]", "base64.* 1 image parts .* 0 items"),
        (chat(BARE), {"audios": WAV}, "messages[0].content[0]", "0 items"),
    ],
)
async def test_items_and_parts_have_to_match(
    engine: AsyncEngine, messages: Any, media: Any, parameter: str, words: str
) -> None:
    with pytest.raises(PlaceholderMismatchError, match=words) as caught:
        await engine.generate(messages, greedy(2), **media)
    assert caught.value.parameter == parameter


async def test_items_that_the_model_does_not_take(engine: AsyncEngine) -> None:
    media = Prompt(messages=chat(TEXT), media={"smell": [b"x"]})
    with pytest.raises(UnsupportedModalityError) as caught:
        await engine.generate(media, greedy(2))
    assert caught.value.parameter == "smells"


async def test_the_name_of_an_item_that_fills_a_part(engine: AsyncEngine) -> None:
    with pytest.raises(MediaError) as caught:
        await engine.generate(chat(BARE, BARE), greedy(2), images=[PNG, b"broken"])
    assert caught.value.parameter == "images[1]"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image", "url": URL, "path": "a"}, "url and path; give one"),
        ({"type": "image", "base64": 5}, "must be text"),
        ({"type": "image", "base64": PNG}, "must be text"),
        ({"type": "image", "url": {"url": 5}}, "must be"),
        ({"type": "image", "path": 5}, "must be a path"),
        ({"type": "image_url", "image_url": PICTURE}, "must be"),
        ({"type": "image", "image": {"a": 1}}, "mapping must hold bytes"),
        ({"type": "image", "image": BASE64}, "looks like base64"),
        ({"type": "image_url", "image_url": {"url": BASE64}}, "looks like base64"),
    ],
)
async def test_parts_that_hold_no_image(engine: AsyncEngine, part: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        await engine.generate(chat(part), greedy(2))
    assert str(caught.value.parameter).startswith("messages[0].content[0]")
    assert BASE64[:40] not in str(caught.value)
