"""Files whose cost is out of proportion: refused by what they say, before they cost it."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
from PIL import Image

from aioengine.config import MediaConfig
from aioengine.errors import MediaError
from aioengine.processors.media import effort
from aioengine.processors.media.image import open_image

CONFIG = MediaConfig()
Encode = Callable[..., bytes]
Noise = Callable[..., Image.Image]
SMALL = Image.new("RGB", (8, 8), "red")


def decode(data: bytes, config: MediaConfig = CONFIG) -> Image.Image:
    return open_image(data, config, parameter="images[3]").decode()


def refuse(data: bytes, config: MediaConfig = CONFIG) -> str:
    tracemalloc.start()
    try:
        with pytest.raises(MediaError) as caught:
            decode(data, config)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.parameter == "images[3]"
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert peak < 32 << 20
    return str(caught.value)


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


@pytest.mark.parametrize("place", [b"IDAT", b"IEND"])
@pytest.mark.parametrize("kind", [b"prVt", b"IDAT"])
def test_chunks_of_a_png(encode: Encode, place: bytes, kind: bytes) -> None:
    data = encode(SMALL)
    where = data.index(place) - 4
    assert decode(data[:where] + chunk(kind) * 2000 + data[where:]).getpixel((7, 7)) == (255, 0, 0)
    assert "too many blocks" in refuse(data[:where] + chunk(kind) * 60_000 + data[where:])


@pytest.mark.parametrize("kind", [b"iCCP", b"zTXt", b"iTXt"])
def test_packed_text_in_a_png(encode: Encode, kind: bytes) -> None:
    packed = zlib.compress(b"\0" * (64 << 20), 9)
    head = b"name\0\1\0\0\0" if kind == b"iTXt" else b"name\0\0"
    data = encode(SMALL)
    where = data.index(b"IDAT") - 4
    refuse(data[:where] + chunk(kind, head + packed) + data[where:])


@pytest.mark.parametrize(
    "block", [b"\xff\xe5\0\2", b"\xff\xfe\0\3x", b"\xff", b"\xff\xd0", b"x", b"\xff\0"]
)
def test_segments_of_a_jpeg(encode: Encode, block: bytes) -> None:
    data = encode(SMALL, "JPEG")
    where = data.index(b"\xff\xdb")
    assert decode(data[:where] + block * 2000 + data[where:]).size == (8, 8)
    assert "too many blocks" in refuse(data[:where] + block * 120_000 + data[where:])


def test_pieces_of_exif_in_a_jpeg(encode: Encode) -> None:
    data = encode(SMALL, "JPEG")
    piece = b"\xff\xe1" + struct.pack(">H", 60_008) + b"Exif\0\0" + bytes(60_000)
    assert decode(data[:2] + piece * 3 + data[2:]).size == (8, 8)
    assert "too many blocks" in refuse(data[:2] + piece * 101 + data[2:])


def scans(image: bytes, count: int) -> bytes:
    """A progressive JPEG with its last scan so many times more."""
    return image[:-2] + image[image.rindex(b"\xff\xda") : -2] * count + image[-2:]


def test_scans_of_a_jpeg(encode: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(Image.new("L", (600, 600), 77), "JPEG", progressive=True)
    assert decode(scans(data, 100)).getpixel((9, 9)) == (77, 77, 77)
    assert "too many scans" in refuse(scans(data, 4000))
    wide = encode(Image.new("L", (6000, 6000), 77), "JPEG", progressive=True)
    assert "too many scans" in refuse(scans(wide, 30))
    # Few are always fine, whatever the limit on pixels.
    monkeypatch.setattr(effort, "MAX_SCANNED_PIXELS", 1)
    assert decode(encode(Image.new("L", (600, 600), 77), "JPEG")).size == (600, 600)


def test_scans_are_counted_across_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\xff\xda" * 50 + b"x" + b"\xff\xda" * 50
    for size in (1, 2, 3, 7, 200, 300):
        monkeypatch.setattr(effort, "PIECE_BYTES", size)
        assert effort._count_scans(data) == 100


@pytest.mark.parametrize("block", [b"!\xfe\1x\0", b"!\xfe\0", b"!\xff\1x\0", b"x"])
def test_blocks_of_a_gif(encode: Encode, block: bytes) -> None:
    data = encode(SMALL, "GIF")
    where = 13 + 3 * (2 << (data[10] & 7))
    assert decode(data[:where] + block * 2000 + data[where:]).size == (8, 8)
    assert "too many blocks" in refuse(data[:where] + block * 60_000 + data[where:])


def tiff(tags: dict[int, tuple[int, int, int]], data: bytes, *, order: str = "<") -> bytes:
    """Directory first, then the data, to which offsets are relative that are negative."""
    start = 8 + 2 + 12 * len(tags) + 4
    entries = b""
    for tag, (kind, count, value) in sorted(tags.items()):
        value = start - value - 1 if value < 0 else value
        entries += struct.pack(f"{order}HHLL", tag, kind, count, value)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}LH", 8, len(tags))
    return head + entries + bytes(4) + data


GREY = {256: (4, 1, 64), 257: (4, 1, 64), 258: (4, 1, 8), 262: (4, 1, 1), 277: (4, 1, 1)}


@pytest.mark.parametrize("order", ["<", ">"])
def test_tiles_of_a_tiff(order: str) -> None:
    def tiled(side: int) -> bytes:
        packed = zlib.compress(b"\x55" * (side * side))
        tags = {259: (4, 1, 8), 322: (4, 1, side), 323: (4, 1, side), 324: (4, 1, -1),
                325: (4, 1, len(packed))}  # fmt: skip
        return tiff(GREY | tags, packed, order=order)

    assert decode(tiled(256)).getpixel((63, 63)) == (0x55, 0x55, 0x55)
    small = MediaConfig(max_image_pixels=1_000_000)
    assert decode(tiled(992), small).size == (64, 64)
    assert "tiles are larger than media.max_image_pixels" in refuse(tiled(1008), small)


@pytest.mark.parametrize("order", ["<", ">"])
def test_lists_of_a_tiff(order: str) -> None:
    def listed(tag: int, count: int) -> bytes:
        tags = {259: (4, 1, 1), 273: (4, 1, -1), 278: (4, 1, 64), 279: (4, 1, 4096)}
        offsets = struct.pack(f"{order}L", 8) * max(count, 4096)
        return tiff(GREY | tags | {tag: (4, count, -1)}, offsets, order=order)

    assert decode(listed(40_000, 1000)).size == (64, 64)
    for tag in (258, 273, 279, 40_000):
        assert "too many blocks" in refuse(listed(tag, 200_000))
    big = b"II+\0" + struct.pack("<HHQQHHQQ", 8, 0, 16, 1, 273, 4, 1 << 60, 0)
    assert "too many blocks" in refuse(big + bytes(99))
    for broken in (b"II*\0", b"II+\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff" + bytes(40)):
        assert "TIFF header is corrupt" in refuse(broken)


def bmp(width: int, height: int, rows: bytes, *, bits: int) -> bytes:
    colours = bytes(4 << bits)
    sizes = (40, width, height, 1, bits, 2 if bits == 4 else 1, len(rows), 0, 0, 1 << bits, 0)
    head = struct.pack("<IiiHHIIiiII", *sizes) + colours
    return (
        b"BM"
        + struct.pack("<IHHI", 14 + len(head) + len(rows), 0, 0, 14 + len(head))
        + (head + rows)
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_run_lengths_of_a_bmp(bits: int) -> None:
    rows = b"\xf0\1\0\0" * 240 + b"\0\1"
    assert decode(bmp(240, 240, rows, bits=bits)).size == (240, 240)
    assert decode(bmp(240, 240, (b"\1\1" * 240 + b"\0\0") * 240, bits=bits)).size == (240, 240)
    assert "run-length" in refuse(bmp(3000, 3000, rows, bits=bits))
    assert "run-length" in refuse(bmp(240, 240, b"\0\0" * (3 << 20), bits=bits))


def test_long_animations_are_one_image(encode: Encode, noise: Noise) -> None:
    """More frames than blocks are read: only the first one is."""
    frames = [noise(8, 8, seed=seed).convert("L") for seed in range(2)]
    gif = encode(frames[0], "GIF")
    start = 13 + 3 * (2 << (gif[10] & 7))
    webp = encode(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    last = webp.rindex(b"ANMF")
    webp += webp[last:] * 10_000
    webp = b"RIFF" + struct.pack("<I", len(webp) - 8) + webp[8:]
    png = encode(frames[0], "PNG", save_all=True, append_images=frames[1:])
    second, end = png.rindex(b"fcTL") - 4, png.rindex(b"IEND") - 4
    long = [
        gif[:start] + gif[start:-1] * 60_000 + b";",
        webp,
        png[:second] + png[second:end] * 30_000 + png[end:],
        encode(frames[0], "TIFF", save_all=True, append_images=frames[1:] * 200),
    ]
    for data in long:
        assert decode(data).tobytes() == frames[0].convert("RGB").tobytes()


def test_a_reader_of_other_formats_is_not_bounded() -> None:
    for format in ("QOI", "DDS", ""):
        assert type(effort.make_reader(b"x", format)) is io.BytesIO
    reader = effort.make_reader(b"x" * 512_000, "PNG")
    for _ in range(effort.FREE_READS + 2000):
        reader.read(1)
    with pytest.raises(effort.EffortError):
        reader.read(1)


def test_no_pixels_at_all_are_no_black_image(encode: Encode) -> None:
    data = encode(SMALL)
    where = data.index(b"IDAT") - 4
    refuse(data[:where] + chunk(b"acTL", bytes(8)) + data[where:])
    refuse(data[:where] + data[data.index(b"IEND") - 4 :])


def test_a_file_shorter_than_any_mark() -> None:
    Image.init()
    config = MediaConfig(image_formats=tuple(Image.OPEN))
    for data in (b"\0", b"\0\0\2", b"BM", b"\xff\xd8\xff"):
        refuse(data, config)
