"""OpenAI's own client, unmodified, over a socket: its answers are `engine.generate`'s."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.routing import Mount

from aioengine import AsyncEngine, SamplingParams
from aioengine.asgi import openai_app
from aioengine.config import MediaConfig
from aioengine.engine.detokenizer import TokenTexts
from tests.asgi.serving import image_part, openai_client, serving
from tests.support.engines import encoded, greedy, running_engine, settled, until
from tests.support.tiny import tiny_image

MODEL = "tiny-llava"
TWO_IMAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is in "},
            image_part(1),
            {"type": "text", "text": " and in "},
            image_part(2),
        ],
    },
]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


@pytest.fixture
async def client(engine: AsyncEngine) -> AsyncIterator[AsyncOpenAI]:
    app = Starlette(routes=[Mount("/v1", openai_app(engine))])
    async with serving(app) as url, openai_client(url) as client:
        yield client


async def test_chat_with_two_images(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    expected = await engine.generate(TWO_IMAGES, greedy(12))
    answer = await client.chat.completions.create(model=MODEL, messages=TWO_IMAGES, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == expected.text
    assert expected.text.strip() and choice.finish_reason == "length"
    assert answer.object == "chat.completion" and answer.model == MODEL and answer.created > 0
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == expected.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens
    assert answer._request_id == answer.id


async def test_chat_streamed(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    expected = await engine.generate(TWO_IMAGES, greedy(12))
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=TWO_IMAGES,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        **GREEDY,
    )
    chunks = [chunk async for chunk in stream]
    *parts, last = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected.text
    assert len(parts) > 4
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + [
        "length"
    ]
    assert not last.choices and last.usage is not None
    assert last.usage.completion_tokens == 12
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in parts)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_several_completions(
    engine: AsyncEngine, client: AsyncOpenAI, is_streamed: bool
) -> None:
    params = SamplingParams(n=2, temperature=1, seed=7, max_tokens=10, ignore_eos=True)
    expected = await engine.generate(TWO_IMAGES, params)
    assert expected.outputs[0].text != expected.outputs[1].text
    wanted: dict[str, Any] = {**GREEDY, "temperature": 1, "seed": 7, "n": 2, "max_tokens": 10}
    texts = ["", ""]
    if is_streamed:
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=TWO_IMAGES, stream=True, **wanted
        ):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        answer = await client.chat.completions.create(model=MODEL, messages=TWO_IMAGES, **wanted)
        for choice in answer.choices:
            texts[choice.index] = choice.message.content or ""
    assert texts == [output.text for output in expected.outputs]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_logprobs(engine: AsyncEngine, client: AsyncOpenAI, is_streamed: bool) -> None:
    expected = (await engine.generate(TWO_IMAGES, greedy(40, logprobs=3))).outputs[0]
    wanted: dict[str, Any] = {**GREEDY, "max_tokens": 40, "logprobs": True, "top_logprobs": 3}
    found = []
    if is_streamed:
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=TWO_IMAGES, stream=True, **wanted
        ):
            if chunk.choices[0].logprobs is not None:
                found += chunk.choices[0].logprobs.content or []
    else:
        answer = await client.chat.completions.create(model=MODEL, messages=TWO_IMAGES, **wanted)
        assert answer.choices[0].logprobs is not None
        found = answer.choices[0].logprobs.content or []
    assert expected.logprobs is not None
    assert len(found) == len(expected.logprobs) == 40
    texts = TokenTexts(engine.tokenizer)
    for token_id, position, entry in zip(expected.token_ids, expected.logprobs, found, strict=True):
        assert entry.token == texts.text(token_id)
        assert entry.logprob == pytest.approx(position[token_id].logprob)
        assert entry.bytes == texts.utf8(token_id)
        top = [each.logprob for each in entry.top_logprobs]
        assert len(top) == 3 and top == sorted(top, reverse=True)
        assert top[0] == pytest.approx(entry.logprob)
    spelt = b"".join(bytes(entry.bytes or []) for entry in found).decode(errors="replace")
    assert spelt.strip() == expected.text.strip()


async def test_stop_strings(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    whole = (await engine.generate(TWO_IMAGES, greedy(12))).text
    stop = whole[4:6]
    expected = await engine.generate(TWO_IMAGES, greedy(12, stop=[stop, "never"]))
    answer = await client.chat.completions.create(
        model=MODEL, messages=TWO_IMAGES, stop=[stop, "never"], **GREEDY
    )
    (choice,) = answer.choices
    assert choice.message.content == expected.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_extra is not None and choice.model_extra["stop_reason"] == stop


async def test_logit_bias_and_json(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "a"}],
        logit_bias={"40": 100},
        temperature=0,
        max_tokens=3,
    )
    assert answer.choices[0].message.content == engine.tokenizer.decode([40] * 3)
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "a"}],
        response_format=schema_format(schema),  # type: ignore[arg-type]
        max_tokens=60,
        temperature=0,
    )
    assert 0 <= json.loads(answer.choices[0].message.content or "")["n"] <= 9


async def test_text_completions(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    prompts = ["The quick", "What is in the picture?"]
    expected = [await engine.generate(p, greedy(8, logprobs=2)) for p in prompts]
    answer = await client.completions.create(
        model=MODEL, prompt=prompts, logprobs=2, n=1, **{**GREEDY, "max_tokens": 8}
    )
    assert [choice.text for choice in answer.choices] == [output.text for output in expected]
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice, output in zip(answer.choices, expected, strict=True):
        logprobs, wanted = choice.logprobs, output.outputs[0].logprobs
        assert logprobs is not None and wanted is not None
        assert logprobs.token_logprobs == pytest.approx(
            [p[t].logprob for p, t in zip(wanted, output.token_ids, strict=True)]
        )
        assert all(1 <= len(top) <= 2 for top in logprobs.top_logprobs or [])
        assert logprobs.text_offset is not None and logprobs.tokens is not None
        for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
            if "\ufffd" not in token:
                assert choice.text[offset:].startswith(token) or offset == 0
    assert answer.usage is not None and answer.usage.completion_tokens == 16
    ids = engine.tokenizer.encode("The quick")
    by_ids = await client.completions.create(model=MODEL, prompt=ids, **{**GREEDY, "max_tokens": 8})
    assert by_ids.choices[0].text == expected[0].text


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_the_sampled_token_is_among_the_top(client: AsyncOpenAI, count: int) -> None:
    """However improbable it was."""
    answer = await client.completions.create(
        model=MODEL, prompt="a", logprobs=count, max_tokens=20, temperature=2, seed=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs and logprobs.tokens
    assert logprobs.token_logprobs is not None
    found = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    for token, logprob, top in found:
        assert top[token] == logprob
        assert 1 <= len(top) <= count + 1
    assert any(len(top) == count + 1 for top in logprobs.top_logprobs)


async def test_text_completions_streamed(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    prompts = ["The quick", "What is in the picture?", "a"]
    expected = [(await engine.generate(p, greedy(8))).text for p in prompts]
    texts = [""] * 3
    usage = None
    async for chunk in await client.completions.create(
        model=MODEL,
        prompt=prompts,
        stream=True,
        stream_options={"include_usage": True},
        **{**GREEDY, "max_tokens": 8},
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        assert "usage" in chunk.model_fields_set
        usage = chunk.usage or usage
    assert texts == expected
    async for chunk in await client.completions.create(
        model=MODEL, prompt="a", stream=True, **GREEDY
    ):
        assert "usage" not in chunk.model_fields_set, "nobody has asked"
    assert usage is not None and usage.completion_tokens == 24


async def test_what_a_client_got_it_may_send_back(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    first = await client.chat.completions.create(model=MODEL, messages=TWO_IMAGES, **GREEDY)
    messages = [*TWO_IMAGES, first.choices[0].message, {"role": "user", "content": "And?"}]
    second = await client.chat.completions.create(model=MODEL, messages=messages, **GREEDY)
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens


async def test_models(client: AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    assert model.id == MODEL  # of a local folder only its name
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def refused(client: AsyncOpenAI, error: type[openai.APIStatusError], **body: Any) -> Any:
    """The error that a chat with these fields ends with."""
    wanted: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "a"}],
        **body,
    }
    with pytest.raises(error) as caught:
        await client.chat.completions.create(**wanted)
    return caught.value


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"top_logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}, "stream": False}, "stream_options"),
        ({"stream_options": {"include_all": True}, "stream": True}, "stream_options"),
        (
            {"stream_options": {"include_obfuscation": 1}, "stream": True},
            "stream_options.include_obfuscation",
        ),
        ({"response_format": {"type": "xml"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {}, "strict": "x"},
                }
            },
            "response_format.json_schema.strict",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs"),
        ({"extra_body": {"mm_processor_kwargs": 3}}, "mm_processor_kwargs"),
        ({"extra_body": {"cache_salt": {"a": 1}}}, "cache_salt"),
        ({"extra_body": {"cache_salt": "a" * 1025}}, "cache_salt"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"response_format": schema_format({"multipleOf": 12345677})}, "response_format"),
        ({"response_format": schema_format({"$ref": "#/nowhere"})}, "response_format"),
    ],
)
async def test_bad_requests(client: AsyncOpenAI, body: dict[str, Any], parameter: str) -> None:
    error = await refused(client, openai.BadRequestError, **body)
    assert error.param == parameter and error.type == "invalid_request_error"
    assert parameter.partition(".")[0].partition("[")[0] in error.message


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("prompt", "parameter"),
    [(["a", [-1]], "prompt[1]"), (["ab " * 2000], "prompt[0]"), ("ab " * 2000, "prompt"),
     ([5] * 9000, "prompt")],
)  # fmt: skip
async def test_which_prompt_is_wrong(
    client: AsyncOpenAI, prompt: Any, parameter: str, is_streamed: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt=prompt, stream=is_streamed)
    assert caught.value.param == parameter


async def test_too_long(client: AsyncOpenAI) -> None:
    error = await refused(
        client, openai.BadRequestError, messages=[{"role": "user", "content": "ab " * 2000}]
    )
    assert error.code == "context_length_exceeded"


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,AAAA",
        "file:///etc/passwd",
        "/etc/passwd",
        "http://127.0.0.1/a.png",
        image_part(1)["image_url"]["url"][:-80],  # the header is there, and not all pixels
    ],
)
async def test_bad_media(client: AsyncOpenAI, url: str, is_streamed: bool) -> None:
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]
    error = await refused(
        client,
        openai.UnprocessableEntityError,
        messages=[{"role": "user", "content": content}],
        stream=is_streamed,
    )
    assert error.param == "messages[0].content[1]" and error.code == "invalid_media"


async def test_media_whose_server_failed_for_now(folder: Path) -> None:
    """Not a server's fault in a balancer's eyes, and worth another try in the client's."""
    bodies: list[Exception | bytes] = [ConnectionError("secret"), encoded(tiny_image(1))]

    async def fetcher(url: str) -> bytes:
        body = bodies.pop(0)
        if isinstance(body, Exception):
            raise body
        return body

    part = {"type": "image_url", "image_url": {"url": "http://images.test/a.png"}}
    messages = [{"role": "user", "content": [part]}]
    async with running_engine(folder, media=MediaConfig(fetcher=fetcher)) as engine:
        app = Starlette(routes=[Mount("/v1", openai_app(engine))])
        async with serving(app) as url, openai_client(url) as client:
            error = await refused(client, openai.APIStatusError, messages=messages)
            assert (error.status_code, error.code) == (424, "media_unavailable")
            assert error.param == "messages[0].content[0]"
            assert int(error.response.headers["retry-after"]) > 0
            assert error.response.headers["x-should-retry"] == "true"
            assert await client.chat.completions.create(
                model=folder.name, messages=messages, max_tokens=2
            )


