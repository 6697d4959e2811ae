"""`engine.openai_client()`: OpenAI's client in the engine's own process and loop."""

from __future__ import annotations

import asyncio
import gc
import io
import random
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import uvloop
from openai import AsyncOpenAI

from aioengine import AsyncEngine, errors
from tests.asgi.serving import image_part
from tests.asgi.test_tools_over_http import ANSWER, WEATHER
from tests.parity.audio_families import RATE, sound
from tests.parity.listener_families import WORDS, save_listener, tokenizer_for
from tests.support.engines import (
    DEADLINE_S,
    Spans,
    cancelled_at,
    greedy,
    other_tasks,
    running_engine,
    settled,
    until,
)
from tests.support.scripts import script

MODEL = "tiny-llava"
HELLO: list[Any] = [{"role": "user", "content": "The quick"}]
ENDLESS = 400
"""Tokens: more than are made before a test has done what it does to the first of them."""


@pytest.fixture
async def client(engine: AsyncEngine) -> AsyncIterator[AsyncOpenAI]:
    async with engine.openai_client() as client:
        yield client


def asked(max_tokens: int = 12, messages: list[Any] = HELLO, **options: Any) -> dict[str, Any]:
    """Arguments of `chat.completions.create`."""
    fixed: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, **fixed, **options}


