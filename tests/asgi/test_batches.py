"""Batches by OpenAI's client: files in, files out, each client's own."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Batch
from starlette.applications import Starlette
from starlette.routing import Mount

from aioengine import AsyncEngine, Prompt
from aioengine.asgi import openai_app
from aioengine.asgi.api import batches, files
from aioengine.asgi.error_responses import ApiError
from aioengine.asgi.keys import Keys
from aioengine.engine.input_processor import InputProcessor
from tests.asgi.serving import image_part, openai_client, serving
from tests.support.engines import greedy, running_engine, settled, until

CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
MAX_BYTES = 1_200_000
SHARE = MAX_BYTES // 2
"""Of one of two keys."""
KEYS = {"ann": "key-a", "bob": "key-b"}


def chat(text: str, **options: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": text}, image_part(1)]
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "temperature": 0, "max_tokens": 4, **options}


def lines(bodies: Sequence[Any], url: str = CHAT) -> bytes:
    rows = [
        {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies)
    ]
    return b"\n".join(json.dumps(row).encode() for row in rows) + b"\n\n"


@pytest.fixture
async def url(engine: AsyncEngine) -> AsyncIterator[str]:
    app = Starlette(
        routes=[Mount("/v1", openai_app(engine, api_key=KEYS, max_files_bytes=MAX_BYTES))]
    )
    async with serving(app) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(url, api_key=KEYS["ann"]) as client:
        yield client


async def begun(client: AsyncOpenAI, data: bytes, endpoint: Any = CHAT) -> Batch:
    file = await client.files.create(file=("a.jsonl", data), purpose="batch")
    assert file.bytes == len(data) and file.purpose == "batch" and file.filename == "a.jsonl"
    options: dict[str, Any] = {"endpoint": endpoint, "completion_window": "24h"}
    return await client.batches.create(input_file_id=file.id, metadata={"a": "b"}, **options)


async def ended(client: AsyncOpenAI, batch: Batch) -> Batch:
    found = batch

    async def has_ended() -> bool:
        nonlocal found
        found = await client.batches.retrieve(batch.id)
        return found.status in batches.ENDED

    while not await has_ended():
        pass
    return found


async def rows(client: AsyncOpenAI, name: str | None) -> list[dict[str, Any]]:
    assert name is not None
    content = await client.files.content(name)
    return [json.loads(line) for line in content.text.splitlines()]


async def sorted_rows(client: AsyncOpenAI, name: str | None) -> list[dict[str, Any]]:
    return sorted(await rows(client, name), key=lambda row: str(row["custom_id"]))


async def test_a_batch(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    bodies = [chat(f"number {number}", ignore_eos=True) for number in range(9)]
    bodies[3]["temperature"] = "hot"
    bodies[5]["model"] = "another"
    bodies[7]["stream"] = True
    batch = await begun(client, lines(bodies))
    assert batch.status in ("validating", "in_progress") and batch.endpoint == CHAT
    batch = await ended(client, batch)
    assert batch.status == "completed" and batch.errors is None and batch.completed_at
    counts = batch.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (9, 6, 3)
    assert batch.metadata == {"a": "b"}
    answers = {
        row["custom_id"]: row["response"] for row in await rows(client, batch.output_file_id)
    }
    assert sorted(answers) == ["r0", "r1", "r2", "r4", "r6", "r8"]
    for name, response in answers.items():
        assert response["status_code"] == 200
        expected = await engine.generate(bodies[int(name[1:])]["messages"], greedy(4))
        assert response["body"]["choices"][0]["message"]["content"] == expected.text
        assert response["request_id"] == response["body"]["id"]
    failed = {row["custom_id"]: row["response"] for row in await rows(client, batch.error_file_id)}
    assert {name: row["status_code"] for name, row in failed.items()} == {
        "r3": 400, "r5": 404, "r7": 400,
    }  # fmt: skip
    assert failed["r3"]["body"]["error"]["param"] == "temperature"
    assert [each.id async for each in client.batches.list()] == [batch.id]


async def test_a_line_that_fails_in_the_engine(
    engine: AsyncEngine, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails alone."""
    prepare = InputProcessor.prepare

    async def prepared(self: InputProcessor, state: Any, prompt: Prompt) -> Any:
        if prompt.text == "broken":
            raise RuntimeError("a fault")
        return await prepare(self, state, prompt)

    monkeypatch.setattr(InputProcessor, "prepare", prepared)
    bodies = [{"prompt": text, "max_tokens": 2} for text in ("a", "broken", "b", "c")]
    batch = await ended(client, await begun(client, lines(bodies, url=TEXTS), TEXTS))
    assert batch.status == "completed" and batch.errors is None
    assert len(await rows(client, batch.output_file_id)) == 3
    (failed,) = await rows(client, batch.error_file_id)
    assert failed["custom_id"] == "r1" and failed["response"]["status_code"] == 500


