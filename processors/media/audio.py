"""Audio, hostile until decoded: recognised, measured and bounded, then mono at one rate.

Everything moves in blocks, so that neither memory nor the time without the GIL grows with what a
header claims. soundfile and soxr, the optional extra "audio", are imported on first use.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np
import torch

from aioengine.config import MediaConfig
from aioengine.processors.cache.hasher import ContentHasher
from aioengine.processors.items import AudioClip, AudioHeader
from aioengine.processors.media.pixels import Array
from aioengine.processors.media.source import Encoded, MediaSource, keep_bytes, to_numpy

__all__ = ["AudioSource", "open_audio"]

ARRAYS = (np.ndarray, torch.Tensor)
ACCEPTED = (
    "encoded bytes, or (samples, sample_rate) in this order, the samples a numpy array or torch "
    "tensor of shape (n,), (channels, n) or (n, channels) holding uint8, int16, int32 or floats"
)
MAX_CHANNELS = 8
MIN_SAMPLE_RATE, MAX_SAMPLE_RATE = 1000, 192_000
BLOCK_SAMPLES = 1 << 16
ENDLESS = 1 << 40  # More frames than a header can mean.

# What a container may hold: codecs whose decoded length is known exactly beforehand.
_CODECS = {
    "WAV": ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"),
    "FLAC": ("PCM_S8", "PCM_16", "PCM_24"),
    "OGG": ("VORBIS", "OPUS"),
    "MP3": ("MPEG_LAYER_III",),
}
# dtype -> the value of silence, and full scale. 8 bits are unsigned, as in a WAV file.
_INTEGERS = {"uint8": (128, 1 << 7), "int16": (0, 1 << 15), "int32": (0, 1 << 31)}


class AudioSource(MediaSource[AudioHeader, AudioClip]):
    """One audio item of a request, not decoded yet.

    Encoded audio is identified by their bytes; samples by dtype, shape, rate and bytes. The
    model's rate is no part of their identity.
    """

    _noun = "audio item"

    def __init__(self, config: MediaConfig, parameter: str, sample_rate: int) -> None:
        super().__init__(config, parameter)
        self._sample_rate = sample_rate
        self._num_frames = self._source_rate = 0
        self._holds_floats = False

    def decode(self) -> AudioClip:
        """The audio as float32 `[num_samples]`, exactly as many as the header says.

        Channels are averaged, then resampled (soxr, HQ). What was stored as floats keeps its range,
        all else lies in [-1, 1]. Raises MediaError for samples that are not finite.
        """
        header = self.header()
        samples = np.empty(header.num_samples, np.float32)
        filled = 0
        for block in self._resampled():
            part = block[: len(samples) - filled]
            if not np.isfinite(part).all():
                raise self._error("it has samples that are not finite (NaN, infinite or too large)")
            if not self._holds_floats:
                part = np.clip(part, -1, 1)  # Filters overshoot, lossy codecs too.
            samples[filled : filled + len(part)] = part
            filled += len(part)
        assert filled == len(samples)
        return AudioClip(samples, header.sample_rate)

    def _read_header(self) -> AudioHeader:
        """Return how many samples the model gets: the length in seconds times its rate, rounded
        up."""
        frames, rate = self._num_frames, self._source_rate = self._measure()
        if rate != self._sample_rate:
            self._load("soxr")  # Said before the prompt is laid out, if it is missing.
        return AudioHeader(-(-frames * self._sample_rate // rate), self._sample_rate)

    @abstractmethod
    def _measure(self) -> tuple[int, int]:
        """The exact number of frames, and the source's rate in Hz; checked against the limits."""

    @abstractmethod
    def _blocks(self) -> Iterator[Array]:
        """The frames that were measured, float32 `[n]`, mono; each block is good until the next."""

    def _resampled(self) -> Iterator[Array]:
        if (rate := self._source_rate) == self._sample_rate:
            yield from self._blocks()
            return
        soxr = self._load("soxr")
        stream = soxr.ResampleStream(rate, self._sample_rate, 1, dtype="float32", quality="HQ")
        for block in self._blocks():
            yield stream.resample_chunk(block)
        # soxr rounds the length down or up; a little silence makes sure of the promised one.
        silence = np.zeros(rate // self._sample_rate + 2, np.float32)
        yield stream.resample_chunk(silence, last=True)

    def _check(self, channels: int, rate: int, frames: int | None = None) -> None:
        if channels < 1 or frames == 0:
            raise self._error("it is empty (0 samples)", value=0)
        if channels > MAX_CHANNELS:
            raise self._error(f"its {channels} channels are more than {MAX_CHANNELS}")
        if not MIN_SAMPLE_RATE <= rate <= MAX_SAMPLE_RATE:
            limits = f"{MIN_SAMPLE_RATE} to {MAX_SAMPLE_RATE}"
            raise self._error(f"its sample rate, {rate} Hz, is not within {limits}", value=rate)
        if (frames or 0) > (limit := self._config.max_audio_s) * rate:
            raise self._error(f"it is longer than media.max_audio_s ({limit} seconds)")

    def _load(self, name: str) -> Any:
        with suppress(ImportError, OSError):  # OSError: the library that it wraps is missing.
            return import_module(name)
        raise self._error(f"{name} is not installed: pip install 'aioengine[audio]'")


def open_audio(
    item: object, config: MediaConfig, *, parameter: str, sample_rate: int
) -> AudioSource:
    """The source for one audio item as the caller gave it, or as it was fetched.

    `sample_rate` is the model's, in Hz. Reads headers only. Samples are uint8 (128 is silence),
    int16, int32 or floating, `[n]`, `[channels, n]` or `[n, channels]`, the shorter axis being the
    channels. Raises MediaError for other types, formats that are not allowed, and audio over
    the limits of `config`.
    """
    source: AudioSource
    if isinstance(item, Encoded):
        source = _EncodedAudio(item, config, parameter, sample_rate)
    elif isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], ARRAYS):
        source = _ArrayAudio(item[0], item[1], config, parameter, sample_rate)
    else:
        kind = type(item).__name__ + (" without its rate" if isinstance(item, ARRAYS) else "")
        raise AudioSource.not_accepted(parameter, ACCEPTED, kind)
    source.header()
    return source


