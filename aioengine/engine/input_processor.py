"""Processing of a caller's prompt into a request that can be scheduled.

Layout first: a request's media are fetched and measured by their headers (pipeline.py), the prompt
is laid out, and the request is admitted; decoding and processing follow when the scheduler asks for
an item. Text waits for its own thread only, so that a prompt without media never queues behind
images, and nothing but bookkeeping runs on the event loop.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from aioengine.config import EngineConfig
from aioengine.core.block_hash import cross_digests, extend_digests
from aioengine.core.request import Item, Request
from aioengine.engine.constraints import bound_thinking, check_thinking, compile_grammar
from aioengine.engine.detokenizer import TextReaders
from aioengine.engine.loading.loader import Loaded
from aioengine.engine.prompt_embeds import read_embeds
from aioengine.engine.prompts import (
    FORMS,
    HALVES,
    as_mapping,
    check_token_ids,
    count_least,
    encode_pairs,
    fillings,
    list_media,
    with_schemas,
)
from aioengine.engine.request_state import CompletionState, RequestState
from aioengine.errors import InvalidRequestError, PromptTooLongError
from aioengine.instruments import Instruments
from aioengine.media_pipeline.items import (
    EncoderInput,
    IdentifiedMedia,
    MediaInput,
    MediaOwner,
    ProcessorOptions,
)
from aioengine.media_pipeline.pipeline import MediaPipeline
from aioengine.models.runtime.interfaces import PromptInputs, PromptMedia, PromptMemory
from aioengine.models.text.encoders import with_second_text
from aioengine.processors.cache.hasher import item_key
from aioengine.processors.chat.renderer import ChatPrompt, ChatRenderer
from aioengine.processors.embeddings import make_items
from aioengine.processors.encdec import EncDecLayout, EncDecMultiModalProcessor, Halves, half_name
from aioengine.processors.processor import ItemsByModality, Layout, TextOrTokens
from aioengine.sampling.pooling import pooled_fields, sampled_fields
from aioengine.sampling.sampler import Constraint
from aioengine.sampling.sampling_metadata import SamplingContext
from aioengine.sampling_params import SamplingParams
from aioengine.streams.loop_bridge import run_apart, run_in
from aioengine.types import Prompt, Span

__all__ = ["InputProcessor"]

Literals = Sequence[tuple[int, int]]
"""Token ranges of a prompt in which nothing is a placeholder."""

MARGIN_TOKENS = 1024
"""By so many a prompt may exceed the limit before it is laid out, which could make it shorter."""


class InputProcessor:
    """One engine's front door. Its coroutines run in the engine's tasks."""

    def __init__(
        self,
        loaded: Loaded,
        config: EngineConfig,
        model: str | os.PathLike[str],
        instruments: Instruments,
    ) -> None:
        limits = loaded.limits
        max_rows = limits.max_encoder_len or limits.max_model_len
        self.media = MediaPipeline(
            loaded.layout_processor, loaded.processors, max_rows, config, model, instruments
        )
        self._loaded = loaded
        self._config = config
        self._renderer: ChatRenderer | None = None
        self._sampling = SamplingContext(
            loaded.layout_processor.info.get_tokenizer(),
            loaded.runner.model.vocab_size,
            loaded.limits.max_model_len,
            loaded.eos_token_ids,
            loaded.suppress,
            loaded.begin_suppress,
        )
        self._readers = TextReaders(loaded.loop_processor.info.get_tokenizer())
        self._starts_outside = _sees_beyond_windows(loaded)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="aioengine-layout")

    async def aclose(self) -> None:
        """Drop what is queued and wait for what is being worked on."""
        await self.media.aclose()
        self._loaded.grammars.close()
        self.thread.shutdown(wait=False, cancel_futures=True)
        await run_apart(self.thread.shutdown)

    # ---- a request

    async def prepare(self, state: RequestState, prompt: Prompt) -> list[CompletionState]:
        """Everything before admission. Raises the request's error."""
        self._check_halves(prompt)
        if prompt.messages is None:
            check_thinking(state.params, None)
        if prompt.embeds is not None:
            constraints = await self._compile(state.params)
            return await run_in(self.thread, self._lay_out_embeds, state, prompt, constraints)
        halves = Halves(
            prompt=prompt.token_ids if prompt.text is None else prompt.text,
            encoder=_either(prompt.encoder_text, prompt.encoder_token_ids),
            decoder=_either(prompt.decoder_text, prompt.decoder_token_ids),
        )
        literals: Literals = ()
        if prompt.messages is None:
            self._refuse_hopeless(prompt)
            media = list_media(prompt)
        else:
            state.chat = chat = await run_in(self.thread, self._render, prompt)
            check_thinking(state.params, chat)
            halves, literals = Halves(prompt=chat.token_ids), chat.literals
            media = [
                MediaInput(modality, index, each.item, each.parameter, each.trusted, each.uuid)
                for modality, items in chat.media.items()
                for index, each in enumerate(items)
            ]
        read = halves.prompt if halves.encoder is None else halves.encoder
        options, outputs = await self._identify(state, media, prompt, "" if read is None else read)
        constraints = await self._compile(state.params, state.chat)
        laid_out = partial(self._lay_out, state, halves, literals, options, outputs)
        return await run_in(self.thread, laid_out, prompt.cache_salt, constraints)

    async def _identify(
        self,
        state: RequestState,
        media: Sequence[MediaInput],
        prompt: Prompt,
        read: TextOrTokens,
    ) -> tuple[ProcessorOptions, ItemsByModality]:
        """Fetch the request's media, beside which `read` stands, and read their headers.

        Returns their features too, by modality, if the layout needs them.
        """
        if len(media) >= self._loaded.limits.max_model_len:
            raise _too_long(len(media), self._loaded.limits.max_model_len)
        if not media:
            return ProcessorOptions(dict(prompt.mm_processor_kwargs)), {}
        options = await self.media.read_options(media, prompt.mm_processor_kwargs, read)
        state.lease = self.media.lease()
        owner = MediaOwner(state.request_id, options, state.lease, prompt.cache_salt)
        items, outputs = await self.media.identify(media, owner)
        state.media = tuple(items)
        state.stamp("fetched")
        return options, outputs

    def _check_halves(self, prompt: Prompt) -> None:
        """Refuse what does not go with the kind of the model."""
        if isinstance(self._loaded.layout_processor, EncDecMultiModalProcessor):
            if prompt.messages is not None:
                message = "an encoder-decoder model takes no chat messages; give text"
                raise InvalidRequestError(message, parameter="prompt")
            return
        for name in HALVES:
            if getattr(prompt, name) is not None:
                message = f"{name} is for encoder-decoder models; give text"
                raise InvalidRequestError(message, parameter=name)
        if all(getattr(prompt, name) is None for name in FORMS):
            message = f"a prompt has one of {', '.join(FORMS)}; media alone say nothing"
            raise InvalidRequestError(message, parameter="prompt")

    async def _compile(
        self, params: SamplingParams, chat: ChatPrompt | None = None
    ) -> Sequence[Constraint]:
        return await compile_grammar(self._loaded.grammars, params, chat)

    def _refuse_hopeless(self, prompt: Prompt) -> None:
        """Refuse what no tokenizer could make short enough, before one spends minutes on it."""
        self._check_length(*count_least(prompt))

    def _check_length(self, characters: int, others: int = 0) -> None:
        limits = self._loaded.limits
        most = max(limits.max_model_len, limits.max_encoder_len)
        num_tokens = max(characters // self._loaded.longest_token, others)
        if num_tokens >= most + MARGIN_TOKENS:
            raise _too_long(num_tokens, most)

    def _render(self, prompt: Prompt) -> ChatPrompt:
        prompt = with_schemas(prompt)
        self._refuse_hopeless(prompt)  # here, as it takes a while to count very many parts
        if self._renderer is None:
            self._renderer = ChatRenderer(self._loaded.layout_processor, self._check_length)
        return self._renderer.render(
            [*map(as_mapping, prompt.messages or ())],
            fillings(prompt),
            tools=prompt.tools,
            choice=prompt.tool_choice or "auto",
            options=prompt.chat_template_kwargs,
        )

    def _lay_out(
        self,
        state: RequestState,
        halves: Halves,
        literals: Literals,
        options: ProcessorOptions,
        outputs: ItemsByModality,
        cache_salt: str | None,
        constraints: Sequence[Constraint],
    ) -> list[CompletionState]:
        """Expand the placeholders and make the core's requests."""
        processor = self._loaded.layout_processor
        items = make_items(
            ((media.modality, media.parameter, media.header) for media in state.media),
            processor.info.get_hidden_size,
        )
        encoder: Item | None = None
        core_items: list[Item] = []
        if isinstance(processor, EncDecMultiModalProcessor):
            halved = processor.layout_halves(halves, items, options.mm_kwargs, outputs)
            state.layout = halved
            prompt_token_ids = tuple(halved.decoder_token_ids)
            encoder, inputs = self._encoder_item(state, halved, halves, options, cache_salt), None
        else:
            prompt = () if halves.prompt is None else halves.prompt
            layout = processor.layout(prompt, items, options.mm_kwargs, outputs, literals)
            state.layout = layout
            prompt_token_ids = tuple(layout.token_ids)
            core_items = self._items(state, layout)
            prompt_media = [
                PromptMedia(
                    media.modality,
                    item.span,
                    outputs[media.modality][media.index] if outputs else {},
                )
                for media, item in zip(state.media, core_items, strict=True)
            ]
            core_items.sort(key=lambda item: item.span.offset)
            prompt_media.sort(key=lambda item: item.span.offset)
            inputs = self._loaded.runner.model.prompt_inputs(prompt_token_ids, prompt_media)
        name = half_name("decoder", halves.decoder)
        check_token_ids(prompt_token_ids, core_items, self._loaded.num_embeddings, name)
        if inputs is not None and inputs.memory is not None:
            assert [item.key for item in core_items] == [media.key for media in state.media]
            places = _places(prompt_token_ids, core_items)
            encoder = self._memory_item(state, inputs.memory, places, options, cache_salt)
            core_items = []
        known = self._known(prompt_token_ids, core_items, inputs, cache_salt) | {"encoder": encoder}
        return self._completions(state, known, constraints)

    def _lay_out_embeds(
        self, state: RequestState, prompt: Prompt, constraints: Sequence[Constraint]
    ) -> list[CompletionState]:
        """Do the same for a prompt of embeddings."""
        token_ids, items, state.media = read_embeds(prompt.embeds, self._loaded, prompt.cache_salt)
        inputs = self._loaded.runner.model.prompt_inputs(token_ids)
        known = self._known(token_ids, items, inputs, prompt.cache_salt)
        return self._completions(state, known, constraints, repeats=())

    def _known(
        self,
        token_ids: tuple[int, ...],
        items: Sequence[Item],
        inputs: PromptInputs | None,
        cache_salt: str | None,
    ) -> dict[str, Any]:
        """Build what all completions of a prompt have in common."""
        return {
            "prompt_token_ids": token_ids,
            "items": tuple(items),
            "inputs": inputs,
            "bidirectional": () if inputs is None else inputs.bidirectional,
            "starts_outside": self._starts_outside,
            "cache_salt": cache_salt,
        }

    def _completions(
        self,
        state: RequestState,
        known: Mapping[str, Any],
        constraints: Sequence[Constraint],
        repeats: tuple[int, ...] | None = None,
    ) -> list[CompletionState]:
        """A request to the core for each completion; `known`: what they have in common.

        `repeats`: the prompt's tokens that are penalised where they come again; None: all.
        """
        params, token_ids = state.params, known["prompt_token_ids"]
        readers = [self._readers.new(token_ids, params, state.chat) for _ in range(params.n)]
        if state.pooling is not None:
            inputs = with_second_text(known["inputs"], state.pooling.second_text)
            known = {**known, "inputs": inputs}
            is_causal = self._loaded.runner.model.is_causal
            wishes = [pooled_fields(state.pooling, len(token_ids), is_causal=is_causal)]
        else:
            seen, context = token_ids if repeats is None else repeats, self._sampling
            if state.chat is not None:
                messages = [message for _, message in readers]
                constraints = bound_thinking(params, state.chat, messages, constraints, context)
            wishes = [*map(sampled_fields, context.samplings(params, seen, constraints))]
        caching = self._config.enable_prefix_caching
        private_salt = secrets.token_bytes(16) if params.n > 1 and not caching else None
        leader: Request | None = None
        completions = []
        for index, (wish, read) in enumerate(zip(wishes, readers, strict=True)):
            request = Request(
                request_id=f"{state.request_id}#{index}" if index else state.request_id,
                **known,
                stop=self._sampling.stop_rule(params),
                priority=state.priority,
                private_salt=private_salt,
                **wish,
                leader=leader,
            )
            if leader is not None:
                request.digests = list(leader.digests)
                request.cross_digests = leader.cross_digests
            elif caching or private_salt is not None:
                # A long prompt takes a while to hash: here, not on the loop.
                extend_digests(request, self._loaded.limits.block_size)
                cross_digests(request, self._loaded.limits.block_size)
            leader = leader or request
            completions.append(CompletionState(index, request, params, *read))
        return completions

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]]
    ) -> list[tuple[tuple[int, ...], int]]:
        """The token ids of each pair of texts, and where the second one's type begins."""
        tokenizer = self._loaded.layout_processor.info.get_tokenizer()
        return await run_in(self.thread, encode_pairs, tokenizer, pairs)

    def _items(self, state: RequestState, layout: Layout) -> list[Item]:
        """The request's media as the core sees them, in their own order."""
        found = []
        for media in state.media:
            span = layout.placeholders[media.modality][media.index].to_span()
            num_bytes = span.num_rows * self._loaded.row_bytes
            found.append(Item(media.key, media.modality, span, num_bytes, media.parameter))
        return found

    def _encoder_item(
        self,
        state: RequestState,
        layout: EncDecLayout,
        halves: Halves,
        options: ProcessorOptions,
        cache_salt: str | None,
    ) -> Item:
        """Build one item of all that an encoder reads for cross-attention: text, and media in it.

        Its features are `input_ids` int64 [rows] and those of the media.
        """
        num_rows = len(layout.token_ids)
        parameter = half_name("encoder", halves.encoder)
        if not num_rows:
            message = "there is nothing for the encoder to read; give it a token at least"
            raise InvalidRequestError(message, parameter=parameter)
        inside = self._items(state, layout)
        check_token_ids(layout.token_ids, inside, self._loaded.num_embeddings, parameter)
        state.num_encoder_tokens = num_rows - sum(item.span.length for item in inside)
        token_ids = torch.tensor(layout.token_ids, dtype=torch.int64)
        modality, name = "text", parameter
        if state.media:
            modality, name = state.media[0].modality, state.media[0].parameter
        places = [[item.key, item.span.offset, item.span.length] for item in inside]
        key = item_key(
            model_id=self._loaded.layout_processor.info.model_id,
            modality=f"encoder {modality}",
            options=options.digest,
            identity=[token_ids.numpy().tobytes(), places],
            cache_salt=cache_salt,
        )
        source = EncoderInput({"input_ids": token_ids}, state.media)
        media = IdentifiedMedia(modality, 0, name, key, None, source, options)
        state.media = (*state.media, media)
        name = parameter if state.num_encoder_tokens else name
        return Item(key, modality, Span(0, num_rows), num_rows * self._loaded.row_bytes, name)

    def _memory_item(
        self,
        state: RequestState,
        memory: PromptMemory,
        places: Sequence[int],
        options: ProcessorOptions,
        cache_salt: str | None,
    ) -> Item:
        """Build one item of all media of a prompt, which cross-attention reads.

        Its features are `media`, those of each medium, and `index` int64 [rows]. `places`: of the
        media, where the prompt's tokens do not tell them, and what tokens see.
        """
        first, *_ = state.media  # in the order of their places, as they are of one modality
        keys = [media.key for media in state.media]
        key = item_key(
            model_id=self._loaded.layout_processor.info.model_id,
            modality=f"memory {first.modality}",
            options=options.digest,
            identity=[memory.index.numpy().tobytes(), keys, [*places]],
            cache_salt=cache_salt,
        )
        source = EncoderInput({"index": memory.index}, state.media, are_apart=True)
        media = IdentifiedMedia(first.modality, 0, first.parameter, key, None, source, options)
        state.media = (*state.media, media)
        num_bytes = memory.num_rows * self._loaded.row_bytes
        return Item(key, first.modality, Span(0, memory.num_rows), num_bytes, first.parameter)


def _places(token_ids: Sequence[int], items: Sequence[Item]) -> list[int]:
    """Return where the items stand, if tokens elsewhere look like theirs; else nothing."""
    places = [position for item in items for position in range(item.span.offset, item.span.end)]
    marks = {token_ids[position] for position in places}
    alike = [position for position, each in enumerate(token_ids) if each in marks]
    return [] if alike == places else places


def _sees_beyond_windows(loaded: Loaded) -> bool:
    """Return whether tokens see what of their block lies before a window, if it is in one step."""
    model = loaded.runner.model
    groups = enumerate(model.kv_groups)
    has_windows = any(model.sees_blocks(i) for i, each in groups if each.window is not None)
    return has_windows and not model.blocks_in_window


def _too_long(num_tokens: int, most: int) -> PromptTooLongError:
    message = (
        f"prompt has {num_tokens} tokens or more, but {most} are the most; shorten the prompt, or "
        f"raise max_model_len (and kv_cache_bytes) if that is what sets the limit"
    )
    return PromptTooLongError(message, parameter="prompt", value=num_tokens)


def _either(text: str | None, token_ids: Sequence[int] | None) -> TextOrTokens | None:
    return token_ids if text is None else text
