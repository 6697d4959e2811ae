"""Prompt updates: what a family's HF processor does to the text for each media item.

It puts the placeholder tokens in place of something (`PromptReplacement`), or next to something
(`PromptInsertion`). `matching.py` does the same to token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import ClassVar, Protocol, TypeAlias

import torch

from aioengine.errors import MediaError
from aioengine.processors.inputs import PlaceholderRange

__all__ = [
    "PromptIndexTargets",
    "PromptInsertion",
    "PromptReplacement",
    "PromptUpdate",
    "PromptUpdateDetails",
    "ResolvedUpdate",
    "ResolvedUpdates",
    "as_string",
    "find",
    "join_updates",
    "resolve_updates",
    "to_token_ids",
]

PromptSequence: TypeAlias = str | Sequence[int]
"""Text, which is tokenised without special tokens around it, or token ids."""


class TextEncoder(Protocol):
    """Methods that matching needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text, with or without what the tokenizer puts around every text."""

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids."""


EmbedSelector: TypeAlias = Callable[[TextEncoder, list[int]], torch.Tensor]


@dataclass(frozen=True)
class PromptIndexTarget:
    """A place in the prompt rather than tokens in it; made by `PromptIndexTargets`."""

    kind: str
    prefix: PromptSequence = ()


class PromptIndexTargets:
    """Zero-width targets: they name a place between tokens, where nothing is replaced."""

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
    bool tensor (None: all). `num_answer_rows`: encoder rows of the item that the answer's tokens
    take, one each, behind a range that ends the prompt.
    """

    full: PromptSequence
    features: PromptSequence | None = None
    is_embed: EmbedSelector | None = None
    num_answer_rows: int = 0

    @staticmethod
    def from_seq(seq: PromptSequence) -> PromptUpdateDetails:
        """Every token takes an encoder row."""
        return PromptUpdateDetails(full=seq)

    @staticmethod
    def select_token_id(
        seq: PromptSequence, embed_token_id: int, *, features: PromptSequence | None = None
    ) -> PromptUpdateDetails:
        """Only tokens with this id take encoder rows."""
        return PromptUpdateDetails.select_token_ids(seq, [embed_token_id], features=features)

    @staticmethod
    def select_token_ids(
        seq: PromptSequence,
        embed_token_ids: Sequence[int],
        *,
        features: PromptSequence | None = None,
    ) -> PromptUpdateDetails:
        """Only tokens with one of these ids take encoder rows."""
        wanted = torch.tensor(list(embed_token_ids))

        def select(tokenizer: TextEncoder, token_ids: list[int]) -> torch.Tensor:
            return torch.isin(torch.tensor(token_ids), wanted)

        return PromptUpdateDetails(full=seq, features=features, is_embed=select)

    @staticmethod
    def select_text(
        seq: PromptSequence, embed_text: str, *, features: PromptSequence | None = None
    ) -> PromptUpdateDetails:
        """Only the tokens that spell `embed_text`, at each of its occurrences, take rows."""

        def select(tokenizer: TextEncoder, token_ids: list[int]) -> torch.Tensor:
            wanted = as_string(tokenizer.encode(embed_text, add_special_tokens=False))
            mask = torch.zeros(len(token_ids), dtype=torch.bool)
            searched, start = as_string(token_ids), 0
            while wanted and (start := searched.find(wanted, start)) >= 0:
                mask[start : start + len(wanted)] = True
                start += len(wanted)
            return mask

        return PromptUpdateDetails(full=seq, features=features, is_embed=select)


Content: TypeAlias = PromptSequence | PromptUpdateDetails


@dataclass(frozen=True, kw_only=True)
class PromptUpdate:
    """Update of the prompt for each item of a modality.

    `target` and the content may be functions of the item's index. Several updates for one modality
    are alternatives: for each item, the first one whose target is found is taken. Where a prompt
    has media and embeddings of a modality, contents are asked for by the index within their kind.
    """

    modality: str
    target: Target | Callable[[int], Target]

    keeps_target: ClassVar[bool]
    """Whether the target stays in the prompt."""

    @property
    def content(self) -> Content | Callable[[int], Content]:
        """Return what is put into the prompt."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PromptReplacement(PromptUpdate):
    """Puts `replacement` in place of `target`, once for each item.

    At one of `PromptIndexTargets` there is nothing to replace: it is an insertion.
    """

    replacement: Content | Callable[[int], Content]
    keeps_target = False

    @property
    def content(self) -> Content | Callable[[int], Content]:
        return self.replacement


@dataclass(frozen=True, kw_only=True)
class PromptInsertion(PromptUpdate):
    """Puts `insertion` right after `target`, which stays and may serve further items."""

    insertion: Content | Callable[[int], Content]
    keeps_target = True

    @property
    def content(self) -> Content | Callable[[int], Content]:
        return self.insertion


