"""What the event loop does for one request, one medium or one step, however many are live.

Counted in lines of Python and not in seconds, so that a walk along all requests shows at a
thousand of them, on any machine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine
from aioengine.asgi.status_model import StatusBoard
from aioengine.errors import RequestAbortedError
from aioengine.streams.tokens import TokenStream
from tests.support.engines import Spans, greedy, running_engine, until
from tests.support.lines import CallbackLines, num_lines
from tests.support.tiny import save_tiny_llava, tiny_image

FEW, MANY = 100, 1000
MOST_TOKENS = 30_000
"""So many that none ends while others are taken in."""
SIZES = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_bytes": 256 << 20,
    "max_model_len": 32_768,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("many")
    save_tiny_llava(path, max_position_embeddings=32_768)
    return path


async def submit(engine: AsyncEngine, first: int, end: int) -> list[TokenStream]:
    """Make requests live. Every other one has an image of its own, some of these behind text."""
    streams = []
    for number in range(first, end):
        if number % 2:
            text = "Tell me " * (10 * (number % 4 == 1)) + "<image> is it?"
            image = tiny_image(number, width=8, height=8)
            streams.append(engine.stream(text, greedy(MOST_TOKENS), images=[image]))
        else:
            streams.append(engine.stream([5 + number % 200, 20], greedy(MOST_TOKENS)))
        await asyncio.sleep(0)
    tracker = engine._core.tracker
    assert tracker is not None
    await until(lambda: not tracker.num_preparing, timeout_s=90)
    assert tracker.num_live == end
    return streams


def costs(engine: AsyncEngine, board: StatusBoard) -> dict[str, int]:
    """Lines of each call that is made for one request, one medium, one step or one look."""
    key = next(iter(engine._core.scheduler.media._users))
    tracker, opened, now = engine._core.tracker, [], engine.statistics()
    assert tracker is not None
    calls: dict[str, Callable[[], object]] = {
        "stream": lambda: opened.append(
            engine.stream([5, 20], greedy(MOST_TOKENS), request_id="one")
        ),
        "abort": lambda: tracker.abort("one", "enough"),
        "check_room": lambda: engine.check_room(1),
        "statistics": engine.statistics,
        "schedule_media": engine._core.scheduler.schedule_media,
        "waiters": lambda: engine._core.encoder_jobs._waiters(key),
        "status": lambda: board.snapshot(0.0, engine.state, now),
    }
    return {name: num_lines(call) for name, call in calls.items()}


async def test_calls_cost_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_engine(folder, **SIZES) as engine:
        board, may_step = StatusBoard("model", 0.0), threading.Event()
        engine.instruments.watchers.append(board.note_event)
        runner: Any = engine._core.loaded.runner
        step = runner.step
        monkeypatch.setattr(runner, "step", lambda plan: may_step.wait(30) and step(plan))
        streams = await submit(engine, 0, FEW)
        few = costs(engine, board)
        streams += await submit(engine, FEW, MANY)
        many = costs(engine, board)
        may_step.set()
        for stream in streams:
            stream.close()
    for name, lines in many.items():
        assert 0 < lines <= 1.2 * few[name] + 20, (name, few, many)


async def test_no_callback_of_the_loop_grows(folder: Path) -> None:
    """Submission, intake, steps, media, and the end of all at once."""
    most: list[dict[str, int]] = []
    for count in (FEW, MANY):
        engine = AsyncEngine.from_pretrained(folder, device="cpu", **SIZES)
        async with engine:
            spans = Spans(engine, "encode")
            with CallbackLines() as lines:
                streams = await submit(engine, 0, count)
                await until(lambda spans=spans: len(spans.spans) >= 3)
                await engine.aclose()
            for stream in streams:
                with pytest.raises(RequestAbortedError):
                    await stream.result()
        most.append(lines.most)
    few, many = most
    for kind in ("EngineCore._run", "RequestTracker.admit", "EncoderJobs._encode"):
        assert many[kind] > 0
    for kind, lines_of_few in few.items():  # a turn may have more to do than another has
        assert many[kind] <= 3 * lines_of_few + 500, (kind, few, many)
