"""Where media are decoded and processed: threads of this process, or processes of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import anyio.to_thread

from aioengine.config import EngineConfig
from aioengine.loading import Loaded
from aioengine.processors.inputs import MultiModalKwargsItem
from aioengine.processors.items import make_items
from aioengine.processors.processor import BaseMultiModalProcessor
from aioengine.ticket import MediaInput, Ticket
from aioengine.types import Embeddings

__all__ = ["ThreadWorkers", "Worked", "Workers", "make_workers"]


@dataclass(frozen=True, slots=True)
class Worked:
    """A processed item, and when its work began and its stages ended (`time.perf_counter`)."""

    item: MultiModalKwargsItem
    began: float
    decoded: float
    processed: float


class Workers(Protocol):
    """Decode and process items, each on a worker of its own."""

    async def work(self, ticket: Ticket, media: MediaInput) -> Worked:
        """Features of one item. Raises MediaError, whatever the processor raises."""
        ...

    async def aclose(self) -> None:
        """Drop what is queued and wait for the items being worked on."""
        ...


class ThreadWorkers:
    """As many threads as processors: a tokenizer or an HF processor is never used by two."""

    def __init__(self, processors: Sequence[BaseMultiModalProcessor]) -> None:
        self._processors: SimpleQueue[BaseMultiModalProcessor] = SimpleQueue()
        for processor in processors:
            self._processors.put(processor)
        self._pool = ThreadPoolExecutor(len(processors), thread_name_prefix="aioengine-media")

    async def work(self, ticket: Ticket, media: MediaInput) -> Worked:
        """See `Workers`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._work, ticket, media)

    async def aclose(self) -> None:
        """See `Workers`."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        await anyio.to_thread.run_sync(self._pool.shutdown)

    def _work(self, ticket: Ticket, media: MediaInput) -> Worked:
        """Both stages in one go, so that only as many decoded items are in memory as workers."""
        processor = self._processors.get()
        try:
            return _work(processor, ticket, media)
        finally:
            self._processors.put(processor)


def _work(processor: BaseMultiModalProcessor, ticket: Ticket, media: MediaInput) -> Worked:
    began = time.perf_counter()
    is_decoded = isinstance(media.source, Embeddings)
    content = media.source if is_decoded else media.source.decode()
    decoded = time.perf_counter()
    items = make_items([(media.modality, media.parameter, content)], processor.info.get_hidden_size)
    options = ticket.mm_processor_kwargs
    outputs = processor.process(items, options)
    if not is_decoded:
        media.source.verify()
    if ticket.layout is not None:
        places = {media.modality: [media.index]}
        processor.verify_layout(ticket.layout, items, outputs, options, places)
    return Worked(outputs[media.modality][0], began, decoded, time.perf_counter())


def make_workers(loaded: Loaded, config: EngineConfig) -> Workers:
    """The workers that the configuration means."""
    return ThreadWorkers(loaded.processors)
