"""Interfaces of a model class, as protocols, and the merging of encoder rows into embeddings."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import eq, sub
from typing import Any, Protocol, TypeAlias, Union, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from aioengine.kernels.metadata import SeenRows
from aioengine.types import Span

__all__ = [
    "MultiModalEmbeddings",
    "NestedTensors",
    "PromptInputs",
    "PromptMedia",
    "PromptMemory",
    "ReadsMedia",
    "SupportsEncoderDecoder",
    "SupportsMultiModal",
    "flatten_embeddings",
    "merge_multimodal_embeddings",
    "positions_of",
]

NestedTensors: TypeAlias = Union[
    Tensor, list[Tensor], tuple[Tensor, ...], "list[NestedTensors]", "tuple[NestedTensors, ...]"
]
"""A tensor, or tensors in lists or tuples of any depth, whose shapes may differ."""

MultiModalEmbeddings: TypeAlias = Tensor | list[Tensor] | tuple[Tensor, ...]
"""Encoder rows by item: [num_items, rows, hidden], or one [rows, hidden] per item."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptMedia:
    """One media item of a prompt, for the hooks that read a prompt as a whole.

    `features`: what its processor made of it, on the CPU; empty where prompts are laid out before
    their media are processed.
    """

    modality: str
    span: Span
    features: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Prompt positions [start, stop) that take the item's encoder rows."""
        first = self.span.offset
        return [(first + start, first + stop) for start, stop in self.span.embed_runs]


@dataclass(frozen=True, slots=True, eq=False)
class PromptMemory:
    """Rows that cross-attention reads of a prompt's media, and which of them each token sees.

    `index` int64 [R]: of all rows of the media, one medium after the other, those that are read, in
    the order in which they are kept; one may stand there twice, or fill a gap. `runs`: (end, what
    the tokens up to there see); the last counts for all that follow.
    """

    index: Tensor
    runs: tuple[tuple[int, SeenRows], ...]

    @property
    def num_rows(self) -> int:
        """R, gaps included."""
        return len(self.index)

    def seen_at(self, start: int, end: int) -> list[SeenRows]:
        """Return runs of positions [start, end), which may lie beyond the prompt, with what they
        see."""
        found = []
        for index, (stop, run) in enumerate(self.runs):
            last = end if index == len(self.runs) - 1 else min(stop, end)
            if start < last:
                found.append(run._replace(num_tokens=last - start))
                start = last
        return found


@dataclass(frozen=True, slots=True, eq=False)
class PromptInputs:
    """Values that a model computes of a prompt once, for all of its steps. On the CPU.

    `positions`: position ids [L] or [3, L], and what a later token's index is off by; None where a
    token's position is its index. `block_ids` int32 [L]: see `AttentionMetadata`.
    `memory`: of a model whose cross-attention reads media; None for a prompt without any.
    """

    positions: tuple[Tensor, int] | None = None
    block_ids: Tensor | None = None
    memory: PromptMemory | None = None

    @property
    def bidirectional(self) -> tuple[tuple[int, int], ...]:
        """The position ranges that one step has to compute whole, ascending and disjoint."""
        ranges: list[tuple[int, int]] = []
        ids = [] if self.block_ids is None else self.block_ids.tolist()
        bounds: dict[int, tuple[int, int]] = {}
        for position, block in enumerate(ids):
            if block >= 0:
                bounds[block] = bounds.get(block, (position, 0))[0], position + 1
        for low, high in sorted(bounds.values()):
            if ranges and low < ranges[-1][1]:
                low, high = ranges[-1][0], max(high, ranges.pop()[1])
            ranges.append((low, high))
        return tuple(ranges)

    def blocks_at(self, start: int, end: int) -> Tensor | None:
        """The block ids of positions [start, end), which may lie beyond the prompt."""
        if self.block_ids is None:
            return None
        found = self.block_ids[start:end]
        return pad(found, (0, end - start - len(found)), value=-1)


@runtime_checkable
class SupportsMultiModal(Protocol):
    """A model that encodes media and puts the rows among the embeddings of text.

    `TransformersModel` is one. A `DefinedModel` asks the module that it runs, if that is one.
    """

    @abstractmethod
    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings | None:
        """The encoder's rows for the items in `kwargs`, item by item; None without items."""

    @abstractmethod
    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        is_multimodal: Tensor | None = None,
    ) -> Tensor:
        """Embeddings [T, hidden] of `input_ids` [T].

        The rows of `multimodal_embeddings`, in order, stand where `is_multimodal` (bool [T]) is
        True; ids there may be any.
        """


@runtime_checkable
class SupportsEncoderDecoder(Protocol):
    """A model whose decoder attends to an encoder's output through cross-attention layers.

    The engine keeps blocks for `max_encoder_len` rows of it. Which layers these are, the probe
    finds; what a decoder's prompt begins with, `EncDecMultiModalProcessor` says.
    """

    @property
    @abstractmethod
    def max_encoder_len(self) -> int:
        """Rows of the longest output that the encoder can give; 0: of its largest media item."""

    @abstractmethod
    def encode_prompt(self, **kwargs: Any) -> Tensor:
        """The rows [n, length, dim] that the cross-attention layers read, for n equal prompts."""

    @abstractmethod
    def memory(self, items: Sequence[Tensor]) -> Tensor | None:
        """The rows of `items`, [length, dim] each, as the decoder is given them in a step."""


