"""Prompt updates by way of the text, where token ids alone do not show what happens.

A text target may merge with its neighbours under the tokenizer ("a<pic>" may be the tokens "a<",
"pic", ">"), and so may the ends of a text that is put in (an empty line, after a line that ends).
HF processors expand the text and tokenise the whole of it; so does this, and reads from the
tokenizer's offsets where each item came to lie. It never guesses: where the text does not stand for
exactly the prompt's tokens, or the offsets do not show an item's own tokens, it declines.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from typing import Any

from aioengine.processors.inputs import PlaceholderRange
from aioengine.processors.prompt.matching import Matcher, Place, Ranges
from aioengine.processors.prompt.updates import PromptIndexTarget, PromptSequence, ResolvedUpdates

__all__ = ["apply_text_updates"]


def apply_text_updates(
    prompt: Sequence[int], text: str | None, updates: ResolvedUpdates, tokenizer: Any
) -> tuple[list[int], Ranges] | None:
    """The prompt with every item's tokens in it, and modality -> ranges in item order, or None.

    `text`: what `prompt` was tokenised from, with the tokenizer's special tokens; None: the prompt
    came as token ids, which must be what their own text is tokenised to. `tokenizer`: a fast one of
    transformers.
    """
    if any(isinstance(update.target, PromptIndexTarget) for update in updates):
        return None  # a place among tokens, which the text does not show
    adds_special = text is not None
    if text is None:
        text = _decode(tokenizer, prompt)
    if _encode(tokenizer, text, adds_special)[0] != list(prompt):
        return None
    found = _expand(text, updates, tokenizer)
    if found is None:
        return None
    expanded, puts = found
    token_ids, offsets = _encode(tokenizer, expanded, adds_special)
    ranges: Ranges = {modality: [] for modality, items in updates.items.items() if items}
    for put in puts:
        placed = _locate(put, token_ids, offsets)
        if placed is None:
            return None
        ranges[put.modality].append(placed)
    return token_ids, ranges


def _encode(
    tokenizer: Any, text: str, adds_special: bool
) -> tuple[list[int], list[tuple[int, int]]]:
    encoding = tokenizer(
        text, add_special_tokens=adds_special, return_offsets_mapping=True, verbose=False
    )
    offsets = list(encoding["offset_mapping"])
    while offsets and offsets[-1] == (0, 0):
        offsets.pop()  # of a token that is put behind every text: the others ascend
    return list(encoding["input_ids"]), offsets


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))


def _expand(text: str, updates: ResolvedUpdates, tokenizer: Any) -> tuple[str, list[Place]] | None:
    """The text with all contents in it, and their places there.

    None where an item finds no place, or a place no item.
    """

    def spell(target: PromptSequence) -> str:
        return target if isinstance(target, str) else _decode(tokenizer, target)

    matcher = Matcher(text, spell)
    places = matcher.places(updates)
    targets = chain.from_iterable(updates.replaced.values())
    if len(places) < updates.num_items or matcher.count(targets, places[-1].stop if places else 0):
        return None
    cursor, pieces, length = 0, [], 0
    puts: list[Place] = []
    for place in places:
        inserted = place.update.text
        if inserted is None:
            inserted = _decode(tokenizer, place.update.token_ids)
        pieces += [text[cursor : place.point], inserted]
        start = length + place.point - cursor
        length = start + len(inserted)
        puts.append(replace(place, start=start, stop=length))
        cursor = place.stop
    return "".join([*pieces, text[cursor:]]), puts


def _locate(
    put: Place, token_ids: Sequence[int], offsets: Sequence[tuple[int, int]]
) -> PlaceholderRange | None:
    """Find where the item's own tokens lie, among those that its characters became."""
    content = put.update
    features = content.token_ids[content.start : content.stop]
    # Tokens that end behind the item's start, and begin before its end.
    first = bisect_right(offsets, put.start, key=itemgetter(1))
    last = bisect_left(offsets, put.stop, key=itemgetter(0)) - len(features)
    if last < first:
        return None
    # What stands before the features may have merged with the text before it, or not.
    around = [first + content.start, *range(first, last + 1)]
    for offset in around:
        if list(token_ids[offset : offset + len(features)]) == features:
            return content.placeholder(offset - content.start)
    return None
