"""The frames of a video file: which there are, and those that are wanted, decoded.

**Which there are** is found by reading all packets, not by what the header says: a packet that is
not empty and not cut away by an edit list is a frame, and frames are in order of their time. So the
header that we give out and the decoder cannot disagree about the number, for any container. Where
there are no times to go by (AVI stores none), the order in which frames leave the decoder counts.

**Decoding** never seeks: indexes may be missing, wrong or hostile. Packets are read again from the
start, which is cheap, and of those only the ones from the last key frame before a wanted frame up
to that frame are decoded. A wanted frame is known by its time. If decoding from its key frame does
not yield it (broken data, or a stream that recovers gradually), everything is decoded once more
from the start; then the nearest frame before takes its place, or the first one, if none is before.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from aioengine.config import MediaConfig
from aioengine.processors.items import ImageSize
from aioengine.processors.media.image import MAX_ASPECT_RATIO
from aioengine.processors.media.pixels import Array
from aioengine.processors.media.video_container import (
    MAX_SOURCE_FRAMES,
    VideoError,
    container_of,
    hidden_boxes,
)
from aioengine.processors.media.video_stream import OpenVideo, Turn

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

    from aioengine.processors.media.video_stream import VideoPacket

__all__ = ["VideoTable", "check_frame_size", "check_work", "read_table", "take_frames"]

DECODED_PER_TAKEN = 100
"""Pixels that may be decoded for each of media.max_video_pixels: 14000 frames of 1920 x 1080."""

_MAX_PACKETS_TO_FIRST_FRAME = 1000


@dataclass(frozen=True, eq=False)
class VideoTable:
    """Facts from a file's packets and its first decoded frame.

    `times` int64 `[num_frames]`, ascending, in the stream's own unit; None if there are none to
    trust. Packet `orders[i]` holds frame i; `key_orders` and `key_times` are those of the packets
    at which decoding may begin. `stored_size` is the size before `turn`; `fps` is None if unknown.
    """

    container: str
    hidden: list[int]
    stored_size: ImageSize
    turn: Turn
    fps: float | None
    times: Array | None
    orders: Array
    key_orders: Array
    key_times: Array
    num_packets: int

    @property
    def num_frames(self) -> int:
        """Return how many frames are shown."""
        return len(self.orders)

    @property
    def size(self) -> ImageSize:
        """Size of a frame as it is shown. The shape of the pixels is not corrected for."""
        width, height = self.stored_size
        return ImageSize(height, width) if self.turn.swaps_axes else self.stored_size


def check_frame_size(width: int, height: int, config: MediaConfig) -> ImageSize:
    """The size, if it is within the limits for an image. Raises VideoError."""
    limit = config.max_image_pixels
    shown = f"its frames of {width} x {height} pixels"
    if width < 1 or height < 1:
        raise VideoError(f"{shown} are empty", value=(width, height))
    if width * height > limit:
        raise VideoError(
            f"{shown} are larger than media.max_image_pixels ({limit})", value=(width, height)
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise VideoError(
            f"{shown} are more than {MAX_ASPECT_RATIO} times as long as wide", value=(width, height)
        )
    return ImageSize(width, height)


def read_table(data: memoryview, config: MediaConfig) -> VideoTable:
    """Reads the whole file `data` once and decodes its first frame.

    Raises VideoError for what is no video, or broken, or over the limits of `config`.
    """
    kind = container_of(data, config.video_formats)
    hidden = hidden_boxes(data) if kind == "mp4" else []
    with closing(OpenVideo(data, kind, hidden, config.max_image_pixels)) as video:
        stream = video.stream
        if stream.width and stream.height:
            check_frame_size(stream.width, stream.height, config)
        notes = _PacketNotes()
        first: VideoFrame | None = None
        for number, packet in video.packets():
            notes.add(number, packet)
            if first is None and number < _MAX_PACKETS_TO_FIRST_FRAME:
                first = next(video.decode(packet), None)
        if first is None:
            first = next(video.decode(None), None)
        if first is None:
            raise VideoError("none of its frames can be decoded")
        size = check_frame_size(first.width, first.height, config)
        orders = np.array(notes.shown, np.int64)
        times, keys = np.array(notes.times, np.int64), np.array(notes.keys, np.int64)
        # Every frame of its own: packets come in the order in which frames are shown.
        is_timed = notes.is_timed and (kind != "avi" or len(keys) == len(times))
        stated, base = stream.average_rate, stream.time_base
        turn = Turn.of(first)
    if not len(orders):
        raise VideoError("it has no frames")
    shown_times = times[orders]
    ranks = np.argsort(shown_times, kind="stable")
    span = Fraction(0)
    if is_timed and base is not None:
        span = (int(shown_times.max()) - int(shown_times.min())) * base
        # How long the last one is shown is often not said.
        span += span / max(1, len(orders) - 1)
    fps = _frames_per_second(len(orders), span, stated)
    _check_duration(len(orders), span, fps, config)
    return VideoTable(
        container=kind,
        hidden=hidden,
        stored_size=size,
        turn=turn,
        fps=fps,
        times=shown_times[ranks] if is_timed else None,
        orders=orders[ranks] if is_timed else orders,
        key_orders=keys,
        key_times=times[keys],
        num_packets=len(times),
    )


class _PacketNotes:
    """Record of the packets that were read: a few numbers each."""

    def __init__(self) -> None:
        self.times = array("q")
        self.shown = array("q")
        self.keys = array("q")
        self.is_timed = True

    def add(self, number: int, packet: VideoPacket) -> None:
        if number >= MAX_SOURCE_FRAMES:
            raise VideoError(
                f"it has more than {MAX_SOURCE_FRAMES} frames; cut it into shorter ones",
                value=MAX_SOURCE_FRAMES,
            )
        time = packet.pts
        self.is_timed &= time is not None
        self.times.append(0 if time is None else time)
        # Decoded where others need it, never shown.
        if not packet.is_discard:
            self.shown.append(number)
        if packet.is_keyframe:
            self.keys.append(number)


def _frames_per_second(num_frames: int, span: Fraction, stated: Fraction | None) -> float | None:
    """Return what the container says, unless the frames' own times differ."""
    slack = max(1, num_frames / 20)
    if stated is not None and stated > 0 and (not span or abs(stated * span - num_frames) <= slack):
        return float(stated)
    return float(num_frames / span) if span else None


