"""The ASGI applications: OpenAI's API for one engine, and the same with a status page around it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Unpack

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from aioengine.asgi.endpoint import endpoint
from aioengine.asgi.error_responses import RETRY_AFTER_S, error_response, protocol_error
from aioengine.asgi.origins import guards
from aioengine.asgi.routes import api_routes, token_routes
from aioengine.asgi.service import Service, ServiceOptions
from aioengine.asgi.status import StatusPage
from aioengine.engine.async_engine import AsyncEngine
from aioengine.metrics import Metrics
from aioengine.types import EngineState

__all__ = ["client_app", "openai_app", "service_app"]

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def openai_app(engine: AsyncEngine, **options: Unpack[ServiceOptions]) -> Starlette:
    """OpenAI's API for one engine, to be mounted in an application: `app.mount("/v1", ...)`.

    Serves chat/completions, completions, responses, audio/transcriptions, files, batches, models,
    health and metrics, and Anthropic's messages, tokenize, detokenize and openapi.json. The host's
    lifespan starts and closes the engine; where the app is served by itself, its own does, if
    nobody has started the engine before. `options`: see ServiceOptions. Raises InvalidRequestError
    for an empty key.
    """
    return _application(engine, options, _openai_routes)


def client_app(engine: AsyncEngine, **options: Unpack[ServiceOptions]) -> Starlette:
    """Build the same for a client in this process: without health and metrics, so that dropping
    the app leaves nothing in the engine.

    Arguments as in `openai_app`.
    """
    return _application(engine, options, api_routes)


def service_app(engine: AsyncEngine, **options: Unpack[ServiceOptions]) -> Starlette:
    """Build the app of `python -m aioengine serve`: the same below /v1, beside a status page at /
    and a page at /try where a person asks the model.

    Arguments as in `openai_app`. A browser that has no key asks its user: any name, and the key as
    the password.
    """
    return _application(engine, options, _service_routes)


def _application(
    engine: AsyncEngine,
    options: ServiceOptions,
    routes: Callable[[Service], list[BaseRoute]],
) -> Starlette:
    own: dict[str, Any] = dict(options)
    middleware = guards(own.pop("trusted_hosts", None), own.pop("allowed_origins", None))
    service = Service(engine, **own)
    app = Starlette(
        routes=routes(service),
        lifespan=_lifespan(engine),
        middleware=[*middleware, Middleware(_SlashTaker)],
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False  # to a slash that is taken again
    app.state.bodies, app.state.batches = service.budget, service.batches
    return app


class _SlashTaker:
    """Takes the slash from the end of a path: some hosts (Litestar) put one there."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if len(path) > 1 and path.endswith("/"):
            scope = {**scope, "path": path[:-1]}
        await self._app(scope, receive, send)


def _lifespan(engine: AsyncEngine) -> Lifespan:
    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        if engine.state is not EngineState.NEW:
            yield  # somebody else's to close
            return
        async with engine:
            yield

    return lifespan


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, and forms that cannot be read, in the shape of other errors."""
    assert isinstance(error, HTTPException)
    found = protocol_error(error.status_code, error.detail)
    found.headers = {**found.headers, **(error.headers or {})}
    return error_response(found, request.scope["path"])


def _service_routes(service: Service) -> list[BaseRoute]:
    page = StatusPage(
        service.engine,
        service.model_names[0],
        max_body_bytes=service.max_body_bytes,
        needs_key=service.keys.are_asked_for,
    )
    probes = _probes(service)
    return [
        *(endpoint(service, route.path, route.app) for route in page.routes()),
        *token_routes(service),
        *probes,
        Mount("/v1", routes=api_routes(service, probes)),
    ]


def _openai_routes(service: Service) -> list[BaseRoute]:
    return api_routes(service, _probes(service))


def _probes(service: Service) -> list[BaseRoute]:
    metrics = Metrics(service.engine, model_name=service.model_names[0])

    async def health(_request: Request) -> Response:
        state = service.engine.state
        is_well = state is EngineState.RUNNING
        headers = {} if is_well else {"retry-after": str(RETRY_AFTER_S)}
        return JSONResponse({"status": state}, 200 if is_well else 503, headers)

    async def scrape(scope: Scope, receive: Receive, send: Send) -> None:
        accept = Request(scope).headers.get("accept", "")
        body, content_type = metrics.render(accept)
        await Response(body, headers={"content-type": content_type})(scope, receive, send)

    return [Route("/health", health, methods=["GET"]), endpoint(service, "/metrics", scrape)]
