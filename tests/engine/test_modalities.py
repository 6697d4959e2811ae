"""Audio clips and videos from their bytes to tokens, beside images."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from aioengine import AsyncEngine, Embeddings, MediaConfig, Prompt
from aioengine.errors import MediaError, ModelLoadError, UnsupportedModalityError
from aioengine.execution.memory_profiler import largest_items
from aioengine.processors import MULTIMODAL_REGISTRY
from tests.processors.conftest import context_of
from tests.support import media_family
from tests.support.engines import greedy, running_engine
from tests.support.media_family import SAMPLE_RATE, SAMPLES_PER_ROW, audio_rows, video_rows
from tests.support.tiny import save_tiny_llava, tiny_image

HIDDEN = 48
SOUND, FILM, ALL = "Hear [sound] now", "See [film] now", "a <image> b [sound] c [film] d"


TEMPLATE = (
    "{% for part in messages[0]['content'] %}{% if part['type'] == 'audio' %}[sound]"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
)


def save_media_family(folder: Path) -> None:
    """A tiny LLaVA's folder under the family's architecture."""
    save_tiny_llava(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["architectures"].insert(0, "SoundAndFilmForTests")
    path.write_text(json.dumps(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media_family")
    save_media_family(path)
    return path


def samples(seed: int, seconds: float = 1.0, rate: int = SAMPLE_RATE) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(seed)
    return generator.uniform(-0.9, 0.9, int(seconds * rate)).astype(np.float32)


def wav(sound: np.ndarray[Any, Any], rate: int = SAMPLE_RATE) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, sound, rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


def frames(seed: int, count: int = 6) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 48, 3), dtype=np.uint8)


def mkv(film: np.ndarray[Any, Any]) -> bytes:
    """Lossless."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        stream = container.add_stream("libx264rgb", rate=10, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = film.shape[2], film.shape[1], "rgb24"
        for frame in film:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


async def tokens(engine: AsyncEngine, text: str, **media: Any) -> tuple[int, ...]:
    return (await engine.generate(text, greedy(8), **media)).token_ids


async def test_clips_in_every_form(folder: Path) -> None:
    sound = samples(1)
    async with running_engine(folder) as engine:
        rows = Embeddings(audio_rows(sound, HIDDEN))
        expected = await tokens(engine, SOUND, audios=[rows])
        url = "data:audio/wav;base64," + base64.b64encode(wav(sound)).decode()
        for given in ((sound, SAMPLE_RATE), wav(sound), url):
            assert await tokens(engine, SOUND, audios=[given]) == expected
        assert await tokens(engine, SOUND, audios=[wav(samples(2))]) != expected
        stereo = np.stack([sound, sound], axis=1)
        assert await tokens(engine, SOUND, audios=[(stereo, SAMPLE_RATE)]) == expected
        found = await engine.generate(SOUND, greedy(2), audios=[wav(samples(3, 0.5, 8000), 8000)])
        assert found.usage.encoder_items == 1


async def test_videos_in_every_form(folder: Path) -> None:
    film = frames(1)
    async with running_engine(folder) as engine:
        rows = Embeddings(video_rows(film, HIDDEN))
        expected = await tokens(engine, FILM, videos=[rows])
        for given in (film, list(film), mkv(film)):
            assert await tokens(engine, FILM, videos=[given]) == expected
        half = await tokens(engine, FILM, videos=[Embeddings(video_rows(film[::2], HIDDEN))])
        prompt = Prompt(text=FILM, media={"video": [mkv(film)]}, mm_processor_kwargs={})
        assert (await engine.generate(prompt, greedy(8))).token_ids == expected
        fewer = Prompt(
            text=FILM, media={"video": [mkv(film)]}, mm_processor_kwargs={"num_frames": 3}
        )
        assert (await engine.generate(fewer, greedy(8))).token_ids == half


async def test_clips_beside_precomputed_rows(folder: Path) -> None:
    sounds = [samples(seed) for seed in (5, 6, 7)]
    text = "Hear [sound] and [sound], then [sound]"
    async with running_engine(folder) as engine:
        expected = await tokens(engine, text, audios=[wav(sound) for sound in sounds])
    rows = Embeddings(audio_rows(sounds[1], HIDDEN))
    async with running_engine(folder) as engine:
        given = [wav(sounds[0]), rows, wav(sounds[2])]
        assert await tokens(engine, text, audios=given) == expected
        assert await tokens(engine, text, audios=given[::-1]) != expected


@pytest.mark.parametrize("workers", ["thread:2", "process:1"])
async def test_all_together(
    folder: Path, workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where another process finds it: the repository's root must not be on anybody's path.
    shutil.copy(media_family.__file__, tmp_path / "family_of_tests.py")
    monkeypatch.syspath_prepend(tmp_path)
    import_module("family_of_tests")
    image, sound, film = tiny_image(1), wav(samples(4)), mkv(frames(4))
    media = {"images": [image], "audios": [sound], "videos": [film]}
    async with running_engine(folder) as engine:
        expected = await tokens(engine, ALL, **media)
    async with running_engine(folder, processor_workers=workers) as engine:
        both = await asyncio.gather(*(tokens(engine, ALL, **media) for _ in range(2)))
        assert both == [expected, expected]
        assert engine.statistics().stages["decode"].count == 3
        messages = [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a [sound] typed "},
                    {
                        "type": "input_audio",
                        "input_audio": {
                            "data": base64.b64encode(sound).decode(),
                            "format": "wav",
                        },
                    },
                ],
            }
        ]
        output = await engine.generate(messages, greedy(4))
        assert output.usage.encoder_items == output.usage.encoder_cached_items == 1


