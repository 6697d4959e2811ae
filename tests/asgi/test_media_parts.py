"""Audio clips and videos in chats, as OpenAI's clients send them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from aioengine.asgi import openai_app
from tests.asgi.serving import image_part, openai_client, serving
from tests.engine.test_modalities import frames, mkv, samples, save_media_family, wav
from tests.support.engines import greedy, running_engine

TEMPLATE = (
    "{% for part in messages[0]['content'] %}"
    "{% if part['type'] == 'audio' %}[sound]{% elif part['type'] == 'video' %}[film]"
    "{% elif part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
)
BROKEN = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


@pytest.fixture(scope="module")
def media_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served_media") / "media"
    path.mkdir()
    save_media_family(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def test_images_clips_and_videos(media_folder: Path) -> None:
    sound, film = wav(samples(1)), mkv(frames(2))
    content: list[Any] = [
        {"type": "text", "text": "a "},
        image_part(1),
        {"type": "input_audio", "input_audio": {"data": encoded(sound), "format": "wav"}},
        {"type": "text", "text": " b "},
        {
            "type": "video_url",
            "video_url": {"url": f"data:video/x-matroska;base64,{encoded(film)}"},
        },
    ]
    answers = []
    async with running_engine(media_folder) as engine:
        app = Starlette(routes=[Mount("/v1", openai_app(engine))])
        async with serving(app) as url, openai_client(url) as client:
            for parts in (content, content[:3], content[3:]):
                messages: list[Any] = [{"role": "user", "content": parts}]
                expected = await engine.generate(messages, greedy(10))
                answer = await client.chat.completions.create(
                    model="media",
                    messages=messages,
                    temperature=0,
                    max_tokens=10,
                    extra_body={"ignore_eos": True},
                )
                assert answer.choices[0].message.content == expected.text
                answers.append(expected.token_ids)
            with pytest.raises(openai.UnprocessableEntityError) as caught:
                await client.chat.completions.create(
                    model="media",
                    messages=[{"role": "user", "content": [BROKEN]}],  # type: ignore[list-item, misc]
                )
            assert caught.value.param == "messages[0].content[0]"
    assert len(set(answers)) == 3
