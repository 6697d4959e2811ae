"""Any HF processor that says itself what each media item becomes in the text.

Such a processor has `_process_images` (`_process_videos`, `_process_audio`), which returns the
encoder's inputs and, for each item, the text that stands in place of its placeholder. Here it is
called for one item at a time, without a prompt: an item's tensors and its text depend on nothing
but the item, so that both can be cached and shared. The text travels with the item, in tensors for
the host only, and the prompt is expanded from it.

What an HF processor does to the prompt beside its placeholders (a separator at the end, say) is not
reported, and not guessed: when the first processor of a model is made, HF's own `__call__` runs
beside it on small media, and a model whose tokens differ is refused. Its family says the rest in
`_apply_hf_processor_tokens_only`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from itertools import product
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

from aioengine.errors import ModelLoadError, UnsupportedModalityError
from aioengine.processors.embeddings import EmbeddingItems
from aioengine.processors.generic_info import (
    CONTRACTS,
    GenericDummyInputsBuilder,
    GenericProcessingInfo,
    notes_of,
)
from aioengine.processors.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargs,
    MultiModalKwargsItem,
)
from aioengine.processors.items import PROCESSOR_ITEMS, MultiModalDataItems
from aioengine.processors.media.resize import resize_ahead
from aioengine.processors.mm_kwargs import merge_for_hf
from aioengine.processors.processor import BaseMultiModalProcessor, ItemsByModality
from aioengine.processors.prompt.updates import (
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
    ResolvedUpdates,
)

__all__ = ["GenericDummyInputsBuilder", "GenericMultiModalProcessor", "GenericProcessingInfo"]

_BY_TOKEN = {"input_ids", "attention_mask", "labels", "mm_token_type_ids", "token_type_ids"}
"""What HF processors make for each token and models here know by themselves, or need not."""


_Both: TypeAlias = tuple[list[int], list[int], MultiModalKwargsItem, Mapping[str, Any]]


class GenericMultiModalProcessor(BaseMultiModalProcessor):
    """Each placeholder becomes what the HF processor says for its item.

    An item has HF's tensors under HF's names, all `flat` along dim 0, so that a batch of items is
    as HF's own batch, without the padding of one item to another's size; and its replacement, for
    the host only. Raises ModelLoadError where HF's own tokens are others: see the module.
    """

    layout_needs_hf_outputs = True
    known_by_token: AbstractSet[str] = frozenset()
    """More of what HF processors make for each token, which the family's model knows by itself."""
    expands_whole: ClassVar[bool] = False
    """Whether HF processors that report nothing can be served."""

    info: GenericProcessingInfo
    dummy_inputs: GenericDummyInputsBuilder

    def __init__(
        self, info: GenericProcessingInfo, dummy_inputs: GenericDummyInputsBuilder
    ) -> None:
        if not (info.reports or self.expands_whole):
            raise info.no_report()
        super().__init__(info, dummy_inputs)
        self._added = dict(info.get_tokenizer().added_tokens_decoder)
        self._fixed: dict[int, bool] = {}
        text_options = merge_for_hf(info.get_hf_processor(), {})["text_kwargs"]
        self.adds_special_tokens = text_options.get("add_special_tokens", True)
        self.text_prefix = _prefix_of(info.get_hf_processor())
        notes = notes_of(info.ctx)
        if ("checked", type(self)) not in notes:
            for modality in info.contracts:
                self._check_against_hf(modality)
            notes["checked", type(self)] = True

    def _process_part(
        self, items: MultiModalDataItems, mm_kwargs: Mapping[str, Any]
    ) -> ItemsByModality:
        # Each decoded item for itself.
        self.info.validate_num_items(dict.fromkeys(items.keys() - self.info.contracts, 1))
        merged = self.merged_kwargs(mm_kwargs)
        processed: ItemsByModality = {}
        for modality, group in items.items():
            if isinstance(group, EmbeddingItems):
                processed[modality] = group.to_kwargs_items()
                continue
            keyword = self.info.contracts[modality].keyword
            each = [
                self._process_media({keyword: [item]}, {modality: 1}, merged)
                for item in group.get_all()
            ]
            processed[modality] = [one[modality][0] for one in each]
        return processed

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        """One item's tensors. `mm_data` has one keyword and one decoded item; no prompt is used."""
        ((keyword, _),) = mm_data.items()
        contract = next(each for each in CONTRACTS if each.keyword == keyword)
        processor = self.info.get_hf_processor()
        ready: Any = resize_ahead(processor, mm_data, mm_kwargs, self._preprocess_resizes_first)
        outputs, text = self.info.process_item(contract.modality, ready[keyword][0], mm_kwargs)
        token_ids = self.info.encode(text)
        if not token_ids:
            raise ValueError("the replacement is empty")
        unused = {*processor.unused_input_names, *processor.skip_tensor_conversion}
        unused |= notes_of(self.info.ctx).get(("unused", contract.modality), set())
        tensors = {
            name: _as_tensor(value)
            for name, value in outputs.items()
            if name not in unused and value is not None
        }
        tensors[contract.ids_name] = torch.tensor(token_ids)
        tensors[contract.text_name] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return {name: data if data.dim() else data[None] for name, data in tensors.items()}

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        contract = next(each for each in CONTRACTS if each.ids_name in hf_inputs)
        host_only = (contract.ids_name, contract.text_name)
        return {
            name: MultiModalFieldConfig.flat_from_sizes(
                contract.modality, [len(data)], keep_on_cpu=name in host_only or _is_small(data)
            )
            for name, data in hf_inputs.items()
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargs,
    ) -> Sequence[PromptUpdate]:
        updates = []
        for modality, contract in self.info.contracts.items():
            group, count = mm_items.get(modality), mm_items.get_count(modality)
            if isinstance(group, EmbeddingItems):
                sizes = [group.get_feature_size(index) for index in range(count)]
                alone = [self._text_around_rows(modality, size) for size in sizes]
            else:
                items = [out_mm_kwargs.get_item(modality, index) for index in range(count)]
                alone = [bytes(item[contract.text_name].numpy()).decode() for item in items]
            texts = self.info.number(modality, alone, hf_processor_mm_kwargs)
            if texts != alone or isinstance(group, EmbeddingItems):
                token_ids = [self.info.encode(text) for text in texts]
            else:
                token_ids = [item[contract.ids_name].tolist() for item in items]
            updates += self._updates_of(modality, texts, token_ids)
        return updates

    def _updates_of(
        self, modality: str, texts: Sequence[str], token_ids: Sequence[list[int]]
    ) -> list[PromptUpdate]:
        """A modality's updates, from the text and the token ids of each item's replacement."""
        token = self.info.get_placeholder(modality)
        target = self.info.encode(token)
        if all(self._is_fixed(ids[0]) and self._is_fixed(ids[-1]) for ids in (target, *token_ids)):
            return [self._update(modality, target, token_ids, token_ids)]
        # In a prompt that HF has expanded, what lies between fixed tokens is sure to be there.
        cores = [self._core(modality, ids) for ids in token_ids]
        return [
            self._update(modality, token, texts, token_ids),
            self._update(modality, token, cores, cores),
        ]

    def _update(
        self,
        modality: str,
        target: str | list[int],
        contents: Sequence[str | list[int]],
        token_ids: Sequence[list[int]],
    ) -> PromptUpdate:
        details = [
            self._details(modality, full, ids)
            for full, ids in zip(contents, token_ids, strict=True)
        ]
        return PromptReplacement(
            modality=modality, target=target, replacement=lambda item_idx: details[item_idx]
        )

    def _core(self, modality: str, ids: list[int]) -> list[int]:
        """A replacement without what stands before its first and behind its last fixed token."""
        embed_id = self.info.get_embed_token_id(modality, ids)
        places = [i for i, each in enumerate(ids) if each == embed_id or self._is_fixed(each)]
        return ids[places[0] : places[-1] + 1]

    def _is_fixed(self, token_id: int) -> bool:
        """Return whether the tokenizer makes this token of its text, whatever stands beside it.

        So it does of added tokens, if they take no spaces from beside them, and unless another one
        may begin or end within them, as with runs of line ends.
        """
        if token_id not in self._fixed:
            token = self._added.get(token_id)
            self._fixed[token_id] = token is not None and not (
                token.lstrip
                or token.rstrip
                or any(_overlap(token.content, other.content) for other in self._added.values())
            )
        return self._fixed[token_id]

    def _has_open_ends(self, updates: ResolvedUpdates) -> bool:
        # `_updates_of` has looked: only what is open has text for a target.
        return any(isinstance(update.target, str) for update in updates)

    def _details(self, modality: str, full: str | list[int], ids: list[int]) -> PromptUpdateDetails:
        embed_id = self.info.get_embed_token_id(modality, ids)
        features = ids[ids.index(embed_id) : len(ids) - ids[::-1].index(embed_id)]
        if features.count(embed_id) == len(features):
            return PromptUpdateDetails(full=full, features=features)
        return PromptUpdateDetails.select_token_id(full, embed_id, features=features)

    def _text_around_rows(self, modality: str, num_rows: int) -> str:
        """Return what rows computed elsewhere become in the text: one run, in its markers.

        Raises UnsupportedModalityError where rows lie in several runs: their number does not tell
        them.
        """
        notes = notes_of(self.info.ctx)
        if ("text", modality) not in notes:
            item = self.dummy_inputs.get_small_item(modality)
            options = self.info.ctx.mm_processor_kwargs
            notes["text", modality] = self.info.process_item(modality, item, options)[1]
        text: str = notes["text", modality]
        embed_id = self.info.get_embed_token_id(modality, self.info.encode(text))
        token = str(self.info.get_tokenizer().convert_ids_to_tokens(embed_id))
        before, *between, after = text.split(token) if token in text else ("", token, "")
        if any(between):
            raise UnsupportedModalityError(
                f"the model takes no {modality} embeddings: how rows and other tokens alternate "
                f"depends on the {modality}",
                parameter=f"{modality}s",
            )
        return before + token * num_rows + after

    def _check_against_hf(self, modality: str) -> None:
        """Small items through HF's whole processor and through this one: the same tokens.

        Notes what HF's own call shows of the modality: that it takes one item only, and which
        counts it keeps back, as they served to write the text and no model takes them.
        """
        notes, name = notes_of(self.info.ctx), self.info.describe_processor()
        # HF processors raise anything, and whatever it is, the model cannot be served like this.
        try:
            with self.own_media():
                mine, theirs, item, outputs = self._try_both(modality)
        except Exception as error:
            cause = error.__cause__ or error
            raise ModelLoadError(
                f"{name} failed on a small {modality}: {type(cause).__name__}"
            ) from cause
        ids = np.asarray(outputs["input_ids"])
        others = [
            each
            for each in outputs.keys() - item.keys() - _BY_TOKEN - self.known_by_token
            if np.shape(outputs[each]) == ids.shape
        ]
        if others:
            raise ModelLoadError(
                f"{name} gives the model {' and '.join(sorted(others))} for each token of a prompt "
                "beside its id, which the engine does not hand on. Run this model with transformers"
            )
        notes["unused", modality] = {
            each for each in item.keys() - outputs.keys() if item.keep_on_cpu(each)
        }
        if mine != theirs:
            raise ModelLoadError(
                f"{name} does more to a prompt with {modality} items than to expand their "
                "placeholders. Such a model needs a file of its own in models/, with a "
                f"{type(self).__name__} whose `_apply_hf_processor_tokens_only` or "
                "`_get_prompt_updates` does the same"
            )

    def _sample_prompt(self, places: Sequence[str]) -> str:
        """A prompt to compare, with an item's placeholder in each of these places."""
        return " b ".join(["", *places, "c"])

    def _try_both(self, modality: str) -> _Both:
        """Do as `_run_both` with two items; else with one, which is noted; or with the markers that
        the HF processor names, if it wants an item between these."""
        processor, around = self.info.get_hf_processor(), [("", "")]
        start, end = (getattr(processor, f"{modality}_{n}_token", None) for n in ("start", "end"))
        if isinstance(start, str) and isinstance(end, str):
            around.append((start, end))
        *others, last = product(around, (2, 1))
        for markers, count in others:
            with suppress(Exception):
                return self._run_both(modality, count, markers)
        markers, count = last
        return self._run_both(modality, count, markers)

    def _run_both(self, modality: str, count: int, around: tuple[str, str]) -> _Both:
        """The token ids of a prompt with so many small items, ours and HF's; an item; HF's outputs.

        Raises whatever the HF processor raises.
        """
        contract, processor = self.info.contracts[modality], self.info.get_hf_processor()
        placeholder = self.info.get_placeholder(modality)
        prompt = self._sample_prompt([placeholder.join(around)] * count)
        items = [self.dummy_inputs.get_small_item(modality)] * prompt.count(placeholder)
        contents, known = self.info.unwrap(modality, items)
        options = copy.deepcopy(self.merged_kwargs({contract.scope: known}))
        outputs = processor(
            text=prompt, **{contract.keyword: contents}, **options, return_tensors="pt"
        )
        group = MultiModalDataItems({modality: PROCESSOR_ITEMS[modality](items)})
        token_ids, processed = self._apply_hf_processor_main(prompt, group, {})
        updates = self._updates(group, {}, processed)
        layout = self._expand(token_ids, prompt, updates)
        if count == 1:
            notes_of(self.info.ctx)["limit", modality] = 1
        theirs = np.asarray(outputs["input_ids"]).reshape(-1).tolist()
        return layout.token_ids, theirs, processed[modality][0], outputs


