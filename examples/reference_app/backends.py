"""The model behind the agents: an engine in this process, or any server of OpenAI's API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from .models import Settings

Message = dict[str, Any]
Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Reply:
    """A whole turn of the model, as a message, and how many tokens it took."""

    message: Message
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Backend(Protocol):
    def stream(
        self, messages: Sequence[Message], tools: Sequence[Schema], must_call: str | None
    ) -> AsyncGenerator[str | Reply, None]:
        """One turn: pieces of its text as they come, and the reply last.

        `must_call` names a tool that has to be called.
        """
        ...


def open_backend(settings: Settings) -> AbstractAsyncContextManager[Backend]:
    return InProcess.open(settings) if settings.backend == "in_process" else OverHttp.open(settings)


class InProcess:
    def __init__(self, engine: Any, params: Any) -> None:
        self._engine = engine
        self._params = params

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: Settings) -> AsyncIterator[InProcess]:
        from aioengine import AsyncEngine, SamplingParams

        async with AsyncEngine.from_pretrained(settings.model, **settings.engine) as engine:
            yield cls(engine, SamplingParams(**settings.sampling))

    async def stream(
        self, messages: Sequence[Message], tools: Sequence[Schema], must_call: str | None
    ) -> AsyncGenerator[str | Reply, None]:
        choice = must_call or "auto"
        async with self._engine.stream(
            messages, self._params, tools=tools, tool_choice=choice
        ) as stream:
            async for delta in stream:
                if delta.content:
                    yield delta.content
            output = await stream.result()
        usage = output.usage
        yield Reply(output.message.to_dict(), usage.prompt_tokens, usage.completion_tokens)


class OverHttp:
    def __init__(self, client: Any, model: str, sampling: Mapping[str, Any]) -> None:
        self._client = client
        self._model = model
        self._sampling = sampling

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: Settings) -> AsyncIterator[OverHttp]:
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=settings.url, api_key="none") as client:
            await cls._wait_ready(client)
            yield cls(client, settings.model, settings.sampling)

    @staticmethod
    async def _wait_ready(client: Any, every_s: float = 0.05, within_s: float = 300) -> None:
        """Return once the server lists its models, which some do while they load."""
        from openai import APIConnectionError, InternalServerError

        async with asyncio.timeout(within_s):
            while True:
                try:
                    await client.with_options(max_retries=0).models.list()
                    return
                except (APIConnectionError, InternalServerError):
                    await asyncio.sleep(every_s)

    async def stream(
        self, messages: Sequence[Message], tools: Sequence[Schema], must_call: str | None
    ) -> AsyncGenerator[str | Reply, None]:
        body: dict[str, Any] = dict(self._sampling)
        if must_call is not None:
            body["tool_choice"] = {"type": "function", "function": {"name": must_call}}
        text: list[str] = []
        calls: dict[int, Message] = {}
        usage = None
        async with await self._client.chat.completions.create(
            model=self._model, messages=messages, tools=tools, stream=True, extra_body=body
        ) as chunks:
            async for chunk in chunks:
                usage = chunk.usage or usage
                for delta in (choice.delta for choice in chunk.choices):
                    for part in delta.tool_calls or ():
                        _add_part(calls, part)
                    if delta.content:
                        text.append(delta.content)
                        yield delta.content
        message: Message = {"role": "assistant", "content": "".join(text)}
        if calls:
            message["tool_calls"] = list(calls.values())
        counts = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
        yield Reply(message, *counts)


def _add_part(calls: dict[int, Message], part: Any) -> None:
    """A call's id and name come first, its arguments in pieces."""
    function = {"name": part.function.name, "arguments": ""}
    call = calls.setdefault(part.index, {"id": part.id, "type": "function", "function": function})
    call["function"]["arguments"] += part.function.arguments or ""
