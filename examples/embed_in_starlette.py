"""An engine inside a Starlette application: OpenAI's API, and an image described as it is read.

`uvicorn embed_in_starlette:app --app-dir examples`
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Mount, Route

from aioengine import AsyncEngine, SamplingParams, demo_model, errors
from aioengine.asgi import openai_app

engine = AsyncEngine.from_pretrained(demo_model())


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with engine:
        yield


async def describe(image: bytes) -> AsyncIterator[str]:
    prompt = "USER: <image>\nDescribe the picture. ASSISTANT:"
    params = SamplingParams(temperature=0, max_tokens=96)
    try:
        async with engine.stream(prompt, params, images=[image]) as stream:
            async for delta in stream:
                yield delta.text
    except errors.MediaError as error:
        yield f"{error}\n"


async def post_image(request: Request) -> StreamingResponse:
    return StreamingResponse(describe(await request.body()), media_type="text/plain")


app = Starlette(
    lifespan=lifespan,
    routes=[
        Route("/describe", post_image, methods=["POST"]),
        Mount("/v1", openai_app(engine)),
    ],
)
