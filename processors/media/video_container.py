"""Part of a video file that FFmpeg is shown: one known container, and in it nothing but video.

FFmpeg's readers make room for what a header claims before they look whether it is there: an MP4
file of 1590 bytes was seen to take 2.1 GB and 16 s (30 million frames of one byte each in its table
of sizes). And they follow what a file refers to. So the boxes of an MP4 file are walked here first,
its claims are counted, and every box that the images do not need (sound, subtitles, chapters,
references to other files, tables that lead to boxes elsewhere) is shown as one to be skipped.
"""

from __future__ import annotations

import bisect
import struct
from collections import Counter
from collections.abc import Collection, Iterator

import numpy as np

__all__ = ["MAX_SOURCE_FRAMES", "FileReader", "VideoError", "container_of", "hidden_boxes"]

MAX_SOURCE_FRAMES = 500_000
"""Frames that a file may hold: more than an hour at 120 in a second; read in two to three seconds.
"""
MAX_HEADER_BYTES = 16 << 20
"""What may be read to open a file. Readers keep up to 30 times as much in their tables."""

_MAX_BOXES = 1 << 20
_READ_BYTES = 1 << 18
_SKIPPED = b"skip"

# Names that the configuration may use -> FFmpeg's name of the reader.
_READERS = {
    "mp4": "mp4",
    "mov": "mp4",
    "matroska": "matroska",
    "mkv": "matroska",
    "webm": "matroska",
    "avi": "avi",
}
_MP4_STARTS = {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"}
_TOP = b""
_CHILDREN = {
    _TOP: {b"ftyp", b"moov", b"moof", b"mdat"},
    b"moov": {b"mvhd", b"trak", b"mvex"},
    b"trak": {b"tkhd", b"edts", b"mdia"},
    b"edts": {b"elst"},
    b"mdia": {b"mdhd", b"hdlr", b"minf"},
    b"minf": {b"vmhd", b"stbl"},
    b"stbl": {
        *(b"stsd", b"stts", b"ctts", b"cslg", b"stss", b"stps"),
        *(b"stsc", b"stsz", b"stz2", b"stco", b"co64"),
    },
    b"mvex": {b"trex"},
    b"moof": {b"mfhd", b"traf"},
    b"traf": {b"tfhd", b"tfdt", b"trun"},
}


class VideoError(ValueError):
    """A video that is not to be used; the text is safe to show. `value`: a number or a kind."""

    def __init__(self, reason: str, *, value: object = None) -> None:
        super().__init__(reason)
        self.value = value


def container_of(data: memoryview, allowed: Collection[str]) -> str:
    """FFmpeg's name of the container that the first bytes show, one of those `allowed`.

    Raises VideoError for everything else: FFmpeg itself is never asked what it takes a file for.
    """
    start = bytes(data[:12])
    reader = None
    if start[4:8] in _MP4_STARTS:
        reader = "mp4"
    elif start[:4] == b"\x1aE\xdf\xa3":
        reader = "matroska"
    elif start[:4] == b"RIFF" and start[8:12] == b"AVI ":
        reader = "avi"
    if reader is None or reader not in {_READERS.get(name.lower()) for name in allowed}:
        names = ", ".join(allowed)
        raise VideoError(f"it is in none of the containers of media.video_formats ({names})")
    return reader


class FileReader:
    """The bytes of a file as FFmpeg reads them, up to a budget, with some box types hidden.

    Never raises: an error inside FFmpeg's callback may be printed to the host's stderr. A reader
    whose budget is spent behaves as at the end of the file, and `is_exhausted` tells.
    """

    def __init__(self, data: memoryview, hidden: list[int]) -> None:
        self._data = data
        self._hidden = hidden
        self._position = 0
        self._num_bytes_left = MAX_HEADER_BYTES
        self.is_exhausted = False

    def allow_contents(self) -> None:
        """Opened: now all of the file may be read, even if the order of its parts is unlucky."""
        self._num_bytes_left = MAX_HEADER_BYTES + 4 * len(self._data)

    def read(self, size: int) -> bytes:
        """The next bytes, at most `size`; b"" at the end."""
        begin = self._position
        # Copied with the GIL held, so in small pieces, however large a packet is.
        end = min(begin + min(size, _READ_BYTES), len(self._data))
        if end <= begin:
            return b""
        if end - begin > self._num_bytes_left:
            self.is_exhausted = True
            return b""
        self._num_bytes_left -= end - begin
        self._position = end
        first = bisect.bisect_left(self._hidden, begin - len(_SKIPPED) + 1)
        last = bisect.bisect_left(self._hidden, end)
        if first == last:
            return bytes(self._data[begin:end])
        part = bytearray(self._data[begin:end])
        for place in self._hidden[first:last]:
            for offset, letter in enumerate(_SKIPPED, place - begin):
                if 0 <= offset < len(part):
                    part[offset] = letter
        return bytes(part)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Moves to `offset` from the start (0), here (1) or the end (2); -1 if it is before all."""
        if whence not in (0, 1, 2):
            return -1
        position = offset + (0, self._position, len(self._data))[whence]
        if position < 0:
            return -1
        self._position = position
        return position

    def tell(self) -> int:
        """Position of the next byte."""
        return self._position


def hidden_boxes(data: memoryview) -> list[int]:
    """Find where, in an MP4 or MOV file, the types of the boxes lie that FFmpeg is not to see, in
    order.

    Raises VideoError if the file is broken or claims more than MAX_SOURCE_FRAMES frames.
    """
    walk = _BoxWalk(data)
    walk.visit(_TOP, 0, len(data))
    if not walk.has_movie:
        raise VideoError("its header (moov) is missing or cut off")
    if walk.num_edits * walk.num_frames > 4 * MAX_SOURCE_FRAMES:
        raise VideoError(f"it is cut into {walk.num_edits} pieces", value=walk.num_edits)
    return walk.hidden


class _BoxWalk:
    """Visits the boxes of an MP4 file as FFmpeg does, in order."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._num_boxes = 0
        self.hidden: list[int] = []
        self._claims: Counter[bytes] = Counter()
        self.has_movie = False
        self.num_edits = 0

    @property
    def num_frames(self) -> int:
        """Return how many frames are claimed so far."""
        return self._claims[b"stsz"] + self._claims[b"stz2"] + self._claims[b"trun"]

    def visit(self, parent: bytes, begin: int, end: int) -> None:
        """Looks at what lies in the box `parent`, whose contents are data[begin:end]."""
        for kind, start, contents, stop in self._boxes(begin, end):
            if kind not in _CHILDREN[parent] or (
                kind == b"trak" and not self._is_video(contents, stop)
            ):
                self.hidden.append(start + 4)
                continue
            self.has_movie |= kind == b"moov"
            if kind in _CHILDREN:
                self.visit(kind, contents, stop)
            else:
                self._count(kind, self._data[contents:stop])

    def _boxes(self, begin: int, end: int) -> Iterator[tuple[bytes, int, int, int]]:
        """Type, start, start of the contents and end of each box."""
        while end - begin >= 8:
            self._num_boxes += 1
            if self._num_boxes > _MAX_BOXES:
                raise VideoError(f"it consists of more than {_MAX_BOXES} boxes", value=_MAX_BOXES)
            size, kind = struct.unpack_from(">I4s", self._data, begin)
            contents = begin + 8
            if size == 1 and end - begin >= 16:
                (size,) = struct.unpack_from(">Q", self._data, contents)
                contents += 8
            elif size == 0:
                size = end - begin
            if size < contents - begin:
                raise VideoError("the sizes of its boxes are broken")
            # A file that is cut off may end in any box; FFmpeg cuts a box at its parent's end too.
            stop = min(begin + size, end)
            yield kind, begin, contents, stop
            begin = stop

    def _is_video(self, begin: int, end: int) -> bool:
        handlers = {
            bytes(self._data[contents + 8 : contents + 12])
            for outer, _, media, media_end in self._boxes(begin, end)
            if outer == b"mdia"
            for inner, _, contents, _ in self._boxes(media, media_end)
            if inner == b"hdlr"
        }
        return handlers == {b"vide"}

    def _count(self, kind: bytes, contents: memoryview) -> None:
        """Adds up what a table claims, also where not a byte of it stands behind the claim."""
        num_entries = _number(contents, 4)
        if kind in (b"stsz", b"stz2"):
            self._claims[kind] += _number(contents, 8)
        elif kind == b"trun":
            self._claims[kind] += num_entries
        elif kind == b"elst":
            self.num_edits = max(self.num_edits, num_entries)
        elif kind in (b"stts", b"ctts"):
            table = np.frombuffer(contents[8 : 8 + 8 * num_entries], np.uint8)
            runs = table[: len(table) // 8 * 8].view(">u4")[::2]
            self._claims[kind] += int(runs.sum(dtype=np.uint64))
        claim = max(self.num_frames, self._claims[kind])
        if claim > MAX_SOURCE_FRAMES:
            raise VideoError(
                f"its header claims {claim} frames, more than {MAX_SOURCE_FRAMES}; cut it into "
                "shorter ones",
                value=claim,
            )


def _number(contents: memoryview, offset: int) -> int:
    return int.from_bytes(contents[offset : offset + 4], "big")
