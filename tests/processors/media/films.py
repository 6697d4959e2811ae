"""Video files whose frames tell their number, and how a test decodes or refuses them."""

from __future__ import annotations

import functools
import io
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from PIL import Image

from aioengine.config import MediaConfig
from aioengine.errors import MediaError
from aioengine.processors.items import VideoHeader
from aioengine.processors.media.video import open_video

av = pytest.importorskip("av")

CONFIG = MediaConfig()
ALL = MediaConfig(video_num_frames=None)
WIDTH, HEIGHT, BITS = 160, 48, 10


def drawing(number: int, width: int = WIDTH, height: int = HEIGHT) -> Any:
    """An image with the number as ten black or white bars, over a band that tells up from down."""
    image = np.full((height, width, 3), 30, np.uint8)
    for bit in range(BITS):
        if number >> bit & 1:
            image[: 2 * height // 3, bit * width // BITS : (bit + 1) * width // BITS] = 225
    image[2 * height // 3 :] = (200, 60, 60)
    return image


def number_of(image: Any) -> int:
    """Which frame it is."""
    width = image.shape[1]
    middles = [(2 * bit + 1) * width // (2 * BITS) for bit in range(BITS)]
    row = image[image.shape[0] // 3].astype(int).mean(-1)
    return sum(1 << bit for bit, middle in enumerate(middles) if row[middle] > 127)


def numbers(frames: Any) -> tuple[int, ...]:
    return tuple(number_of(frame) for frame in frames)


@contextmanager
def ordinary_priority() -> Iterator[None]:
    """libsvtav1, if root runs it, makes threads of the process real-time ones, for good: they and
    all that they start then keep everybody else from the cores."""
    yield
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


@ordinary_priority()
def write(
    num_frames: int = 40,
    codec: str = "mpeg4",
    format: str = "mp4",
    *,
    rate: Fraction | int = 30,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    pixels: str = "yuv420p",
    gop: int = 8,
    b_frames: int | None = None,
    options: dict[str, str] | None = None,
    muxer: dict[str, str] | None = None,
    times: Sequence[int] | None = None,
    rotation: tuple[int, bool, bool] | None = None,
) -> bytes:
    """A video file; `times` in thousandths of a second instead of at a constant rate."""
    buffer = io.BytesIO()
    defaults = {"libx264": {"preset": "ultrafast" if b_frames == 0 else "veryfast", "crf": "18"}}
    with av.open(buffer, "w", format=format, container_options=muxer or {}) as container:
        stream = container.add_stream(
            codec, rate=rate, options={**defaults.get(codec, {}), **(options or {})}
        )
        stream.width, stream.height = size
        stream.pix_fmt, stream.codec_context.gop_size = pixels, gop
        stream.codec_context.thread_count = 1
        if b_frames is not None:
            stream.codec_context.max_b_frames = b_frames
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if rotation is not None:
            stream.set_display_rotation(*rotation)
        for index in range(num_frames):
            frame = av.VideoFrame.from_ndarray(drawing(index, *size), format="rgb24")
            frame.pts = index if times is None else times[index]
            frame.time_base = 1 / Fraction(rate) if times is None else Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


X264 = {"x264-params": "open-gop=1:scenecut=0:bframes=3"}
REFRESH = {"x264-params": "intra-refresh=1:scenecut=0:bframes=0"}
KINDS: dict[str, dict[str, Any]] = {
    "mp4 h264": {"codec": "libx264"},
    "mp4 h264 open": {"codec": "libx264", "options": X264},
    "mp4 h264 refresh": {"codec": "libx264", "options": REFRESH},
    "mp4 h264 fragments": {"codec": "libx264", "muxer": {"movflags": "frag_keyframe+empty_moov"}},
    "mp4 h264 dash": {"codec": "libx264", "muxer": {"movflags": "dash"}},
    "mp4 mpeg4 b": {"b_frames": 2},
    "mp4 av1": {"codec": "libsvtav1", "options": {"preset": "10"}},
    "mov h264 10 bit": {"codec": "libx264", "format": "mov", "pixels": "yuv422p10le"},
    "mkv h264": {"codec": "libx264", "format": "matroska"},
    "mkv ffv1 alpha": {"codec": "ffv1", "format": "matroska", "pixels": "yuva420p"},
    "mkv ffv1 rgb": {"codec": "ffv1", "format": "matroska", "pixels": "gbrp10le"},
    "webm vp9": {"codec": "libvpx-vp9", "format": "webm", "options": {"cpu-used": "8"}},
    "webm vp8": {"codec": "libvpx", "format": "webm", "options": {"auto-alt-ref": "1"}},
    "avi h264": {"codec": "libx264", "format": "avi"},
    "avi mpeg4": {"format": "avi", "b_frames": 0},
    "avi mpeg4 b": {"format": "avi", "b_frames": 2},
    "avi mjpeg": {"codec": "mjpeg", "format": "avi", "pixels": "yuvj420p"},
    "avi huffyuv": {"codec": "huffyuv", "format": "avi", "pixels": "yuv422p"},
}


@functools.cache
def file_of(kind: str) -> bytes:
    """A file of 40 frames; skips the test if this build of FFmpeg cannot write it."""
    options = KINDS[kind]
    if options.get("codec", "mpeg4") not in av.codecs_available:
        pytest.skip("this build of FFmpeg has no such encoder")
    return write(**options)


def decode(item: Any, config: MediaConfig = CONFIG, **wishes: Any) -> tuple[VideoHeader, Any]:
    source = open_video(item, config, parameter="videos[1]", **wishes)
    header = source.header()
    clip = source.decode()
    assert clip.header == header
    assert clip.frames.shape == (header.num_frames, header.size.height, header.size.width, 3)
    assert clip.frames.dtype == np.uint8
    return header, clip.frames


def refuse(item: Any, config: MediaConfig = CONFIG, **wishes: Any) -> MediaError:
    with pytest.raises(MediaError) as caught:
        decode(item, config, **wishes)
    return checked(caught.value)


def checked(error: MediaError) -> MediaError:
    assert error.parameter is not None and error.parameter.startswith("videos[1]")
    text = f"{error} {error.value!r}"
    assert text.startswith("videos[1]")
    assert "0x" not in text and "<" not in text and "Errno" not in text and "http" not in text
    assert error.__cause__ is None and error.__context__ is None
    return error


def outcome(data: bytes, **wishes: Any) -> str:
    """ "decoded", or what the typed error says."""
    try:
        decode(data, **wishes)
    except MediaError as error:
        return str(checked(error))
    return "decoded"


def motion_jpeg(images: Sequence[bytes], rate: int = 30) -> bytes:
    """An AVI file of JPEG images."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="avi") as container:
        stream = container.add_stream("mjpeg", rate=rate)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuvj420p"
        container.start_encoding()
        for index, image in enumerate(images):
            packet = av.Packet(image)
            packet.pts = packet.dts = index
            packet.time_base, packet.stream = stream.time_base, stream
            packet.is_keyframe = True
            container.mux(packet)
    return buffer.getvalue()


def jpeg(number: int, *size: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(drawing(number, *size)).save(buffer, "JPEG")
    return buffer.getvalue()


def box(kind: bytes, contents: bytes) -> bytes:
    return struct.pack(">I4s", len(contents) + 8, kind) + contents


def moov_first(data: bytes) -> bytes:
    """The same MP4 file with its header before the images."""
    places = {}
    position = 0
    while position < len(data):
        size, kind = struct.unpack_from(">I4s", data, position)
        places[kind] = position
        position += size
    moov = bytearray(data[places[b"moov"] :])
    assert len(moov) == struct.unpack_from(">I", moov)[0], "moov is the last one"
    table = moov.find(b"stco") + 8
    (count,) = struct.unpack_from(">I", moov, table)
    offsets = struct.unpack_from(f">{count}I", moov, table + 4)
    moved = [offset + len(moov) for offset in offsets]
    struct.pack_into(f">{count}I", moov, table + 4, *moved)
    rest = data[: places[b"moov"]]
    after = struct.unpack_from(">I", rest)[0]
    return rest[:after] + bytes(moov) + rest[after:]
