"""Families that transformers' classes carry without anything of their own here.

Their HF processor says what each item becomes in the text, or expands a whole prompt by itself, and
their model has `get_image_features` (or the same for videos or audio) with rows for exactly these
places. Some rows are more than the embeddings of placeholders: those that are added before chosen
layers of the decoder (Granite 4 Vision: features of several layers of the vision tower, each for a
layer of the decoder), and markers around and between rows that have embeddings of their own
(Ovis2). Where no method gives these rows, the model's own forward does (Llama 4, Phi-4 multimodal).
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aioengine.errors import (
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    PlaceholderMismatchError,
    UnsupportedModalityError,
    trace_of,
)
from aioengine.models.by_cache.model import ByCache
from aioengine.models.runtime.encoding import batch_items, place
from aioengine.models.runtime.interfaces import PromptMedia
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.models.runtime.whole_pass import embeddings_of
from aioengine.processors.generic import GenericMultiModalProcessor
from aioengine.processors.generic_info import (
    CONTRACTS,
    GenericDummyInputsBuilder,
    GenericProcessingInfo,
)
from aioengine.processors.info import BaseProcessingInfo
from aioengine.processors.inputs import MultiModalKwargsItem
from aioengine.processors.items import MultiModalDataItems
from aioengine.processors.mm_kwargs import merge_options
from aioengine.processors.processor import (
    BaseMultiModalProcessor,
    ItemsByModality,
    Layout,
    TextOrTokens,
)
from aioengine.processors.prompt.matching import find_expanded
from aioengine.processors.prompt.updates import PromptUpdate, PromptUpdateDetails, ResolvedUpdates
from aioengine.processors.registry import MULTIMODAL_REGISTRY

__all__ = [
    "ForwardRowsModel",
    "GenericModel",
    "LayerRowsInfo",
    "LayerRowsModel",
    "MarkedInfo",
    "MarkedModel",
    "MarkedProcessor",
    "WholePromptProcessor",
]

logger = logging.getLogger(__name__)

_TOWERS = ("clip_vision_model", "siglip_vision_model")
"""Whose layers give hidden states and nothing else."""


class WholePromptProcessor(GenericMultiModalProcessor):
    """HF processors that report nothing of what an item becomes, and expand a whole prompt.

    What an item becomes may depend on what stands beside it: of Idefics2, two images side by side
    share a marker. So the HF processor itself is given each prompt's text, and the items are found
    in the tokens that it makes. How many rows an item has, and how they lie, is read from HF's call
    with the decoded item itself, before layout: a prompt in which an item does not lie as it does
    alone, or in which a placeholder is left over, is refused.

    A prompt of token ids is given to it as the text that they spell, if that is tokenised to these
    ids again; else, and where a user's text spells a placeholder, it is refused.
    """

    expands_whole = True

    @classmethod
    def chosen_for(cls, info: BaseProcessingInfo) -> type[BaseMultiModalProcessor]:
        """The class for HF processors that report, or this one."""
        reports = isinstance(info, GenericProcessingInfo) and info.reports
        return GenericMultiModalProcessor if reports else cls

    def layout(
        self,
        prompt: TextOrTokens,
        items: MultiModalDataItems,
        mm_kwargs: Mapping[str, Any],
        outputs: Mapping[str, Sequence[MultiModalKwargsItem]] | None = None,
        literals: Sequence[tuple[int, int]] = (),
    ) -> Layout:
        """Do as the base class, with the HF processor's own tokens."""
        self.info.validate_num_items(items.get_all_counts())
        updates = self._updates(items, mm_kwargs, outputs or {})
        return self._expand(self._tokens_of(prompt, mm_kwargs, updates), None, updates)

    def _apply_hf_processor_main(
        self, prompt: TextOrTokens, mm_items: MultiModalDataItems, mm_kwargs: Mapping[str, Any]
    ) -> tuple[list[int], ItemsByModality]:
        outputs = self.process(mm_items, mm_kwargs)
        updates = self._updates(mm_items, mm_kwargs, outputs)
        return self._tokens_of(prompt, mm_kwargs, updates), outputs

    def _expand(
        self,
        token_ids: list[int],
        text: str | None,
        updates: ResolvedUpdates,
        literals: Sequence[tuple[int, int]] = (),
    ) -> Layout:
        placed = find_expanded(token_ids, updates, self.info.get_tokenizer())
        if placed is None:
            raise PlaceholderMismatchError(
                f"the prompt's placeholders and its {updates.num_items} media items do not go "
                "together; give one for each, in their order",
                parameter="prompt",
                value=updates.num_items,
            )
        return Layout(token_ids=token_ids, placeholders=placed)

    def _updates_of(
        self, modality: str, texts: Sequence[str], token_ids: Sequence[list[int]]
    ) -> list[PromptUpdate]:
        target = self.info.encode(self.info.get_placeholder(modality))
        return [self._update(modality, target, token_ids, token_ids)]

    def _check_against_hf(self, modality: str) -> None:
        try:
            super()._check_against_hf(modality)
        except ModelLoadError as error:
            reason = f"{self.info.no_report()}. Nor are its tokens of a text those beside media"
            raise ModelLoadError(f"{reason}: {error}") from error

    def _sample_prompt(self, places: Sequence[str]) -> str:
        """Items apart, and side by side with text at both ends and without."""
        together = "".join(places)
        return f"{together} b {' b '.join(places)} c{together}d"

    def _tokens_of(
        self, prompt: TextOrTokens, mm_kwargs: Mapping[str, Any], updates: ResolvedUpdates
    ) -> list[int]:
        """The tokens that the HF processor makes of a prompt, whose items are expanded.

        Raises InvalidRequestError for what it does not take, and for ids that spell another text.
        """
        if isinstance(prompt, str):
            self.tokenize(prompt)  # which refuses what is no text
            return self._expanded(prompt, mm_kwargs, add_special_tokens=True)
        token_ids, tokenizer = self._checked_ids(prompt), self.info.get_tokenizer()
        # One token alone may as well be a placeholder.
        are_runs = updates.num_items and all(len(each.token_ids) > 1 for each in updates)
        if are_runs and find_expanded(token_ids, updates, tokenizer) is not None:
            return token_ids
        before = len(token_ids) - len(self._without_prefix(token_ids))
        for start in dict.fromkeys((before, 0)):
            text = tokenizer.decode(token_ids[start:], clean_up_tokenization_spaces=False)
            if self.tokenize(text, add_special_tokens=bool(start)) == token_ids:
                return self._expanded(text, mm_kwargs, add_special_tokens=bool(start))
        raise InvalidRequestError(
            "the prompt's token ids are not those of the text that they spell, and the model's HF "
            "processor expands text only; give a text prompt, without placeholders as a user's "
            "words",
            parameter="prompt",
        )

    def _without_prefix(self, token_ids: list[int]) -> list[int]:
        """The ids behind the special tokens that the tokenizer puts before every text."""
        bare, full = self.tokenize("a", add_special_tokens=False), self.tokenize("a")
        prefix = full[: -len(bare)] if full[-len(bare) :] == bare else []
        return token_ids[len(prefix) :] if token_ids[: len(prefix)] == prefix else token_ids

    def _expanded(
        self, text: str, mm_kwargs: Mapping[str, Any], *, add_special_tokens: bool
    ) -> list[int]:
        """The tokens of a text without its media, which the HF processor expands all the same."""
        own = {"text_kwargs": {"add_special_tokens": add_special_tokens}}
        options = merge_options(self.merged_kwargs(mm_kwargs), own)
        try:
            outputs = self.info.get_hf_processor()(text=text, **options, return_tensors="pt")
            return [int(each) for each in outputs["input_ids"][0]]
        # HF processors raise anything, and what they say may hold the prompt.
        except Exception as error:
            logger.warning("%s\n%s", self.info.describe_processor(), trace_of(error))
            raise InvalidRequestError(
                f"the model's HF processor does not take the prompt: {type(error).__name__}",
                parameter="prompt",
            ) from None


