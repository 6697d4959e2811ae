"""Workers that decode and process media: threads of this process, or processes of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Protocol

from aioengine.config import EngineConfig
from aioengine.media_pipeline.worker_pool import ProcessorPool
from aioengine.processors.item_work import Worked, WorkItem, keep_to_one_thread, work_item
from aioengine.processors.processor import BaseMultiModalProcessor
from aioengine.streams.loop_bridge import run_apart, run_in
from aioengine.streams.thread_priority import step_back

__all__ = ["ProcessWorkers", "ThreadWorkers", "Workers", "make_workers"]


class Workers(Protocol):
    """Decode and process items, each on a worker of its own."""

    async def start(self) -> None:
        """Before the first item. Raises ModelLoadError."""
        ...

    async def work(self, work: WorkItem) -> Worked:
        """Features of one item. Raises MediaError, and what else a processor may raise."""
        ...

    async def aclose(self) -> None:
        """Drop what is queued and wait for the items being worked on."""
        ...


class ThreadWorkers:
    """Threads, as many as processors: a tokenizer or an HF processor is never used by two."""

    def __init__(self, processors: Sequence[BaseMultiModalProcessor], niceness: int = 0) -> None:
        self._processors: SimpleQueue[BaseMultiModalProcessor] = SimpleQueue()
        for processor in processors:
            self._processors.put(processor)
        self._pool = ThreadPoolExecutor(
            len(processors),
            thread_name_prefix="aioengine-media",
            initializer=self._begin,
            initargs=(niceness,),
        )

    @staticmethod
    def _begin(niceness: int) -> None:
        step_back(niceness)
        keep_to_one_thread()

    async def start(self) -> None:
        """See `Workers`: threads start when they are needed."""

    async def work(self, work: WorkItem) -> Worked:
        """See `Workers`."""
        return await run_in(self._pool, self._work, work)

    async def aclose(self) -> None:
        """See `Workers`."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        await run_apart(self._pool.shutdown)

    def _work(self, work: WorkItem) -> Worked:
        processor = self._processors.get()
        try:
            return work_item(processor, work)
        finally:
            self._processors.put(processor)


class ProcessWorkers:
    """Processes, so that what a processor does in Python takes no time from the loop."""

    def __init__(self, pool: ProcessorPool) -> None:
        self._pool = pool

    async def start(self) -> None:
        """See `Workers`."""
        await self._pool.start()

    async def work(self, work: WorkItem) -> Worked:
        """See `Workers`."""
        return await self._pool.run(work)

    async def aclose(self) -> None:
        """See `Workers`."""
        await self._pool.aclose()


def make_workers(
    processor: BaseMultiModalProcessor,
    processors: Sequence[BaseMultiModalProcessor],
    config: EngineConfig,
    model: str | os.PathLike[str],
) -> ThreadWorkers | ProcessWorkers:
    """The workers that the configuration means: processes for `processor`, or a thread for each of
    `processors`. A model without media needs no processes."""
    if config.uses_processes and processor.info.get_supported_mm_limits():
        return ProcessWorkers(ProcessorPool(model, config, processor))
    return ThreadWorkers(processors or [processor], config.thread_niceness)
