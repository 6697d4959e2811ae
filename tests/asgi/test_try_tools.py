"""The page for trials with a model that thinks and calls tools, in headless Chromium."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from aioengine.asgi import service_app
from tests.asgi.browsing import OVERLAPS, SIZES, TEXT_COLOURS, Browser, contrast
from tests.asgi.test_tools_over_http import ANSWER, WEATHER
from tests.asgi.trying import opened, run
from tests.support.engines import running_engine
from tests.support.scripts import script
from tests.support.tools_model import save_tiny_text_caller

PARTS = (
    ".user p, .said p, .thought[open] p, article pre, article button, article small, "
    ".results label, summary, textarea"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_text_caller(tmp_path_factory.mktemp("tools"))


async def test_a_tool_is_called_and_its_result_goes_back(
    folder: Path, browser: Browser, tmp_path: Path
) -> None:
    async with (
        running_engine(folder, max_model_len=1024) as engine,
        opened(service_app(engine), browser) as page,
    ):
        # One tool of OpenAI's form, or the function alone.
        for tools in ([WEATHER], WEATHER["function"]):
            await browser.run("element('tools').value = arguments[0]", json.dumps(tools))
            script(engine, ANSWER)
            await page.ask("Will it rain in Paris?")
            found = await page.answer()
            last = "[...document.querySelectorAll('article.answer')].at(-1)"
            thought = f"return {last}.querySelector('.thought')"
            assert await browser.run(f"{thought}.lastChild.textContent") == "hm, é"
            assert not await browser.run(f"{thought}.open"), "what is said shows, not thought"
            said = await browser.run(f"return {last}.querySelector('.said').innerText")
            assert [*filter(None, said.split("\n"))] == [
                "I look.",
                'weather({"city": "Paris"})',
            ]
            assert found["error"] is None and "ended at" not in found["figures"]
            assert "Result of weather" in await browser.run(f"return {last}.innerText")
            for size in SIZES[:3]:
                await browser.show(*size)
                assert await browser.run(OVERLAPS, PARTS) == []
                for text, colour, ground in await browser.run(TEXT_COLOURS):
                    assert contrast(colour, ground) >= 4.5, text
            script(engine, "Yes, it **will**.")
            await browser.run(
                f"const node = {last}.querySelector('.results');"
                "node.querySelector('textarea').value = '<b>rain</b>';"
                "node.querySelector('button').click();"
            )
            await until_answers(browser, 2)
            assert (await page.answer())["text"] == "Yes, it **will**."
            sent = await browser.run("return history")
            assert [message["role"] for message in sent] == [
                *("user", "assistant", "tool", "assistant")
            ]
            assert sent[1]["tool_calls"][0]["function"]["name"] == "weather"
            assert sent[1]["reasoning_content"] == "hm, é" and sent[1]["content"] == "I look."
            assert sent[2]["content"] == "<b>rain</b>"
            assert sent[2]["tool_call_id"] == sent[1]["tool_calls"][0]["id"]
            # What is copied runs as it stands, the conversation with the tools in it.
            copied = await page.copied("Copy as Python")
            assert "tools=[" in copied and "reasoning_content" in copied
            answered = await run([sys.executable, "-c"], copied, tmp_path)
            assert answered.strip() == "Yes, it **will**."
            await page.click("new")
        assert browser.complaints() == []


async def until_answers(browser: Browser, count: int) -> None:
    """Wait until the page shows so many answers."""
    await browser.until(
        "return document.querySelectorAll('article.answer').length >= arguments[0]", count
    )


async def test_tools_that_are_no_json_are_refused_before_they_are_sent(
    folder: Path, browser: Browser
) -> None:
    async with running_engine(folder) as engine, opened(service_app(engine), browser) as page:
        await browser.run("element('tools').value = '[{'")
        await page.ask("Hello")
        await browser.until("return !element('refusal').hidden")
        assert "not JSON" in await browser.text("refusal")
        assert await browser.run("return element('text').value") == "Hello"
        assert await browser.run("return document.querySelectorAll('article').length") == 0
        await browser.run("element('tools').value = '[{\"name\": \"a b\"}]'")
        await page.ask("")
        assert "tools[0].function.name" in (await page.answer())["error"].lower()
        assert await browser.run("return history.length") == 0


async def test_a_thought_that_is_cut_off_stays_open(folder: Path, browser: Browser) -> None:
    async with running_engine(folder) as engine, opened(service_app(engine), browser) as page:
        script(engine, "<think>\nI think and think and go on")
        await browser.run("element('max_tokens').value = '20'")
        await page.ask("Hello")
        found = await page.answer()
        assert "ended at the most tokens" in found["figures"]
        assert await browser.run("return document.querySelector('.thought').open")
        message = await browser.run("return history.at(-1)")
        assert message["content"] == "" and message["reasoning_content"].startswith("I think")
        assert browser.complaints() == []
