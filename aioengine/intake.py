"""From a caller's prompt to a request that can be scheduled, and from media to features.

Layout first: a media item is fetched, hashed and measured by its header, the prompt is laid out,
and the request is admitted; decoding and processing follow when the scheduler asks for the item.
Each stage waits for its own threads only, so that a prompt without media never queues behind
pictures, and nothing but bookkeeping runs on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

import anyio.to_thread

from aioengine.config import EngineConfig
from aioengine.detokenizer import Detokenizer, fast_tokenizer
from aioengine.errors import (
    InvalidRequestError,
    MediaError,
    PromptTooLongError,
    UnsupportedModalityError,
)
from aioengine.instruments import Instruments, StageSpan
from aioengine.loading import Loaded
from aioengine.params import SamplingParams
from aioengine.prefix import extend_digests
from aioengine.processors.cache import ProcessorCache
from aioengine.processors.chat import ChatRenderer
from aioengine.processors.hasher import item_key
from aioengine.processors.inputs import MultiModalKwargsItem
from aioengine.processors.items import EmbeddingItems, ImageProcessorItems, MultiModalDataItems
from aioengine.processors.media.fetch import fetch
from aioengine.processors.media.image import open_image
from aioengine.prompts import count_characters
from aioengine.request import Item, Request
from aioengine.sampler import Constraint
from aioengine.sampling import SamplingContext
from aioengine.ticket import Completion, MediaInput, Ticket
from aioengine.types import Embeddings, Prompt

__all__ = ["Intake"]

Result = TypeVar("Result")

MARGIN_TOKENS = 1024
"""By so many a prompt may exceed the limit before it is laid out, which could make it shorter."""


class Intake:
    """One engine's front door. Its coroutines run in the engine's tasks."""

    def __init__(
        self, loaded: Loaded, config: EngineConfig, model_id: str, instruments: Instruments
    ) -> None:
        self.cache = ProcessorCache(config.mm_processor_cache_bytes)
        self._loaded = loaded
        self._config = config
        self._model_id = model_id
        self._instruments = instruments
        self._renderer: ChatRenderer | None = None
        self._sampling = SamplingContext(
            loaded.front.info.get_tokenizer(),
            loaded.runner.model.vocab_size,
            loaded.limits.max_model_len,
            loaded.eos_token_ids,
        )
        self._decoder = fast_tokenizer(loaded.home.info.get_tokenizer())
        self._fetches = _SharedJobs()
        self._processors: SimpleQueue[Any] = SimpleQueue()
        for processor in loaded.processors:
            self._processors.put(processor)
        workers = len(loaded.processors)
        self._front = ThreadPoolExecutor(1, thread_name_prefix="aioengine-front")
        self._headers = ThreadPoolExecutor(1, thread_name_prefix="aioengine-header")
        self._media = ThreadPoolExecutor(workers, thread_name_prefix="aioengine-media")

    async def aclose(self) -> None:
        """Drop what is queued and wait for the items being worked on."""
        await self._fetches.aclose()
        self._loaded.grammars.close()
        for pool in (self._front, self._headers, self._media):
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in (self._front, self._headers, self._media):
            await anyio.to_thread.run_sync(pool.shutdown)

    # ---- a request

    async def prepare(self, ticket: Ticket, prompt: Prompt) -> list[Completion]:
        """Everything before admission. Raises the request's error."""
        self._refuse_hopeless(prompt)
        text_or_ids: str | Sequence[int]
        if prompt.messages is not None:
            text_or_ids = await self._run(self._front, self._render, ticket, prompt)
        else:
            text_or_ids = prompt.text if prompt.text is not None else prompt.token_ids or ()
            ticket.media = _list_media(prompt)
        ticket.mm_processor_kwargs = dict(prompt.mm_processor_kwargs)
        if ticket.media:
            await self._fetch_all(ticket, prompt.cache_salt)
            ticket.stamp("fetched")
        structure, constraints = ticket.params.structured_outputs, []
        if structure is not None:
            grammars = self._loaded.grammars
            work = grammars.compile, structure, ticket.params.n
            constraints = await self._run(grammars.pool, *work)
        return await self._run(
            self._front, self._lay_out, ticket, text_or_ids, prompt.cache_salt, constraints
        )

    def _refuse_hopeless(self, prompt: Prompt) -> None:
        """Refuse what no tokenizer could make short enough, before one spends minutes on it."""
        most = self._loaded.limits.max_model_len
        characters = count_characters(prompt)
        num_tokens = len(prompt.token_ids or ()) or characters // self._loaded.longest_token
        if num_tokens >= most + MARGIN_TOKENS:
            raise PromptTooLongError(
                f"prompt has {num_tokens} tokens or more, but max_model_len is {most}; shorten the "
                f"prompt or raise max_model_len (and kv_cache_bytes)",
                parameter="prompt",
                value=num_tokens,
            )

    def _render(self, ticket: Ticket, prompt: Prompt) -> list[int]:
        if self._renderer is None:
            self._renderer = ChatRenderer(self._loaded.front)
        chat = self._renderer.render(list(prompt.messages or ()))
        ticket.media = [
            MediaInput(modality, index, media.item, media.parameter, media.trusted, media.uuid)
            for modality, items in chat.media.items()
            for index, media in enumerate(items)
        ]
        return chat.token_ids

    async def _fetch_all(self, ticket: Ticket, cache_salt: str | None) -> None:
        """Fetch and identify all items side by side; the first failure ends the others."""
        self._loaded.front.validate_num_items(Counter(media.modality for media in ticket.media))
        try:
            async with asyncio.TaskGroup() as tasks:
                for media in ticket.media:
                    tasks.create_task(self._fetch_one(ticket, media, cache_salt))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        for media in ticket.media:
            if not media.key:  # a fetcher may raise CancelledError, which no task group reports
                raise MediaError(
                    f"{media.parameter} could not be fetched: the fetcher was cancelled",
                    parameter=media.parameter,
                )

    async def _fetch_one(self, ticket: Ticket, media: MediaInput, cache_salt: str | None) -> None:
        start = time.perf_counter()
        fetched = await self._fetch(media)
        if fetched is not media.item:
            self._instruments.record(
                StageSpan("fetch", start, time.perf_counter(), (ticket.request_id,))
            )
        await self._run(self._headers, self._identify, ticket, media, fetched, cache_salt)

    async def _fetch(self, media: MediaInput) -> object:
        def get() -> Coroutine[Any, Any, object]:
            return fetch(
                media.item, self._config.media, parameter=media.parameter, trusted=media.trusted
            )

        if not isinstance(media.item, str) or not media.item.startswith(("http:", "https:")):
            return await get()
        try:
            return await self._fetches.join(media.item, get)
        except MediaError as error:
            raise error.for_parameter(media.parameter) from error

    def _identify(
        self, ticket: Ticket, media: MediaInput, fetched: object, cache_salt: str | None
    ) -> None:
        """Read the header and hash the content, without decoding."""
        if fetched is None:
            raise MediaError(
                f"{media.parameter} has no content, and nothing is cached under its uuid",
                parameter=media.parameter,
            )
        if isinstance(fetched, Embeddings):
            items = EmbeddingItems(
                [fetched],
                modality=media.modality,
                hidden_size=self._loaded.front.info.get_hidden_size(),
                parameters=[media.parameter],
            )
            # A copy: the caller may write to the rows once the request is under way.
            media.source = media.header = Embeddings(items.get(0).clone(), **items.extra[0])
            identity: Any = ["embeddings", media.source.rows, *items.extra]
        elif media.modality == "image":
            media.source = open_image(fetched, self._config.media, parameter=media.parameter)
            media.header = media.source.header()
            identity = media.source.identity()
        else:
            raise UnsupportedModalityError(
                f"{media.parameter}: {media.modality} items are not supported",
                parameter=media.parameter,
            )
        media.item = None
        media.key = item_key(
            model_id=self._model_id,
            modality=media.modality,
            identity=identity,
            mm_processor_kwargs=self._loaded.front.merged_kwargs(ticket.mm_processor_kwargs),
            cache_salt=cache_salt,
        )

    def _lay_out(
        self,
        ticket: Ticket,
        prompt: str | Sequence[int],
        cache_salt: str | None,
        constraints: Sequence[Constraint],
    ) -> list[Completion]:
        """Expand the placeholders and make the core's requests."""
        front = self._loaded.front
        items = self._data_items(ticket.media, [media.header for media in ticket.media])
        layout = ticket.layout = front.layout(prompt, items, ticket.mm_processor_kwargs)
        core_items = []
        for media in ticket.media:
            span = layout.placeholders[media.modality][media.index].to_span()
            num_bytes = span.num_rows * self._loaded.row_bytes
            core_items.append(Item(media.key, media.modality, span, num_bytes, media.parameter))
        core_items.sort(key=lambda item: item.span.offset)
        self._check_ids(layout.token_ids, core_items)
        params, prompt_token_ids = ticket.params, tuple(layout.token_ids)
        samplings = self._sampling.samplings(params, prompt_token_ids, constraints)
        leader: Request | None = None
        completions = []
        for index, sampling in enumerate(samplings):
            request = Request(
                request_id=f"{ticket.request_id}#{index}" if index else ticket.request_id,
                prompt_token_ids=prompt_token_ids,
                items=tuple(core_items),
                stop=self._sampling.stop_rule(params),
                priority=ticket.priority,
                cache_salt=cache_salt,
                reads_prefix=sampling.prompt_logprobs is None,
                sampling=sampling,
                awaits_tokens=sampling.constraint is not None,
                leader=leader,
            )
            if leader is not None:
                request.digests = list(leader.digests)
            elif self._config.enable_prefix_caching:
                # A long prompt takes a while to hash: here, not on the loop.
                extend_digests(request, self._loaded.limits.block_size)
            leader = leader or request
            completions.append(
                Completion(index, request, params, self._detokenizer(request, params))
            )
        return completions

    def _detokenizer(self, request: Request, params: SamplingParams) -> Detokenizer | None:
        if not params.detokenize:
            return None
        return Detokenizer(
            self._decoder,
            request.prompt_token_ids,
            stop=params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
        )

    def _check_ids(self, token_ids: Sequence[int], items: Sequence[Item]) -> None:
        """Ids beyond the embedding table may stand only where encoder rows come."""
        table = self._loaded.num_embeddings
        if max(token_ids, default=0) < table:
            return
        covered = {
            position + i
            for item in items
            for position, _, count in item.span.row_runs(0, len(token_ids))
            for i in range(count)
        }
        for position, token_id in enumerate(token_ids):
            if token_id >= table and position not in covered:
                raise InvalidRequestError(
                    f"the prompt has the token id {token_id}, but the model embeds only {table}",
                    parameter="prompt",
                    value=token_id,
                )

    # ---- a media item

    async def features(self, ticket: Ticket, media: MediaInput) -> MultiModalKwargsItem:
        """The item decoded and processed, from the cache where it is there. Raises MediaError."""
        cached = self.cache.get(media.key)
        if cached is not None:
            return cached
        item, start, decoded, processed = await self._run(
            self._media, self._decode_and_process, ticket, media
        )
        requests = (ticket.request_id,)
        self._instruments.record(StageSpan("decode", start, decoded, requests))
        self._instruments.record(StageSpan("process", decoded, processed, requests))
        self.cache.put(media.key, item)
        return item

    def _decode_and_process(
        self, ticket: Ticket, media: MediaInput
    ) -> tuple[MultiModalKwargsItem, float, float, float]:
        """Both in one go, so that only as many decoded pictures are in memory as workers."""
        processor = self._processors.get()
        try:
            start = time.perf_counter()
            is_decoded = isinstance(media.source, Embeddings)
            content = media.source if is_decoded else media.source.decode()
            decoded = time.perf_counter()
            items = self._data_items([media], [content])
            outputs = processor.process(items, ticket.mm_processor_kwargs)
            if not is_decoded:
                media.source.verify()
            assert ticket.layout is not None
            processor.verify_layout(
                ticket.layout,
                items,
                outputs,
                ticket.mm_processor_kwargs,
                {media.modality: [media.index]},
            )
            return outputs[media.modality][0], start, decoded, time.perf_counter()
        except MediaError as error:
            raise error.for_parameter(media.parameter) from error
        finally:
            self._processors.put(processor)

    def _data_items(
        self, media: Sequence[MediaInput], contents: Sequence[Any]
    ) -> MultiModalDataItems:
        """Headers or decoded contents as the processor takes them."""
        groups: dict[str, list[Any]] = {}
        names: dict[str, list[str]] = {}
        for item, content in zip(media, contents, strict=True):
            groups.setdefault(item.modality, []).append(content)
            names.setdefault(item.modality, []).append(item.parameter)
        return MultiModalDataItems(
            {
                modality: self._modality_items(modality, group, names[modality])
                for modality, group in groups.items()
            }
        )

    def _modality_items(self, modality: str, group: list[Any], names: list[str]) -> Any:
        are_embeddings = [isinstance(content, Embeddings) for content in group]
        if all(are_embeddings):
            return EmbeddingItems(
                group,
                modality=modality,
                hidden_size=self._loaded.front.info.get_hidden_size(),
                parameters=names,
            )
        if any(are_embeddings):
            raise MediaError(
                f"{names[are_embeddings.index(True)]}: embeddings and pictures cannot be mixed in "
                f"one prompt",
                parameter=names[are_embeddings.index(True)],
            )
        return ImageProcessorItems(group)

    async def _run(
        self, pool: ThreadPoolExecutor, function: Callable[..., Result], *args: Any
    ) -> Result:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *args)


