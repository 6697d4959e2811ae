"""The memory of a burst of bodies, which a server gives back."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine
from aioengine.asgi import service_app
from aioengine.cli.memory import BURST_BYTES, give_back_memory
from aioengine.cli.server import DrainingServer
from aioengine.errors import InvalidRequestError
from tests.cli.conftest import SIZES, Command
from tests.support.engines import running_engine


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


async def test_memory_is_given_back_after_a_burst(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is over, and off the loop."""
    trimmed: list[str] = []

    def trim() -> None:
        trimmed.append(threading.current_thread().name)

    monkeypatch.setattr(sys.modules[DrainingServer.__module__], "give_back_memory", trim)
    monkeypatch.setattr("aioengine.cli.memory.DELAY_S", 0)
    async with running_engine(folder) as engine:
        app = service_app(engine)
        options: Any = {"drain_timeout_s": 0, "log_level": "critical", "announce": bool}
        server = DrainingServer(app, engine, bodies=app.state.bodies, **options)
        for num_bytes, num_trims in ((BURST_BYTES - 1, 0), (BURST_BYTES, 1), (0, 1)):
            app.state.bodies.take(num_bytes)
            await server.on_tick(0)
            app.state.bodies.give_back(num_bytes)
            await server.on_tick(0)
            if server._trimming is not None:
                await server._trimming
            assert len(trimmed) == num_trims
    assert trimmed[0].startswith("aioengine-apart")


def test_memory_that_is_free_goes_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    cycle: list[Any] = [bytes(50_000) for _ in range(2000)]  # none is large enough for a map
    cycle.append(cycle)
    kept = bytes(50_000)  # at the end of the heap
    before = resident()
    del cycle
    give_back_memory()
    assert before - resident() > 50 << 20
    assert kept
