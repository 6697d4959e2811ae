"""Audio clips of every kind and brokenness: as long as promised, or a MediaError without data."""

from __future__ import annotations

import functools
import io
import pickle
import struct
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.config import MediaConfig
from aioengine.errors import MediaError
from aioengine.processors.items import AudioHeader
from aioengine.processors.media.audio import AudioSource, open_audio

soundfile: Any = pytest.importorskip("soundfile")
pytest.importorskip("soxr")

CONFIG = MediaConfig()
RATE = 16000

CODECS = {
    "WAV": "PCM_U8 PCM_16 PCM_24 PCM_32 FLOAT DOUBLE ULAW ALAW",
    "WAVEX": "PCM_16",
    "FLAC": "PCM_S8 PCM_16 PCM_24",
    "OGG": "VORBIS OPUS",
    "MP3": "MPEG_LAYER_III",
}
FILES = [(format, codec) for format, codecs in CODECS.items() for codec in codecs.split()]
LOSSY = FILES[-3:]
ONE_OF_EACH = [("WAV", "PCM_16"), ("FLAC", "PCM_16"), *LOSSY]
Samples: TypeAlias = np.ndarray[Any, Any]


def open_(item: Any, config: MediaConfig = CONFIG, rate: int = RATE) -> AudioSource:
    return open_audio(item, config, parameter="audios[3]", sample_rate=rate)


def decode(item: Any, config: MediaConfig = CONFIG, rate: int = RATE) -> Samples:
    source = open_(item, config, rate)
    clip = source.decode()
    assert clip.samples.dtype == np.float32
    assert source.header() == AudioHeader(len(clip.samples), rate) and clip.sample_rate == rate
    source.verify()
    return clip.samples


def attempt(item: Any, config: MediaConfig = CONFIG, rate: int = RATE) -> Samples | MediaError:
    """The samples, or an error that is as every error must be."""
    try:
        return decode(item, config, rate)
    except MediaError as caught:
        error = caught
    assert error.parameter == "audios[3]"
    text = f"{error} {error.value!r}"
    assert text.startswith("audios[3]") and len(text) < 400
    assert "0x" not in text and "object at" not in text and " at " not in text
    assert error.__cause__ is None and error.__context__ is None
    return error


def refuse(item: Any, config: MediaConfig = CONFIG, rate: int = RATE) -> MediaError:
    error = attempt(item, config, rate)
    assert isinstance(error, MediaError)
    return error


def noise(num_frames: int, channels: int = 1) -> Samples:
    """Quiet noise, float32 `[n, channels]`."""
    random = np.random.default_rng(0)
    return random.uniform(-0.2, 0.2, (num_frames, channels)).astype(np.float32)


def write(wave: Samples, rate: int, format: str = "WAV", subtype: str = "PCM_16") -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, wave, rate, format=format, subtype=subtype)
    return buffer.getvalue()


@functools.cache
def example(format: str, subtype: str, num_frames: int = 30_001) -> bytes:
    return write(noise(num_frames, 2), RATE, format, subtype)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(("format", "subtype"), FILES)
