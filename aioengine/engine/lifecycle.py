"""Engine lifecycle state and admission checks."""

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
from aioengine.streams.loop_bridge import check_running
from aioengine.types import EngineState

__all__ = ["EngineLifecycle"]

NEXT = {
    EngineState.NEW: {EngineState.STARTING, EngineState.CLOSED},
    EngineState.STARTING: {EngineState.RUNNING, EngineState.CLOSED, EngineState.DEAD},
    EngineState.RUNNING: {EngineState.DRAINING, EngineState.CLOSED, EngineState.DEAD},
    EngineState.DRAINING: {EngineState.RUNNING, EngineState.CLOSED, EngineState.DEAD},
    EngineState.CLOSED: set(),
    EngineState.DEAD: set(),
}
"""State -> those that may follow it."""
SERVING = (EngineState.RUNNING, EngineState.DRAINING)
NOT_SERVING = {
    EngineState.NEW: "the engine has not been started; use it inside 'async with'",
    EngineState.STARTING: "the engine is still starting; await start() before it is used",
    EngineState.CLOSED: "the engine is closed, and is not started again; make a new one",
}
NO_LOOP = (
    "an engine runs in an event loop of asyncio or uvloop, and there is none here; under trio, run "
    "it in a thread, as the blocking `Engine` does"
)


class EngineLifecycle:
    """The state of one engine, the loop that started it, and the error that has killed it, if any.

    `was_serving`: it has run once; `drains_for_good`: it is being closed, and takes no requests
    again.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.state = EngineState.NEW
        self.loop: asyncio.AbstractEventLoop | None = None
        self.death: BaseException | None = None
        self.was_serving = False
        self.drains_for_good = False
        self._config = config

    def transition(self, state: EngineState) -> None:
        """Enter a state that may follow the present one; where it may not, nothing happens."""
        if state in NEXT[self.state]:
            self.state = state
            self.was_serving |= self.is_serving

    def start(self) -> asyncio.AbstractEventLoop:
        """Bind the engine to the running loop.

        Raises EngineClosedError the second time, WrongLoopError where no loop of asyncio's runs.
        """
        if self.state is not EngineState.NEW:
            raise EngineClosedError("an engine is started once; make a new one")
        try:
            self.loop = asyncio.get_running_loop()
        except RuntimeError:  # a coroutine runs all the same: under trio, say
            raise WrongLoopError(NO_LOOP) from None
        self.transition(EngineState.STARTING)
        return self.loop

    def die(self, error: BaseException) -> None:
        """Note what has broken the engine; of several errors the first counts."""
        self.death = self.death or error
        self.transition(EngineState.DEAD)

    def is_closed(self) -> bool:
        """Return whether it has ended by being closed."""
        return self.state is EngineState.CLOSED

    @property
    def is_serving(self) -> bool:
        """Return whether requests may be live."""
        return self.state in SERVING

    def check_loop(self) -> None:
        """Raise WrongLoopError on any loop but the engine's."""
        check_running(
            self.loop,
            "an engine belongs to the event loop that started it; call it from there, or start "
            "another engine in this loop",
        )

    def check_serving(self) -> None:
        """Raise an EngineError unless the engine runs, draining or not."""
        if self.loop is not None:
            self.check_loop()
        if self.death is not None:
            raise EngineDeadError("the engine has died; start a new one") from self.death
        if not self.is_serving:
            raise EngineClosedError(NOT_SERVING[self.state])

    def check_entry(self, num_live: int, num_new: int) -> None:
        """Raise what keeps `num_new` completions out, while `num_live` are live."""
        if self.state is EngineState.DRAINING:
            raise EngineClosedError("the engine is draining and takes no new requests")
        if self._config.max_queued_requests is None:
            return
        most = self._config.max_num_seqs + self._config.max_queued_requests
        limits = "max_num_seqs and max_queued_requests"
        if num_new > most:
            message = f"n must be at most {most} for all prompts together ({limits})"
            raise InvalidRequestError(message, parameter="n")
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
