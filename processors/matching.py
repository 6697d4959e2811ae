"""Putting the placeholder tokens of every media item into a prompt of token ids.

Each item's content goes where its update says, leftmost first; a prompt that an HF processor has
expanded already is known by the contents that are there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aioengine.errors import PlaceholderMismatchError
from aioengine.processors.inputs import PlaceholderRange
from aioengine.processors.updates import (
    PromptIndexTarget,
    PromptSequence,
    PromptUpdate,
    PromptUpdateDetails,
    ResolvedContent,
    Target,
    TextEncoder,
    as_string,
    resolve_contents,
    to_token_ids,
)

__all__ = ["Matcher", "Place", "apply_updates", "find_expanded", "has_open_ends", "targets_of"]


@dataclass(frozen=True)
class Place:
    """Where an item goes: the prompt's [start, stop) matched its update's target."""

    update: PromptUpdate
    item_idx: int
    start: int
    stop: int

    @property
    def point(self) -> int:
        """Where the output changes."""
        return self.stop if self.update.keeps_target else self.start

    def content(
        self,
        updates: Sequence[PromptUpdate],
        contents: Mapping[str, Sequence[Sequence[ResolvedContent]]],
    ) -> ResolvedContent:
        """What is put there, of all contents of the updates."""
        modality = self.update.modality
        alternatives = [update for update in updates if update.modality == modality]
        position = next(i for i, update in enumerate(alternatives) if update is self.update)
        return contents[modality][self.item_idx][position]


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

    def places(self, updates: Iterable[PromptUpdate], counts: Mapping[str, int]) -> list[Place]:
        """Where items go, leftmost first and without overlap, each modality's in their order.

        Of an item's alternatives the first that matches anywhere counts; of modalities that match
        at the same point, the earlier one. Ends with the first item that finds no place.
        """
        by_modality: dict[str, list[PromptUpdate]] = {}
        for update in updates:
            by_modality.setdefault(update.modality, []).append(update)
        done = dict.fromkeys(by_modality, 0)
        # What is before the cursor has been copied; before the floor, replaced: out of reach.
        cursor = floor = 0
        places: list[Place] = []
        while True:
            found = [
                place
                for modality, alternatives in by_modality.items()
                if done[modality] < counts.get(modality, 0)
                and (place := self._first(alternatives, done[modality], cursor, floor))
            ]
            if not found:
                return places
            place = min(found, key=lambda place: place.point)
            places.append(place)
            done[place.update.modality] += 1
            cursor = place.stop
            if not place.update.keeps_target:
                floor = place.stop

    def spare(
        self, updates: Iterable[PromptUpdate], start: int, ignored: str = ""
    ) -> tuple[int, PromptSequence | None]:
        """How many replacement targets are left from `start` on, and the first of these targets.

        `ignored`: a spelling that is in every prompt, and so no sign of a missing item.
        """
        name: PromptSequence | None = None
        positions: set[int] = set()
        for update in updates:
            target = update.target
            if callable(target) or isinstance(target, PromptIndexTarget) or update.keeps_target:
                continue
            wanted = self._spell(target)
            if wanted == ignored:
                continue
            name = target if name is None else name
            position = start
            while (position := self._position(wanted, position)) >= 0:
                positions.add(position)
                position += len(wanted)
        return len(positions), name

    def _first(
        self, alternatives: Iterable[PromptUpdate], item_idx: int, cursor: int, floor: int
    ) -> Place | None:
        for update in alternatives:
            target = _target(update, item_idx)
            if isinstance(target, PromptIndexTarget):
                start, stop = self._find_index(target)
                place = Place(update, item_idx, start, stop)
                if floor <= start <= stop and place.point >= cursor:
                    return place
                continue
            wanted = self._spell(target)
            # An insertion's target may have been copied already, by another insertion there.
            begin = max(floor, cursor - len(wanted)) if update.keeps_target else cursor
            start = self._position(wanted, begin)
            if start >= 0:
                return Place(update, item_idx, start, start + len(wanted))
        return None

    def _find_index(self, target: PromptIndexTarget) -> tuple[int, int]:
        """Start and stop; before everything, if there is no match."""
        if target.kind == "end":
            return len(self._prompt), len(self._prompt)
        prefix = self._spell(target.prefix) if target.kind == "prefix" else ""
        return (0, len(prefix)) if self._prompt.startswith(prefix) else (-1, -1)

    def _position(self, wanted: str, start: int) -> int:
        """Where `wanted` lies from `start` on, outside of literals, or -1."""
        while wanted and (start := self._prompt.find(wanted, start)) >= 0:
            index = bisect_right(self._literal_ends, start)
            if index == len(self._literals) or self._literals[index][0] >= start + len(wanted):
                return start
            start = self._literal_ends[index]
        return -1


def apply_updates(
    prompt: Sequence[int],
    updates: Sequence[PromptUpdate],
    counts: Mapping[str, int],
    tokenizer: TextEncoder,
    literals: Sequence[tuple[int, int]] = (),
) -> tuple[list[int], dict[str, list[PlaceholderRange]]]:
    """The prompt with every item's tokens in it, and modality -> ranges in item order.

    `literals`: token ranges of the prompt in which nothing is a placeholder, in their order. See
    `Matcher.places`. Raises PlaceholderMismatchError where the prompt has more or fewer places than
    there are items.
    """
    contents = resolve_contents(updates, counts, tokenizer)
    matcher = _token_matcher(prompt, tokenizer, literals)
    places = matcher.places(updates, counts)
    _check_all_placed(matcher, places, updates, counts, tokenizer)
    output: list[int] = []
    ranges: dict[str, list[PlaceholderRange]] = {modality: [] for modality in counts}
    cursor = 0
    for place in places:
        output.extend(prompt[cursor : place.point])
        content = place.content(updates, contents)
        ranges[place.update.modality].append(content.placeholder(len(output)))
        output.extend(content.token_ids)
        cursor = place.stop
    output.extend(prompt[cursor:])
    return output, ranges


def find_expanded(
    prompt: Sequence[int],
    updates: Sequence[PromptUpdate],
    counts: Mapping[str, int],
    tokenizer: TextEncoder,
) -> dict[str, list[PlaceholderRange]] | None:
    """Where the items lie in a prompt that an HF processor has expanded already; None if none has.

    Every item's whole content must be there, in item order and without overlap, and no placeholder
    may be left over. A content that has merged with the text beside it is not known again.
    """
    contents = resolve_contents(updates, counts, tokenizer)
    ranges: dict[str, list[PlaceholderRange]] = {modality: [] for modality in counts}
    text, taken = as_string(prompt), bytearray(len(prompt))
    for modality, items in contents.items():
        cursor = 0
        for alternatives in items:
            places = [
                (start, content)
                for content in alternatives
                if (start := text.find(as_string(content.token_ids), cursor)) >= 0
            ]
            if not places:
                return None
            start, content = min(places, key=lambda place: place[0])
            cursor = start + len(content.token_ids)
            if any(taken[start:cursor]):
                return None
            taken[start:cursor] = b"\1" * (cursor - start)
            ranges[modality].append(content.placeholder(start))
    rest = [token_id for token_id, is_taken in zip(prompt, taken, strict=True) if not is_taken]
    spare, _ = _token_matcher(rest, tokenizer).spare(updates, 0, _everywhere(tokenizer))
    return None if spare else ranges


def targets_of(updates: Iterable[PromptUpdate], counts: Mapping[str, int]) -> Iterator[Target]:
    """The targets of all items, each alternative's."""
    for update in updates:
        for item_idx in range(counts.get(update.modality, 0)):
            yield _target(update, item_idx)