def test_every_file_is_as_long_as_promised(format: str, subtype: str, channels: int) -> None:
    rates = {"OPUS": (8000, 12000, 16000, 24000, 48000), "MPEG_LAYER_III": (8000, 22050, 44100)}
    for rate in rates.get(subtype, (8000, 16000, 44100, 96000)):
        for count in (1, 2, 1151, 1152, 1153, 20_011):
            data = write(noise(count, channels), rate, format, subtype)
            for model_rate in (16000, 24000):
                expected = -(-count * model_rate // rate)
                assert open_(data, rate=model_rate).header() == AudioHeader(expected, model_rate)
                assert len(decode(data, rate=model_rate)) == expected


MODEL_RATES = st.sampled_from([8000, 16000, 22050, 24000, 44100, 48000])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 150_000), st.integers(1000, 192_000), MODEL_RATES)
def test_every_array_is_as_long_as_promised(count: int, rate: int, model_rate: int) -> None:
    samples = decode((np.full(count, 1000, np.int16), rate), rate=model_rate)
    assert len(samples) == -(-count * model_rate // rate)


STEPS = {"PCM_U8": 2**-7, "PCM_16": 2**-15, "ULAW": 0.01}


@pytest.mark.parametrize(
    ("format", "subtype"), [*FILES[:7], ("FLAC", "PCM_16"), ("FLAC", "PCM_24")]
)
def test_channels_are_averaged(format: str, subtype: str) -> None:
    stereo = noise(70_000, 2)
    step = STEPS.get(subtype, 2e-7)
    samples = decode(write(stereo, RATE, format, subtype))
    assert np.abs(samples - stereo.mean(axis=1)).max() <= step
    eight = noise(9000, 8)
    assert np.allclose(decode(write(eight, RATE, "WAV", "FLOAT")), eight.mean(axis=1), atol=1e-6)


def test_lossy_files_sound_like_what_was_written() -> None:
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    for format, subtype in LOSSY:
        samples = decode(write(tone, RATE, format, subtype))
        assert np.corrcoef(samples[1000:-1000], tone[1000:-1000])[0, 1] > 0.99


@pytest.mark.parametrize("model_rate", [8000, 16000, 24000, 48000])
@pytest.mark.parametrize("rate", [8000, 11025, 16000, 44100, 48000, 192_000])
def test_a_resampled_sine_is_the_same_sine(rate: int, model_rate: int) -> None:
    def sine(at: int) -> Samples:
        return 0.7 * np.sin(2 * np.pi * 1000 * np.arange(at * 2) / at + 0.3)

    samples = decode((sine(rate).astype(np.float32), rate), rate=model_rate)
    edge = model_rate // 20  # The sine starts and stops there, which no filter can follow.
    assert np.abs(samples - sine(model_rate))[edge:-edge].max() < 2e-3


def test_what_the_model_cannot_hear_is_filtered_out() -> None:
    high = np.sin(2 * np.pi * 15_000 * np.arange(96_000) / 48_000).astype(np.float32)
    assert np.abs(decode((high, 48_000))[800:-800]).max() < 1e-3


def test_ranges() -> None:
    square = np.where(np.arange(44_100) // 50 % 2, 32767, -32768).astype(np.int16)
    for item in ((square, 44_100), write(square, 44_100)):
        samples = decode(item)
        assert samples.min() == -1 and samples.max() == 1
    loud = np.full(100, 3.5, np.float32)
    assert np.array_equal(decode((loud, RATE)), loud)
    assert np.array_equal(decode(write(loud, RATE, subtype="FLOAT")), loud)


def test_dtypes() -> None:
    wave = noise(5000)[:, 0]
    for dtype, scale, shift in ((np.uint8, 128, 128), (np.int16, 2**15, 0), (np.int32, 2**31, 0)):
        whole = np.rint(wave.astype(np.float64) * scale + shift).astype(dtype)
        expected = (whole.astype(np.float64) - shift) / scale
        assert np.allclose(decode((whole, RATE)), expected, atol=1e-7)
        assert np.array_equal(decode((torch.from_numpy(whole), RATE)), decode((whole, RATE)))
        assert np.array_equal(decode((whole, np.array(RATE))), decode((whole, torch.tensor(RATE))))
        swapped = whole.astype(whole.dtype.newbyteorder())
        assert np.array_equal(decode((swapped, RATE)), decode((whole, RATE)))
        assert open_((swapped, RATE)).identity() == open_((whole, RATE)).identity()
    for floating in (np.float16, np.float32, np.float64, np.longdouble):
        assert np.allclose(decode((wave.astype(floating), RATE)), wave, atol=1e-3)
    rounded = torch.from_numpy(wave).bfloat16()
    assert np.array_equal(decode((rounded, RATE)), rounded.float().numpy())
    assert np.array_equal(decode((torch.from_numpy(wave).requires_grad_(), RATE)), wave)
    half = torch.from_numpy(wave).half()
    assert open_((half, RATE)).identity() == open_((half.numpy(), RATE)).identity()


def test_shapes() -> None:
    stereo = noise(70_000, 2)
    expected = stereo.mean(axis=1)
    for item in (stereo, stereo.T, stereo.T.copy(), torch.from_numpy(stereo), stereo[::-1][::-1]):
        for rate in (RATE, np.int64(RATE), float(RATE), np.float32(RATE)):
            assert np.allclose(decode((item, rate)), expected, atol=1e-7)
            assert np.allclose(decode([item, rate]), expected, atol=1e-7)
    mono = stereo[:, 0]
    for item in (mono, mono[:, None], mono[None]):
        assert np.array_equal(decode((item, RATE)), mono)
    square = np.array([[1.0, 0.0], [0.5, 0.5]], np.float32)
    assert decode((square, RATE)).tolist() == [0.5, 0.5]
    assert decode((torch.from_numpy(square), RATE)).tolist() == [0.75, 0.25]


ZEROS = np.zeros(9, np.float32)
NO_RATES = (None, "16000", True, 0.5, float("nan"), float("inf"), 1j, np.float64("inf"), ZEROS)
BAD_RATES = (*NO_RATES, 0, -1, 999, 192_001, 10**5000, -(10**5000))
BAD_DTYPES = (bool, np.int8, np.int64, np.uint16, complex, object, "U1", "f4,f4")
BAD_SHAPES = (0, (0, 2), (2, 0), (0, 0), (), (2, 2, 9), (9, 100))
BAD_ITEMS = [
    *(None, "speech.wav", {"array": [0.0]}, [0.1, 0.2], ([0.1, 0.2], RATE)),
    *((RATE, ZEROS), (ZEROS, RATE, RATE), (ZEROS,), (np.array([0.5, None], object), RATE)),
    *[(ZEROS, rate) for rate in BAD_RATES],
    *[(np.zeros(9, dtype), RATE) for dtype in BAD_DTYPES],
    *[(np.zeros(shape, np.int16), RATE) for shape in BAD_SHAPES],
    *[(torch.from_numpy(np.zeros(shape, np.int16)), RATE) for shape in BAD_SHAPES],
    (torch.zeros(9).to_sparse(), RATE),
    (torch.zeros(9, device="meta"), RATE),
    (torch.zeros(9, dtype=torch.complex64), RATE),
]


@pytest.mark.parametrize("item", BAD_ITEMS, ids=range(len(BAD_ITEMS)))
def test_refused(item: Any) -> None:
    refuse(item)


def test_samples_need_their_rate() -> None:
    for bare in (np.zeros(9, np.float32), torch.zeros(9)):
        assert "(samples, sample_rate)" in str(refuse(bare))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300, 3e38])
