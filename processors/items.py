"""The media of one prompt, by modality, as the processing methods see them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar, overload

import numpy as np
import torch
from PIL import Image

from aioengine.errors import MediaError
from aioengine.processors.inputs import MultiModalFieldConfig, MultiModalKwargsItem
from aioengine.types import Embeddings

__all__ = [
    "PROCESSOR_ITEMS",
    "AudioClip",
    "AudioHeader",
    "AudioProcessorItems",
    "EmbeddingItems",
    "ImageHeader",
    "ImageProcessorItems",
    "ImageSize",
    "MixedItems",
    "ModalityDataItems",
    "MultiModalDataItems",
    "VideoClip",
    "VideoHeader",
    "VideoProcessorItems",
    "make_items",
]

ItemT = TypeVar("ItemT")
ItemsT = TypeVar("ItemsT", bound="ModalityDataItems[Any]")
OtherItemsT = TypeVar("OtherItemsT", bound="ModalityDataItems[Any]")


class ImageSize(NamedTuple):
    """A picture's size in pixels, as it is shown (EXIF orientation applied)."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What a picture's header tells without decoding it.

    `mode` and `format` are Pillow's names (`format` is None for pixels in memory); `orientation` is
    the EXIF value, 1 to 8, still to be applied when the picture is decoded.
    """

    size: ImageSize
    mode: str
    format: str | None = None
    orientation: int = 1


@dataclass(frozen=True, slots=True)
class AudioHeader:
    """What is known of a recording before it is decoded: mono samples, at the model's rate (Hz)."""

    num_samples: int
    sample_rate: int


@dataclass(frozen=True, slots=True, eq=False)
class AudioClip:
    """A decoded recording: `samples` float32 `[num_samples]`, mono, at `sample_rate` (Hz)."""

    samples: np.ndarray[Any, Any]
    sample_rate: int


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """What is known of a video before it is decoded.

    `size` of a frame; `indices`: the frames that are taken, of `num_source_frames`, which come
    `fps` in a second (None: not known, as for a list of pictures).
    """

    size: ImageSize
    indices: tuple[int, ...]
    num_source_frames: int
    fps: float | None = None

    @property
    def num_frames(self) -> int:
        """How many frames the model is given."""
        return len(self.indices)


@dataclass(frozen=True, slots=True, eq=False)
class VideoClip:
    """The frames of a video that were taken: `frames` uint8 `[num_frames, height, width, 3]`."""

    frames: np.ndarray[Any, Any]
    header: VideoHeader


class ModalityDataItems(ABC, Generic[ItemT]):
    """The items of one modality, in the order of their placeholders."""

    def __init__(self, items: Sequence[ItemT], modality: str) -> None:
        self._items = list(items)
        self.modality = modality

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[ItemT]:
        return (self.get(index) for index in range(len(self)))

    def get_count(self) -> int:
        """How many items there are."""
        return len(self)

    def get(self, index: int) -> ItemT:
        """One item."""
        return self._items[index]

    def get_all(self) -> list[ItemT]:
        """All items."""
        return list(self)

    @abstractmethod
    def get_processor_data(self) -> Mapping[str, object]:
        """What the HF processor is given, under its plural keyword; empty if it need not run."""


class ImageProcessorItems(ModalityDataItems[Any]):
    """Pictures for the HF image processor.

    An entry is a decoded picture (`PIL.Image`, or an array in HWC order), or an `ImageHeader` while
    only the layout is wanted.
    """

    def __init__(self, items: Sequence[Any]) -> None:
        super().__init__(items, "image")

    def get(self, index: int) -> Any:
        """The decoded picture. Raises ValueError if only its header is here."""
        item = self._items[index]
        if isinstance(item, ImageHeader):
            raise ValueError(f"image {index} is not decoded, only its header is known")
        return item

    def get_image_size(self, item_idx: int) -> ImageSize:
        """The picture's size, from the header if it is not decoded yet."""
        item = self._items[item_idx]
        if isinstance(item, ImageHeader | Image.Image):
            return ImageSize(*item.size)
        height, width = np.shape(item)[:2]
        return ImageSize(width, height)

    def get_processor_data(self) -> Mapping[str, object]:
        return {"images": self.get_all()}