async def test_names_of_media_are_not_taken_from_strangers(client: AsyncOpenAI) -> None:
    part = {**image_part(1), "uuid": "mine"}
    error = await refused(
        client, openai.BadRequestError, messages=[{"role": "user", "content": [part]}]
    )
    assert error.param == "messages[0].content[0].uuid"


async def test_an_unknown_model(client: AsyncOpenAI) -> None:
    error = await refused(client, openai.NotFoundError, model="gpt-4")
    assert error.code == "model_not_found" and error.param == "model"


async def test_overload(folder: Path) -> None:
    async with running_engine(folder, max_num_seqs=1, max_queued_requests=1) as engine:
        app = Starlette(routes=[Mount("/v1", openai_app(engine))])
        async with serving(app) as url, openai_client(url) as client:
            async with engine.stream("a", greedy(400)), engine.stream("b", greedy(400)):
                error = await refused(client, openai.RateLimitError)
                assert int(error.response.headers["retry-after"]) > 0
                assert error.code == "overloaded"
            await settled(engine)


async def test_drained_closed_and_dead(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    await engine.drain()
    error = await refused(client, openai.InternalServerError)
    assert error.status_code == 503 and error.code == "engine_closed"
    engine.resume()
    await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "a"}], max_tokens=1
    )
    engine._core.die(RuntimeError("a broken device"))
    error = await refused(client, openai.InternalServerError)
    assert error.status_code == 503 and error.code == "engine_dead"
    assert "broken device" not in error.message


async def test_a_stream_that_breaks_says_so(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=TWO_IMAGES,
        stream=True,
        **{**GREEDY, "max_tokens": 300},
    )
    with pytest.raises(openai.APIError) as caught:
        async for chunk in stream:
            await engine.abort(chunk.id)
    assert caught.value.code == "aborted"


async def test_a_client_that_leaves_frees_everything(
    engine: AsyncEngine, client: AsyncOpenAI
) -> None:
    steps = 0

    def count(span: Any) -> None:
        nonlocal steps
        steps += span.stage == "step"

    stream = await client.chat.completions.create(
        model=MODEL, messages=TWO_IMAGES, stream=True, **{**GREEDY, "max_tokens": 400}
    )
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await until(lambda: engine.statistics().aborted == 1)
    engine.instruments.listeners.append(count)
    await settled(engine)
    assert steps <= 1  # the one in flight
    # And one that waits for a whole answer.
    waiting = asyncio.create_task(
        client.chat.completions.create(
            model=MODEL, messages=TWO_IMAGES, **{**GREEDY, "max_tokens": 400}
        )
    )
    await until(lambda: engine.statistics().running == 1)
    waiting.cancel()
    await until(lambda: engine.statistics().aborted == 2)
    await settled(engine)
