"""embeddings, score and rerank over HTTP: the engine's own numbers, by OpenAI's client or none."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import transformers as hf
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.routing import Mount

from aioengine import AsyncEngine
from aioengine.asgi import openai_app
from tests.asgi.serving import assert_for_clients, image_part, openai_client, serving
from tests.support.embedders import QWEN3, SIZES, cosine, pair_tokenizer, save_model
from tests.support.engines import greedy, running_engine, settled

TEXTS = ["one two", "three", "Will it rain?"]
MODEL = "tiny"
HALF = "\ud800"
"""Of a pair of surrogates: no Unicode."""


@asynccontextmanager
async def served(folder: Path, **options: Any) -> AsyncIterator[tuple[AsyncEngine, str]]:
    async with running_engine(folder, **options) as engine:
        app = Starlette(routes=[Mount("/v1", openai_app(engine, model_names=MODEL))])
        async with serving(app) as url:
            yield engine, url


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    save_model(folder, "Qwen3ForCausalLM", hf.Qwen3Config(**QWEN3))
    return folder


@pytest.fixture
async def running(qwen: Path) -> AsyncIterator[tuple[AsyncEngine, AsyncOpenAI]]:
    async with served(qwen) as (engine, url), openai_client(url) as client:
        yield engine, client


async def test_embeddings(running: tuple[AsyncEngine, AsyncOpenAI]) -> None:
    engine, client = running
    expected = [await engine.embed_output(text) for text in TEXTS]
    # OpenAI's client asks for base64 unless it is told otherwise, and reads it.
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer: Any = await client.embeddings.create(model=MODEL, input=TEXTS, **options)
        assert [each.index for each in answer.data] == [0, 1, 2] and answer.model == MODEL
        assert answer.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in expected)
        for each, output in zip(answer.data, expected, strict=True):
            found = each.embedding
            if isinstance(found, str):
                found = np.frombuffer(base64.b64decode(found), "<f4")
            np.testing.assert_array_equal(np.asarray(found, np.float32), output.vector)
    one = await client.embeddings.create(model=MODEL, input=[5, 6, 7])
    np.testing.assert_allclose(one.data[0].embedding, await engine.embed([5, 6, 7]), atol=1e-6)
    bare = await client.embeddings.create(
        model=MODEL, input="one", extra_body={"pooling": "mean", "normalize": False}
    )
    raw = await engine.embed("one", pooling="mean", normalize=False)
    np.testing.assert_allclose(bare.data[0].embedding, raw, atol=1e-6)


async def test_fewer_dimensions_have_the_whole_length(
    running: tuple[AsyncEngine, AsyncOpenAI],
) -> None:
    engine, client = running
    answer = await client.embeddings.create(model=MODEL, input="one", dimensions=7)
    found, whole = np.asarray(answer.data[0].embedding), await engine.embed("one")
    assert found.shape == (7,) and np.linalg.norm(found) == pytest.approx(1.0, abs=1e-6)
    assert cosine(found, whole[:7]) == pytest.approx(1.0, abs=1e-6)


async def test_many_numbers_are_written_in_a_thread(
    running: tuple[AsyncEngine, AsyncOpenAI],
) -> None:
    engine, client = running
    many = [f"number {index}" for index in range(300)]
    answer = await client.embeddings.create(model=MODEL, input=many, encoding_format="float")
    assert len(answer.data) == 300
    for index in (0, 299):
        expected = await engine.embed(many[index])
        np.testing.assert_allclose(answer.data[index].embedding, expected, atol=1e-6)


async def test_a_conversation_with_an_image(folder: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Look: "}, image_part(1)]}]
    async with served(folder) as (engine, url), httpx.AsyncClient() as client:
        response = await client.post(f"{url}/v1/embeddings", json={"messages": messages})
        (found,) = response.json()["data"]
        expected = await engine.embed(messages)
        assert cosine(np.asarray(found["embedding"]), expected) == pytest.approx(1.0, abs=1e-9)
        assert (await engine.generate(messages, greedy(2))).usage.encoder_cached_items == 1


async def test_scores_of_an_embedder(qwen: Path) -> None:
    async with served(qwen) as (engine, url), httpx.AsyncClient(base_url=f"{url}/v1") as client:
        expected = await engine.score("rain", TEXTS)
        body: dict[str, Any] = {"text_1": "rain", "text_2": TEXTS}
        answer = (await client.post("/score", json=body)).json()
        assert [each["score"] for each in answer["data"]] == pytest.approx(expected)
        assert answer["usage"]["prompt_tokens"] > 6
        single = (await client.post("/score", json={**body, "text_2": TEXTS[1]})).json()
        assert [each["score"] for each in single["data"]] == pytest.approx(expected[1:2])
        body = {"query": "rain", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
        answer = (await client.post("/rerank", json=body)).json()
        order = sorted(range(3), key=lambda index: -expected[index])
        assert [each["index"] for each in answer["results"]] == order
        assert [each["document"]["text"] for each in answer["results"]] == [
            TEXTS[index] for index in order
        ]
        best = await client.post("/rerank", json={**body, "top_n": 1, "return_documents": False})
        (only,) = best.json()["results"]
        assert only.keys() == {"index", "relevance_score"} and only["index"] == order[0]


async def test_scores_of_a_classifier(tmp_path: Path) -> None:
    config = hf.BertConfig(**SIZES, num_labels=1)
    save_model(tmp_path, "BertForSequenceClassification", config, pair_tokenizer())
    async with served(tmp_path) as (engine, url), httpx.AsyncClient() as client:
        body = {"query": "rain", "documents": TEXTS}
        answer = (await client.post(f"{url}/v1/rerank", json=body)).json()
        expected = await engine.score("rain", TEXTS)
        found = {each["index"]: each["relevance_score"] for each in answer["results"]}
        assert [found[index] for index in range(3)] == pytest.approx(expected)
        for path, half, parameter in (
            ("rerank", {"query": HALF}, "query"),
            ("rerank", {"documents": ["b", HALF]}, "documents[1]"),
            ("score", {"text_1": HALF, "text_2": ["b"]}, "text_1"),
            ("score", {"text_1": "a", "text_2": HALF}, "text_2"),
            ("score", {"text_1": "a", "text_2": ["b", HALF]}, "text_2[1]"),
        ):
            asked = {**(body if path == "rerank" else {}), **half}
            response = await client.post(f"{url}/v1/{path}", content=json.dumps(asked))
            error = response.json()["error"]
            assert error["param"] == parameter and error["message"].startswith(f"{parameter} is")
        response = await client.post(f"{url}/v1/chat/completions", json={"messages": []})
        assert response.status_code == 400
        assert_for_clients(response.json()["error"]["message"])


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("embeddings", {}, "input"),
        ("embeddings", {"input": "a", "messages": []}, "input"),
        ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": ["a", 3]}, "input"),
        ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("embeddings", {"input": "a", "dimensions": 10_000}, "dimensions"),
        ("embeddings", {"input": "a", "pooling": "max"}, "pooling"),
        ("embeddings", {"input": "a", "normalize": 1}, "normalize"),
        ("embeddings", {"input": "a" * 9000}, "input"),
        ("embeddings", {"input": [5] * 9000}, "input"),
        ("embeddings", {"input": ["b", [5], "a" * 9000]}, "input[2]"),
        ("score", {"text_1": "a", "text_2": "a" * 9000}, "text_2"),
        ("score", {"text_1": "a", "text_2": ["b", "a" * 9000]}, "text_2[1]"),
        ("score", {"text_1": "a" * 9000, "text_2": "b"}, "text_1"),
        ("rerank", {"query": "a", "documents": ["b", {"text": "a" * 9000}]}, "documents[1]"),
        ("embeddings", {"input": "a", "temperature": 0}, "temperature"),
        ("score", {"text_1": "a"}, "text_2"),
        ("score", {"text_1": "a", "text_2": "b", "mm_processor_kwargs": True},
         "mm_processor_kwargs"),
        ("rerank", {"query": "a", "documents": ["b"], "mm_processor_kwargs": []},
         "mm_processor_kwargs"),
        ("score", {"text_1": ["a"], "text_2": "b"}, "text_1"),
        ("rerank", {"query": "a", "documents": []}, "documents"),
        ("rerank", {"query": "a", "documents": ["b", 3]}, "documents[1]"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("rerank", {"query": "a", "documents": ["b", {"text": "c", "title": "d"}]},
         "documents[1].title"),
    ],
)  # fmt: skip
async def test_what_is_refused(
    running: tuple[AsyncEngine, AsyncOpenAI], path: str, body: Any, parameter: str
) -> None:
    _, client = running
    with pytest.raises(openai.BadRequestError) as caught:
        await client.post(f"/{path}", body=body, cast_to=object)
    assert caught.value.param == parameter
    assert_for_clients(caught.value.message)
    assert caught.value.message.startswith(f"Error code: 400 - {parameter}") or "not a field" in (
        caught.value.message
    )


async def test_dimensions_are_checked_before_any_work(
    running: tuple[AsyncEngine, AsyncOpenAI],
) -> None:
    engine, client = running
    with pytest.raises(openai.BadRequestError, match=f"{engine.embedding_width} at most"):
        await client.embeddings.create(model=MODEL, input=TEXTS, dimensions=10_000)
    assert engine.statistics().stages["step"].count == 0


async def test_a_client_who_leaves(running: tuple[AsyncEngine, AsyncOpenAI]) -> None:
    engine, client = running
    texts = [[7] * 400 for _ in range(40)]
    asking = asyncio.create_task(client.embeddings.create(model=MODEL, input=texts))
    while not engine.statistics().running:  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.001)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await settled(engine)
