"""Fetching: every way in, every refusal typed, nothing read that should not be."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from aioengine.config import MediaConfig
from aioengine.errors import MediaError, MediaUnavailableError
from aioengine.processors.media.fetch import fetch

CONFIG = MediaConfig()


async def get(
    item: Any, config: MediaConfig = CONFIG, *, trusted: bool = True, **options: Any
) -> object:
    return await fetch(item, config, parameter="images[2]", trusted=trusted, **options)


async def refuse(
    item: Any, config: MediaConfig = CONFIG, *, trusted: bool = True, **options: Any
) -> MediaError:
    with pytest.raises(MediaError) as caught:
        await get(item, config, trusted=trusted, **options)
    assert caught.value.parameter == "images[2]"
    assert str(caught.value).startswith("images[2]")
    return caught.value


def data_url(data: bytes, head: str = "image/png;base64") -> str:
    return f"data:{head},{base64.b64encode(data).decode()}"


async def test_objects_pass_through() -> None:
    samples = (np.zeros(3), 16_000)
    for item in (b"bytes", Image.new("RGB", (1, 1)), None, 3, samples, ["data:x"], np.zeros(3)):
        for modality in ("image", "audio", "video"):
            assert await get(item, trusted=False, modality=modality) is item


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000, 49_150, 49_153, 300_001])
async def test_data_urls(size: int) -> None:
    data = os.urandom(size)
    assert await get(data_url(data), trusted=False) == data
    assert await get(data_url(data, "IMAGE/PNG;charset=x;BASE64")) == data
    assert await get(data_url(data).replace("+", "%2B").replace("=", "%3D")) == data


@pytest.mark.parametrize(
    "url",
    ["data:image/png,abc", "data:;base64", "data:;base64,abc", "data:;base64,ab=c", "data:",
     "data:;base64,a b\n", "data:;base64,\u00e9\u00e9\u00e9\u00e9",
     "data:" + "x" * 999 + ";base64,AA==",
     "data:;base64," + "A" * 65532 + "AAA=" + "AAAA", "DATA:;base64,====="],
)  # fmt: skip
async def test_wrong_data_urls(url: str) -> None:
    error = await refuse(url)
    assert "AAAA" not in str(error)


async def test_data_url_over_the_limit() -> None:
    config = MediaConfig(max_image_bytes=10)
    assert await get(data_url(b"x" * 10), config) == b"x" * 10
    for size in (11, 12, 13, 100_000):
        assert "max_image_bytes" in str(await refuse(data_url(b"x" * size), config))


async def test_paths(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"data")
    assert await get(file) == b"data"
    assert await get(str(file)) == b"data"
    for item in (file, str(file), "relative.png", "C:\\a.png"):
        error = await refuse(item, trusted=False)
        assert str(tmp_path) not in str(error)
    for item in (tmp_path / "none", str(tmp_path / "none"), tmp_path, "\0", Path("\0")):
        error = await refuse(item)
        assert error.__cause__ is not None
        assert repr(str(item)) in str(error)
    assert "is a folder" in str(await refuse(tmp_path))
    assert "there is no file 'none.png'" in str(await refuse("none.png"))
    assert "max_image_bytes" in str(await refuse(file, MediaConfig(max_image_bytes=3)))


async def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    async with asyncio.timeout(5):
        assert "is a device or a pipe, not a file" in str(await refuse(tmp_path / "pipe"))


async def test_file_urls(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "a b.png").write_bytes(b"inside")
    (outside / "secret.png").write_bytes(b"outside")
    (root / "link.png").symlink_to(outside / "secret.png")
    (root / "folder").symlink_to(outside)
    config = MediaConfig(local_roots=(root,))
    url = (root / "a b.png").as_uri()
    assert await get(url, config, trusted=False) == b"inside"
    assert await get(url.replace("file://", "file://localhost"), config) == b"inside"
    assert "local_roots" in str(await refuse(url, trusted=True))
    texts = set()
    for bad in (
        (outside / "secret.png").as_uri(),
        (root / "link.png").as_uri(),
        (root / "folder" / "secret.png").as_uri(),
        f"{root.as_uri()}/../outside/secret.png",
        f"{root.as_uri()}/%2e%2e/outside/secret.png",
        (root / "missing.png").as_uri(),
        "file://elsewhere/etc/passwd",
        f"{url}?query",
        "file:///%00",
        "file://[",
    ):
        error = await refuse(bad, config, trusted=True)
        assert error.__cause__ is not None
        texts.add(str(error))
    # One text for all: it does not tell which files there are.
    assert len(texts) == 1
    await refuse(root.as_uri(), config)


@pytest.mark.parametrize("modality", ["image", "audio", "video"])
async def test_each_modality_has_its_limit(tmp_path: Path, modality: str) -> None:
    async def fetcher(url: str) -> bytes:
        return b"x" * 10

    limits = {f"max_{name}_bytes": 1000 for name in ("image", "audio", "video")}
    large = MediaConfig(**limits, local_roots=(tmp_path,), fetcher=fetcher)
    small = dataclasses.replace(large, **{f"max_{modality}_bytes": 9})
    file = tmp_path / "file"
    file.write_bytes(b"x" * 10)
    for item in (file, str(file), file.as_uri(), data_url(b"x" * 10), "http://a/"):
        assert await get(item, large, modality=modality) == b"x" * 10
        error = await refuse(item, small, modality=modality)
        assert f"media.max_{modality}_bytes (9)" in str(error)
        for other in {"image", "audio", "video"} - {modality}:
            assert await get(item, small, modality=other) == b"x" * 10


async def test_http_is_off_unless_allowed() -> None:
    for url in ("http://127.0.0.1/", "HTTPS://example.org/a.png"):
        text = str(await refuse(url, trusted=True))
        assert "in allowed_hosts" in text and "fetcher" in text


async def test_http_through_the_engines_own_client(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MediaConfig(allowed_hosts=("example.org",), max_audio_bytes=9)
    text = str(await refuse("http://127.0.0.1/", config))
    assert "media.allowed_hosts" in text and "media.fetcher" in text
    calls = []

    async def fetch_url(url: str, config: MediaConfig, **options: Any) -> bytes:
        calls.append((url, options))
        return b"body"

    monkeypatch.setattr("aioengine.processors.media.http.fetch_url", fetch_url)
    assert await get("http://example.org/", config, modality="audio") == b"body"
    limit = {"max_bytes": 9, "limit_name": "media.max_audio_bytes"}
    assert calls == [("http://example.org/", {"parameter": "images[2]", **limit})]


async def test_http_without_httpx(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("httpx", "h11"):
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "aioengine.processors.media.http", raising=False)
            patch.delattr("aioengine.processors.media.http", raising=False)
            patch.setitem(sys.modules, name, None)
            error = await refuse("http://example.org/", MediaConfig(allowed_hosts=("*",)))
            assert "pip install 'aioengine[fetch]'" in str(error)
            assert isinstance(error.__cause__, ModuleNotFoundError)


async def test_http_through_the_fetcher() -> None:
    async def fetcher(url: str) -> bytes:
        assert url == "https://example.org/a.png"
        return b"body"

    config = MediaConfig(fetcher=fetcher)
    assert await get("https://example.org/a.png", config, trusted=False) == b"body"
    small = MediaConfig(fetcher=fetcher, max_image_bytes=3)
    assert "max_image_bytes" in str(await refuse("https://example.org/a.png", small))


async def test_a_failing_fetcher() -> None:
    async def fails(url: str) -> bytes:
        raise ConnectionError("password=secret")

    async def wrong(url: str) -> Any:
        return "text"

    async def own(url: str) -> bytes:
        raise MediaError("url refused: not global", parameter="url")

    async def mixes_up(url: str) -> bytes:
        raise asyncio.CancelledError

    async def hangs(url: str) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def busy(url: str) -> bytes:
        raise MediaUnavailableError("url refused: try again")

    async def broken(url: str) -> bytes:
        raise ValueError("password=secret")

    await refuse("http://a/", MediaConfig(fetcher=mixes_up))
    error = await refuse("http://a/", MediaConfig(fetcher=fails))
    assert isinstance(error.__cause__, ConnectionError)
    assert type(error) is MediaUnavailableError
    assert type(await refuse("http://a/", MediaConfig(fetcher=broken))) is MediaError
    with pytest.raises(MediaUnavailableError, match="try again"):
        await get("http://a/", MediaConfig(fetcher=busy))
    assert "secret" not in str(error)
    assert "str" in str(await refuse("http://a/", MediaConfig(fetcher=wrong)))
    with pytest.raises(MediaError, match="not global") as caught:
        await get("http://a/", MediaConfig(fetcher=own))
    assert caught.value.parameter == "images[2]"
    error = await refuse("http://a/", MediaConfig(fetcher=hangs, fetch_timeout_s=0.01))
    assert "fetch_timeout_s" in str(error)
    assert type(error) is MediaUnavailableError
    assert isinstance(error.__cause__, TimeoutError)


async def test_cancellation_passes_through() -> None:
    started = asyncio.Event()

    async def hangs(url: str) -> bytes:
        started.set()
        await asyncio.Event().wait()
        return b""

    task = asyncio.create_task(get("http://a/", MediaConfig(fetcher=hangs)))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_escapes_in_a_data_url() -> None:
    data = bytes(range(256)) * 400
    plain = base64.b64encode(data).decode()
    escaped = plain.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D")
    for text in (plain, escaped):
        url = f"data:image/png;base64,{text}"
        assert await fetch(url, MediaConfig(), parameter="image", trusted=False) == data
    with pytest.raises(MediaError, match="base64"):
        url = "data:image/png;base64," + "%41" * 40_000
        await fetch(url, MediaConfig(), parameter="image", trusted=False)
