"""Endpoint of the API: who may ask it, bodies within bounds, and errors in the client's shape."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from aioengine.asgi.client_task import Reply
from aioengine.asgi.error_responses import api_error, error_response, forget_frames
from aioengine.asgi.service import Service

__all__ = ["QUERY", "Handler", "endpoint"]

CLIENT_LEFT = 499
QUERY = "aioengine.query"
"""Where a scope has the known fields of its query, as text."""

Handler = Callable[[Scope, Any, Send], Awaitable[None]]
"""Its second argument is a BoundedBody."""
ReadQuery = Callable[[Mapping[str, str]], Mapping[str, str]]


def endpoint(
    service: Service,
    path: str,
    handle: Handler,
    method: str = "GET",
    *,
    needs_room: bool | None = None,
    query: ReadQuery | None = None,
) -> Route:
    """Make the route of an endpoint. `needs_room`: it is refused where the engine's queue is full;
    None: as all POST requests are; `query`: reads what its URL has, which the scope has under
    `QUERY` then; None: it may be anything."""
    needs = method == "POST" if needs_room is None else needs_room
    app = _Endpoint(service, handle, needs_room=needs, query=query)
    return Route(path, app, methods=[method])


class _Endpoint:
    """An ASGI app for those who have a key, with bounded bodies."""

    def __init__(
        self,
        service: Service,
        handle: Handler,
        *,
        needs_room: bool,
        query: ReadQuery | None,
    ) -> None:
        self._service = service
        self._handle = handle
        self._needs_room = needs_room
        self._query = query

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply, body = Reply(send), self._service.bounded(scope, receive)
        try:
            self._service.keys.check(scope)
            if self._needs_room:
                self._service.engine.check_room(1)  # before a body is read
            if self._query is not None:
                scope[QUERY] = self._query(_query_of(scope))
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
            await error_response(found, scope["path"])(scope, receive, reply)
        finally:
            body.close()


def _query_of(scope: Scope) -> dict[str, str]:
    """Fields of a query; OpenAI's clients write `name[]` for those that are lists."""
    given = QueryParams(scope.get("query_string", b""))
    return {name.partition("[")[0]: value for name, value in given.items()}