class AudioProcessorItems(ModalityDataItems[Any]):
    """Recordings for the HF feature extractor: `AudioClip`, or `AudioHeader` for a layout."""

    def __init__(self, items: Sequence[AudioClip | AudioHeader]) -> None:
        super().__init__(items, "audio")

    def get(self, index: int) -> AudioClip:
        """The decoded recording. Raises ValueError if only its header is here."""
        item = self._items[index]
        if not isinstance(item, AudioClip):
            raise ValueError(f"audio {index} is not decoded, only its header is known")
        return item

    def get_audio_length(self, item_idx: int) -> int:
        """The number of samples at the model's rate."""
        item = self._items[item_idx]
        return len(item.samples) if isinstance(item, AudioClip) else int(item.num_samples)

    def get_processor_data(self) -> Mapping[str, object]:
        # transformers' processors have no plural for it.
        return {"audio": [clip.samples for clip in self.get_all()]}


class VideoProcessorItems(ModalityDataItems[Any]):
    """Videos for the HF video processor: `VideoClip`, or `VideoHeader` for a layout."""

    def __init__(self, items: Sequence[VideoClip | VideoHeader]) -> None:
        super().__init__(items, "video")

    def get(self, index: int) -> VideoClip:
        """The frames that were taken. Raises ValueError if only the header is here."""
        item = self._items[index]
        if not isinstance(item, VideoClip):
            raise ValueError(f"video {index} is not decoded, only its header is known")
        return item

    def get_header(self, item_idx: int) -> VideoHeader:
        """Sizes, and which frames are taken."""
        item = self._items[item_idx]
        header: VideoHeader = item.header if isinstance(item, VideoClip) else item
        return header

    def get_num_frames(self, item_idx: int) -> int:
        """How many frames the model is given."""
        return self.get_header(item_idx).num_frames

    def get_frame_size(self, item_idx: int) -> ImageSize:
        """The size of each frame."""
        return self.get_header(item_idx).size

    def get_processor_data(self) -> Mapping[str, object]:
        return {"videos": [clip.frames for clip in self.get_all()]}


class EmbeddingItems(ModalityDataItems[torch.Tensor]):
    """Precomputed encoder output: float32 CPU tensors `[num_rows, hidden_size]`, checked.

    Raises MediaError for what is not dense, finite, floating, two-dimensional and `hidden_size`
    wide. `parameters` names the items in the caller's words.
    """

    def __init__(
        self,
        embeddings: Sequence[Embeddings],
        *,
        modality: str,
        hidden_size: int,
        parameters: Sequence[str] | None = None,
    ) -> None:
        names = parameters or [f"{modality}s[{index}]" for index in range(len(embeddings))]
        rows = [
            _checked_rows(item.rows, hidden_size, name)
            for item, name in zip(embeddings, names, strict=True)
        ]
        super().__init__(rows, modality)
        self.extra = [
            {key: _checked_extra(value, f"{name}.{key}") for key, value in item.extra.items()}
            for item, name in zip(embeddings, names, strict=True)
        ]

    def get_feature_size(self, item_idx: int) -> int:
        """How many encoder rows the item brings."""
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


class MixedItems(ModalityDataItems[Any]):
    """Media and embeddings of one modality in one prompt.

    `parts`: the items of each kind, and their places among all of the modality. Only the engine
    sees these: a family is asked for one kind at a time (`MultiModalDataItems.parts`).
    """

    def __init__(
        self, parts: Sequence[tuple[ModalityDataItems[Any], Sequence[int]]], modality: str
    ) -> None:
        placed = [
            (place, item)
            for group, places in parts
            for place, item in zip(places, group._items, strict=True)
        ]
        super().__init__([item for _, item in sorted(placed, key=itemgetter(0))], modality)
        self.parts = parts

    def get_processor_data(self) -> Mapping[str, object]:
        raise TypeError(f"{self.modality} items and embeddings are processed apart")


