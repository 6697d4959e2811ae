"""The status page in a browser that shows it: headless Chromium, driven by selenium.

With AIOENGINE_SCREENSHOT=1 the load lasts longer, and the images in docs/ are made anew.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image, ImageDraw
from selenium.webdriver.common.keys import Keys
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from aioengine import AsyncEngine, SamplingParams, demo_model
from aioengine.asgi import service_app
from aioengine.asgi.status import StatusPage
from aioengine.errors import MediaError
from aioengine.instruments import STAGES
from tests.asgi.browsing import OVERLAPS, SHOOTS, SIZES, TEXT_COLOURS, Browser, contrast
from tests.asgi.serving import serving
from tests.support.engines import greedy, running_engine
from tests.support.tiny import tiny_image

IMAGE_SIZE = (1600, 1200) if SHOOTS else (800, 600)
NUM_IMAGES = 200 if SHOOTS else 24
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
ARRIVALS_S = 0.06 if SHOOTS else 0.16
PARTS = (
    "h1, header p, nav a, .grid dt, .grid dd > span, .grid svg, .grid .muted, h2, #idle *, "
    ".stages > *, th, td, .cache p, .cache .push, #facts *, #lanes li, canvas, .timeline small"
)
"""Elements that may not lie upon each other."""


@pytest.fixture
async def demo_engine() -> AsyncIterator[AsyncEngine]:
    """The demo model, with caches that fill under the load of this file."""
    async with AsyncEngine.from_pretrained(
        demo_model(),
        device="cpu",
        kv_cache_bytes=(48 if SHOOTS else 8) << 20,
        encoder_cache_bytes=1 << 20,
        mm_processor_cache_bytes=6 << 20,
        max_num_seqs=32,
    ) as engine:
        yield engine


def draw_image(path: Path, seed: int) -> Path:
    """A large JPEG file that takes a while to decode."""
    generator = random.Random(seed)
    image = Image.effect_noise(IMAGE_SIZE, 40).convert("RGB")
    pen = ImageDraw.Draw(image)
    for _ in range(6):
        x, y = (generator.randrange(size) for size in IMAGE_SIZE)
        colour = tuple(generator.randrange(256) for _ in range(3))
        pen.ellipse([x, y, x + 300, y + 300], fill=colour)
    image.save(path, quality=88)
    return path


@asynccontextmanager
async def load(engine: AsyncEngine, folder: Path) -> AsyncIterator[None]:
    """Requests with images that keep coming: most are new, every fourth comes again."""
    paths = [folder / f"{number}.jpg" for number in range(NUM_IMAGES)]
    for number, path in enumerate(paths):
        await asyncio.to_thread(draw_image, path, number)
    params = SamplingParams(temperature=0, max_tokens=700 if SHOOTS else 96, ignore_eos=True)
    prompt = "USER: <image>\nDescribe the picture. ASSISTANT:"

    async def arrive() -> None:
        for number in itertools.count():
            path = paths[(number - 3 * (number % 4 == 3)) % len(paths)]
            name = f"describe-{number}"
            work = engine.generate(prompt, params, images=[path], request_id=name)
            running.append(tasks.create_task(work))
            await asyncio.sleep(ARRIVALS_S)

    async with asyncio.TaskGroup() as tasks:
        running: list[asyncio.Task[Any]] = [tasks.create_task(arrive())]
        yield
        for task in running:
            task.cancel()


@asynccontextmanager
async def shown(engine: AsyncEngine, browser: Browser) -> AsyncIterator[Gateway]:
    """The page, served below a prefix and open in the browser."""
    page = StatusPage(engine)
    gateway = Gateway(Starlette(routes=[Mount("/below", routes=page.routes())]))
    async with serving(gateway) as url:
        await browser.open(f"{url}/below/")
        yield gateway
        await browser.open("about:blank")


class Gateway:
    """What stands before a server, and may lose it."""

    def __init__(self, app: ASGIApp) -> None:
        self.has_lost = False
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = PlainTextResponse("bad gateway", 502) if self.has_lost else self._app
        await app(scope, receive, send)


async def test_page_under_load(demo_engine: AsyncEngine, browser: Browser, tmp_path: Path) -> None:
    async with shown(demo_engine, browser), load(demo_engine, tmp_path):
        await browser.until_text("state", "Running")
        await browser.until_text("model", "demo_llava")
        await browser.until("return document.querySelector('#finished dd').innerText > '0'")
        before = await browser.figures()
        assert "–" not in before.values()
        assert before["rate"] != "0"
        await browser.until(
            "return document.querySelector('#finished dd').innerText !== arguments[0]",
            before["finished"],
        )
        await browser.until_lanes()
        await browser.until_text("overlap", "two or more stages at once in ")
        assert (await browser.text("lanes")).count("×") == len(STAGES)
        assert "KV blocks kept for reuse" in await browser.text("caches")
        if SHOOTS:
            await asyncio.sleep(12)  # the whole timeline is full
            await browser.shoot("status_page.png")
        assert (await browser.figures())["lag"] != "–"
        assert browser.complaints() == []


async def test_ends_are_told_apart_by_blame(engine: AsyncEngine, browser: Browser) -> None:
    says = "return document.getElementById('finished').textContent.includes(arguments[0])"
    async with shown(engine, browser):
        await browser.until(says, "none failed")
        with pytest.raises(MediaError):
            await engine.generate("<image> a", images=[b"no image"])
        await browser.until(says, "1 rejected")
        assert not await browser.run(says, "failed")


async def test_timeline_pauses_and_tells(
    engine: AsyncEngine, browser: Browser, tmp_path: Path
) -> None:
    image_file = tmp_path / "image.png"
    tiny_image(0).save(image_file)
    async with shown(engine, browser):
        await browser.until_text("state", "Running")
        task = asyncio.create_task(engine.generate("<image> a", greedy(200), images=[image_file]))
        await browser.until_lanes()
        await browser.press("pause", Keys.SPACE)
        await browser.until_text("pause", "Resume")
        image = "return document.querySelector('canvas').toDataURL()"
        frozen = await browser.run(image)
        await task
        await browser.until("return document.querySelector('#finished dd').innerText === '1'")
        assert await browser.run(image) == frozen, "the figures go on, the picture does not"
        found = (await browser.until_lanes())["encode"]
        await browser.point("canvas", *found["last"])
        await browser.until("return !document.getElementById('tip').hidden")
        tip = await browser.text("tip")
        assert tip.startswith("Encode · 16 rows") and tip.endswith("ms · 1 request")
        await browser.press("pause", Keys.ENTER)
        await browser.until_text("pause", "Pause")
        await browser.until(f"return ({image.removeprefix('return ')}) !== arguments[0]", frozen)
        assert browser.complaints() == []


async def test_names_are_text(engine: AsyncEngine, browser: Browser) -> None:
    async def ask() -> None:
        while True:
            await engine.generate("a", greedy(200), request_id=HOSTILE)

    async with shown(engine, browser):
        count = "return document.querySelectorAll('img, script').length"
        await browser.until_text("state", "Running")
        elements = await browser.run(count)
        asking = asyncio.create_task(ask())
        cell = "document.querySelector('#oldest td')"
        await browser.until(f"return {cell}?.title === arguments[0]", HOSTILE)
        assert await browser.run(f"return {cell}.innerText") == "<img src=x oner…ript>"
        assert await browser.run(count) == elements
        asking.cancel()
        await asyncio.wait([asking])
        await browser.until(f"return {cell}.title === ''")
        assert browser.complaints() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_screen_fits(engine: AsyncEngine, browser: Browser, scheme: str) -> None:
    name = "a-rather-long-name-" * 10

    async def ask() -> None:
        while True:
            await engine.generate("a", greedy(200), request_id=name)

    async with shown(engine, browser):
        asking = asyncio.create_task(ask())
        for width, height in SIZES:
            await browser.show(width, height, scheme)
            await browser.until("return innerWidth === arguments[0]", width)
            await browser.until("return document.querySelector('#oldest td')?.innerText")
            wide, high = await browser.run(
                "const { scrollWidth, scrollHeight } = document.documentElement;"
                "return [scrollWidth, scrollHeight];"
            )
            assert wide <= width, f"{width} x {height} scrolls sideways"
            assert high <= height or width < 1200, f"{width} x {height} is cut below"
            assert await browser.run(OVERLAPS, PARTS) == []
        ground = await browser.run("return getComputedStyle(document.body).backgroundColor")
        assert (int(re.findall(r"\d+", ground)[0]) < 128) == (scheme == "dark")
        asking.cancel()
        await asyncio.wait([asking])


async def test_a_request_in_its_row(browser: Browser, tmp_path: Path) -> None:
    image_file = tmp_path / "image.png"
    tiny_image(0).save(image_file)
    async with (
        running_engine(demo_model(), max_model_len=4096, kv_cache_bytes=64 << 20) as engine,
        shown(engine, browser),
    ):
        await browser.until("return !document.getElementById('idle').hidden")
        assert await browser.text("idle") == "No request is live.\nTry the model"
        prompt, images = "<image>" + " word" * 40, [image_file] * 2
        first = await engine.generate(prompt.replace("<", "<image><"), greedy(2), images=images)
        task = asyncio.create_task(
            engine.generate(prompt.replace("<", "<image><"), greedy(3900), images=images)
        )
        row = "return [...document.querySelectorAll('#oldest tr')[0].cells].map(c => c.innerText)"
        await browser.until(f"return (() => {{ {row} }})()[1] === 'generating'")
        assert await browser.run("return document.getElementById('idle').hidden")
        name, stage, _, num_prompt, num_cached, media, num_output = await browser.run(row)
        assert len(name) == 21 and stage == "generating" and media == "2 images"
        assert int(num_prompt) == first.usage.prompt_tokens
        assert 0 < int(num_cached) < int(num_prompt)
        assert int(num_output.replace(",", "")) > 0
        task.cancel()
        await asyncio.wait([task])
        assert browser.complaints() == []


async def test_the_engine_in_its_box_and_what_is_near(
    engine: AsyncEngine, browser: Browser
) -> None:
    async with serving(service_app(engine)) as url:
        await browser.open(f"{url}/")
        await browser.until("return document.getElementById('facts').innerText.includes('Options')")
        facts = await browser.text("facts")
        for words in ("cpu, float64", "the model's own class", "text, image"):
            assert words in facts
        assert "max_model_len 512" in facts and "kv_cache_bytes 8.0 MiB" in facts
        assert (await browser.figures())["memory"].endswith("iB")
        links = await browser.run("return [...document.querySelectorAll('nav a')].map(a => a.href)")
        assert links == [
            f"{url}/{path}" for path in ("try", "v1/models", "metrics", "status/trace")
        ]
        async with httpx.AsyncClient() as client:
            for link in links:
                assert (await client.get(link)).status_code == 200
        assert browser.complaints() == []
        await browser.open("about:blank")


async def test_contrast_is_enough(engine: AsyncEngine, browser: Browser) -> None:
    """4.5 to 1 for all text, as WCAG 2 asks for at level AA."""
    async with shown(engine, browser):
        await browser.until_text("state", "Running")
        states = await browser.run("return Object.keys(STATES)")
        for scheme, state in itertools.product(("light", "dark"), states):
            await browser.show(*SIZES[0], scheme)
            pairs = await browser.run(f"showState('{state}'); {TEXT_COLOURS}")
            assert len(pairs) > 20
            found = [(text, contrast(ink, ground)) for text, ink, ground in pairs]
            assert [pair for pair in found if pair[1] < 4.5] == [], f"{scheme}, {state}"


async def test_states_in_words(folder: Path, browser: Browser) -> None:
    engine = AsyncEngine.from_pretrained(folder, device="cpu")
    async with shown(engine, browser):
        await browser.until_text("state", "Not started")
        assert "has not been started" in await browser.text("notice")
        async with engine:
            await browser.until_text("state", "Running")
            assert await browser.text("notice") == ""
            await browser.until("return facts !== null")
            await engine.drain()
            await browser.until_text("state", "Draining")
            engine.resume()
            await browser.until_text("state", "Running")
        await browser.until_text("state", "Closed")
        assert browser.complaints() == []


async def test_a_dead_engine(folder: Path, browser: Browser) -> None:
    engine = AsyncEngine.from_pretrained(folder, device="cpu")
    async with engine, shown(engine, browser):
        await browser.until("return facts !== null")
        engine._core.die(RuntimeError("the device is gone"))
        await browser.until_text("state", "Dead")
        assert "has died" in await browser.text("notice")
        assert browser.complaints() == []


async def test_connection_lost_and_found(engine: AsyncEngine, browser: Browser) -> None:
    async with shown(engine, browser) as gateway:
        await browser.until_text("state", "Running")
        gateway.has_lost = True
        await browser.until_text("state", "Connection lost")
        assert "last heard" in await browser.text("notice")
        gateway.has_lost = False
        await browser.until_text("state", "Running")
        assert all("502" in complaint for complaint in browser.complaints())