async def test_texts(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    body = {"prompt": ["one", "two"], "temperature": 0, "max_tokens": 3, "ignore_eos": True}
    wrong = {**body, "prompt": ["one", [-1]]}
    batch = await ended(
        client, await begun(client, lines([body, wrong], "/v1/completions"), "/v1/completions")
    )
    (row,) = await rows(client, batch.error_file_id)
    assert row["response"]["body"]["error"]["param"] == "prompt[1]"
    (row,) = await rows(client, batch.output_file_id)
    texts = [choice["text"] for choice in row["response"]["body"]["choices"]]
    assert texts == [(await engine.generate(text, greedy(3))).text for text in ("one", "two")]


async def test_responses(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    body = {"input": "Hello", "temperature": 0, "max_output_tokens": 3, "ignore_eos": True}
    follows = {**body, "previous_response_id": "resp_1"}
    batch = await begun(client, lines([body, follows], "/v1/responses"), "/v1/responses")
    batch = await ended(client, batch)
    (row,) = await rows(client, batch.output_file_id)
    expected = await engine.generate([{"role": "user", "content": "Hello"}], greedy(3))
    (item,) = row["response"]["body"]["output"]
    assert item["content"][0]["text"] == expected.text
    (row,) = await rows(client, batch.error_file_id)
    assert row["response"]["body"]["error"]["param"] == "previous_response_id"


async def test_embeddings(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    bodies: list[dict[str, Any]] = [{"input": ["one", "two"]}, {"input": "three", "dimensions": 5}]
    bodies += [{"input": []}, {"input": "a", "model": "another"}]
    path = "/v1/embeddings"
    batch = await ended(client, await begun(client, lines(bodies, path), path))
    assert batch.status == "completed"
    many, short = [row["response"] for row in await sorted_rows(client, batch.output_file_id)]
    for text, found in zip(("one", "two"), many["body"]["data"], strict=True):
        np.testing.assert_allclose(found["embedding"], await engine.embed(text), atol=1e-6)
    assert len(short["body"]["data"][0]["embedding"]) == 5
    assert many["body"]["model"] == "tiny-llava" and many["request_id"] != short["request_id"]
    failed = [row["response"] for row in await sorted_rows(client, batch.error_file_id)]
    assert [each["body"]["error"]["param"] for each in failed] == ["input", "model"]


async def test_a_batch_that_is_cancelled(engine: AsyncEngine, client: AsyncOpenAI) -> None:
    bodies = [chat("first", max_tokens=1), *(chat("x", max_tokens=300) for _ in range(40))]
    for body in bodies:
        body["ignore_eos"] = True
    batch = await begun(client, lines(bodies))
    while not (batch.request_counts and batch.request_counts.completed):
        batch = await client.batches.retrieve(batch.id)
    batch = await client.batches.cancel(batch.id)
    assert batch.status == "cancelling"
    batch = await ended(client, batch)
    assert batch.status == "cancelled"
    found = await rows(client, batch.output_file_id)
    assert 0 < len(found) < 41 and found[0]["custom_id"] == "r0"
    await settled(engine)
    again = await client.batches.cancel(batch.id)
    assert again.status == "cancelled", "what has ended stays as it is"


async def test_files_that_are_none(client: AsyncOpenAI) -> None:
    good = json.loads(lines([chat("a")]))
    wrong = [
        {**good, "url": "/v1/other"},
        {**good, "custom_id": 3},
        {**good, "custom_id": "right"},
        {**good, "custom_id": "right"},
        {**good, "custom_id": "last", "body": 1},
    ]
    data = b"\n".join([*(json.dumps(row).encode() for row in wrong), b"{", b"[]"])
    batch = await ended(client, await begun(client, data))
    assert batch.status == "failed" and batch.errors is not None
    assert [error.line for error in batch.errors.data or []] == [1, 2, 4, 5, 6, 7]
    assert batch.output_file_id is None
    batch = await ended(client, await begun(client, b"\n \n"))
    assert batch.status == "failed"


async def test_what_is_refused(client: AsyncOpenAI) -> None:
    file = await client.files.create(file=("a.jsonl", lines([chat("a")])), purpose="batch")
    good: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    for name, value in (
        ("endpoint", "/v1/rerank"),
        ("completion_window", "1h"),
        ("input_file_id", None),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.batches.create(**{**good, name: value})
        assert caught.value.param == name
    with pytest.raises(openai.NotFoundError) as missing:
        await client.batches.create(**{**good, "input_file_id": "file-x"})
    assert missing.value.param == "input_file_id"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.files.retrieve("file-x")
    assert (missing.value.param, missing.value.code) == (None, "not_found")
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve("batch_x")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.files.create(file=("a.jsonl", b"x"), purpose="vision")
    assert caught.value.param == "purpose"
    with pytest.raises(openai.APIStatusError) as large:
        await client.files.create(file=("a.jsonl", b"x" * (SHARE - 100)), purpose="batch")
    assert large.value.status_code == 413 and "delete some" in large.value.message


async def test_forms(url: str) -> None:
    """A content type in any case; what its parser refuses has a code, and the field it knows."""
    form = b'--x\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    purpose = form % (b"purpose", b"", b"batch")
    file = form % (b"file", b'; filename="a"', lines([chat("a")]))
    headers = {
        "content-type": "Multipart/Form-Data; boundary=x",
        "authorization": f"Bearer {KEYS['ann']}",
    }
    async with httpx.AsyncClient(base_url=f"{url}/v1", headers=headers) as client:
        answer = await client.post("/files", content=purpose + file + b"--x--\r\n")
        assert answer.status_code == 200, answer.text
        large = form % (b"expires_after", b"", b"a" * 5000)
        for body, parameter in ((file + file, "file"), (large, None)):
            answer = await client.post("/files", content=purpose + body + b"--x--\r\n")
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "invalid_value")
            assert error["param"] == parameter


async def test_files_and_batches_are_their_owners(url: str, client: AsyncOpenAI) -> None:
    batch = await ended(client, await begun(client, lines([chat("a", max_tokens=1)])))
    async with openai_client(url, api_key=KEYS["bob"]) as other:
        assert [each async for each in other.files.list()] == []
        assert [each async for each in other.batches.list()] == []
        for call in (
            other.files.retrieve(batch.input_file_id),
            other.files.content(batch.output_file_id or ""),
            other.files.delete(batch.input_file_id),
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
    assert len([each async for each in client.files.list()]) == 2
    assert (await client.files.delete(batch.input_file_id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(batch.input_file_id)


async def test_answers_without_room_are_said_to_be_lost(
    engine: AsyncEngine, client: AsyncOpenAI
) -> None:
    data = lines([chat("a", max_tokens=1)])
    padding = b" " * (SHARE - len(data) - 50)
    batch = await ended(client, await begun(client, data + padding))
    assert batch.status == "failed" and batch.output_file_id is None
    assert batch.errors is not None and batch.errors.data
    assert batch.errors.data[0].code == "no_room"


async def test_files_without_bytes_are_bounded_too(
    monkeypatch: pytest.MonkeyPatch, client: AsyncOpenAI
) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 4)
    kept = [await client.files.create(file=("a", b""), purpose="batch") for _ in range(2)]
    with pytest.raises(openai.APIStatusError) as many:
        await client.files.create(file=("a", b""), purpose="batch")
    assert many.value.status_code == 413 and "delete some" in many.value.message
    await client.files.delete(kept[0].id)
    await client.files.create(file=("a", b""), purpose="batch")


async def test_a_deleted_file_counts_until_its_batch_has_ended(client: AsyncOpenAI) -> None:
    padding = b" " * (SHARE // 2)
    data = lines([chat("a", max_tokens=400, ignore_eos=True)]) + padding
    batch = await begun(client, data)
    await client.files.delete(batch.input_file_id)
    with pytest.raises(openai.APIStatusError) as large:
        await client.files.create(file=("a", data), purpose="batch")
    assert large.value.status_code == 413
    await client.batches.cancel(batch.id)
    assert (await ended(client, batch)).status == "cancelled"
    await client.files.create(file=("a", data), purpose="batch")


async def test_answers_count_as_they_come_and_once() -> None:
    store = files.FileStore(100)
    store.reserve("", 60)
    with pytest.raises(ApiError):
        store.reserve("", 41)
    held = files.StoredFile(owner="", name="a", purpose="batch", data=b"x" * 40)
    store.add(held)
    with store.reading(held) as data, store.reading(held):
        assert data == held.data and store.num_bytes() == 100
        store.remove("", held.id)
        assert store.num_bytes() == 100
    assert store.num_bytes() == 60
    store.reserve("", -60)
    assert store.num_bytes() == 0


async def test_deleting_the_answers_lets_go_of_them(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, client: AsyncOpenAI
) -> None:
    stores: list[files.FileStore] = []
    add = files.FileStore.add
    monkeypatch.setattr(
        files.FileStore, "add", lambda own, file: (stores.append(own), add(own, file))[1]
    )
    batch = await ended(client, await begun(client, lines([chat("a", max_tokens=1)])))
    for name in (batch.input_file_id, batch.output_file_id or ""):
        assert stores[0].num_bytes() > 0
        await client.files.delete(name)
    assert stores[0].num_bytes() == 0
    counts = (await client.batches.retrieve(batch.id)).request_counts
    assert counts is not None and counts.completed == 1
    gc.collect()
    assert not [
        each
        for each in gc.get_objects()
        if isinstance(each, batches.Batch) and each.id == batch.id and each.answers
    ]


async def test_batches_are_few(monkeypatch: pytest.MonkeyPatch, client: AsyncOpenAI) -> None:
    monkeypatch.setattr(batches, "MAX_BATCHES", 4)
    data = lines([chat("a", max_tokens=1)])
    found = [await ended(client, await begun(client, data)) for _ in range(3)]
    kept = [each.id async for each in client.batches.list()]
    assert kept == [found[2].id, found[1].id]


async def test_lists_come_page_by_page(client: AsyncOpenAI) -> None:
    kept = [await client.files.create(file=("a", b""), purpose="batch") for _ in range(3)]
    ids = [each.id for each in kept][::-1]
    assert [each.id async for each in client.files.list(limit=1)] == ids
    assert [each.id async for each in client.files.list(limit=2, order="asc")] == ids[::-1]
    assert [each.id async for each in client.files.list(after=ids[0])] == ids[1:]
    assert [each async for each in client.files.list(purpose="batch_output")] == []
    page = await client.get("/files?limit=2", cast_to=httpx.Response)
    found = page.json()
    assert (found["first_id"], found["last_id"], found["has_more"]) == (ids[0], ids[1], True)
    made = [await ended(client, await begun(client, b"")) for _ in range(3)]
    names = [each.id for each in made][::-1]
    assert [each.id async for each in client.batches.list(limit=1)] == names
    assert [each.id async for each in client.batches.list(after=names[1])] == names[2:]


@pytest.mark.parametrize(
    ("path", "parameter"),
    [
        ("files?limit=0", "limit"),
        ("files?limit=10001", "limit"),
        ("files?limit=x", "limit"),
        ("files?after=file-1", "after"),
        ("files?order=up", "order"),
        ("files?page=2", "page"),
        ("files/file-1?limit=1", "limit"),
        ("batches?limit=101", "limit"),
        ("batches?order=asc", "order"),
        ("models?limit=1", "limit"),
    ],
)
async def test_queries_that_are_refused(client: AsyncOpenAI, path: str, parameter: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.get(f"/{path}", cast_to=object)
    assert caught.value.param == parameter and parameter in caught.value.message


async def test_no_key_takes_the_room_of_another(
    monkeypatch: pytest.MonkeyPatch, url: str, client: AsyncOpenAI
) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 8)
    monkeypatch.setattr(batches, "MAX_BATCHES", 4)
    large = b"x" * (SHARE - 50_000)
    endless = lines([chat("a", max_tokens=400, ignore_eos=True)])
    async with openai_client(url, api_key=KEYS["bob"]) as other:
        for each in (client, other):
            file = await each.files.create(file=("a", large), purpose="batch")
            with pytest.raises(openai.APIStatusError, match=f"your files may have {SHARE} bytes"):
                await each.files.create(file=("a", large), purpose="batch")
            await each.files.delete(file.id)
            running = [await begun(each, endless) for _ in range(2)]
            with pytest.raises(openai.RateLimitError, match="2 of your batches are under way"):
                await begun(each, endless)
            await each.files.create(file=("a", b""), purpose="batch")
            with pytest.raises(openai.APIStatusError, match="there may be 4 of your files"):
                await each.files.create(file=("a", b""), purpose="batch")
        for each in (client, other):
            kept = [batch async for batch in each.batches.list()]
            for batch in kept:
                await each.batches.cancel(batch.id)
            assert {(await ended(each, batch)).status for batch in kept} == {"cancelled"}
            assert len(kept) == len(running)


@pytest.mark.parametrize(
    ("given", "salt", "shares"),
    [
        (None, None, 1),
        ("a", None, 1),
        (["a", "b", "c"], None, 3),
        ([*"abcdefgh"], None, 4),
        (None, lambda _: "tenant", 4),
    ],
)
def test_shares_of_a_key(given: Any, salt: Any, shares: int) -> None:
    assert Keys(given, salt).num_shares == shares


async def test_a_batch_of_a_client_in_this_process_ends_with_it(engine: AsyncEngine) -> None:
    client = engine.openai_client()
    batch = await begun(client, lines([chat("a", max_tokens=400, ignore_eos=True)] * 2))
    await until(lambda: engine.statistics().running)
    assert batch.status != "failed"
    await client.close()
    await settled(engine)
    assert engine.statistics().finished == 0


async def test_a_batch_holds_nothing_of_its_request(engine: AsyncEngine) -> None:
    """A host may put anything into the scope."""

    class Probe:
        pass

    probes: weakref.WeakSet[Probe] = weakref.WeakSet()
    app = Starlette(routes=[Mount("/v1", openai_app(engine, cache_salt=lambda _: "tenant"))])

    async def host(scope: Any, receive: Any, send: Any) -> None:
        probe = Probe()
        probes.add(probe)
        await app({**scope, "probe": probe}, receive, send)

    async with serving(host, lifespan="off") as url, openai_client(url) as client:
        batch = await begun(client, lines([chat("a", max_tokens=400, ignore_eos=True)]))
        await until(lambda: engine.statistics().running)
        gc.collect()
        assert not probes and engine.statistics().running
        await client.batches.cancel(batch.id)
        assert (await ended(client, batch)).status == "cancelled"


def test_lines_of_a_file_are_looked_for_no_further_than_there_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = b"\n \r\n" * 3000 + b" {} \n\n[1]" + b"\n" * 5000 + b"x"
    assert [data[each].strip() for each in batches._lines(data)] == [b"{}", b"[1]", b"x"]
    monkeypatch.setattr(batches, "MAX_LINES", 3)
    found: list[slice] = []
    real = batches._lines

    def counted(given: bytes) -> Any:
        for each in real(given):
            found.append(each)
            yield each

    monkeypatch.setattr(batches, "_lines", counted)
    lines, errors = batches._check_lines(b"1\n" * 1000, CHAT)
    assert not lines and errors[0]["code"] == "invalid_file" and len(found) == 4


async def test_a_long_line_is_read_apart(client: AsyncOpenAI) -> None:
    bodies = [chat("a", max_tokens=1), chat("b", max_tokens=1, stop=["x" * 80_000])]
    batch = await ended(client, await begun(client, lines(bodies)))
    assert batch.status == "completed" and batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    (row,) = await rows(client, batch.error_file_id)
    assert row["custom_id"] == "r1" and row["response"]["body"]["error"]["param"] == "stop"


async def test_a_small_queue(folder: Path) -> None:
    """More prompts in a line than the engine takes at once; and a queue that is full."""
    async with running_engine(folder, max_num_seqs=1, max_queued_requests=1) as engine:
        app = Starlette(routes=[Mount("/v1", openai_app(engine))])
        async with serving(app) as url, openai_client(url) as client:
            body = {"prompt": ["one"] * 5, "max_tokens": 1, "ignore_eos": True}
            data = lines([body], "/v1/completions")
            batch = await ended(client, await begun(client, data, "/v1/completions"))
            (row,) = await rows(client, batch.output_file_id)
            assert len(row["response"]["body"]["choices"]) == 5
            body = {"input": ["one"] * 5}
            data = lines([body], "/v1/embeddings")
            batch = await ended(client, await begun(client, data, "/v1/embeddings"))
            (row,) = await rows(client, batch.output_file_id)
            assert len(row["response"]["body"]["data"]) == 5
            batch = await begun(client, lines([chat("a", max_tokens=400, ignore_eos=True)]))
            await until(lambda: engine.statistics().running)
            waiting = asyncio.create_task(engine.generate("a", greedy(1)))
            await until(lambda: engine.statistics().waiting)
            with pytest.raises(openai.RateLimitError):
                await client.files.create(file=("a", b""), purpose="batch")
            await client.batches.cancel(batch.id)
            assert (await ended(client, batch)).status == "cancelled"
            await waiting
