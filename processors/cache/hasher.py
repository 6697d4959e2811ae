"""Identity: what makes two media items the same, as full-width SHA-256 digests.

Every value is framed by a tag and its length, so the hashed stream can be decoded in one way only:
no two different values, and no value and its parts, hash alike by construction.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from aioengine.errors import InvalidRequestError

__all__ = ["ContentHasher", "digest_options", "is_dense", "item_key"]

_DOMAIN = "aioengine item 1"


class ContentHasher:
    """Feeds tagged, length-framed values into one SHA-256.

    Large buffers are hashed where they lie, without a copy; hashlib lets other threads run
    meanwhile.
    """

    def __init__(self, domain: str, *values: Any) -> None:
        self._hash = hashlib.sha256()
        self._frame("domain", domain.encode())
        for value in values:
            self.update(value)

    def _frame(self, tag: str, data: bytes | memoryview) -> None:
        self.begin(tag, memoryview(data).nbytes)
        self._hash.update(data)

    def begin(self, tag: str, num_bytes: int) -> None:
        """Opens a frame of exactly `num_bytes`, to be filled by calls of `fill`."""
        self._hash.update(struct.pack("<B", len(tag)) + tag.encode() + struct.pack("<Q", num_bytes))

    def fill(self, data: bytes | memoryview) -> None:
        """The next bytes of the frame that `begin` opened."""
        self._hash.update(data)

    def update(self, value: Any, parameter: str = "value") -> None:
        """Adds one value: None, bool, int, float, str, bytes, array, tensor, list, tuple, mapping.

        Anything else raises InvalidRequestError that names `parameter`: an object is never pickled
        or rendered to text to be hashed.
        """
        if isinstance(value, Mapping):
            self._update_mapping(value, parameter)
        elif isinstance(value, list | tuple):
            self._frame("list", struct.pack("<Q", len(value)))
            for index, element in enumerate(value):
                self.update(element, f"{parameter}[{index}]")
        elif isinstance(value, np.ndarray | torch.Tensor):
            self._update_array(value, parameter)
        else:
            self._frame(*_leaf(value, parameter))

    def _update_mapping(self, value: Mapping[Any, Any], parameter: str) -> None:
        self._frame("map", struct.pack("<Q", len(value)))
        if any(not isinstance(key, str) for key in value):
            raise InvalidRequestError(f"{parameter} must have text keys", parameter=parameter)
        for key in sorted(value):
            self._frame("key", key.encode("utf-8", "surrogatepass"))
            self.update(value[key], f"{parameter}[{key!r:.40}]")

    def _update_array(self, value: np.ndarray[Any, Any] | torch.Tensor, parameter: str) -> None:
        if isinstance(value, torch.Tensor):
            if not is_dense(value):
                raise InvalidRequestError(f"{parameter} must be dense", parameter=parameter)
            dtype = str(value.dtype).removeprefix("torch.")
            dense = value.detach().cpu().contiguous()
            # numpy has no bfloat16: the same bytes under an integer type, the name kept apart.
            array = dense.flatten().view(torch.uint8).numpy()
        else:
            if value.dtype.hasobject:
                raise InvalidRequestError(f"{parameter} must hold numbers", parameter=parameter)
            is_void = value.dtype.kind == "V"
            dtype = value.dtype.str.lstrip("<=|") if is_void else value.dtype.name
            if not value.dtype.isnative:  # the same bytes, but not the same numbers
                dtype = f"swapped {dtype}"
            array = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        self._frame("dtype", dtype.encode())
        self._frame("shape", struct.pack(f"<{value.ndim}Q", *value.shape))
        self._frame("data", array.data)

    def digest(self) -> bytes:
        """The 32 bytes."""
        return self._hash.digest()

    def hexdigest(self) -> str:
        """The same as 64 hexadecimal characters."""
        return self._hash.hexdigest()


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's numbers lie in memory one by one: not sparse, nested, quantised or
    meta.

    A sparse tensor's indices are not checked by torch before they are used: never densify one.
    """
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and not tensor.is_meta and not tensor.is_quantized


def _leaf(value: object, parameter: str) -> tuple[str, bytes | memoryview]:
    if value is None:
        return "none", b""
    if isinstance(value, bool | np.bool_):
        return "bool", b"\1" if value else b"\0"
    if isinstance(value, int | np.integer):
        return "int", str(int(value)).encode()
    if isinstance(value, float | np.floating):
        number = float(value)
        return "float", b"nan" if math.isnan(number) else struct.pack("<d", number)
    if isinstance(value, str):
        return "str", value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes | bytearray | memoryview):
        return "bytes", memoryview(value).cast("B")
    raise InvalidRequestError(
        f"{parameter} cannot be part of a cache key: {type(value).__name__} is not a number, text, "
        "bytes, array, list or mapping of these",
        parameter=parameter,
        value=type(value).__name__,
    )


def digest_options(options: Mapping[str, Any]) -> bytes:
    """The 32 bytes for the processor options of a request, for `item_key`.

    Raises InvalidRequestError for values that no key can be made of.
    """
    hasher = ContentHasher("options")
    hasher.update(options, "mm_processor_kwargs")
    return hasher.digest()


def item_key(
    *,
    model_id: str,
    modality: str,
    options: bytes,
    identity: bytes | Sequence[Any] | None = None,
    cache_salt: str | None = None,
    uuid: str | None = None,
) -> str:
    """The key under which one media item's features are shared, as 64 hexadecimal characters.

    `options`: of `digest_options`; `identity`: what a media source's `identity()` returns. A
    caller's `uuid` replaces it, in a namespace of its own: it can never stand for content, for
    another modality, for another model, for other processor options or for another tenant's
    (`cache_salt`) item of the same name.
    """
    hasher = ContentHasher(_DOMAIN)
    hasher.update(cache_salt, "cache_salt")
    hasher.update(model_id)
    hasher.update(modality)
    hasher.update(options)
    hasher.update({"uuid": uuid} if uuid is not None else {"content": identity})
    return hasher.hexdigest()
