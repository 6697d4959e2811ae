"""The processor-output cache on disk: what was processed once is found again after a restart.

One file for each item, written under another name and renamed, so that a file is either whole or
not there. Several processes may share a folder; each keeps its own image of what is in it, and
looks again now and then. Nothing here fails a request: what cannot be read is a miss, what cannot
be written is not stored, and both are counted.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aioengine.processors.cache.serialization import FORMAT_VERSION, Readable, item_parts, load_item
from aioengine.processors.inputs import MultiModalKwargsItem

__all__ = ["DiskCache", "DiskCacheStatistics"]

NAMESPACE = f"items-v{FORMAT_VERSION}"
"""The folder in the folder; a new format has a new one and never meets an old file."""

STALE_S = 600.0
"""A temporary file untouched for so long belongs to a writer that was killed."""

RESCAN_SHARE = 16
"""The folder is looked through again whenever 1/16 of the capacity has been written."""

_SUFFIX, _TEMPORARY = ".safetensors", ".tmp"
_KEY = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"[0-9a-f]{2}")
_FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
# Not blocking: a named pipe in place of a file must not hold anyone up.
_FILE_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCacheStatistics:
    """A snapshot: bytes and entries as this process knows them, and what became of its calls.

    `failures`: files that were damaged, and reads, writes and removals that the system refused.
    """

    capacity_bytes: int
    used_bytes: int
    entries: int
    hits: int
    misses: int
    failures: int


class DiskCache:
    """`<folder>/<namespace>/<key[:2]>/<key>.safetensors`, least recently used items removed first.

    Thread-safe. Methods read and write files, so they are for worker threads, the constructor too.
    Files are the user's alone (0600 in folders of 0700); links are not followed, but `folder`
    itself may be one. Of processes with different capacities the smallest rules. Nothing is synced
    to the disk: what a power failure leaves of a file is found to be damaged. POSIX only: raises
    NotImplementedError elsewhere.
    """

    def __init__(self, folder: str | os.PathLike[str], capacity_bytes: int) -> None:
        if os.open not in os.supports_dir_fd:
            raise NotImplementedError("a disk cache needs a POSIX system")
        self._folder = Path(folder).absolute()
        self._capacity_bytes = capacity_bytes
        # A stripe is held while a file and its bookkeeping change; the other lock, taken after it,
        # for the bookkeeping alone.
        self._stripes = tuple(threading.Lock() for _ in range(64))
        self._lock = threading.Lock()
        self._scanning = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # the least recently used one first
        self._used_bytes = 0
        self._unscanned_bytes = 0
        self._changed: set[str] | None = None  # while the folder is being looked through
        self._hits = self._misses = self._failures = 0
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
        except OSError:
            self._fail()
        self._rescan()
        self._evict()

    def get(self, key: str) -> MultiModalKwargsItem | None:
        """The item, which becomes the most recently used one; None if it is not here.

        Raises ValueError for what is not a key.
        """
        _check_key(key)
        item, size, is_gone = None, 0, False
        with self._stripe(key):
            try:
                with self._opened(key[:2]) as folder:
                    item, size = self._read(folder, key)
                is_gone = item is None
            except FileNotFoundError:
                is_gone = True
            except (OSError, MemoryError):
                self._fail()
            with self._lock:
                if item is not None:
                    self._hits += 1
                    self._note(key, size)
                else:
                    self._misses += 1
                    if is_gone:
                        self._forget(key)
        return item

    def put(self, key: str, item: MultiModalKwargsItem) -> bool:
        """Stores the item, in place of older ones where needed; whether it was stored.

        Raises ValueError for what is not a key.
        """
        _check_key(key)
        if item.num_bytes > self._capacity_bytes:
            return False
        try:
            parts = item_parts(item, key=key)
            size = sum(memoryview(part).nbytes for part in parts)
            if size > self._capacity_bytes:
                return False
            with self._stripe(key):
                with self._opened(key[:2], create=True) as folder:
                    _write(folder, key, parts)
                with self._lock:
                    self._note(key, size)
                    self._unscanned_bytes += size
                    is_due = self._unscanned_bytes * RESCAN_SHARE > self._capacity_bytes
        except (OSError, MemoryError, ValueError):
            self._fail()
            return False
        if is_due:
            # Other processes write here too, and nobody tells what.
            self._rescan()
        self._evict()
        return True

    def discard(self, key: str) -> None:
        """Removes one item, if it is there."""
        _check_key(key)
        with self._stripe(key):
            with suppress(OSError), self._opened(key[:2]) as folder:
                self._unlink(folder, key + _SUFFIX)
            with self._lock:
                self._forget(key)

    def clear(self) -> None:
        """Removes every item, other processes' too, and what their killed writers left behind."""
        for prefix in self._prefixes():
            with suppress(OSError), self._opened(prefix) as folder:
                for name in filter(_is_ours, os.listdir(folder)):
                    self._unlink(folder, name)
        self._rescan()

    def statistics(self) -> DiskCacheStatistics:
        """A snapshot of the counters. Touches no file."""
        with self._lock:
            return DiskCacheStatistics(
                capacity_bytes=self._capacity_bytes,
                used_bytes=self._used_bytes,
                entries=len(self._sizes),
                hits=self._hits,
                misses=self._misses,
                failures=self._failures,
            )

    # ---- bookkeeping, under the lock

    def _note(self, key: str, size: int) -> None:
        self._used_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self._sizes.move_to_end(key)
        if self._changed is not None:
            self._changed.add(key)

    def _forget(self, key: str) -> None:
        self._used_bytes -= self._sizes.pop(key, 0)
        if self._changed is not None:
            self._changed.add(key)

    def _stripe(self, key: str) -> threading.Lock:
        return self._stripes[int(key[:2], 16) % len(self._stripes)]

    def _fail(self) -> None:
        with self._lock:
            self._failures += 1

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count what the system refuses in the block; a file that is gone is no failure."""
        try:
            yield
        except FileNotFoundError:
            pass
        except OSError:
            self._fail()

    # ---- files

    @contextmanager
    def _opened(self, prefix: str | None, *, create: bool = False) -> Iterator[int]:
        """A descriptor of a prefix's folder, or of the namespace's. OSError if it is not ours."""
        fds = [os.open(self._folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))]
        try:
            for name in [NAMESPACE] if prefix is None else [NAMESPACE, prefix]:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=fds[-1])
                fds.append(os.open(name, _FOLDER_FLAGS, dir_fd=fds[-1]))
                _check_owner(fds[-1])
            yield fds[-1]
        finally:
            for fd in fds:
                os.close(fd)

    def _read(self, folder: int, key: str) -> tuple[MultiModalKwargsItem | None, int]:
        """The item and its file's size; a file that is none is removed."""
        name = key + _SUFFIX
        try:
            fd = os.open(name, _FILE_FLAGS, dir_fd=folder)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EMLINK):
                raise
            self._discard(folder, name)  # a link
            return None, 0
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("no file of ours")
            if status.st_size > self._capacity_bytes:  # of a process that may store more
                return None, 0
            item = load_item(_read_all(fd, status.st_size), key=key)
            now = time.time_ns()
            with suppress(OSError):  # read-only storage is still good to read from
                os.utime(fd, ns=(now, now))
            return item, status.st_size
        except ValueError:
            self._discard(folder, name)
            return None, 0
        finally:
            os.close(fd)

    def _discard(self, folder: int, name: str) -> None:
        self._fail()
        self._unlink(folder, name)

    def _unlink(self, folder: int, name: str) -> None:
        with self._counting():
            os.unlink(name, dir_fd=folder)

    def _evict(self) -> None:
        """Removes the least recently used items until the rest fits."""
        while True:
            with self._lock:
                if self._used_bytes <= self._capacity_bytes:
                    return
                key = next(iter(self._sizes))
            with self._stripe(key):
                with self._lock:
                    if self._used_bytes <= self._capacity_bytes or key not in self._sizes:
                        continue
                    self._forget(key)
                with self._counting(), self._opened(key[:2]) as folder:
                    self._unlink(folder, key + _SUFFIX)

    # ---- what is in the folder

    def _rescan(self) -> None:
        """Makes the bookkeeping true again; at once if another thread is at it already."""
        if not self._scanning.acquire(blocking=False):
            return
        try:
            with self._lock:
                changed = self._changed = set()
                self._unscanned_bytes = 0
            found = sorted(entry for prefix in self._prefixes() for entry in self._scan(prefix))
            with self._lock:
                sizes = OrderedDict((key, size) for _, key, size in found)
                for key in changed:
                    sizes.pop(key, None)
                # What changed meanwhile is known better here, in its order.
                sizes |= {key: size for key, size in self._sizes.items() if key in changed}
                self._sizes = sizes
                self._used_bytes = sum(sizes.values())
        finally:
            with self._lock:
                self._changed = None
            self._scanning.release()

    def _prefixes(self) -> list[str]:
        found: list[str] = []
        with self._counting(), self._opened(None) as folder:
            found += filter(_PREFIX.fullmatch, os.listdir(folder))
        return found

    def _scan(self, prefix: str) -> list[tuple[int, str, int]]:
        """Modification time, key and size of a prefix's items; removes what a dead writer left."""
        found = []
        with self._counting(), self._opened(prefix) as folder:
            for name in filter(_is_ours, os.listdir(folder)):
                with suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if name.endswith(_SUFFIX):
                        if stat.S_ISREG(status.st_mode) and name.startswith(prefix):
                            is_too_large = status.st_size > self._capacity_bytes
                            age = 0 if is_too_large else status.st_mtime_ns
                            found.append((age, name.removesuffix(_SUFFIX), status.st_size))
                    elif time.time() - status.st_mtime > STALE_S:
                        self._unlink(folder, name)
        return found


