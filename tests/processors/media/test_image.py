"""Images of every kind and brokenness: the right pixels, or a MediaError that shows nothing."""

from __future__ import annotations

import io
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from aioengine.config import MediaConfig
from aioengine.errors import InvalidRequestError, MediaError
from aioengine.processors.items import ImageSize
from aioengine.processors.media.image import open_image

CONFIG = MediaConfig()
Encode = Callable[..., bytes]
Noise = Callable[..., Image.Image]


def decode(item: Any, config: MediaConfig = CONFIG) -> Image.Image:
    source = open_image(item, config, parameter="images[3]")
    image = source.decode()
    assert image.mode == "RGB"
    assert image.size == source.header().size
    return image


def refuse(item: Any, config: MediaConfig = CONFIG) -> MediaError:
    with pytest.raises(MediaError) as caught:
        open_image(item, config, parameter="images[3]").decode()
    error = caught.value
    assert error.parameter == "images[3]"
    text = f"{error} {error.value!r}"
    assert text.startswith("images[3]")
    assert "0x" not in text and "<_io" not in text and " at " not in text
    assert error.__cause__ is None and error.__context__ is None
    return error


def same(first: Image.Image, second: Image.Image) -> bool:
    return first.size == second.size and first.tobytes() == second.tobytes()


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "JPEG", "WEBP", "GIF"])
def test_formats(encode: Encode, noise: Noise, format: str) -> None:
    data = encode(noise(37, 23), format)
    header = open_image(data, CONFIG, parameter="x").header()
    assert (header.format, header.size) == (format, ImageSize(37, 23))
    assert same(decode(data), Image.open(io.BytesIO(data)).convert("RGB"))
    assert same(decode(bytearray(data)), decode(memoryview(data)))


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "LAB", "HSV"])
def test_modes_without_alpha(noise: Noise, mode: str) -> None:
    image = noise(300, 260).convert(mode) if mode != "LAB" else noise(300, 260, "L")
    assert same(decode(image), image.convert("RGB"))


@pytest.mark.parametrize(
    ("mode", "format"),
    [("1", "PNG"), ("1", "TIFF"), ("1", "BMP"), ("L", "JPEG"), ("P", "PNG"), ("P", "GIF"),
     ("P", "TIFF"), ("P", "BMP"), ("CMYK", "JPEG"), ("CMYK", "TIFF"), ("YCbCr", "JPEG"),
     ("YCbCr", "TIFF"), ("LAB", "TIFF")],
)  # fmt: skip
def test_modes_in_files(encode: Encode, noise: Noise, mode: str, format: str) -> None:
    image = noise(300, 260).convert(mode) if mode != "LAB" else noise(300, 260, "L")
    data = encode(image, format)
    assert same(decode(data), Image.open(io.BytesIO(data)).convert("RGB"))


def over_white(image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, rgba).convert("RGB")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_alpha_goes_over_white(encode: Encode, noise: Noise, mode: str) -> None:
    # Larger than one tile in both directions.
    rgba = noise(300, 500, "RGBA")
    image = rgba if mode == "RGBA" else rgba.convert("LA").convert(mode)
    assert same(decode(image), over_white(image))
    if mode != "PA":
        assert same(decode(encode(image, "PNG")), over_white(image))
        assert same(decode(encode(image, "TIFF")), over_white(image))
        multiplied = image.convert(mode.replace("A", "a"))
        assert same(decode(multiplied), over_white(multiplied.convert(mode)))


def test_transparent_colours(encode: Encode, noise: Noise) -> None:
    grey = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    assert same(
        decode(encode(grey, "PNG", transparency=7)).crop((7, 0, 8, 1)),
        Image.new("RGB", (1, 1), "white"),
    )
    palette = noise(20, 20).quantize(16)
    clear = decode(encode(palette, "PNG", transparency=bytes([0] * 16)))
    assert clear.getextrema() == ((255, 255),) * 3
    rgb = Image.new("RGB", (3, 3), (1, 2, 3))
    assert decode(encode(rgb, "PNG", transparency=(1, 2, 3))).getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bits_keep_their_upper_eight(encode: Encode) -> None:
    deep = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    image = Image.fromarray(deep)
    expected = np.repeat((deep >> 8).astype(np.uint8)[..., None], 3, axis=-1)
    for item in (image, encode(image, "PNG"), encode(image, "TIFF")):
        assert np.array_equal(np.asarray(decode(item)), expected)
    assert np.array_equal(np.asarray(decode(Image.fromarray(deep.astype(np.int32)))), expected)
    swapped = Image.frombytes("I;16B", (64, 64), deep.astype(">u2").tobytes())
    for item in (swapped, encode(swapped, "TIFF")):
        assert np.array_equal(np.asarray(decode(item)), expected)
    for clear in (0, 4096):
        image = decode(encode(Image.fromarray(deep), "PNG", transparency=clear))
        covered = np.where((deep == clear)[..., None], 255, expected)
        assert np.array_equal(np.asarray(image), covered)


