"""The async face of the encoder cache: one job for each item, whoever waits for it.

The scheduler says which items to decode and which to encode; here are the tasks that do it, the
features between the two, and the failures, which end the requests that have the item and no others.
Jobs belong to the engine: a waiter may leave, and the last one's leaving cancels the job.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from aioengine.core.plan import EncodePlan, MediaPlan
from aioengine.core.scheduler import Scheduler
from aioengine.engine.request_state import RequestState
from aioengine.engine.request_tracker import RequestTracker
from aioengine.errors import EngineError, InvalidRequestError, MediaError
from aioengine.instruments import Instruments, StageSpan, timed
from aioengine.media_pipeline.items import EncoderInput, IdentifiedMedia
from aioengine.streams.device import Device

if TYPE_CHECKING:
    from aioengine.execution.model_runner import ModelRunner
    from aioengine.media_pipeline.pipeline import MediaPipeline

__all__ = ["EncoderJobs"]


class EncoderJobs:
    """One engine's. Everything runs on the loop; the device does the encoding."""

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: MediaPipeline,
        runner: ModelRunner,
        device: Device,
        instruments: Instruments,
        tracker: RequestTracker,
        *,
        spawn: Callable[..., asyncio.Task[None]],
        changed: Callable[[], object],
    ) -> None:
        """`spawn` starts a task in the engine's scope, `changed` wakes the step loop."""
        self.num_items_run = 0
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._runner = runner
        self._device = device
        self._instruments = instruments
        self._tracker = tracker
        self._spawn = spawn
        self._changed = changed
        self._features: dict[str, Mapping[str, Any]] = {}
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._gathering: asyncio.TimerHandle | None = None

    def start(self, plan: MediaPlan) -> None:
        """Begin what the scheduler has decided."""
        for key in plan.decode:
            self._jobs[key] = self._spawn(self._decode, key, *self._waiters(key)[0])
        if plan.encode is not None:
            features = [self._features[key] for key in plan.encode.keys]
            self._spawn(self._encode, plan.encode, features)

    def forget(self, state: RequestState) -> None:
        """A request has ended: stop the work that nobody else waits for."""
        if state.lease is not None:
            state.lease.close()
        for media in state.media:
            if media.key and not self._scheduler.media.is_needed(media.key):
                self._features.pop(media.key, None)
                job = self._jobs.pop(media.key, None)
                if job is not None:
                    job.cancel()

    def stop(self) -> None:
        """Wait no longer for items that are still being made ready."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None

    def drop(self, keys: tuple[str, ...]) -> asyncio.Future[None]:
        """Have the device forget the rows of `keys`, after the encoder runs before it."""
        return self._device.submit_encode(partial(self._runner.drop, keys))

    def _waiters(self, key: str) -> list[tuple[RequestState, IdentifiedMedia]]:
        """The admitted requests that have the item, and what they call it."""
        states = dict.fromkeys(map(self._tracker.owner, self._scheduler.media.users(key)))
        return [(state, state.media_with(key)) for state in states]

    async def _decode(self, key: str, state: RequestState, media: IdentifiedMedia) -> None:
        try:
            features = await self._features_of(state, media)
        except (InvalidRequestError, EngineError) as error:
            self._jobs.pop(key, None)
            self._decoding_failed(key, state, media, error)
        else:
            self._jobs.pop(key, None)
            self._features[key] = features
            for waiter, _ in self._waiters(key):
                waiter.stamp("decoded")
                waiter.stamp("processed")
        if self._jobs and self._device.gather_s:
            if self._gathering is None:
                loop = asyncio.get_running_loop()
                self._gathering = loop.call_later(self._device.gather_s, self._tell)
        else:
            self._tell()
        self._changed()  # of a failure, too

    def _tell(self) -> None:
        """Let the scheduler know of all that is ready, for one run of the encoder."""
        self.stop()
        for key in self._features:
            self._scheduler.media.media_ready(key)
        self._changed()

    async def _features_of(self, state: RequestState, media: IdentifiedMedia) -> Mapping[str, Any]:
        if not isinstance(media.source, EncoderInput):
            return await self._pipeline.features(media, state.layout, state.request_id)
        parts = [await self._features_of(state, part) for part in media.source.media]
        features: dict[str, Any] = {}
        if media.source.are_apart:
            features["media"] = parts
        else:
            for part in parts:
                features |= part
        return {**features, **media.source.features}  # of one name, the engine's own is meant

    def _decoding_failed(
        self, key: str, state: RequestState, media: IdentifiedMedia, error: Exception
    ) -> None:
        others = [waiter for waiter in self._waiters(key) if waiter[0] is not state]
        if not others or not media.may_change:
            self._fail_waiters(key, error)
            return
        # An object of the caller's own, that may be broken while others' equals are not.
        if not state.has_ended:
            self._tracker.fail(state, _own(error, media))
        self._jobs[key] = self._spawn(self._decode, key, *others[0])

    async def _encode(self, plan: EncodePlan, features: list[Any]) -> None:
        requests = tuple({t.request_id for key in plan.keys for t, _ in self._waiters(key)})
        outcomes, start, end = await self._device.submit_encode(
            partial(timed, self._runner.encode, plan, features), patience=plan.patience
        )
        self.num_items_run += len(plan.keys)
        detail = f"{sum(plan.num_rows)} rows"
        self._instruments.record(StageSpan("encode", start, end, requests, detail))
        for key, error in outcomes:
            self._features.pop(key, None)
            if error is None:
                self._scheduler.media.encoded(key)
                for waiter, _ in self._waiters(key):
                    waiter.stamp("encoded")
                continue
            self._scheduler.media.encoding_failed(key)
            for made_from in (key, *self._parts_of(key)):
                self._pipeline.forget(made_from)
            if not isinstance(error, MediaError):
                kind = type(error).__name__  # its text may hold anything
                failure = MediaError(f"item could not be encoded: {kind}", parameter="item")
                failure.__cause__ = error
                error = failure
            self._fail_waiters(key, error)
        self._changed()

    def _parts_of(self, key: str) -> list[str]:
        """The keys of the media that are part of the encoder input `key`, if it is one."""
        sources = (media.source for _, media in self._waiters(key))
        inputs = (source for source in sources if isinstance(source, EncoderInput))
        return [part.key for source in inputs for part in source.media]

    def _fail_waiters(self, key: str, error: Exception) -> None:
        """Each waiter gets an error of its own, naming its own parameter."""
        for state, media in self._waiters(key):
            self._tracker.fail(state, _own(error, media))


def _own(error: Exception, media: IdentifiedMedia) -> Exception:
    """The error in the words of one waiter; raising it marks nobody else's."""
    own = copy.copy(error)
    if isinstance(error, InvalidRequestError):
        own = error.for_parameter(media.parameter)
    own.__cause__ = error.__cause__ or error
    return own
