"""Hostile URLs and paths: nothing inside is reached, nothing without end is waited for.

test_media.py says which incident is held by which test.
"""

from __future__ import annotations

import asyncio
import base64
import os
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, MediaConfig, RequestOutput
from aioengine.errors import MediaError, MediaUnavailableError
from tests.processors.media.servers import (
    NAME,
    Names,
    Respond,
    drips,
    endless,
    endless_gzip,
    moved,
    serve,
    too_long,
)
from tests.support.engines import encoded, running_engine
from tests.support.hostile import MIB, Attack, Tokens, bounded_memory, company, outcome, repel
from tests.support.tiny import tiny_image

http = pytest.importorskip("aioengine.processors.media.http")
pytestmark = pytest.mark.asyncio(loop_scope="module")


PRIVATE = [
    "http://127.0.0.1/a", "http://127.1/", "http://2130706433/", "http://0x7f000001/",
    "http://0177.0.0.1/", "http://017700000001/", "http://0/", "http://169.254.169.254/latest/",
    "http://[::1]/", "http://[::ffff:10.0.0.1]/", "http://[::ffff:a00:1]/", "http://10.0.0.1/",
    "http://[fd00:ec2::254]/", "http://100.100.100.200/", "http://user:word@a.test/",
    "http://a.test\\@10.0.0.1/", "http://10.0.0.1\\@a.test/", "http://a.test#@10.0.0.1/",
    "http://\u2460\u2461\u2466.0.0.1/", "http://localhost/", "http://private.test/",
    "http://both.test/", "https://both.test/", "HTTP://PRIVATE.TEST/", "http://a.test:22/",
    "http:/10.0.0.1/", "http:10.0.0.1", "http://a.test/" + "x" * 100_000,
]  # fmt: skip
OTHER_SCHEMES = [
    "ftp://10.0.0.1/", "gopher://a.test/", "file:///etc/passwd", "jar:http://a.test!/", "//a.test/",
]  # fmt: skip


