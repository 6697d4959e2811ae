"""Headless Chromium, driven by selenium from the event loop, and what tests ask of every page."""

from __future__ import annotations

import asyncio
import io
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from aioengine.instruments import STAGES
from tests.support.engines import DEADLINE_S

SHOOTS = os.environ.get("AIOENGINE_SCREENSHOT") == "1"
"""Whether the images in docs/ are made anew, which takes longer."""
DOCS = Path(__file__).parents[2] / "docs"
MAX_SHOT_BYTES = 150_000
SIZES = ((1440, 900), (390, 844), (320, 568), (1280, 900), (1920, 1080))

PIXELS = """
    const canvas = document.querySelector("canvas");
    const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    [probe.canvas.width, probe.canvas.height] = [canvas.width, canvas.height];
    probe.drawImage(canvas, 0, 0);
    const pixels = probe.getImageData(0, 0, canvas.width, canvas.height).data;
    const style = getComputedStyle(document.documentElement);
    return Object.fromEntries(arguments[0].map(stage => {
        probe.fillStyle = style.getPropertyValue(`--${stage}`);
        probe.fillRect(0, 0, 1, 1);
        const [red, green, blue] = probe.getImageData(0, 0, 1, 1).data;
        const found = [];
        for (let at = 0; at < pixels.length; at += 4) {
            if (pixels[at] === red && pixels[at + 1] === green && pixels[at + 2] === blue) {
                found.push([at / 4 % canvas.width, Math.floor(at / 4 / canvas.width)]);
            }
        }
        return [stage, { count: found.length, last: found.at(-1) }];
    }));
"""
"""How much of the timeline has each stage's own colour, and where the last such pixel is."""

TEXT_COLOURS = """
    const ground = node => {
        for (; node; node = node.parentElement) {
            const colour = getComputedStyle(node).backgroundColor;
            if (colour !== "rgba(0, 0, 0, 0)") return colour;
        }
    };
    return [...document.body.querySelectorAll("*")]
        .filter(node => [...node.childNodes].some(child => child.nodeType === 3
            && child.textContent.trim()) && node.getClientRects().length)
        .map(node => [node.innerText, getComputedStyle(node).color, ground(node)]);
"""
"""Every visible text with its colour and that of the ground it is on."""


OVERLAPS = """
    const main = document.querySelector("main").getBoundingClientRect();
    const box = node => {
        const { left, right, top, bottom } = node.getBoundingClientRect();
        if (!document.querySelector("main").contains(node)) return { left, right, top, bottom };
        return { left, right, top: Math.max(top, main.top), bottom: Math.min(bottom, main.bottom) };
    };
    const shown = [...document.querySelectorAll(arguments[0])]
        .filter(node => node.getClientRects().length).map(node => [node, box(node)]);
    return shown.flatMap(([one, a], index) => shown.slice(index + 1)
        .filter(([other, b]) => !one.contains(other) && !other.contains(one)
            && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1)
        .map(([other]) => [one.outerHTML.slice(0, 60), other.outerHTML.slice(0, 60)]));
"""
"""Pairs of elements, of those that a selector finds, that lie upon each other."""


class Browser:
    """Chromium, to be asked from the event loop."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    async def run(self, script: str, *arguments: Any) -> Any:
        return await asyncio.to_thread(self.driver.execute_script, script, *arguments)

    async def command(self, name: str, **parameters: Any) -> Any:
        return await asyncio.to_thread(self.driver.execute_cdp_cmd, name, parameters)

    async def open(self, url: str) -> None:
        await asyncio.to_thread(self.driver.get, url)

    async def text(self, name: str) -> str:
        """What an element says."""
        return await self.run("return document.getElementById(arguments[0]).innerText", name)

    async def figures(self) -> dict[str, str]:
        """Card -> its figure."""
        return await self.run(
            "return Object.fromEntries([...document.getElementById('figures').children]"
            ".map(card => [card.id, card.querySelector('dd').innerText]))"
        )

    async def point(self, name: str, x: float, y: float) -> None:
        """Move the mouse to a place of an element."""
        left, top = await self.run(
            "const box = document.getElementById(arguments[0]).getBoundingClientRect();"
            "return [box.left, box.top];",
            name,
        )
        place = {"type": "mouseMoved", "x": left + x, "y": top + y}
        await self.command("Input.dispatchMouseEvent", **place)

    async def until(self, script: str, *arguments: Any) -> Any:
        """Wait until `script` returns something true."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if found := await self.run(script, *arguments):
                    return found
                await asyncio.sleep(0.05)

    async def until_text(self, name: str, text: str) -> None:
        """Wait until an element's words begin so; the page says them anew once a second."""
        begins = "return document.getElementById(arguments[0]).innerText.startsWith(arguments[1])"
        await self.until(begins, name, text)

    async def until_lanes(self) -> dict[str, Any]:
        """Wait until every lane of the timeline shows something, prefill too; PIXELS."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                found = await self.run(PIXELS, [*STAGES, "prefill"])
                if all(lane["count"] > 20 for lane in found.values()):
                    return found
                await asyncio.sleep(0.05)

    async def press(self, name: str, key: str) -> None:
        """A key on the keyboard, while an element has the focus."""
        element = self.driver.find_element("id", name)
        await asyncio.to_thread(element.send_keys, key)

    async def show(self, width: int, height: int, scheme: str = "light", ratio: int = 1) -> None:
        """A screen of this size, and a user with this taste."""
        await self.command(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": ratio, "mobile": width < 600},
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.command("Emulation.setEmulatedMedia", features=features)

    async def shoot(self, name: str) -> None:
        """Make an image of the docs, in few enough bytes for a repository."""
        png = await asyncio.to_thread(self.driver.get_screenshot_as_png)
        path = DOCS / name
        with Image.open(io.BytesIO(png)) as image:
            image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
        assert path.stat().st_size < MAX_SHOT_BYTES

    def complaints(self) -> list[str]:
        """What the console says: errors, and what the content security policy refused."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """Chromium without a window, with a microphone that beeps; skips the test without one."""
    binary, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or chromedriver is None:
        pytest.skip(
            "THE PAGES ARE NOT TESTED: this needs chromium and chromedriver, on Debian by "
            "apt install chromium chromium-driver"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for option in (
        *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"),
        *("--disable-background-networking", "--disable-component-update", "--no-first-run"),
        *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
    ):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    try:
        yield driver
    finally:
        driver.quit()


def contrast(one: str, other: str) -> float:
    """Of two CSS colours, by WCAG 2's definition of relative luminance."""

    def luminance(colour: str) -> float:
        channels = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
