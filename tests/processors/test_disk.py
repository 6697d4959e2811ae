"""The disk cache: what it keeps, what it forgets, and that nothing on the disk can hurt."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.processors.cache import disk
from aioengine.processors.cache.disk import NAMESPACE, DiskCache
from aioengine.processors.cache.serialization import dump_item
from aioengine.processors.inputs import MultiModalFieldConfig, MultiModalKwargsItem

CONFIG = {"x": MultiModalFieldConfig.batched("image", keep_on_cpu=True)}
MIB = 1 << 20


def key(number: int) -> str:
    """Two keys to a prefix, so that both sharing and not sharing one occurs."""
    return f"{number // 2:02x}" + f"{number:062x}"


def item(num_bytes: int, fill: int = 7) -> MultiModalKwargsItem:
    return MultiModalKwargsItem.from_config(
        {"x": torch.full((num_bytes,), fill, dtype=torch.uint8)}, CONFIG
    )


def path_of(folder: Path, name: str) -> Path:
    return folder / NAMESPACE / name[:2] / f"{name}.safetensors"


def files(folder: Path) -> dict[str, int]:
    """Key -> size of every item in a folder."""
    return {path.stem: path.stat().st_size for path in folder.rglob("*.safetensors")}


def file_size(num_bytes: int) -> int:
    return len(dump_item(item(num_bytes), key=key(0)))


def value(cache: DiskCache, name: str) -> tuple[int, int] | None:
    """Size and content of what is under a key."""
    found = cache.get(name)
    if found is None:
        return None
    assert found.keep_on_cpu("x")
    assert len(set(found["x"].tolist())) == 1
    return found["x"].numel(), int(found["x"][0])


# ---- the cache as such


@settings(max_examples=40)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from("gppcr"), st.integers(0, 7), st.integers(1, 900)), max_size=30
    )
)
def test_is_an_lru_by_bytes_that_survives_restarts(steps: list[tuple[str, int, int]]) -> None:
    """Against a plain model: `r` opens the folder anew."""
    capacity = 2600
    model: OrderedDict[str, tuple[int, int, int]] = OrderedDict()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = DiskCache(folder, capacity)
        for number, (action, which, size) in enumerate(steps):
            if action == "g":
                expected = model.get(key(which))
                assert value(cache, key(which)) == (expected and expected[:2])
                if expected:
                    model.move_to_end(key(which))
            elif action == "p":
                fill = number % 256
                on_disk = len(dump_item(item(size, fill), key=key(which)))
                assert cache.put(key(which), item(size, fill)) == (on_disk <= capacity)
                if on_disk <= capacity:
                    model.pop(key(which), None)
                    while sum(entry[2] for entry in model.values()) + on_disk > capacity:
                        model.popitem(last=False)
                    model[key(which)] = size, fill, on_disk
            elif action == "c" and which == 0:
                cache.clear()
                model.clear()
            elif action == "r":
                cache = DiskCache(folder, capacity)
            on_disk_now = {name: entry[2] for name, entry in model.items()}
            assert files(folder) == on_disk_now
            statistics = cache.statistics()
            assert statistics.used_bytes == sum(on_disk_now.values()) <= capacity
            assert (statistics.entries, statistics.failures) == (len(model), 0)


def test_counts_and_sizes(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "a" / "b", MIB)
    assert cache.get(key(0)) is None
    assert cache.put(key(0), item(10))
    assert value(cache, key(0)) == (10, 7)
    assert not cache.put(key(1), item(2 * MIB))
    statistics = cache.statistics()
    assert (statistics.hits, statistics.misses, statistics.failures) == (1, 1, 0)
    assert statistics.used_bytes == sum(files(tmp_path).values())
    assert statistics.capacity_bytes == MIB


@pytest.mark.parametrize("name", ["", "../" + "0" * 61, "0" * 63, "A" * 64, "0" * 64 + "\n"])
def test_only_keys_are_keys(name: str, tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MIB)
    with pytest.raises(ValueError, match="64 hexadecimal"):
        cache.get(name)
    with pytest.raises(ValueError, match="64 hexadecimal"):
        cache.put(name, item(1))


def test_files_are_the_users_alone(tmp_path: Path) -> None:
    DiskCache(tmp_path / "cache", MIB).put(key(0), item(1))
    for path in (tmp_path / "cache").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o600 if path.is_file() else 0o700), path
    (tmp_path / "cache" / NAMESPACE).chmod(0o777)
    assert DiskCache(tmp_path / "cache", MIB).get(key(0)) is not None
    assert stat.S_IMODE((tmp_path / "cache" / NAMESPACE).stat().st_mode) == 0o700


def test_a_smaller_capacity_removes_what_is_too_much(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MIB)
    for number in range(6):
        assert cache.put(key(number), item(100))
    assert cache.put(key(6), item(5000))
    assert cache.get(key(1)) is not None
    small = DiskCache(tmp_path, 3 * file_size(100))
    assert files(tmp_path).keys() == {key(4), key(5), key(1)}
    assert small.statistics().entries == 3
    # What a process that may store more has put here since.
    cache.put(key(6), item(5000))
    assert small.get(key(6)) is None
    assert small.get(key(1)) is not None
    assert (small.statistics().failures, cache.get(key(6)) is None) == (0, False)


# ---- several at once


def test_from_many_threads(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 6 * file_size(300))

    def work(seed: int) -> None:
        for step in range(60):
            number = (seed * 7 + step * 3) % 12
            found = value(cache, key(number))
            assert found in (None, (300, number))
            if found is None:
                assert cache.put(key(number), item(300, number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(6)))
    statistics = cache.statistics()
    assert statistics.hits + statistics.misses == 6 * 60
    assert statistics.failures == 0
    assert statistics.used_bytes <= statistics.capacity_bytes
    # Nothing is in the folder that is not counted, and nothing is counted that is not there.
    assert sum(files(tmp_path).values()) == statistics.used_bytes
    assert len(files(tmp_path)) == statistics.entries


WRITER = """
    import sys
    from pathlib import Path
    import torch
    from aioengine.processors.cache.disk import DiskCache
    from aioengine.processors.inputs import MultiModalFieldConfig, MultiModalKwargsItem

    config = {"x": MultiModalFieldConfig.batched("image", keep_on_cpu=True)}
    cache = DiskCache(sys.argv[1], int(sys.argv[2]))
    print("open", flush=True)
    for round in range(20):
        for number in range(12):
            name = f"{number // 2:02x}" + f"{number:062x}"
            found = cache.get(name)
            assert found is None or set(found["x"].tolist()) == {number}
            tensor = torch.full((300,), number, dtype=torch.uint8)
            assert cache.put(name, MultiModalKwargsItem.from_config({"x": tensor}, config))
    assert cache.statistics().failures == 0
