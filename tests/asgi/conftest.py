"""One tiny model for all tests of the web service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aioengine import AsyncEngine
from tests.engines import running_engine
from tests.tiny import save_tiny_llava


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "tiny-llava"
    path.mkdir()
    save_tiny_llava(path)
    return path


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    """Running; when the test is over nothing may be left in it."""
    async with running_engine(folder) as engine:
        yield engine