def _check_duration(
    num_frames: int, span: Fraction, fps: float | None, config: MediaConfig
) -> None:
    duration_s = float(span) if span else num_frames / fps if fps else 0.0
    if duration_s > config.max_video_s:
        raise VideoError(
            f"it lasts {duration_s:.0f} s, longer than media.max_video_s ({config.max_video_s:g})",
            value=duration_s,
        )


@dataclass
class _Run:
    """Packets from `start` on, and none from `stop` on, are decoded for the frames of `slots`."""

    start: int
    stop: int
    slots: list[int]
    reach: int
    """One more than the last packet that is certainly needed."""


def _plan(table: VideoTable, indices: Sequence[int]) -> list[_Run]:
    """Plan how to get the frames `indices` (ascending) with little decoding; slots count within
    them."""
    end = table.num_packets
    times = table.times
    if times is None:
        reach = min(end, indices[-1] + 1) if indices else 0
        return [_Run(0, end, list(range(len(indices))), reach)]
    runs: list[_Run] = []
    for slot, index in enumerate(indices):
        order = int(table.orders[index])
        # A frame shown before its key frame, though stored after it, needs the key frame before.
        num_keys = int(np.searchsorted(table.key_orders, order, side="right"))
        usable = np.flatnonzero(table.key_times[:num_keys] <= times[index])
        start = int(table.key_orders[usable[-1]]) if len(usable) else 0
        if not runs or start > runs[-1].reach:
            if runs:
                runs[-1].stop = start
            runs.append(_Run(start, end, [], 0))
        runs[-1].slots.append(slot)
        runs[-1].reach = max(runs[-1].reach, order + 1)
    return runs


