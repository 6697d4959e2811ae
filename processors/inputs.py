"""Encoder inputs of each media item, and where its rows go in the prompt.

HF processors return one batch for all of a request's media; caches and single flight want items.
A `MultiModalFieldConfig` says, for each output of the HF processor, how the batch is cut into
items; `MultiModalKwargs.reduce` puts items together again, from one request or from many.

A name that begins with an underscore is for the host only: it travels with the item, but no batch
for the encoder has it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch

from aioengine.types import Span

__all__ = [
    "FieldData",
    "MultiModalFieldConfig",
    "MultiModalKwargs",
    "MultiModalKwargsItem",
    "PlaceholderRange",
    "are_finite",
    "is_host_only",
    "to_tensors",
]

FieldData: TypeAlias = torch.Tensor | list[torch.Tensor]
"""One HF output for a batch of items: a tensor, or a list where the items' shapes differ."""


def is_host_only(name: str) -> bool:
    """Return whether an item's tensor of that name is for layouts, and never for the encoder."""
    return name.startswith("_")


@dataclass(frozen=True, eq=False)
class PlaceholderRange:
    """Place of one item in the prompt: positions [offset, offset + length).

    `is_embed`: bool tensor `[length]`, True where a position takes an encoder row; None: all do.
    `num_answer_rows`: so many positions behind the range take one each, of the answer's tokens.
    """

    offset: int
    length: int
    is_embed: torch.Tensor | None = None
    num_answer_rows: int = 0

    def __post_init__(self) -> None:
        if self.is_embed is not None:
            mask = self.is_embed
            if mask.dtype != torch.bool or tuple(mask.shape) != (self.length,):
                raise ValueError(f"is_embed must be a bool tensor of shape ({self.length},)")
        if self.num_embeds == 0:
            raise ValueError("a placeholder range must take at least one encoder row")

    @cached_property
    def num_embeds(self) -> int:
        """Return how many encoder rows the range takes."""
        inside = self.length if self.is_embed is None else int(self.is_embed.sum())
        return inside + self.num_answer_rows

    @cached_property
    def embed_runs(self) -> tuple[tuple[int, int], ...]:
        """The half-open runs of positions that take rows, relative to `offset`."""
        if self.is_embed is None:
            return ((0, self.length + self.num_answer_rows),)
        whole = torch.cat([self.is_embed, self.is_embed.new_ones(self.num_answer_rows)])
        mask = torch.nn.functional.pad(whole.to(torch.int8), (1, 1))
        edges = mask.diff().nonzero().flatten().tolist()
        return tuple(zip(edges[::2], edges[1::2], strict=True))

    def to_span(self) -> Span:
        """The same range without torch, as the scheduler knows it."""
        return Span(self.offset, self.length + self.num_answer_rows, self.embed_runs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlaceholderRange):
            return NotImplemented
        return self.to_span() == other.to_span()

    def __hash__(self) -> int:
        return hash(self.to_span())


@dataclass(frozen=True)
class MultiModalFieldConfig(ABC):
    """Relation of one output of the HF processor to the items of a modality, which it is cut into.

    `keep_on_cpu` marks small tensors that the host reads (grids, counts), so that they are not sent
    to the device and back.
    """

    modality: str
    keep_on_cpu: bool

    @staticmethod
    def batched(modality: str, *, keep_on_cpu: bool = False) -> MultiModalFieldConfig:
        """Item i is entry i of the first dimension (or of the list)."""
        return _Batched(modality, keep_on_cpu)

    @staticmethod
    def flat(
        modality: str, slices: Sequence[slice], dim: int = 0, *, keep_on_cpu: bool = False
    ) -> MultiModalFieldConfig:
        """Item i is `slices[i]` along `dim`; the slices must be consecutive and cover the data."""
        sizes, end = [], 0
        for part in slices:
            if part.start != end or part.step not in (None, 1) or part.stop < end:
                raise ValueError("slices must be consecutive, starting at 0, with step 1")
            sizes.append(part.stop - end)
            end = part.stop
        return _Flat(modality, keep_on_cpu, tuple(sizes), dim)

    @staticmethod
    def flat_from_sizes(
        modality: str,
        size_per_item: Sequence[int] | torch.Tensor,
        dim: int = 0,
        *,
        keep_on_cpu: bool = False,
    ) -> MultiModalFieldConfig:
        """Item i is the next `size_per_item[i]` entries along `dim`."""
        sizes = tuple(int(size) for size in size_per_item)
        return _Flat(modality, keep_on_cpu, sizes, dim)

    @staticmethod
    def shared(
        modality: str, batch_size: int, *, keep_on_cpu: bool = False
    ) -> MultiModalFieldConfig:
        """Each of the `batch_size` items has all of the data."""
        return _Shared(modality, keep_on_cpu, batch_size)

    @abstractmethod
    def split(self, data: FieldData) -> list[torch.Tensor]:
        """One tensor per item; may be views of `data`. `join` is the inverse."""

    @abstractmethod
    def join(self, items: Sequence[torch.Tensor]) -> FieldData:
        """The batch of these items; a list where their shapes do not allow one tensor."""


