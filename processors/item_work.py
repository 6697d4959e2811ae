"""The work on one media item, wherever it is done: decode, process, check against the layout.

A thread of the engine calls `work_item` as it is. For another process, `describe` takes a source
apart into plain values and bytes, and `rebuild` makes one of them that decodes to the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from aioengine.config import MediaConfig
from aioengine.errors import InvalidRequestError, MediaError
from aioengine.processors.cache.serialization import Readable, item_parts, load_item
from aioengine.processors.embeddings import make_items
from aioengine.processors.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from aioengine.processors.items import AudioClip, ImageSize, VideoClip, VideoHeader
from aioengine.processors.media.open import open_media
from aioengine.processors.media.pixels import tiles
from aioengine.processors.media.source import MediaSource
from aioengine.processors.processor import BaseMultiModalProcessor, Layout
from aioengine.types import Embeddings

__all__ = [
    "Described",
    "Promise",
    "WorkItem",
    "Worked",
    "describe",
    "keep_to_one_thread",
    "pack_value",
    "rebuild",
    "unpack_value",
    "work_item",
]


def _import_controller() -> Any:
    """Import threadpoolctl's class, and take back what the import does to the environment.

    It allows Intel's OpenMP a second copy of itself in the process, which is the application's to
    decide.
    """
    is_set = "KMP_DUPLICATE_LIB_OK" in os.environ
    from threadpoolctl import ThreadpoolController

    if not is_set:
        os.environ.pop("KMP_DUPLICATE_LIB_OK", None)
    return ThreadpoolController


ThreadpoolController = _import_controller()


@dataclass(frozen=True, slots=True)
class Promise:
    """Share of a layout that one item has: so many tokens, and which of them take encoder rows."""

    length: int
    embed_runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, layout: Layout, modality: str, index: int) -> Promise:
        """Take that of one item of a prompt's layout."""
        placed = layout.placeholders[modality][index]
        return cls(placed.length, placed.embed_runs)

    def to_layout(self, modality: str, index: int) -> Layout:
        """A layout in which this is the item's; of the others it tells nothing true."""
        is_embed = None
        num_answer_rows = max(0, self.embed_runs[-1][1] - self.length)
        if self.embed_runs != ((0, self.length + num_answer_rows),):
            is_embed = torch.zeros(self.length, dtype=torch.bool)
            for start, stop in self.embed_runs:
                is_embed[start:stop] = True
        placed = PlaceholderRange(0, self.length, is_embed, num_answer_rows)
        return Layout(token_ids=[], placeholders={modality: [placed] * (index + 1)})

    def pack(self) -> list[Any]:
        """Return it as JSON."""
        return [self.length, [list(run) for run in self.embed_runs]]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> Promise:
        """The inverse of `pack`."""
        length, runs = packed
        return cls(length, tuple((start, stop) for start, stop in runs))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkItem:
    """One media item of a request, to be worked on.

    `source`: a `MediaSource` or `Embeddings`; `index`: its place among the request's items of the
    modality; `parameter`: its name in the caller's words; `promise`: None while there is no layout.
    """

    source: Any
    modality: str
    index: int
    parameter: str
    mm_kwargs: Mapping[str, Any] = field(default_factory=dict)
    promise: Promise | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Worked:
    """A processed item, and when its work began and its stages ended (`time.perf_counter`)."""

    item: MultiModalKwargsItem
    began: float
    decoded: float
    processed: float


def keep_to_one_thread() -> None:
    """Let PyTorch's operators in the calling thread use that thread alone, from now on.

    Items are worked on side by side, so a team of OpenMP for each is for a lone item at best. And
    teams cost: once they have more members in a process than there are cores, libgomp lets all
    that wait sleep at once instead of spinning, those of a CPU's device thread too, which meet
    hundreds of times in a step.
    """
    torch.get_num_threads()  # PyTorch sets its own number with a thread's first operator
    ThreadpoolController().select(user_api="openmp").limit(limits=1)


def work_item(processor: BaseMultiModalProcessor, work: WorkItem) -> Worked:
    """Decodes and processes one item, and checks that it is what its layout promised.

    Both in one go, so that only as many decoded items are in memory as workers. Raises MediaError,
    and what else a processor may raise.
    """
    try:
        began = time.perf_counter()
        is_decoded = isinstance(work.source, Embeddings)
        content = work.source if is_decoded else work.source.decode()
        decoded = time.perf_counter()
        items = make_items(
            [(work.modality, work.parameter, content)], processor.info.get_hidden_size
        )
        outputs = processor.process(items, work.mm_kwargs)
        if not is_decoded:
            work.source.verify()
        if work.promise is not None:
            processor.verify_layout(
                work.promise.to_layout(work.modality, work.index),
                items,
                outputs,
                work.mm_kwargs,
                {work.modality: [work.index]},
            )
        item = outputs[work.modality][0]
    except MediaError as error:
        raise error.for_parameter(work.parameter) from error
    return Worked(item=item, began=began, decoded=decoded, processed=time.perf_counter())


# ---- sources for another process


class Described(NamedTuple):
    """A source's content: what it is, plain values about it, and its bytes, piece by piece."""

    kind: str
    meta: dict[str, Any]
    buffers: Iterable[Readable]


