"""The front: reads a request, asks a replica, and asks another one if that is lost too early.

Nothing is passed on before the first byte of a stream of events, or the last byte of anything else.
So a request that fails until then is made again, and one that fails later ends with an error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from aioengine.asgi.error_responses import ApiError, api_error, error_response
from aioengine.asgi.json_body import LONG, BoundedBody, parse_object
from aioengine.errors import EngineClosedError, EngineDeadError, EngineError, OverloadedError
from aioengine.ray_serve.affinity import Affinity, affinity_of_form, affinity_of_object
from aioengine.ray_serve.calls import HttpRequest, Route
from aioengine.streams.loop_bridge import run_apart

__all__ = ["Front"]

Messages = AsyncGenerator[Message, None]


class Front:
    """Deployment that Serve makes for its HTTP proxies. `engines`: a handle to the deployment of
    replicas."""

    def __init__(
        self, engines: Any, *, max_body_bytes: int, body_timeout_s: float, max_attempts: int
    ) -> None:
        self._respond = engines.options(method_name="respond", stream=True)
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._max_attempts = max_attempts

    async def __call__(self, request: Request) -> Response:
        """The response to one HTTP request, of whatever kind."""
        try:
            call = await self._read(request)
            if call.path == "/v1/metrics":
                raise ApiError(404, "of one replica or another, metrics would say nothing")
            return await self._answer(call, Route(await _affinity(call)))
        except ClientDisconnect:
            return Response()
        except Exception as error:
            return error_response(_api_error(error), request.url.path)

    async def _read(self, request: Request) -> HttpRequest:
        scope = request.scope
        body = BoundedBody(scope, request.receive, self._max_body_bytes, self._body_timeout_s)
        return HttpRequest(
            method=request.method,
            path=scope["path"].removeprefix(scope["root_path"]),
            query_string=scope["query_string"],
            headers=list(scope["headers"]),
            body=await Request(scope, body).body(),
        )

    async def _answer(self, call: HttpRequest, route: Route) -> Response:
        attempt = 1
        while True:
            try:
                return await _response(self._ask(call, route))
            except Exception as error:
                if attempt == self._max_attempts or not _is_lost(error):
                    raise
            attempt += 1

    async def _ask(self, call: HttpRequest, route: Route) -> Messages:
        """A replica's messages. Closing this generator ends the request there."""
        messages = self._respond.remote(call, route=route)
        try:
            async for message in messages:
                yield message
        except (GeneratorExit, asyncio.CancelledError):
            messages.cancel()
            raise


async def _affinity(call: HttpRequest) -> Affinity:
    """Extract what a request has in common with others; nothing, if a replica will refuse it."""
    content_type = dict(call.headers).get(b"content-type", b"").decode("latin-1")
    try:
        if len(call.body) <= LONG:
            return _read_affinity(content_type, call.body)
        return await run_apart(_read_affinity, content_type, call.body)
    except ApiError:
        return Affinity()


def _read_affinity(content_type: str, body: bytes) -> Affinity:
    if content_type.startswith("multipart/form-data"):
        return affinity_of_form(content_type, body)
    return affinity_of_object(parse_object(body)) if body else Affinity()


async def _response(messages: Messages) -> Response:
    """A stream of events once it has begun; anything else once it is whole."""
    try:
        start = await anext(messages)
        content_type = dict(start["headers"]).get(b"content-type", b"")
        body = b""
        async for message in messages:
            body += message.get("body", b"")
            if body and content_type.startswith(b"text/event-stream"):
                response: Response = StreamingResponse(_events(body, messages), start["status"])
                break
        else:
            response = Response(body, start["status"])
    except BaseException:
        await messages.aclose()
        raise
    # Serve's proxy adds an id of its own under this name.
    response.raw_headers = [each for each in start["headers"] if each[0] != b"x-request-id"]
    return response


async def _events(begun: bytes, messages: Messages) -> AsyncGenerator[bytes, None]:
    """The rest of a stream of events; what goes wrong is its last one."""
    async with aclosing(messages):
        yield begun
        try:
            async for message in messages:
                yield message.get("body", b"")
        except Exception as error:
            yield b"data: " + json.dumps(_api_error(error).body).encode() + b"\n\n"


def _is_lost(error: Exception) -> bool:
    """Return whether a replica's end, and nothing about the request, is what went wrong."""
    if isinstance(error, EngineError):
        return True
    return isinstance(error, RayError) and not isinstance(error, RayTaskError)


def _api_error(error: Exception) -> ApiError:
    if isinstance(error, BackPressureError):
        return api_error(OverloadedError("all replicas have their queues full; try later"))
    if isinstance(error, DeploymentUnavailableError):
        return api_error(EngineClosedError("no replica can be started"))
    if _is_lost(error):
        return api_error(EngineDeadError("the replica that ran the request was lost"))
    return api_error(error)
