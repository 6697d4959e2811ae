"""The media of one prompt, by modality, as the processing methods see them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar, overload

import numpy as np
from PIL import Image

__all__ = [
    "PROCESSOR_ITEMS",
    "AudioClip",
    "AudioHeader",
    "AudioProcessorItems",
    "Counts",
    "ImageHeader",
    "ImageProcessorItems",
    "ImageSize",
    "MixedItems",
    "ModalityDataItems",
    "MultiModalDataItems",
    "VideoClip",
    "VideoHeader",
    "VideoProcessorItems",
    "noise_clip",
    "noise_item",
]

ItemT = TypeVar("ItemT")
ItemsT = TypeVar("ItemsT", bound="ModalityDataItems[Any]")
OtherItemsT = TypeVar("OtherItemsT", bound="ModalityDataItems[Any]")

Counts: TypeAlias = Mapping[str, int]
"""Modality -> a number, of items or of an item's tokens."""


class ImageSize(NamedTuple):
    """An image's size in pixels, as it is shown (EXIF orientation applied)."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Header of an image, read without decoding it.

    `mode` and `format` are Pillow's names (`format` is None for pixels in memory); `orientation` is
    the EXIF value, 1 to 8, still to be applied when the image is decoded.
    """

    size: ImageSize
    mode: str
    format: str | None = None
    orientation: int = 1


@dataclass(frozen=True, slots=True)
class AudioHeader:
    """Header of an audio item, read before it is decoded: mono samples, at the model's rate
    (Hz)."""

    num_samples: int
    sample_rate: int


@dataclass(frozen=True, slots=True, eq=False)
class AudioClip:
    """A decoded audio item: `samples` float32 `[num_samples]`, mono, at `sample_rate` (Hz)."""

    samples: np.ndarray[Any, Any]
    sample_rate: int


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """Header of a video, read before it is decoded.

    `size` of a frame; `indices`: the frames that are taken, of `num_source_frames`, which come
    `fps` in a second (None: not known, as for a list of images).
    """

    size: ImageSize
    indices: tuple[int, ...]
    num_source_frames: int
    fps: float | None = None

    @property
    def num_frames(self) -> int:
        """Return how many frames the model is given."""
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
        """Return how many items there are."""
        return len(self)

    def get(self, index: int) -> ItemT:
        """One item."""
        return self._items[index]

    def get_all(self) -> list[ItemT]:
        """All items."""
        return list(self)

    @abstractmethod
    def get_processor_data(self) -> Mapping[str, object]:
        """Return what the HF processor is given, under its plural keyword; empty if it need not
        run."""


class _MediaItems(ModalityDataItems[Any], Generic[ItemT]):
    """Items that are decoded, or known by their headers while only the layout is wanted."""

    _modality: ClassVar[str]
    _header: ClassVar[type]
    _decoded: ClassVar[type] = object

    def __init__(self, items: Sequence[Any]) -> None:
        super().__init__(items, self._modality)

    def get(self, index: int) -> ItemT:
        """The decoded item. Raises ValueError if only its header is here."""
        item: ItemT = self._items[index]
        if isinstance(item, self._header) or not isinstance(item, self._decoded):
            raise ValueError(f"{self.modality} {index} is not decoded, only its header is known")
        return item


class ImageProcessorItems(_MediaItems[Any]):
    """Images for the HF image processor.

    An entry is a decoded image (`PIL.Image`, or an array in HWC order), or an `ImageHeader` while
    only the layout is wanted.
    """

    _modality, _header = "image", ImageHeader

    def get_image_size(self, item_idx: int) -> ImageSize:
        """The image's size, from the header if it is not decoded yet."""
        item = self._items[item_idx]
        if isinstance(item, ImageHeader | Image.Image):
            return ImageSize(*item.size)
        height, width = np.shape(item)[:2]
        return ImageSize(width, height)

    def get_processor_data(self) -> Mapping[str, object]:
        return {"images": self.get_all()}


class AudioProcessorItems(_MediaItems[AudioClip]):
    """Audio for the HF feature extractor: `AudioClip`, or `AudioHeader` for a layout."""

    _modality, _header, _decoded = "audio", AudioHeader, AudioClip

    def get_audio_length(self, item_idx: int) -> int:
        """The number of samples at the model's rate."""
        item = self._items[item_idx]
        return len(item.samples) if isinstance(item, AudioClip) else int(item.num_samples)

    def get_processor_data(self) -> Mapping[str, object]:
        # transformers' processors have no plural for it.
        return {"audio": [clip.samples for clip in self.get_all()]}


class VideoProcessorItems(_MediaItems[VideoClip]):
    """Videos for the HF video processor: `VideoClip`, or `VideoHeader` for a layout."""

    _modality, _header, _decoded = "video", VideoHeader, VideoClip

    def get_header(self, item_idx: int) -> VideoHeader:
        """Sizes, and which frames are taken."""
        item = self._items[item_idx]
        header: VideoHeader = item.header if isinstance(item, VideoClip) else item
        return header

    def get_num_frames(self, item_idx: int) -> int:
        """Return how many frames the model is given."""
        return self.get_header(item_idx).num_frames

    def get_frame_size(self, item_idx: int) -> ImageSize:
        """The size of each frame."""
        return self.get_header(item_idx).size

    def get_processor_data(self) -> Mapping[str, object]:
        return {"videos": [clip.frames for clip in self.get_all()]}


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
        """Return how many items of that modality there are."""
        return len(self._items.get(modality, ()))

    def get_all_counts(self) -> dict[str, int]:
        """Modality -> number of items."""
        return {modality: len(group) for modality, group in self._items.items()}

    def parts(self) -> list[tuple[MultiModalDataItems, dict[str, Sequence[int]]]]:
        """Return what a family is asked for at once, with the items' places: all, if nothing is
        mixed."""
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


def noise_clip(num_samples: int, sample_rate: int) -> AudioClip:
    """Decoded audio at `sample_rate` (Hz), no two parts of which are alike."""
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, num_samples)
    return AudioClip(samples.astype(np.float32), sample_rate)


def noise_item(modality: str, *, sample_rate: int = 0) -> Any:
    """A small decoded item, no two parts of which are alike.

    An image of 72 x 56 pixels, a video of four frames of 84 x 56, which patches of 14 pixels
    divide, or half a second at `sample_rate` (Hz).
    """
    if modality == "audio":
        return noise_clip(sample_rate // 2, sample_rate)
    generator = np.random.default_rng(0)
    size, count = ImageSize(84 if modality == "video" else 72, 56), 4
    frames = generator.integers(0, 256, (count, size.height, size.width, 3), dtype=np.uint8)
    if modality == "image":
        return Image.fromarray(frames[0])
    return VideoClip(frames, VideoHeader(size, tuple(range(count)), count, fps=2.0))