@dataclass(frozen=True)
class ResolvedUpdate:
    """An update as it is for one item, its content as token ids.

    `start` and `stop` bound the placeholder range in them; `text`: the content as it was given,
    where it was text.
    """

    target: Target
    keeps_target: bool
    token_ids: list[int]
    start: int
    stop: int
    is_embed: torch.Tensor | None
    text: str | None
    num_answer_rows: int = 0

    def placeholder(self, offset: int) -> PlaceholderRange:
        """The range, if the content is put at `offset`."""
        length = self.stop - self.start
        return PlaceholderRange(offset + self.start, length, self.is_embed, self.num_answer_rows)


@dataclass(frozen=True)
class ResolvedUpdates:
    """Updates of one prompt.

    `items`: modality -> the alternatives of each item; `replaced`: modality -> the targets that
    each stand for an item, known without one.
    """

    items: dict[str, list[list[ResolvedUpdate]]]
    replaced: dict[str, list[PromptSequence]]

    def __iter__(self) -> Iterator[ResolvedUpdate]:
        for group in self.items.values():
            yield from chain.from_iterable(group)

    @property
    def num_items(self) -> int:
        """Number of items of all modalities."""
        return sum(map(len, self.items.values()))


def as_string(token_ids: Iterable[int]) -> str:
    """Token ids as characters: `str.find` looks for one sequence in another in linear time."""
    return "".join(map(chr, token_ids))


def find(haystack: Iterable[int], needle: Sequence[int]) -> int:
    """The first position at which `needle` lies in `haystack`, or -1."""
    return as_string(haystack).find(as_string(needle)) if needle else -1


def to_token_ids(sequence: PromptSequence, tokenizer: TextEncoder) -> list[int]:
    if isinstance(sequence, str):
        return list(tokenizer.encode(sequence, add_special_tokens=False))
    return [int(token_id) for token_id in sequence]


def resolve_updates(
    updates: Sequence[PromptUpdate], places: Mapping[str, Sequence[int]], tokenizer: TextEncoder
) -> ResolvedUpdates:
    """The updates for the items at these places of each modality, modalities in updates' order.

    A content's function is asked for the first of them as item 0, and so on; a target's, for its
    place in the prompt. Raises MediaError for an item that gets no encoder rows.
    """
    modalities = dict.fromkeys([*(update.modality for update in updates), *places])
    resolved = ResolvedUpdates(
        {modality: [[] for _ in places.get(modality, ())] for modality in modalities},
        {modality: [] for modality in modalities},
    )
    for update in updates:
        target = update.target
        if not (callable(target) or isinstance(target, PromptIndexTarget) or update.keeps_target):
            resolved.replaced[update.modality].append(target)
        for item_idx, alternatives in enumerate(resolved.items[update.modality]):
            place = places[update.modality][item_idx]
            alternatives.append(_resolve(update, item_idx, place, tokenizer))
    return resolved


def join_updates(
    parts: Sequence[tuple[ResolvedUpdates, Mapping[str, Sequence[int]]]],
) -> ResolvedUpdates:
    """The updates of a whole prompt from those of its parts, each with its items' places."""
    placed: dict[str, list[tuple[int, list[ResolvedUpdate]]]] = {}
    replaced: dict[str, list[PromptSequence]] = {}
    for resolved, places in parts:
        for modality, items in resolved.items.items():
            group = zip(places.get(modality, ()), items, strict=True)
            placed.setdefault(modality, []).extend(group)
            replaced.setdefault(modality, []).extend(resolved.replaced[modality])
    return ResolvedUpdates(
        {
            modality: [alternatives for _, alternatives in sorted(group, key=itemgetter(0))]
            for modality, group in placed.items()
        },
        replaced,
    )


def _resolve(
    update: PromptUpdate, item_idx: int, place: int, tokenizer: TextEncoder
) -> ResolvedUpdate:
    target, content = update.target, update.content
    content = content(item_idx) if callable(content) else content
    if not isinstance(content, PromptUpdateDetails):
        content = PromptUpdateDetails(full=content)
    full = to_token_ids(content.full, tokenizer)
    start, features = 0, full
    if content.features is not None:
        features = to_token_ids(content.features, tokenizer)
        start = find(full, features)
        if start < 0:
            raise ValueError("`features` must be a contiguous part of `full`")
    mask = None if content.is_embed is None else content.is_embed(tokenizer, features)
    if not (features if mask is None else bool(mask.any())):
        name = f"{update.modality}s[{place}]"
        raise MediaError(f"{name} is too small for the model: it becomes no rows", parameter=name)
    target = target(place) if callable(target) else target
    return ResolvedUpdate(
        target=target,
        keeps_target=update.keeps_target or isinstance(target, PromptIndexTarget),
        token_ids=full,
        start=start,
        stop=start + len(features),
        is_embed=mask,
        text=content.full if isinstance(content.full, str) else None,
        num_answer_rows=content.num_answer_rows,
    )
