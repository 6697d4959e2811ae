"""Videos of every kind: exactly the promised frames, those that transformers would take."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from aioengine.config import MediaConfig
from aioengine.errors import InvalidRequestError, MediaError
from aioengine.processors.items import ImageSize, VideoHeader
from aioengine.processors.media import video_frames, video_stream
from aioengine.processors.media.video import VideoSource, open_video
from tests.processors.media.films import (
    ALL,
    CONFIG,
    HEIGHT,
    KINDS,
    WIDTH,
    decode,
    drawing,
    file_of,
    numbers,
    refuse,
    write,
)

# ---- exactly the promised frames


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_promised_frames(kind: str) -> None:
    for wanted in (1, 2, 7, 23, 40, 41, None):
        header, frames = decode(file_of(kind), ALL, num_frames=wanted)
        assert header.num_source_frames == 40
        assert header.num_frames == min(wanted or 40, 40)
        assert header.size == ImageSize(WIDTH, HEIGHT)
        assert header.fps == 30
        assert numbers(frames) == header.indices


@pytest.mark.parametrize("rate", [1, 5, 24, 60, Fraction(30000, 1001)])
@pytest.mark.parametrize("format", ["mp4", "matroska", "avi"])
def test_frames_are_those_that_transformers_takes(format: str, rate: Fraction | int) -> None:
    from transformers.video_utils import VideoMetadata, default_sample_indices_fn

    for total in (1, 2, 3, 10, 31, 64):
        data = write(total, format=format, rate=rate, b_frames=0, gop=12)
        wishes = [{"num_frames": count} for count in (1, 2, 3, 5, 8, 13, 31, 32, 64)]
        wishes += [{"fps": fps} for fps in (0.1, 0.5, 1, 2.0, 7.3, 24, 29.97, 60)]
        for wish in wishes:
            header = open_video(data, CONFIG, parameter="x", **wish).header()
            assert header.num_source_frames == total
            assert header.fps == pytest.approx(float(rate), rel=1e-3)
            metadata = VideoMetadata(total_num_frames=total, fps=header.fps)
            try:
                expected = default_sample_indices_fn(metadata, **wish).tolist()
            except ValueError:  # fewer frames than are wanted
                expected = range(total)
            assert header.indices == tuple(expected)
        _, frames = decode(data, CONFIG, num_frames=5)
        assert numbers(frames) == tuple(i * total // min(5, total) for i in range(min(5, total)))


def test_pixels_are_those_that_transformers_reads() -> None:
    from functools import partial

    from transformers.video_utils import default_sample_indices_fn, read_video_pyav

    sample = partial(default_sample_indices_fn, num_frames=9)
    for kind in ("mp4 h264", "mp4 mpeg4 b", "mov h264 10 bit", "avi mjpeg"):
        expected, metadata = read_video_pyav(io.BytesIO(file_of(kind)), sample)
        header, frames = decode(file_of(kind), num_frames=9)
        assert np.array_equal(frames, expected)
        assert header.indices == tuple(metadata.frames_indices)
        assert (header.fps, header.num_source_frames) == (metadata.fps, metadata.total_num_frames)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("avi")])
def test_skipping_gives_what_decoding_everything_gives(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = video_frames._plan
    table = video_frames.read_table(memoryview(file_of(kind)), CONFIG)
    assert len(plan(table, [1, 30])) == 2
    skipped = [decode(file_of(kind), num_frames=count)[1] for count in (2, 3, 5, 9, 14, 20)]

    def whole(table: video_frames.VideoTable, indices: Sequence[int]) -> list[Any]:
        slots = list(range(len(indices)))
        return [video_frames._Run(0, table.num_packets, slots, table.num_packets)]

    monkeypatch.setattr(video_frames, "_plan", whole)
    for count, frames in zip((2, 3, 5, 9, 14, 20), skipped, strict=True):
        assert np.array_equal(decode(file_of(kind), num_frames=count)[1], frames)


def test_frames_between_are_not_decoded() -> None:
    taken = []
    decode_packet = video_stream.OpenVideo.decode

    def count(self: Any, packet: Any) -> Iterator[Any]:
        taken.append(packet)
        yield from decode_packet(self, packet)

    long = write(400, b_frames=0, gop=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(video_stream.OpenVideo, "decode", count)
        _, frames = decode(long, num_frames=4)
    assert numbers(frames) == (0, 100, 200, 300)
    assert len(taken) <= 4 + 4 + 1  # key frames, ends of runs, the first frame for the header


def test_variable_frame_rate() -> None:
    times = np.cumsum([0, 10, 500, 10, 10, 2000, 40, 40, 40, 333, 10, 10, 700, 40, 40, 10]).tolist()
    for kind in ({"codec": "libx264"}, {"b_frames": 2}, {"codec": "libx264", "format": "matroska"}):
        header, frames = decode(write(16, times=times, gop=5, **kind), num_frames=7)
        assert header.num_source_frames == 16
        assert numbers(frames) == header.indices == tuple(i * 16 // 7 for i in range(7))
        assert header.fps is not None
        assert 0.8 < header.fps * times[-1] / 1000 / 16 < 1.2


@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("vflip", [False, True])
@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_rotation(degrees: int, vflip: bool, hflip: bool) -> None:
    stored = decode(write(5, size=(160, 60)), ALL)[1]
    header, frames = decode(write(5, size=(160, 60), rotation=(degrees, hflip, vflip)), ALL)
    expected = np.rot90(stored, degrees // 90, axes=(1, 2))
    expected = expected[:, :, ::-1] if hflip else expected
    expected = expected[:, ::-1] if vflip else expected
    assert header.size == (ImageSize(60, 160) if degrees % 180 else ImageSize(160, 60))
    assert np.array_equal(frames, expected)


def test_an_edit_list_cuts_frames_away() -> None:
    data = bytearray(write(30, b_frames=0))
    place = data.find(b"elst")
    (media_time,) = struct.unpack_from(">i", data, place + 16)
    struct.pack_into(">i", data, place + 16, media_time + 11 * 512)
    header, frames = decode(bytes(data), ALL)
    assert header.num_source_frames == 19
    assert numbers(frames) == tuple(range(11, 30))


@pytest.mark.parametrize("size", [(161, 47), (30, 16), (1000, 8)])
def test_odd_sizes(size: tuple[int, int]) -> None:
    data = write(3, "ffv1", "matroska", size=size, pixels="bgr0")
    header, frames = decode(data, ALL)
    assert header.size == size
    assert np.array_equal(frames, [drawing(number, *size) for number in range(3)])


def test_the_same_bytes_from_many_threads() -> None:
    source = open_video(file_of("mp4 h264"), ALL, parameter="x")
    whole = source.decode().frames
    with ThreadPoolExecutor(4) as pool:
        for clip in pool.map(lambda _: source.decode(), range(8)):
            assert np.array_equal(clip.frames, whole)
    view = bytearray(file_of("mp4 h264"))
    copied = open_video(view, ALL, parameter="x")
    view[:] = bytes(len(view))
    assert np.array_equal(copied.decode().frames, whole)
    strided = memoryview(bytes(b for byte in file_of("mp4 h264") for b in (byte, 0)))[::2]
    assert np.array_equal(decode(strided, ALL)[1], whole)


# ---- arrays and lists


def stack(num_frames: int = 6, width: int = 70, height: int = 50) -> Any:
    return np.stack([drawing(number, width, height) for number in range(num_frames)])


def test_arrays_and_tensors() -> None:
    frames = stack()
    floats = frames.astype(np.float32) / 255
    for item in (
        frames,
        frames.transpose(0, 3, 1, 2),
        frames[:, :, ::-1][:, :, ::-1],
        floats,
        floats.astype(np.float64).transpose(0, 3, 1, 2),
        torch.from_numpy(frames),
        torch.from_numpy(frames).permute(0, 3, 1, 2),
        torch.from_numpy(floats).permute(0, 3, 1, 2).requires_grad_(),
    ):
        header, decoded = decode(item)
        assert header == VideoHeader(ImageSize(70, 50), tuple(range(6)), 6, None)
        assert np.array_equal(decoded, frames)
    half = torch.from_numpy(floats).to(torch.bfloat16)
    assert np.abs(decode(half)[1].astype(int) - frames).max() <= 1


def test_arrays_of_other_channels() -> None:
    frames = stack()
    grey = frames[..., :1]
    assert np.array_equal(decode(grey)[1], np.repeat(grey, 3, axis=-1))
    alpha = np.concatenate([frames, np.full_like(grey, 255)], axis=-1)
    assert np.array_equal(decode(alpha)[1], frames)
    alpha[2, ..., 3] = 0
    assert (decode(alpha)[1][2] == 255).all()
    # Three of everything: numpy keeps channels last, torch first.
    cube = np.random.default_rng(0).integers(0, 256, (2, 3, 3, 3), dtype=np.uint8)
    assert np.array_equal(decode(cube)[1], cube)
    assert np.array_equal(decode(torch.from_numpy(cube))[1], cube.transpose(0, 2, 3, 1))


def test_arrays_and_lists_are_sampled() -> None:
    frames = stack(50)
    for item in (frames, list(frames), tuple(Image.fromarray(frame) for frame in frames)):
        header, decoded = decode(item, num_frames=7)
        assert header.indices == (0, 7, 14, 21, 28, 35, 42)
        assert np.array_equal(decoded, frames[list(header.indices)])
        assert decode(item)[0].num_frames == 32
        assert decode(item, ALL)[0].num_frames == 50
        header, _ = decode(item, MediaConfig(video_num_frames=None, max_video_frames=20))
        assert header.indices == tuple(i * 50 // 20 for i in range(20))
        # No rate is known: the configuration's wish is none, the caller's cannot be granted.
        assert decode(item, MediaConfig(video_fps=1.0, video_num_frames=9))[0].num_frames == 9
        assert decode(item, fps=2, num_frames=3)[0].num_frames == 3
        assert "num_frames" in str(refuse(item, fps=2))


def test_lists_of_images() -> None:
    frames = stack(4)
    images: list[Any] = [Image.fromarray(frame) for frame in frames]
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = io.BytesIO()
    images[1].transpose(Image.Transpose.ROTATE_90).save(turned, "PNG", exif=exif.tobytes())
    mixed = [images[0], turned.getvalue(), frames[2], torch.from_numpy(frames[3])]
    header, decoded = decode(mixed)
    assert header.size == ImageSize(70, 50)
    assert np.array_equal(decoded, frames)
    assert np.array_equal(decoded[1], ImageOps.exif_transpose(Image.open(turned)).convert("RGB"))
    clear = [image.convert("RGBA") for image in images]
    clear[0].putalpha(0)
    assert (decode(clear)[1][0] == 255).all()


@pytest.mark.parametrize(
    "item",
    [
        None, 3, "film.mp4", Path("film.mp4"), {"frames": []}, object(), Image.new("RGB", (9, 9)),
        [], (), [None], ["a.png"], [b"GIF89a"], [b""], [[np.zeros((4, 4, 3), np.uint8)]],
        [np.zeros((4, 4, 3), np.uint8), np.zeros((4, 5, 3), np.uint8)],
        [np.zeros((4, 4, 3), np.uint8), 7],
        np.zeros((4, 4, 3), np.uint8), np.zeros((0, 4, 4, 3), np.uint8),
        np.zeros((2, 0, 4, 3), np.uint8), np.zeros((2, 5, 5, 2), np.uint8),
        np.zeros((1, 2, 4, 4, 3), np.uint8), np.zeros((2, 4, 4, 3), np.int16),
        np.zeros((2, 4, 4, 3), object), np.zeros((2, 4, 4, 3), np.complex64),
        np.full((2, 4, 4, 3), np.nan), np.full((2, 4, 4, 3), 1.01), np.full((2, 4, 4, 3), -0.1),
        np.zeros((1, 1, 900, 3), np.uint8), torch.zeros(2, 4, 4, 3, dtype=torch.int64),
        torch.zeros(2, 4, 4, 3).to_sparse(), torch.zeros(2, 4, 4, 3, device="meta"),
    ],
    ids=lambda item: type(item).__name__,
)  # fmt: skip
def test_what_is_no_video(item: Any) -> None:
    refuse(item)


def test_wrong_wishes() -> None:
    for wish in (
        *({"num_frames": count} for count in (0, -1, 2.0, True, "8", [8])),
        *({"fps": rate} for rate in (0, -1.0, float("nan"), float("inf"), True, "2")),
    ):
        with pytest.raises(InvalidRequestError, match=r"num_frames|fps"):
            open_video(stack(), CONFIG, parameter="videos[1]", **wish)
    assert decode(write(4), fps=1e308)[0].num_frames == 4
    assert decode(write(4), fps=1e-300)[0].num_frames == 1


# ---- identity


def source_of(item: Any, config: MediaConfig = CONFIG, **wishes: Any) -> VideoSource:
    return open_video(item, config, parameter="videos[1]", **wishes)


def test_identity_is_of_content_and_sampling() -> None:
    frames = stack(40)
    items: list[Any] = [
        file_of("mp4 mpeg4 b"),
        file_of("mp4 mpeg4 b") + b"\0" * 8,
        frames,
        frames.astype(np.float32) / 255,
        frames.astype(np.float64) / 255,
        frames[:, :, :, :1],
        np.ascontiguousarray(frames.transpose(0, 2, 1, 3)),
        frames[:39],
        list(frames),
        [Image.fromarray(frame) for frame in frames],
    ]
    changed = frames.copy()
    changed[0, 3, 4, 1] ^= 1
    items += [changed, list(changed)]
    wishes: list[dict[str, Any]] = [{}, {"num_frames": 5}, {"num_frames": 6}, {"num_frames": 39}]
    seen = [source_of(item, **wish).identity() for item in items for wish in wishes]
    assert all(len(identity) == 32 for identity in seen)
    assert len(set(seen)) == len(items) * len(wishes)
    assert seen == [source_of(item, **wish).identity() for item in items for wish in wishes]
    # Other wishes, the same frames.
    assert (
        source_of(file_of("mp4 mpeg4 b"), fps=3).identity()
        == source_of(file_of("mp4 mpeg4 b"), num_frames=4).identity()
    )


def test_an_array_is_copied_and_a_list_is_watched() -> None:
    frames = stack()
    original = frames.copy()
    source = source_of(frames)
    before = source.identity()
    frames[:] = 0
    assert np.array_equal(source.decode().frames, original)
    source.verify()
    assert source.identity() == before
    images = [Image.fromarray(frame) for frame in original]
    source = source_of(images)
    source.identity()
    source.decode()
    source.verify()
    images[2].putpixel((0, 0), (1, 2, 3))
    with pytest.raises(MediaError, match=r"^videos\[1\]\[2\] .*changed"):
        source.verify()


# ---- limits


@pytest.mark.parametrize(
    ("limits", "wish", "named"),
    [
        ({"max_video_bytes": 1000}, {}, "media.max_video_bytes"),
        ({"max_video_s": 1.3}, {}, "media.max_video_s"),
        ({"max_video_frames": 10}, {}, "media.max_video_frames"),
        ({"max_video_frames": 10}, {"num_frames": 11}, "media.max_video_frames"),
        ({"max_video_frames": 10}, {"fps": 10}, "media.max_video_frames"),
        ({"max_video_pixels": 32 * WIDTH * HEIGHT - 1}, {}, "media.max_video_pixels"),
        ({"max_image_pixels": WIDTH * HEIGHT - 1}, {}, "media.max_image_pixels"),
        ({"video_formats": ("avi", "webm")}, {}, "media.video_formats"),
        ({"video_formats": ()}, {}, "media.video_formats"),
    ],
)
def test_limits(limits: dict[str, Any], wish: dict[str, Any], named: str) -> None:
    assert named in str(refuse(file_of("mp4 mpeg4 b"), MediaConfig(**limits), **wish))


def test_limits_of_arrays_and_lists() -> None:
    frames = stack(8, 40, 40)
    for item in (frames, list(frames)):
        assert "max_video_frames" in str(refuse(item, MediaConfig(max_video_frames=7)))
        assert "max_image_pixels" in str(refuse(item, MediaConfig(max_image_pixels=1599)))
        assert "max_video_pixels" in str(refuse(item, MediaConfig(max_video_pixels=12799)))
        assert decode(item, MediaConfig(max_video_pixels=12800, max_video_frames=8))[0]


def test_exact_limits_are_allowed() -> None:
    decode(
        file_of("mp4 mpeg4 b"),
        MediaConfig(
            max_video_bytes=len(file_of("mp4 mpeg4 b")),
            max_video_s=40 / 30 + 1e-6,
            max_video_frames=32,
            max_video_pixels=32 * WIDTH * HEIGHT,
            max_image_pixels=WIDTH * HEIGHT,
            video_formats=("MOV",),
        ),
    )


def test_few_decoded_for_each_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    single = write(60, gop=60, b_frames=0)
    config = MediaConfig(max_video_pixels=2 * WIDTH * HEIGHT)
    assert numbers(decode(single, config, num_frames=2)[1]) == (0, 30)
    monkeypatch.setattr(video_frames, "DECODED_PER_TAKEN", 15)
    assert "key frames" in str(refuse(single, config, num_frames=2))
    assert decode(write(60, gop=10, b_frames=0), config, num_frames=2)
