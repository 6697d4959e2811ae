"""One engine for all hostile requests of a file, and what honest ones get from it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from aioengine import AsyncEngine
from tests.engine.test_modalities import save_media_family
from tests.support.engines import running_engine
from tests.support.hostile import Tokens, company


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media_family")
    save_media_family(path)
    return path


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    async with running_engine(folder) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def expected(engine: AsyncEngine) -> Tokens:
    """What honest requests get where there are no others."""
    return await company(engine)
