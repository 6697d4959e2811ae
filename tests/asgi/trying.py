"""The page for trials, as a person uses it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.asgi.browsing import Browser
from tests.asgi.serving import serving
from tests.support.engines import DEADLINE_S

KEY = "the 'secret' of $HOME"

FILE = """
    const bytes = Uint8Array.from(atob(arguments[0]), letter => letter.charCodeAt(0));
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([bytes], arguments[1], { type: arguments[2] }));
    const options = { bubbles: true, cancelable: true };
"""
DROP = FILE + "document.dispatchEvent(new DragEvent('drop', { dataTransfer, ...options }));"
PASTE = FILE + (
    "document.dispatchEvent("
    "new ClipboardEvent('paste', { clipboardData: dataTransfer, ...options }));"
)


class TryPage:
    """What a person does with the page, and sees on it."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.browser = browser
        self.url = url
        self._driver = browser.driver

    async def open(self) -> None:
        await self.browser.open(f"{self.url}/try")
        await self.browser.until("return facts !== null")

    async def drop(self, data: bytes, name: str = "a.png", kind: str = "image/png") -> None:
        await self._bring(DROP, data, name, kind)

    async def paste(self, data: bytes, name: str = "a.png", kind: str = "image/png") -> None:
        await self._bring(PASTE, data, name, kind)

    async def _bring(self, how: str, data: bytes, name: str, kind: str) -> None:
        before = await self.browser.run("return attached.length")
        await self.browser.run(how, base64.b64encode(data).decode(), name, kind)
        done = "return attached.length > arguments[0] || !element('refusal').hidden"
        await self.browser.until(done, before)

    async def choose(self, *paths: Path) -> None:
        field = self._driver.find_element("id", "files")
        await asyncio.to_thread(field.send_keys, "\n".join(map(str, paths)))
        await self.browser.until("return attached.length === arguments[0]", len(paths))

    async def type(self, *keys: str, held: str = Keys.NULL) -> None:
        """Into what has the focus, as a keyboard does."""
        chain = ActionChains(self._driver).key_down(held).send_keys(*keys).key_up(held)
        await asyncio.to_thread(chain.perform)

    async def click(self, name: str) -> None:
        await asyncio.to_thread(self._driver.find_element("id", name).click)

    async def ask(self, text: str) -> None:
        """Type a question and press Enter."""
        await self.browser.run("element('text').focus()")
        await self.type(text, Keys.ENTER)

    async def answer(self) -> dict[str, Any]:
        """The last answer, once it is complete."""
        await self.browser.until(
            "const last = [...document.querySelectorAll('article.answer')].at(-1);"
            "return last?.ariaBusy === 'false';"
        )
        return await self.browser.run(
            "const last = [...document.querySelectorAll('article.answer')].at(-1);"
            "return { text: last.firstElementChild.innerText,"
            "  figures: last.querySelector('small')?.innerText,"
            "  error: last.querySelector('.error')?.innerText,"
            "  spans: [...last.querySelectorAll('.spans span')].map(each => each.innerText),"
            "  summary: last.querySelector('summary')?.innerText };"
        )

    async def copied(self, title: str) -> str:
        """What a button of the last answer puts on the clipboard."""
        await self.browser.run(
            "const titled = node => node.textContent === arguments[0];"
            "[...document.querySelectorAll('article button')].filter(titled).at(-1).click();",
            title,
        )
        done = (
            "return [...document.querySelectorAll('button')].some(b => b.textContent === 'Copied')"
        )
        await self.browser.until(done)
        origin = {"origin": self.url, "permissions": ["clipboardReadWrite"]}
        await self.browser.command("Browser.grantPermissions", **origin)
        read = (
            "navigator.clipboard.readText().then(arguments[0], error => arguments[0](`${error}`))"
        )
        return await asyncio.to_thread(self._driver.execute_async_script, read)


class Impostor:
    """A server in front of the engine's, whose model says `text`."""

    def __init__(self, app: ASGIApp, text: str) -> None:
        self._app = app
        self._text = text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") != "/v1/chat/completions":
            await self._app(scope, receive, send)
            return
        chunks = [{"choices": [{"delta": {"content": part}}]} for part in self._text]
        events = [*map(json.dumps, chunks), "[DONE]"]
        body = "".join(f"data: {event}\n\n" for event in events)
        await Response(body, media_type="text/event-stream")(scope, receive, send)


@asynccontextmanager
async def opened(app: ASGIApp, browser: Browser) -> AsyncIterator[TryPage]:
    async with serving(app) as url:
        page = TryPage(browser, url)
        await page.open()
        yield page
        await browser.open("about:blank")


async def run(words: list[str], text: str, folder: Path) -> str:
    """What a program prints that is given `text`, in a folder of its own."""
    process = await asyncio.create_subprocess_exec(
        *words,
        text,
        cwd=folder,
        env={**os.environ, "AIOENGINE_API_KEY": KEY, "PYTHONSAFEPATH": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 0, err.decode()
    return out.decode()
