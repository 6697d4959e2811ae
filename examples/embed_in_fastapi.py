"""An engine inside a FastAPI application: `uvicorn embed_in_fastapi:app --app-dir examples`."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse

from aioengine import AsyncEngine, SamplingParams, TokenStream, demo_model, errors


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with AsyncEngine.from_pretrained(demo_model()) as app.state.engine:
        yield


async def ask(request: Request, messages: list[dict[str, Any]]) -> AsyncIterator[TokenStream]:
    params = SamplingParams(temperature=0, max_tokens=96)
    try:
        async with request.app.state.engine.stream(messages, params) as stream:
            yield stream
    except errors.InvalidRequestError as error:
        raise HTTPException(400, str(error)) from error


async def events(stream: TokenStream) -> AsyncIterator[str]:
    async for delta in stream:
        yield f"data: {json.dumps({'text': delta.text})}\n\n"


app = FastAPI(lifespan=lifespan)


@app.post("/chat")
async def chat(stream: Annotated[TokenStream, Depends(ask)]) -> StreamingResponse:
    return StreamingResponse(events(stream), media_type="text/event-stream")