def test_not_finite(bad: float) -> None:
    for place in (0, 40_000, 79_999):
        stereo = noise(80_000, 2).astype(np.float64)
        stereo[place] = bad, -bad if np.isinf(bad) else bad
        for rate in (RATE, 44_100):
            if bad != 3e38 or rate == RATE:
                refuse((stereo, rate))
                refuse(write(stereo, rate, subtype="DOUBLE"))


@pytest.mark.parametrize(("format", "subtype"), ONE_OF_EACH)
def test_cut_short(format: str, subtype: str, capfd: pytest.CaptureFixture[str]) -> None:
    data = example(format, subtype)
    for sixteenth in range(16):
        part = data[: len(data) * sixteenth // 16]
        if format == "OGG":  # It states no length: the last whole page ends it.
            samples = attempt(part)
            assert isinstance(samples, MediaError) or len(samples) < 30_001
        else:
            refuse(part)
    assert "callback" not in capfd.readouterr().err


def patch(data: bytes, where: int, form: str, *values: int) -> bytes:
    new = struct.pack(form, *values)
    return data[:where] + new + data[where + len(new) :]


WAV = example("WAV", "PCM_16")
FORMAT, DATA = WAV.index(b"fmt "), WAV.index(b"data")


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x7FFFF000])
def test_a_wav_written_to_a_pipe(size: int) -> None:
    piped = patch(patch(WAV, 4, "<I", size), DATA + 4, "<I", size)
    assert np.array_equal(decode(piped), decode(WAV))


NULLS = bytes(1000)
BROKEN = [
    *(b"", b"R", WAV[:44], b"RIFX" + WAV[4:], b"\0" + WAV, WAV.replace(b"data", b"dada")),
    b"RIFF" + WAV[4:8] + b"AVI " + WAV[12:],
    b"RIFF" + WAV[4:8] + b"WAVE" + b"junk\0\0\0\0" * 100_000,
    *[patch(WAV, DATA + 4, "<I", size) for size in (0, 1, 3, len(WAV), 1 << 30)],
    *[patch(WAV, FORMAT + 10, "<H", channels) for channels in (0, 9, 255, 1024, 65535)],
    *[patch(WAV, FORMAT + 12, "<I", rate) for rate in (0, 1, 999, 192_001, 2**31 - 1, 2**32 - 1)],
    *[patch(WAV, FORMAT + 8, "<H", tag) for tag in (0, 2, 85, 0x1234, 65535)],
    *[patch(WAV, FORMAT + 22, "<H", bits) for bits in (0, 64, 255, 65535)],
    *(pickle.dumps(noise(100)), b"\x93NUMPY" + NULLS, b"FORM\0\0\0\0AIFF" + NULLS),
    *(b"\xff\xfe" + NULLS, b"\xff\xfb\x90\x00", b"\xff\xfb\x90\x00Xing"),
    *(b"fLaC" + NULLS, b"OggS" + NULLS),
    *(b"ID3\4\0\0\0\0\0\0" * 100_000, b"ID3\4\0\0\x7f\x7f\x7f\x7f" + NULLS),
]