def _prefix_of(processor: Any) -> str:
    """The text that an HF processor writes before every prompt, with media or without."""
    with suppress(Exception):  # it takes no text without media, or says it in another way
        _, (text,), *_ = processor.prepare_inputs_layout(images=None, text=["a"])
        if isinstance(text, str) and text.endswith("a"):
            return text[:-1]
    return ""


def _overlap(token: str, other: str) -> bool:
    """Return whether `other` may reach into `token` from outside, at its start or at its end."""
    if token[0] not in other[1:] and token[-1] not in other[:-1]:
        return False  # nearly always, and there may be thousands
    for cut in range(1, len(other)):
        head, tail = other[:cut], other[cut:]
        if tail.startswith(token) or token.startswith(tail):
            return True
        if head.endswith(token) or token.endswith(head):
            return True
    return False


def _as_tensor(value: Any) -> torch.Tensor:
    """A tensor, array or number, or nested lists of them; raises where those are ragged."""
    if not isinstance(value, list | tuple):
        return torch.as_tensor(value)
    if all(isinstance(each, int | float) for each in value):
        return torch.tensor(value)
    return torch.stack([_as_tensor(each) for each in value])


def _is_small(data: torch.Tensor) -> bool:
    """Return whether these are counts, sizes or grids, which the host reads."""
    is_grid = not data.is_floating_point() and data.ndim <= 2 and data.shape[-1] <= 4
    return is_grid or data.numel() <= 4
