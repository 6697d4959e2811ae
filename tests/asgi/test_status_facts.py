"""Facts beside the feed: histories, a request's own spans, and the model that is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from aioengine import AsyncEngine, EngineState, MediaConfig
from aioengine.asgi import service_app
from aioengine.asgi.model_facts import model_facts
from aioengine.asgi.status_model import MAX_ENDED_REQUESTS, PREFILL, Peaks, StatusBoard
from aioengine.errors import EngineClosedError, MediaError
from aioengine.instruments import STAGES, RequestEvent, StageSpan
from tests.asgi.serving import serving
from tests.parity.listener_families import WORDS, save_listener, tokenizer_for
from tests.support.engines import DEADLINE_S, greedy, running_engine
from tests.support.tiny import tiny_image


def test_peaks_of_seconds() -> None:
    peaks = Peaks(num_seconds=5)
    assert peaks.history(100.0) == [None] * 5
    for time, value in ((96.5, 2), (97.1, 7), (97.2, 1), (99.0, 3), (99.9, 0)):
        peaks.note(time, value)
    assert peaks.history(100.5) == [2, 7, 1, 3, 0], "what nobody notes stays as it is"
    assert peaks.history(101.5) == [7, 1, 3, 0, 0]
    assert peaks.history(1000.0) == [0] * 5
    peaks.note(1001.0, 4)
    assert peaks.history(1002.0)[-3:] == [0, 4, 4]
    for second in range(2000, 2100):
        peaks.note(second, second)
    assert len(peaks._seconds) == 6 and peaks.history(2099.0)[0] == 2095


def event(board: StatusBoard, kind: Any, time: float, name: str = "a", **facts: Any) -> None:
    board.note_event(RequestEvent(kind, name, time, **facts))


def test_a_request_s_own_report() -> None:
    board = StatusBoard("model", begin=0.0)
    board.note_span(StageSpan("step", 9.0, 9.1, ("a",), "of another one of this name"))
    event(board, "submitted", 10.0)
    board.note_span(StageSpan("decode", 10.0, 10.1, ("a", "b"), "24 x 16"))
    event(board, "admitted", 10.2, prompt_tokens=70, media={"image": 1})
    board.note_span(StageSpan("step", 10.3, 10.4, ("b",), "1 tokens"))
    board.note_span(StageSpan("step", 10.4, 10.6, ("a", "b"), "71 tokens"))
    event(board, "token", 10.61, cached_tokens=16)
    board.note_span(StageSpan("step", 10.7, 10.8, ("a", "b"), "2 tokens"))
    event(board, "token", 10.81, cached_tokens=16)
    numbers = [row[0] for row in board.spans(1, 9)["spans"]]  # type: ignore[attr-defined]
    step = STAGES.index("step")
    assert numbers == [STAGES.index("decode"), step, PREFILL, step]
    live = board.find("a")
    assert live is not None and live.ended is None and live.stage == "decode"
    event(board, "finished", 10.82)
    found = board.find("a")
    assert found is live and not found.last_tokens
    assert found.report("a", tuple(board.recorder.spans)) == {
        **{"stage": "finished", "prompt_tokens": 70, "cached_tokens": 16, "media": {"image": 1}},
        **{"tokens": 2, "admitted_ms": 200.0, "first_token_ms": 610.0, "ended_ms": 820.0},
        "spans": [["decode", 0.0, 100.0, "24 x 16"], ["prefill", 400.0, 200.0, "71 tokens"]],
    }


def test_few_of_those_that_have_ended_are_known() -> None:
    board = StatusBoard("model", begin=0.0)
    for number in range(3 * MAX_ENDED_REQUESTS):
        event(board, "submitted", number, f"{number}")
        event(board, "rejected", number, f"{number}")
    assert len(board._ended) == MAX_ENDED_REQUESTS and not board._live
    assert board.find("0") is None
    last = board.find(f"{3 * MAX_ENDED_REQUESTS - 1}")
    assert last is not None and last.report("a", ())["first_token_ms"] is None
    assert board.snapshot(200.0, EngineState.RUNNING, None)["live_by_second"][-1] == 0  # type: ignore[index]


async def test_facts_over_http(engine: AsyncEngine) -> None:
    async with (
        serving(service_app(engine, api_key="secret", max_body_bytes=1 << 20)) as url,
        httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client,
    ):
        for path in ("/try", "/status/model", "/status/requests/a"):
            assert (await client.get(path)).status_code == 401
        client.headers["authorization"] = "Bearer secret"
        facts = (await client.get("/status/model")).json()
        assert facts["model"] == "tiny-llava" and facts["answers"] == "chat"
        assert facts["media"] == {"image": None} and facts["needs_key"] is True
        assert facts["max_body_bytes"] == 1 << 20
        assert facts["max_bytes"] == {"image": MediaConfig().max_image_bytes}
        assert (facts["device"], facts["dtype"]) == ("cpu", "float64")
        assert facts["options"]["max_model_len"] == 512
        assert facts["sampling"] == {"temperature": 0.0}
        output = await engine.generate(
            "<image> what hides the treasure", greedy(4), images=[tiny_image(0)], request_id="a/b"
        )
        with pytest.raises(MediaError):
            await engine.generate("<image>", greedy(4), images=[b"none"], request_id="refused")
        response = await client.get("/status/requests/a%2Fb")
        assert response.status_code == 404, "names are one part of a path"
        await engine.generate("a", greedy(4), request_id="plain")
        report = (await client.get("/status/requests/plain")).json()
        assert report["stage"] == "finished" and report["tokens"] == 4
        assert [row[0] for row in report["spans"]] == ["prefill"]
        refused = (await client.get("/status/requests/refused")).json()
        assert refused["stage"] == "rejected" and refused["first_token_ms"] is None
        missing = await client.get("/status/requests/other")
        assert (
            missing.status_code == 404 and "no such request" in missing.json()["error"]["message"]
        )
        for path in ("/status/model", "/status/requests/plain"):
            assert (await client.get(path)).headers["cache-control"] == "no-store"
        assert output.usage.prompt_tokens > 16


async def test_what_may_be_somebody_s_own_is_not_told(folder: Path, tmp_path: Path) -> None:
    media = MediaConfig(allowed_hosts=("intern.example",), max_image_pixels=1_000_000)
    options: dict[str, Any] = {
        "media": media,
        "mm_processor_cache_dir": tmp_path,
        "limit_mm_per_prompt": {"image": {"count": 2, "width": 64, "height": 64}},
    }
    engine = AsyncEngine.from_pretrained(folder, device="cpu", max_model_len=512, **options)
    with pytest.raises(EngineClosedError):
        model_facts(engine)
    async with engine:
        facts = model_facts(engine)
    assert facts["media"] == {"image": 2}
    assert facts["options"] == {
        "device": "cpu",
        "max_model_len": 512,
        "mm_processor_cache_dir": "set",
        "limit_mm_per_prompt": {"image": {"count": 2, "width": 64, "height": 64}},
        "media.allowed_hosts": "set",
        "media.max_image_pixels": 1_000_000,
    }


async def test_a_model_that_writes_down_speech(tmp_path: Path) -> None:
    save_listener("whisper", tmp_path, tokenizer_for("whisper", (*WORDS, "<|startofprev|>")))
    async with running_engine(tmp_path, max_model_len=None) as engine:
        facts = model_facts(engine)
    assert facts["answers"] == "transcription" and facts["media"] == {"audio": 1}
