"""The prompts of a trial: short, unequal, and with a media span for each modality a model takes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from aioengine.errors import InvalidRequestError
from aioengine.models.runtime.interfaces import PromptMedia
from aioengine.models.runtime.whole_pass import WholePrompt
from aioengine.processors.encdec import EncDecMultiModalProcessor, Halves
from aioengine.processors.items import PROCESSOR_ITEMS, MultiModalDataItems, noise_item
from aioengine.processors.processor import BaseMultiModalProcessor

__all__ = ["LONG", "UNEQUAL", "TrialPrompt", "make_prompts", "shortened"]

LENGTHS = (19, 11, 15)
"""Text tokens of the first prompt, the second, and the others."""
LONG = 96
"""Tokens, or encoder rows, from which on a prompt is computed by a few layers of each kind."""
UNEQUAL = 3
"""By how much the second prompt is shorter, where only one could be made."""
LEAST_TEXT = 2
"""Tokens behind a media span: one that a chunk ends with, and one for the decode step."""


@dataclass(frozen=True, slots=True, eq=False)
class TrialPrompt:
    """One prompt of the trial; its last token is computed by the decode step."""

    whole: WholePrompt
    what: str
    num_encoder_rows: int = 0
    modality: str = "text"

    @property
    def is_long(self) -> bool:
        """Return whether all layers would take too long: a start has other things to do."""
        return max(len(self.whole.token_ids), self.num_encoder_rows) > LONG


def make_prompts(
    processor: BaseMultiModalProcessor, vocab_size: int, max_len: int | None, seed: int
) -> tuple[list[TrialPrompt], list[str]]:
    """Prompts for a model with this processor, and what of it they do not show.

    `vocab_size`: rows of the smaller of head and embedding table; `max_len`: tokens of the longest
    sequence, None for any.
    """
    chance = random.Random(seed)
    ids = _plain_ids(processor, vocab_size)
    unseen: list[str] = []
    prompts: list[TrialPrompt] = []
    limits = processor.info.get_allowed_mm_limits()
    for modality in (name for name, limit in limits.items() if limit != 0):
        tokens = tuple(chance.choices(ids, k=_length(prompts)))
        try:
            prompts.append(_media_prompt(processor, modality, tokens))
        except Exception as error:
            unseen.append(f"{modality} ({type(error).__name__}: {error!s:.120})")
    num_short = sum(not prompt.is_long for prompt in prompts)
    for _ in range(num_short, 2):
        tokens = tuple(chance.choices(ids, k=_length(prompts)))
        try:
            prompts.append(_text_prompt(processor, tokens))
        except InvalidRequestError:
            break  # a model that takes no text alone
    if len(prompts) == 1:
        prompts.append(shortened(prompts[0], len(prompts[0].whole.token_ids) - UNEQUAL))
    fit = [_fitted(prompt, max_len) for prompt in prompts]
    unseen += [
        f"{prompt.what} (longer than max_model_len)"
        for prompt, fitted in zip(prompts, fit, strict=True)
        if fitted is None
    ]
    return [prompt for prompt in fit if prompt is not None], unseen


def _length(prompts: Sequence[TrialPrompt]) -> int:
    """Text tokens of the prompt after these."""
    return LENGTHS[min(len(prompts), len(LENGTHS) - 1)]


def _plain_ids(processor: BaseMultiModalProcessor, vocab_size: int) -> Sequence[int]:
    """Token ids that mean nothing special."""
    tokenizer = processor.info.get_tokenizer()
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    special |= set(_named_ids(processor.info.get_hf_config().to_dict()))
    known = range(min(vocab_size, len(tokenizer)))
    return [token_id for token_id in known if token_id not in special] or list(known)


def _named_ids(settings: Mapping[str, Any]) -> Iterator[int]:
    """The token ids that a config names."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _named_ids(value)
        elif str(name).endswith(("token_id", "token_ids", "token_index")):
            values = value if isinstance(value, list | tuple) else [value]
            yield from (each for each in values if isinstance(each, int))


def _text_prompt(processor: BaseMultiModalProcessor, tokens: tuple[int, ...]) -> TrialPrompt:
    if not isinstance(processor, EncDecMultiModalProcessor):
        return TrialPrompt(WholePrompt(token_ids=(*processor.tokenize(""), *tokens)), "text")
    halves = processor.layout_halves(Halves(encoder=tokens), MultiModalDataItems({}), {})
    encoder = {"input_ids": torch.tensor(halves.token_ids)}
    whole = WholePrompt(token_ids=(*halves.decoder_token_ids, *tokens), encoder=encoder)
    return TrialPrompt(whole, "text", len(halves.token_ids))


def _media_prompt(
    processor: BaseMultiModalProcessor, modality: str, tokens: tuple[int, ...]
) -> TrialPrompt:
    rate = processor.info.get_sample_rate() if modality == "audio" else 0
    item = noise_item(modality, sample_rate=rate)
    items = MultiModalDataItems({modality: PROCESSOR_ITEMS[modality]([item])})
    outputs = processor.process(items, processor.options_for({}, {modality: 1}))
    if isinstance(processor, EncDecMultiModalProcessor):
        halves = processor.layout_halves(Halves(), items, {}, outputs)
        (item,) = outputs[modality]
        encoder = {"input_ids": torch.tensor(halves.token_ids), **item}
        whole = WholePrompt(token_ids=(*halves.decoder_token_ids, *tokens), encoder=encoder)
        return TrialPrompt(whole, modality, len(halves.token_ids), modality)
    text = processor.dummy_inputs.get_dummy_text({modality: 1})
    layout = processor.layout(text, items, {}, outputs)
    (placed,) = layout.placeholders[modality]
    media = PromptMedia(modality, placed.to_span(), outputs[modality][0])
    tokens = tokens[: placed.num_answer_rows or None]
    whole = WholePrompt(token_ids=(*layout.token_ids, *tokens), items=(media,))
    return TrialPrompt(whole, modality, modality=modality)


def _fitted(prompt: TrialPrompt, max_len: int | None) -> TrialPrompt | None:
    """The prompt with as much of its text as there is room for; None where that is none."""
    length = len(prompt.whole.token_ids)
    if max_len is None or length <= max_len:
        return prompt
    ends = [item.span.end for item in prompt.whole.items]
    least = max((end for end in ends if end <= length), default=0) + LEAST_TEXT
    return shortened(prompt, max_len) if max_len >= least else None


def shortened(prompt: TrialPrompt, length: int) -> TrialPrompt:
    """The prompt's first `length` tokens, with its media."""
    token_ids = prompt.whole.token_ids[:length]
    return replace(prompt, whole=replace(prompt.whole, token_ids=token_ids))
