"""responses: items in, a response out, whole or as events, and kept where the host keeps them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aioengine.asgi.api.answers import Answer
from aioengine.asgi.api.asks import Ask
from aioengine.asgi.api.generation import Generation
from aioengine.asgi.client_task import JsonAnswer, long_json
from aioengine.asgi.error_responses import ApiError
from aioengine.asgi.response_store import ResponseStore
from aioengine.asgi.responses.events import ResponseAnswer
from aioengine.asgi.responses.items import without_bytes
from aioengine.asgi.responses.request import ResponseAsk, read_response
from aioengine.asgi.service import Service
from aioengine.errors import InvalidRequestError, shown
from aioengine.streams.loop_bridge import run_apart
from aioengine.types import RequestOutput

__all__ = ["KeptResponses", "Responses", "read_unkept"]

ID = re.compile("resp_[0-9a-f]{32}")
"""All that a store is ever asked for: it may make a file's name of it."""
NEEDS_STORE = (
    "previous_response_id cannot be followed: this server keeps no responses; give the earlier "
    "items in input"
)


def read_unkept(body: Mapping[str, Any]) -> Ask:
    """The body of a request whose response is not kept. Raises InvalidRequestError."""
    return _unkept(read_response(body))


def _unkept(ask: ResponseAsk) -> ResponseAsk:
    if ask.previous_id is not None:
        raise InvalidRequestError(NEEDS_STORE, parameter="previous_response_id")
    return replace(ask, is_kept=False)


class KeptResponses:
    """Responses of a store, each for the owner of its key alone: to be got and to be deleted."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service = service
        self._store = store

    async def load(self, scope: Scope, response_id: str) -> Mapping[str, Any] | None:
        """The record of a response; None where whoever asks has none of this id."""
        record = await self._store.load(response_id) if ID.fullmatch(response_id) else None
        is_own = record is not None and record["owner"] == self._service.keys.owner(scope)
        return record if is_own else None

    async def save(self, scope: Scope, response: Mapping[str, Any], items: Sequence[Any]) -> None:
        """Keep a response, and the items before it."""
        before = await run_apart(without_bytes, items)
        owner = self._service.keys.owner(scope)
        record = {
            "response": response,
            "items": [*before, *response["output"]],
            "owner": owner,
        }
        await self._store.save(response["id"], record)

    async def get(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a GET request for one. Raises ApiError."""
        record = await self._asked_for(scope)
        body = await run_apart(long_json, record["response"])  # it may have log probabilities
        await Response(body, media_type="application/json")(scope, receive, send)

    async def delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a DELETE request for one. Raises ApiError."""
        response_id = (await self._asked_for(scope))["response"]["id"]
        await self._store.delete(response_id)
        answer = {"id": response_id, "object": "response", "deleted": True}
        await JsonAnswer(answer)(scope, receive, send)

    async def _asked_for(self, scope: Scope) -> Mapping[str, Any]:
        response_id = scope["path_params"]["response_id"]
        record = await self.load(scope, response_id)
        if record is None:
            message = f"no response {shown(response_id)} is kept here"
            raise ApiError(404, message, parameter="response_id", code="not_found")
        return record


class Responses(Generation):
    """The endpoint. `kept`: None where responses are not kept."""

    def __init__(self, service: Service, kept: KeptResponses | None) -> None:
        super().__init__(service, read_response, ResponseAnswer)
        self._kept = kept

    async def _prepare(self, ask: Ask, scope: Scope) -> Ask:
        asked = cast("ResponseAsk", ask)
        if self._kept is None:
            return _unkept(asked)
        if asked.previous_id is None:
            return asked
        record = await self._kept.load(scope, asked.previous_id)
        if record is None:
            message = f"previous_response_id {shown(asked.previous_id)} is not kept here"
            raise ApiError(
                400,
                message,
                parameter="previous_response_id",
                code="previous_response_not_found",
            )
        return await run_apart(asked.after, record["items"])

    async def _conclude(
        self, ask: Ask, answer: Answer, outputs: Sequence[RequestOutput], scope: Scope
    ) -> None:
        asked = cast("ResponseAsk", ask)
        if self._kept is not None and asked.is_kept:
            await self._kept.save(scope, await answer.complete(outputs), asked.all_items)
