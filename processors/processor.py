"""Processing of a prompt and its media into token ids, placeholder ranges, and what the encoder is
given.

Text and media never go through the HF processor together. The text is tokenised as it is, the media
are processed beside a dummy text, and the placeholders are expanded by this module according to the
family's prompt updates. So text and token prompts, cached and new items, all give the same result,
and a prompt can be laid out from the headers of its media before one of them is decoded.
"""

from __future__ import annotations

import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from aioengine.errors import EngineError, InvalidRequestError, MediaError, trace_of
from aioengine.processors.embeddings import EmbeddingItems
from aioengine.processors.info import BaseDummyInputsBuilder, BaseProcessingInfo
from aioengine.processors.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargs,
    MultiModalKwargsItem,
    PlaceholderRange,
    are_finite,
    to_tensors,
)
from aioengine.processors.items import Counts, MultiModalDataItems
from aioengine.processors.media.resize import resize_ahead
from aioengine.processors.mm_kwargs import merge_options
from aioengine.processors.prompt.matching import apply_updates, find_expanded, has_open_ends
from aioengine.processors.prompt.text_matching import apply_text_updates
from aioengine.processors.prompt.updates import (
    PromptUpdate,
    ResolvedUpdates,
    find,
    join_updates,
    resolve_updates,
)

__all__ = ["BaseMultiModalProcessor", "Layout", "MultiModalInputs", "TextOrTokens"]

logger = logging.getLogger(__name__)

