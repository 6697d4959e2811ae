"""Workers that decode and process media: threads of this process, or processes of their own."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from aioengine.config import EngineConfig
from aioengine.media_pipeline.worker_pool import ProcessorPool
from aioengine.processors.item_work import Worked, WorkItem, keep_to_one_thread, work_item
from aioengine.processors.processor import BaseMultiModalProcessor
from aioengine.streams.loop_bridge import run_apart, run_in
from aioengine.streams.thread_priority import step_back

__all__ = ["ThreadWorkers", "make_workers"]


class ThreadWorkers:
    """Threads, as many as processors: a tokenizer or an HF processor is never used by two."""

    def __init__(self, processors: Sequence[BaseMultiModalProcessor], niceness: int = 0) -> None:
        self._idle = deque(processors)
        self._pool = ThreadPoolExecutor(
            len(processors), "aioengine-media", initializer=self._begin, initargs=(niceness,)
        )

    @staticmethod
    def _begin(niceness: int) -> None:
        step_back(niceness)
        keep_to_one_thread()

    async def start(self) -> None:
        """Do nothing: threads start when they are needed."""

    async def run(self, work: WorkItem) -> Worked:
        """One item, by the next thread that is free. Raises what `work_item` does."""
        return await run_in(self._pool, self._work, work)

    async def aclose(self) -> None:
        """Drop what is queued and wait for the items being worked on."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        await run_apart(self._pool.shutdown)

    def _work(self, work: WorkItem) -> Worked:
        processor = self._idle.popleft()
        try:
            return work_item(processor, work)
        finally:
            self._idle.append(processor)


def make_workers(
    processor: BaseMultiModalProcessor,
    processors: Sequence[BaseMultiModalProcessor],
    config: EngineConfig,
    model: str | os.PathLike[str],
) -> ThreadWorkers | ProcessorPool:
    """The workers that the configuration means: processes for `processor`, or a thread for each of
    `processors`. A model without media needs no processes."""
    if config.uses_processes and processor.info.get_supported_mm_limits():
        return ProcessorPool(model, config, processor)
    return ThreadWorkers(processors or [processor], config.thread_niceness)