def _checked_tensor(value: object, parameter: str) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "fiub":
            raise MediaError(
                f"{parameter} must hold numbers, not dtype {value.dtype}", parameter=parameter
            )
        return torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, torch.Tensor):
        raise MediaError(
            f"{parameter} must be a torch tensor or a numpy array, not {type(value).__name__}",
            parameter=parameter,
            value=type(value).__name__,
        )
    # A sparse tensor's indices are not checked by torch before they are used: never densify one.
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise MediaError(f"{parameter} must be a dense tensor", parameter=parameter)
    return value.detach().cpu()


def _checked_rows(value: object, hidden_size: int, parameter: str) -> torch.Tensor:
    rows = _checked_tensor(value, parameter)
    if not rows.is_floating_point():
        raise MediaError(
            f"{parameter} must be floating point, not {rows.dtype}",
            parameter=parameter,
            value=str(rows.dtype),
        )
    shape = tuple(rows.shape)
    if rows.ndim != 2 or shape[0] == 0 or shape[1] != hidden_size:
        raise MediaError(
            f"{parameter} must have the shape (rows, {hidden_size}), not {shape}",
            parameter=parameter,
            value=shape,
        )
    if not bool(torch.isfinite(rows).all()):
        raise MediaError(f"{parameter} must be finite everywhere", parameter=parameter)
    return rows.to(torch.float32)


def _checked_extra(value: object, parameter: str) -> torch.Tensor:
    if isinstance(value, bool | int | float):
        value = torch.tensor(value)
    elif isinstance(value, list | tuple):
        try:
            value = torch.tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise MediaError(
                f"{parameter} must be a tensor or nested lists of numbers", parameter=parameter
            ) from None
    tensor = _checked_tensor(value, parameter)
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise MediaError(f"{parameter} must be finite everywhere", parameter=parameter)
    return tensor


class MultiModalDataItems(Mapping[str, ModalityDataItems[Any]]):
    """All media of one prompt: modality -> its items. A modality without items is left out."""

    def __init__(self, items: Mapping[str, ModalityDataItems[Any]] | None = None) -> None:
        self._items = {modality: group for modality, group in (items or {}).items() if len(group)}

    def __getitem__(self, modality: str) -> ModalityDataItems[Any]:
        return self._items[modality]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def get_count(self, modality: str) -> int:
        """How many items of that modality there are."""
        group = self._items.get(modality)
        return 0 if group is None else len(group)

    def get_all_counts(self) -> dict[str, int]:
        """Modality -> number of items."""
        return {modality: len(group) for modality, group in self._items.items()}

    def parts(self) -> list[tuple[MultiModalDataItems, dict[str, Sequence[int]]]]:
        """What a family is asked for at once, with the items' places: all, if nothing is mixed."""
        parts: list[dict[str, tuple[ModalityDataItems[Any], Sequence[int]]]] = [{}, {}]
        for modality, group in self._items.items():
            if isinstance(group, MixedItems):
                parts[0][modality], parts[1][modality] = group.parts
            else:
                parts[0][modality] = group, range(len(group))
        return [
            (
                MultiModalDataItems({modality: group for modality, (group, _) in part.items()}),
                {modality: places for modality, (_, places) in part.items()},
            )
            for part in parts
            if part
        ]

    @overload
    def get_items(self, modality: str, kind: type[ItemsT]) -> ItemsT: ...

    @overload
    def get_items(
        self, modality: str, kind: tuple[type[ItemsT], type[OtherItemsT]]
    ) -> ItemsT | OtherItemsT: ...

    def get_items(self, modality: str, kind: Any) -> Any:
        """The items of one modality, which must be of the class (or one of the classes) `kind`."""
        group = self._items[modality]
        if not isinstance(group, kind):
            raise TypeError(f"{modality!r} items are {type(group).__name__}, not {kind}")
        return group


PROCESSOR_ITEMS: Mapping[str, Callable[[Sequence[Any]], ModalityDataItems[Any]]] = {
    "image": ImageProcessorItems,
    "audio": AudioProcessorItems,
    "video": VideoProcessorItems,
}
"""Modality -> what holds its items."""


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