"""


def test_with_a_second_process(tmp_path: Path) -> None:
    capacity = 8 * file_size(300)
    cache = DiskCache(tmp_path, capacity)
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path), str(capacity)],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        for step in range(240):
            number = step * 5 % 12
            assert value(cache, key(number)) in (None, (300, number))
            assert cache.put(key(number), item(300, number))
    assert other.returncode == 0
    assert cache.statistics().failures == 0
    # Each may overshoot by what it did not know of the other, until it looks again.
    cache.put(key(0), item(300, 0))
    assert sum(files(tmp_path).values()) <= capacity


def test_another_process_finds_and_bounds_what_is_here(tmp_path: Path) -> None:
    one, other = (DiskCache(tmp_path, 4 * file_size(300)) for _ in range(2))
    for number in range(4):
        assert one.put(key(number), item(300, number))
    assert value(other, key(1)) == (300, 1)
    # `other` knew of one file; it counts the rest once it has written a little.
    for number in range(4, 8):
        assert other.put(key(number), item(300, number))
    assert len(files(tmp_path)) <= 4
    shutil.rmtree(tmp_path / NAMESPACE)
    assert [one.get(key(number)) for number in range(8)] == [None] * 8
    assert one.statistics().used_bytes == 0
    assert one.put(key(1), item(300)) and value(other, key(1)) == (300, 7)
    assert one.statistics().failures == other.statistics().failures == 0


# ---- what may lie in the folder


def truncated(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flipped(position: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 0x10
        path.write_bytes(data)

    return flip


def replaced(data: bytes) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.write_bytes(data)

    return replace


def another_item(path: Path) -> None:
    shutil.copy(path, path.with_name(f"{key(1)}.safetensors"))
    path.write_bytes(dump_item(item(100), key=key(1)))


def linked(path: Path) -> None:
    outside = path.parents[3] / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def named_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "cut": truncated,
    "length": flipped(0),
    "longer": flipped(5),
    "header": flipped(40),
    "header's end": flipped(-101),
    "data": flipped(-100),
    "last byte": flipped(-1),
    "empty": replaced(b""),
    "foreign": replaced(b"GIF89a" * 50),
    "unsealed": replaced(dump_item(item(100))),
    "another": another_item,
    "link": linked,
    "pipe": named_pipe,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_a_miss_and_goes(damage: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cache = DiskCache(folder, MIB)
    cache.put(key(0), item(100))
    path = path_of(folder, key(0))
    damage(path)
    assert cache.get(key(0)) is None
    assert not os.path.lexists(path)
    statistics = cache.statistics()
    assert (statistics.misses, statistics.failures, statistics.used_bytes) == (1, 1, 0)
    if damage is linked:
        assert (tmp_path / "outside").exists()
    assert cache.put(key(0), item(100))
    assert value(cache, key(0)) == (100, 7)


@given(data=st.data())
def test_no_bit_on_the_disk_may_change(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        cache = DiskCache(name, MIB)
        cache.put(key(0), item(50))
        path = path_of(Path(name), key(0))
        whole = bytearray(path.read_bytes())
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(whole)
        assert cache.get(key(0)) is None
        assert not path.exists()


@pytest.mark.parametrize("place", ["namespace", "prefix"])
def test_links_do_not_lead_out_of_the_folder(place: str, tmp_path: Path) -> None:
    folder, outside = tmp_path / "cache", tmp_path / "outside"
    DiskCache(outside, MIB).put(key(0), item(100))
    if place == "namespace":
        folder.mkdir()
        (folder / NAMESPACE).symlink_to(outside / NAMESPACE)
    else:
        (folder / NAMESPACE).mkdir(parents=True)
        (folder / NAMESPACE / key(0)[:2]).symlink_to(outside / NAMESPACE / key(0)[:2])
    before = files(outside)
    cache = DiskCache(folder, MIB)
    assert cache.get(key(0)) is None
    assert not cache.put(key(0), item(100))
    assert not cache.put(key(1), item(100))
    cache.clear()
    assert DiskCache(folder, 1).get(key(0)) is None
    assert files(outside) == before
    assert cache.statistics().failures > 0


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert DiskCache(tmp_path / "link", MIB).put(key(0), item(100))
    assert value(DiskCache(tmp_path / "real", MIB), key(0)) == (100, 7)


def test_what_others_put_there_is_left_alone(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MIB)
    cache.put(key(0), item(100))
    prefix = tmp_path / NAMESPACE / key(0)[:2]
    theirs = [
        *(tmp_path / "notes.txt", tmp_path / NAMESPACE / "notes.txt", prefix / "notes.txt"),
        *(prefix / "x.safetensors", prefix / ".x.tmp", tmp_path / "items-v0"),
    ]
    for path in theirs:
        path.write_text("hello")
    cache.clear()
    assert DiskCache(tmp_path, MIB).statistics().entries == 0
    assert all(path.read_text() == "hello" for path in theirs)


def test_another_format_has_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DiskCache(tmp_path, MIB).put(key(0), item(100))
    monkeypatch.setattr(disk, "NAMESPACE", "items-v999")
    assert DiskCache(tmp_path, MIB).get(key(0)) is None


# ---- a system that does not help


KILLED = """
    import os, sys, torch
    from aioengine.processors.cache import disk
    from aioengine.processors.inputs import MultiModalFieldConfig, MultiModalKwargsItem

    os.replace = lambda *args, **kwargs: os.kill(os.getpid(), 9)
    tensor = torch.full((300,), 7, dtype=torch.uint8)
    config = {"x": MultiModalFieldConfig.batched("image")}
    disk.DiskCache(sys.argv[1], 1 << 20).put(
        sys.argv[2], MultiModalKwargsItem.from_config({"x": tensor}, config)
    )
