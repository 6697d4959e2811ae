"""Videos, hostile until decoded: recognised, counted and bounded before frames are decoded.

A video is a file in memory, an array of frames, or a list of images.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from aioengine.config import MediaConfig
from aioengine.processors.cache.hasher import ContentHasher
from aioengine.processors.items import ImageSize, VideoClip, VideoHeader
from aioengine.processors.media import video_frames
from aioengine.processors.media.image import ImageSource, open_image
from aioengine.processors.media.pixels import (
    Array,
    PixelError,
    array_to_image,
    hash_pixels,
    tiles,
    to_rgb,
)
from aioengine.processors.media.source import Encoded, MediaSource, keep_bytes, to_numpy
from aioengine.processors.media.video_container import VideoError
from aioengine.processors.media.video_sampling import Sampling

__all__ = ["VideoSource", "open_video"]

ACCEPTED = (
    "the bytes of a video file, a list of images, or a numpy array or torch tensor of shape "
    "(frames, height, width, channels) or (frames, channels, height, width) holding uint8 or "
    "floats in [0, 1]"
)


class VideoSource(MediaSource[VideoHeader, VideoClip]):
    """One video of a request, not decoded yet.

    Files are identified by their bytes; arrays and images by the frames that are taken, and by
    how many there were. Which frames are taken is part of the identity of all.
    """

    _noun = "video"
    _own_errors = (VideoError, PixelError)

    def __init__(self, config: MediaConfig, parameter: str, sampling: Sampling) -> None:
        super().__init__(config, parameter)
        self._sampling = sampling

    def decode(self) -> VideoClip:
        """The frames that the header tells, RGB, as they are to be shown.

        Rotation of the file is applied, the shape of its pixels is not corrected for. Transparency
        of images and arrays goes over white; that of a file's frames is dropped.
        """
        header = self.header()
        frames = self._guarded("its data", self._frames, header)
        assert frames.shape == (header.num_frames, header.size.height, header.size.width, 3)
        return VideoClip(frames, header)

    def _read_header(self) -> VideoHeader:
        """Size of a frame as shown, and which frames are taken.

        A file is read to its end once, and its first frame is decoded.
        """
        return self._guarded("its data", self._measure)

    @abstractmethod
    def _measure(self) -> VideoHeader:
        """The header, checked against the limits; may raise VideoError."""

    @abstractmethod
    def _frames(self, header: VideoHeader) -> Array:
        """The frames; may raise VideoError and whatever decoders raise."""

    def _choose(self, size: ImageSize, num_source_frames: int, fps: float | None) -> VideoHeader:
        """The header for what there is, checked against the limits on what is taken."""
        indices = self._sampling.indices(num_source_frames, fps, self._config.max_video_frames)
        width, height = size
        num_pixels, limit = width * height * len(indices), self._config.max_video_pixels
        if num_pixels > limit:
            raise VideoError(
                f"the {len(indices)} frames of {width} x {height} pixels that are taken are more "
                f"than media.max_video_pixels ({limit}); take fewer",
                value=num_pixels,
            )
        return VideoHeader(size, indices, num_source_frames, fps)

    def _hash_sampling(self, hasher: ContentHasher) -> None:
        header = self.header()
        hasher.update([header.num_source_frames, list(header.indices)])


def open_video(
    item: object,
    config: MediaConfig,
    *,
    parameter: str,
    num_frames: int | None = None,
    fps: float | None = None,
) -> VideoSource:
    """The source for one video as the caller gave it, or as it was fetched.

    `num_frames` are taken, or `fps` of each second, which wins; where neither is given, the
    configuration's `video_fps` or `video_num_frames`, and where these are None too, all frames, or
    `max_video_frames` of them at equal distances. Arrays and lists have no rate: for them `fps`
    alone is refused, and the configuration's is set aside.

    Raises MediaError for other types, containers and codecs that are not allowed, and videos over
    the limits of `config`.
    """
    sampling = Sampling.of(num_frames, fps, config, parameter)
    source: VideoSource
    if isinstance(item, Encoded):
        source = _VideoFile(item, config, parameter, sampling)
    elif isinstance(item, np.ndarray | torch.Tensor):
        source = _ArrayVideo(item, config, parameter, sampling)
    elif isinstance(item, list | tuple):
        source = _ImageList(item, config, parameter, sampling)
    else:
        raise VideoSource.not_accepted(parameter, ACCEPTED, type(item).__name__)
    source.header()
    return source


class _VideoFile(VideoSource):
    """A video file in memory."""

    _data: memoryview

    def __init__(
        self, data: Encoded, config: MediaConfig, parameter: str, sampling: Sampling
    ) -> None:
        super().__init__(config, parameter, sampling)
        self._table: video_frames.VideoTable | None = None
        self._check_num_bytes(data, "video")
        self._data = keep_bytes(data)

    def identity(self) -> bytes:
        hasher = ContentHasher("encoded video", self._data)
        self._hash_sampling(hasher)
        return hasher.digest()

    def _measure(self) -> VideoHeader:
        if not self._data.nbytes:
            raise VideoError("it is empty (0 bytes)", value=0)
        self._table = table = video_frames.read_table(self._data, self._config)
        header = self._choose(table.size, table.num_frames, table.fps)
        video_frames.check_work(table, header.indices, self._config)
        return header

    def _frames(self, header: VideoHeader) -> Array:
        assert self._table is not None
        return video_frames.take_frames(self._data, self._table, header.indices, self._config)


class _ArrayVideo(VideoSource):
    """Frames in a numpy array or a torch tensor."""

    def __init__(
        self, array: Array | torch.Tensor, config: MediaConfig, parameter: str, sampling: Sampling
    ) -> None:
        super().__init__(config, parameter, sampling)
        self._copy: Array | None = None
        self._check_dense(array, "frames")
        self._check_numbers(array)
        is_tensor = isinstance(array, torch.Tensor)
        if isinstance(array, torch.Tensor):
            array = array.detach()
        shape = tuple(array.shape)
        first, last = (shape[axis] in (1, 3, 4) if len(shape) == 4 else False for axis in (1, 3))
        if not (first or last):
            raise self._error(f"its shape is {shape}; accepted: {ACCEPTED}", value=shape)
        # Where both could be the channels, each library's own habit decides.
        self._is_channels_first = first and (is_tensor or not last)
        self._array = array

    def identity(self) -> bytes:
        hasher = ContentHasher("video in an array")
        if self._copy is None:
            self._copy = self._taken(self.header())  # the application may write to its own later
        hash_pixels(hasher, self._copy)
        self._hash_sampling(hasher)
        return hasher.digest()

    def _measure(self) -> VideoHeader:
        shape = tuple(self._array.shape)
        height, width = shape[2:] if self._is_channels_first else shape[1:3]
        size = video_frames.check_frame_size(width, height, self._config)
        return self._choose(size, shape[0], None)

    def _taken(self, header: VideoHeader) -> Array:
        """A copy of the frames that are taken, channels last."""
        copy = None
        for slot, index in enumerate(header.indices):
            frame = to_numpy(self._array[index])
            frame = np.moveaxis(frame, 0, -1) if self._is_channels_first else frame
            if copy is None:
                copy = np.empty((header.num_frames, *frame.shape), frame.dtype)
            np.copyto(copy[slot], frame)
        assert copy is not None
        return copy

    def _frames(self, header: VideoHeader) -> Array:
        taken = self._taken(header) if self._copy is None else self._copy
        frames = _room(header)
        for frame, pixels in zip(frames, taken, strict=True):
            if pixels.dtype == np.uint8 and pixels.shape[-1] in (1, 3):
                np.copyto(frame, pixels)
            else:
                _paint(frame, to_rgb(array_to_image(pixels)))
        return frames


class _ImageList(VideoSource):
    """Images, one for each frame. Those that are not taken are not looked at."""

    may_change = True

    def __init__(
        self, images: Sequence[Any], config: MediaConfig, parameter: str, sampling: Sampling
    ) -> None:
        super().__init__(config, parameter, sampling)
        self._images = tuple(images)
        self._sources: list[ImageSource] = []

    def identity(self) -> bytes:
        hasher = ContentHasher("video of images")
        self._hash_sampling(hasher)
        for source in self._sources:
            hasher.update(source.identity())
        return hasher.digest()

    def verify(self) -> None:
        for source in self._sources:
            source.verify()

    def _measure(self) -> VideoHeader:
        total = len(self._images)
        indices = self._sampling.indices(total, None, self._config.max_video_frames)
        self._sources = [
            open_image(self._images[index], self._config, parameter=f"{self._parameter}[{index}]")
            for index in indices
        ]
        sizes = [source.header().size for source in self._sources]
        for index, size in zip(indices, sizes, strict=True):
            if size != sizes[0]:
                raise VideoError(
                    f"image {index} is of {size.width} x {size.height} pixels, the first one of "
                    f"{sizes[0].width} x {sizes[0].height}",
                    value=tuple(size),
                )
        return self._choose(sizes[0], total, None)

    def _frames(self, header: VideoHeader) -> Array:
        frames = _room(header)
        for frame, source in zip(frames, self._sources, strict=True):
            _paint(frame, source.decode())
        return frames


def _room(header: VideoHeader) -> Array:
    return np.empty((header.num_frames, header.size.height, header.size.width, 3), np.uint8)


def _paint(frame: Array, image: Image.Image) -> None:
    # In tiles: numpy takes an image over in one go, and holds the GIL meanwhile.
    for box in tiles(image.size):
        left, upper, right, lower = box
        np.copyto(frame[upper:lower, left:right], np.asarray(image.crop(box)))