def answering(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Invented names; those of no other address are 127.0.0.1."""
    names = Names()
    names.answers = {
        "a.test": [["10.0.0.1"]],
        "private.test": [["192.168.0.1"]],
        "both.test": [["1.1.1.1", "10.0.0.1"]],
    }
    monkeypatch.setattr(http, "_lookup", names.lookup)
    return names


def by_url(url: str, kind: type[MediaError] = MediaError) -> list[Attack]:
    """As an argument, and in a chat message."""
    part = {"type": "image_url", "image_url": {"url": url}}
    return [
        Attack("<image>", kind, "images[0]", {"images": [url]}),
        Attack([{"role": "user", "content": [part]}], kind, "messages[0].content[0]"),
    ]


async def test_addresses_inside_the_network(
    folder: Path, expected: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch)
    connected: list[Any] = []

    async def connect(*target: Any) -> None:
        connected.append(target)
        raise OSError

    monkeypatch.setattr(http, "_connect", connect)
    async with running_engine(folder, media=MediaConfig(allowed_hosts=("*",))) as engine:
        attacks = [attack for url in (*PRIVATE, *OTHER_SCHEMES) for attack in by_url(url)]
        errors = await repel(engine, expected, attacks)
    assert not connected
    for error in errors:
        assert not any(word in str(error) for word in ("10.0", "192.168", "127.", "169.254"))


@pytest.mark.parametrize("respond", [endless, endless_gzip, too_long, drips])
async def test_servers_that_never_end(
    folder: Path, expected: Tokens, monkeypatch: pytest.MonkeyPatch, respond: Respond
) -> None:
    answering(monkeypatch)
    monkeypatch.setattr(http, "_is_public", lambda address: address == "127.0.0.1")
    async with serve(respond) as server:
        media = MediaConfig(
            allowed_hosts=(f"{NAME}:{server.port}",),
            max_image_bytes=100_000,
            fetch_timeout_s=0.5 if respond is drips else 30,
        )
        kind = MediaUnavailableError if respond is drips else MediaError
        url = f"http://{NAME}:{server.port}/image.png"
        async with running_engine(folder, media=media) as engine:
            with bounded_memory(64 * MIB):
                await repel(engine, expected, by_url(url, kind))
        await asyncio.wait_for(server.hung_up.wait(), 20)


@pytest.mark.parametrize("place", [*PRIVATE[:11], "http://both.test/", "file:///etc/passwd"])
async def test_redirects_inside(
    folder: Path, expected: Tokens, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    answering(monkeypatch)
    monkeypatch.setattr(http, "_is_public", lambda address: address in ("127.0.0.1", "1.1.1.1"))
    async with serve(moved(place)) as server, serve(b"") as inside:
        media = MediaConfig(allowed_hosts=(f"{NAME}:{server.port}", "*"))
        url = f"http://{NAME}:{server.port}/image.png"
        # Public for this test, and closed; all others are refused before they are dialled.
        kind = MediaUnavailableError if place == PRIVATE[0] else MediaError
        async with running_engine(folder, media=media) as engine:
            await repel(engine, expected, by_url(url, kind))
        assert inside.num_connections == 0


# ---- files


async def test_files_that_are_none_of_a_users_business(folder: Path, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for path in (root, outside):
        path.mkdir()
    (outside / "image.png").write_bytes(encoded(tiny_image(55)))
    (root / "image.png").write_bytes(encoded(tiny_image(56)))
    (root / "link.png").symlink_to(outside / "image.png")
    (root / "folder").symlink_to(outside)
    (root / "device").symlink_to("/dev/zero")
    (root / "self").symlink_to(root / "self")
    os.mkfifo(root / "pipe")
    inside = [root / name for name in ("link.png", "folder/image.png", "device", "self", "pipe")]
    paths = [*inside, root, Path("/dev/zero"), Path("/proc/self/environ"), Path("/etc/passwd")]
    urls = [path.as_uri() for path in paths]
    urls += [f"{root.as_uri()}/{up}/outside/image.png" for up in ("..", "%2e%2e")]
    urls += ["file://elsewhere/etc/passwd", "file:///%00", "file:" + "/" * 10_000, "file://["]
    async with running_engine(folder, media=MediaConfig(local_roots=(root,))) as engine:
        expected = await company(engine)
        attacks = [attack for url in urls for attack in by_url(url)]
        # A path in a message is refused even if it is inside; as an argument, where it is no file.
        texts = [str(path) for path in (*paths, root / "image.png")]
        attacks += [by_url(text)[1] for text in texts]
        nowhere = [path for path in (*inside[2:], root, Path("/dev/zero"), Path("/dev/stdin"))]
        errors = await repel(engine, expected, attacks)
        assert not any(str(tmp_path) in str(error) for error in errors)
        for path in nowhere:  # what the application named itself may be named to it
            with pytest.raises(MediaError) as caught:
                await engine.generate("<image>", images=[path])
            assert caught.value.parameter == "images[0]" and repr(str(path)) in str(caught.value)
        url = (root / "image.png").as_uri()
        assert isinstance(await outcome(engine, "<image>", images=[url]), RequestOutput)


async def test_data_urls_of_every_form(engine: AsyncEngine, expected: Tokens) -> None:
    good = base64.b64encode(encoded(tiny_image(57))).decode()
    heads = ["data:", "data:image/png", "data:image/png;base64;charset=utf-8", "data:;base64;x"]
    heads += ["data:image/png;charset=utf-7;base32", "data:" + "x" * 9999 + ";base64", "data"]
    bodies = [good[:-1], good[:-5], "=" + good, good + "=", good[:40] + "==" + good[40:]]
    bodies += [good.replace("A", "\uff21"), good[:8] + "\n" + good[8:], " " + good, good + "\0"]
    bodies += ["%", "%ff" * 9, "data:image/png;base64," + good, "\ud800", "", good + ",", "A" * 40]
    urls = [f"{head},{good}" for head in heads] + [f"data:image/png;base64,{b}" for b in bodies]
    await repel(engine, expected, [attack for url in urls for attack in by_url(url)])
    huge = "data:image/png;base64," + "A" * (90 * MIB)
    with bounded_memory(16 * MIB):
        await repel(engine, expected, by_url(huge))
    for head in ("data:text/html;charset=utf-7;base64", "DATA:;BASE64"):
        found = await outcome(engine, "<image>", images=[f"{head},{good}"])
        assert isinstance(found, RequestOutput)