class _SharedJobs:
    """Equal work in flight is done once. A waiter may leave; the last one's leaving cancels it."""

    def __init__(self) -> None:
        self._jobs: dict[str, asyncio.Task[Any]] = {}
        self._num_waiters: Counter[str] = Counter()
        self._ending: set[asyncio.Task[Any]] = set()

    async def aclose(self) -> None:
        """Wait for cancelled jobs to clean up after themselves."""
        if self._ending:
            await asyncio.wait(self._ending)

    async def join(self, key: str, make: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = asyncio.create_task(make())
        self._num_waiters[key] += 1
        try:
            result: Result = await asyncio.shield(job)
            return result
        finally:
            self._num_waiters[key] -= 1
            if not self._num_waiters[key]:
                del self._num_waiters[key], self._jobs[key]
                if job.cancel():
                    self._ending.add(job)
                    job.add_done_callback(self._ending.discard)


def _list_media(prompt: Prompt) -> list[MediaInput]:
    media = []
    for modality, items in prompt.media.items():
        uuids: Sequence[str | None] = prompt.uuids.get(modality) or [None] * len(items)
        if len(uuids) != len(items):
            raise InvalidRequestError(
                f"uuids[{modality!r}] has {len(uuids)} entries for {len(items)} items",
                parameter="uuids",
                value=len(uuids),
            )
        for index, (item, uuid) in enumerate(zip(items, uuids, strict=True)):
            name = f"{modality}s[{index}]"
            media.append(MediaInput(modality, index, item, name, True, uuid))
    return media
