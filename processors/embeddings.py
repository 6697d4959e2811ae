"""Precomputed encoder output in the place of media, and the items of a prompt from its contents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from aioengine.errors import MediaError
from aioengine.processors.cache.hasher import is_dense
from aioengine.processors.inputs import MultiModalFieldConfig, MultiModalKwargsItem
from aioengine.processors.items import (
    PROCESSOR_ITEMS,
    MixedItems,
    ModalityDataItems,
    MultiModalDataItems,
)
from aioengine.types import Embeddings

__all__ = ["EmbeddingItems", "check_array", "check_rows", "make_items", "repeat_token"]

MAX_EXTRA_NUMBERS = 1 << 20
"""In one of an item's extra fields."""


class EmbeddingItems(ModalityDataItems[torch.Tensor]):
    """Precomputed encoder output: float32 CPU tensors `[num_rows, hidden_size]`, checked.

    Raises MediaError for what is not dense, finite, floating, two-dimensional and `hidden_size`
    wide, or has more than `max_rows`. `parameters` names the items in the caller's words.
    """

    def __init__(
        self,
        embeddings: Sequence[Embeddings],
        *,
        modality: str,
        hidden_size: int,
        parameters: Sequence[str] | None = None,
        max_rows: int | None = None,
    ) -> None:
        names = parameters or [f"{modality}s[{index}]" for index in range(len(embeddings))]
        rows = [
            check_rows(item.rows, hidden_size, name, max_rows=max_rows)
            for item, name in zip(embeddings, names, strict=True)
        ]
        super().__init__(rows, modality)
        self.extra = [
            self._checked_extras(item.extra, name)
            for item, name in zip(embeddings, names, strict=True)
        ]

    def _checked_extras(self, extra: Mapping[str, Any], name: str) -> dict[str, torch.Tensor]:
        for taken in (f"{self.modality}_embeds", "input_ids"):
            if taken in extra:
                raise _wrong(name, f"has an extra by a name of the engine's own, {taken}")
        return {key: _checked_extra(value, f"{name}.{key:.40}") for key, value in extra.items()}

    def get_feature_size(self, item_idx: int) -> int:
        """Return how many encoder rows the item brings."""
        return int(self.get(item_idx).shape[0])

    def get_processor_data(self) -> Mapping[str, object]:
        return {}

    def to_kwargs_items(self) -> list[MultiModalKwargsItem]:
        """The items as the encoder takes them: the rows as `<modality>_embeds`, plus the extras."""
        items = []
        for rows, extra in zip(self._items, self.extra, strict=True):
            tensors = {f"{self.modality}_embeds": rows, **extra}
            config = {
                name: MultiModalFieldConfig.batched(self.modality, keep_on_cpu=name in extra)
                for name in tensors
            }
            items.append(MultiModalKwargsItem.from_config(tensors, config))
        return items


def make_items(
    entries: Iterable[tuple[str, str, Any]], get_hidden_size: Callable[[], int]
) -> MultiModalDataItems:
    """Media of one prompt from (modality, parameter, content), each modality in its order.

    A content is a header, a decoded item or `Embeddings`; `parameter` names it in the caller's
    words. Raises MediaError.
    """
    groups: dict[str, list[tuple[str, Any]]] = {}
    for modality, parameter, content in entries:
        groups.setdefault(modality, []).append((parameter, content))
    return MultiModalDataItems(
        {
            modality: _modality_items(modality, group, get_hidden_size)
            for modality, group in groups.items()
        }
    )


def _modality_items(
    modality: str, group: list[tuple[str, Any]], get_hidden_size: Callable[[], int]
) -> ModalityDataItems[Any]:
    names, contents = [name for name, _ in group], [content for _, content in group]
    are_embeddings = [isinstance(content, Embeddings) for content in contents]
    if not any(are_embeddings):
        return PROCESSOR_ITEMS[modality](contents)
    if all(are_embeddings):
        return EmbeddingItems(
            contents, modality=modality, hidden_size=get_hidden_size(), parameters=names
        )
    parts = []
    for is_embedding in (False, True):
        places = [index for index, each in enumerate(are_embeddings) if each is is_embedding]
        chosen = [group[index] for index in places]
        parts.append((_modality_items(modality, chosen, get_hidden_size), places))
    return MixedItems(parts, modality)


