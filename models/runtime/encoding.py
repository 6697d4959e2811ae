"""Running a model's media encoder, whatever shape transformers returns its rows in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from aioengine.errors import EngineError
from aioengine.kernels.transfer import to_device
from aioengine.models.runtime.interfaces import MultiModalEmbeddings
from aioengine.processors.inputs import MultiModalKwargs, MultiModalKwargsItem, is_host_only

__all__ = [
    "batch_items",
    "encode_batch",
    "encode_items",
    "frames_as_images",
    "parts_of",
    "passed_through",
    "place",
    "rows_by_item",
]

# The keyword that carries a modality's samples, and transformers' method that encodes them.
_SAMPLES = {
    "pixel_values": "get_image_features",
    "pixel_values_images": "get_image_features",
    "pixel_values_videos": "get_video_features",
    "input_features": "get_audio_features",
}
# What encoders read as numbers. It stays on the host: each reading would wait for the device.
_NUMBERS = ("image_sizes", "batch_num_images")
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
    model: Any,
    kwargs: Mapping[str, object],
    dtype: torch.dtype,
    device: torch.device,
    ready: Mapping[str, object] = MappingProxyType({}),
) -> list[Tensor]:
    """Rows [rows, hidden] of a batch through transformers' `get_*_features`, in parts.

    A part is what the encoder gives as one: an item, or one of its tiles, or all there is.
    Floating samples are cast to `dtype`; `ready` arguments are passed as they are, before those of
    `kwargs`. Raises EngineError where the model has no such method.
    """
    name = next((name for name in _SAMPLES if kwargs.get(name) is not None), None)
    if name is None:
        raise EngineError(f"no media among the encoder's arguments: {', '.join(kwargs) or 'none'}")
    ready = {**{key: kwargs[key] for key in _NUMBERS if key in kwargs}, **ready}
    others = {key: value for key, value in kwargs.items() if key not in ready}
    inputs = {key: place(value, dtype, device) for key, value in others.items()} | ready
    encoder = _find_method(model, _SAMPLES[name])
    if encoder is None and name == "pixel_values_videos":
        # A model without a way of its own takes frames as it takes images, or a video as one.
        encoder = _find_method(model, "get_image_features")
        if name in signature(model.forward).parameters:
            inputs["pixel_values"] = inputs.pop(name)
        else:
            inputs = frames_as_images(inputs)
    if encoder is None:
        raise EngineError(f"{type(model).__name__} has no {_SAMPLES[name]}")
    output = encoder(**inputs)
    deeper = getattr(output, "deepstack_features", None) or ()
    if deeper and isinstance(deeper[0], tuple) and isinstance(deeper[0][0], int):
        return _parts_by_layer(deeper, dtype)
    parts = [part.to(dtype) for part in parts_of(output)]
    # What goes to further layers travels beside what goes to the first.
    for layer in deeper:
        # transformers 5.17 gives the rows of all parts as one.
        split: Any = layer
        if isinstance(layer, Tensor):
            split = torch.split(layer, [len(part) for part in parts])
        parts = [torch.cat([p, q.to(dtype)], -1) for p, q in zip(parts, split, strict=True)]
    return parts


def _parts_by_layer(
    features: Sequence[tuple[int, Sequence[Tensor]]], dtype: torch.dtype
) -> list[Tensor]:
    """One 2-D tensor per part, of (layer, its parts): zeros, which are embeddings, then what each
    layer is given, in the layers' order. Of two for one layer the last counts."""
    _, layers = zip(*sorted(dict(features).items()), strict=True)
    joined = (
        torch.cat([torch.zeros_like(part[0]), *part], -1) for part in zip(*layers, strict=True)
    )
    return [each.to(dtype) for each in joined]