def has_open_ends(
    updates: Iterable[PromptUpdate], counts: Mapping[str, int], tokenizer: Any
) -> bool:
    """Whether a tokenizer may merge what stands beside an update with it, or with its target.

    So it is where a text begins or ends in anything but one of the tokenizer's added tokens.
    """

    def is_open(sequence: object) -> bool:
        if not isinstance(sequence, str):
            return False
        token_ids = to_token_ids(sequence, tokenizer)
        # Others that were added may still merge, as line ends do with more of them.
        added = tokenizer.added_tokens_decoder
        ends = [added.get(token_id) for token_id in (*token_ids[:1], *token_ids[-1:])]
        return any(token is None or not token.special for token in ends)

    if any(is_open(target) for target in targets_of(updates, counts)):
        return True
    for update in updates:
        for item_idx in range(counts.get(update.modality, 0)):
            content = update.content
            content = content(item_idx) if callable(content) else content
            if is_open(content.full if isinstance(content, PromptUpdateDetails) else content):
                return True
    return False


def _target(update: PromptUpdate, item_idx: int) -> Target:
    return update.target(item_idx) if callable(update.target) else update.target


def _token_matcher(
    prompt: Sequence[int], tokenizer: TextEncoder, literals: Sequence[tuple[int, int]] = ()
) -> Matcher:
    def spell(target: PromptSequence) -> str:
        return as_string(to_token_ids(target, tokenizer))

    return Matcher(as_string(prompt), spell, literals)


def _everywhere(tokenizer: TextEncoder) -> str:
    """What the tokenizer puts into every text."""
    return as_string(tokenizer.encode("", add_special_tokens=True))


def _check_all_placed(
    matcher: Matcher,
    places: Sequence[Place],
    updates: Sequence[PromptUpdate],
    counts: Mapping[str, int],
    tokenizer: TextEncoder,
) -> None:
    end, everywhere = places[-1].stop if places else 0, _everywhere(tokenizer)
    for modality in dict.fromkeys([*counts, *(update.modality for update in updates)]):
        own = [update for update in updates if update.modality == modality]
        spare, target = matcher.spare(own, end, everywhere)
        num_items = counts.get(modality, 0)
        num_placed = sum(place.update.modality == modality for place in places)
        if num_placed == num_items and not spare:
            continue
        spelt = "" if target is None else tokenizer.decode(to_token_ids(target, tokenizer))
        name = f"`{spelt}` " if spelt else ""
        were = "was" if num_items == 1 else "were"
        raise PlaceholderMismatchError(
            f"the prompt has {num_placed + spare} {name}placeholder(s) but {num_items} "
            f"{modality}{'' if num_items == 1 else 's'} {were} given",
            parameter="prompt",
            value=num_placed + spare,
        )