@pytest.mark.parametrize("data", BROKEN, ids=range(len(BROKEN)))
def test_broken_files(data: bytes) -> None:
    refuse(data)


def test_codecs_outside_the_list() -> None:
    for subtype in ("IMA_ADPCM", "MS_ADPCM", "GSM610"):
        assert "PCM_16" in str(refuse(write(noise(8000), 8000, "WAV", subtype)))
    for format in ("AIFF", "AU", "CAF", "W64", "RF64"):
        refuse(write(noise(800), 8000, format))
    config = MediaConfig(audio_formats=("wav",))
    assert len(decode(WAV, config)) == 30_001
    assert "(wav)" in str(refuse(example("FLAC", "PCM_16"), config))


def test_limits() -> None:
    config = MediaConfig(max_audio_s=1.5, max_audio_bytes=len(WAV) - 1)
    assert "media.max_audio_bytes" in str(refuse(WAV, config))
    for format, subtype in ONE_OF_EACH:
        assert len(decode(write(noise(24_000), RATE, format, subtype), config)) == 24_000
        long = write(noise(24_001), RATE, format, subtype)
        assert "media.max_audio_s (1.5" in str(refuse(long, config))
    assert len(decode((noise(24_000), RATE), config)) == 24_000
    refuse((noise(24_001), RATE), config)


def flac_of(data: bytes, num_frames: int) -> bytes:
    (fields,) = struct.unpack_from(">Q", data, 18)
    return patch(data, 18, ">Q", fields >> 36 << 36 | num_frames)


def test_flac_claims() -> None:
    data = example("FLAC", "PCM_16")
    assert np.array_equal(decode(flac_of(data, 0)), decode(data))
    assert np.array_equal(decode(flac_of(data, 100)), decode(data)[:100])
    assert np.array_equal(decode(data + b"TAG" + bytes(125)), decode(data))
    for claim in (30_002, 28_000_000):
        # The header is believed until it is decoded: nothing is before the prompt is laid out.
        assert open_(flac_of(data, claim)).header().num_samples == claim
        refuse(flac_of(data, claim))
    assert "max_audio_s" in str(refuse(flac_of(data, 1 << 35)))


def test_memory_is_bounded_by_the_limit() -> None:
    endless = flac_of(write(np.zeros(4_000_000, np.int16), RATE, "FLAC"), 0)
    assert len(endless) < 50_000
    config = MediaConfig(max_audio_s=10)
    refuse(endless, config)
    tracemalloc.start()
    try:
        for claim in (0, 100 * RATE, 1 << 35):
            refuse(flac_of(endless, claim), config)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def ogg_of(data: bytes, granule: int) -> bytes:
    """The last page's end in samples changed, its checksum set right."""
    at = data.rindex(b"OggS")
    page = bytearray(patch(patch(data[at:], 6, "<q", granule), 22, "<I", 0))
    checksum = 0
    for byte in page:
        checksum ^= byte << 24
        for _ in range(8):
            checksum = (checksum << 1 ^ (0x04C11DB7 if checksum >> 31 else 0)) & 0xFFFFFFFF
    return data[:at] + patch(bytes(page), 22, "<I", checksum)


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_ogg_claims(subtype: str) -> None:
    data = example("OGG", subtype)
    (end,) = struct.unpack_from("<q", data, data.rindex(b"OggS") + 6)
    assert np.array_equal(decode(ogg_of(data, end)), decode(data))
    assert "max_audio_s" in str(refuse(ogg_of(data, 1 << 35)))
    refuse(ogg_of(data, end + 1_000_000))
    assert len(decode(data + bytes(5000))) == 30_001
    assert "several" in str(refuse(data + data))