TextOrTokens: TypeAlias = str | Sequence[int]
ItemsByModality: TypeAlias = dict[str, list[MultiModalKwargsItem]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A prompt's final token ids, and modality -> where its items lie, in item order."""

    token_ids: list[int]
    placeholders: dict[str, list[PlaceholderRange]]


@dataclass(frozen=True, kw_only=True)
class MultiModalInputs(Layout):
    """A layout together with the processed items: modality -> items in the same order."""

    items: ItemsByModality


class BaseMultiModalProcessor(ABC):
    """A family's processing; subclasses say what their HF processor does.

    Not thread-safe: each worker thread has an instance of its own, made from its own clone of the
    context.
    """

    layout_needs_hf_outputs = False
    """Whether `_get_prompt_updates` reads `out_mm_kwargs`, so that media are processed first."""
    adds_special_tokens: bool = True
    """Whether the HF processor has a text tokenized with the tokenizer's special tokens."""
    text_prefix: str = ""
    """What the HF processor writes before a text that is to have special tokens."""

    def __init__(self, info: BaseProcessingInfo, dummy_inputs: BaseDummyInputsBuilder) -> None:
        self.info = info
        self.dummy_inputs = dummy_inputs
        self._dummy_texts: dict[tuple[tuple[str, int], ...], str] = {}
        self._has_own_media = False
        self._logged: set[str] = set()

    @classmethod
    def chosen_for(cls, info: BaseProcessingInfo) -> type[BaseMultiModalProcessor]:
        """The class for this HF processor; a family may hand some to another."""
        return cls

    # What a family says.

    @abstractmethod
    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        """Return how the HF processor's outputs belong to items: output name -> field."""

    @abstractmethod
    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        """Return what the HF processor does to the text for each item.

        `mm_items` may know headers only, and `out_mm_kwargs` be empty, unless
        `layout_needs_hf_outputs` says otherwise.
        """

    def _apply_hf_processor_tokens_only(self, prompt_tokens: list[int]) -> list[int]:
        """Return what the HF processor does to the tokens whatever media there are; here
        nothing."""
        return prompt_tokens

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        """Calls the HF processor. `mm_data` has its plural keywords (`images=[...]`)."""
        processor = self.info.get_hf_processor()
        ready = resize_ahead(processor, mm_data, mm_kwargs, self._preprocess_resizes_first)
        outputs: Mapping[str, Any] = processor(
            text=prompt, **ready, **mm_kwargs, return_tensors="pt"
        )
        return outputs

    def _preprocess_resizes_first(self, image_processor: Any, options: Mapping[str, Any]) -> bool:
        """Return whether the image processor's own `_preprocess` begins by resizing each image.

        Then large images are resized before they become arrays, which is faster and changes no
        bit. Not asked where `_preprocess` is transformers' stock one.
        """
        return False

    # What the engine calls.

    def merged_kwargs(self, mm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's `mm_processor_kwargs` with the request's over them, scope by scope."""
        return merge_options(self.info.ctx.mm_processor_kwargs, mm_kwargs)

    def options_for(
        self, mm_kwargs: Mapping[str, Any], mm_counts: Counts, prompt: TextOrTokens = ""
    ) -> Mapping[str, Any]:
        """A request's `mm_kwargs` with what follows from how many items of each modality it has,
        and from its prompt.

        For families in which an item becomes something else beside others, or beside other text:
        items are processed one by one, and found again by their content and these options. Here
        nothing follows.
        """
        return mm_kwargs

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text prompt, with the special tokens that the HF processor adds.

        Raises InvalidRequestError for text that is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "the prompt's text is not valid Unicode (it has lone surrogates)",
                parameter="prompt",
            ) from None
        adds_special = add_special_tokens and self.adds_special_tokens
        written = self.write(text) if add_special_tokens else text
        encoding = self.info.get_tokenizer()(
            written, add_special_tokens=adds_special, verbose=False
        )
        return list(encoding["input_ids"])

    def write(self, text: str) -> str:
        """The text with what the HF processor writes beside its placeholders."""
        return self.text_prefix + text

    def layout(
        self,
        prompt: TextOrTokens,
        items: MultiModalDataItems,
        mm_kwargs: Mapping[str, Any],
        outputs: Mapping[str, Sequence[MultiModalKwargsItem]] | None = None,
        literals: Sequence[tuple[int, int]] = (),
    ) -> Layout:
        """The prompt with every item's placeholder tokens in it, from headers alone.

        `outputs`: the processed items, needed only where `layout_needs_hf_outputs`; `literals`:
        token ranges of the prompt that hold no placeholder, whatever they look like. Raises
        UnsupportedModalityError, PlaceholderMismatchError, or InvalidRequestError for token ids
        that the model does not have.
        """
        self.info.validate_num_items(items.get_all_counts())
        token_ids = self.tokenize(prompt) if isinstance(prompt, str) else self._checked_ids(prompt)
        updates = self._updates(items, mm_kwargs, outputs or {})
        text = prompt if isinstance(prompt, str) else None
        return self._expand(token_ids, text, updates, literals)

    def process(self, items: MultiModalDataItems, mm_kwargs: Mapping[str, Any]) -> ItemsByModality:
        """Runs the HF processor on decoded media: modality -> one kwargs item for each.

        Floating-point tensors are float32 on the CPU. Embeddings pass through. Raises MediaError,
        with nothing of the media in its text.
        """
        placed: dict[str, dict[int, MultiModalKwargsItem]] = {}
        for part, places in items.parts():
            for modality, done in self._process_part(part, mm_kwargs).items():
                placed.setdefault(modality, {}).update(zip(places[modality], done, strict=True))
        return {
            modality: [group[index] for index in range(len(group))]
            for modality, group in placed.items()
        }

    def verify_layout(
        self,
        layout: Layout,
        items: MultiModalDataItems,
        outputs: Mapping[str, Sequence[MultiModalKwargsItem]],
        mm_kwargs: Mapping[str, Any],
        indices: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Checks that the processed items take the placeholders that the layout gave them.

        `items` and `outputs` are all of the request's, or those whose places in it `indices` tells.
        Raises MediaError.
        """
        updates = self._updates(items, mm_kwargs, outputs, indices)
        for modality in items:
            group = updates.items[modality]
            places = range(len(group)) if indices is None else indices[modality]
            for item_idx, alternatives in zip(places, group, strict=True):
                placed = layout.placeholders[modality][item_idx]
                if not any(
                    update.placeholder(placed.offset - update.start) == placed
                    for update in alternatives
                ):
                    name = f"{modality}s[{item_idx}]"
                    raise MediaError(
                        f"{name} was processed to another number or order of placeholders than "
                        f"the {placed.length} that its header promised",
                        parameter=name,
                    )

    def apply(
        self,
        prompt: TextOrTokens,
        items: MultiModalDataItems,
        mm_kwargs: Mapping[str, Any] | None = None,
    ) -> MultiModalInputs:
        """Layout, processing and verification at once, for decoded media."""
        self.info.validate_num_items(items.get_all_counts())
        mm_kwargs = self.options_for(mm_kwargs or {}, items.get_all_counts(), prompt)
        token_ids, outputs = self._apply_hf_processor_main(prompt, items, mm_kwargs)
        updates = self._updates(items, mm_kwargs, outputs)
        is_plain = isinstance(prompt, str) and token_ids == self.tokenize(prompt)
        text = prompt if is_plain and isinstance(prompt, str) else None
        layout = self._expand(token_ids, text, updates)
        return MultiModalInputs(
            token_ids=layout.token_ids, placeholders=layout.placeholders, items=outputs
        )

    @contextmanager
    def own_media(self) -> Iterator[None]:
        """Take the media in the block for the engine's own, so that errors keep their cause."""
        before, self._has_own_media = self._has_own_media, True
        try:
            yield
        finally:
            self._has_own_media = before

    # How it is done; a family may override these too.

    def _apply_hf_processor_main(
        self, prompt: TextOrTokens, mm_items: MultiModalDataItems, mm_kwargs: Mapping[str, Any]
    ) -> tuple[list[int], ItemsByModality]:
        """Text and media through their own halves of the HF processor.

        A family may give both to its HF processor at once: that its placeholders are expanded
        already is seen by the tokens.
        """
        token_ids = self.tokenize(prompt) if isinstance(prompt, str) else self._checked_ids(prompt)
        return token_ids, self.process(mm_items, mm_kwargs)

    def _process_part(
        self, items: MultiModalDataItems, mm_kwargs: Mapping[str, Any]
    ) -> ItemsByModality:
        """`process`, where each modality has media or embeddings, and not both."""
        processed: ItemsByModality = {}
        mm_data: dict[str, object] = {}
        counts: dict[str, int] = {}
        for modality, group in items.items():
            if isinstance(group, EmbeddingItems):
                processed[modality] = group.to_kwargs_items()
            else:
                mm_data.update(group.get_processor_data())
                counts[modality] = len(group)
        if mm_data:
            processed.update(self._process_media(mm_data, counts, self.merged_kwargs(mm_kwargs)))
        return {modality: processed[modality] for modality in items}

    def _expand(
        self,
        token_ids: list[int],
        text: str | None,
        updates: ResolvedUpdates,
        literals: Sequence[tuple[int, int]] = (),
    ) -> Layout:
        """The layout of a prompt of tokens: as `text` became (if that is not None), or as they
        came from the caller or an HF processor, which may have expanded them."""
        tokenizer = self.info.get_tokenizer()
        if text is None and updates.num_items and not literals:
            placed = find_expanded(token_ids, updates, tokenizer)
            if placed is not None:
                return Layout(token_ids=token_ids, placeholders=placed)
        plain = self._apply_hf_processor_tokens_only(list(token_ids))
        if literals:
            shift = max(0, find(plain, token_ids))
            literals = [(start + shift, stop + shift) for start, stop in literals]
            return self._apply_prompt_updates(plain, updates, literals)
        if plain == token_ids and self._has_open_ends(updates):
            written = None if text is None else self.write(text)
            expanded = apply_text_updates(token_ids, written, updates, tokenizer)
            if expanded is not None:
                return Layout(token_ids=expanded[0], placeholders=expanded[1])
        return self._apply_prompt_updates(plain, updates)

    def _has_open_ends(self, updates: ResolvedUpdates) -> bool:
        """Return whether the text beside an update may merge with it, so that the text is
        expanded."""
        return has_open_ends(updates, self.info.get_tokenizer())

    def _apply_prompt_updates(
        self,
        token_ids: list[int],
        mm_prompt_updates: ResolvedUpdates,
        literals: Sequence[tuple[int, int]] = (),
    ) -> Layout:
        """Expands the placeholders, and finds where each item came to lie."""
        tokenizer = self.info.get_tokenizer()
        expanded, placeholders = apply_updates(token_ids, mm_prompt_updates, tokenizer, literals)
        return Layout(token_ids=expanded, placeholders=placeholders)

    def _updates(
        self,
        items: MultiModalDataItems,
        mm_kwargs: Mapping[str, Any],
        outputs: Mapping[str, Sequence[MultiModalKwargsItem]],
        indices: Mapping[str, Sequence[int]] | None = None,
    ) -> ResolvedUpdates:
        """Collect what the family says for each item; `indices`: their places, if these are not
        all."""
        merged, tokenizer = self.merged_kwargs(mm_kwargs), self.info.get_tokenizer()
        parts = []
        for part, places in items.parts() or [(items, {})]:
            own = {
                name: [outputs[name][index] for index in places[name]]
                for name in part
                if outputs.get(name)
            }
            updates = self._get_prompt_updates(part, merged, MultiModalKwargs(own))
            parts.append((resolve_updates(updates, indices or places, tokenizer), places))
        return join_updates(parts)

    def _dummy_text(self, counts: Counts) -> str:
        key = tuple(sorted(counts.items()))
        text = self._dummy_texts.get(key)
        if text is None:
            try:
                text = self.dummy_inputs.get_dummy_text(counts)
            except Exception as error:  # of a family from outside: no payload, and not the media's
                self._log(error, counts)
                raise EngineError(
                    f"{type(self.dummy_inputs).__name__} failed to make the text beside "
                    f"{dict(counts)}: {type(error).__name__}"
                ) from error
            if len(self._dummy_texts) < 64:
                self._dummy_texts[key] = text
        return text

    def _process_media(
        self, mm_data: Mapping[str, object], counts: Counts, mm_kwargs: dict[str, Any]
    ) -> ItemsByModality:
        text = self._dummy_text(counts)
        try:
            outputs = self._call_hf_processor(text, mm_data, mm_kwargs)
            config = self._get_mm_fields_config(outputs, mm_kwargs)
            tensors = to_tensors(outputs, config)
            if not are_finite(tensors.values()):
                raise ValueError("what comes of it are not numbers")
            built = MultiModalKwargs.build(tensors, config)
        except InvalidRequestError:
            raise
        # An HF processor raises anything, and puts the data into the text: only the kind goes on.
        except Exception as error:
            self._log(error, counts)
            options = f" with mm_processor_kwargs {sorted(mm_kwargs)[:5]}" if mm_kwargs else ""
            raise MediaError(
                f"the {' and '.join(sorted(counts))} items could not be processed{options}: "
                f"{type(error).__name__}",
                parameter=next(iter(counts)),
                value=type(error).__name__,
            ) from (error if self._has_own_media else None)
        for modality, count in counts.items():
            if len(built.get(modality, ())) != count:
                raise MediaError(
                    f"{count} {modality} items were processed to {len(built.get(modality, ()))}",
                    parameter=modality,
                    value=count,
                )
        return built

    def _log(self, error: Exception, counts: Counts) -> None:
        """Log where an error came up, in full once for each place, and never its text."""
        name, items, trace = type(self).__name__, "/".join(sorted(counts)), trace_of(error)
        if trace in self._logged:
            logger.warning("%s failed on %s items again: %s", name, items, type(error).__name__)
            return
        logger.warning("%s failed on %s items\n%s", name, items, trace)
        if len(self._logged) < 64:
            self._logged.add(trace)

    def _checked_ids(self, prompt: Sequence[int]) -> list[int]:
        config = self.info.get_hf_config().get_text_config()
        vocab_size = max(len(self.info.get_tokenizer()), int(config.vocab_size))
        try:
            token_ids = list(map(operator.index, prompt))
        except TypeError:
            token_ids = None
        if token_ids is None or bool in map(type, prompt):
            raise InvalidRequestError("a token prompt must hold integers only", parameter="prompt")
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            outside = min(token_ids) if min(token_ids) < 0 else max(token_ids)
            raise InvalidRequestError(
                f"the prompt has the token id {outside}, outside the model's {vocab_size} tokens",
                parameter="prompt",
                value=outside,
            )
        return token_ids