"""


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    code = textwrap.dedent(KILLED)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), key(0)],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        check=False,
    )
    assert done.returncode == -9
    (left,) = tmp_path.rglob("*.tmp")
    cache = DiskCache(tmp_path, MIB)
    assert left.exists(), "its writer could be alive"
    assert cache.get(key(0)) is None
    old = left.stat().st_mtime - 2 * disk.STALE_S
    os.utime(left, (old, old))
    DiskCache(tmp_path, MIB)
    assert not left.exists()
    left.write_text("young")
    cache.clear()
    assert not left.exists()


@pytest.mark.parametrize("function", ["write", "open", "mkdir", "replace"])
def test_what_cannot_be_written_is_not_stored(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path, MIB)

    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, function, refuse)
        assert not cache.put(key(0), item(100))
    assert cache.statistics().failures == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert cache.put(key(0), item(100))


def test_a_file_too_large_for_the_disk_is_not_stored(tmp_path: Path) -> None:
    code = """
        import resource, sys
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        from tests.processors.test_disk import DiskCache, item, key
        cache = DiskCache(sys.argv[1], 1 << 30)
        assert not cache.put(key(0), item(1_000_000))
        assert cache.put(key(1), item(1_000))
        assert cache.statistics().failures == 1 and cache.statistics().entries == 1
    """
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [
            sys.executable,
            *("-B", "-c"),
            f"import sys; sys.path.append({str(root)!r})\n" + textwrap.dedent(code),
            str(tmp_path),
        ],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert files(tmp_path).keys() == {key(1)}
    assert not list(tmp_path.rglob("*.tmp"))


def test_what_cannot_be_read_is_a_miss_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path, MIB)
    cache.put(key(0), item(100))

    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", refuse)
        assert cache.get(key(0)) is None
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert cache.get(key(0)) is None
    assert cache.statistics().failures == 2
    assert value(cache, key(0)) == (100, 7)


def test_what_cannot_be_removed_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path, 2 * file_size(100))

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "unlink", refuse)
    for number in range(4):
        assert cache.put(key(number), item(100))
    cache.clear()
    assert cache.statistics().failures > 0


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = DiskCache(tmp_path / "file" / "cache", MIB)
    assert cache.get(key(0)) is None
    assert not cache.put(key(0), item(100))
    cache.clear()
    statistics = cache.statistics()
    assert (statistics.entries, statistics.misses) == (0, 1)
    assert statistics.failures >= 3


def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DiskCache(tmp_path, MIB).put(key(0), item(100))
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    cache = DiskCache(tmp_path, MIB)
    assert cache.get(key(0)) is None
    assert not cache.put(key(1), item(100))
    assert len(files(tmp_path)) == 1


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    cache = DiskCache(tmp_path, MIB)
    for number in range(5):
        cache.put(key(number), item(100))
        cache.get(key(number))
        cache.get(key(number + 1))
    path_of(tmp_path, key(0)).write_bytes(b"")
    cache.get(key(0))
    cache.clear()
    assert len(os.listdir("/dev/fd")) == before


def test_a_write_during_a_scan_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path, MIB)
    cache.put(key(0), item(100))
    scan, looked, goes_on = cache._scan, threading.Event(), threading.Event()

    def slowly(prefix: str) -> list[tuple[int, str, int]]:
        found = scan(prefix)
        looked.set()
        assert goes_on.wait(60)
        return found

    monkeypatch.setattr(cache, "_scan", slowly)
    thread = threading.Thread(target=cache._rescan)
    thread.start()
    assert looked.wait(60)
    cache.put(key(1), item(200))  # the same folder, looked through already
    path_of(tmp_path, key(0)).unlink()
    assert cache.get(key(0)) is None
    goes_on.set()
    thread.join()
    statistics = cache.statistics()
    assert (statistics.entries, statistics.used_bytes) == (1, file_size(200))
