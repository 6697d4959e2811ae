"""Running a model's media encoder, whatever shape transformers returns its rows in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aioengine.errors import EngineError
from aioengine.kernels.transfer import to_device
from aioengine.models.interfaces import MultiModalEmbeddings
from aioengine.processors.inputs import MultiModalKwargs, MultiModalKwargsItem, is_host_only

__all__ = ["encode_batch", "encode_items", "passed_through", "rows_by_item"]

# The keyword that carries a modality's samples, and transformers' method that encodes them.
_SAMPLES = {
    "pixel_values": "get_image_features",
    "pixel_values_videos": "get_video_features",
    "input_features": "get_audio_features",
}
_EMBEDS = ("image_embeds", "video_embeds", "audio_embeds")


def passed_through(
    kwargs: Mapping[str, object], dtype: torch.dtype, device: torch.device
) -> list[Tensor] | None:
    """Rows that were given as such: a [n, rows, hidden] tensor or a list of [rows, hidden]."""
    for name in _EMBEDS:
        given = kwargs.get(name)
        if given is not None:
            assert isinstance(given, Tensor | list | tuple)
            return [rows.to(device=device, dtype=dtype) for rows in given]
    return None


def encode_batch(
    model: Any, kwargs: Mapping[str, object], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Rows [rows, hidden] of each item in a batch, through transformers' `get_*_features`.

    Floating samples are cast to `dtype`. Raises EngineError where the model has no such method.
    """
    name = next((name for name in _SAMPLES if kwargs.get(name) is not None), None)
    if name is None:
        raise EngineError(f"no media among the encoder's arguments: {', '.join(kwargs) or 'none'}")
    encoder = _find_method(model, _SAMPLES[name])
    inputs = {key: _place(value, dtype, device) for key, value in kwargs.items()}
    samples = inputs[name]
    assert isinstance(samples, Tensor)
    rows = rows_by_item(encoder(**inputs), samples.shape[0])
    if rows is None:
        # The rows came without saying which are whose: ask item by item.
        rows = []
        for i in range(samples.shape[0]):
            alone = {key: _take(value, i, samples.shape[0]) for key, value in inputs.items()}
            rows += rows_by_item(encoder(**alone), 1) or []
    return [item.to(dtype) for item in rows]


def _find_method(model: Any, name: str) -> Callable[..., Any]:
    # Some classes have it on the inner model only.
    for owner in (model, getattr(model, "model", None)):
        method: Callable[..., Any] | None = getattr(owner, name, None)
        if method is not None:
            return method
    raise EngineError(f"{type(model).__name__} has no {name}")


def _place(value: object, dtype: torch.dtype, device: torch.device) -> object:
    if not isinstance(value, Tensor):
        return value
    floating = value.dtype.is_floating_point
    return to_device(value, torch.device(device)).to(dtype if floating else value.dtype)


def _take(value: object, index: int, count: int) -> object:
    if isinstance(value, Tensor) and value.dim() and value.shape[0] == count:
        return value[index : index + 1]
    return value


def rows_by_item(output: Any, num_items: int) -> list[Tensor] | None:
    """One 2-D tensor per item from anything an encoder returns; None where it cannot be told.

    `output`: a tensor, a list or tuple of tensors, or transformers' output object, whose
    `pooler_output` (else `last_hidden_state`) holds either. A single item owns all there is.
    """
    if not isinstance(output, Tensor | list | tuple):
        pooled = getattr(output, "pooler_output", None)
        output = output.last_hidden_state if pooled is None else pooled
    if isinstance(output, Tensor):
        parts = list(output) if output.dim() > 2 else [output]
    else:
        parts = list(output)
    flat = [part.reshape(-1, part.shape[-1]) for part in parts]
    if len(flat) == num_items:
        return flat
    return [torch.cat(flat)] if num_items == 1 and flat else None


def _batch(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """One batch of items as keyword arguments; each field says how, where they say it."""
    made = [item for item in items if isinstance(item, MultiModalKwargsItem)]
    if len(made) == len(items):
        return dict(MultiModalKwargs.reduce(made))
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def encode_items(
    embed_multimodal: Callable[..., MultiModalEmbeddings], items: Sequence[Mapping[str, Tensor]]
) -> list[Tensor]:
    """Rows of each item; items whose tensors agree in shape and dtype share one call."""
    batches: dict[tuple[object, ...], list[int]] = {}
    for i, item in enumerate(items):
        named = sorted((name, t) for name, t in item.items() if not is_host_only(name))
        shape = tuple((name, t.shape, t.dtype) for name, t in named)
        batches.setdefault(shape, []).append(i)
    rows: dict[int, Tensor] = {}
    for members in batches.values():
        stacked = _batch([items[i] for i in members])
        found = rows_by_item(embed_multimodal(**stacked), len(members))
        if found is None:
            raise EngineError(f"embed_multimodal gave no rows for each of {len(members)} items")
        rows.update(zip(members, found, strict=True))
    return [rows[i] for i in range(len(items))]
