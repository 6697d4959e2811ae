"""Prompt updates: where each media item's placeholder tokens go, found by matching token ids.

A family says what its HF processor does to the text for one item: put the placeholder tokens in
place of something (`PromptReplacement`), or next to something (`PromptInsertion`). `apply_updates`
does the same to token ids, and reports where every item came to lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch

from aioengine.errors import PlaceholderMismatchError
from aioengine.processors.inputs import PlaceholderRange

__all__ = [
    "PromptIndexTargets",
    "PromptInsertion",
    "PromptReplacement",
    "PromptUpdate",
    "PromptUpdateDetails",
    "apply_updates",
    "resolve_contents",
]

PromptSequence: TypeAlias = str | Sequence[int]
"""Text, which is tokenised without special tokens around it, or token ids."""


class TextEncoder(Protocol):
    """What matching needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids."""
        ...


EmbedSelector: TypeAlias = Callable[[TextEncoder, list[int]], torch.Tensor]


@dataclass(frozen=True)
class PromptIndexTarget:
    """A place in the prompt rather than tokens in it; made by `PromptIndexTargets`."""

    kind: str
    prefix: PromptSequence = ()


class PromptIndexTargets:
    """Targets that name a place: they match once, whatever the tokens there are."""

    @staticmethod
    def start() -> PromptIndexTarget:
        """Before the first token."""
        return PromptIndexTarget("start")

    @staticmethod
    def end() -> PromptIndexTarget:
        """After the last token."""
        return PromptIndexTarget("end")

    @staticmethod
    def prefix(seq: PromptSequence) -> PromptIndexTarget:
        """After `seq`, if the prompt begins with it."""
        return PromptIndexTarget("prefix", seq)


Target: TypeAlias = PromptSequence | PromptIndexTarget


@dataclass(frozen=True)
class PromptUpdateDetails:
    """The tokens that an update puts into the prompt.

    `full`: all of them. `features`: the contiguous part of `full` that is the placeholder range
    (None: all of it). `is_embed`: of the range's tokens, which positions take encoder rows, as a
    bool tensor (None: all).
    """

    full: PromptSequence
    features: PromptSequence | None = None
    is_embed: EmbedSelector | None = None

    @staticmethod
    def from_seq(seq: PromptSequence) -> PromptUpdateDetails:
        """Every token takes an encoder row."""
        return PromptUpdateDetails(full=seq)

    @staticmethod
    def select_token_id(seq: PromptSequence, embed_token_id: int) -> PromptUpdateDetails:
        """Only tokens with this id take encoder rows."""
        return PromptUpdateDetails.select_token_ids(seq, [embed_token_id])

    @staticmethod
    def select_token_ids(
        seq: PromptSequence, embed_token_ids: Sequence[int]
    ) -> PromptUpdateDetails:
        """Only tokens with one of these ids take encoder rows."""
        wanted = torch.tensor(list(embed_token_ids))

        def select(tokenizer: TextEncoder, token_ids: list[int]) -> torch.Tensor:
            return torch.isin(torch.tensor(token_ids), wanted)

        return PromptUpdateDetails(full=seq, is_embed=select)

    @staticmethod
    def select_text(seq: PromptSequence, embed_text: str) -> PromptUpdateDetails:
        """Only the tokens that spell `embed_text`, at each of its occurrences, take rows."""

        def select(tokenizer: TextEncoder, token_ids: list[int]) -> torch.Tensor:
            wanted = tokenizer.encode(embed_text, add_special_tokens=False)
            mask = torch.zeros(len(token_ids), dtype=torch.bool)
            start = 0
            while (start := find(token_ids, wanted, start)) >= 0:
                mask[start : start + len(wanted)] = True
                start += len(wanted)
            return mask

        return PromptUpdateDetails(full=seq, is_embed=select)


Content: TypeAlias = PromptSequence | PromptUpdateDetails


@dataclass(frozen=True, kw_only=True)
class PromptUpdate:
    """What is done to the prompt for each item of a modality.

    `target` and the content may be functions of the item's index. Several updates for one modality
    are alternatives: for each item, the first one whose target is found is taken.
    """

    modality: str
    target: Target | Callable[[int], Target]

    @property
    def content(self) -> Content | Callable[[int], Content]:
        """What is put into the prompt."""
        raise NotImplementedError

    @property
    def keeps_target(self) -> bool:
        """Whether the target stays in the prompt."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PromptReplacement(PromptUpdate):
    """Puts `replacement` in place of `target`, once for each item."""

    replacement: Content | Callable[[int], Content]

    @property
    def content(self) -> Content | Callable[[int], Content]:
        return self.replacement

    @property
    def keeps_target(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class PromptInsertion(PromptUpdate):
    """Puts `insertion` right after `target`, which stays and may serve further items."""

    insertion: Content | Callable[[int], Content]

    @property
    def content(self) -> Content | Callable[[int], Content]:
        return self.insertion

    @property
    def keeps_target(self) -> bool:
        return True


@dataclass(frozen=True)
class ResolvedContent:
    """An update's content as token ids; `start` and `stop` bound the placeholder range in them."""

    token_ids: list[int]
    start: int
    stop: int
    is_embed: torch.Tensor | None

    def placeholder(self, offset: int) -> PlaceholderRange:
        """The range, if the content is put at `offset`."""
        return PlaceholderRange(offset + self.start, self.stop - self.start, self.is_embed)


def find(haystack: Sequence[int], needle: Sequence[int], start: int = 0) -> int:
    """The first position from `start` on at which `needle` lies in `haystack`, or -1."""
    if not needle:
        return -1
    wanted, last = list(needle), len(haystack) - len(needle)
    position = start
    try:
        while True:
            position = haystack.index(wanted[0], position, last + 1)
            if list(haystack[position : position + len(wanted)]) == wanted:
                return position
            position += 1
    except ValueError:
        return -1


def _token_ids(sequence: PromptSequence, tokenizer: TextEncoder) -> list[int]:
    if isinstance(sequence, str):
        return list(tokenizer.encode(sequence, add_special_tokens=False))
    return [int(token_id) for token_id in sequence]


def _resolve_content(
    update: PromptUpdate, item_idx: int, tokenizer: TextEncoder
) -> ResolvedContent:
    content = update.content
    if callable(content):
        content = content(item_idx)
    if not isinstance(content, PromptUpdateDetails):
        content = PromptUpdateDetails(full=content)
    full = _token_ids(content.full, tokenizer)
    start, features = 0, full
    if content.features is not None:
        features = _token_ids(content.features, tokenizer)
        start = find(full, features)
        if start < 0:
            raise ValueError("`features` must be a contiguous part of `full`")
    mask = None if content.is_embed is None else content.is_embed(tokenizer, features)
    return ResolvedContent(full, start, start + len(features), mask)


def resolve_contents(
    updates: Iterable[PromptUpdate], counts: Mapping[str, int], tokenizer: TextEncoder
) -> dict[str, list[list[ResolvedContent]]]:
    """For each modality and item, the contents of its alternatives, in order."""
    contents: dict[str, list[list[ResolvedContent]]] = {
        modality: [[] for _ in range(count)] for modality, count in counts.items()
    }
    for update in updates:
        for item_idx, alternatives in enumerate(contents.get(update.modality, ())):
            alternatives.append(_resolve_content(update, item_idx, tokenizer))
    return contents


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
        wanted = _token_ids(target, self.tokenizer)
        if update.keeps_target:
            # An insertion's target may have been copied already, by an insertion at the same place.
            start = find(self.prompt, wanted, max(self.floor, self.cursor - len(wanted)))
        else:
            start = find(self.prompt, wanted, self.cursor)
        return None if start < 0 else _Match(start, start + len(wanted), update)

    def _find_index(self, update: PromptUpdate, target: PromptIndexTarget) -> _Match | None:
        start, stop = 0, 0
        if target.kind == "end":
            start = stop = len(self.prompt)
        elif target.kind == "prefix":
            wanted = _token_ids(target.prefix, self.tokenizer)
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
) -> tuple[list[int], dict[str, list[PlaceholderRange]]]:
    """The prompt with every item's tokens in it, and modality -> ranges in item order.

    Targets are matched leftmost first, without overlap, items in order; a stretch of the prompt
    serves one modality only. Raises PlaceholderMismatchError where the prompt has more or fewer
    places than there are items.
    """
    contents = resolve_contents(updates, counts, tokenizer)
    by_modality: dict[str, list[PromptUpdate]] = {}
    for update in updates:
        by_modality.setdefault(update.modality, []).append(update)
    matcher = _Matcher(prompt, tokenizer)
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
        wanted = _token_ids(target, matcher.tokenizer)
        name = name or f"`{matcher.tokenizer.decode(wanted)}` "
        start = matcher.cursor
        while (start := find(matcher.prompt, wanted, start)) >= 0:
            positions.add(start)
            start += len(wanted)
    return len(positions), name
