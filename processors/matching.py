"""Putting the placeholder tokens of every media item into a prompt of token ids.

Each item's content goes where its update says, leftmost first; a prompt that an HF processor has
expanded already is known by the contents that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aioengine.errors import PlaceholderMismatchError
from aioengine.processors.inputs import PlaceholderRange
from aioengine.processors.updates import (
    PromptIndexTarget,
    PromptUpdate,
    PromptUpdateDetails,
    Target,
    TextEncoder,
    find,
    resolve_contents,
    to_token_ids,
)

__all__ = ["apply_updates", "find_expanded", "has_open_ends"]


@dataclass(frozen=True)
class _Match:
    """Prompt tokens [start, stop) that an update matched; `point`: where the output changes."""

    start: int
    stop: int
    update: PromptUpdate

    @property
    def point(self) -> int:
        return self.stop if self.update.keeps_target else self.start


@dataclass
class _Matcher:
    """The state of one pass over a prompt from left to right."""

    prompt: Sequence[int]
    tokenizer: TextEncoder
    literals: Sequence[tuple[int, int]] = ()
    """Token ranges in which nothing is a placeholder."""
    cursor: int = 0
    """Prompt tokens before it have been copied to the output."""
    floor: int = 0
    """Prompt tokens before it have been replaced: no target may reach into them."""
    done: dict[str, int] = field(default_factory=dict)
    """Modality -> items placed."""

    def first_match(self, alternatives: Sequence[PromptUpdate], item_idx: int) -> _Match | None:
        """Where the item goes: the leftmost match of the first alternative that has one."""
        for update in alternatives:
            target = update.target
            if callable(target):
                target = target(item_idx)
            match = self._find(update, target)
            if match is not None:
                return match
        return None

    def _find(self, update: PromptUpdate, target: Target) -> _Match | None:
        if isinstance(target, PromptIndexTarget):
            return self._find_index(update, target)
        wanted = to_token_ids(target, self.tokenizer)
        if update.keeps_target:
            # An insertion's target may have been copied already, by an insertion at the same place.
            start = self.position(wanted, max(self.floor, self.cursor - len(wanted)))
        else:
            start = self.position(wanted, self.cursor)
        return None if start < 0 else _Match(start, start + len(wanted), update)

    def position(self, wanted: Sequence[int], start: int) -> int:
        """Where `wanted` lies from `start` on, outside of literals, or -1."""
        while (start := find(self.prompt, wanted, start)) >= 0:
            stop = start + len(wanted)
            if not any(start < high and low < stop for low, high in self.literals):
                break
            start += 1
        return start

    def _find_index(self, update: PromptUpdate, target: PromptIndexTarget) -> _Match | None:
        start, stop = 0, 0
        if target.kind == "end":
            start = stop = len(self.prompt)
        elif target.kind == "prefix":
            wanted = to_token_ids(target.prefix, self.tokenizer)
            stop = len(wanted)
            if list(self.prompt[:stop]) != wanted:
                return None
        match = _Match(start, stop, update)
        return match if start >= self.floor and match.point >= self.cursor else None


def apply_updates(
    prompt: Sequence[int],
    updates: Sequence[PromptUpdate],
    counts: Mapping[str, int],
    tokenizer: TextEncoder,
    literals: Sequence[tuple[int, int]] = (),
) -> tuple[list[int], dict[str, list[PlaceholderRange]]]:
    """The prompt with every item's tokens in it, and modality -> ranges in item order.

    `literals`: token ranges of the prompt in which nothing is a placeholder.

    Targets are matched leftmost first, without overlap, items in order; a stretch of the prompt
    serves one modality only. Raises PlaceholderMismatchError where the prompt has more or fewer
    places than there are items.
    """
    contents = resolve_contents(updates, counts, tokenizer)
    by_modality: dict[str, list[PromptUpdate]] = {}
    for update in updates:
        by_modality.setdefault(update.modality, []).append(update)
    matcher = _Matcher(prompt, tokenizer, literals)
    output: list[int] = []
    ranges: dict[str, list[PlaceholderRange]] = {modality: [] for modality in counts}
    while (match := _next_match(matcher, by_modality, counts)) is not None:
        modality = match.update.modality
        item_idx = matcher.done.get(modality, 0)
        output.extend(prompt[matcher.cursor : match.point])
        alternatives = zip(by_modality[modality], contents[modality][item_idx], strict=True)
        content = next(content for update, content in alternatives if update is match.update)
        ranges[modality].append(content.placeholder(len(output)))
        output.extend(content.token_ids)
        matcher.done[modality] = item_idx + 1
        matcher.cursor = match.stop
        if not match.update.keeps_target:
            matcher.floor = match.stop
    _check_all_placed(matcher, by_modality, counts)
    output.extend(prompt[matcher.cursor :])
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
    taken = [False] * len(prompt)
    for modality, items in contents.items():
        cursor = 0
        for alternatives in items:
            places = [
                (start, content)
                for content in alternatives
                if (start := find(prompt, content.token_ids, cursor)) >= 0
            ]
            if not places:
                return None
            start, content = min(places, key=lambda place: place[0])
            cursor = start + len(content.token_ids)
            if any(taken[start:cursor]):
                return None
            taken[start:cursor] = [True] * (cursor - start)
            ranges[modality].append(content.placeholder(start))
    rest = [token_id for token_id, is_taken in zip(prompt, taken, strict=True) if not is_taken]
    matcher = _Matcher(rest, tokenizer)
    return None if _spare_targets(matcher, updates)[0] else ranges


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

    for update in updates:
        for index in range(counts.get(update.modality, 0)):
            target, content = update.target, update.content
            target = target(index) if callable(target) else target
            content = content(index) if callable(content) else content
            full = content.full if isinstance(content, PromptUpdateDetails) else content
            if is_open(target) or is_open(full):
                return True
    return False


def _next_match(
    matcher: _Matcher, by_modality: Mapping[str, list[PromptUpdate]], counts: Mapping[str, int]
) -> _Match | None:
    matches = []
    for modality, alternatives in by_modality.items():
        item_idx = matcher.done.get(modality, 0)
        if item_idx < counts.get(modality, 0):
            match = matcher.first_match(alternatives, item_idx)
            if match is not None:
                matches.append(match)
    # min() keeps the first of equals, so an earlier modality wins a tie.
    return min(matches, key=lambda match: match.point, default=None)


def _check_all_placed(
    matcher: _Matcher, by_modality: Mapping[str, list[PromptUpdate]], counts: Mapping[str, int]
) -> None:
    for modality in {**counts, **by_modality}:
        num_items, num_placed = counts.get(modality, 0), matcher.done.get(modality, 0)
        spare, name = _spare_targets(matcher, by_modality.get(modality, []))
        if num_placed == num_items and not spare:
            continue
        were = "was" if num_items == 1 else "were"
        raise PlaceholderMismatchError(
            f"the prompt has {num_placed + spare} {name}placeholder(s) but {num_items} "
            f"{modality}{'' if num_items == 1 else 's'} {were} given",
            parameter="prompt",
            value=num_placed + spare,
        )


def _spare_targets(matcher: _Matcher, updates: Sequence[PromptUpdate]) -> tuple[int, str]:
    """How many replacement targets are left behind the cursor, and how the target is spelt."""
    name = ""
    positions: set[int] = set()
    for update in updates:
        target = update.target
        if callable(target) or isinstance(target, PromptIndexTarget) or update.keeps_target:
            continue
        wanted = to_token_ids(target, matcher.tokenizer)
        # A place that the tokenizer makes in every text is no sign of a missing item.
        if wanted == list(matcher.tokenizer.encode("", add_special_tokens=True)):
            continue
        name = name or f"`{matcher.tokenizer.decode(wanted)}` "
        start = matcher.cursor
        while (start := matcher.position(wanted, start)) >= 0:
            positions.add(start)
            start += len(wanted)
    return len(positions), name
