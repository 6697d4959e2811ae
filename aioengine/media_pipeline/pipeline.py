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
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import anyio
from cachetools import LRUCache

from aioengine.config import EngineConfig
from aioengine.engine.loader import Loaded
from aioengine.engine.request_state import MediaInput, RequestState
from aioengine.errors import (
    EngineError,
    InvalidRequestError,
    MediaError,
    ModelLoadError,
    trace_of,
)
from aioengine.instruments import Instruments, StageSpan
from aioengine.media_pipeline.workers import make_workers
from aioengine.processors.cache.disk import DiskCache
from aioengine.processors.cache.hasher import ContentHasher, digest_options, item_key
from aioengine.processors.cache.memory import HeldItems, ProcessorCache
from aioengine.processors.embeddings import EmbeddingItems
from aioengine.processors.inputs import MultiModalKwargsItem
from aioengine.processors.item_work import Promise, WorkItem
from aioengine.processors.media.fetch import fetch
from aioengine.processors.media.open import open_media
from aioengine.processors.mm_kwargs import check_cost
from aioengine.processors.processor import BaseMultiModalProcessor, ItemsByModality
from aioengine.streams.loop_bridge import run_apart, run_in
from aioengine.streams.single_flight import SharedJobs
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
    """One engine's. Its coroutines run in the engine's tasks."""

    def __init__(
        self,
        loaded: Loaded,
        config: EngineConfig,
        model: str | os.PathLike[str],
        instruments: Instruments,
    ) -> None:
        self.cache = ProcessorCache(config.mm_processor_cache_bytes)
        self.held = HeldItems(max(config.mm_processor_cache_bytes, MIN_HELD_BYTES))
        self._front = loaded.front
        self._max_rows = loaded.limits.max_encoder_len or loaded.limits.max_model_len
        self._options_digest = digest_options(loaded.front.merged_kwargs({}))
        self._config = config
        self._model_id = f"{os.fspath(model)} {_fingerprint(loaded.front, config.revision)}"
        self._workers = make_workers(loaded, config, model)
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
            try:
                self._disk = await run_in(
                    self._writes, _open_disk, Path(folder), config.mm_processor_cache_dir_bytes
                )
            except OSError as error:
                raise ModelLoadError(
                    f"mm_processor_cache_dir cannot be used: {error.strerror}"
                ) from error
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

    def release(self, state: RequestState) -> None:
        """The request has ended, and holds no features any more."""
        for media in state.media:
            if media.is_held:
                media.is_held = False
                self.held.release(media.key)

    async def identify(self, state: RequestState, cache_salt: str | None) -> ItemsByModality:
        """Fetch all items of a request, side by side, read their headers and give them their keys.

        Returns their features, if the layout needs them. The first failure ends the others. Raises
        the request's error.
        """
        counts = Counter(media.modality for media in state.media)
        self._front.info.validate_num_items(counts)
        options = self._front.options_for(state.mm_processor_kwargs, counts)
        state.mm_processor_kwargs = dict(options)
        state.options_digest = self._options_digest
        if state.mm_processor_kwargs:
            merged = self._front.merged_kwargs(state.mm_processor_kwargs)
            state.options_digest = await run_in(self._headers, digest_options, merged)
        features: dict[int, MultiModalKwargsItem | None] = {}
        rest = iter(enumerate(state.media))

        async def identify() -> None:
            for index, media in rest:
                features[index] = await self._identify(state, media, cache_salt)

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(len(state.media), SIDE_BY_SIDE)):
                    tasks.create_task(identify())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        outputs: ItemsByModality = {}
        for index, media in enumerate(state.media):
            if index not in features:
                # A fetcher may raise CancelledError, which no task group reports.
                raise MediaError(
                    f"{media.parameter} could not be fetched: the fetcher was cancelled",
                    parameter=media.parameter,
                )
            found = features[index]
            if self._front.layout_needs_hf_outputs:
                assert found is not None
                outputs.setdefault(media.modality, []).append(found)
        return outputs

    async def features(self, state: RequestState, media: MediaInput) -> MultiModalKwargsItem:
        """The item decoded and processed, from the cache where it is there.

        Raises MediaError, whatever the processor raises, or EngineError.
        """
        cached = self._find(media.key)
        if cached is not None:
            return cached
        is_own = media.key not in self._works
        try:
            return await self._works.join(media.key, partial(self._work, state, media))
        except InvalidRequestError as error:
            if not is_own and getattr(media.source, "may_change", False):
                # An object of somebody else's, that may be broken while its equal here is not.
                return await self.features(state, media)
            raise error.for_parameter(media.parameter) from error
        except EngineError:
            raise
        except Exception as error:  # a processor may raise anything; its text may hold payload
            logger.warning("a media item could not be processed\n%s", trace_of(error))
            raise MediaError(
                f"{media.parameter} could not be processed: {type(error).__name__}",
                parameter=media.parameter,
            ) from error

    # ---- one item

    async def _identify(
        self, state: RequestState, media: MediaInput, cache_salt: str | None
    ) -> MultiModalKwargsItem | None:
        """The item's features, if the layout needs them."""
        name = None
        if media.uuid is not None:
            name = self._key(state, media, cache_salt, uuid=media.uuid)
            if media.item is None or _is_url(media.item):
                known = self._recall(state, media, name)
                if known is not None:
                    return known
        start = time.perf_counter()
        fetched = await self._fetch(media)
        if fetched is not media.item:
            self._instruments.record(
                StageSpan("fetch", start, time.perf_counter(), (state.request_id,))
            )
        identity = await self._read(state, media, fetched)
        media.item = None
        media.key = self._key(state, media, cache_salt, identity)
        self.cache.touch(media.key)  # so that a request's own items are the last to go
        if name is not None:
            self._name(name, media)
        if not self._front.layout_needs_hf_outputs:
            return None
        features = await self.features(state, media)
        self._hold(state, media, features)  # else they are made again, from the source
        return features

    def _name(self, name: str, media: MediaInput) -> None:
        if isinstance(media.header, Embeddings):
            self._named.pop(name, None)  # the header would keep the rows in memory
        else:
            self._named[name] = media.key, media.header

    def _recall(
        self, state: RequestState, media: MediaInput, name: str
    ) -> MultiModalKwargsItem | None:
        """The item's features, if it is known by its uuid and the request can hold them.

        A uuid is another name for what was last given under it. What is at hand is looked at all
        the same; for what would have to be fetched, the caller's word is taken.
        """
        known = self._named.get(name)
        features = None if known is None else self._find(known[0])
        if known is None or features is None:
            return None
        media.key, media.header = known
        # Held until the request ends: there is nothing to make them from again.
        if not self._hold(state, media, features):
            return None
        media.item = None
        return features

    def _find(self, key: str) -> MultiModalKwargsItem | None:
        cached = self.cache.get(key)  # looked up in any case: it counts, and has been used
        return self.held.get(key) if cached is None else cached

    def _hold(self, state: RequestState, media: MediaInput, features: MultiModalKwargsItem) -> bool:
        """Whether the request holds the features now; one that has ended would for ever."""
        media.is_held = not state.has_ended and self.held.hold(media.key, features)
        return media.is_held

    async def _fetch(self, media: MediaInput) -> object:
        def get() -> Coroutine[Any, Any, object]:
            return fetch(
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

        if not _is_url(media.item):
            return await get()
        try:
            return await self._fetches.join(f"{media.modality} {media.item}", get_in_turn)
        except MediaError as error:
            raise error.for_parameter(media.parameter) from error

    async def _read(self, state: RequestState, media: MediaInput, fetched: object) -> Any:
        return await run_in(self._headers, self._open, state, media, fetched)

    def _open(self, state: RequestState, media: MediaInput, fetched: object) -> Any:
        """Read the header and hash the content, without decoding."""
        info = self._front.info
        if fetched is None:
            raise MediaError(
                f"{media.parameter} has no content, and nothing is cached under its uuid",
                parameter=media.parameter,
            )
        if isinstance(fetched, Embeddings):
            items = EmbeddingItems(
                [fetched],
                modality=media.modality,
                hidden_size=info.get_hidden_size(),
                parameters=[media.parameter],
                max_rows=self._max_rows,
            )
            # A copy: the caller may write to what it gave once the request is under way.
            extra = {name: value.clone() for name, value in items.extra[0].items()}
            media.source = media.header = Embeddings(items.get(0).clone(), **extra)
            hasher = ContentHasher("embeddings")
            hasher.update([media.source.rows, media.source.extra])
            return hasher.digest()
        media.source = open_media(
            media.modality,
            fetched,
            self._config.media,
            parameter=media.parameter,
            options=self._front.merged_kwargs(state.mm_processor_kwargs),
            get_sample_rate=info.get_sample_rate,
        )
        media.header = media.source.header()
        check_cost(
            state.mm_processor_kwargs,
            info.get_hf_processor(),
            media.modality,
            self._config.media,
            size=getattr(media.header, "size", (1, 1)),
            num_frames=getattr(media.header, "num_frames", 1),
        )
        return media.source.identity()

    def _key(
        self,
        state: RequestState,
        media: MediaInput,
        cache_salt: str | None,
        identity: Any = None,
        *,
        uuid: str | None = None,
    ) -> str:
        return item_key(
            model_id=self._model_id,
            modality=media.modality,
            options=state.options_digest,
            identity=identity,
            cache_salt=cache_salt,
            uuid=uuid,
        )

    async def _work(self, state: RequestState, media: MediaInput) -> MultiModalKwargsItem:
        disk = None if isinstance(media.source, Embeddings) else self._disk
        if disk is not None:
            stored = await run_in(self._reads, disk.get, media.key)
            if stored is not None and stored.modality == media.modality:
                self.cache.put(media.key, stored)
                return stored
        layout = state.layout
        worked = await self._workers.work(
            WorkItem(
                source=media.source,
                modality=media.modality,
                index=media.index,
                parameter=media.parameter,
                mm_kwargs=state.mm_processor_kwargs,
                promise=None if layout is None else Promise.of(layout, media.modality, media.index),
            )
        )
        requests = (state.request_id,)
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


def _open_disk(folder: Path, capacity_bytes: int) -> DiskCache:
    """Raises OSError for what is no folder to write to; later failures are misses."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return DiskCache(folder, capacity_bytes)


def _fingerprint(front: BaseMultiModalProcessor, revision: str | None) -> str:
    """What processed media depend on beside the model's name: they may outlive the process."""
    if not front.info.get_supported_mm_limits():
        return ""
    hf_processor, tokenizer = front.info.get_hf_processor(), front.info.get_tokenizer()
    hasher = ContentHasher("processor")
    described = getattr(hf_processor, "to_json_string", None)
    hasher.update(repr(hf_processor) if described is None else described())
    # An item may hold the ids of its placeholder's tokens.
    hasher.update({str(token): id for id, token in tokenizer.added_tokens_decoder.items()})
    hasher.update(
        [revision, tokenizer.vocab_size, type(front).__module__, type(front).__qualname__]
    )
    for name in VERSIONS:
        with suppress(PackageNotFoundError):
            hasher.update([name, version(name)])
    return hasher.hexdigest()


def _is_url(item: object) -> bool:
    return isinstance(item, str) and item[:6].lower().startswith(("http:", "https:"))