class _EncodedAudio(AudioSource):
    """An audio item's file in memory."""

    _data: memoryview

    def __init__(
        self, data: Encoded, config: MediaConfig, parameter: str, sample_rate: int
    ) -> None:
        super().__init__(config, parameter, sample_rate)
        self._check_num_bytes(data, "audio")
        self._data = keep_bytes(data)
        self._format, self._sound = _recognise(self._data)
        if self._format not in {name.upper() for name in config.audio_formats}:
            names = ", ".join(config.audio_formats)
            raise self._error(f"it is in none of the allowed formats ({names})")

    def identity(self) -> bytes:
        return ContentHasher("encoded audio", self._data).digest()

    def _measure(self) -> tuple[int, int]:
        # libsndfile's lengths are exact where the header tells one (LAME's for MP3), as OGG's last
        # page does. The claim is checked when decoded, and here where that would come out wrong.
        if self._format == "WAV" and _is_cut_wav(self._sound):
            raise self._error("its WAV data is cut short")
        if self._format == "OGG" and _has_more_streams(self._sound):
            raise self._error("it holds several OGG streams: give each on its own")
        if self._format == "MP3":
            self._sound = self._guarded("its MP3 data", _with_length, self._sound)
        with self._open() as file:
            codecs, rate, frames = _CODECS[self._format], file.samplerate, file.frames
            if file.format.replace("WAVEX", "WAV") != self._format or file.subtype not in codecs:
                raise self._error(f"it is no {self._format} of {', '.join(codecs)}")
            self._holds_floats = file.subtype in ("FLOAT", "DOUBLE")
            self._check(file.channels, rate)
            if frames > ENDLESS:
                # Not given (FLAC, MP3): decoded once to count, as far as it is allowed to go.
                limit = int(self._config.max_audio_s * rate) + 1
                frames = sum(len(block) for block in self._read(file, limit))
            self._check(file.channels, rate, frames)
        return frames, rate

    def _blocks(self) -> Iterator[Array]:
        missing = self._num_frames
        with self._open() as file:
            for block in self._read(file, missing):
                missing -= len(block)
                yield _mixed(block)
        if missing:
            raise self._error(f"its {self._format} data is cut short")

    def _open(self) -> Any:
        open_file = self._load("soundfile").SoundFile
        file = self._guarded(f"its {self._format} data", open_file, _File(self._sound))
        # soundfile would seek to where it is after each block, and decoders start over there.
        file.seekable = lambda: False
        return file

    def _read(self, file: Any, limit: int) -> Iterator[Array]:
        """Blocks `[n, channels]` up to the end or to `limit` frames; tags may lie behind them."""
        what = f"its {self._format} data"
        block = np.empty((BLOCK_SAMPLES // file.channels, file.channels), np.float32)
        while count := min(limit, len(block)):
            part = self._guarded(what, file.read, count, out=block)
            if not len(part):
                return
            limit -= len(part)
            yield part


class _ArrayAudio(AudioSource):
    """Samples in a numpy array or a torch tensor."""

    def __init__(
        self, samples: Any, rate: Any, config: MediaConfig, parameter: str, sample_rate: int
    ) -> None:
        super().__init__(config, parameter, sample_rate)
        if getattr(rate, "ndim", None) == 0:  # a number of numpy's or torch's
            rate = rate.item()
        is_int = isinstance(rate, int) and not isinstance(rate, bool)
        if not is_int and not (isinstance(rate, float) and rate.is_integer()):
            raise self._error("its sample rate is not a whole number of Hz")
        self._given_rate = min(max(int(rate), 0), 1 << 32)
        array = self._as_numpy(samples)
        self._shape = array.shape
        if array.ndim not in (1, 2):
            raise self._error(f"its shape is {self._shape}; accepted: {ACCEPTED}")
        array = array[:, None] if array.ndim == 1 else array
        # The shorter axis is the channels; in a square, each library's own habit decides.
        is_first = array.shape[0] < array.shape[1] + isinstance(samples, torch.Tensor)
        self._frames: Array = array.T if is_first else array
        self._mono: Array | None = None
        self._identity = b""

    def identity(self) -> bytes:
        if self._mono is None:
            hasher = ContentHasher("recorded samples")
            hasher.update([self._frames.dtype.name, list(self._shape), self._given_rate])
            hasher.begin("data", self._frames.nbytes)
            mono, start = np.empty(len(self._frames), np.float32), 0
            for part in self._parts():
                hasher.fill(part.reshape(-1).view(np.uint8).data)
                mono[start : start + len(part)] = _mixed(part)
                start += len(part)
            # From here on what was hashed is what counts: the application may write to its own.
            self._mono, self._identity = mono, hasher.digest()
        return self._identity

    def _measure(self) -> tuple[int, int]:
        self._check(self._frames.shape[1], self._given_rate, len(self._frames))
        return len(self._frames), self._given_rate

    def _blocks(self) -> Iterator[Array]:
        if self._mono is None:
            yield from map(_mixed, self._parts())
        else:
            yield from np.split(self._mono, range(BLOCK_SAMPLES, len(self._mono), BLOCK_SAMPLES))

    def _parts(self) -> Iterator[Array]:
        """Copies of the samples, `[n, channels]`, contiguous and in the machine's byte order."""
        step = BLOCK_SAMPLES // self._frames.shape[1]
        dtype = self._frames.dtype.newbyteorder("=")
        for start in range(0, len(self._frames), step):
            yield np.array(self._frames[start : start + step], dtype, order="C")

    def _as_numpy(self, samples: Any) -> Array:
        self._check_dense(samples, "samples")
        is_tensor = isinstance(samples, torch.Tensor)
        name = str(samples.dtype).removeprefix("torch.") if is_tensor else samples.dtype.name
        self._holds_floats = samples.is_floating_point() if is_tensor else samples.dtype.kind == "f"
        if not self._holds_floats and name not in _INTEGERS:
            raise self._error(f"its dtype is {name:.40}, not uint8, int16, int32 or floating")
        # Before they are converted: a few numbers may be repeated for ever.
        most = self._config.max_audio_s * max(self._given_rate, MIN_SAMPLE_RATE) * MAX_CHANNELS
        if math.prod(samples.shape) > most:
            raise self._error(f"it is longer than media.max_audio_s ({self._config.max_audio_s} s)")
        array: Array = np.asarray(to_numpy(samples))[...]  # A view: its own shape cannot change.
        return array


class _File:
    """A file in memory for soundfile, called by C code: it never raises."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._position = data, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, len(self._data))[whence])
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        part = self._data[self._position : self._position + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)


def _mixed(block: Array) -> Array:
    """Mono float32 `[n]` of a block `[n, channels]`."""
    silence, scale = _INTEGERS.get(block.dtype.name, (0, 1))
    with np.errstate(over="ignore", invalid="ignore"):  # `decode` looks for what is not finite.
        # By columns: a mean over rows of two takes ten times as long.
        total: Any = sum(column.astype(np.float32) - silence for column in block.T)
        mono: Array = total / (scale * block.shape[1])
    return mono


def _recognise(data: memoryview) -> tuple[str, memoryview]:
    """The format by its first bytes, and the data from there on: ID3 tags may come first."""
    for _ in range(8):
        head = bytes(data[:12])
        if head[:3] != b"ID3" or len(head) < 12:
            break
        size = sum((head[6 + index] & 127) << 21 - 7 * index for index in range(4))
        data = data[size + (20 if head[5] & 16 else 10) :]
    if head[:4] in (b"fLaC", b"OggS"):
        return "FLAC" if head[:1] == b"f" else "OGG", data
    if head[:4] == b"RIFF" and head[8:] == b"WAVE":
        return "WAV", data
    # Eleven ones, a version that exists, layer III, a bit rate and a sample rate that exist.
    is_frame = len(head) > 3 and head[0] == 255 and head[1] & 0xE6 == 0xE2 and head[1] & 24 != 8
    return "MP3" if is_frame and 15 < head[2] < 240 and head[2] & 12 != 12 else "", data


def _is_cut_wav(data: memoryview) -> bool:
    """Return whether a WAV has less than it says; writers to a pipe say something close to 2 or 4
    GiB."""
    position = 12
    for _ in range(1000):
        name, size = bytes(data[position : position + 4]), data[position + 4 : position + 8]
        num_bytes = int.from_bytes(size, "little")
        position += 8
        if name == b"data":  # One byte less may be padding that was left out.
            return len(data) - position + 1 < num_bytes < 0x7FFF0000
        position += num_bytes + num_bytes % 2
    return False


def _has_more_streams(data: memoryview) -> bool:
    """Return whether an OGG starts a second stream, which libsndfile would leave out without a
    word."""
    starts = range(4, len(data), 1 << 20)
    return any(b"OggS\0\2" in bytes(data[start : start + (1 << 20) + 5]) for start in starts)


def _with_length(data: memoryview) -> memoryview:
    """An MP3 whose header tells its length, or claims to be endless, so that it is counted.

    Where none is given, libsndfile guesses one by the first frame's bit rate, and reads no more.
    """
    head = bytes(data[:64])
    at = max(head.find(tag, 4, 44) for tag in (b"Xing", b"Info"))
    if at > 0 and head[at + 7] & 3 == 3 and any(head[at + 8 : at + 12]):
        end = int.from_bytes(head[at + 12 : at + 16], "big")
        # More frames, or another tag: audio joined end to end, of which it tells the first's.
        if bytes(data[end : end + 1]) not in (b"\xff", b"I"):
            return data
    is_first, is_mono = head[1] & 24 == 24, head[3] >= 192
    rate = (44100, 48000, 32000)[head[2] >> 2 & 3] >> (2, 0, 1, 0)[head[1] >> 3 & 3]
    # 112 or 64 kbit/s hold the tag at every rate.
    frame = bytearray((16_128_000 if is_first else 4_608_000) // rate)
    frame[:4] = head[0], head[1] | 1, 0x80 | head[2] & 12, head[3]
    at = 4 + ((17 if is_mono else 32) if is_first else (9 if is_mono else 17))
    frame[at : at + 12] = b"Info\0\0\0\1" + (0x7FFFFFFF).to_bytes(4, "big")
    return np.concatenate([np.frombuffer(part, np.uint8) for part in (frame, data)]).data