def describe(source: MediaSource[Any, Any] | Embeddings) -> Described:
    """A source, or `Embeddings`, taken apart, so that `rebuild` makes one of the same content.

    Encoded media stay encoded, and an array stays what it is. An image of Pillow's, samples and
    frames are decoded here: the caller's objects can be in too many states to be described, and
    what they cost to read is paid for their identity anyway. Raises MediaError, from decoding.
    """
    if isinstance(source, Embeddings):
        return _describe_embeddings(source)
    given = source.undecoded
    if isinstance(given, np.ndarray):
        return Described("array", *_describe_array(given))
    if given is not None:
        return Described("encoded", {}, [given])
    content = source.decode()
    if isinstance(content, Image.Image):
        parts = (content.crop(box).tobytes() for box in tiles(content.size))
        return Described("image", {"size": list(content.size)}, parts)
    if isinstance(content, AudioClip):
        meta, buffers = _describe_array(content.samples)
        return Described("samples", {**meta, "sample_rate": content.sample_rate}, buffers)
    assert isinstance(content, VideoClip), type(content)
    meta, buffers = _describe_array(content.frames)
    header = content.header
    meta |= {"size": list(header.size), "indices": list(header.indices)}
    meta |= {"num_source_frames": header.num_source_frames, "fps": header.fps}
    return Described("frames", meta, buffers)


def rebuild(
    described: Described, work: WorkItem, config: MediaConfig, processor: BaseMultiModalProcessor
) -> Any:
    """A source that decodes to what the described one does, or fails with the same MediaError.

    `described.buffers` is one buffer, which may be written to and is not needed any more. `work`:
    all about the item but its source.
    """
    kind, meta, (data,) = described
    if kind == "embeddings":
        found = load_item(data)
        extra = {name.removeprefix("extra "): found[name] for name in found if name != "rows"}
        return Embeddings(found["rows"], **extra)
    if kind == "image":
        size = meta["size"][0], meta["size"][1]
        return _Decoded(Image.frombytes("RGB", size, data))
    if kind == "samples":
        return _Decoded(AudioClip(_rebuild_array(meta, data), meta["sample_rate"]))
    if kind == "frames":
        header = VideoHeader(
            ImageSize(*meta["size"]), tuple(meta["indices"]), meta["num_source_frames"], meta["fps"]
        )
        return _Decoded(VideoClip(_rebuild_array(meta, data), header))
    return open_media(
        work.modality,
        bytes(data) if kind == "encoded" else _rebuild_array(meta, data),
        config,
        parameter=work.parameter,
        options=processor.merged_kwargs(work.mm_kwargs),
        get_sample_rate=processor.info.get_sample_rate,
    )


class _Decoded:
    """Source that was decoded before it came here."""

    def __init__(self, content: Any) -> None:
        self._content = content

    def decode(self) -> Any:
        """The content."""
        return self._content

    def verify(self) -> None:
        """Do nothing: where it was decoded, it was checked."""


def _describe_array(array: np.ndarray[Any, Any]) -> tuple[dict[str, Any], list[Readable]]:
    whole = np.ascontiguousarray(array)
    meta = {"dtype": whole.dtype.str, "shape": list(array.shape)}
    return meta, [whole.reshape(-1).view(np.uint8).data]


def _rebuild_array(meta: Mapping[str, Any], data: Readable) -> np.ndarray[Any, Any]:
    dtype = np.dtype(meta["dtype"])
    assert not dtype.hasobject
    return np.frombuffer(data, dtype).reshape(meta["shape"])


def _describe_embeddings(embeddings: Embeddings) -> Described:
    # Checked and made tensors when the item was identified.
    tensors = {"rows": embeddings.rows}
    tensors |= {f"extra {name}": value for name, value in embeddings.extra.items()}
    batched = MultiModalFieldConfig.batched("")
    item = MultiModalKwargsItem.from_config(tensors, dict.fromkeys(tensors, batched))
    return Described("embeddings", {}, item_parts(item))


# ---- values for another process


def pack_value(value: Any, parameter: str) -> Any:
    """A caller's value as JSON can hold it, tuples kept apart from lists.

    Raises InvalidRequestError, naming `parameter`, for anything but None, bools, numbers, text,
    lists, tuples and mappings from text to these.
    """
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return int(value)  # an enumeration's member too
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list | tuple):
        packed = [pack_value(entry, f"{parameter}[{index}]") for index, entry in enumerate(value)]
        return packed if isinstance(value, list) else {"tuple": packed}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {
            "map": {
                name: pack_value(entry, f"{parameter}[{name!r}]") for name, entry in value.items()
            }
        }
    raise InvalidRequestError(
        f"{parameter} cannot be given to a worker process: {type(value).__name__} is not a number, "
        'text, list, tuple or mapping from text to these; use processor_workers="thread:N"',
        parameter=parameter,
        value=type(value).__name__,
    )


def unpack_value(packed: Any) -> Any:
    """The inverse of `pack_value`."""
    if isinstance(packed, list):
        return [unpack_value(entry) for entry in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tuple":
        return tuple(unpack_value(entry) for entry in content)
    return {name: unpack_value(entry) for name, entry in content.items()}
