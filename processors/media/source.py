"""Common parts of images, audio and videos before they are decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, ParamSpec, TypeAlias, TypeVar

import numpy as np
import torch

from aioengine.config import MediaConfig
from aioengine.errors import MediaError
from aioengine.processors.cache.hasher import is_dense
from aioengine.processors.media.pixels import Array

__all__ = ["Encoded", "MediaSource", "keep_bytes", "to_numpy"]

HeaderT = TypeVar("HeaderT")
DecodedT = TypeVar("DecodedT")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

Encoded: TypeAlias = bytes | bytearray | memoryview


class MediaSource(ABC, Generic[HeaderT, DecodedT]):
    """One media item of a request, not decoded yet.

    Every failure is a MediaError that names the parameter and shows nothing of the data.
    """

    may_change: ClassVar[bool] = False
    """Whether it is an object of the caller's, of which the engine holds no copy."""

    _noun: ClassVar[str]
    _own_errors: ClassVar[tuple[type[Exception], ...]] = ()
    """What our own code raises on bad data: the text is safe to show, so is a `value`."""

    _data: bytes | memoryview | Array | None = None

    def __init__(self, config: MediaConfig, parameter: str) -> None:
        self._config = config
        self._parameter = parameter
        self._header: HeaderT | None = None

    @staticmethod
    def not_accepted(parameter: str, accepted: str, kind: str) -> MediaError:
        """The error for an item of another kind than those that are accepted."""
        text = f"{parameter} must be {accepted}, not {kind}"
        return MediaError(text, parameter=parameter, value=kind)

    @property
    def undecoded(self) -> bytes | memoryview | Array | None:
        """The bytes of its file, or its pixels `[height, width, channels]`; not to be changed.

        None for what only `decode` can tell of.
        """
        return self._data

    def header(self) -> HeaderT:
        """Read what the layout needs, without decoding where the format tells; checked against
        limits.

        The decoded item is exactly as the header says.
        """
        if self._header is None:
            self._header = self._read_header()
        return self._header

    @abstractmethod
    def identity(self) -> bytes:
        """32 bytes that are equal for equal items only; `item_key` hashes them."""

    @abstractmethod
    def decode(self) -> DecodedT:
        """The decoded item."""

    def verify(self) -> None:
        """Raise MediaError if the item is not what `identity` saw; called after processing.

        Files, and what `identity` copied, cannot change.
        """
        return

    @abstractmethod
    def _read_header(self) -> HeaderT:
        """The header, asked for once."""

    def _guarded(
        self,
        what: str,
        call: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Call `call`; raise a MediaError about `what` for whatever it raises."""
        try:
            return call(*args, **kwargs)
        except MediaError:
            raise
        except self._own_errors as error:
            reason, value = str(error), getattr(error, "value", None)
        # Readers and decoders raise whatever they meet in broken data, with pieces of it.
        except Exception as error:
            reason, value = f"{what} is corrupt or cut short", type(error).__name__
        # Out here, so that the original error, which holds on to data and frames, is gone.
        raise self._error(reason, value=value)

    def _error(self, reason: str, *, value: object = None) -> MediaError:
        return MediaError(
            f"{self._parameter} is not a usable {self._noun}: {reason}",
            parameter=self._parameter,
            value=value,
        )

    def _check_num_bytes(self, data: Encoded, modality: str) -> None:
        """Raises MediaError for a file with more bytes than one of the modality may have."""
        num_bytes, limit = memoryview(data).nbytes, self._config.max_bytes(modality)
        if num_bytes > limit:
            raise self._error(
                f"its {num_bytes} bytes are more than media.max_{modality}_bytes ({limit})",
                value=num_bytes,
            )

    def _check_dense(self, array: Array | torch.Tensor, contents: str) -> None:
        """Raises MediaError for tensors that `to_numpy` cannot take; `contents`: what they hold."""
        if isinstance(array, torch.Tensor) and not is_dense(array):
            raise self._error(f"a tensor of {contents} must be dense")

    def _check_numbers(self, array: Array | torch.Tensor) -> None:
        """Raises MediaError for pixels of other types than uint8 and floating ones."""
        if isinstance(array, torch.Tensor):
            is_valid = array.dtype == torch.uint8 or array.is_floating_point()
        else:
            is_valid = array.dtype == np.uint8 or array.dtype.kind == "f"
        if not is_valid:
            name = str(array.dtype).removeprefix("torch.")[:40]
            raise self._error(f"its dtype is {name}, not uint8 or floating", value=name)


def keep_bytes(data: Encoded) -> memoryview:
    """The bytes `[n]` of a file, copied if the application could write to them."""
    view = memoryview(data)
    if not view.c_contiguous:
        return memoryview(view.tobytes())
    array = np.frombuffer(view, np.uint8)
    # numpy copies without holding the GIL.
    return (array if type(view.obj) is bytes else array.copy()).data


def to_numpy(array: Array | torch.Tensor) -> Array:
    """The same numbers in CPU memory; a copy only if they are elsewhere, or numpy lacks the type.

    Those types (bfloat16, and floats of eight bits) become float32: look at the size before.
    """
    if isinstance(array, torch.Tensor):
        if array.is_floating_point() and array.itemsize < 4 and array.dtype != torch.float16:
            array = array.float()
        array = array.detach().cpu().resolve_conj().resolve_neg().numpy()
    return array
