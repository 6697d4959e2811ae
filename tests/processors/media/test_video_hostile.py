"""Broken and hostile videos: what is left of them, or a MediaError; nothing else is touched."""

from __future__ import annotations

import io
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from aioengine.config import MediaConfig
from aioengine.processors.items import ImageSize
from aioengine.processors.media import video_stream
from aioengine.processors.media.video_container import FileReader, VideoError, hidden_boxes
from tests.processors.media.films import (
    ALL,
    HEIGHT,
    KINDS,
    WIDTH,
    av,
    box,
    decode,
    drawing,
    file_of,
    jpeg,
    moov_first,
    motion_jpeg,
    numbers,
    ordinary_priority,
    outcome,
    refuse,
    write,
)


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_files(kind: str, capfd: Any) -> None:
    data = file_of(kind)
    capfd.readouterr()  # an encoder may speak
    outcomes = [outcome(data[: len(data) * part // 16]) for part in range(16)]
    assert "decoded" not in outcomes[0]
    if ("mp4" not in kind and "mov" not in kind) or "fragments" in kind or "dash" in kind:
        assert "decoded" in outcomes
    assert capfd.readouterr() == ("", "")


def test_a_cut_file_with_its_header_in_front(capfd: Any) -> None:
    for kind in ("mp4 h264", "mp4 mpeg4 b", "mp4 av1", "mov h264 10 bit"):
        whole = moov_first(file_of(kind))
        assert numbers(decode(whole, ALL)[1]) == tuple(range(40))
        outcomes = [outcome(whole[: len(whole) * part // 16]) for part in range(16)]
        assert outcomes[0] != "decoded" and outcomes[15] == "decoded"
    assert capfd.readouterr() == ("", "")


def test_what_is_left_of_a_cut_file_is_right() -> None:
    for kind in ("mkv h264", "avi mjpeg", "mp4 h264 fragments", "avi mpeg4 b", "mp4 h264 dash"):
        data = file_of(kind)
        header, frames = decode(data[: len(data) * 3 // 4], ALL)
        assert 8 <= header.num_source_frames < 40
        # Among the last ones B frames may be missing, and the last packet may be cut.
        whole = header.indices[:-4]
        assert numbers(frames)[: len(whole)] == whole


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_in_the_middle(kind: str, capfd: Any) -> None:
    rng = np.random.default_rng(7)
    for _ in range(30):
        data = bytearray(file_of(kind))
        for _ in range(int(rng.integers(1, 4))):
            place = int(rng.integers(0, len(data)))
            data[place : place + 40] = rng.bytes(min(40, len(data) - place))
        outcome(bytes(data), num_frames=int(rng.integers(1, 12)))
    assert capfd.readouterr() == ("", "")


def test_a_broken_frame_is_replaced_by_the_one_before() -> None:
    data = bytearray(write(20, "ffv1", "matroska", gop=1, options={"slicecrc": "1"}))
    with av.open(io.BytesIO(bytes(data))) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux() if packet.size]
    position, size = packets[10]
    data[position + 10 : position + size] = bytes(size - 10)
    header, frames = decode(bytes(data), ALL)
    assert header.num_source_frames == 20
    found = numbers(frames)
    assert found[:10] == tuple(range(10)) and found[11:] == tuple(range(11, 20))


def secret_files() -> dict[str, bytes]:
    """What must not be taken for a video, or makes FFmpeg look elsewhere."""
    image = io.BytesIO()
    Image.fromarray(drawing(3)).save(image, "JPEG")
    animation = io.BytesIO()
    images = [Image.fromarray(drawing(number)) for number in range(3)]
    images[0].save(animation, "WEBP", save_all=True, append_images=images[1:])
    list_of_jpegs = b",".join([image.getvalue()] * 3)
    url = b"http://127.0.0.1:1/secret.ts"
    return {
        "empty": b"",
        "zeros": bytes(4096),
        "text": b"secret words " * 100,
        "m3u8": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n" + url + b"\n#EXT-X-ENDLIST\n",
        "ffconcat": b"ffconcat version 1.0\nfile '/etc/passwd'\n",
        "concat": b"file '/etc/passwd'\nfile 'secret.mp4'\n",
        "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 1 RTP/AVP 96\n",
        "dash": b"<?xml version='1.0'?><MPD><BaseURL>" + url + b"</BaseURL></MPD>",
        "svg": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='" + url + b"'/></svg>",
        "jpeg": image.getvalue(),
        "jpegs": list_of_jpegs,
        "webp": animation.getvalue(),
        "heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64),
        "html": b"<html><video src='" + url + b"'></html>",
        "ebml": b"\x1aE\xdf\xa3" + bytes(64),
        "riff": b"RIFF\x40\0\0\0AVI " + bytes(64),
        "wave": b"RIFF\x40\0\0\0WAVEfmt " + bytes(64),
        "mp4": b"\0\0\0\x10ftypisom\0\0\0\0",
        "ts": b"\x47\x40\x00\x10" * 188,
        "rmra": box(b"moov", box(b"rmra", box(b"rmda", box(b"rdrf", b"\0\0\0\0url " + url)))),
    }


@pytest.mark.parametrize("name", secret_files())
def test_what_only_looks_like_a_video(name: str, capfd: Any) -> None:
    data = secret_files()[name]
    text = outcome(data)
    assert text != "decoded" and "secret" not in text and "passwd" not in text
    assert outcome(bytes(4) + data) != "decoded"
    assert capfd.readouterr() == ("", "")


def riff(kind: bytes, contents: bytes) -> bytes:
    return kind + struct.pack("<I", len(contents)) + contents + b"\0" * (len(contents) % 2)


def avi_with_subtitles(subtitles: bytes) -> bytes:
    """An AVI file whose second stream holds a subtitle file, as FFmpeg opens one inside an AVI."""
    payload = b"GAB2\0" + struct.pack("<HIHI", 2, 0, 4, len(subtitles)) + subtitles
    data = write(3, "mjpeg", "avi", pixels="yuvj420p")
    with av.open(io.BytesIO(data)) as container:
        frames = [bytes(packet) for packet in container.demux() if packet.size]
    first = data.find(b"strl") - 8
    size = struct.unpack_from("<I", data, first + 4)[0] + 8
    stream = data[first : first + size]
    text = stream.replace(b"vidsMJPG", b"txts" + bytes(4))
    main = data.find(b"avih")
    header = bytearray(data[main : main + 64])
    struct.pack_into("<I", header, 8 + 24, 2)
    chunks = riff(b"01tx", payload) + b"".join(riff(b"00dc", frame) for frame in frames)
    lists = riff(b"LIST", b"hdrl" + bytes(header) + stream + text)
    return riff(b"RIFF", b"AVI " + lists + riff(b"LIST", b"movi" + chunks))


def mov_referring_to(target: str) -> bytes:
    """A MOV file that says its images are in another file."""
    data = bytearray(write(4, format="mov"))
    place = data.find(b"dref")
    reference = box(b"url ", bytes(4) + target.encode() + b"\0")
    grown = len(reference) - 12
    for kind in (b"dref", b"dinf", b"minf", b"mdia", b"trak", b"moov"):
        outer = data.rfind(kind, 0, place + 4) - 4
        struct.pack_into(">I", data, outer, struct.unpack_from(">I", data, outer)[0] + grown)
    data[place + 12 : place + 24] = reference
    return bytes(data)


def test_nothing_else_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(video_stream, "_open_nothing", lambda *a: asked.append(a) or io.BytesIO())
    with socket.create_server(("127.0.0.1", 0)) as canary:
        canary.setblocking(False)
        url = f"http://127.0.0.1:{canary.getsockname()[1]}/secret.ts"
        playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{url}\n#EXT-X-ENDLIST\n"
        concat = f"ffconcat version 1.0\nfile '{url}'\n"
        for text in (playlist, concat):
            assert outcome(text.encode()) != "decoded"
            film = avi_with_subtitles(text.encode())
            with av.open(io.BytesIO(film)) as container:
                assert [stream.type for stream in container.streams] == ["video", "subtitle"]
            header, frames = decode(film, ALL)
            assert numbers(frames) == header.indices == (0, 1, 2)
        other = tmp_path / "secret.mov"
        other.write_bytes(write(4, format="mov"))
        for target in (str(other), url):
            # The reference is not even seen.
            assert numbers(decode(mov_referring_to(target))[1]) == (0, 1, 2, 3)
        with pytest.raises(BlockingIOError):
            canary.accept()
    assert not asked


def test_readers_are_told_what_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = av.open

    def spy(*arguments: Any, **options: Any) -> Any:
        calls.append((arguments, options))
        return real(*arguments, **options)

    monkeypatch.setattr(av, "open", spy)
    for kind in ("mp4 mpeg4 b", "avi mjpeg", "mkv ffv1 alpha"):
        decode(file_of(kind))
    assert {options["format"] for _, options in calls} == {"mp4", "avi", "matroska"}
    for arguments, options in calls:
        assert isinstance(arguments[0], FileReader)
        assert options["container_options"]["protocol_whitelist"] == "none"
    calls.clear()
    for data in secret_files().values():
        outcome(data)
    assert {options["format"] for _, options in calls} <= {"avi", "matroska", "mp4"}


# ---- claims


def claiming(num_frames: int) -> bytes:
    """An MP4 file of a thousand bytes whose header claims that many frames of one byte."""
    data = bytearray(write(12, b_frames=0))
    for kind, entries in (
        (b"stsz", (1, num_frames)),
        (b"stts", (1, num_frames, 1)),
        (b"stsc", (1, 1, num_frames, 1)),
    ):
        struct.pack_into(f">{len(entries)}I", data, data.find(kind) + 8, *entries)
    return bytes(data)


@pytest.mark.parametrize("claim", [500_001, 10**6, 10**9, 2**32 - 1])
def test_claims_are_counted_before_anyone_believes_them(
    claim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bombs = [claiming(claim)]
    for kind, offset in ((b"trun", 8), (b"stts", 12), (b"ctts", 12)):
        muxer = {"movflags": "frag_keyframe+empty_moov"} if kind == b"trun" else {}
        data = bytearray(write(12, "mpeg4", b_frames=2, muxer=muxer))
        struct.pack_into(">I", data, data.find(kind) + offset, claim)
        bombs.append(bytes(data))
    edited = bytearray(write(12, b_frames=0))
    struct.pack_into(">I", edited, edited.find(b"elst") + 8, claim)
    monkeypatch.setattr(av, "open", None)
    for bomb in bombs:
        assert "more than 500000" in str(refuse(bomb))
    assert "pieces" in str(refuse(bytes(edited)))


def test_a_small_lie_is_found_out() -> None:
    for claim in (13, 1000, 400_000):
        outcome(claiming(claim))
    data = bytearray(write(12, format="avi", b_frames=0))
    for place in (data.find(b"avih") + 8 + 16, data.find(b"strh") + 8 + 32):
        struct.pack_into("<I", data, place, 10**9)
    header, frames = decode(bytes(data), ALL)
    assert header.num_source_frames == 12
    assert numbers(frames) == tuple(range(12))


def test_boxes_are_counted_too() -> None:
    many = box(b"free", b"") * (1 << 21)
    with pytest.raises(VideoError, match="boxes"):
        hidden_boxes(memoryview(many))
    nested = b""
    for _ in range(10_000):
        nested = box(b"moov", nested)
    refuse(nested)
    refuse(box(b"ftyp", b"isom") + b"\0\0\0\4moov")
    refuse(box(b"ftyp", b"isom") + b"\0\0\0\1moov" + b"\xff" * 8)
    refuse(box(b"ftyp", b"isom") + b"\0\0\0\0moov")


def test_only_boxes_of_video_are_shown() -> None:
    data = memoryview(file_of("mp4 h264 dash"))
    hidden = hidden_boxes(data)
    kinds = {bytes(data[place : place + 4]) for place in hidden}
    assert {b"udta", b"dinf", b"sidx"} <= kinds
    assert not kinds & {b"moov", b"trak", b"moof", b"stbl", b"mdat", b"trun"}
    reader = FileReader(data, hidden)
    reader.allow_contents()
    for size in (1, 2, 3, 5, 7, 1 << 18, 1 << 20):
        assert reader.seek(0) == 0
        shown = bytearray()
        while part := reader.read(size):
            shown += part
            assert reader.tell() == len(shown)
        expected = bytearray(data)
        for place in hidden:
            expected[place : place + 4] = b"skip"
        assert shown == expected
    assert (reader.seek(-5), reader.seek(0, 9), reader.seek(-2, 2)) == (-1, -1, len(data) - 2)


def test_a_reader_has_a_budget() -> None:
    reader = FileReader(memoryview(bytes(1 << 20)), [])
    while reader.read(1 << 18):
        if reader.tell() == 1 << 20:
            reader.seek(0)
    assert reader.is_exhausted
    overlapping = bytearray(write(12, b_frames=0))
    struct.pack_into(">II", overlapping, overlapping.find(b"stsz") + 8, 1 << 30, 12)
    outcome(bytes(overlapping))


# ---- streams


def test_sound_only_and_covers() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), "fltp", "mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert "no video stream" in str(refuse(buffer.getvalue()))
    cover = io.BytesIO()
    Image.fromarray(drawing(1)).save(cover, "JPEG")
    for with_video in (True, False):
        buffer = io.BytesIO()
        with av.open(buffer, "w", format="matroska") as container:
            stream = container.add_stream("aac", rate=16000)
            container.add_attachment("cover.jpg", "image/jpeg", cover.getvalue())
            if with_video:
                video = container.add_stream("mpeg4", rate=10)
                video.width, video.height = WIDTH, HEIGHT
            container.mux(stream.encode(frame))
            container.mux(stream.encode())
            for index in range(9 if with_video else 0):
                image = av.VideoFrame.from_ndarray(drawing(index), format="rgb24")
                container.mux(video.encode(image))
            container.mux(video.encode() if with_video else [])
        if with_video:
            header, frames = decode(buffer.getvalue())
            assert numbers(frames) == header.indices == tuple(range(9))
        else:
            assert "no video stream" in str(refuse(buffer.getvalue()))


@pytest.mark.parametrize("format", ["mp4", "matroska", "avi"])
def test_no_frames_at_all(format: str) -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=format) as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height = WIDTH, HEIGHT
        container.start_encoding()
    refuse(buffer.getvalue())


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_ten_thousand_images_are_sampled() -> None:
    jpegs = [jpeg(number) for number in range(0, 1000, 100)]
    bomb = motion_jpeg([image for image in jpegs for _ in range(1000)])
    header, frames = decode(bomb, num_frames=10)
    assert header.num_source_frames == 10_000
    assert numbers(frames) == tuple(range(0, 1000, 100))
    assert "media.max_video_frames" in str(refuse(bomb, fps=30))
    assert decode(bomb, ALL)[0].num_frames == ALL.max_video_frames
    header, frames = decode([image for image in jpegs for _ in range(1000)], num_frames=10)
    assert header.num_source_frames == 10_000
    assert numbers(frames) == tuple(range(0, 1000, 100))


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_frames_that_are_not_wanted_are_not_kept() -> None:
    film = motion_jpeg([jpeg(number, 1280, 720) for number in range(2)] * 150)
    assert 300 * 1280 * 720 * 3 > 700 << 20
    decode(film, num_frames=2)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    header, _ = decode(film, num_frames=8)
    assert header.num_source_frames == 300
    assert peak_bytes() - before < 150 << 20


def test_images_that_change_size() -> None:
    film = motion_jpeg([jpeg(0), jpeg(1, 80, 24), jpeg(2), jpeg(3)])
    assert "change size" in str(refuse(film))
    assert numbers(decode(film, num_frames=2)[1]) == (0, 2)


def test_a_image_larger_than_the_header_says() -> None:
    film = motion_jpeg([jpeg(1, 640, 480)] * 3)
    assert refuse(film, MediaConfig(max_image_pixels=WIDTH * HEIGHT))
    header, frames = decode(film)
    assert header.size == ImageSize(640, 480)
    assert numbers(frames) == (1, 1, 1)


def test_times_below_zero_and_beyond_all() -> None:
    for start in (-1000, 5, 10**9):
        times = [start + 40 * index for index in range(12)]
        for format in ("mp4", "mov", "matroska"):
            muxer = {"avoid_negative_ts": "disabled"}
            data = write(12, format=format, times=times, b_frames=0, muxer=muxer)
            text = outcome(data)
            if start >= 0:
                assert text == "decoded"
    far = write(3, format="matroska", times=[0, 40, 3_700_000], b_frames=0)
    assert "media.max_video_s" in str(refuse(far))


@ordinary_priority()
def test_one_packet_with_a_hundred_thousand_frames() -> None:
    """AV1 shows a frame again for three bytes; what collects them all needs 3 KB for each."""
    if "libsvtav1" not in av.codecs_available:
        pytest.skip("this build of FFmpeg has no such encoder")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        stream = container.add_stream("libsvtav1", rate=30, options={"preset": "10"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        packets = []
        for index in range(12):
            image = av.VideoFrame.from_ndarray(drawing(index), format="rgb24")
            packets += stream.encode(image)
        again = b"\x1a\x01"
        is_bomb = False
        for packet in [*packets, *stream.encode()]:
            data = bytes(packet)
            if not is_bomb and data[-3:-1] == again:
                is_bomb = True
                bomb = av.Packet(data + data[-3:] * 100_000)
                bomb.pts, bomb.dts, bomb.stream = packet.pts, packet.dts, stream
                bomb.time_base, bomb.is_keyframe = packet.time_base, packet.is_keyframe
                packet = bomb
            container.mux(packet)
    assert is_bomb
    header, frames = decode(buffer.getvalue())
    assert header.num_source_frames == 12
    found = numbers(frames)
    assert sum(a != b for a, b in zip(found, range(12), strict=True)) == 1


def test_names_that_are_no_text() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        container.metadata["title"] = "secretsecret"
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height = WIDTH, HEIGHT
        image = av.VideoFrame.from_ndarray(drawing(5), format="rgb24")
        container.mux(stream.encode(image))
        container.mux(stream.encode())
    data = buffer.getvalue().replace(b"secretsecret", b"\xff\xfesecret\x80\xc0\xff\xff")
    assert numbers(decode(data)[1]) == (5,)


def test_unusual_codecs_are_not_run() -> None:
    for codec, format in (("wmv2", "avi"), ("cinepak", "avi"), ("mpeg4", "avi")):
        data = write(3, codec, format, pixels="rgb24" if codec == "cinepak" else "yuv420p")
        assert ("codec" in outcome(data)) == (codec != "mpeg4")


def test_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    assert "pip install 'aioengine[video]'" in str(refuse(file_of("mp4 mpeg4 b")))
    assert numbers(decode(np.stack([drawing(5)]))[1]) == (5,)
    assert numbers(decode([drawing(6)])[1]) == (6,)


def test_the_host_keeps_its_settings(capfd: Any) -> None:
    before = av.logging.get_level(), set(os.environ.items())
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0
    decode(file_of("mp4 mpeg4 b"))
    assert (av.logging.get_level(), set(os.environ.items())) == before
    if threads:
        assert len(os.listdir("/proc/self/task")) <= threads
    av.logging.set_level(av.logging.VERBOSE)
    try:
        outcome(file_of("mp4 mpeg4 b")[:3000] + bytes(1000) + file_of("mp4 mpeg4 b")[4000:])
        for data in secret_files().values():
            outcome(data)
    finally:
        av.logging.set_level(before[0])
    assert capfd.readouterr().out == ""
