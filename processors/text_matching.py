"""Prompt updates by way of the text, where token ids alone do not show what happens.

A text target may merge with its neighbours under the tokenizer ("a<pic>" may be the tokens "a<",
"pic", ">"), and so may the ends of a text that is put in (an empty line, after a line that ends).
HF processors expand the text and tokenise the whole of it; so does this, and reads from the
tokenizer's offsets where each item came to lie. It never guesses: where the text does not stand for
exactly the prompt's tokens, or the offsets do not show an item's own tokens, it declines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aioengine.processors.inputs import PlaceholderRange
from aioengine.processors.updates import (
    PromptIndexTarget,
    PromptUpdate,
    ResolvedContent,
    resolve_contents,
)

__all__ = ["apply_text_updates"]

Expanded = tuple[list[int], dict[str, list[PlaceholderRange]]]


@dataclass(frozen=True)
class _Place:
    """Characters [start, stop) of the prompt that an item's update matched."""

    start: int
    stop: int
    update: PromptUpdate

    @property
    def point(self) -> int:
        return self.stop if self.update.keeps_target else self.start


@dataclass(frozen=True)
class _Put:
    """An item's content at a place in the expanded text."""

    modality: str
    content: ResolvedContent
    start: int
    stop: int


def apply_text_updates(
    prompt: Sequence[int],
    text: str | None,
    updates: Sequence[PromptUpdate],
    counts: Mapping[str, int],
    tokenizer: Any,
) -> Expanded | None:
    """The prompt with every item's tokens in it, and modality -> ranges in item order, or None.

    `text`: what `prompt` was tokenised from, with the tokenizer's special tokens; None: the prompt
    came as token ids, which must be what their own text is tokenised to. `tokenizer`: a fast one of
    transformers.
    """
    adds_special = text is not None
    if text is None:
        text = tokenizer.decode(list(prompt), clean_up_tokenization_spaces=False)
    if _encode(tokenizer, text, adds_special)[0] != list(prompt):
        return None
    contents = resolve_contents(updates, counts, tokenizer)
    found = _expand(text, updates, counts, contents, tokenizer)
    if found is None:
        return None
    expanded, puts = found
    token_ids, offsets = _encode(tokenizer, expanded, adds_special)
    ranges: dict[str, list[PlaceholderRange]] = {modality: [] for modality in counts}
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
    return list(encoding["input_ids"]), list(encoding["offset_mapping"])


def _expand(
    text: str,
    updates: Sequence[PromptUpdate],
    counts: Mapping[str, int],
    contents: Mapping[str, list[list[ResolvedContent]]],
    tokenizer: Any,
) -> tuple[str, list[_Put]] | None:
    """The text with all contents in it; None where an item finds no place, or a place no item."""
    by_modality: dict[str, list[PromptUpdate]] = {}
    for update in updates:
        by_modality.setdefault(update.modality, []).append(update)
    done = dict.fromkeys(counts, 0)
    cursor, floor, pieces, length = 0, 0, [], 0
    puts: list[_Put] = []
    while True:
        places = [
            place
            for modality, alternatives in by_modality.items()
            if done.get(modality, 0) < counts.get(modality, 0)
            and (place := _find(text, alternatives, done[modality], cursor, floor, tokenizer))
        ]
        if not places:
            break
        place = min(places, key=lambda place: place.point)
        modality = place.update.modality
        index = done[modality]
        content = contents[modality][index][by_modality[modality].index(place.update)]
        inserted = content.text
        if inserted is None:
            inserted = tokenizer.decode(content.token_ids, clean_up_tokenization_spaces=False)
        pieces += [text[cursor : place.point], inserted]
        start = length + place.point - cursor
        length = start + len(inserted)
        puts.append(_Put(modality, content, start, length))
        done[modality], cursor = index + 1, place.stop
        if not place.update.keeps_target:
            floor = place.stop
    is_complete = all(done[modality] == count for modality, count in counts.items())
    if not is_complete or _has_spare(text[cursor:], updates, tokenizer):
        return None
    return "".join([*pieces, text[cursor:]]), puts


def _find(
    text: str,
    alternatives: Sequence[PromptUpdate],
    index: int,
    cursor: int,
    floor: int,
    tokenizer: Any,
) -> _Place | None:
    for update in alternatives:
        wanted = _target_text(update, index, tokenizer)
        if wanted is None:
            continue
        begin = max(floor, cursor - len(wanted)) if update.keeps_target else cursor
        start = text.find(wanted, begin)
        if start >= 0:
            return _Place(start, start + len(wanted), update)
    return None


def _target_text(update: PromptUpdate, index: int, tokenizer: Any) -> str | None:
    target = update.target
    if callable(target):
        target = target(index)
    if isinstance(target, PromptIndexTarget):
        return None  # a place among tokens, which the text does not show
    if isinstance(target, str):
        return target or None
    return str(tokenizer.decode(list(target), clean_up_tokenization_spaces=False)) or None


def _has_spare(rest: str, updates: Sequence[PromptUpdate], tokenizer: Any) -> bool:
    """Whether a placeholder is left that no item took."""
    fixed = [u for u in updates if not callable(u.target) and not u.keeps_target]
    wanted = [_target_text(update, 0, tokenizer) for update in fixed]
    return any(target is not None and target in rest for target in wanted)


def _locate(
    put: _Put, token_ids: Sequence[int], offsets: Sequence[tuple[int, int]]
) -> PlaceholderRange | None:
    """Where the item's own tokens lie, among those that its characters became."""
    content = put.content
    features = content.token_ids[content.start : content.stop]
    inside = [i for i, (a, b) in enumerate(offsets) if a < put.stop and b > put.start]
    if not inside:
        return None
    first, last = inside[0], inside[-1] + 1 - len(features)
    # What stands before the features may have merged with the text before it, or not.
    around = [first + content.start, *range(first, last + 1)]
    for offset in around:
        if list(token_ids[offset : offset + len(features)]) == features:
            return PlaceholderRange(offset, len(features), content.is_embed)
    return None