def test_sixteen_bits_of_each_colour(noise: Noise) -> None:
    upper = np.asarray(noise(20, 30)).astype(np.uint16)
    rows = b"".join(b"\0" + row.tobytes() for row in (upper * 256 + 99).astype(">u2"))
    image = decode(png(struct.pack(">IIBBBBB", 20, 30, 16, 2, 0, 0, 0), rows))
    assert np.array_equal(np.asarray(image), upper)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_few_bits(bits: int) -> None:
    levels = np.arange(64).reshape(8, 8) % (1 << bits)
    packed = np.zeros((8, bits), np.uint8)
    for column in range(8):
        byte, place = divmod(column * bits, 8)
        packed[:, byte] |= (levels[:, column] << (8 - bits - place)).astype(np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in packed)
    image = decode(png(struct.pack(">IIBBBBB", 8, 8, bits, 0, 0, 0, 0), rows))
    assert np.array_equal(np.asarray(image)[..., 0], levels * (255 // ((1 << bits) - 1)))


@pytest.mark.parametrize(("scale", "top"), [(1.0, 1.0), (255.0, 255.0)])
def test_float_images(scale: float, top: float) -> None:
    values = np.linspace(0, top, 64, dtype=np.float32).reshape(8, 8)
    image = decode(Image.fromarray(values))
    assert image.getpixel((7, 7)) == (255, 255, 255)
    assert image.getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize("bad", [np.nan, -1.0, 1e9, np.inf])
def test_float_images_out_of_range(bad: float) -> None:
    values = np.full((8, 8), 0.5, dtype=np.float32)
    values[3, 3] = bad
    refuse(Image.fromarray(values))
    refuse(values)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(encode: Encode, noise: Noise, format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if format == "WEBP" else {}
    data = encode(noise(40, 24), format, exif=exif.tobytes(), **options)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)).convert("RGB"))
    if format == "TIFF":  # Pillow has applied it on loading.
        expected = Image.open(io.BytesIO(data)).convert("RGB")
    assert expected.size == ((24, 40) if orientation >= 5 else (40, 24))
    assert same(decode(data), expected)
    assert same(decode(Image.open(io.BytesIO(data))), expected)
    loaded = Image.open(io.BytesIO(data))
    loaded.load()
    assert same(decode(loaded), expected)


