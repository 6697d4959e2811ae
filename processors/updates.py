"""Prompt updates: what a family's HF processor does to the text for each media item.

It puts the placeholder tokens in place of something (`PromptReplacement`), or next to something
(`PromptInsertion`). `matching.py` does the same to token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from aioengine.errors import MediaError
from aioengine.processors.inputs import PlaceholderRange

__all__ = [
    "PromptIndexTargets",
    "PromptInsertion",
    "PromptReplacement",
    "PromptUpdate",
    "PromptUpdateDetails",
    "ResolvedContent",
    "find",
    "resolve_contents",
    "to_token_ids",
]

PromptSequence: TypeAlias = str | Sequence[int]
"""Text, which is tokenised without special tokens around it, or token ids."""


class TextEncoder(Protocol):
    """What matching needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text, with or without what the tokenizer puts around every text."""
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
    """An update's content as token ids; `start` and `stop` bound the placeholder range in them.

    `text`: the content as it was given, where it was text.
    """

    token_ids: list[int]
    start: int
    stop: int
    is_embed: torch.Tensor | None
    text: str | None = None

    def placeholder(self, offset: int) -> PlaceholderRange:
        """The range, if the content is put at `offset`."""
        return PlaceholderRange(offset + self.start, self.stop - self.start, self.is_embed)


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


def _resolve_content(
    update: PromptUpdate, item_idx: int, tokenizer: TextEncoder
) -> ResolvedContent:
    content = update.content
    if callable(content):
        content = content(item_idx)
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
        name = f"{update.modality}s[{item_idx}]"
        raise MediaError(f"{name} is too small for the model: it becomes no rows", parameter=name)
    text = content.full if isinstance(content.full, str) else None
    return ResolvedContent(full, start, start + len(features), mask, text)


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
