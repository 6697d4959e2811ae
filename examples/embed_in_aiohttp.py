"""An engine inside an aiohttp application: `python embed_in_aiohttp.py`, then POST messages."""

import json
from collections.abc import AsyncIterator

from aiohttp import web

from aioengine import AsyncEngine, SamplingParams, demo_model, errors

ENGINE = web.AppKey("engine", AsyncEngine)


async def run_engine(app: web.Application) -> AsyncIterator[None]:
    async with AsyncEngine.from_pretrained(demo_model()) as app[ENGINE]:
        yield


async def chat(request: web.Request) -> web.StreamResponse:
    params = SamplingParams(temperature=0, max_tokens=96)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    try:
        async with request.app[ENGINE].stream(await request.json(), params) as stream:
            await response.prepare(request)
            async for delta in stream:
                event = f"data: {json.dumps({'text': delta.text})}\n\n"
                await response.write(event.encode())
    except errors.InvalidRequestError as error:
        raise web.HTTPBadRequest(text=str(error)) from error
    return response


def make_app() -> web.Application:
    app = web.Application(client_max_size=64 << 20)
    app.cleanup_ctx.append(run_engine)
    app.router.add_post("/chat", chat)
    return app


if __name__ == "__main__":
    web.run_app(make_app(), host="127.0.0.1", handler_cancellation=True)