@runtime_checkable
class ReadsMedia(Protocol):
    """A causal model with layers of cross-attention that read a prompt's media.

    `prompt_inputs` says what each token of a prompt with media sees (`PromptMemory`); `encode` is
    given an item of all media of a prompt: their features as `media`, and the memory's `index`.
    """

    @abstractmethod
    def most_memory_rows(self, num_items: int, block_size: int) -> int:
        """Rows that the memory of so many items may take."""


def flatten_embeddings(embeddings: NestedTensors) -> Tensor:
    """All rows [total, hidden] of `embeddings`, in order; the last dimension is kept."""
    if isinstance(embeddings, Tensor):
        return embeddings.flatten(0, -2)
    return torch.cat([flatten_embeddings(part) for part in embeddings])


def merge_multimodal_embeddings(
    input_ids: Tensor | None,
    inputs_embeds: Tensor,
    multimodal_embeddings: NestedTensors,
    placeholder_token_id: int | Sequence[int] | None = None,
    *,
    is_multimodal: Tensor | None = None,
) -> Tensor:
    """Write encoder rows over the placeholders of `inputs_embeds` [T, hidden], which it returns.

    Where to: `is_multimodal` (bool [T]) if given, else wherever `input_ids` [T] is one of
    `placeholder_token_id`. Rows go to placeholders in order and are cast to the embeddings' dtype.
    Raises ValueError where the counts differ; a mask on an accelerator is not read back to check.
    """
    if is_multimodal is None:
        if input_ids is None or placeholder_token_id is None:
            raise ValueError("give is_multimodal, or input_ids and placeholder_token_id")
        is_multimodal = _find(input_ids, placeholder_token_id)
    if not isinstance(multimodal_embeddings, Tensor) and not multimodal_embeddings:
        rows = inputs_embeds.new_empty(0, inputs_embeds.shape[-1])
    else:
        rows = flatten_embeddings(multimodal_embeddings).to(inputs_embeds)
    if rows.shape[-1] != inputs_embeds.shape[-1]:
        raise ValueError(
            f"encoder rows are {rows.shape[-1]} wide, embeddings {inputs_embeds.shape[-1]}"
        )
    if is_multimodal.device.type == "cpu":
        num_placeholders = int(is_multimodal.sum())
        if num_placeholders != rows.shape[0]:
            raise ValueError(f"{rows.shape[0]} encoder rows for {num_placeholders} placeholders")
    # Unlike assignment through a mask, this needs no count, so nothing waits for a device.
    mask = is_multimodal.to(inputs_embeds.device)[:, None]
    return inputs_embeds.masked_scatter_(mask, rows)


def _find(input_ids: Tensor, token_ids: int | Sequence[int]) -> Tensor:
    if isinstance(token_ids, int):
        return input_ids == token_ids
    wanted = torch.tensor(list(token_ids), dtype=input_ids.dtype, device=input_ids.device)
    return torch.isin(input_ids, wanted)


def positions_of(
    prompts: Sequence[tuple[Tensor, int] | None] | None, starts: Sequence[int], ends: Sequence[int]
) -> Tensor:
    """Positions [T] or [3, T] of a step's tokens: the prompts' own, then counting on from them; or
    their indices, where prompts say nothing."""
    # No operators for single tokens: beside Python threads each may wait for the lock.
    if prompts is None or not any(prompts):
        return _as_tensor([*chain.from_iterable(map(range, starts, ends))])
    if all(prompts) and all(map(eq, map(sub, ends, starts), repeat(1))):
        single = [*map(_position_at, prompts, starts)]
        if single and isinstance(single[0], list):
            return torch.tensor([*zip(*single, strict=True)])
        return _as_tensor(single)
    return torch.cat([*map(_cut, prompts, starts, ends)], dim=-1)


def _as_tensor(numbers: Sequence[int]) -> Tensor:
    """Numbers as int64 [n]; this takes a sixth of what `torch.tensor` does."""
    if not numbers:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)


def _position_at(known: tuple[Tensor, int] | None, index: int) -> Any:
    """The position of one token: a number, or one on each axis."""
    assert known is not None
    prompt, delta = known
    sizes = prompt.shape
    if index < sizes[-1]:
        return prompt[..., index].tolist()
    return index + delta if len(sizes) == 1 else [index + delta] * sizes[0]


def _cut(known: tuple[Tensor, int] | None, start: int, end: int) -> Tensor:
    """Positions of tokens [start, end): the prompt's own, then counting on from them."""
    if known is None:
        return torch.arange(start, end)
    prompt, delta = known
    length = prompt.shape[-1]
    beyond = torch.arange(max(start, length), max(end, length)) + delta
    inside = prompt[..., start:end]
    return torch.cat([inside, beyond.expand(*prompt.shape[:-1], -1)], dim=-1)