@dataclass(frozen=True)
class _Batched(MultiModalFieldConfig):
    """Item i is `data[i]`."""

    def split(self, data: FieldData) -> list[torch.Tensor]:
        return list(data)

    def join(self, items: Sequence[torch.Tensor]) -> FieldData:
        if len({item.shape for item in items}) > 1:
            return list(items)
        return items[0].unsqueeze(0) if len(items) == 1 else torch.stack(list(items))


@dataclass(frozen=True)
class _Flat(MultiModalFieldConfig):
    """Item i is the i-th run of `sizes[i]` entries along `dim`."""

    sizes: tuple[int, ...]
    dim: int

    def split(self, data: FieldData) -> list[torch.Tensor]:
        tensor = data if isinstance(data, torch.Tensor) else torch.cat(data, dim=self.dim)
        if tensor.shape[self.dim] != sum(self.sizes):
            raise ValueError(
                f"{tensor.shape[self.dim]} entries along dim {self.dim} cannot be cut into items "
                f"of {sum(self.sizes)} in all"
            )
        return list(torch.split(tensor, list(self.sizes), dim=self.dim))

    def join(self, items: Sequence[torch.Tensor]) -> FieldData:
        shapes = {tuple(item.select(self.dim, 0).shape) for item in items if item.shape[self.dim]}
        if len(shapes) > 1:
            return list(items)
        return items[0] if len(items) == 1 else torch.cat(list(items), dim=self.dim)


@dataclass(frozen=True)
class _Shared(MultiModalFieldConfig):
    """Every one of `batch_size` items has the same data."""

    batch_size: int

    def split(self, data: FieldData) -> list[torch.Tensor]:
        if not isinstance(data, torch.Tensor):
            raise ValueError("a shared field must be one tensor")
        return [data] * self.batch_size

    def join(self, items: Sequence[torch.Tensor]) -> FieldData:
        if any(not torch.equal(items[0], item) for item in items[1:]):
            raise ValueError("items that differ in a shared field cannot be in one batch")
        return items[0]


class MultiModalKwargsItem(Mapping[str, torch.Tensor]):
    """Encoder input of one item: name -> contiguous CPU tensor that the item owns.

    The tensors share no storage with the item's batch neighbours, so caching one item keeps only
    that item's bytes alive.
    """

    __slots__ = ("_fields", "_tensors", "modality", "num_bytes")

    def __init__(
        self,
        modality: str,
        tensors: Mapping[str, torch.Tensor],
        fields: Mapping[str, MultiModalFieldConfig],
    ) -> None:
        self.modality = modality
        self._tensors = {name: _copy(tensor) for name, tensor in tensors.items()}
        self._fields = {name: fields[name] for name in tensors}
        self.num_bytes: int = sum(tensor.nbytes for tensor in self._tensors.values())

    @classmethod
    def from_config(
        cls, tensors: Mapping[str, torch.Tensor], config: Mapping[str, MultiModalFieldConfig]
    ) -> MultiModalKwargsItem:
        """One item from its own tensors, all of the one modality that `config` names."""
        (modality,) = {config[name].modality for name in tensors}
        return cls(modality, tensors, config)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def field(self, name: str) -> MultiModalFieldConfig:
        """Return how the tensor of that name is batched."""
        return self._fields[name]

    def keep_on_cpu(self, name: str) -> bool:
        """Return whether the host reads this tensor, so that it should stay in its memory."""
        return self._fields[name].keep_on_cpu

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}={tuple(value.shape)}" for name, value in self.items())
        return f"MultiModalKwargsItem({self.modality}: {shapes})"


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:  # numpy has no such type.
        return tensor.clone(memory_format=torch.contiguous_format)
    # Not clone(): it wakes torch's whole thread pool for a copy of a megabyte.
    return torch.from_numpy(tensor.numpy().copy(order="C"))


