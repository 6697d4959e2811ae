"""A video file opened with PyAV: packets in, frames out, and no error but VideoError.

The codec runs on one thread, the calling one: we are a guest in the host's process. FFmpeg's log is
left as the host has set it (PyAV drops it by default), and no text of an FFmpeg error gets into
ours.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from aioengine.processors.media.pixels import Array
from aioengine.processors.media.video_container import FileReader, VideoError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

__all__ = ["OpenVideo", "Turn", "VideoPacket"]

# FFmpeg has hundreds of decoders. These are the ones that videos of today need.
_DECODERS = (
    *("h264", "hevc", "vp8", "vp9", "libdav1d", "av1", "mpeg4", "mpeg2video", "mpeg1video"),
    *("h263", "msmpeg4", "msmpeg4v2", "mjpeg", "theora", "prores", "dnxhd", "ffv1", "huffyuv"),
    *("ffvhuff", "utvideo", "png", "rawvideo"),
)
_BUFFER_BYTES = 1 << 18

# No parsers: these containers hold whole frames, and FFmpeg's parser for AV1 takes 3.4 KB for three
# bytes (3 MB made it 3.6 GB, measured). No times made up from them. For MP4 also no index: all the
# fragments would be looked up before the first is read; an AVI file's index knows the key frames.
_READER_FLAGS = "+noparse+nofillin-genpts"

# In one AV1 packet. One frame is shown, and a few hidden ones come with it; PyAV collects them all.
_MAX_AV1_FRAMES, _MAX_AV1_UNITS = 32, 4096

VideoPacket: TypeAlias = "Packet[VideoStream]"


class Turn(NamedTuple):
    """Transform from a stored frame to the shown one: axes swapped, then mirrored."""

    swaps_axes: bool = False
    mirrors_x: bool = False
    mirrors_y: bool = False

    def apply(self, pixels: Array) -> Array:
        """A view of `pixels` `[height, width, channels]` as they are to be shown."""
        if self.swaps_axes:
            pixels = pixels.swapaxes(0, 1)
        if self.mirrors_y:
            pixels = pixels[::-1]
        return pixels[:, ::-1] if self.mirrors_x else pixels

    @classmethod
    def of(cls, frame: VideoFrame) -> Turn:
        """Make one as the container's display matrix says; other than right angles go to the
        nearest."""
        from av.sidedata.sidedata import Type

        try:
            sides: Mapping[Any, Any] = frame.side_data
            matrix = sides.get(Type.DISPLAYMATRIX)
        except ValueError:  # some other side data, which this PyAV has no name for
            quarters = round(frame.rotation / 90) % 4  # counter-clockwise
            return cls(quarters % 2 == 1, quarters in (2, 3), quarters in (1, 2))
        if matrix is None:
            return cls()
        # The pixel at (x, y) is shown at (a x + c y, b x + d y).
        a, b, _, c, d = np.frombuffer(matrix, np.int32)[:5].tolist()
        if abs(a) + abs(d) >= abs(b) + abs(c):
            return cls(False, a < 0, d < 0)
        return cls(True, c < 0, b < 0)


class OpenVideo:
    """One stream of a file in memory; to be closed, and used by one thread.

    `kind` is FFmpeg's name of the container, `hidden` as `hidden_boxes` finds it, `max_pixels` the
    limit for a frame, which the decoders get too.
    """

    def __init__(self, data: memoryview, kind: str, hidden: list[int], max_pixels: int) -> None:
        av = _import_av()
        self._errors: type[Exception] = av.FFmpegError
        self._reader = FileReader(data, hidden)
        # Decoders count what they add at the edges too, up to 128 columns and rows; at the most,
        # one side is 200 times the other.
        padding = 128 * 15 * math.isqrt(max_pixels) + 128 * 128
        self._max_pixels = str(min(max_pixels + padding, 2**31 - 1))
        self._container = self._open(av, kind)
        try:
            self.stream = self._choose_stream()
            name = self._configure_decoder()
        except VideoError:
            self.close()
            raise
        self._is_av1 = name in ("libdav1d", "av1")
        self._has_times = kind != "avi"

    def _open(self, av: Any, kind: str) -> InputContainer:
        reason = "its header is corrupt or cut short"
        # PyAV 19 reads names that are no text so without being asked, and takes no such argument.
        names = {} if int(av.__version__.partition(".")[0]) > 18 else {"metadata_errors": "replace"}
        try:
            container: InputContainer = av.open(
                self._reader,
                "r",
                format=kind,
                # For the frames that FFmpeg decodes to learn what the header leaves out.
                options={"max_pixels": self._max_pixels, "threads": "1"},
                container_options={
                    "codec_whitelist": ",".join(_DECODERS),
                    "protocol_whitelist": "none",
                    "max_streams": "64",
                    "fflags": _READER_FLAGS + ("+ignidx" if kind == "mp4" else ""),
                },
                buffer_size=_BUFFER_BYTES,
                io_open=_open_nothing,
                **names,
            )
            self._reader.allow_contents()
            return container
        except self._errors as error:
            if self._reader.is_exhausted:
                reason = "its header is too long"
            raise VideoError(reason, value=type(error).__name__) from None

    def _choose_stream(self) -> VideoStream:
        from av.stream import Discard, Disposition

        covers = Disposition.attached_pic | Disposition.timed_thumbnails
        chosen = None
        for stream in self._container.streams:
            stream.discard = Discard.all
        for video in self._container.streams.video:
            if chosen is None and not video.disposition & covers:
                chosen = video
        if chosen is None:
            raise VideoError("it has no video stream")
        chosen.discard = Discard.default
        return chosen

    def _configure_decoder(self) -> str:
        # There is none for a codec that FFmpeg cannot decode.
        decoder: Any = getattr(self.stream, "codec_context", None)
        name = "unknown" if decoder is None else str(decoder.codec.name)
        if name not in _DECODERS:
            raise VideoError(f"its codec ({name}) is none of those that are decoded", value=name)
        decoder.options = {"max_pixels": self._max_pixels}
        decoder.thread_count = 1
        return name

    def close(self) -> None:
        """Gives the memory back."""
        self._container.close()

    def packets(self) -> Iterator[tuple[int, VideoPacket]]:
        """The packets of the stream, numbered, to the end or to where the file is broken.

        AVI stores no times; there, a packet's number is its time. Raises VideoError if the same
        bytes are referred to over and over.
        """
        number = 0
        with suppress(self._errors):
            for packet in self._container.demux(self.stream):
                # An empty one repeats the frame before, or stands for the end.
                if not packet.size:
                    continue
                if not self._has_times:
                    packet.pts = number
                yield number, packet
                number += 1
        if self._reader.is_exhausted:
            raise VideoError("its parts lie on top of each other")

    def decode(self, packet: VideoPacket | None) -> Iterator[VideoFrame]:
        """The frames that the decoder lets go of for one more packet, or, for None, all it has.

        A packet that cannot be decoded gives no frame.
        """
        if packet is not None and self._is_av1 and not _is_sane_av1(memoryview(packet)):
            return
        with suppress(self._errors):
            yield from self.stream.codec_context.decode(packet)

    def restart(self) -> None:
        """Makes the decoder forget all packets it was given."""
        self.stream.codec_context.flush_buffers()


def _is_sane_av1(data: memoryview) -> bool:
    """Return whether a packet holds no more frames than there can be (AV1 specification, section
    5.3)."""
    position = num_units = num_frames = 0
    while position < len(data):
        header = data[position]
        num_units += 1
        num_frames += (header >> 3 & 15) in (3, 6)
        if num_frames > _MAX_AV1_FRAMES or num_units > _MAX_AV1_UNITS:
            return False
        position += 2 if header & 4 else 1
        if not header & 2:  # the last one need not tell its size
            break
        size = shift = 0
        for byte in data[position : position + 8]:
            position += 1
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        position += size
    return True


def _import_av() -> Any:
    try:
        import av
    except ImportError:
        raise VideoError(
            "PyAV, which reads video files, is not installed: pip install 'aioengine[video]', or "
            "pass the frames as an array"
        ) from None
    return av


def _open_nothing(*_: object) -> io.BytesIO:
    # What a file refers to is empty for it: never an error, which PyAV might print.
    return io.BytesIO()