@MULTIMODAL_REGISTRY.register_processor(
    WholePromptProcessor, info=GenericProcessingInfo, dummy_inputs=GenericDummyInputsBuilder
)
class GenericModel(ByCache):
    """transformers' module as it is, but for layers of a vision tower that nobody reads."""

    def unread_layers(self) -> Sequence[nn.Module]:
        """Layers after the last one whose hidden states are features (`vision_feature_layer`)."""
        config = self.hf_config
        chosen = getattr(config, "vision_feature_layer", None)
        tower = getattr(getattr(self.model, "model", self.model), "vision_tower", None)
        if chosen is None or tower is None or config.vision_config.model_type not in _TOWERS:
            return ()
        layers = next(each for each in tower.modules() if isinstance(each, nn.ModuleList))
        # Hidden state 0 is what goes into the first layer.
        states = len(layers) + 1
        used = max(each % states for each in ([chosen] if isinstance(chosen, int) else chosen))
        return [*layers][used:]


@MULTIMODAL_REGISTRY.register_processor(
    WholePromptProcessor, info=GenericProcessingInfo, dummy_inputs=GenericDummyInputsBuilder
)
class ForwardRowsModel(TransformersModel):
    """Rows are what the model's own forward has in the places of an item that is alone in a prompt.

    So a prompt has media of one kind only: of Phi-4 multimodal, an image beside a clip changes what
    the clip becomes.
    """

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """See the base class."""
        if f"{modality}_embeds" in items[0]:
            return super().encode(modality, items)
        return [self._rows_of(modality, item) for item in items]

    def positions(
        self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()
    ) -> tuple[Tensor, int] | None:
        """See the base class. Raises InvalidRequestError for media of several kinds."""
        kinds = sorted({item.modality for item in items})
        if len(kinds) > 1:
            raise InvalidRequestError(
                f"a prompt has {' and '.join(kinds)}, and what the model makes of one may depend "
                "on the other; send media of one kind only",
                parameter="prompt",
            )
        return None

    def _rows_of(self, modality: str, item: Mapping[str, Tensor]) -> Tensor:
        """The embeddings of an item's tokens that are not those of their ids."""
        table = self.model.get_input_embeddings()
        ids = item[next(each.ids_name for each in CONTRACTS if each.modality == modality)]
        # A token of text before them is to have its own.
        text = next(each for each in range(1, table.weight.shape[0]) if each not in ids.tolist())
        ids = torch.cat([ids.new_tensor([text]), ids]).to(self.device)
        names = inspect.signature(self.model.forward).parameters
        features = {
            name: place(value, self.dtype, self.device)
            for name, value in batch_items([item]).items()
            if name in names
        }
        stack, *_ = re.split(r"\.\d+\.", self.specs[0].name)
        embeds = embeddings_of(self.model, self.decoder().get_submodule(stack), ids, features)
        is_own = (embeds == table(ids)).all(-1)
        if not is_own[0]:
            raise EngineError("the decoder changes embeddings before its first layer")
        return embeds[~is_own]


