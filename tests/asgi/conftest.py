"""One tiny model for all tests of the web service."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from aioengine import AsyncEngine
from tests.asgi.browsing import SIZES, Browser, chromium
from tests.support.engines import running_engine
from tests.support.tiny import save_tiny_llava
from tests.support.tools_model import save_tiny_text_caller


@pytest.fixture(autouse=True)
def _ctrl_c_stays_pythons() -> Iterator[None]:
    """A server that leaves it to a handler of its own breaks tests that come later."""
    before = signal.getsignal(signal.SIGINT)
    yield
    left = signal.signal(signal.SIGINT, before)
    assert left is before, f"SIGINT was left to {left}"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "tiny-llava"
    path.mkdir()
    save_tiny_llava(path)
    return path


@pytest.fixture(scope="session")
def tools_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of texts whose template knows tools and thoughts."""
    return save_tiny_text_caller(tmp_path_factory.mktemp("tools"))


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    """Running; when the test is over nothing may be left in it."""
    async with running_engine(folder) as engine:
        yield engine


@pytest.fixture(scope="session")
def driver() -> Iterator[webdriver.Chrome]:
    with chromium() as driver:
        yield driver


@pytest.fixture
async def browser(driver: webdriver.Chrome) -> AsyncIterator[Browser]:
    browser = Browser(driver)
    await browser.show(*SIZES[0])
    yield browser
    await browser.open("about:blank")
    browser.complaints()  # so that the next test begins with none
