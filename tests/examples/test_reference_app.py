"""The expense desk over a tiny model, with answers that are written before."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse

from aioengine import SamplingParams, errors
from aioengine.engine.input_processor import InputProcessor
from tests.asgi.serving import serving
from tests.support.engines import encoded, running_engine, settled, until
from tests.support.scripts import Script
from tests.support.tiny import tiny_image, tiny_tokenizer
from tests.support.tools_model import save_tiny_text_caller

pytest.importorskip("aiosqlite")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
try:
    from reference_app import agents, app, backends, models
finally:
    sys.path.pop(0)

EXPENSE = {"merchant": "Rossi", "cents": 2450, "category": "travel", "day": "2026-03-04"}
ENGINE = {"device": "cpu", "dtype": "float32", "max_model_len": 8192, "kv_cache_bytes": 32 << 20}


def call(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_text_caller(
        tmp_path_factory.mktemp("desk_model"), max_position_embeddings=8192
    )


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Answers that the engine gives, one after the other."""
    found: list[str] = []
    tokenizer = tiny_tokenizer()

    async def compiled(*_: object) -> list[Script]:
        token_ids = tokenizer.encode(found.pop(0), add_special_tokens=False)
        return [Script(token_ids, len(tokenizer))]

    monkeypatch.setattr(InputProcessor, "_compile", compiled)
    return found


def settings_of(folder: Path, data: Path, **changes: Any) -> models.Settings:
    sampling = {"temperature": 0, "max_tokens": 400}
    given: dict[str, Any] = {"model": str(folder), "engine": ENGINE, "sampling": sampling}
    return models.Settings(**{**given, "sees_images": False, "data": data, **changes})


