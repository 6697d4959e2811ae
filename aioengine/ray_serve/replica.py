"""One replica: an engine in the event loop of its process, and OpenAI's API in front of it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from starlette.routing import Mount, Router
from starlette.types import Message

from aioengine import (
    Delta,
    EngineConfig,
    EngineState,
    EngineStatistics,
    RequestOutput,
    SamplingParams,
)
from aioengine.asgi import openai_app
from aioengine.engine.async_engine import AsyncEngine
from aioengine.engine.prompts import PromptLike
from aioengine.errors import EngineClosedError, EngineDeadError
from aioengine.ray_serve.calls import HttpRequest, Route, answer

__all__ = ["EngineReplica"]


class EngineReplica:
    """Deployment that Serve makes in each replica's process; the front and handles call its
    methods.

    Calls that take a `route` go where its affinity leads; Serve's router reads it on the way.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        model: str | os.PathLike[str],
        config: EngineConfig,
        *,
        model_names: Sequence[str] = (),
        api_key: str | None = None,
        max_body_bytes: int = 64 << 20,
        stream_interval_s: float = 0,
    ) -> None:
        self._is_closing = False
        self._stream_interval_s = stream_interval_s
        self._engine = AsyncEngine.from_pretrained(model, config=config)
        await self._engine.start()
        app = openai_app(
            self._engine, model_names=model_names, api_key=api_key, max_body_bytes=max_body_bytes
        )
        self._app = Router([Mount("/v1", app)])

    async def respond(
        self, request: HttpRequest, *, route: Route | None = None
    ) -> AsyncIterator[Message]:
        """The ASGI messages of the answer. Raises EngineError where the engine can give none."""
        await self.check_health()
        answering = answer(self._app, request, interval_s=self._stream_interval_s)
        async with aclosing(answering) as messages:
            async for message in messages:
                if message["type"] == "http.response.start" and message["status"] >= 500:
                    await self.check_health()
                yield message

    async def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        route: Route | None = None,
        **options: Any,
    ) -> RequestOutput:
        """`AsyncEngine.generate`."""
        return await self._engine.generate(prompt, params, **options)

    async def stream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        route: Route | None = None,
        **options: Any,
    ) -> AsyncIterator[Delta]:
        """The deltas of `AsyncEngine.stream`."""
        async with self._engine.stream(prompt, params, **options) as stream:
            async for delta in stream:
                yield delta

    async def statistics(self) -> EngineStatistics:
        """`AsyncEngine.statistics`, to be asked of all replicas by `handle.broadcast`."""
        return self._engine.statistics()

    async def reset_caches(self) -> None:
        """`AsyncEngine.reset_caches`, likewise."""
        await self._engine.reset_caches()

    async def check_health(self) -> None:
        """Raise EngineError unless the engine runs. Serve replaces a replica that raises."""
        if self._engine.state is EngineState.DEAD:
            raise EngineDeadError("the replica's engine has died")
        if self._engine.state is not EngineState.RUNNING:
            raise EngineClosedError("the replica's engine is closed")

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        """Serve awaits this before a replica goes, once the requests it had have ended."""
        if self._is_closing:
            return None  # Python's own call
        self._is_closing = True
        return self._engine.aclose()