def mp3_of(num_frames: int, rate: int, channels: int = 1, mode: str = "CONSTANT") -> bytes:
    """Loud, then silent."""
    samples = noise(num_frames, channels)
    samples[num_frames // 8 :] = 0
    options = {"bitrate_mode": mode, "compression_level": 0.5}
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="MP3", **options)
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
def test_mp3_that_do_not_tell_their_length(rate: int, channels: int, mode: str) -> None:
    count = rate * 3
    told = mp3_of(count, rate, channels, mode)
    assert len(decode(told, rate=rate)) == count
    samples = decode(told[told.index(told[:2], 2) :], rate=rate)
    # Whole frames, and the coder's delay is not known.
    assert count <= len(samples) < count + 4000
    assert np.abs(samples[: count // 9]).max() > 0.1 and np.abs(samples[count // 2 :]).max() < 0.01
    tag = max(told.find(b"Xing", 0, 64), told.find(b"Info", 0, 64))
    for zeroed in (patch(told, tag + 8, ">I", 0), patch(told, tag + 7, ">B", 0)):
        assert count <= len(decode(zeroed, rate=rate)) < count + 5000
    # Joined end to end, as speech services do: all of it counts, whatever the first tag tells.
    assert 2 * count <= len(decode(told + told, rate=rate)) < 2 * count + 6000
    id3 = b"ID3\x04\0\0\0\0\1\0" + bytes(128)
    assert 2 * count <= len(decode((id3 + told) * 2, rate=rate)) < 2 * count + 6000
    assert len(decode(id3 + told + b"TAG" + bytes(125), rate=rate)) == count


def test_mp3_claims() -> None:
    told = mp3_of(90_000, RATE)
    tag = told.index(b"Info")
    refuse(patch(told, tag + 8, ">I", 1000))
    assert "max_audio_s" in str(refuse(patch(told, tag + 8, ">I", 1 << 24)))
    assert len(decode(patch(told, tag + 8, ">I", 5))) <= 5 * 1152


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(ONE_OF_EACH), st.data())
def test_damaged_files(kind: tuple[str, str], data: st.DataObject) -> None:
    damaged = bytearray(example(*kind, num_frames=3000))
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, data.draw(st.sampled_from([64, len(damaged) - 1]))))
        damaged[place] = data.draw(st.sampled_from([0, 1, 127, 128, 255]))
    config = MediaConfig(max_audio_s=5)
    samples = attempt(bytes(damaged), config)
    assert isinstance(samples, MediaError) or len(samples) <= 5 * RATE


def test_identity() -> None:
    wave = np.arange(60, dtype=np.int16)
    items = [
        (wave, RATE),
        (wave, 8000),
        (wave[:-1], RATE),
        (wave + 1, RATE),
        *[(wave.reshape(shape), RATE) for shape in ((2, 30), (30, 2), (3, 20), (1, 60))],
        *[(wave.view(dtype), RATE) for dtype in (np.uint8, np.float16, np.int32)],
        (wave.astype(np.int32), RATE),
        *(example("FLAC", "PCM_16"), WAV + b"\0", WAV),
    ]
    identities = [open_(item).identity() for item in items]
    assert len(set(identities)) == len(items) and {len(one) for one in identities} == {32}
    assert identities == [open_(item, rate=24_000).identity() for item in items]
    assert open_(bytearray(WAV)).identity() == open_(memoryview(WAV)).identity() == identities[-1]
    strided = memoryview(bytes(byte for byte in WAV for _ in range(2)))[::2]
    assert open_(strided).identity() == identities[-1]
    assert np.array_equal(decode(memoryview(bytearray(WAV)).cast("H")), decode(WAV))


def test_nothing_changes_after_identity() -> None:
    for item in (noise(70_000, 2), torch.from_numpy(noise(70_000, 2))):
        source = open_((item, 44_100))
        expected = decode((item, 44_100))
        identity = source.identity()
        item[:] = 0
        assert np.array_equal(source.decode().samples, expected)
        assert source.identity() == identity
        source.verify()
    data = bytearray(WAV)
    source = open_(data)
    data[100:] = bytes(len(data) - 100)
    assert np.array_equal(source.decode().samples, decode(WAV))


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("soundfile", "soxr"):
        monkeypatch.setitem(sys.modules, name, None)
    assert len(decode((np.zeros(9, np.int16), RATE))) == 9
    for item in (WAV, (np.zeros(9, np.int16), 8000)):
        assert "pip install 'aioengine[audio]'" in str(refuse(item))


def test_threads() -> None:
    items = [example(*kind) for kind in ONE_OF_EACH] * 4
    expected = [decode(item) for item in items[:5]] * 4
    with ThreadPoolExecutor(8) as pool:
        for one, other in zip(pool.map(decode, items), expected, strict=True):
            assert np.array_equal(one, other)
