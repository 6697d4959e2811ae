"""Who may enter an engine, and when: its loop, its life, and the queue before it."""

from __future__ import annotations

import asyncio
import traceback

from aioengine.config import EngineConfig
from aioengine.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    WrongLoopError,
)
from aioengine.types import EngineState

__all__ = ["EngineLifecycle"]


class EngineLifecycle:
    """One engine's. `loop`: the one that started it; `death`: what has killed it, if anything."""

    def __init__(self, config: EngineConfig) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.was_open = False
        self.is_open = False
        self.is_closed = False
        self.is_draining = False
        self.is_closing = False
        self.death: BaseException | None = None
        self._config = config

    @property
    def state(self) -> EngineState:
        """What the engine is at."""
        if self.death is not None:
            return EngineState.DEAD
        if self.is_closed:
            return EngineState.CLOSED
        if self.is_open:
            return EngineState.DRAINING if self.is_draining else EngineState.RUNNING
        return EngineState.NEW if self.loop is None else EngineState.STARTING

    def open(self) -> None:
        """The engine serves from now on."""
        self.was_open = self.is_open = True

    def close(self) -> None:
        """The engine serves no more, or never will."""
        self.is_open, self.is_closed = False, True

    def check_loop(self) -> None:
        """Raise WrongLoopError on any loop but the engine's."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is not self.loop:
            raise WrongLoopError(
                "an engine belongs to the event loop that started it; call it from there, or start "
                "another engine in this loop"
            )

    def check_open(self) -> None:
        """Raise an EngineError unless the engine runs, draining or not."""
        if self.loop is not None:
            self.check_loop()
        if self.death is not None:
            raise EngineDeadError("the engine has died; start a new one") from self.death
        if not self.is_open:
            raise EngineClosedError("the engine is not running; use it inside 'async with'")

    def check_entry(self, num_live: int, num_new: int) -> None:
        """Raise what keeps `num_new` completions out, while `num_live` are live."""
        if self.is_draining:
            raise EngineClosedError("the engine is draining and takes no new requests")
        if self._config.max_queued_requests is None:
            return
        most = self._config.max_num_seqs + self._config.max_queued_requests
        limits = "max_num_seqs and max_queued_requests"
        if num_new > most:
            raise InvalidRequestError(
                f"n must be at most {most} for all prompts together ({limits})", parameter="n"
            )
        if num_live + num_new > most:
            raise OverloadedError(
                f"{num_live} completions are live already, and at most {most} may be ({limits}); "
                "try later"
            )

    def clear_frames(self) -> None:
        """Drop the local variables that the death's traceback holds: the model is among them."""
        error = self.death
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
