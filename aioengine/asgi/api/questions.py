"""Endpoints that answer with one JSON object, and stream nothing."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aioengine.asgi.api.asks import Ask
from aioengine.asgi.client_task import EventStream, LongEvent, attend, failures_in, long_json
from aioengine.asgi.json_body import BoundedBody, read_object
from aioengine.asgi.service import Service
from aioengine.streams.loop_bridge import run_apart

__all__ = ["Question"]

Work = Callable[[Service, Ask], Awaitable[dict[str, Any]]]


class Question:
    """The endpoint of one kind of question. `read` makes an Ask of the body, `work` the answer.

    A `LongEvent` is written as JSON in a thread.
    """

    def __init__(
        self, service: Service, read: Callable[[Mapping[str, Any]], Ask], work: Work
    ) -> None:
        self._service = service
        self._read = read
        self._work = work

    async def __call__(self, scope: Scope, receive: BoundedBody, send: Send) -> None:
        """Answer one POST request. Raises what goes wrong."""
        ask = await read_object(receive, self._read)
        ask = replace(ask, model=self._service.check_model(ask.model))
        await attend(receive, self._answer(ask, scope, receive, send))

    async def _answer(self, ask: Ask, scope: Scope, receive: Receive, send: Send) -> None:
        prompts = tuple(self._service.salted(scope, prompt) for prompt in ask.prompts)
        async with failures_in(EventStream(send), ask.in_its_words):
            answer = await self._work(self._service, replace(ask, prompts=prompts))
        if isinstance(answer, LongEvent):
            body = await run_apart(long_json, answer)
        else:
            body = json.dumps(answer).encode()
        await Response(body, media_type="application/json")(scope, receive, send)