class LayerRowsInfo(GenericProcessingInfo):
    """Rows that are given are as wide as the encoder's."""

    def get_hidden_size(self) -> int:
        return super().get_hidden_size() * (1 + len(_row_layers(self.get_hf_config())))


@MULTIMODAL_REGISTRY.register_processor(info=LayerRowsInfo)
class LayerRowsModel(GenericModel):
    """Rows of `hidden_size` for the embeddings, which are zeros, and as many again for each chosen
    layer: they travel as further columns of one wide row."""

    @property
    def row_size(self) -> int:
        return self.hidden_size * (1 + len(_row_layers(self.hf_config)))

    def unread_layers(self) -> Sequence[nn.Module]:
        """No layer: `vision_feature_layer` is not what is read here."""
        return ()

    def call_decoder(self, decoder: nn.Module, embeds: Tensor, positions: Tensor) -> Tensor:
        """Do as the base class; embeddings as wide as rows carry those of chosen layers."""
        width = self.hidden_size
        if embeds.shape[-1] == width:
            return super().call_decoder(decoder, embeds, positions)
        first, *deeper = torch.split(embeds, width, dim=-1)
        layers: Any = decoder.layers
        with ExitStack() as hooks:
            for index, rows in zip(_row_layers(self.hf_config), deeper, strict=True):
                # With zeros where there are no rows, every position may be added to.
                add = partial(_add, rows[None])
                hooks.enter_context(layers[index].register_forward_pre_hook(add))
            return self.run_decoder(decoder, first, positions)


