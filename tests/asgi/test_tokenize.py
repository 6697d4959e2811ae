"""The tokens of prompts, and the texts of tokens: over HTTP as in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine import AsyncEngine, EngineConfig, MediaConfig
from aioengine.asgi import service_app
from aioengine.engine.detokenizer import decode_long
from aioengine.engine.engine_core import TOKENIZED_AT_ONCE
from aioengine.errors import (
    EngineClosedError,
    InvalidRequestError,
    PromptTooLongError,
    RequestAbortedError,
)
from tests.asgi.serving import image_part
from tests.asgi.test_http import client_of
from tests.support.engines import assert_at_rest, encoded, greedy, running_engine, settled
from tests.support.tiny import tiny_image, tiny_tokenizer

CHAT: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "What is in "}, image_part(1)]}
]


@pytest.fixture
async def client(engine: AsyncEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(service_app(engine)) as client:
        yield client


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
async def test_a_prompt(engine: AsyncEngine, client: httpx.AsyncClient, path: str) -> None:
    expected = (await engine.generate("The quick brown fox", greedy(1))).prompt_token_ids
    body = {"prompt": "The quick brown fox", "model": "tiny-llava"}
    found = (await client.post(path, json=body)).json()
    assert found == {
        "count": len(expected),
        "max_model_len": engine.max_model_len,
        "tokens": list(expected),
        "token_strs": None,
    }
    told = (await client.post(path, json={**body, "return_token_strs": True})).json()
    texts = told["token_strs"]
    assert len(texts) == len(expected) and "".join(texts) == "<s>The quick brown fox"
    back = await client.post(path.replace("token", "detoken"), json={"tokens": found["tokens"]})
    assert back.json() == {"prompt": "<s>The quick brown fox"}


async def test_a_conversation_with_an_image(engine: AsyncEngine, client: httpx.AsyncClient) -> None:
    """Its placeholder is expanded, as the model reads it."""
    before = engine.statistics()
    found = (await client.post("/v1/tokenize", json={"messages": CHAT})).json()
    image = tiny_image(1, 60, 50)
    same = await engine.tokenize(
        [{"role": "user", "content": [CHAT[0]["content"][0], {"type": "image"}]}], images=image
    )
    after = engine.statistics()
    assert (after.finished, after.stages["step"]) == (before.finished, before.stages["step"])
    assert_at_rest(engine)
    expected = (await engine.generate(CHAT, greedy(1))).prompt_token_ids
    assert found["tokens"] == list(expected) == list(same) and found["count"] > 30


async def test_many_tokens(engine: AsyncEngine, client: httpx.AsyncClient) -> None:
    prompt = "ab cd " * 300
    found = (await client.post("/v1/tokenize", json={"prompt": prompt})).json()
    assert found["count"] > 1024 > engine.max_model_len
    back = await client.post("/v1/detokenize", json={"tokens": found["tokens"]})
    assert back.json()["prompt"] == f"<s>{prompt}"


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("tokenize", {}, "prompt"),
    ("tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
    ("tokenize", {"prompt": 7}, "prompt"),
    ("tokenize", {"prompt": "a", "tools": [{"name": "a"}]}, "tools"),
    ("tokenize", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
    ("tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
    ("tokenize", {"messages": CHAT, "add_generation_prompt": False}, "add_generation_prompt"),
    ("tokenize", {"messages": []}, "messages"),
    ("tokenize", {"messages": CHAT, "chat_template_kwargs": 3}, "chat_template_kwargs"),
    ("tokenize", {"prompt": "ab " * 5000}, "prompt"),
    ("tokenize", {"promt": "a"}, "promt"),
    ("detokenize", {}, "tokens"),
    ("detokenize", {"tokens": [1, -2]}, "tokens[1]"),
    ("detokenize", {"tokens": [1, 1.5]}, "tokens[1]"),
    ("detokenize", {"tokens": [1, 1 << 40]}, "tokens[1]"),
]


async def test_bad_requests(client: httpx.AsyncClient) -> None:
    for path, body, parameter in BAD:
        response = await client.post(f"/v1/{path}", json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == parameter


# ---- the engine's own call


async def test_errors_of_the_engine(folder: Path) -> None:
    engine = AsyncEngine.from_pretrained(folder)
    with pytest.raises(EngineClosedError):
        await engine.tokenize("a")
    async with engine:
        with pytest.raises(InvalidRequestError, match="image"):
            await engine.tokenize("no placeholder", images=tiny_image(1))
        with pytest.raises(PromptTooLongError):
            await engine.tokenize("ab " * 20_000)
        assert_at_rest(engine)


async def test_few_at_a_time_each_with_its_own(engine: AsyncEngine) -> None:
    prompts = ["a " * count for count in range(1, 5 * TOKENIZED_AT_ONCE)]
    found = await asyncio.gather(*map(engine.tokenize, prompts))
    counts = [len(token_ids) for token_ids in found]
    assert counts == sorted(set(counts))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=60), st.integers(1, 9))
def test_texts_in_pieces(token_ids: list[int], piece: int) -> None:
    """Pieces cut no character in two, and no word of the tokenizer's."""
    tokenizer = tiny_tokenizer()
    assert decode_long(tokenizer, token_ids, piece) == tokenizer.decode(token_ids)