def check_rows(
    value: Any,
    hidden_size: int,
    parameter: str,
    *,
    max_rows: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Rows `[rows, hidden_size]` on the CPU in `dtype`, finite in it too.

    Raises MediaError for anything but such a dense array or tensor of floating-point numbers.
    """
    check_array(value, parameter)
    # Before any number is looked at: strides may repeat a few of them for ever.
    shape = tuple(value.shape)
    if len(shape) != 2 or shape[0] == 0 or shape[1] != hidden_size:
        raise _wrong(parameter, f"must have the shape (rows, {hidden_size}), not {shape}", shape)
    if max_rows is not None and shape[0] > max_rows:
        raise _wrong(parameter, f"has {shape[0]} rows, more than max_model_len ({max_rows})", shape)
    rows = _to_tensor(value, parameter)
    if not rows.is_floating_point():
        kind = str(rows.dtype)
        raise _wrong(parameter, f"must be floating point, not {kind}", kind)
    rows = rows.to(dtype)
    _check_finite(rows, parameter)
    return rows


def _checked_extra(value: Any, parameter: str) -> torch.Tensor:
    if isinstance(value, bool | int | float | list | tuple):
        try:
            value = torch.tensor(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise _wrong(parameter, "must be a tensor or nested lists of numbers") from None
    check_array(value, parameter)
    if math.prod(value.shape) > MAX_EXTRA_NUMBERS:
        raise _wrong(parameter, f"has more than {MAX_EXTRA_NUMBERS} numbers")
    tensor = _to_tensor(value, parameter)
    if tensor.is_floating_point():
        _check_finite(tensor, parameter)
    return tensor


def check_array(value: Any, parameter: str) -> None:
    if not isinstance(value, torch.Tensor | np.ndarray):
        kind = type(value).__name__
        raise _wrong(parameter, f"must be a torch tensor or a numpy array, not {kind}", kind)
    if isinstance(value, torch.Tensor) and not is_dense(value):
        raise _wrong(parameter, "must be a dense tensor")
    if isinstance(value, np.ndarray) and value.dtype.kind not in "fiub":
        raise _wrong(parameter, f"must hold numbers, not dtype {value.dtype!s:.40}")


def _to_tensor(value: Any, parameter: str) -> torch.Tensor:
    """The same numbers on the CPU, as a type with which torch can reckon."""
    try:
        if isinstance(value, torch.Tensor):
            found = value.detach().cpu().resolve_conj().resolve_neg()
            is_small = found.is_floating_point() and found.itemsize == 1
            return found.float() if is_small else found
        dtype = np.dtype(np.float64) if value.itemsize > 8 else value.dtype.newbyteorder("=")
        with np.errstate(over="ignore"):  # what became infinite is refused
            # Of memory that may not be written to, torch would warn.
            return torch.from_numpy(value.astype(dtype, order="C", copy=not value.flags.writeable))
    except (TypeError, ValueError, RuntimeError):
        raise _wrong(parameter, f"must hold numbers, not dtype {value.dtype!s:.40}") from None


def _check_finite(tensor: torch.Tensor, parameter: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise _wrong(parameter, "must be finite everywhere")


def _wrong(parameter: str, reason: str, value: object = None) -> MediaError:
    return MediaError(f"{parameter} {reason}", parameter=parameter, value=value)


def repeat_token(
    mm_items: MultiModalDataItems, modality: str, token_id: int, count: Callable[[int], int]
) -> Callable[[int], list[int]]:
    """A replacement for items of a modality: `token_id` once for each of their encoder rows.

    `count`: how many rows the item at an index takes. Of precomputed rows there are as many as were
    given.
    """

    def repeated(item_idx: int) -> list[int]:
        items = mm_items[modality]
        if isinstance(items, EmbeddingItems):
            return [token_id] * items.get_feature_size(item_idx)
        return [token_id] * count(item_idx)

    return repeated
