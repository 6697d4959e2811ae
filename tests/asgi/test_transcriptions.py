"""audio/transcriptions through OpenAI's client, over a tiny model that hears one second."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.routing import Mount

from aioengine import AsyncEngine, Prompt, SamplingParams
from aioengine.asgi import openai_app
from aioengine.processors.speech import cut_windows, whisper_prompt
from tests.asgi.serving import openai_client, serving
from tests.parity.audio_families import RATE, sound
from tests.parity.listener_families import WORDS, save_listener, tokenizer_for
from tests.support.engines import running_engine, settled, until

PARAMS = SamplingParams(temperature=0, max_tokens=None)


@pytest.fixture(scope="module", params=["whisper", "moonshine"])
def listener(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("listeners") / request.param
    words = (*WORDS, "<|startofprev|>")
    save_listener(request.param, folder, tokenizer_for(request.param, words))
    return folder


@pytest.fixture
async def engine(listener: Path) -> AsyncIterator[AsyncEngine]:
    async with running_engine(listener, max_model_len=None) as engine:
        yield engine


@pytest.fixture
async def client(engine: AsyncEngine) -> AsyncIterator[AsyncOpenAI]:
    app = Starlette(routes=[Mount("/v1", openai_app(engine))])
    async with serving(app) as url, openai_client(url) as client:
        yield client


def clip(seconds: float, seed: int = 0) -> tuple[bytes, Any]:
    """A WAV file, and its samples."""
    samples = np.concatenate([sound(seed + i, 1.0) for i in range(int(seconds) + 1)])
    samples = samples[: int(seconds * RATE)].astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue(), samples


async def test_a_short_clip(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    data, samples = clip(0.8)
    expected = await engine.generate("", PARAMS, audios=[(samples, RATE)])
    assert expected.text.strip()
    answer = await client.audio.transcriptions.create(
        model=engine.model.name,  # type: ignore[union-attr]
        file=("a.wav", data),
    )
    assert answer.text == expected.text.strip()
    assert answer.usage is not None and answer.usage.type == "duration"
    assert answer.usage.seconds == pytest.approx(0.8)
    text = await client.audio.transcriptions.create(
        model=engine.model.name,  # type: ignore[union-attr]
        file=("a.wav", data),
        response_format="text",
    )
    assert text == expected.text.strip() + "\n"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_long_one_is_heard_in_windows(
    engine: AsyncEngine, client: AsyncOpenAI, listener: Path, is_streamed: bool
) -> None:
    hears = 1 if listener.name == "whisper" else 64
    data, samples = clip(3.4 if hears == 1 else 70)
    windows = cut_windows(samples, RATE, window_s=hears, search_s=hears / 10)
    assert len(windows) > 1
    expected = " ".join(
        [(await engine.generate("", PARAMS, audios=[window])).text.strip() for window in windows]
    )
    name = listener.name
    if not is_streamed:
        answer = await client.audio.transcriptions.create(model=name, file=("a.wav", data))
        assert answer.text == expected
        return
    deltas, whole = "", ""
    async for event in await client.audio.transcriptions.create(
        model=name, file=("a.wav", data), stream=True
    ):
        if event.type == "transcript.text.delta":
            deltas += event.delta
        elif event.type == "transcript.text.done":
            whole = event.text
    assert whole == expected
    assert deltas.split() == expected.split()


async def test_language_and_what_was_said_before(
    engine: AsyncEngine, client: AsyncOpenAI, listener: Path
) -> None:
    data, samples = clip(0.8)
    if listener.name == "moonshine":
        for options in ({"language": "de"}, {"prompt": "before"}):
            with pytest.raises(openai.BadRequestError):
                await client.audio.transcriptions.create(
                    model="moonshine",
                    file=("a.wav", data),
                    **options,  # type: ignore[call-overload]
                )
        return
    answer = await client.audio.transcriptions.create(
        model="whisper", file=("a.wav", data), language="german"
    )
    expected = await engine.generate(whisper_prompt("de"), PARAMS, audios=[(samples, RATE)])
    assert answer.text == expected.text.strip()
    tokenizer = engine.tokenizer
    before = tokenizer.encode(" tell", add_special_tokens=False)
    start = tokenizer.encode(whisper_prompt("en"), add_special_tokens=False)
    previous = tokenizer.convert_tokens_to_ids("<|startofprev|>")
    prompt = Prompt(token_ids=[previous, *before, *start], media={"audio": [(samples, RATE)]})
    expected = await engine.generate(prompt, PARAMS)
    answer = await client.audio.transcriptions.create(
        model="whisper", file=("a.wav", data), prompt="tell"
    )
    assert answer.text == expected.text.strip()
    # As much of it as has room, and no special tokens out of it.
    await client.audio.transcriptions.create(
        model="whisper", file=("a.wav", data), prompt="<|endoftext|>" + "so on " * 100
    )
    with pytest.raises(openai.BadRequestError) as caught:
        await client.audio.transcriptions.create(
            model="whisper", file=("a.wav", data), language="fr"
        )
    assert caught.value.param == "language"


async def test_refusals(engine: AsyncEngine, client: AsyncOpenAI, listener: Path) -> None:
    name, (data, _) = listener.name, clip(0.8)
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        await client.audio.transcriptions.create(model=name, file=("a.wav", b"no sound"))
    assert "file" in caught.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        await client.audio.transcriptions.create(
            model=name, file=("a.wav", data), response_format="srt"
        )
    assert refused.value.param == "response_format"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.audio.transcriptions.create(
            model=name, file=("a.wav", data), timestamp_granularities=["word"]
        )
    assert refused.value.param == "timestamp_granularities"
    assert caught.value.param == "file"
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        await client.audio.transcriptions.create(model=name, file=("a.wav", data[:-100]))
    assert caught.value.param == "file"
    for options in ({"seed": "inf"}, {"seed": "1.5"}, {"temperature": "hot"}, {"stream": "yes"}):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.audio.transcriptions.create(
                model=name, file=("a.wav", data), extra_body=options
            )
        assert refused.value.param == next(iter(options))
    with pytest.raises(openai.BadRequestError) as refused:
        await client.post("/audio/transcriptions", body={"file": "a"}, cast_to=object)
    assert refused.value.param == "file"


async def test_completions_are_no_place_for_audio(client: AsyncOpenAI, listener: Path) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model=listener.name, prompt="a")
    assert refused.value.param == "prompt"
    assert "give it audio in audio/transcriptions" in refused.value.message


async def test_a_form_without_files_is_refused_unread(engine: AsyncEngine) -> None:
    """60 MiB of ampersands would be read byte by byte on the loop."""

    async def refuse_reading() -> Any:
        raise AssertionError("the body was read")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/x-www-form-urlencoded")]
    scope = {"type": "http", "method": "POST", "path": "/audio/transcriptions", "headers": headers}
    await openai_app(engine)({**scope, "http_version": "1.1"}, refuse_reading, send)
    assert sent[0]["status"] == 400
    assert b"multipart/form-data" in sent[1]["body"]


async def test_a_client_that_leaves(
    engine: AsyncEngine, client: AsyncOpenAI, listener: Path
) -> None:
    data, _ = clip(9.5 if listener.name == "whisper" else 0.9)
    asking = asyncio.create_task(
        client.audio.transcriptions.create(model=listener.name, file=("a.wav", data))
    )
    await until(lambda: engine.statistics().running > 0)
    asking.cancel()
    await until(lambda: engine.statistics().aborted > 0)
    await settled(engine)


async def test_more_windows_than_may_be_queued(listener: Path) -> None:
    """One clip is one request: its windows do not stand in each other's way."""
    data, _ = clip(9.5 if listener.name == "whisper" else 130)
    async with running_engine(
        listener, max_model_len=None, max_num_seqs=1, max_queued_requests=1
    ) as engine:
        app = Starlette(routes=[Mount("/v1", openai_app(engine))])
        async with serving(app) as url, openai_client(url) as client:
            answer = await client.audio.transcriptions.create(
                model=listener.name, file=("a.wav", data)
            )
            assert answer.text
            assert engine.statistics().finished > 2


async def test_a_model_that_does_not_listen(folder: Path) -> None:
    async with running_engine(folder) as engine:
        app = Starlette(routes=[Mount("/v1", openai_app(engine))])
        async with serving(app) as url, openai_client(url) as client:
            with pytest.raises(openai.BadRequestError, match="does not write down speech"):
                await client.audio.transcriptions.create(
                    model=folder.name, file=("a.wav", clip(0.5)[0])
                )
