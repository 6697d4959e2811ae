"""The engine's side of `processor_workers="process:N"`: media are worked on in N processes.

A worker (`worker_main`) is a fresh interpreter, not a fork, and never sees the host's `__main__`.
It has one item at a time. If it dies (a decoder's crash, the system's memory killer), that item
fails, the worker is started again, and all others go on. A cancelled caller's item is dropped if it
still waits; if a worker has it, the worker finishes and the result is thrown away, since starting a
worker takes longer than nearly every item. What takes longer than `JOB_LIMIT_S` is killed with its
worker.

Contents and results pass through a memory file without a name, one for each worker, so nothing is
left behind, whoever is killed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio

from aioengine.config import EngineConfig, MediaConfig
from aioengine.errors import (
    AioEngineError,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    MediaError,
    ModelLoadError,
    typed,
)
from aioengine.media_pipeline.worker_main import encode_frame
from aioengine.media_pipeline.worker_process import WorkerDiedError, WorkerProcess
from aioengine.processors.item_work import Worked, WorkItem, pack_value
from aioengine.processors.processor import BaseMultiModalProcessor

__all__ = ["JOB_LIMIT_S", "PoolStatistics", "ProcessorPool"]

JOB_LIMIT_S = 120.0
"""How long a worker may take for one item."""

MAX_START_FAILURES = 3
"""Starts in a row that may fail, or end without one item begun, before items are refused."""

MAX_PAUSE_S = 30.0
"""The pause between two such starts doubles up to this."""

MAX_TRIES = 3
"""Workers that may be found dead when an item is handed to them, before it fails."""


@dataclasses.dataclass(frozen=True, slots=True)
class PoolStatistics:
    """A snapshot: workers that are up, what they have begun, what waits, and how many died."""

    workers: int
    working: int
    queued: int
    deaths: int


class ProcessorPool:
    """N worker processes with a processor each. Belongs to the loop that starts it.

    `processor` is one of the engine's own, loaded from `source` (a folder or hub id): the
    workers make another one of the same classes. Raises ModelLoadError if they cannot.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        config: EngineConfig,
        processor: BaseMultiModalProcessor,
        *,
        job_limit_s: float = JOB_LIMIT_S,
    ) -> None:
        self._num_workers = config.num_processor_workers
        self._setup = encode_frame(_describe_setup(source, config, processor, job_limit_s))
        self._job_limit_s = job_limit_s
        # For copying contents and results; the application's own limit of threads is left alone.
        self._threads = anyio.CapacityLimiter(self._num_workers)
        self._queue: deque[_Pending] = deque()
        self._slots: list[asyncio.Task[None]] = []
        self._workers: set[WorkerProcess] = set()
        self._failed: dict[int, AioEngineError] = {}
        self._closing = asyncio.Event()
        self._working = self._deaths = 0

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Workers that are up or starting."""
        return tuple(worker.process_id for worker in self._workers)

    def statistics(self) -> PoolStatistics:
        """A snapshot of the counters."""
        num_workers, num_queued = len(self._workers), len(self._queue)
        return PoolStatistics(num_workers, self._working, num_queued, self._deaths)

    async def start(self) -> None:
        """Starts all workers side by side, which takes seconds. Raises ModelLoadError."""
        starts = [asyncio.create_task(self._start_worker()) for _ in range(self._num_workers)]
        try:
            await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
            workers = [start.result() for start in starts if start.done()]
        except BaseException:
            # Not cancelled, which could cut their own clean-up short: they end with their workers.
            self._close_all()
            await asyncio.wait(starts)
            for worker in tuple(self._workers):
                await self._end_worker(worker)
            await asyncio.gather(*starts, return_exceptions=True)  # so that none is logged
            raise
        self._slots = [asyncio.create_task(self._tend(*slot)) for slot in enumerate(workers)]

    async def run(self, work: WorkItem) -> Worked:
        """One item, worked on by the next worker that is free; first come, first served.

        Raises what `work_item` would, MediaError if the worker died over it or took too long, and
        EngineError while no worker can be started.
        """
        if self._closing.is_set() or not self._slots:
            raise _closed()
        if len(self._failed) == self._num_workers:
            raise self._failure()
        pending = _Pending(work, asyncio.get_running_loop().create_future())
        self._queue.append(pending)
        self._wake()
        try:
            return await pending.result
        except asyncio.CancelledError:
            with suppress(ValueError):  # it may wait no more, but be worked on
                self._queue.remove(pending)
            raise

    async def aclose(self) -> None:
        """Ends all workers at once, whatever they are doing, and waits until they are gone.

        Items under way raise EngineClosedError. May be called more than once.
        """
        self._close_all()
        if self._slots:
            # Not cancelled: a slot may have a thread at its worker's memory.
            await asyncio.wait(self._slots)
        self._fail_queued(_closed)

    def _close_all(self) -> None:
        self._closing.set()
        for worker in self._workers:
            worker.kill()
        self._wake()

    # ---- the workers

    async def _start_worker(self) -> WorkerProcess:
        worker = await WorkerProcess.spawn(self._job_limit_s, self._threads, self._wake)
        self._workers.add(worker)
        try:
            if self._closing.is_set():
                raise ModelLoadError("the processor workers are being closed")
            await worker.prepare(self._setup)
        except BaseException:
            await self._end_worker(worker)
            raise
        return worker

    async def _end_worker(self, worker: WorkerProcess) -> None:
        try:
            await worker.aclose()
        finally:
            self._workers.discard(worker)

    async def _tend(self, number: int, worker: WorkerProcess | None) -> None:
        """One worker after the other, until the pool is closed."""
        failures = 0
        while worker is not None or not self._closing.is_set():
            if worker is None:
                try:
                    worker = await self._start_worker()
                except Exception as error:
                    failures += 1
                    self._note_failure(number, failures, typed(error))
                    await self._pause(failures)
                    continue
            self._failed.pop(number, None)
            try:
                has_worked = await self._serve(worker)
            finally:
                await self._end_worker(worker)
            worker = None
            if not self._closing.is_set():
                self._deaths += 1
                failures = 0 if has_worked else failures + 1
                await self._pause(failures)

    def _note_failure(self, number: int, failures: int, error: AioEngineError) -> None:
        if failures >= MAX_START_FAILURES:
            self._failed[number] = error
        if len(self._failed) == self._num_workers:
            self._fail_queued(self._failure)

    async def _pause(self, failures: int) -> None:
        """Longer after each failure; cut short by closing."""
        if failures:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(0.25 * 2**failures, MAX_PAUSE_S)):
                    await self._closing.wait()

    def _failure(self) -> EngineError:
        first = next(iter(self._failed.values()))
        return EngineError(f"no processor worker can be started: {first}")

    def _fail_queued(self, make_error: Callable[[], AioEngineError]) -> None:
        while self._queue:
            self._queue.popleft().fail(make_error())

    # ---- the items

    def _wake(self) -> None:
        for worker in self._workers:
            worker.wake.set()

    async def _next(self, worker: WorkerProcess) -> _Pending | None:
        """The item that has waited longest; None when the worker has died or the pool is closed."""
        while True:
            worker.wake.clear()
            if self._closing.is_set() or worker.has_ended:
                return None
            if self._queue:
                return self._queue.popleft()
            await worker.wake.wait()

    async def _serve(self, worker: WorkerProcess) -> bool:
        """Hands items to a worker until it is dead; whether it ever began one."""
        has_worked = False
        while (pending := await self._next(worker)) is not None:
            self._working += 1
            try:
                pending.succeed(await worker.work(pending.work))
                has_worked = True
            except WorkerDiedError as death:
                self._bury(pending, death)
                return has_worked or death.has_begun
            except Exception as error:
                pending.fail(typed(error))
                has_worked = True
            except BaseException:  # the loop ends, and nobody closed the pool
                pending.fail(_closed())
                raise
            finally:
                self._working -= 1
        return has_worked

    def _bury(self, pending: _Pending, death: WorkerDiedError) -> None:
        pending.tries += 1
        if self._closing.is_set():
            pending.fail(_closed())
        elif death.has_begun or pending.tries >= MAX_TRIES:
            name = pending.work.parameter
            pending.fail(MediaError(f"{name} could not be processed: {death}", parameter=name))
        else:
            # The worker was dead before it saw the item, which is not to blame then.
            self._queue.appendleft(pending)
            self._wake()


def _closed() -> EngineClosedError:
    return EngineClosedError("the processor workers are closed")


@dataclasses.dataclass(slots=True, eq=False)
class _Pending:
    """An item and its waiter, who may have left."""

    work: WorkItem
    result: asyncio.Future[Worked]
    tries: int = 0

    def succeed(self, worked: Worked) -> None:
        if not self.result.done():
            self.result.set_result(worked)

    def fail(self, error: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(error)


def _describe_setup(
    source: str | os.PathLike[str],
    config: EngineConfig,
    processor: BaseMultiModalProcessor,
    limit_s: float,
) -> dict[str, Any]:
    context, path = processor.info.ctx, os.fspath(source)
    try:
        mm_kwargs = pack_value(context.mm_processor_kwargs, "mm_processor_kwargs")
    except InvalidRequestError as error:
        raise ModelLoadError(str(error)) from None
    return {
        # A worker may be started again when the host has changed its folder.
        "source": os.path.abspath(path) if os.path.isdir(path) else path,
        "model": context.model,
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
        "limit_mm_per_prompt": context.limit_mm_per_prompt,
        "mm_processor_kwargs": mm_kwargs,
        "media": pack_value(_plain_limits(config.media), "media"),
        "config_class": _locate_config(type(context.hf_config)),
        "classes": [
            _locate(type(part)) for part in (processor, processor.info, processor.dummy_inputs)
        ],
        "path": [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)],
        "limit_s": limit_s,
        "niceness": config.thread_niceness,
    }


def _plain_limits(media: MediaConfig) -> dict[str, Any]:
    """Limits and allowed formats: all that opening and decoding look at."""
    values = vars(media).items()
    # A worker fetches nothing.
    return {
        name: tuple(value) if isinstance(value, list | tuple | set | frozenset) else value
        for name, value in values
        if name not in ("fetcher", "local_roots", "allowed_hosts")
    }


def _locate_config(kind: type[Any]) -> tuple[str, str] | None:
    """Return where a worker finds the config's class; None where transformers does, in its own
    ways."""
    is_own = kind.__module__.partition(".")[0] not in ("transformers", "transformers_modules")
    return _locate(kind) if is_own else None


def _locate(kind: type[Any]) -> tuple[str, str]:
    """Return where a worker finds a class. Raises ModelLoadError for one that only this process
    has."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is not kind or kind.__module__ == "__main__":
        raise ModelLoadError(
            f'processor_workers="process:N" needs {kind.__qualname__} at the top of a module that '
            f'can be imported, which {kind.__module__} is not; use "thread:N", or move the class'
        )
    return kind.__module__, kind.__qualname__
