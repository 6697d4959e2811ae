"""Media on their way to the encoder: fetched, identified, and, once somebody asks, made features.

Each stage has its own limit, and an item waits only for others in its stage: one whose features are
cached waits for no worker, one whose uuid is known not even for the network. Equal work in flight
is done once. Nothing but bookkeeping runs on the event loop.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import anyio
from cachetools import LRUCache

from aioengine.config import EngineConfig
from aioengine.errors import EngineError, InvalidRequestError, MediaError, ModelLoadError, trace_of
from aioengine.instruments import Instruments, StageSpan
from aioengine.media_pipeline.items import IdentifiedMedia, MediaInput, MediaOwner, ProcessorOptions
from aioengine.media_pipeline.workers import make_workers
from aioengine.processors.cache.disk import DiskCache
from aioengine.processors.cache.hasher import ContentHasher, digest_options, item_key
from aioengine.processors.cache.memory import HeldItems, Lease, ProcessorCache
from aioengine.processors.embeddings import EmbeddingItems
from aioengine.processors.inputs import MultiModalKwargsItem
from aioengine.processors.item_work import Promise, WorkItem
from aioengine.processors.media.fetch import fetch
from aioengine.processors.media.objects import is_wrapped
from aioengine.processors.media.open import open_media
from aioengine.processors.mm_kwargs import check_cost
from aioengine.processors.processor import (
    BaseMultiModalProcessor,
    ItemsByModality,
    Layout,
    TextOrTokens,
)
from aioengine.streams.loop_bridge import run_apart, run_in
from aioengine.streams.single_flight import SharedJobs
from aioengine.streams.together import run_together
from aioengine.types import Embeddings

__all__ = ["MediaPipeline"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

VERSIONS = (
    "aioengine",
    "transformers",
    "torch",
    "torchvision",
    "pillow",
    "av",
    "soundfile",
    "soxr",
)
"""Of what decodes and processes media."""
FETCH_THREADS = 8
"""That read files and decode `data:` URLs at once."""
MAX_NAMED = 1 << 16
"""Items whose keys and headers are remembered under their uuids."""
MIN_HELD_BYTES = 256 << 20
"""That requests may hold beside the cache, if the cache is smaller than this."""
SIDE_BY_SIDE = 64
"""Items of one request that are identified at once."""
MAX_STORES = 64
"""Items that wait to be written to files; more are not kept there."""


class MediaPipeline:
    """One engine's media, from what callers give to what the encoder takes.

    `processor` reads headers; `processors` decode and process, one for each thread. An item has at
    most `max_rows` encoder rows. Its coroutines run in the engine's tasks.
    """

    def __init__(
        self,
        processor: BaseMultiModalProcessor,
        processors: Sequence[BaseMultiModalProcessor],
        max_rows: int,
        config: EngineConfig,
        model: str | os.PathLike[str],
        instruments: Instruments,
    ) -> None:
        self.cache = ProcessorCache(config.mm_processor_cache_bytes)
        self.held = HeldItems(max(config.mm_processor_cache_bytes, MIN_HELD_BYTES))
        self._processor = processor
        self._max_rows = max_rows
        self._options_digest = digest_options(processor.merged_kwargs({}))
        self._config = config
        self._model_id = f"{os.fspath(model)} {_fingerprint(processor, config.revision)}"
        self._workers = make_workers(processor, processors, config, model)
        self._instruments = instruments
        self._disk: DiskCache | None = None
        self._threads = anyio.CapacityLimiter(FETCH_THREADS)
        self._fetching = anyio.CapacityLimiter(config.media.max_concurrent_fetches)
        self._headers = ThreadPoolExecutor(1, thread_name_prefix="aioengine-header")
        # Who reads waits; nobody waits for what is written.
        self._reads = ThreadPoolExecutor(1, thread_name_prefix="aioengine-cache")
        self._writes = ThreadPoolExecutor(1, thread_name_prefix="aioengine-store")
        self._fetches = SharedJobs()
        self._works = SharedJobs()
        self._stores: set[asyncio.Future[Any]] = set()
        self._named: LRUCache[str, tuple[str, Any]] = LRUCache(MAX_NAMED)

    async def start(self) -> None:
        """Before the first request. Raises ModelLoadError."""
        config, folder = self._config, self._config.mm_processor_cache_dir
        if folder is not None:
            capacity_bytes = config.mm_processor_cache_dir_bytes
            self._disk = await run_in(self._writes, _open_disk, Path(folder), capacity_bytes)
        await self._workers.start()

    async def aclose(self) -> None:
        """Drop what is queued and wait for the items being worked on."""
        await self._fetches.aclose()
        await self._works.aclose()
        await self._workers.aclose()
        for pool in (self._headers, self._reads, self._writes):
            pool.shutdown(wait=False, cancel_futures=pool is self._headers)
            await run_apart(pool.shutdown)

    async def clear(self) -> None:
        """Forget all processed media, on disk too."""
        self.cache.clear()
        self._named.clear()
        if self._disk is not None:
            if self._stores:
                await asyncio.wait(self._stores)
            await run_in(self._writes, self._disk.clear)

    def forget(self, key: str) -> None:
        """Forget features that the encoder could not use, so that the next request makes them."""
        self.cache.discard(key)
        if self._disk is not None:
            self._store(self._disk.discard, key)

    def lease(self) -> Lease:
        """Open a lease for one request to hold features with, until it ends."""
        return Lease(self.held)

    async def read_options(
        self, media: Sequence[MediaInput], mm_kwargs: Mapping[str, Any], prompt: TextOrTokens = ""
    ) -> ProcessorOptions:
        """Check a request's number of items and its options for the HF processor.

        `prompt`: what stands beside them. Raises InvalidRequestError.
        """
        counts = Counter(each.modality for each in media)
        self._processor.info.validate_num_items(counts)
        options = dict(self._processor.options_for(mm_kwargs, counts, prompt))
        if not options:
            return ProcessorOptions(options, self._options_digest)
        merged = self._processor.merged_kwargs(options)
        return ProcessorOptions(options, await run_in(self._headers, digest_options, merged))

    async def identify(
        self, media: Sequence[MediaInput], owner: MediaOwner
    ) -> tuple[list[IdentifiedMedia], ItemsByModality]:
        """Fetch all items of a request, side by side, read their headers and give them their keys.

        Returns their features too, if the layout needs them. The first failure ends the others.
        Raises the request's error.
        """
        found: dict[int, tuple[IdentifiedMedia, MultiModalKwargsItem | None]] = {}
        rest = iter(enumerate(media))

        async def identify() -> None:
            for index, each in rest:
                found[index] = await self._identify(owner, each)

        await run_together(identify() for _ in range(min(len(media), SIDE_BY_SIDE)))
        outputs: ItemsByModality = {}
        for index, each in enumerate(media):
            if index not in found:
                # A fetcher may raise CancelledError, which no task group reports.
                message = f"{each.parameter} could not be fetched: the fetcher was cancelled"
                raise MediaError(message, parameter=each.parameter)
            features = found[index][1]
            if self._processor.layout_needs_hf_outputs:
                assert features is not None
                outputs.setdefault(each.modality, []).append(features)
        return [found[index][0] for index in range(len(media))], outputs

    async def features(
        self, media: IdentifiedMedia, layout: Layout | None, request_id: str
    ) -> MultiModalKwargsItem:
        """The item decoded and processed, from the cache where it is there.

        `layout`: the prompt's, if it has been laid out. Raises MediaError, whatever the
        processor raises, or EngineError.
        """
        cached = self._find(media.key)
        if cached is not None:
            return cached
        is_own = media.key not in self._works
        try:
            return await self._works.join(media.key, partial(self._work, media, layout, request_id))
        except InvalidRequestError as error:
            if not is_own and media.may_change:
                # An object of somebody else's, that may be broken while its equal here is not.
                return await self.features(media, layout, request_id)
            raise error.for_parameter(media.parameter) from error
        except EngineError:
            raise
        except Exception as error:  # a processor may raise anything; its text may hold payload
            logger.warning("a media item could not be processed\n%s", trace_of(error))
            message = f"{media.parameter} could not be processed: {type(error).__name__}"
            raise MediaError(message, parameter=media.parameter) from error

    # ---- one item

    async def _identify(
        self, owner: MediaOwner, media: MediaInput
    ) -> tuple[IdentifiedMedia, MultiModalKwargsItem | None]:
        """The item with its content known, and its features where the layout needs them."""
        name = None
        if media.uuid is not None:
            name = self._key(owner, media, uuid=media.uuid)
            if media.item is None or _is_url(media.item):
                known = self._recall(owner, media, name)
                if known is not None:
                    return known
        start = time.perf_counter()
        fetched = await self._fetch(media)
        if fetched is not media.item:
            end, requests = time.perf_counter(), (owner.request_id,)
            self._instruments.record(StageSpan("fetch", start, end, requests))
        identified = await run_in(self._headers, self._open, owner, media, fetched)
        self.cache.touch(identified.key)  # so that a request's own items are the last to go
        if name is not None:
            self._name(name, identified)
        if not self._processor.layout_needs_hf_outputs:
            return identified, None
        features = await self.features(identified, None, owner.request_id)
        owner.lease.hold(identified.key, features)  # else they are made again, from the source
        return identified, features

    def _name(self, name: str, media: IdentifiedMedia) -> None:
        if isinstance(media.header, Embeddings):
            self._named.pop(name, None)  # the header would keep the rows in memory
        else:
            self._named[name] = media.key, media.header

    def _recall(
        self, owner: MediaOwner, media: MediaInput, name: str
    ) -> tuple[IdentifiedMedia, MultiModalKwargsItem] | None:
        """The item and its features, if it is known by its uuid and the request can hold them.

        A uuid is another name for what was last given under it. What is at hand is looked at all
        the same; for what would have to be fetched, the caller's word is taken.
        """
        known = self._named.get(name)
        features = None if known is None else self._find(known[0])
        # Held until the request ends: there is nothing to make them from again.
        if known is None or features is None or not owner.lease.hold(known[0], features):
            return None
        key, header = known
        return _identified(owner, media, key, header, None), features

    def _find(self, key: str) -> MultiModalKwargsItem | None:
        cached = self.cache.get(key)  # looked up in any case: it counts, and has been used
        return self.held.get(key) if cached is None else cached

    async def _fetch(self, media: MediaInput) -> object:
        get = partial(
            fetch,
            media.item,
            self._config.media,
            parameter=media.parameter,
            trusted=media.trusted,
            modality=media.modality,
            threads=self._threads,
        )

        async def get_in_turn() -> object:
            async with self._fetching:
                return await get()

        if _is_url(media.item):
            job = self._fetches.join(f"{media.modality} {media.item}", get_in_turn)
        elif is_wrapped(media.item):
            # A file that is given twice: two threads that read it would get a part each.
            job = self._fetches.join(f"{id(media.item)} {media.trusted}", get)
        else:
            return await get()
        try:
            return await job
        except MediaError as error:
            raise error.for_parameter(media.parameter) from error

    def _open(self, owner: MediaOwner, media: MediaInput, fetched: object) -> IdentifiedMedia:
        """Read the header and hash the content, without decoding."""
        if fetched is None:
            message = f"{media.parameter} has no content, and nothing is cached under its uuid"
            raise MediaError(message, parameter=media.parameter)
        if isinstance(fetched, Embeddings):
            rows = self._open_embeddings(media, fetched)
            hasher = ContentHasher("embeddings")
            hasher.update([rows.rows, rows.extra])
            return _identified(owner, media, self._key(owner, media, hasher.digest()), rows, rows)
        info, mm_kwargs = self._processor.info, owner.options.mm_kwargs
        source = open_media(
            media.modality,
            fetched,
            self._config.media,
            parameter=media.parameter,
            options=self._processor.merged_kwargs(mm_kwargs),
            get_sample_rate=info.get_sample_rate,
        )
        header: Any = source.header()
        check_cost(
            mm_kwargs,
            info.get_hf_processor(),
            media.modality,
            self._config.media,
            size=getattr(header, "size", (1, 1)),
            num_frames=getattr(header, "num_frames", 1),
        )
        return _identified(owner, media, self._key(owner, media, source.identity()), header, source)

    def _open_embeddings(self, media: MediaInput, given: Embeddings) -> Embeddings:
        """Check precomputed rows and copy them: the caller may write to its own meanwhile."""
        items = EmbeddingItems(
            [given],
            modality=media.modality,
            hidden_size=self._processor.info.get_hidden_size(),
            parameters=[media.parameter],
            max_rows=self._max_rows,
        )
        extra = {name: value.clone() for name, value in items.extra[0].items()}
        return Embeddings(items.get(0).clone(), **extra)

    def _key(
        self, owner: MediaOwner, media: MediaInput, identity: Any = None, uuid: str | None = None
    ) -> str:
        return item_key(
            model_id=self._model_id,
            modality=media.modality,
            options=owner.options.digest,
            identity=identity,
            cache_salt=owner.cache_salt,
            uuid=uuid,
        )

    async def _work(
        self, media: IdentifiedMedia, layout: Layout | None, request_id: str
    ) -> MultiModalKwargsItem:
        disk = None if isinstance(media.source, Embeddings) else self._disk
        if disk is not None:
            stored = await run_in(self._reads, disk.get, media.key)
            if stored is not None and stored.modality == media.modality:
                self.cache.put(media.key, stored)
                return stored
        worked = await self._workers.run(
            WorkItem(
                source=media.source,
                modality=media.modality,
                index=media.index,
                parameter=media.parameter,
                mm_kwargs=media.options.mm_kwargs,
                promise=None if layout is None else Promise.of(layout, media.modality, media.index),
            )
        )
        requests = (request_id,)
        self._instruments.record(StageSpan("decode", worked.began, worked.decoded, requests))
        self._instruments.record(StageSpan("process", worked.decoded, worked.processed, requests))
        self.cache.put(media.key, worked.item)
        if disk is not None and len(self._stores) < MAX_STORES:
            self._store(disk.put, media.key, worked.item)
        return worked.item

    def _store(self, function: Callable[..., object], *args: Any) -> None:
        """Have something done to the files. Nobody waits for it."""
        store = asyncio.create_task(run_in(self._writes, function, *args))
        self._stores.add(store)
        store.add_done_callback(self._stores.discard)


def _identified(
    owner: MediaOwner, media: MediaInput, key: str, header: Any, source: Any
) -> IdentifiedMedia:
    return IdentifiedMedia(
        media.modality, media.index, media.parameter, key, header, source, owner.options
    )


def _open_disk(folder: Path, capacity_bytes: int) -> DiskCache:
    """Raises ModelLoadError for what is no folder to write to; later failures are misses."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return DiskCache(folder, capacity_bytes)
    except OSError as error:
        raise ModelLoadError(f"mm_processor_cache_dir cannot be used: {error.strerror}") from error


def _fingerprint(processor: BaseMultiModalProcessor, revision: str | None) -> str:
    """Digest what processed media depend on beside the model's name: they may outlive the
    process."""
    if not processor.info.get_supported_mm_limits():
        return ""
    hf_processor, tokenizer = processor.info.get_hf_processor(), processor.info.get_tokenizer()
    hasher = ContentHasher("processor")
    described = getattr(hf_processor, "to_json_string", None)
    hasher.update(repr(hf_processor) if described is None else described())
    # An item may hold the ids of its placeholder's tokens.
    hasher.update({str(token): id for id, token in tokenizer.added_tokens_decoder.items()})
    kind = type(processor)
    hasher.update([revision, tokenizer.vocab_size, kind.__module__, kind.__qualname__])
    for name in VERSIONS:
        with suppress(PackageNotFoundError):
            hasher.update([name, version(name)])
    return hasher.hexdigest()


def _is_url(item: object) -> bool:
    return isinstance(item, str) and item[:6].lower().startswith(("http:", "https:"))
