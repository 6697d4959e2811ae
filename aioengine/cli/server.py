"""uvicorn's server around an engine: bound before the load, drained before the end.

Needs the extra `serve`.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from aioengine import EngineState
from aioengine.asgi.json_body import BodyBudget
from aioengine.cli.http_protocol import HttpBounds, protocol_factory
from aioengine.cli.memory import BurstWatch, give_back_memory
from aioengine.engine.async_engine import AsyncEngine
from aioengine.errors import InvalidRequestError
from aioengine.streams.loop_bridge import run_apart

__all__ = ["DrainingServer", "bind", "warnings_logged"]

logger = logging.getLogger(__name__)

GRACE_S = 5
"""After the drain, for answers that are complete and on their way to slow readers."""
TICK_S = 0.1


def bind(host: str, port: int) -> Any:
    """A socket that has its port, and does not listen yet. Raises InvalidRequestError.

    Whoever waits for the server is refused until it is ready; a port that is taken is reported at
    once, and not after minutes of loading.
    """
    config = uvicorn.Config("", host=host, port=port, log_config=None, log_level="critical")
    try:
        bound = config.bind_socket()
    except SystemExit as end:  # uvicorn logs the reason, and would end the process
        raise _unusable(host, port, end.__context__) from None
    bound.set_inheritable(False)  # worker processes have no business with it
    return bound


def _unusable(host: str, port: int, error: BaseException | None) -> InvalidRequestError:
    reason = getattr(error, "strerror", None) or error
    return InvalidRequestError(
        f"cannot listen on {host}, port {port}: {reason}", parameter="port", value=port
    )


class DrainingServer(uvicorn.Server):
    """Serves `app` until a signal comes, or its engine dies.

    The first signal closes the port and drains the engine: requests have `drain_timeout_s` seconds
    to finish. The second ends them at once. `announce` is called when the port is open. After a
    burst of `bodies`, the memory that it has left behind is given back.
    """

    def __init__(
        self,
        app: Any,
        engine: AsyncEngine,
        *,
        drain_timeout_s: float,
        log_level: str,
        announce: Callable[[], object],
        bounds: HttpBounds | None = None,
        bodies: BodyBudget | None = None,
    ) -> None:
        super().__init__(_config(app, drain_timeout_s, log_level, bounds or HttpBounds()))
        self._engine = engine
        self._drain_timeout_s = drain_timeout_s
        self._announce = announce
        self._watch = None if bodies is None else BurstWatch(bodies)
        self._trimming: asyncio.Future[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come. In place of uvicorn's own, which would raise it again at the end: a
        server that was asked to stop and has stopped has not failed."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Open the port. Raises InvalidRequestError where another server was quicker."""
        try:
            await super().startup(sockets)
        except OSError as error:
            await self.lifespan.shutdown()
            host, port = (sockets or [])[0].getsockname()[:2]
            raise _unusable(host, port, error) from error
        self._announce()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop; asked ten times a second."""
        is_idle = self._trimming is None or self._trimming.done()
        if is_idle and self._watch is not None and self._watch.is_over(time.monotonic()):
            self._trimming = asyncio.ensure_future(run_apart(give_back_memory))
        return await super().on_tick(counter) or self._engine.state is EngineState.DEAD

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        """Close the port and the engine, side by side: responses end as their requests do."""
        closing = asyncio.create_task(self._engine.aclose(self._drain_timeout_s))
        forcing = asyncio.create_task(self._force(closing))
        await super().shutdown(sockets)
        if self.force_exit:
            closing.cancel()
            await self.lifespan.shutdown()  # which uvicorn leaves out
        await asyncio.wait([closing])
        forcing.cancel()

    async def _force(self, closing: asyncio.Task[None]) -> None:
        """End what is left at a second signal: since Python 3.12, uvicorn waits for connections."""
        while not self.force_exit:  # noqa: ASYNC110 - a signal's handler sets it
            await asyncio.sleep(TICK_S)
        closing.cancel()
        await asyncio.wait([closing])
        await asyncio.sleep(TICK_S)  # answers that say so are on their way
        for connection in list(self.server_state.connections):
            if isinstance(connection.transport, asyncio.WriteTransport):
                connection.transport.abort()


class _StderrHandler(logging.StreamHandler[Any]):
    """Writes to what `sys.stderr` is at the time: a progress bar puts lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        """The stream of this moment."""
        return sys.stderr

    @stream.setter
    def stream(self, _: object) -> None:
        raise AttributeError("it follows sys.stderr")


@contextmanager
def warnings_logged() -> Iterator[None]:
    """Log what libraries warn of at the level DEBUG: a client's file may be the reason.

    For a process of one's own, as it is in force for all threads.
    """
    before = warnings.showwarning

    def log(message: Warning | str, category: type[Warning], *_: object) -> None:
        logger.debug("%s: %.200s", category.__name__, message)

    warnings.showwarning = log  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = before


def _config(app: Any, drain_timeout_s: float, log_level: str, bounds: HttpBounds) -> uvicorn.Config:
    log_config = copy.deepcopy(LOGGING_CONFIG)
    log_config["handlers"]["default"] = {"()": _StderrHandler, "formatter": "default"}
    ours = {**log_config["loggers"]["uvicorn"], "level": log_level.upper()}
    log_config["loggers"]["aioengine"] = ours
    return uvicorn.Config(
        app,
        loop="none",  # there is one already
        http=protocol_factory(bounds),
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=log_config,
        log_level=log_level,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(drain_timeout_s) + GRACE_S,
    )