def _max_decoded(table: VideoTable, config: MediaConfig) -> int:
    width, height = table.stored_size
    return max(1, DECODED_PER_TAKEN * config.max_video_pixels // (width * height))


def check_work(table: VideoTable, indices: Sequence[int], config: MediaConfig) -> None:
    """Raises VideoError if too many frames had to be decoded to take those of `indices`."""
    limit = _max_decoded(table, config)
    needed = sum(run.reach - run.start for run in _plan(table, indices))
    if needed > limit:
        raise VideoError(
            f"{needed} frames would have to be decoded to take {len(indices)}, more than {limit} "
            f"({DECODED_PER_TAKEN} x media.max_video_pixels); take fewer, or encode it with more "
            "key frames",
            value=needed,
        )


def take_frames(
    data: memoryview, table: VideoTable, indices: Sequence[int], config: MediaConfig
) -> Array:
    """Frames `indices` (ascending) as uint8 `[len(indices), height, width, 3]`, RGB, as shown.

    Raises VideoError if a frame has another size than the first, or none can be decoded. No frame
    that is not wanted is kept.
    """
    runs = _plan(table, indices)
    taker = _Taker(data, table, indices, config)
    missed = taker.take(runs)
    if missed and (len(runs) > 1 or runs[0].start > 0):
        reach = 1 + max(int(table.orders[indices[slot]]) for slot in missed)
        if reach <= taker.num_left:
            taker.take([_Run(0, table.num_packets, missed, reach)])
    return taker.finish()


class _Taker:
    """Decodes runs of packets and keeps the wanted frames, in RGB."""

    def __init__(
        self, data: memoryview, table: VideoTable, indices: Sequence[int], config: MediaConfig
    ) -> None:
        from av.video.reformatter import VideoReformatter

        self._data = data
        self._table = table
        self._max_pixels = config.max_image_pixels
        self._reformatter = VideoReformatter()
        width, height = table.size
        self._frames = np.empty((len(indices), height, width, 3), np.uint8)
        self._is_filled = [False] * len(indices)
        times = range(table.num_frames) if table.times is None else table.times
        self._wanted = [int(times[index]) for index in indices]
        self.num_left = _max_decoded(table, config)
        """Packets that may still be decoded."""

    def take(self, runs: Sequence[_Run]) -> list[int]:
        """Fills the slots of `runs`; returns those that got another frame than theirs, or none."""
        table, missed = self._table, []
        with closing(
            OpenVideo(self._data, table.container, table.hidden, self._max_pixels)
        ) as video:
            packets = video.packets()
            for run in runs:
                missed += self._fill(run.slots, self._decoded(video, packets, run))
                video.restart()
        return missed

    def _decoded(
        self, video: OpenVideo, packets: Iterator[tuple[int, VideoPacket]], run: _Run
    ) -> Iterator[VideoFrame]:
        for number, packet in packets:
            if number < run.start:
                continue
            if self.num_left == 0:
                return
            self.num_left -= 1
            yield from video.decode(packet)
            if number + 1 >= run.stop:
                break
        yield from video.decode(None)

    def _fill(self, slots: Sequence[int], frames: Iterator[VideoFrame]) -> list[int]:
        waiting, missed = deque(slots), []
        last: VideoFrame | None = None
        for number, frame in enumerate(frames):
            time = number if self._table.times is None else frame.pts
            if time is None:
                continue
            while waiting and self._wanted[waiting[0]] <= time:
                slot = waiting.popleft()
                is_met = self._wanted[slot] == time
                self._put(slot, frame if is_met or last is None else last)
                if not is_met:
                    missed.append(slot)
            if not waiting:
                return missed
            last = frame
        for slot in waiting:
            if last is not None:
                self._put(slot, last)
        return [*missed, *waiting]

    def _put(self, slot: int, frame: VideoFrame) -> None:
        if (frame.width, frame.height) != self._table.stored_size:
            width, height = self._table.stored_size
            raise VideoError(
                f"its frames change size, from {width} x {height} pixels to {frame.width} x "
                f"{frame.height}",
                value=(frame.width, frame.height),
            )
        rgb = self._reformatter.reformat(frame, format="rgb24", threads=1)
        np.copyto(self._frames[slot], self._table.turn.apply(rgb.to_ndarray()))
        self._is_filled[slot] = True

    def finish(self) -> Array:
        """All frames; a slot that nothing could be decoded for repeats the one before."""
        first = next((slot for slot, done in enumerate(self._is_filled) if done), None)
        if first is None:
            raise VideoError("none of its frames can be decoded")
        source = first
        for slot, is_filled in enumerate(self._is_filled):
            if is_filled:
                source = slot
            else:
                np.copyto(self._frames[slot], self._frames[source])
        return self._frames
