"""The application: `uvicorn reference_app.app:create_app --factory --app-dir examples`."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Form, HTTPException, Query, Request, UploadFile
from fastapi.responses import JSONResponse, StreamingResponse

from aioengine import errors

from .agents import Agent, clerk, reader, receipt_content
from .backends import Backend, open_backend
from .database import Database
from .models import FiledExpense, Question, Receipt, Report, Settings
from .work import make_report, shrink

MAX_UPLOAD_BYTES = 16 << 20


@dataclass
class Desk:
    """All that a request needs."""

    settings: Settings
    database: Database
    backend: Backend
    report: Report

    async def keep_report(self) -> None:
        while True:
            expenses = await self.database.expenses()
            self.report = await asyncio.to_thread(make_report, expenses)
            await asyncio.sleep(self.settings.report_every_s)


def create_app(
    settings: Settings | None = None, backend: AbstractAsyncContextManager[Backend] | None = None
) -> FastAPI:
    """`backend`: instead of the one that the settings name."""
    settings = settings or Settings.from_environment()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Desk]]:
        (settings.data / "receipts").mkdir(parents=True, exist_ok=True)
        async with (
            Database.open(settings.data / "desk.sqlite") as database,
            backend or open_backend(settings) as opened,
            asyncio.TaskGroup() as tasks,
        ):
            desk = Desk(settings, database, opened, Report())
            keeper = tasks.create_task(desk.keep_report())
            yield {"desk": desk}
            keeper.cancel()

    app = FastAPI(title="Expense desk", lifespan=lifespan)
    app.add_exception_handler(errors.InvalidRequestError, answer_with(422))
    app.add_exception_handler(errors.OverloadedError, answer_with(503, {"Retry-After": "1"}))
    app.add_exception_handler(errors.EngineError, answer_with(503))
    app.post("/receipts", status_code=201)(add_receipt)
    app.post("/questions")(answer_question)
    app.get("/expenses")(list_expenses)
    app.get("/report")(show_report)
    app.get("/health")(show_health)
    return app


def answer_with(status: int, headers: dict[str, str] | None = None) -> Callable[..., JSONResponse]:
    """A handler that answers an error of the engine's with its text."""
    return lambda _, error: JSONResponse({"detail": str(error)}, status, headers)


def desk_of(request: Request) -> Desk:
    desk: Desk = request.state.desk
    return desk


CurrentDesk = Annotated[Desk, Depends(desk_of)]


async def add_receipt(
    desk: CurrentDesk, image: UploadFile, note: Annotated[str, Form(max_length=500)] = ""
) -> Receipt:
    """Keep an image, and have the reader file its expense; `expense` is null where it failed."""
    data = await image.read(MAX_UPLOAD_BYTES + 1)
    if len(data) > MAX_UPLOAD_BYTES:
        raise HTTPException(413, f"images have at most {MAX_UPLOAD_BYTES} bytes")
    try:
        jpeg, width, height = await asyncio.to_thread(shrink, data)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    path = desk.settings.data / "receipts" / f"{hashlib.sha256(jpeg).hexdigest()}.jpg"
    await asyncio.to_thread(path.write_bytes, jpeg)
    receipt_id = await desk.database.add_receipt(path.name, note)
    content = receipt_content(note, jpeg if desk.settings.sees_images else None)
    async with aclosing(reader(desk.backend, desk.database, receipt_id).run(content)) as events:
        async for _ in events:
            pass
    filed = await desk.database.expenses(receipt_id=receipt_id)
    expense = filed[0] if filed else None
    return Receipt(id=receipt_id, width=width, height=height, expense=expense)


async def answer_question(desk: CurrentDesk, question: Question) -> StreamingResponse:
    """The clerk's text and calls as server-sent events; a client that leaves ends the work.

    What goes wrong before the first of them has a status of its own.
    """
    events = as_events(clerk(desk.backend, desk.database), question.text)
    return StreamingResponse(begin(await anext(events), events), media_type="text/event-stream")


async def begin(first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


async def as_events(agent: Agent, text: str) -> AsyncGenerator[str, None]:
    async with aclosing(agent.run(text)) as events:
        async for event in events:
            yield f"data: {json.dumps(event)}\n\n"
    yield "data: [DONE]\n\n"


async def list_expenses(
    desk: CurrentDesk, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> list[FiledExpense]:
    return await desk.database.expenses(limit=limit)


async def show_report(desk: CurrentDesk) -> Report:
    return desk.report


async def show_health() -> dict[str, Any]:
    return {"status": "ok"}
