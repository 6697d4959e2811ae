"""One processed item as bytes, and back, in the safetensors format: data, and nothing to execute.

A file of 8 bytes (the header's length), a JSON header, and the tensors' bytes, which any reader of
safetensors understands. What belongs to the item beside its tensors is JSON in the header's
metadata. Written out here, not with the library, because that copies every tensor twice with the
GIL held; here they are written from where they lie.

A sealed item also carries its key and a SHA-256 over all of it, for storage that may rot.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch

from aioengine.processors.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    _Batched,
    _Flat,
    _Shared,
)

__all__ = ["FORMAT_VERSION", "Readable", "dump_item", "item_parts", "load_item"]

Readable: TypeAlias = bytes | bytearray | memoryview

FORMAT_VERSION = 1
"""Of the metadata; a reader refuses every other."""

MAX_HEADER_BYTES = 1 << 24
MAX_TENSORS = 1024
MAX_DIMS = 32
MAX_ELEMENTS = 1 << 48

_METADATA = "__metadata__"
_ITEM, _KEY, _DIGEST = "aioengine", "key", "sha256"

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_KINDS = {_Batched: "batched", _Flat: "flat", _Shared: "shared"}


def dump_item(item: MultiModalKwargsItem, *, key: str | None = None) -> bytes:
    """The item as bytes; sealed under `key`, if one is given. ValueError: see `item_parts`."""
    return b"".join(item_parts(item, key=key))


def item_parts(item: MultiModalKwargsItem, *, key: str | None = None) -> list[Readable]:
    """Yield what `dump_item` returns in pieces: the header, then views of the item's own memory.

    Raises ValueError for a dtype that the format does not have.
    """
    # The widest first, so that each tensor is aligned.
    names = sorted(item, key=lambda name: -item[name].itemsize)
    header: dict[str, Any] = {_METADATA: {_ITEM: json.dumps(_describe(item))}}
    views: list[Readable] = []
    end = 0
    for name in names:
        tensor = item[name]
        if tensor.dtype not in _NAMES or name == _METADATA:
            raise ValueError(f"{name!r} with dtype {tensor.dtype} cannot be written")
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        if tensor.numel():
            views.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
    if key is not None:
        header[_METADATA] |= {_KEY: key, _DIGEST: ""}
        header[_METADATA][_DIGEST] = _digest(header, views)
    return [_encode(header), *views]


def load_item(data: Readable, *, key: str | None = None) -> MultiModalKwargsItem:
    """The item in these bytes, with memory of its own.

    Raises ValueError for anything that `dump_item` would not have written, without a word of the
    content. With `key`, the item must be sealed under it and whole.
    """
    try:
        view = memoryview(data).cast("B")
        header, body = _split(view)
        if key is not None:
            _check_seal(view, header, body, key)
        entries = _entries(header, body.nbytes)
        modality, fields = _read_metadata(header, entries)
        # In the order of the fields, which is the item's own.
        tensors = {name: _tensor(body, *entries[name]) for name in fields}
    except (RecursionError, RuntimeError, TypeError, OverflowError) as error:
        raise ValueError(f"the item is malformed: {type(error).__name__}") from None
    return MultiModalKwargsItem(modality, tensors, fields)


def _describe(item: MultiModalKwargsItem) -> dict[str, Any]:
    fields = {}
    for name in item:
        field = item.field(name)
        # Of the batch that the item came from (its sizes, its count) nothing is kept: joining looks
        # at the items' own shapes.
        dim = {"dim": field.dim} if isinstance(field, _Flat) else {}
        if type(field) not in _KINDS:
            raise ValueError(f"{name!r} is batched in a way that cannot be written")
        if field.modality != item.modality:
            raise ValueError(f"{name!r} belongs to another modality than its item")
        fields[name] = {"kind": _KINDS[type(field)], **dim, "keep_on_cpu": field.keep_on_cpu}
    return {"version": FORMAT_VERSION, "modality": item.modality, "fields": fields}


def _encode(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _digest(header: Mapping[str, Any], views: list[Readable]) -> str:
    """Digest the header, its own digest left empty, and the data."""
    digest = hashlib.sha256(_encode(header))
    for view in views:
        digest.update(view)
    return digest.hexdigest()


def _split(view: memoryview) -> tuple[dict[str, Any], memoryview]:
    _require(view.nbytes >= 8, "it is cut short")
    (length,) = struct.unpack_from("<Q", view)
    _require(length <= min(MAX_HEADER_BYTES, view.nbytes - 8), "its header is cut short")
    header = _mapping(json.loads(bytes(view[8 : 8 + length]), object_pairs_hook=_without_doubles))
    return header, view[8 + length :]


def _check_seal(view: memoryview, header: Mapping[str, Any], body: memoryview, key: str) -> None:
    metadata = _mapping(header.get(_METADATA))
    _require(metadata.get(_KEY) == key, "it is another item")
    # To the byte as it is written: what a parser forgives is damage too.
    _require(_encode(header) == bytes(view[: view.nbytes - body.nbytes]), "its header is damaged")
    blank = {**header, _METADATA: {**metadata, _DIGEST: ""}}
    _require(metadata.get(_DIGEST) == _digest(blank, [body]), "it is damaged")


def _entries(
    header: Mapping[str, Any], num_bytes: int
) -> dict[str, tuple[torch.dtype, list[int], int]]:
    """Name -> dtype, shape and offset of each tensor; together they fill the data exactly."""
    _require(len(header) <= MAX_TENSORS, "it has too many tensors")
    entries = {}
    ends = [(0, 0), (num_bytes, num_bytes)]
    for name, entry in header.items():
        if name == _METADATA:
            continue
        is_described = _mapping(entry).keys() == {"dtype", "shape", "data_offsets"}
        _require(is_described, "a tensor is not described")
        kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        _require(isinstance(kind, str) and kind in _DTYPES, "a dtype is unknown")
        _require(_are_sizes(shape) and len(shape) <= MAX_DIMS, "a shape is malformed")
        _require(_are_sizes(offsets) and len(offsets) == 2, "an offset is malformed")
        # Sizes of 0 do not count here: strides are made of the others.
        _require(math.prod(max(size, 1) for size in shape) <= MAX_ELEMENTS, "a shape is too large")
        size = math.prod(shape) * _DTYPES[kind].itemsize
        _require(offsets[1] - offsets[0] == size, "a tensor's size is wrong")
        ends.append((offsets[0], offsets[1]))
        entries[name] = _DTYPES[kind], shape, offsets[0]
    ends.sort()
    _require(all(one[1] == other[0] for one, other in pairwise(ends)), "it is cut short or padded")
    return entries


def _read_metadata(
    header: Mapping[str, Any], entries: Mapping[str, tuple[torch.dtype, list[int], int]]
) -> tuple[str, dict[str, MultiModalFieldConfig]]:
    text = _mapping(header.get(_METADATA)).get(_ITEM)
    _require(isinstance(text, str), "it is no item")
    item = _mapping(json.loads(str(text), object_pairs_hook=_without_doubles))
    _require(item.keys() == {"version", "modality", "fields"}, "it is no item")
    _require(item["version"] == FORMAT_VERSION, "it has another version")
    modality, described = item["modality"], _mapping(item["fields"])
    _require(isinstance(modality, str), "it is no item")
    _require(described.keys() == entries.keys(), "its fields are not its tensors")
    return modality, {
        name: _field(modality, _mapping(field), entries[name][1])
        for name, field in described.items()
    }


def _field(modality: str, described: dict[str, Any], shape: list[int]) -> MultiModalFieldConfig:
    kind, keep_on_cpu = described.get("kind"), described.get("keep_on_cpu") is True
    _require(isinstance(described.get("keep_on_cpu"), bool), "a field is malformed")
    if kind == "flat":
        dim: Any = described.get("dim")
        _require(type(dim) is int and -len(shape) <= dim < len(shape), "a dim is out of range")
        return _Flat(modality, keep_on_cpu, (shape[dim],), dim)
    if kind == "batched":
        return _Batched(modality, keep_on_cpu)
    _require(kind == "shared", "a field's kind is unknown")
    return _Shared(modality, keep_on_cpu, batch_size=1)


def _tensor(body: memoryview, dtype: torch.dtype, shape: list[int], offset: int) -> torch.Tensor:
    """A view of the bytes, or a copy where no tensor may look at them."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    array = np.frombuffer(body, np.uint8, num_bytes, offset)
    if dtype == torch.bool:
        _require(int(array.max()) <= 1, "a bool is neither 0 nor 1")
    if body.readonly or array.ctypes.data % dtype.itemsize:
        array = array.copy()
    return torch.from_numpy(array).view(dtype).reshape(shape)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size <= MAX_ELEMENTS for size in value
    )


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    _require(len(found) == len(pairs), "a name comes twice")
    return found


def _mapping(value: Any) -> dict[str, Any]:
    _require(isinstance(value, dict), "a mapping is missing")
    mapping: dict[str, Any] = value
    return mapping


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(f"the item is malformed: {reason}")