def _check_key(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise ValueError("a key is 64 hexadecimal characters")


def _check_owner(fd: int) -> None:
    """Refuse a folder that others may write to: a file could be anyone's."""
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        raise PermissionError("the folder belongs to another user")
    if status.st_mode & 0o077:
        os.fchmod(fd, 0o700)


def _is_ours(name: str) -> bool:
    """Return whether this module gives such names; others' files are left alone."""
    if name.endswith(_SUFFIX):
        return _KEY.fullmatch(name.removesuffix(_SUFFIX)) is not None
    return name.startswith(".") and name.endswith(_TEMPORARY) and bool(_KEY.match(name, 1))


def _write(folder: int, key: str, parts: list[Readable]) -> None:
    """A new file of these parts under the item's name, whole or not at all."""
    temporary = f".{key}.{secrets.token_hex(8)}{_TEMPORARY}"
    fd = os.open(temporary, _NEW_FLAGS, 0o600, dir_fd=folder)
    try:
        try:
            for part in parts:
                view = memoryview(part)
                while view.nbytes:
                    view = view[os.write(fd, view) :]
            # The kernel's own time stamps are coarser than the order of two calls.
            now = time.time_ns()
            os.utime(fd, ns=(now, now))
        finally:
            os.close(fd)
        os.replace(temporary, key + _SUFFIX, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _read_all(fd: int, size: int) -> memoryview:
    """Exactly `size` bytes in memory that may be written to. ValueError if there are fewer."""
    data = np.empty(size, np.uint8).data
    position = 0
    while position < size:
        count = os.readv(fd, [data[position:]])
        if count == 0:
            raise ValueError("the file is cut short")
        position += count
    return data
