"""Endpoints that generate: a body in, one answer or a stream of events out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import starmap
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aioengine.asgi.api.answers import Answer
from aioengine.asgi.api.asks import Ask
from aioengine.asgi.client_task import EventStream, attend, failures_in, long_json
from aioengine.asgi.json_body import LONG, BoundedBody, read_object
from aioengine.asgi.service import Service
from aioengine.streams.loop_bridge import run_apart
from aioengine.streams.together import run_together
from aioengine.streams.tokens import TokenStream
from aioengine.types import RequestOutput

__all__ = ["Generation"]


class Generation:
    """The endpoint of one kind of answer. `read` makes an Ask of the body."""

    def __init__(
        self, service: Service, read: Callable[[Mapping[str, Any]], Ask], answer: type[Answer]
    ) -> None:
        self._service = service
        self._read = read
        self._answer = answer

    async def __call__(self, scope: Scope, receive: BoundedBody, send: Send) -> None:
        """Answer one POST request. Raises what goes wrong before the answer has begun."""
        ask = await read_object(receive, self._read)
        model = self._service.check_model(ask.model)
        await attend(receive, self._generate(ask, model, scope, receive, send))

    async def _prepare(self, ask: Ask, scope: Scope) -> Ask:
        """Complete what a request leaves open. Raises what is wrong with it."""
        return ask

    async def _conclude(
        self, ask: Ask, answer: Answer, outputs: Sequence[RequestOutput], scope: Scope
    ) -> None:
        """Do what has to be done before a client is told that its answer is complete."""

    async def _generate(
        self, ask: Ask, model: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        engine = self._service.engine
        ask = await self._prepare(ask, scope)
        answer = self._answer(model, self._service.token_texts, ask)
        engine.check_room(len(ask.prompts) * ask.params.n)
        events = EventStream(
            send,
            [(b"x-request-id", answer.id.encode())],
            failure=answer.failure,
            are_named=answer.has_named_events,
        )
        async with failures_in(events, ask.in_its_words), AsyncExitStack() as stack:
            streams = []
            for number, prompt in enumerate(ask.prompts):
                prompt = self._service.salted(scope, prompt)
                name = answer.id if len(ask.prompts) == 1 else f"{answer.id}-{number}"
                with ask.naming(number):
                    stream = engine.stream(prompt, ask.params, request_id=name)
                stack.callback(stream.close)
                streams.append(stream)
                await asyncio.sleep(0)
            if ask.is_streamed:
                await _stream_deltas(ask, answer, streams, events)
            outputs = await _results(ask, streams)
            await self._conclude(ask, answer, outputs, scope)
            if ask.is_streamed:
                await events.send(*answer.ending(outputs))
                await events.done()
            else:
                body = await _encoded(answer, outputs)
                headers = {"x-request-id": answer.id}
                response = Response(body, headers=headers, media_type="application/json")
                await response(scope, receive, send)


async def _stream_deltas(
    ask: Ask, answer: Answer, streams: Sequence[TokenStream], events: EventStream
) -> None:
    async def relay(number: int, stream: TokenStream) -> None:
        with ask.naming(number):
            async for delta in stream:
                for chunk in answer.chunks(number, delta):
                    await events.send(chunk)
                    await asyncio.sleep(0)

    await run_together(starmap(relay, enumerate(streams)))


async def _results(ask: Ask, streams: Sequence[TokenStream]) -> list[RequestOutput]:
    async def result(number: int, stream: TokenStream) -> RequestOutput:
        with ask.naming(number):
            return await stream.result()

    return await run_together(starmap(result, enumerate(streams)))


async def _encoded(answer: Answer, outputs: Sequence[RequestOutput]) -> bytes:
    whole = await answer.complete(outputs)
    completions = [output for request in outputs for output in request.outputs]
    has_logprobs = any(output.logprobs is not None for output in completions)
    if not has_logprobs and sum(len(output.text) for output in completions) <= LONG:
        return json.dumps(whole).encode()
    return await run_apart(long_json, whole)  # thousands of log probabilities take long