class Halted:
    """A fetcher whose images never come, that counts those it is asked for."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.num_asked = 0

    async def __call__(self, url: str) -> bytes:
        self.num_asked += 1
        self.begun.set()
        await asyncio.Event().wait()
        return encoded(tiny_image(1))


def halted_config(halted: Halted) -> EngineConfig:
    return EngineConfig(media=MediaConfig(fetcher=halted))


ASKED: list[Any] = [
    {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "https://a.example/a.png"}}],
    }
]


async def test_cancelled(folder: Path) -> None:
    """Those that wait come on as others are cancelled, and nothing is left of them."""
    halted = Halted()
    config = halted_config(halted)
    async with AsyncEngine.from_pretrained(folder, config=config) as engine:
        asking = [asyncio.create_task(engine.tokenize(ASKED)) for _ in range(2 * TOKENIZED_AT_ONCE)]
        last = asyncio.create_task(engine.tokenize("a"))
        await halted.begun.wait()
        assert not last.done()
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        assert all(task.cancelled() for task in asking)
        assert len(await last) > 0
        await settled(engine)


async def test_the_engine_closes_meanwhile(folder: Path) -> None:
    halted = Halted()
    engine = AsyncEngine.from_pretrained(folder, config=halted_config(halted))
    async with engine:
        asking = asyncio.create_task(engine.tokenize(ASKED))
        await halted.begun.wait()
    with pytest.raises(RequestAbortedError, match="closed"):
        await asking


async def test_a_client_who_leaves(folder: Path) -> None:
    halted = Halted()
    config = halted_config(halted)
    async with AsyncEngine.from_pretrained(folder, config=config) as engine:
        async with client_of(service_app(engine)) as client:
            asking = asyncio.create_task(client.post("/tokenize", json={"messages": ASKED}))
            await halted.begun.wait()
            asking.cancel()
            await asyncio.wait([asking])
            found = await client.post("/tokenize", json={"prompt": "a"})
            assert found.status_code == 200
        await settled(engine)


async def test_tools_and_the_template(engine: AsyncEngine) -> None:
    with pytest.raises(InvalidRequestError, match="tools"):
        await engine.tokenize([{"role": "user", "content": "a"}], tools=[{"name": "a"}])
    async with running_engine(Path(engine.model)) as other:
        plain = await other.tokenize([{"role": "user", "content": "a"}])
        options = {"enable_thinking": True}
        same = await other.tokenize(
            [{"role": "user", "content": "a"}], chat_template_kwargs=options
        )
        assert plain == same