class MultiModalKwargs(Mapping[str, FieldData]):
    """A batch of items as keyword arguments: name -> tensor, or list where the shapes differ.

    Empty while a prompt is laid out from headers alone.
    """

    def __init__(self, items: Mapping[str, Sequence[MultiModalKwargsItem]] | None = None) -> None:
        self._items = {modality: list(group) for modality, group in (items or {}).items() if group}

    @cached_property
    def _data(self) -> dict[str, FieldData]:
        # On first use: a layout reads single items, and batching copies all pixels.
        data: dict[str, FieldData] = {}
        for group in self._items.values():
            data.update(self.reduce(group))
        return data

    @staticmethod
    def build(
        hf_outputs: Mapping[str, FieldData], config: Mapping[str, MultiModalFieldConfig]
    ) -> dict[str, list[MultiModalKwargsItem]]:
        """Cuts the outputs of one HF processor call into items: modality -> items in order.

        Outputs that `config` does not name are left out. Raises ValueError where the outputs of one
        modality do not agree on how many items there are.
        """
        columns: dict[str, dict[str, list[torch.Tensor]]] = {}
        for name, field in config.items():
            if name in hf_outputs:
                columns.setdefault(field.modality, {})[name] = field.split(hf_outputs[name])
        items = {}
        for modality, by_name in columns.items():
            counts = {name: len(parts) for name, parts in by_name.items()}
            if len(set(counts.values())) != 1:
                raise ValueError(f"the HF outputs for {modality!r} disagree on the items: {counts}")
            rows = zip(*by_name.values(), strict=True)
            items[modality] = [
                # A shared storage would keep all neighbours alive, so each item takes a copy.
                MultiModalKwargsItem(modality, dict(zip(by_name, row, strict=True)), config)
                for row in rows
            ]
        return items

    @staticmethod
    def reduce(items: Sequence[MultiModalKwargsItem]) -> dict[str, FieldData]:
        """The inverse of `build`, for items of one modality and the same names from any batches.

        What is for the host only (`is_host_only`) is left out, and may differ.
        """
        if not items:
            return {}
        first = items[0]
        names = [name for name in first if not is_host_only(name)]
        if any(
            item.modality != first.modality
            or {name for name in item if not is_host_only(name)} != set(names)
            for item in items
        ):
            raise ValueError("items of one batch must have the same modality and names")
        return {name: first.field(name).join([item[name] for item in items]) for name in names}

    def get_items(self, modality: str) -> list[MultiModalKwargsItem]:
        """The items of one modality, in order."""
        return self._items.get(modality, [])

    def get_item(self, modality: str, item_idx: int) -> MultiModalKwargsItem:
        """One item of one modality."""
        return self._items[modality][item_idx]

    def __getitem__(self, name: str) -> FieldData:
        return self._data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


def to_tensors(
    outputs: Mapping[str, Any], config: Mapping[str, MultiModalFieldConfig]
) -> dict[str, FieldData]:
    """Convert the HF outputs that `config` names to CPU tensors, floating-point ones to float32."""

    def convert(value: Any) -> torch.Tensor:
        tensor = torch.as_tensor(value).cpu()
        return tensor.to(torch.float32) if tensor.is_floating_point() else tensor

    return {
        name: [convert(part) for part in outputs[name]]
        if isinstance(outputs[name], list | tuple)
        else convert(outputs[name])
        for name in config
        if name in outputs
    }


def are_finite(outputs: Iterable[FieldData]) -> bool:
    """Check that no floating-point tensor holds an infinity or a NaN."""
    parts = (part for data in outputs for part in (data if isinstance(data, list) else [data]))
    # Not torch's function: it wakes the whole thread pool.
    return all(np.isfinite(p.numpy()).all() for p in parts if p.is_floating_point())
