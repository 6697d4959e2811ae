"""A GGUF file's header: metadata, and where its tensors lie.

The format is llama.cpp's (ggml/docs/gguf.md), little endian, of version 2 or 3. A file is hostile
until it is read: every count and length is checked against the file's size before it is believed.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aioengine.errors import ModelLoadError
from aioengine.processors.checkpoint_errors import shown

__all__ = ["GgufFile", "TensorPlace"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_DIMS = 4
_FORMATS = ("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", None, None, "<Q", "<q", "<d")
"""struct's formats of metadata, by their number; 8 and 9 are strings and arrays."""
_STRING, _ARRAY = 8, 9
_FEW = 1 << 16
"""Numbers of an array that is read; nothing that a model's shape depends on is longer."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor in the file. `shape`: as torch has it; `kind`: ggml's number of its type."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class _Reader:
    """Values one after the other, none beyond the end."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.at = 0

    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self.memory) - self.at:
            raise ValueError("it ends too early")
        self.at += count
        return self.memory[self.at - count : self.at]

    def number(self, form: str = "<Q") -> Any:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return value

    def string(self) -> str:
        return self.take(self.number()).decode()

    def value(self, kind: int, *, is_wanted: bool) -> Any:
        """A value; of arrays that are not wanted and of long ones the length."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(is_wanted=is_wanted)
        return self.number(self._form(kind))

    def _array(self, *, is_wanted: bool) -> Any:
        kind, count = self.number("<I"), self.number()
        if kind == _STRING:
            if is_wanted:
                return [self.string() for _ in range(self.bounded(count))]
            for _ in range(self.bounded(count)):
                self._skip()
            return count
        form = self._form(kind)
        size = struct.calcsize(form)
        content = self.take(count * size)
        if count > _FEW and not is_wanted:
            return count
        return list(struct.unpack(f"<{count}{form[1]}", content))

    def bounded(self, count: int) -> int:
        """A count of things that take eight bytes at least."""
        if count > (len(self.memory) - self.at) // 8:
            raise ValueError("it ends too early")
        return count

    def _skip(self) -> None:
        length = self.number()
        if length > len(self.memory) - self.at:
            raise ValueError("it ends too early")
        self.at += length

    @staticmethod
    def _form(kind: int) -> str:
        form = _FORMATS[kind] if 0 <= kind < len(_FORMATS) else None
        if form is None:
            raise ValueError(f"there is no value of the type {kind}")
        return form


class GgufFile:
    """One file, mapped. Raises ModelLoadError where it is damaged or no such file.

    `strings`: keys whose arrays of strings are read; of others `metadata` has the length.
    """

    def __init__(self, path: str | os.PathLike[str], strings: Container[str] = ()) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            reader = _Reader(self._memory)
            self.metadata: Mapping[str, Any] = self._read_metadata(reader, strings)
            self.tensors: Mapping[str, TensorPlace] = self._read_places(reader)
        except (ValueError, struct.error, OverflowError) as error:
            raise ModelLoadError(
                f"{self.path.name!r} is not a whole GGUF file ({error!s:.120}): fetch it again"
            ) from error
        except OSError as error:
            name = shown(self.path)
            raise ModelLoadError(f"{name!r} cannot be read: {error.strerror}") from error

    def _read_metadata(self, reader: _Reader, strings: Container[str]) -> dict[str, Any]:
        if reader.take(4) != _MAGIC:
            raise ValueError("it does not begin as one")
        version = reader.number("<I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; 2 and 3 are read")
        self._num_tensors = reader.number()
        found: dict[str, Any] = {}
        for _ in range(reader.bounded(reader.number())):
            key = reader.string()
            found[key] = reader.value(reader.number("<I"), is_wanted=key in strings)
        return found

    def _read_places(self, reader: _Reader) -> dict[str, TensorPlace]:
        found: dict[str, TensorPlace] = {}
        for _ in range(reader.bounded(self._num_tensors)):
            name, num_dims = reader.string(), reader.number("<I")
            if num_dims > _MAX_DIMS or name in found:
                raise ValueError(f"the tensor {name[:80]!r} is not described")
            shape = tuple(reader.number() for _ in range(num_dims))[::-1]
            found[name] = TensorPlace(shape, reader.number("<I"), reader.number())
        step = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(step, int) or not 0 < step <= 1 << 20:
            raise ValueError("its alignment is none")
        self._start = -(-reader.at // step) * step
        return found

    def bytes_of(self, name: str, unit: int, size: int) -> Tensor:
        """A tensor's blocks [numbers / unit, size], uint8, a view of the file.

        `unit`, `size`: numbers and bytes of a block. Raises ValueError for what does not fit.
        """
        place = self.tensors[name]
        count, width = prod(place.shape), place.shape[-1] if place.shape else 1
        start, num_bytes = self._start + place.offset, count // unit * size
        if width % unit or not count or start + num_bytes > len(self._memory):
            raise ValueError(f"the tensor {name[:80]!r} does not lie in the file")
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=start)
        return flat.view(-1, size)