def frames_as_images(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments, where each video's frames are given as images."""
    frames = inputs["pixel_values_videos"]
    images = frames.flatten(0, 1) if frames.dim() > 4 else frames
    others = {name: value for name, value in inputs.items() if name != "pixel_values_videos"}
    return {**others, "pixel_values": images}


def _find_method(model: Any, name: str) -> Callable[..., Any] | None:
    # Some classes have it on the inner model only.
    for owner in (model, getattr(model, "model", None)):
        method: Callable[..., Any] | None = getattr(owner, name, None)
        if method is not None:
            return method
    return None


def place(value: object, dtype: torch.dtype, device: torch.device) -> object:
    """A tensor on `device`, in `dtype` if it is floating; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    floating = value.dtype.is_floating_point
    return to_device(value, torch.device(device)).to(dtype if floating else value.dtype)


def parts_of(output: Any) -> list[Tensor]:
    """2-D tensors from anything an encoder returns.

    `output`: a tensor, a list or tuple of tensors, or transformers' output object, whose
    `pooler_output` (else `last_hidden_state`) holds either.
    """
    if not isinstance(output, Tensor | list | tuple):
        pooled = getattr(output, "pooler_output", None)
        output = output.last_hidden_state if pooled is None else pooled
    if isinstance(output, Tensor):
        parts = list(output) if output.dim() > 2 else [output]
    else:
        parts = list(output)
    return [part.reshape(-1, part.shape[-1]) for part in parts]


def rows_by_item(parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor] | None:
    """One 2-D tensor per item, of parts; None where it is unknown whose they are.

    `sizes`: samples of each item, a tile being one. A single item owns all there is.
    """
    if len(sizes) == 1 and parts:
        return [torch.cat(list(parts))] if len(parts) > 1 else [parts[0]]
    if len(parts) == len(sizes):
        return list(parts)
    if len(parts) != sum(sizes):
        return None
    ends = list(accumulate(sizes))
    return [torch.cat(list(parts[end - size : end])) for end, size in zip(ends, sizes, strict=True)]


def batch_items(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """One batch of items as keyword arguments; each field says how, where they say it."""
    made = [item for item in items if isinstance(item, MultiModalKwargsItem)]
    if len(made) == len(items):
        return dict(MultiModalKwargs.reduce(made))
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def encode_items(
    embed_multimodal: Callable[..., MultiModalEmbeddings], items: Sequence[Mapping[str, Tensor]]
) -> list[Tensor]:
    """Rows of each item; items whose tensors agree in shape and dtype share one call.

    Where a call does not tell whose its rows are, its items are encoded one by one.
    """
    batches: dict[tuple[object, ...], list[int]] = {}
    for i, item in enumerate(items):
        named = sorted((name, t) for name, t in item.items() if not is_host_only(name))
        shape = tuple((name, t.shape, t.dtype) for name, t in named)
        batches.setdefault(shape, []).append(i)
    rows: dict[int, Tensor] = {}
    for members in batches.values():
        found = _encode_together(embed_multimodal, [items[i] for i in members])
        rows.update(zip(members, found, strict=True))
    return [rows[i] for i in range(len(items))]


def _encode_together(
    embed_multimodal: Callable[..., MultiModalEmbeddings], items: Sequence[Mapping[str, Tensor]]
) -> list[Tensor]:
    stacked = batch_items(items)
    found = rows_by_item(parts_of(embed_multimodal(**stacked)), _sizes(items, stacked))
    if found is None:
        found = [row for item in items for row in _encode_alone(embed_multimodal, item)]
    if len(found) != len(items):
        raise EngineError(f"embed_multimodal gave no rows for each of {len(items)} items")
    return found


def _encode_alone(
    embed_multimodal: Callable[..., MultiModalEmbeddings], item: Mapping[str, Tensor]
) -> list[Tensor]:
    return rows_by_item(parts_of(embed_multimodal(**batch_items([item]))), [1]) or []


def _sizes(items: Sequence[Mapping[str, Tensor]], stacked: Mapping[str, Any]) -> list[int]:
    """Return how many samples of the batch each item has; those that were stacked have one."""
    name = next((name for name in _SAMPLES if name in stacked), None)
    if name is None or not isinstance(stacked[name], Tensor):
        return [1] * len(items)
    is_joined = stacked[name].dim() == items[0][name].dim()
    return [item[name].shape[0] if is_joined else 1 for item in items]