def test_exif_behind_the_pixels_of_a_png(encode: Encode, noise: Noise) -> None:
    data = encode(noise(40, 24), "PNG")
    exif = Image.Exif()
    exif[0x0112] = 6
    block = exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = b"eXIf" + block
    late = struct.pack(">I", len(block)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    assert decode(data[:-12] + late + data[-12:]).size == (24, 40)


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b""])
def test_broken_metadata_is_no_reason_to_refuse(encode: Encode, noise: Noise, exif: bytes) -> None:
    assert decode(encode(noise(9, 8), "PNG", exif=exif)).size == (9, 8)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_frame_of_an_animation(encode: Encode, noise: Noise, format: str) -> None:
    frames = [noise(20, 10, seed=seed).convert("L") for seed in range(3)]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encode(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert Image.open(io.BytesIO(data)).n_frames == 3
    assert same(decode(data), frames[0].convert("RGB"))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_cut_short_anywhere(encode: Encode, noise: Noise, format: str) -> None:
    data = encode(noise(32, 32), format)
    points = sorted({*range(0, 64), *range(64, len(data), max(1, len(data) // 60))})
    for point in points:
        try:
            decode(data[:point])
        except MediaError as error:
            assert error.parameter == "images[3]"


@settings(max_examples=150, deadline=None)
@given(
    format=st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]),
    damage=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=6),
)
def test_damaged_anywhere(format: str, damage: list[tuple[float, int]]) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((24, 24), 90).convert("RGB").save(buffer, format)
    data = bytearray(buffer.getvalue())
    for place, value in damage:
        data[min(int(place * len(data)), len(data) - 1)] = value
    try:
        decode(bytes(data), MediaConfig(max_image_pixels=10_000))
    except MediaError as error:
        assert error.parameter == "images[3]"


@pytest.mark.parametrize(
    "data", [b"", b"x", b"GIF89a", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBPVP8 ", b"\0" * 99]
)
def test_no_image_at_all(data: bytes) -> None:
    refuse(data)


def png(header: bytes, rows: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    pixels = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


def webp_header(width: int, height: int) -> bytes:
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + canvas + b"\0" * 8


def bombs(encode: Encode) -> list[bytes]:
    gif = bytearray(encode(Image.new("L", (4, 4)), "GIF"))
    gif[6:10] = struct.pack("<HH", 60000, 60000)
    bmp = bytearray(encode(Image.new("RGB", (4, 4)), "BMP"))
    bmp[18:26] = struct.pack("<ii", 50000, 50000)
    jpeg = bytearray(encode(Image.new("RGB", (4, 4)), "JPEG"))
    size = jpeg.index(b"\xff\xc0") + 5
    jpeg[size : size + 4] = struct.pack(">HH", 50000, 50000)
    tiff = encode(Image.new("RGB", (4, 4)), "TIFF")
    for tag in (256, 257):
        tiff = tiff.replace(
            struct.pack("<HHLL", tag, 4, 1, 4), struct.pack("<HHLL", tag, 4, 1, 50000)
        )
        tiff = tiff.replace(
            struct.pack("<HHLL", tag, 3, 1, 4), struct.pack("<HHLL", tag, 3, 1, 50000)
        )
    header = struct.pack(">IIBBBBB", 50000, 50000, 8, 2, 0, 0, 0)
    lossless = b"RIFF\x16\0\0\0WEBPVP8L\x0a\0\0\0\x2f\xff\xff\xff\x0f" + b"\0" * 8
    webp = webp_header(16_000, 16_000)
    return [png(header, b"\0" * 1000), webp, lossless, bytes(gif), bytes(bmp), bytes(jpeg), tiff]


def test_bombs_are_refused_before_decoding(encode: Encode) -> None:
    for data in bombs(encode):
        tracemalloc.start()
        start = time.perf_counter()
        error = refuse(data)
        seconds = time.perf_counter() - start
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert "max_image_pixels" in str(error)
        assert seconds < 1
        assert peak < 4 << 20


@pytest.mark.filterwarnings("error")
def test_between_our_limit_and_pillows_own(encode: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    data = encode(Image.new("RGB", (40, 40)), "PNG")
    assert decode(data).size == (40, 40)


def test_limits_hold_for_every_kind(encode: Encode) -> None:
    config = MediaConfig(max_image_pixels=99, max_image_bytes=500)
    image = Image.new("RGB", (10, 10))
    for item in (image, np.zeros((10, 10, 3), np.uint8), torch.zeros(3, 10, 10), encode(image)):
        assert "max_image_pixels (99)" in str(refuse(item, config))
    assert "max_image_bytes (500)" in str(refuse(b"\xff\xd8\xff" + b"x" * 500, config))
    assert decode(Image.new("RGB", (9, 11)), config).size == (9, 11)


def test_thin_images_are_refused(encode: Encode) -> None:
    for size in ((8000, 1), (1, 8000), (201, 1), (64_000_000, 1)):
        image = Image.new("1", size)
        assert "200 times" in str(refuse(image))
    assert "200 times" in str(refuse(encode(Image.new("L", (3, 700)), "PNG")))
    assert decode(Image.new("L", (1, 200))).size == (1, 200)


def test_only_allowed_formats(encode: Encode, noise: Noise) -> None:
    data = encode(noise(5, 5), "PPM")
    assert "none of the allowed formats" in str(refuse(data))
    assert decode(data, MediaConfig(image_formats=("ppm",))).size == (5, 5)
    refuse(encode(noise(5, 5), "PNG"), MediaConfig(image_formats=("JPEG",)))
    # One that the application opened, and Pillow has not read yet.
    refuse(Image.open(io.BytesIO(data)))
    loaded = Image.open(io.BytesIO(data))
    loaded.load()
    assert decode(loaded).size == (5, 5)


def test_postscript_never_runs() -> None:
    data = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nquit\n%%EOF\n"
    refuse(data)
    refuse(Image.open(io.BytesIO(data)))


@pytest.mark.parametrize(
    "item",
    [None, 3, "a.png", ["x"], object(), (1, 2), {"a": 1}, np.zeros(3), np.zeros((1, 2, 3, 4)),
     np.zeros((5, 5), np.int64), np.zeros((5, 5), bool), np.zeros((5, 5), "U1"),
     np.zeros((0, 5, 3), np.uint8), np.zeros((5, 5, 2), np.uint8), np.array(["x"], object),
     torch.zeros(3, 4, dtype=torch.int64), torch.zeros(2, 2, 2), torch.zeros(4, 4).to_sparse(),
     torch.zeros(4, 4, device="meta"), Image.new("RGB", (0, 4))],
    ids=lambda item: type(item).__name__,
)  # fmt: skip
def test_wrong_types_and_shapes(item: Any) -> None:
    error = refuse(item)
    assert isinstance(error, InvalidRequestError)


def test_arrays(noise: Noise) -> None:
    image = noise(300, 260)
    pixels = np.asarray(image)
    for item in (
        pixels,
        pixels.transpose(2, 0, 1),
        torch.from_numpy(pixels.copy()),
        torch.from_numpy(pixels.copy()).permute(2, 0, 1),
        np.asfortranarray(pixels),
        (pixels / 255).astype(np.float32),
        torch.from_numpy(pixels / 255),
        pixels[:, ::-1][:, ::-1],
    ):
        assert same(decode(item), image)
    assert same(decode(pixels[..., 0]), Image.fromarray(pixels[..., 0].copy()).convert("RGB"))
    alpha = np.dstack([pixels, np.full(pixels.shape[:2], 9, np.uint8)])
    assert same(decode(alpha), over_white(Image.fromarray(alpha)))
    for dtype in (torch.bfloat16, torch.float8_e5m2):  # numpy has neither
        assert same(decode(torch.ones(3, 4, 5, dtype=dtype)), Image.new("RGB", (5, 4), "white"))


def test_ambiguous_channels_follow_the_librarys_habit() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 7, 3), dtype=np.uint8)
    assert decode(pixels).size == (7, 3)
    assert decode(torch.from_numpy(pixels)).size == (3, 7)


def test_an_rgb_image_is_not_copied(noise: Noise) -> None:
    image = noise(30, 20)
    assert decode(image) is image


def key(item: Any) -> bytes:
    return open_image(item, CONFIG, parameter="x").identity()


def test_identity(encode: Encode, noise: Noise) -> None:
    flat = np.zeros(30 * 150 * 3, np.uint8)
    different = [
        flat.reshape(30, 150, 3),
        flat.reshape(150, 30, 3),
        flat.reshape(30, 450),
        np.zeros((30, 150, 3), np.float32),
        np.zeros((30, 150, 3), np.float64),
        torch.zeros(3, 30, 150, dtype=torch.float16),
        Image.new("RGB", (150, 30)),
        Image.new("RGB", (30, 150)),
        Image.new("L", (150, 30)),
        Image.new("RGBA", (150, 30)),
        Image.new("1", (150, 30)),
        encode(Image.new("RGB", (150, 30)), "PNG"),
        encode(Image.new("RGB", (150, 30)), "BMP"),
        *(noise(32, 32, "RGBA", seed=3).convert(mode) for mode in ("RGBA", "RGBa", "CMYK")),
        (view := np.random.default_rng(3).random((30, 4), dtype=np.float32)),
        view.view(np.uint8),
        view.reshape(10, 12),
    ]
    keys = [key(item) for item in different]
    assert len(set(keys)) == len(different)
    assert all(len(digest) == 32 for digest in keys)
    assert keys == [key(item) for item in different]


def test_identity_of_pixels_sees_every_pixel(noise: Noise) -> None:
    image = noise(300, 500)
    changed = image.copy()
    changed.putpixel((299, 499), tuple(255 - value for value in image.getpixel((299, 499))))
    assert key(image) == key(image.copy()) != key(changed)
    assert key(np.asarray(image)) != key(np.asarray(changed))


def test_identity_of_palettes_and_orientation(encode: Encode) -> None:
    first = Image.new("P", (4, 4))
    second = Image.new("P", (4, 4))
    first.putpalette([255, 0, 0])
    second.putpalette([0, 255, 0])
    assert key(first) != key(second)
    exif = Image.Exif()
    exif[0x0112] = 3
    straight = Image.linear_gradient("L")
    turned = Image.open(io.BytesIO(encode(straight, "PNG", exif=exif.tobytes())))
    assert key(straight) != key(turned)


def test_a_lazily_opened_image_in_two_requests(encode: Encode, noise: Noise) -> None:
    for _ in range(5):
        image = Image.open(io.BytesIO(encode(noise(200, 200), "PNG")))
        sources = [open_image(image, CONFIG, parameter="x") for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda source: source.identity(), sources))
        assert len(set(results)) == 1