@asynccontextmanager
async def running(application: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with application.router.lifespan_context(application) as state:

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await application({**scope, "state": dict(state or {})}, receive, send)

        transport = httpx.ASGITransport(app=with_state)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client


@pytest.fixture
async def client(folder: Path, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with running(app.create_app(settings_of(folder, tmp_path))) as client:
        yield client


def receipt() -> dict[str, Any]:
    return {"image": ("receipt.png", encoded(tiny_image(0)), "image/png")}


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    assert response.status_code == 200
    *lines, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return (json.loads(line.removeprefix("data: ")) for line in lines)


async def test_a_receipt_becomes_an_expense(
    client: httpx.AsyncClient, answers: list[str], tmp_path: Path
) -> None:
    answers += [call("file_expense", {**EXPENSE, "cents": 0}), call("file_expense", EXPENSE)]
    response = await client.post("/receipts", files=receipt(), data={"note": "Taxi"})
    assert response.status_code == 201
    expense = response.json()["expense"]
    assert not answers  # the first call was refused, and the model told
    assert expense == {**EXPENSE, "id": 1, "receipt_id": 1}
    assert (await client.get("/expenses")).json() == [expense]
    assert len([*(tmp_path / "receipts").iterdir()]) == 1


async def test_a_receipt_that_the_reader_cannot_read(
    client: httpx.AsyncClient, answers: list[str]
) -> None:
    answers += [call("file_expense", {}), call("pay", EXPENSE)] * 2
    response = await client.post("/receipts", files=receipt())
    assert response.status_code == 201 and response.json()["expense"] is None
    assert not answers  # as many turns as there may be
    response = await client.post("/receipts", files={"image": ("a.png", b"no image")})
    assert response.status_code == 400
    assert (await client.get("/expenses")).json() == []


async def test_a_question_is_answered_from_the_database(
    client: httpx.AsyncClient, answers: list[str]
) -> None:
    answers += [call("file_expense", EXPENSE), call("search_expenses", {"merchant": "ros"})]
    answers += [call("total_by_category", {"first": "2026-01-01", "last": "2026-12-31"}), "24.50."]
    await client.post("/receipts", files=receipt())
    said = [*events(await client.post("/questions", json={"text": "How much?"}))]
    search, totals = (event for event in said if "call" in event)
    assert [each["merchant"] for each in json.loads(search["result"])] == ["Rossi"]
    assert json.loads(totals["result"]) == {"travel": 2450}
    assert "".join(event.get("text", "") for event in said) == "24.50."
    assert (await client.get("/health")).json() == {"status": "ok"}


async def test_the_report_is_kept(folder: Path, tmp_path: Path, answers: list[str]) -> None:
    settings = settings_of(folder, tmp_path, report_every_s=0.001)
    answers += [call("file_expense", EXPENSE)] * 2
    async with running(app.create_app(settings)) as client:
        for _ in answers[:]:
            await client.post("/receipts", files=receipt())
        report: dict[str, Any] = {}
        while report.get("num_expenses") != 2:
            report = (await client.get("/report")).json()
    assert report["by_month"] == {"2026-03": 4900} and report["similar"] == [[1, 2]]


class Failing:
    """A backend whose model cannot answer."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def stream(self, *_: object) -> AsyncIterator[str]:
        raise self.error
        yield ""


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (errors.InvalidRequestError("prompt is too long"), 422, None),
        (errors.OverloadedError("the queue is full"), 503, "1"),
        (errors.EngineDeadError("the engine has died"), 503, None),
    ],
)
async def test_errors_of_the_engine_have_statuses(
    folder: Path, tmp_path: Path, error: Exception, status: int, retry: str | None
) -> None:
    backend: Any = nullcontext(Failing(error))
    async with running(app.create_app(settings_of(folder, tmp_path), backend)) as client:
        for response in (
            await client.post("/questions", json={"text": "How much?"}),
            await client.post("/receipts", files=receipt()),
        ):
            assert (response.status_code, response.headers.get("retry-after")) == (status, retry)
            assert response.json() == {"detail": str(error)}


async def test_a_client_who_leaves_ends_the_request(folder: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
    async with running_engine(folder, max_model_len=8192, kv_cache_bytes=32 << 20) as engine:
        backend: Any = nullcontext(backends.InProcess(engine, params))
        application = app.create_app(settings_of(folder, tmp_path), backend)
        async with serving(application) as url, httpx.AsyncClient(base_url=url) as client:
            question = {"text": "How much?"}
            async with client.stream("POST", "/questions", json=question) as response:
                async for line in response.aiter_lines():
                    assert "text" in json.loads(line.removeprefix("data: "))
                    break
                assert engine.statistics().running == 1
            await until(lambda: engine.statistics().aborted)
        await settled(engine)
        assert engine.statistics().finished == 0


def chunks_of(answer: str) -> Iterator[dict[str, Any]]:
    """Deltas of OpenAI's API: a call's name, and its arguments in two pieces; or text."""
    if not answer.startswith("<tool_call>"):
        yield {"content": answer}
        return
    read = json.loads(answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    text = json.dumps(read["arguments"])
    first = {"name": read["name"], "arguments": text[:5]}
    yield {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": first}]}
    yield {"tool_calls": [{"index": 0, "function": {"arguments": text[5:]}}]}


def server_of(answers: list[str], asked: list[dict[str, Any]]) -> FastAPI:
    """A server of OpenAI's API that gives the answers, and is not ready at first."""
    server, is_ready = FastAPI(), False

    @server.get("/v1/models")
    async def list_models() -> Any:
        nonlocal is_ready
        if not is_ready:
            is_ready = True
            return JSONResponse({"error": "loading"}, 503)
        return {"object": "list", "data": []}

    @server.post("/v1/chat/completions")
    async def complete(body: dict[str, Any]) -> StreamingResponse:
        asked.append(body)
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        deltas = chunks_of(answers.pop(0))
        choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
        same = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "desk"}
        events = [{**same, "choices": each} for each in choices]
        events.append({**same, "choices": [], "usage": usage})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return StreamingResponse(iter([*lines, "data: [DONE]\n\n"]))

    return server


async def test_the_same_over_http(folder: Path, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []
    answers = [call("file_expense", EXPENSE), call("search_expenses", {}), "24.50."]
    async with serving(server_of(answers, asked)) as url:
        settings = settings_of(folder, tmp_path, backend="http", url=f"{url}/v1", model="desk")
        async with running(app.create_app(settings)) as client:
            filed = await client.post("/receipts", files=receipt())
            said = [*events(await client.post("/questions", json={"text": "How much?"}))]
    assert filed.json()["expense"]["merchant"] == "Rossi"
    assert [each["merchant"] for each in json.loads(said[0]["result"])] == ["Rossi"]
    assert said[1:] == [{"text": "24.50."}]
    first, second, third = asked
    assert first["tool_choice"] == {"type": "function", "function": {"name": "file_expense"}}
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("desk", 400, 0)
    assert "tool_choice" not in second and len(second["tools"]) == 2
    *_, calling, result = third["messages"]
    assert calling["tool_calls"][0]["function"] == {"name": "search_expenses", "arguments": "{}"}
    assert (result["role"], result["tool_call_id"]) == ("tool", "a")


def test_images_come_before_the_note() -> None:
    content = agents.receipt_content("Taxi", b"jpeg")
    assert isinstance(content, list)
    assert [part["type"] for part in content] == ["image_url", "text"]
    assert content[0]["image_url"]["url"] == "data:image/jpeg;base64,anBlZw=="


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="model"):
        models.Settings.from_environment()
    monkeypatch.setenv("DESK_MODEL", "desk")
    monkeypatch.setenv("DESK_BACKEND", "http")
    monkeypatch.setenv("DESK_SAMPLING", '{"max_tokens": 5}')
    monkeypatch.setenv("DESK_SEES_IMAGES", "0")
    settings = models.Settings.from_environment()
    assert (settings.backend, settings.sampling) == ("http", {"max_tokens": 5})
    assert not settings.sees_images