async def text_of(stream: Any) -> str:
    """The whole text of a stream."""
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_answers_are_those_of_generate(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    content = [{"type": "text", "text": "What is in "}, image_part(1), image_part(2)]
    messages: list[Any] = [{"role": "user", "content": content}]
    expected = await engine.generate(messages, greedy(12))
    answer = await client.chat.completions.create(**asked(messages=messages))
    assert answer.choices[0].message.content == expected.text and expected.text.strip()
    assert answer.usage is not None and answer._request_id == answer.id
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    stream = await client.chat.completions.create(**asked(messages=messages), stream=True)
    assert await text_of(stream) == expected.text
    completion = await client.completions.create(
        model=MODEL, prompt="a", max_tokens=3, temperature=0, extra_body={"ignore_eos": True}
    )
    assert completion.choices[0].text == (await engine.generate("a", greedy(3))).text
    assert [model.id async for model in client.models.list()] == [MODEL]


async def test_images_that_are_read_apart(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    """Their body is too long for the loop."""
    big = image_part(3, width=400, height=400)
    assert len(big["image_url"]["url"]) > 1 << 17
    messages: list[Any] = [{"role": "user", "content": [big]}]
    expected = await engine.generate(messages, greedy(6))
    answer = await client.chat.completions.create(**asked(6, messages))
    assert answer.choices[0].message.content == expected.text
    broken: list[Any] = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,a"}}]}
    ]
    with pytest.raises(openai.UnprocessableEntityError, match=r"content\[0\]"):
        await client.chat.completions.create(**asked(messages=broken))


async def test_sixteen_streams_at_once(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    prompts = [[{"role": "user", "content": f"Number {i}"}] for i in range(16)]
    expected = [(await engine.generate(each, greedy(12))).text for each in prompts]
    assert len(set(expected)) > 1

    async def streamed(messages: list[Any]) -> str:
        return await text_of(
            await client.chat.completions.create(**asked(12, messages), stream=True)
        )

    assert await asyncio.gather(*map(streamed, prompts)) == expected


async def test_a_stream_arrives_before_its_answer_is_complete(
    engine: AsyncEngine, client: AsyncOpenAI
) -> None:
    async with await client.chat.completions.create(**asked(ENDLESS), stream=True) as stream:
        assert (await anext(stream)).choices
        now = engine.statistics()
        assert (now.running, now.finished) == (1, 0)
    assert engine.statistics().aborted == 1  # as soon as the stream is closed


async def test_a_stream_that_is_read_in_part_and_dropped(
    engine: AsyncEngine, client: AsyncOpenAI
) -> None:
    before = other_tasks()
    stream: Any = await client.chat.completions.create(**asked(ENDLESS), stream=True)
    await anext(stream)
    del stream
    gc.collect()
    await until(lambda: engine.statistics().aborted == 1)
    await until(lambda: other_tasks() <= before)


async def test_streams_that_are_left_in_the_middle_of_a_loop(
    engine: AsyncEngine, client: AsyncOpenAI
) -> None:
    """Each leaves a row of generators, which the collector finds at once."""
    before = other_tasks()
    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    for _ in range(3):
        async for _ in await client.chat.completions.create(**asked(ENDLESS), stream=True):
            break

    def are_left() -> bool:
        gc.collect()
        return engine.statistics().aborted == 3 and other_tasks() <= before

    await until(are_left)
    assert not failures


async def test_a_stream_that_nobody_has_read(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    """It is dropped by another thread, as a collection may come up anywhere."""
    held = [await client.chat.completions.create(**asked(ENDLESS), stream=True)]

    def drop() -> None:
        held.clear()
        gc.collect()

    dropping = threading.Thread(target=drop)
    dropping.start()
    dropping.join()
    await until(lambda: engine.statistics().aborted == 1)


async def test_cancelled_anywhere(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    drawn = random.Random(0)
    before = other_tasks()
    big = [{"role": "user", "content": [image_part(3, width=400, height=400)]}]

    async def work(number: int) -> None:
        messages = big if number % 5 == 0 else HELLO
        answer: Any = await client.chat.completions.create(
            **asked(20, messages), stream=number % 2 == 1
        )
        if number % 2 == 1:
            await text_of(answer)

    ends = {"cancelled": 0, "complete": 0}
    for number in range(50):
        try:
            await cancelled_at(work(number), drawn.randrange(16))
            ends["complete"] += 1
        except asyncio.CancelledError:
            ends["cancelled"] += 1
            # Nothing is left but what was cancelled in its very last steps.
            assert len(other_tasks() - before) <= 1
        await until(lambda: other_tasks() <= before)
    assert ends["cancelled"] > 20
    await settled(engine)


async def test_cancelling_ends_the_engines_request_at_once(
    engine: AsyncEngine, client: AsyncOpenAI
) -> None:
    spans = Spans(engine)
    task = asyncio.ensure_future(client.chat.completions.create(**asked(ENDLESS)))
    await until(lambda: len(spans.spans) > 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.statistics().aborted == 1


async def test_another_loop(client: AsyncOpenAI) -> None:
    def ask() -> None:
        asyncio.run(client.chat.completions.create(**asked()))

    with pytest.raises(errors.WrongLoopError, match="the event loop that started it"):
        await asyncio.to_thread(ask)


async def test_a_stream_on_another_loop(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    """It says so at once, whatever is tried there, and goes on where it belongs."""
    expected = (await engine.generate(HELLO, greedy(ENDLESS))).text
    stream: Any = await client.chat.completions.create(**asked(ENDLESS), stream=True)
    first = (await anext(stream)).choices[0].delta.content or ""

    def elsewhere(ask: Any) -> None:
        asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))

    for ask in (stream.response.aclose, client.close):
        with pytest.raises(errors.WrongLoopError, match="on its own event loop"):
            await asyncio.to_thread(elsewhere, ask)
    assert engine.statistics().running == 1
    async with stream:
        assert first + await text_of(stream) == expected


def count_requests(client: AsyncOpenAI) -> list[Any]:
    """The requests that a client makes from now on, second tries among them."""
    found: list[Any] = []

    async def note(request: Any) -> None:
        found.append(request)

    client._client.event_hooks["request"].append(note)
    return found


async def test_an_engine_that_does_not_run(folder: Path) -> None:
    """OpenAI's error, and no second try: nobody else will start it."""
    engine = AsyncEngine.from_pretrained(folder, device="cpu")
    async with engine.openai_client() as client:
        requests = count_requests(client)
        with pytest.raises(openai.InternalServerError, match="has not been started") as caught:
            await client.chat.completions.create(**asked())
        assert caught.value.status_code == 503 and caught.value.code == "engine_closed"
        await engine.aclose()
        with pytest.raises(openai.InternalServerError, match="the engine is closed"):
            await client.chat.completions.create(**asked())
    assert len(requests) == 2


async def test_an_engine_that_is_closed_ends_streams(folder: Path) -> None:
    async with AsyncEngine.from_pretrained(folder, device="cpu") as engine:
        client = engine.openai_client()
        stream = await client.chat.completions.create(**asked(ENDLESS), stream=True)
        await anext(stream)
        closing = asyncio.ensure_future(engine.aclose())
        with pytest.raises(openai.APIError, match="the engine was closed"):
            await text_of(stream)
        await closing
        await client.close()


async def test_an_engine_without_room_is_asked_again(folder: Path) -> None:
    async with running_engine(folder, max_num_seqs=1, max_queued_requests=1) as engine:
        client = engine.openai_client()
        stream = await client.chat.completions.create(**asked(ENDLESS), n=2, stream=True)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.with_options(max_retries=0).chat.completions.create(**asked(2))
        assert "x-should-retry" not in caught.value.response.headers
        requests = count_requests(client)
        again = asyncio.ensure_future(client.chat.completions.create(**asked(2)))
        await until(lambda: requests)
        await stream.close()
        assert (await again).usage and len(requests) == 2


async def test_a_client_that_is_closed_ends_its_requests(
    engine: AsyncEngine, client: AsyncOpenAI
) -> None:
    stream = await client.chat.completions.create(**asked(ENDLESS), stream=True)
    await anext(stream)
    await client.close()
    assert engine.statistics().aborted == 1


async def test_clients_leave_nothing_in_the_engine(engine: AsyncEngine) -> None:
    heard = (list(engine.instruments.watchers), list(engine.instruments.listeners))
    for _ in range(3):
        await engine.openai_client().chat.completions.create(**asked(1))
    assert (engine.instruments.watchers, engine.instruments.listeners) == heard


async def test_answers_are_read_as_the_package_reads_them(
    tools_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By pydantic, each of equal parts; what the types do not hold for, by the package itself."""
    own = AsyncOpenAI._process_response_data
    slow: list[Any] = []

    def noted(self: Any, **given: Any) -> Any:
        slow.append(given["cast_to"])
        return own(self, **given)

    monkeypatch.setattr(AsyncOpenAI, "_process_response_data", noted)
    async with running_engine(tools_folder) as engine, engine.openai_client() as client:
        read: list[tuple[Any, Any]] = []
        fast = type(client)._process_response_data

        def both(self: Any, **given: Any) -> Any:
            found = fast(self, **given)
            read.append((found, own(self, **given)))
            return found

        monkeypatch.setattr(type(client), "_process_response_data", both)
        num_tokens = script(engine, ANSWER)
        common: Any = {"model": engine.model_name, "max_tokens": num_tokens, "tools": [WEATHER]}
        for options in ({}, {"logprobs": True, "top_logprobs": 2}):
            asks: Any = {**common, "messages": HELLO, **options}
            whole = await client.chat.completions.create(**asks)
            assert whole.choices[0].message.tool_calls[0].function.name == "weather"
            async for _ in await client.chat.completions.create(
                **asks, stream=True, stream_options={"include_usage": True}
            ):
                pass
        asks = {"model": engine.model_name, "input": "The quick", "max_output_tokens": num_tokens}
        asks["tools"] = [{"type": "function", **WEATHER["function"]}]
        await client.responses.create(**asks)
        assert [model.id async for model in client.models.list()] == [engine.model_name]
        assert len(read) > num_tokens and not slow
        async for _ in await client.responses.create(**asks, stream=True):  # one of many types
            pass
        assert slow
        slow.clear()
        # Its events say no reason to finish until the last; the type has no None there.
        async for _ in await client.completions.create(
            model=engine.model_name, prompt="The quick", max_tokens=3, stream=True
        ):
            pass
        assert slow
        for found, expected in read:
            assert type(found) is type(expected) and repr(found) == repr(expected)
            assert found.to_dict() == expected.to_dict()


async def test_options(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere.invalid/v1")
    monkeypatch.setenv("HTTP_PROXY", "http://elsewhere.invalid:1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    client = engine.openai_client(model_names="my-model", max_retries=5, timeout=7.0)
    assert (client.max_retries, client.timeout) == (5, 7.0)
    answer = await client.chat.completions.create(**asked(2, model="my-model"))
    assert answer.model == "my-model"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        await client.chat.completions.create(**asked(2))
    for name in ("base_url", "http_client"):
        with pytest.raises(errors.InvalidRequestError, match=name):
            engine.openai_client(**{name: "http://elsewhere.invalid"})
    with pytest.raises(errors.InvalidRequestError, match="did you mean 'max_retries'"):
        engine.openai_client(max_retry=1)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delitem(sys.modules, "aioengine.asgi.in_process", raising=False)
    monkeypatch.setitem(sys.modules, "openai", None)
    engine = AsyncEngine.from_pretrained(folder)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "aioengine\[client\]"'):
        engine.openai_client()


def test_under_uvloop(folder: Path) -> None:
    async def main() -> None:
        async with running_engine(folder) as engine, engine.openai_client() as client:
            expected = (await engine.generate(HELLO, greedy(12))).text
            stream = await client.chat.completions.create(**asked(), stream=True)
            assert await text_of(stream) == expected
            stream = await client.chat.completions.create(**asked(ENDLESS), stream=True)
            await anext(stream)
            await stream.close()
            assert engine.statistics().aborted == 1

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main(), DEADLINE_S))


async def test_an_audio_file_is_uploaded(tmp_path: Path) -> None:
    save_listener("whisper", tmp_path / "whisper", tokenizer_for("whisper", WORDS))
    samples = sound(0, 1.0)[: int(0.8 * RATE)].astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="FLOAT")
    async with running_engine(tmp_path / "whisper", max_model_len=None) as engine:
        expected = await engine.generate("", greedy(8), audios=[(samples, RATE)])
        client = engine.openai_client()
        answer = await client.audio.transcriptions.create(
            model=engine.model_name, file=("a.wav", file.getvalue())
        )
        assert answer.text.startswith(expected.text.strip()[:4]) and answer.text


async def test_every_stream_is_told_that_the_engine_died(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are told a few at a time, and those who know already let go of what they hold."""
    engine = AsyncEngine.from_pretrained(folder, device="cpu", dtype="float64")
    async with engine, engine.openai_client(model_names=MODEL) as client:
        monkeypatch.setattr("aioengine.engine.request_tracker.ENDED_AT_ONCE", 1)
        streams = await asyncio.gather(
            *(client.chat.completions.create(**asked(ENDLESS), stream=True) for _ in range(20))
        )

        def fail(*_: Any) -> Any:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(engine._core.loaded.runner, "step", fail)
        found = await asyncio.gather(*map(text_of, streams), return_exceptions=True)
        assert {getattr(each, "code", each) for each in found} == {"engine_dead"}
        gc.collect()
        assert engine.statistics().running == 0
