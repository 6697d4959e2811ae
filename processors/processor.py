"""From a prompt and its media to token ids, placeholder ranges, and what the encoder is given.

Text and media never go through the HF processor together. The text is tokenised as it is, the media
are processed beside a dummy text, and the placeholders are expanded by this module according to the
family's prompt updates. So text and token prompts, cached and new items, all give the same result,
and a prompt can be laid out from the headers of its media before one of them is decoded.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from aioengine.errors import (
    InvalidRequestError,
    MediaError,
    UnsupportedModalityError,
)
from aioengine.processors.hf import lacks_video
from aioengine.processors.info import BaseDummyInputsBuilder, BaseProcessingInfo
from aioengine.processors.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargs,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from aioengine.processors.items import EmbeddingItems, MultiModalDataItems
from aioengine.processors.matching import apply_updates, find_expanded, has_open_ends
from aioengine.processors.media.resize import resize_ahead
from aioengine.processors.text_matching import apply_text_updates
from aioengine.processors.updates import PromptUpdate, find, resolve_contents

__all__ = [
    "BaseMultiModalProcessor",
    "Layout",
    "MultiModalInputs",
    "TextOnlyProcessor",
    "TextOrTokens",
]

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

    def __init__(self, info: BaseProcessingInfo, dummy_inputs: BaseDummyInputsBuilder) -> None:
        self.info = info
        self.dummy_inputs = dummy_inputs
        self._dummy_texts: dict[tuple[tuple[str, int], ...], str] = {}

    # What a family says.

    @abstractmethod
    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        """How the HF processor's outputs belong to items: output name -> field."""

    @abstractmethod
    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        """What the HF processor does to the text for each item.

        `mm_items` may know headers only, and `out_mm_kwargs` be empty, unless
        `layout_needs_hf_outputs` says otherwise.
        """

    def _apply_hf_processor_tokens_only(self, prompt_tokens: list[int]) -> list[int]:
        """What the HF processor does to the tokens whatever media there are; here nothing."""
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
        """Whether the image processor's own `_preprocess` begins by resizing each picture.

        Then large pictures are resized before they become arrays, which is faster and changes no
        bit. Not asked where `_preprocess` is transformers' stock one.
        """
        return False

    # What the engine calls.

    def merged_kwargs(self, mm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's `mm_processor_kwargs` with the request's over them, scope by scope."""
        return _merge(self.info.ctx.mm_processor_kwargs, mm_kwargs)

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
        encoding = self.info.get_tokenizer()(
            text, add_special_tokens=add_special_tokens, verbose=False
        )
        return list(encoding["input_ids"])

    def validate_num_items(self, counts: Mapping[str, int]) -> None:
        """Raises UnsupportedModalityError for media that the model or the engine does not take."""
        supported = self.info.get_supported_mm_limits()
        allowed = self.info.get_allowed_mm_limits()
        for modality, count in counts.items():
            if count and modality not in supported:
                takes = ", ".join(sorted(supported)) or "no media"
                lacks = modality == "video" and lacks_video(self.info.get_hf_processor())
                raise UnsupportedModalityError(
                    "the model's video processor needs torchvision; install it, or give the frames "
                    "as images"
                    if lacks
                    else f"the model takes no {modality} items, only {takes}"
                    if supported
                    else f"the model takes no {modality} items: it is for text only",
                    parameter=f"{modality}s",
                    value=count,
                )
            limit = allowed.get(modality)
            if limit is None or count <= limit:
                continue
            most = supported[modality]
            raises_it = most is None or count <= most
            way_out = f"; raise limit_mm_per_prompt[{modality!r}]" if raises_it else ""
            raise UnsupportedModalityError(
                f"{count} {modality} items in one prompt are more than {limit}{way_out}",
                parameter=f"{modality}s",
                value=count,
            )

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
        counts = items.get_all_counts()
        self.validate_num_items(counts)
        token_ids = self.tokenize(prompt) if isinstance(prompt, str) else self._checked_ids(prompt)
        updates = self._updates(items, mm_kwargs, outputs or {})
        text = prompt if isinstance(prompt, str) else None
        return self._expand(token_ids, text, updates, counts, literals)

    def process(self, items: MultiModalDataItems, mm_kwargs: Mapping[str, Any]) -> ItemsByModality:
        """Runs the HF processor on decoded media: modality -> one kwargs item for each.

        Floating-point tensors are float32 on the CPU. Embeddings pass through. Raises MediaError,
        with nothing of the media in its text.
        """
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
        updates = self._updates(items, mm_kwargs, outputs)
        contents = resolve_contents(updates, items.get_all_counts(), self.info.get_tokenizer())
        for modality, group in contents.items():
            places = range(len(group)) if indices is None else indices[modality]
            for item_idx, alternatives in zip(places, group, strict=True):
                placed = layout.placeholders[modality][item_idx]
                tokens = layout.token_ids[placed.offset : placed.offset + placed.length]
                if not any(
                    content.token_ids[content.start : content.stop] == tokens
                    and content.placeholder(placed.offset - content.start) == placed
                    for content in alternatives
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
        self.validate_num_items(items.get_all_counts())
        token_ids, outputs = self._apply_hf_processor_main(prompt, items, mm_kwargs or {})
        updates = self._updates(items, mm_kwargs or {}, outputs)
        is_plain = isinstance(prompt, str) and token_ids == self.tokenize(prompt)
        text = prompt if is_plain and isinstance(prompt, str) else None
        layout = self._expand(token_ids, text, updates, items.get_all_counts())
        return MultiModalInputs(
            token_ids=layout.token_ids, placeholders=layout.placeholders, items=outputs
        )

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

    def _expand(
        self,
        token_ids: list[int],
        text: str | None,
        updates: Sequence[PromptUpdate],
        counts: Mapping[str, int],
        literals: Sequence[tuple[int, int]] = (),
    ) -> Layout:
        """The layout of a prompt of tokens: as `text` became (if that is not None), or as they
        came from the caller or an HF processor, which may have expanded them."""
        tokenizer = self.info.get_tokenizer()
        if text is None and any(counts.values()) and not literals:
            placed = find_expanded(token_ids, updates, counts, tokenizer)
            if placed is not None:
                return Layout(token_ids=token_ids, placeholders=placed)
        plain = self._apply_hf_processor_tokens_only(list(token_ids))
        if literals:
            shift = max(0, find(plain, token_ids))
            literals = [(start + shift, stop + shift) for start, stop in literals]
            return self._apply_prompt_updates(plain, updates, counts, literals)
        if plain == token_ids and self._has_open_ends(updates, counts):
            expanded = apply_text_updates(token_ids, text, updates, counts, tokenizer)
            if expanded is not None:
                return Layout(token_ids=expanded[0], placeholders=expanded[1])
        return self._apply_prompt_updates(plain, updates, counts)

    def _has_open_ends(self, updates: Sequence[PromptUpdate], counts: Mapping[str, int]) -> bool:
        """Whether the text beside an update may merge with it, so that the text is expanded."""
        return has_open_ends(updates, counts, self.info.get_tokenizer())

    def _apply_prompt_updates(
        self,
        token_ids: list[int],
        updates: Sequence[PromptUpdate],
        counts: Mapping[str, int],
        literals: Sequence[tuple[int, int]] = (),
    ) -> Layout:
        """Expands the placeholders, and finds where each item came to lie."""
        tokenizer = self.info.get_tokenizer()
        expanded, placeholders = apply_updates(token_ids, updates, counts, tokenizer, literals)
        return Layout(token_ids=expanded, placeholders=placeholders)

    def _updates(
        self,
        items: MultiModalDataItems,
        mm_kwargs: Mapping[str, Any],
        outputs: Mapping[str, Sequence[MultiModalKwargsItem]],
    ) -> Sequence[PromptUpdate]:
        merged = self.merged_kwargs(mm_kwargs)
        return self._get_prompt_updates(items, merged, MultiModalKwargs(outputs))

    def _dummy_text(self, counts: Mapping[str, int]) -> str:
        key = tuple(sorted(counts.items()))
        text = self._dummy_texts.get(key)
        if text is None:
            text = self.dummy_inputs.get_dummy_text(counts)
            if len(self._dummy_texts) < 64:
                self._dummy_texts[key] = text
        return text

    def _process_media(
        self, mm_data: Mapping[str, object], counts: Mapping[str, int], mm_kwargs: dict[str, Any]
    ) -> ItemsByModality:
        try:
            outputs = self._call_hf_processor(self._dummy_text(counts), mm_data, mm_kwargs)
            config = self._get_mm_fields_config(outputs, mm_kwargs)
            built = MultiModalKwargs.build(_as_tensors(outputs, config), config)
        except InvalidRequestError:
            raise
        # An HF processor raises anything, and puts the data into the text: only the kind is told.
        except Exception as error:
            options = f" with mm_processor_kwargs {sorted(mm_kwargs)}" if mm_kwargs else ""
            raise MediaError(
                f"the {' and '.join(sorted(counts))} items could not be processed{options}: "
                f"{type(error).__name__}",
                parameter=next(iter(counts)),
                value=type(error).__name__,
            ) from None
        for modality, count in counts.items():
            if len(built.get(modality, ())) != count:
                raise MediaError(
                    f"{count} {modality} items were processed to {len(built.get(modality, ()))}",
                    parameter=modality,
                    value=count,
                )
        return built

    def _checked_ids(self, prompt: Sequence[int]) -> list[int]:
        config = self.info.get_hf_config().get_text_config()
        vocab_size = max(len(self.info.get_tokenizer()), int(config.vocab_size))
        try:
            token_ids = [_as_id(token_id) for token_id in prompt]
        except TypeError:
            token_ids = None
        if token_ids is None or bool in set(map(type, prompt)):
            raise InvalidRequestError("a token prompt must hold integers only", parameter="prompt")
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            outside = min(token_ids) if min(token_ids) < 0 else max(token_ids)
            raise InvalidRequestError(
                f"the prompt has the token id {outside}, outside the model's {vocab_size} tokens",
                parameter="prompt",
                value=outside,
            )
        return token_ids


class TextOnlyProcessor(BaseMultiModalProcessor):
    """For models that take no media: text is tokenised, token ids pass through."""

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        return []


def _as_id(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = _merge(below, value)
        merged[key] = value
    return merged


def _as_tensors(
    outputs: Mapping[str, Any], config: Mapping[str, MultiModalFieldConfig]
) -> dict[str, torch.Tensor | list[torch.Tensor]]:
    """The outputs that the config names, as CPU tensors, floating-point ones in float32."""

    def convert(value: Any) -> torch.Tensor:
        tensor = torch.as_tensor(value).cpu()
        return tensor.to(torch.float32) if tensor.is_floating_point() else tensor

    return {
        name: [convert(part) for part in outputs[name]]
        if isinstance(outputs[name], list | tuple)
        else convert(outputs[name])
        for name in config
        if name in outputs
    }
