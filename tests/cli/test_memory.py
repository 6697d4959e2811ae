"""The memory of a burst: that a server watches the bodies which its application counts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine
from aioengine.cli.server import DrainingServer
from aioengine.errors import InvalidRequestError
from tests.cli.conftest import SIZES, Command


def test_the_bodies_that_are_counted_are_the_ones_that_are_watched(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no memory would be given back after a burst."""
    found: dict[str, Any] = {}

    def make(app: Any, _engine: AsyncEngine, **options: Any) -> Any:
        found.update(options, app=app)
        raise InvalidRequestError("enough", parameter="test")

    monkeypatch.setattr(sys.modules[DrainingServer.__module__], "DrainingServer", make)
    assert "aioengine: enough\n" in command("serve", folder, "--port", "0", *SIZES).err
    assert found["bodies"] is found["app"].state.bodies
