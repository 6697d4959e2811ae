"""The ASGI applications: OpenAI's API for one engine, and the same with a status page around it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Unpack

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from aioengine.asgi.api.batches import Batches, Kinds
from aioengine.asgi.api.chat import ChatAnswer, read_chat
from aioengine.asgi.api.completions import TextAnswer, read_completion
from aioengine.asgi.api.files import Files, FileStore
from aioengine.asgi.api.generation import Generation
from aioengine.asgi.api.messages import MessagesAnswer, read_counted, read_messages
from aioengine.asgi.api.openapi import document
from aioengine.asgi.api.responses import KeptResponses, Responses
from aioengine.asgi.api.tokenize import Tokens, count, read_text, read_tokenize, show, text_of
from aioengine.asgi.api.transcription import Transcription
from aioengine.asgi.client_task import Reply
from aioengine.asgi.error_responses import (
    RETRY_AFTER_S,
    ApiError,
    anthropic_error,
    api_error,
    error_response,
    forget_frames,
)
from aioengine.asgi.origins import guards
from aioengine.asgi.service import Service, ServiceOptions
from aioengine.asgi.status import StatusPage
from aioengine.engine.async_engine import AsyncEngine
from aioengine.metrics import Metrics
from aioengine.types import EngineState

__all__ = ["client_app", "openai_app", "service_app"]

CLIENT_LEFT = 499

Handler = Callable[[Scope, Any, Send], Awaitable[None]]
"""Its second argument is a BoundedBody."""
ErrorBody = Callable[[ApiError], Mapping[str, Any]]
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
    return _application(engine, options, _api_routes)


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
    app.state.bodies = service.budget
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


async def _http_error(_request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the shape of all other errors."""
    assert isinstance(error, HTTPException)
    found = ApiError(error.status_code, error.detail, headers=error.headers or {})
    return error_response(found)


def _service_routes(service: Service) -> list[BaseRoute]:
    page = StatusPage(
        service.engine,
        service.model_names[0],
        max_body_bytes=service.max_body_bytes,
        needs_key=service.keys.are_asked_for,
    )
    probes = _probes(service)
    return [
        *(_endpoint(service, route.path, route.app) for route in page.routes()),
        *_tokens(service),
        *probes,
        Mount("/v1", routes=[*_api_routes(service), *probes]),
    ]


def _openai_routes(service: Service) -> list[BaseRoute]:
    return [*_api_routes(service), *_probes(service)]


def _api_routes(service: Service) -> list[BaseRoute]:
    kinds: Kinds = {
        "/v1/chat/completions": (read_chat, ChatAnswer),
        "/v1/completions": (read_completion, TextAnswer),
    }
    store = FileStore(service.max_files_bytes)
    files, batches = Files(service, store), Batches(service, store, kinds)
    posts: dict[str, Handler] = {
        **{path[3:]: Generation(service, *kind) for path, kind in kinds.items()},
        "/audio/transcriptions": Transcription(service),
        "/files": files.upload,
        "/batches": batches.create,
        "/batches/{name}/cancel": batches.cancel,
    }
    gets: dict[str, Handler] = {
        "/files": files.all,
        "/files/{name}": files.one,
        "/files/{name}/content": files.content,
        "/batches": batches.all,
        "/batches/{name}": batches.one,
    }
    anthropic: dict[str, Handler] = {
        "/messages": Generation(service, read_messages, MessagesAnswer),
        "/messages/count_tokens": Tokens(service, read_counted, count),
    }

    async def models(scope: Scope, receive: Receive, send: Send) -> None:
        fields = {"object": "model", "created": service.created, "owned_by": "aioengine"}
        data = [{"id": name, **fields} for name in service.model_names]
        answer: dict[str, object] = {"object": "list", "data": data}
        if (name := scope["path_params"].get("name")) is not None:
            answer = {"id": service.check_model(name), **fields}
        await JSONResponse(answer)(scope, receive, send)

    async def openapi(scope: Scope, receive: Receive, send: Send) -> None:
        found = document(routes, scope.get("root_path", ""), service.keys.are_asked_for)
        await JSONResponse(found)(scope, receive, send)

    routes = [
        *(_endpoint(service, path, handle, "POST") for path, handle in posts.items()),
        *(_endpoint(service, path, handle) for path, handle in gets.items()),
        _endpoint(service, "/files/{name}", files.one, "DELETE"),
        *(
            _endpoint(service, path, handle, "POST", anthropic_error)
            for path, handle in anthropic.items()
        ),
        *_response_routes(service),
        _endpoint(service, "/models", models),
        _endpoint(service, "/models/{name:path}", models),
        _endpoint(service, "/openapi.json", openapi),
        *_tokens(service),
    ]
    return routes


def _tokens(service: Service) -> list[BaseRoute]:
    return [
        _endpoint(service, "/tokenize", Tokens(service, read_tokenize, show), "POST"),
        _endpoint(service, "/detokenize", Tokens(service, read_text, text_of), "POST"),
    ]


def _response_routes(service: Service) -> list[BaseRoute]:
    store, path = service.response_store, "/responses/{response_id}"
    kept = None if store is None else KeptResponses(service, store)
    routes: list[BaseRoute] = [_endpoint(service, "/responses", Responses(service, kept), "POST")]
    if kept is not None:
        routes += [
            _endpoint(service, path, kept.get),
            _endpoint(service, path, kept.delete, "DELETE"),
        ]
    return routes


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

    return [Route("/health", health, methods=["GET"]), _endpoint(service, "/metrics", scrape)]


def _endpoint(
    service: Service,
    path: str,
    handle: Handler,
    method: str = "GET",
    error_body: ErrorBody | None = None,
) -> Route:
    return Route(path, _Endpoint(service, handle, error_body), methods=[method])


class _Endpoint:
    """An ASGI app for those who have a key, with bounded bodies.

    Its errors are OpenAI's, or have the bodies that `error_body` makes.
    """

    def __init__(
        self, service: Service, handle: Handler, error_body: ErrorBody | None = None
    ) -> None:
        self._service = service
        self._handle = handle
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply, body = Reply(send), self._service.bounded(scope, receive)
        try:
            self._service.keys.check(scope)
            if scope["method"] == "POST":
                self._service.engine.check_room(1)  # before a body is read
            await self._handle(scope, body, reply)
        except ClientDisconnect as error:
            forget_frames(error)
            if not reply.has_begun:
                # Nobody reads it; but some hosts' middleware waits for a response.
                with suppress(ClientDisconnect):
                    await Response(status_code=CLIENT_LEFT)(scope, receive, reply)
        except Exception as error:
            if reply.has_begun or isinstance(error, HTTPException):
                raise  # Starlette's own are for the application's handler
            found = api_error(error)
            forget_frames(error)
            if found.status == 408 and scope.get("http_version", "").startswith("1"):
                # The rest may never come. A client that is quick to send should have the answer
                # first, which a server that closes at once takes from it.
                found.headers = {**found.headers, "connection": "close"}
            shape = self._error_body
            body_of = None if shape is None else shape(found)
            await error_response(found, body_of)(scope, receive, reply)
        finally:
            body.close()
