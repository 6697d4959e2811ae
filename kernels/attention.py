"""Parts that every attention backend shares: the metadata of a step, the contract, the choice.

Keys and values live in pages (Kwon et al., "Efficient Memory Management for Large Language Model
Serving with PagedAttention", 2023): a sequence's token at position p is in block
`block_table[p // block_size]`, row `p % block_size`. One step's tokens of all sequences lie flat,
one sequence after the other:

    tokens      [ A A A A | B | C C ]          T = 7
    query_start [ 0, 4, 5, 7 ]                 S = 3
    seq_lens    [ 4, 19, 9 ]                   A starts, B decodes, C is in its second chunk

The caches of one layer are `[num_blocks, block_size, num_kv_heads, dim]`, in any strides but that
a row of `dim` numbers lies close together: the blocks of all layers of a group share one page of a
byte pool, and within a block a head's rows may be neighbours.
Rows that no sequence of the step has written may hold anything, NaN included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

__all__ = [
    "AttentionArgs",
    "AttentionBackend",
    "AttentionMetadata",
    "KeyValue",
    "Unread",
    "list_backends",
    "register_backend",
    "select_backend",
]

Made = TypeVar("Made")
KeyValue: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values: of tokens, or a layer's caches."""


class Unread:
    """Numbers that the host does not know, but for how many they are."""

    __slots__ = ("_count",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> NoReturn:
        """Refuse: what was done with one step's would be done with every other's."""
        raise RuntimeError("lengths are not known on the host in a captured step")

    def __eq__(self, other: object) -> NoReturn:
        """See `__iter__`."""
        iter(self)

    def __getitem__(self, index: Any) -> NoReturn:
        """See `__iter__`."""
        iter(self)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """One step's attention over one KV group: S sequences, T new tokens in all.

    On the device, int32:
    `query_start` [S + 1]: where each sequence's tokens begin; the last entry is T.
    `seq_lens` [S]: tokens in each sequence's context, this step's included.
    `block_table` [S, max_blocks]: block ids, padded with 0. In a captured step [n]: those of all
    sequences one after the other, each from `table_starts` [S] on.
    `slot_blocks`, `slot_offsets` [T]: block and row where each token's K/V is written
    (of cross-attention: [R], for each of the encoder's rows that are new).
    `by_length` [num_decodes]: the first sequences, those of the longest context first; in a
    captured step, none.

    On the host, so that nothing has to wait for the device:
    `query_lens`, `context_lens`: per sequence; `context_lens` equals `seq_lens`.
    `num_decodes`: how many sequences, counted from the first, have exactly one new token; those
    after them may have any number.
    In a captured step, whose launches are repeated with other numbers, no length can be read on the
    host (`Unread`), but that each sequence has one new token. Where it `is_open`, they have any
    number of them, none at all too, and `num_decodes` is 0.
    `block_size`: tokens in a block.

    `block_ids` int32 [T] or None: tokens of one sequence with the same id (-1: none) see each other
    in both directions, however far apart. All of a block's tokens are in one step. `has_blocks`:
    per sequence, on the host, whether any of its tokens is in one. `blocks_in_window`: whether a
    layer's window bounds what a block sees too.

    `is_causal`: False for cross-attention, where the context is an encoder's output, every token
    sees all of it, and the slots are those of the rows that are new in this step, if any.

    `readers` int64 [n]: the tokens of cross-attention that see anything, in the order of the
    sequences here, which are runs of tokens that see the same rows; None where all tokens see all
    rows. `sighted` bool [T], beside it: see `SeenRows`.

    `scratch`: what a backend derives from the rest once per step and reuses in every layer.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_blocks: Tensor
    slot_offsets: Tensor
    by_length: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_decodes: int
    block_size: int
    block_ids: Tensor | None = None
    has_blocks: tuple[bool, ...] = ()
    blocks_in_window: bool = False
    is_causal: bool = True
    table_starts: Tensor | None = None
    is_open: bool = False
    readers: Tensor | None = None
    sighted: Tensor | None = None
    scratch: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def num_tokens(self) -> int:
        """T, the step's tokens over all sequences."""
        return sum(self.query_lens)

    def sees_blocks(self, index: int) -> bool:
        """Return whether tokens of sequence `index` see others of their block both ways."""
        return self.block_ids is not None and self.has_blocks[index]

    def once(self, key: Any, make: Callable[[], Made]) -> Made:
        """Return what `make` gives, made for the first layer that asks and kept in `scratch`."""
        found: Made | None = self.scratch.get(key)
        if found is None:
            found = self.scratch[key] = make()
        return found


class AttentionArgs(NamedTuple):
    """Settings of one layer's attention, beside its tensors.

    The scores are multiplied by `scale`, then bounded to `softcap * tanh(score / softcap)`, then
    masked. `window`: a token sees the last `window` positions, its own included; earlier blocks are
    never read, but for a block's tokens. `sinks` [Hq]: a logit per head that takes part in the
    softmax and has no value. `distance_bias` [Hq, n]: is added to the scaled score of the key that
    lies so many positions back, the last of them to all that lie further; for causal attention
    without blocks.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    distance_bias: Tensor | None = None


class AttentionBackend(Protocol):
    """Writes this step's keys and values into pages, and attends over pages.

    An instance belongs to one engine and is called by one thread at a time. One that reads pages of
    bytes (`kernels.pool`) too says so: `takes_bytes = True`. One whose launches follow from the
    shapes of tensors alone, so that a step's may be captured once and replayed, says so of a
    layer's pages: `captures(pages) -> True`.
    """

    name: str

    def write_kv(self, new: KeyValue, pages: KeyValue, meta: AttentionMetadata) -> None:
        """Put keys [T, Hkv, Dk] and values [T, Hkv, Dv] into their slots; mutates the pages."""

    def attend(
        self,
        query: Tensor,
        pages: KeyValue,
        meta: AttentionMetadata,
        args: AttentionArgs,
        *,
        new: KeyValue | None = None,
    ) -> Tensor:
        """Attention of `query` [T, Hq, Dk] over each sequence's pages -> [T, Hq, Dv].

        Causal, unless the metadata is of cross-attention. `new`: keys and values that are written
        first, as by `write_kv`. Hq is a multiple of Hkv; query head h reads key head
        h // (Hq // Hkv).
        """


def split_by_sequence(meta: AttentionMetadata) -> list[tuple[int, int]]:
    """Each sequence's [first, last) rows in the flat batch, on the host."""
    return list(pairwise([0, *accumulate(meta.query_lens)]))


def blocks_of(meta: AttentionMetadata, index: int) -> Tensor | None:
    """The block ids of the tokens of sequence `index`; None if all are causal."""
    if meta.block_ids is None or not meta.sees_blocks(index):
        return None
    first = sum(meta.query_lens[:index])
    return meta.block_ids[first : first + meta.query_lens[index]]


def _create(module: str, attribute: str) -> AttentionBackend:
    backend: AttentionBackend = getattr(import_module(module), attribute)()
    return backend


_FACTORIES: dict[str, Callable[[], AttentionBackend]] = {
    "cpu": partial(_create, "aioengine.kernels.cpu.backend", "CpuBackend"),
    "gather": partial(_create, "aioengine.kernels.gather", "GatherBackend"),
    "reference": partial(_create, "aioengine.kernels.reference", "ReferenceBackend"),
    "triton": partial(_create, "aioengine.kernels.triton", "new_backend"),
}


def register_backend(name: str, factory: Callable[[], AttentionBackend]) -> None:
    """Make `factory` selectable as `name`; it is called when an engine selects it."""
    _FACTORIES[name] = factory


def list_backends() -> tuple[str, ...]:
    """The names that `select_backend` takes, besides "auto"."""
    return tuple(sorted(_FACTORIES))


def select_backend(
    name: str = "auto", device: torch.device | str | None = None
) -> AttentionBackend:
    """A new backend for one engine. "auto" takes the fastest that runs on `device`.

    Raises ValueError for a name that is not registered.
    """
    chosen = _fastest(device) if name == "auto" else name
    factory = _FACTORIES.get(chosen)
    if factory is None:
        names = ", ".join(list_backends())
        raise ValueError(f"attention backend must be auto, {names}, not {name!r}")
    return factory()


def _fastest(device: torch.device | str | None) -> str:
    if device is None or torch.device(device).type == "cpu":
        library = import_module("aioengine.kernels.cpu.library")
        return "cpu" if library.is_available() else "gather"
    kernels = import_module("aioengine.kernels.triton")
    return "triton" if kernels.are_right_on(torch.device(device)) else "gather"
