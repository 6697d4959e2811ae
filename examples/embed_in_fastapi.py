"""An engine inside a FastAPI application, with OpenAI's API beside an endpoint of its own.

`uvicorn embed_in_fastapi:app --app-dir examples`
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException
from fastapi.responses import StreamingResponse

from aioengine import AsyncEngine, SamplingParams, TokenStream, demo_model, errors
from aioengine.asgi import openai_app

engine = AsyncEngine.from_pretrained(demo_model())


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with engine:
        yield


async def ask(messages: list[dict[str, Any]]) -> AsyncIterator[TokenStream]:
    params = SamplingParams(temperature=0, max_tokens=96)
    try:
        async with engine.stream(messages, params) as stream:
            yield stream
    except errors.InvalidRequestError as error:
        raise HTTPException(400, str(error)) from error


async def events(stream: TokenStream) -> AsyncIterator[str]:
    async for delta in stream:
        yield f"data: {json.dumps({'text': delta.text})}\n\n"


app = FastAPI(lifespan=lifespan)
app.mount("/v1", openai_app(engine))


@app.post("/chat")
async def chat(stream: Annotated[TokenStream, Depends(ask)]) -> StreamingResponse:
    return StreamingResponse(events(stream), media_type="text/event-stream")


@app.get("/ping")
async def ping() -> str:
    return "pong"
