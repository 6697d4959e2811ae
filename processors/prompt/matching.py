"""Putting the placeholder tokens of every media item into a prompt of token ids.

Each item's content goes where its update says, leftmost first; a prompt that an HF processor has
expanded already is known by the contents that are there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from aioengine.errors import PlaceholderMismatchError
from aioengine.processors.inputs import PlaceholderRange
from aioengine.processors.prompt.updates import (
    PromptIndexTarget,
    PromptSequence,
    ResolvedUpdate,
    ResolvedUpdates,
    TextEncoder,
    as_string,
    to_token_ids,
)

__all__ = ["Matcher", "Place", "Ranges", "apply_updates", "find_expanded", "has_open_ends"]

Ranges: TypeAlias = dict[str, list[PlaceholderRange]]


@dataclass(frozen=True)
class Place:
    """Match of an item's place: the prompt's [start, stop) matched its update's target."""

    modality: str
    update: ResolvedUpdate
    start: int
    stop: int

    @property
    def point(self) -> int:
        """Place where the output changes."""
        return self.stop if self.update.keeps_target else self.start


class Matcher:
    """A prompt as a string, a character for each token or its own text, and targets in it.

    `spell` writes a target in the same way, "" if that cannot be. In `literals`, ranges in their
    order, nothing is a placeholder.
    """

    def __init__(
        self,
        prompt: str,
        spell: Callable[[PromptSequence], str],
        literals: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._prompt = prompt
        self._spell = spell
        self._literals = literals
        self._literal_ends = [stop for _, stop in literals]

    def places(self, updates: ResolvedUpdates) -> list[Place]:
        """Find where items go, leftmost first and without overlap, each modality's in their order.

        Of an item's alternatives the first that matches anywhere counts; of modalities that match
        at the same point, the earlier one. Ends with the first item that finds no place.
        """
        done = dict.fromkeys(updates.items, 0)
        # What is before the cursor has been copied; before the floor, replaced: out of reach.
        cursor = floor = 0
        places: list[Place] = []
        found: dict[str, Place | None] = {}
        while True:
            for modality, items in updates.items.items():
                known = found.get(modality)
                if done[modality] == len(items):
                    found[modality] = None
                elif modality not in found or (known and known.start < cursor):
                    item = items[done[modality]]
                    found[modality] = self._first(modality, item, cursor, floor)
            in_order = [place for modality in updates.items if (place := found[modality])]
            place = min(in_order, key=lambda place: place.point, default=None)
            if place is None:
                return places
            places.append(place)
            del found[place.modality]
            done[place.modality] += 1
            cursor = place.stop
            if not place.update.keeps_target:
                floor = place.stop

    def count(self, targets: Iterable[PromptSequence], start: int) -> int:
        """Return how many of the targets there are from `start` on."""
        positions: set[int] = set()
        for target in targets:
            wanted, position = self._spell(target), start
            while (position := self._position(wanted, position)) >= 0:
                positions.add(position)
                position += len(wanted)
        return len(positions)

    def _first(
        self, modality: str, alternatives: Iterable[ResolvedUpdate], cursor: int, floor: int
    ) -> Place | None:
        for update in alternatives:
            if isinstance(update.target, PromptIndexTarget):
                place = Place(modality, update, *self._find_index(update.target))
                if floor <= place.start and cursor <= place.point:
                    return place
                continue
            wanted = self._spell(update.target)
            # An insertion's target may have been copied already, by another insertion there.
            begin = max(floor, cursor - len(wanted)) if update.keeps_target else cursor
            start = self._position(wanted, begin)
            if start >= 0:
                return Place(modality, update, start, start + len(wanted))
        return None

    def _find_index(self, target: PromptIndexTarget) -> tuple[int, int]:
        """Start and stop; before everything, if there is no match."""
        if target.kind == "end":
            return len(self._prompt), len(self._prompt)
        prefix = self._spell(target.prefix) if target.kind == "prefix" else ""
        return (0, len(prefix)) if self._prompt.startswith(prefix) else (-1, -1)

    def _position(self, wanted: str, start: int) -> int:
        """Find where `wanted` lies from `start` on, outside of literals, or -1."""
        while wanted and (start := self._prompt.find(wanted, start)) >= 0:
            index = bisect_right(self._literal_ends, start)
            if index == len(self._literals) or self._literals[index][0] >= start + len(wanted):
                return start
            start = self._literal_ends[index]
        return -1


def apply_updates(
    prompt: Sequence[int],
    updates: ResolvedUpdates,
    tokenizer: TextEncoder,
    literals: Sequence[tuple[int, int]] = (),
) -> tuple[list[int], Ranges]:
    """The prompt with every item's tokens in it, and modality -> ranges in item order.

    `literals`: token ranges of the prompt in which nothing is a placeholder, in their order. See
    `Matcher.places`. Raises PlaceholderMismatchError where the prompt has more or fewer places than
    there are items.
    """
    matcher = _token_matcher(prompt, tokenizer, literals)
    places = matcher.places(updates)
    _check_all_placed(matcher, places, updates, tokenizer)
    output: list[int] = []
    ranges: Ranges = {modality: [] for modality, items in updates.items.items() if items}
    cursor = 0
    for place in places:
        output.extend(prompt[cursor : place.point])
        ranges[place.modality].append(place.update.placeholder(len(output)))
        output.extend(place.update.token_ids)
        cursor = place.stop
    output.extend(prompt[cursor:])
    return output, ranges


def find_expanded(
    prompt: Sequence[int], updates: ResolvedUpdates, tokenizer: TextEncoder
) -> Ranges | None:
    """Find the items in a prompt that an HF processor has expanded already; None if none has.

    Every item's whole content must be there, each modality's in item order and without overlap, and
    no placeholder may be left over. Contents are taken from left to right, and of several that
    begin at one place the longest: one that lies inside another's is part of that. A content that
    has merged with the text beside it is not known again.
    """
    ranges: Ranges = {modality: [] for modality, items in updates.items.items() if items}
    text, taken, cursor = as_string(prompt), list[tuple[int, int]](), 0
    found: dict[str, tuple[int, int, ResolvedUpdate]] = {}
    while waiting := [name for name in ranges if len(ranges[name]) < len(updates.items[name])]:
        for modality in waiting:
            if modality not in found or found[modality][0] < cursor:
                item = updates.items[modality][len(ranges[modality])]
                first = _first_content(text, item, cursor)
                if first is None:
                    return None
                found[modality] = first
        modality = min(waiting, key=lambda name: found[name][:2])
        start, _, update = found.pop(modality)
        cursor = start + len(update.token_ids)
        taken.append((start, cursor))
        ranges[modality].append(update.placeholder(start))
    matcher = _token_matcher(prompt, tokenizer, taken)
    targets = (_countable(targets, tokenizer) for targets in updates.replaced.values())
    return None if any(matcher.count(group, 0) for group in targets) else ranges


def _first_content(
    text: str, alternatives: Iterable[ResolvedUpdate], cursor: int
) -> tuple[int, int, ResolvedUpdate] | None:
    """Find an item's leftmost content, of those the longest: (start, minus length, alternative)."""
    places = [
        (start, -len(update.token_ids), update)
        for update in alternatives
        if (start := text.find(as_string(update.token_ids), cursor)) >= 0
    ]
    return min(places, key=lambda place: place[:2], default=None)


def has_open_ends(updates: Iterable[ResolvedUpdate], tokenizer: Any) -> bool:
    """Return whether a tokenizer may merge what stands beside an update with it, or with its
    target.

    So it is where a text begins or ends in anything but one of the tokenizer's added tokens.
    """

    def is_open(token_ids: Sequence[int]) -> bool:
        # Others that were added may still merge, as line ends do with more of them.
        added = tokenizer.added_tokens_decoder
        ends = [added.get(token_id) for token_id in (*token_ids[:1], *token_ids[-1:])]
        return any(token is None or not token.special for token in ends)

    return any(
        (isinstance(update.target, str) and is_open(to_token_ids(update.target, tokenizer)))
        or (update.text is not None and is_open(update.token_ids))
        for update in updates
    )


def _token_matcher(
    prompt: Sequence[int], tokenizer: TextEncoder, literals: Sequence[tuple[int, int]] = ()
) -> Matcher:
    def spell(target: PromptSequence) -> str:
        return as_string(to_token_ids(target, tokenizer))

    return Matcher(as_string(prompt), spell, literals)


def _countable(targets: Iterable[PromptSequence], tokenizer: TextEncoder) -> list[list[int]]:
    """Targets as token ids, without what the tokenizer puts into every text anyway."""
    everywhere = list(tokenizer.encode("", add_special_tokens=True))
    found = (to_token_ids(target, tokenizer) for target in targets)
    return [token_ids for token_ids in found if token_ids != everywhere]


def _check_all_placed(
    matcher: Matcher, places: Sequence[Place], updates: ResolvedUpdates, tokenizer: TextEncoder
) -> None:
    end = places[-1].stop if places else 0
    for modality, items in updates.items.items():
        targets = _countable(updates.replaced[modality], tokenizer)
        spare = matcher.count(targets, end)
        num_items = len(items)
        num_placed = sum(place.modality == modality for place in places)
        if num_placed == num_items and not spare:
            continue
        name = f"`{tokenizer.decode(targets[0])}` " if targets else ""
        were = "was" if num_items == 1 else "were"
        raise PlaceholderMismatchError(
            f"the prompt has {num_placed + spare} {name}placeholder(s) but {num_items} "
            f"{modality}{'' if num_items == 1 else 's'} {were} given",
            parameter="prompt",
            value=num_placed + spare,
        )