@pytest.mark.parametrize(
    ("media", "parameter"),
    [
        ({"audios": [b"no sound"]}, "audios[0]"),
        ({"audios": [wav(samples(1))[:100]]}, "audios[0]"),
        ({"audios": [wav(samples(1, 3.0))]}, "audios[0]"),
        ({"audios": [(np.full(1600, np.nan, np.float32), SAMPLE_RATE)]}, "audios[0]"),
        ({"audios": [samples(1)]}, "audios[0]"),
        ({"videos": [b"no film"]}, "videos[0]"),
        ({"videos": [mkv(frames(1))[:200]]}, "videos[0]"),
        ({"videos": [frames(1, 40)]}, "videos[0]"),
        ({"videos": [[tiny_image(1), tiny_image(2, 30, 30)]]}, "videos[0]"),
    ],
)
async def test_bad_media_concern_nobody_else(
    folder: Path, media: dict[str, Any], parameter: str
) -> None:
    limits = MediaConfig(max_audio_s=2.0, max_video_pixels=32 * 48 * 20)
    text = SOUND if "audios" in media else FILM
    async with running_engine(folder, media=limits) as engine:
        expected = await tokens(engine, "somebody else", images=[])
        refused, other = await asyncio.gather(
            tokens(engine, text, **media), tokens(engine, "somebody else"), return_exceptions=True
        )
        assert isinstance(refused, MediaError) and refused.parameter == parameter, refused
        assert other == expected


SIZED = {
    "image": {"width": 500, "height": 500},
    "audio": {"count": 2, "length": 10 * SAMPLES_PER_ROW},
    "video": {"num_frames": 4, "width": 8, "height": 6},
}


def test_dummies_keep_to_the_sizes_that_are_given(folder: Path) -> None:
    """Larger ones than the model's own change nothing, and what is not named stays."""
    context = context_of(folder, limit_mm_per_prompt=SIZED)
    processor = MULTIMODAL_REGISTRY.create_processor(media_family.MediaFamily, context)
    counts = {"image": 1, "audio": 2, "video": 1}
    data = processor.dummy_inputs.get_dummy_processor_inputs(0, counts).mm_data
    plain = MULTIMODAL_REGISTRY.create_processor(media_family.MediaFamily, context_of(folder))
    usual = plain.dummy_inputs.get_dummy_processor_inputs(0, counts).mm_data
    assert data["image"][0].size == usual["image"][0].size
    assert [len(clip.samples) for clip in data["audio"]] == [10 * SAMPLES_PER_ROW] * 2
    assert data["audio"][0].sample_rate == SAMPLE_RATE
    assert data["video"][0].frames.shape == (4, 6, 8, 3)
    assert data["video"][0].header.size == (8, 6) and data["video"][0].header.num_frames == 4
    assert usual["video"][0].frames.shape == (32, 32, 48, 3)
    rows = largest_items(plain, 0)
    assert rows["audio"] == 40 and rows["video"] == 64
    assert largest_items(processor, 0) == {"image": rows["image"], "audio": 10, "video": 8}
    none = context_of(folder, limit_mm_per_prompt={"audio": {"count": 0, "length": 9}, "video": 0})
    processor = MULTIMODAL_REGISTRY.create_processor(media_family.MediaFamily, none)
    assert largest_items(processor, 0) == {"image": rows["image"]}


def test_a_dummy_that_is_too_small_is_told_at_once(folder: Path) -> None:
    context = context_of(folder, limit_mm_per_prompt={"audio": {"length": 3}})
    processor = MULTIMODAL_REGISTRY.create_processor(media_family.MediaFamily, context)
    with pytest.raises(ModelLoadError, match=r"limit_mm_per_prompt\['audio'\]"):
        largest_items(processor, 0)


async def test_what_is_larger_than_the_sizes_that_are_given_is_served(folder: Path) -> None:
    """They say what memory is set aside for, as in vLLM, and not what may come."""
    long = {"audios": [wav(samples(1))], "videos": [frames(2)]}
    async with running_engine(folder) as engine:
        expected = await tokens(engine, SOUND + FILM, **long)
    async with running_engine(folder, limit_mm_per_prompt=SIZED) as engine:
        assert await tokens(engine, SOUND + FILM, **long) == expected
        with pytest.raises(UnsupportedModalityError, match="at most 2 audio items, not 3"):
            await engine.generate(SOUND * 3, greedy(2), audios=[wav(samples(1))] * 3)


async def test_limits_are_by_modality(folder: Path) -> None:
    async with running_engine(folder, limit_mm_per_prompt={"audio": 1}) as engine:
        for media in ({"audios": [wav(samples(1))] * 2}, {"videos": [frames(1)] * 2}):
            with pytest.raises(UnsupportedModalityError):
                await engine.generate(SOUND + FILM, greedy(2), **media)  # type: ignore[arg-type]