def _add(rows: Tensor, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, *others = args
    return hidden + rows, *others


def _row_layers(hf_config: Any) -> list[int]:
    """The decoder's layers that are given rows, in the order of the rows' columns."""
    chosen = [layer for _, layer in hf_config.deepstack_layer_map]
    return sorted({*chosen, *hf_config.spatial_target_layers})


class MarkedInfo(GenericProcessingInfo):
    """Every token of a replacement takes a row."""

    def count_rows(self, modality: str, token_ids: Sequence[int]) -> int:
        return len(token_ids)


class MarkedProcessor(GenericMultiModalProcessor):
    """Each placeholder becomes an item's markers and rows, all of which are the item's."""

    info: MarkedInfo

    def _details(self, modality: str, full: str | list[int], ids: list[int]) -> PromptUpdateDetails:
        return PromptUpdateDetails(full=full, features=ids)

    def _text_around_rows(self, modality: str, num_rows: int) -> str:
        raise UnsupportedModalityError(
            f"the model takes no {modality} embeddings: its markers between rows have some of "
            "their own",
            parameter=f"{modality}s",
        )


@MULTIMODAL_REGISTRY.register_processor(MarkedProcessor, info=MarkedInfo)
class MarkedModel(GenericModel):
    """Markers have the last rows of a table of visual embeddings, and not those of their ids.

    They are rows of the item's, so that its key stands for them in caches too. Elsewhere in a
    prompt they would have these embeddings where it has an image, and others where it has none.
    """

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """See the base class. Raises ValueError where rows and their places are not as many."""
        name = next(each.ids_name for each in CONTRACTS if each.modality == modality)
        found = super().encode(modality, items)
        return [self._mark(item[name], rows) for item, rows in zip(items, found, strict=True)]

    def positions(
        self, token_ids: Sequence[int], items: Sequence[PromptMedia] = ()
    ) -> tuple[Tensor, int] | None:
        """See the base class. Raises InvalidRequestError for markers outside of items."""
        inside = {i for item in items for i in range(item.span.offset, item.span.end)}
        marks = set(self._markers) if items else set()
        if any(each in marks and i not in inside for i, each in enumerate(token_ids)):
            raise InvalidRequestError(
                "a marker of images stands in the prompt outside of them; leave it to the image's "
                "placeholder, or send a prompt without images",
                parameter="prompt",
            )
        return None

    @property
    def _markers(self) -> Sequence[int]:
        """The ids of markers, in the order of their embeddings."""
        found: Sequence[int] = self.hf_config.visual_indicator_token_ids
        return found

    def _mark(self, token_ids: Tensor, rows: Tensor) -> Tensor:
        """Put `rows` and the markers' embeddings at `token_ids` [L], which came with the item."""
        of = {marker: index for index, marker in enumerate(self._markers)}
        table = self.model.model.visual_embeddings_table.weight[-len(of) :]
        ids = token_ids.tolist()
        if sum(each not in of for each in ids) != len(rows):
            raise ValueError(f"{len(rows)} rows for a replacement of {len(ids)} tokens")
        rest = iter(range(len(of), len(of) + len(rows)))
        places = [of[each] if each in of else next(rest) for each in ids]
        return torch.cat([table.to(rows), rows])[torch.tensor(places, device=rows.device)]
