"""The status page's figures and its feed: what is shown, to whom, and what is left of it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.routing import Mount

from aioengine import AsyncEngine, EngineState, EngineStatistics
from aioengine.asgi import status
from aioengine.asgi.status import StatusPage
from aioengine.asgi.status_model import Latencies, StatusBoard, TokenRate, printable
from aioengine.instruments import STAGES, RequestEvent, StageSpan
from aioengine.types import StageStatistics
from tests.asgi.serving import serving
from tests.support.engines import DEADLINE_S, greedy, other_tasks, until
from tests.support.tiny import tiny_image

SECRET = "what hides the treasure map"
FIGURES = {
    name: 0 for name, field in EngineStatistics.__dataclass_fields__.items() if field.type == "int"
}


def statistics(**figures: int) -> EngineStatistics:
    """All zero but for `figures`."""
    stages = {"decode": StageStatistics(count=4, total_s=0.2, max_s=0.1)}
    return EngineStatistics(**{**FIGURES, **figures}, model_impl="native", stages=stages)


def snapshot(board: StatusBoard, now: float, **figures: int) -> dict[str, Any]:
    return board.snapshot(now, EngineState.RUNNING, statistics(**figures))


def live(board: StatusBoard, name: str, *moments: str, at: float = 100.0) -> None:
    """A request's moments, all at the same time."""
    for moment in moments:
        board.note_event(RequestEvent(moment, name, at))


# ---- the board, without a server


def test_tokens_per_second_over_the_last_seconds_and_the_last_minute() -> None:
    rate = TokenRate()
    for second, tokens in ((40, 600), (97, 5), (98, 10), (99, 20), (100, 4)):
        for number in range(tokens):
            rate.add(second + number / tokens)
    assert rate.per_second(100.5) == pytest.approx((10 + 20 + 4) / 2.5)
    history = rate.history(100.5)
    assert len(history) == 60
    assert history[0] == 600 and history[-3:] == [5, 10, 20]
    assert rate.history(101.5)[0] == 0, "a minute is a minute"
    assert rate.per_second(1000.0) == 0


def test_percentiles_are_of_late_and_bounded() -> None:
    latencies = Latencies(max_age_s=10, max_count=100)
    assert latencies.percentiles(0.0) is None
    latencies.add(0.0, 50.0)
    for number in range(1, 101):
        latencies.add(100.0, number / 1000)
    assert latencies.percentiles(101.0) == {"p50": 50.0, "p99": 99.0, "max": 100.0}
    latencies.add(109.0, 0.5)
    assert latencies.percentiles(109.0) == {"p50": 51.0, "p99": 100.0, "max": 500.0}
    assert latencies.percentiles(112.0) == {"p50": 500.0, "p99": 500.0, "max": 500.0}
    assert latencies.percentiles(1000.0) is None


def test_requests_by_stage() -> None:
    board = StatusBoard("model", begin=90.0)
    live(board, "in intake", "submitted")
    live(board, "waits", "submitted", "admitted")
    live(board, "computes", "submitted", "admitted", at=101.0)
    live(board, "generates", "submitted", "admitted", "token", "token")
    for end in ("finished", "aborted", "rejected", "failed"):
        live(board, end, "submitted", "admitted", end)
    shown = snapshot(board, 110.0, waiting=2)  # the one in intake counts as waiting
    assert shown["stages"] == {"intake": 1, "waiting": 1, "prefill": 1, "decode": 1}
    assert [request["id"] for request in shown["oldest"]] == [
        *("in intake", "waits", "computes", "generates"),
    ]
    nothing: dict[str, Any] = {"prompt_tokens": 0, "cached_tokens": 0, "media": {}, "tokens": 0}
    assert shown["oldest"][2] == {"id": "computes", "stage": "prefill", "age_s": 9.0, **nothing}
    assert shown["oldest"][3]["tokens"] == 2
    assert shown["uptime_s"] == 20.0
    ended = snapshot(board, 110.0, rejected=3, failed=1)["requests"]
    assert (ended["rejected"], ended["failed"]) == (3, 1), "told apart by who is to blame"
    # A preempted request waits again, though it has tokens.
    assert snapshot(board, 110.0, waiting=9)["stages"]["waiting"] == 2


def test_latencies_of_tokens_are_a_completion_s_own() -> None:
    board = StatusBoard("model", begin=0.0)
    board.note_event(RequestEvent("submitted", "a", 10.0))
    for time, index in ((10.5, 0), (10.6, 1), (11.0, 0), (11.1, 1)):
        board.note_event(RequestEvent("token", "a", time, index=index))
    shown = snapshot(board, 12.0)
    assert shown["first_token_ms"] == {"p50": 500.0, "p99": 500.0, "max": 500.0}
    assert shown["inter_token_ms"] == {"p50": 500.0, "p99": 500.0, "max": 500.0}
    assert shown["loop_lag_ms"] is None
    board.note_loop_lag(12.0, 0.004)
    assert snapshot(board, 12.0)["loop_lag_ms"]["max"] == 4.0
    assert snapshot(board, 23.0)["loop_lag_ms"] is None


def test_caches_and_work() -> None:
    shown = snapshot(
        StatusBoard("model", begin=0.0),
        1.0,
        kv_blocks_total=100,
        kv_blocks_free=60,
        kv_blocks_cached=30,
        prefix_query_tokens=400,
        prefix_hit_tokens=100,
        encoder_cache_capacity_bytes=1000,
        encoder_cache_used_bytes=700,
        encoder_cache_hits=1,
        encoder_cache_misses=2,
        encoder_cache_evictions=5,
    )
    assert shown["caches"]["kv"] == {"capacity": 100, "used": 40, "cached": 30, "hit_rate": 0.25}
    assert shown["caches"]["encoder"] == {
        **{"capacity": 1000, "used": 700, "entries": 0, "evictions": 5},
        **{"hit_rate": pytest.approx(1 / 3, abs=1e-4)},
    }
    assert shown["caches"]["processor"]["hit_rate"] is None, "nothing was looked up"
    assert shown["work"][STAGES.index("decode")] == {"count": 4, "mean_ms": 50.0}
    assert shown["work"][STAGES.index("fetch")] == {"count": 0, "mean_ms": 0.0}


def test_spans_are_numbered_and_bounded() -> None:
    board = StatusBoard("model", begin=1.0, max_spans=10)
    for number in range(25):
        board.note_span(StageSpan("encode", 2.0 + number, 2.5 + number, ("a", "b"), "9 rows"))
    assert board.num_spans == 25 and len(board.recorder.spans) == 10
    assert board.spans(20, 22) == {
        "first": 20,
        "spans": [[3, 21000.0, 500.0, 2, "9 rows"], [3, 22000.0, 500.0, 2, "9 rows"]],
    }
    assert board.spans(0, 16)["first"] == 15, "the older ones are gone"
    assert len(board.spans(0, 99)["spans"]) == 10
    assert board.spans(25, 25)["spans"] == board.spans(3, 5)["spans"] == []
    board.note_span(StageSpan("own stage", 2.0, 2.5))
    assert board.spans(25, 26)["spans"][0][0] == -1


def test_nothing_grows_with_what_has_been() -> None:
    board = StatusBoard("model", begin=0.0)
    for number in range(5000):
        now = 10.0 + number
        live(board, f"{number}", "submitted", "admitted", "token", "token", "finished", at=now)
        live(board, f"{number}", "token", at=now)  # a watcher before us has ended it meanwhile
        live(board, "of another time", "admitted", "token", "failed", at=now)
        board.note_loop_lag(now, 0.001)
    assert not board._live
    shown = snapshot(board, 5010.0)
    assert shown["oldest"] == [] and set(shown["stages"].values()) == {0}
    held = [board._first_token, board._inter_token, board._loop_lag]
    assert all(len(latencies._found) <= 1024 for latencies in held)
    assert len(board._rate._counts) == 60
    for number in range(100):
        live(board, f"{number}", "submitted")
    assert len(snapshot(board, 5010.0)["oldest"]) == 6


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("</script><img src=x onerror=alert(1)>", "</script><img src=x onerror=alert(1)>"),
        ("line\n\ndata: {}\r\n", "line\ufffd\ufffddata: {}\ufffd\ufffd"),
        ("\u202egnp.exe\u0000", "\ufffdgnp.exe\ufffd"),
        ("\ud800", "\ufffd"),
        ("x" * 100_000, "x" * 64 + "…"),
        ("Zürich 東京", "Zürich 東京"),
    ],
)
def test_names_that_callers_chose(name: str, shown: str) -> None:
    assert printable(name) == shown
    board = StatusBoard(name, begin=0.0)
    live(board, name, "submitted")
    found = snapshot(board, 100.0)
    assert found["oldest"][0]["id"] == found["model"] == shown
    event = status._event(found, 7, 200)
    assert event.count(b"\n") == 4 and event.endswith(b"\n\n")
    assert json.loads(event.split(b"data: ", 1)[1]) == found


# ---- the feed, over a socket


@asynccontextmanager
async def served(engine: AsyncEngine, prefix: str = "") -> AsyncIterator[tuple[StatusPage, str]]:
    """A server of nothing but the page."""
    page = StatusPage(engine)
    app = Starlette(routes=[Mount(prefix, routes=page.routes())])
    async with serving(app) as url:
        yield page, url + prefix


async def events(
    client: httpx.AsyncClient, url: str, seen: str = ""
) -> AsyncIterator[dict[str, Any]]:
    """What one response of the feed says, until it ends."""
    headers = {"last-event-id": seen} if seen else {}
    async with client.stream("GET", f"{url}/status/events", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient() as client:
        yield client


def ticking() -> list[asyncio.Task[Any]]:
    return [task for task in other_tasks() if task.get_name() == "aioengine-status"]


async def test_page_is_self_contained_and_guarded(folder: Path, client: httpx.AsyncClient) -> None:
    async with served(AsyncEngine.from_pretrained(folder)) as (_, url):
        page = await client.get(f"{url}/")
        head = await client.head(f"{url}/status/events")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    policy = dict(
        part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[rule] == f"'sha256-{digest}'"
    assert re.findall(r"https?://[^'\" ]+", page.text) == ["http://www.w3.org/2000/svg"]
    for door in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert door not in page.text
    assert head.status_code == 200 and not ticking()


async def test_feed_follows_the_engine(engine: AsyncEngine, client: httpx.AsyncClient) -> None:
    async with served(engine, "/below/it") as (page, url):
        async with aclosing(events(client, url)) as feed:
            first = await anext(feed)
            assert first["status"]["state"] == "running"
            assert first["status"]["model"] == "tiny-llava"
            assert first["status"]["requests"]["finished"] == 0 and first["spans"] == []
            await engine.generate(f"<image> {SECRET}", greedy(8), images=[tiny_image(0)])
            found: list[Any] = []
            async for event in feed:
                assert event["first"] == len(found), "no span is missing, none comes twice"
                found += event["spans"]
                assert SECRET not in json.dumps(event)
                if len(found) == page._board.num_spans:
                    break
        last = event["status"]
        kinds = {[*STAGES, "prefill"][stage] for stage, *_ in found}
        assert kinds >= {"decode", "process", "encode", "prefill", "step"}
        assert event["now_ms"] > first["now_ms"]
        assert all(start + length <= event["now_ms"] for _, start, length, *_ in found)
        assert last["requests"]["finished"] == 1 and last["tokens_per_s"] > 0
        assert last["first_token_ms"]["max"] > 0 and last["inter_token_ms"]["max"] > 0
        assert last["work"][STAGES.index("encode")]["count"] == 1
        assert last["caches"]["encoder"]["entries"] == 1
        trace = await client.get(f"{url}/status/trace")
    assert "attachment" in trace.headers["content-disposition"]
    spans = [event for event in trace.json()["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(found) and SECRET not in trace.text


async def test_viewers_share_their_ticks_and_leave_nothing(
    engine: AsyncEngine, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    shaped: list[float] = []
    shape = StatusBoard.snapshot

    def counted(board: StatusBoard, now: float, *facts: Any) -> dict[str, object]:
        shaped.append(now)
        return shape(board, now, *facts)

    monkeypatch.setattr(StatusBoard, "snapshot", counted)
    async with served(engine) as (page, url):
        await engine.generate("nobody looks", greedy(4))
        assert not shaped and not ticking()
        heard = await asyncio.gather(*(first_ticks(client, url, 3) for _ in range(4)))
        assert {tick for ticks in heard for tick in ticks} <= {page._board.clock(t) for t in shaped}
        assert set.intersection(*map(set, heard)), "four viewers, one shaping"
        await until(lambda: page._feed._num_viewers == 0)
        await until(lambda: not ticking())
        assert await first_ticks(client, url, 1), "who comes later starts it again"


async def first_ticks(client: httpx.AsyncClient, url: str, count: int) -> list[float]:
    """When the first ticks of a viewer were made."""
    async with aclosing(events(client, url)) as feed:
        found: list[float] = []
        while len(found) < count:
            event = await anext(feed)
            found += [event["now_ms"]] if "status" in event else []
    return found


async def test_who_comes_back_gets_what_was_missed(
    engine: AsyncEngine, client: httpx.AsyncClient
) -> None:
    async with served(engine) as (page, url):
        await engine.generate("a", greedy(6))
        count = page._board.num_spans
        for seen, first in (("", 0), ("2", 2), ("x; 3", 0), ("-1", 0), ("9" * 400, 0)):
            async with aclosing(events(client, url, seen)) as feed:
                backlog = await anext(feed)
                assert backlog["first"] == first and len(backlog["spans"]) == count - first
                assert (await anext(feed))["first"] == count
        async with aclosing(events(client, url, "999999")) as feed:  # of a server before this one
            assert (await anext(feed))["status"]["state"] == "running"


async def test_long_backlogs_come_in_pieces(folder: Path) -> None:
    page = StatusPage(AsyncEngine.from_pretrained(folder))
    for number in range(5000):
        page._board.note_span(StageSpan("step", number, number + 0.5))
    with page._feed.viewer():
        async with aclosing(page._feed.events(0)) as feed:
            pieces = [json.loads((await anext(feed)).split(b"data: ", 1)[1]) for _ in range(6)]
    assert [len(piece["spans"]) for piece in pieces] == [400] * 5 + [0]
    assert [piece["first"] for piece in pieces] == [3000, 3400, 3800, 4200, 4600, 5000]


async def test_a_slow_viewer_skips_ticks_but_no_spans(folder: Path) -> None:
    page = StatusPage(AsyncEngine.from_pretrained(folder))
    with page._feed.viewer():
        async with asyncio.timeout(DEADLINE_S), aclosing(page._feed.events(0)) as feed:
            await anext(feed)
            for number in range(3):
                page._board.note_span(StageSpan("step", number, number + 0.5))
                page._feed._publish()
            pieces: list[list[Any]] = []
            while sum(map(len, pieces)) < 3:
                pieces.append(json.loads((await anext(feed)).split(b"data: ", 1)[1])["spans"])
    assert len(pieces) == 1


async def test_a_flood_of_spans_is_cut_to_pieces(folder: Path) -> None:
    page = StatusPage(AsyncEngine.from_pretrained(folder))
    with page._feed.viewer():
        async with asyncio.timeout(DEADLINE_S), aclosing(page._feed.events(0)) as feed:
            await anext(feed)
            for number in range(1000):
                page._board.note_span(StageSpan("step", number, number + 0.5))
            found = [json.loads((await anext(feed)).split(b"data: ", 1)[1]) for _ in range(3)]
    assert [(piece["first"], len(piece["spans"])) for piece in found] == [
        *((0, 400), (400, 200), (600, 400)),
    ]


async def test_states_before_and_after_running(folder: Path, client: httpx.AsyncClient) -> None:
    engine = AsyncEngine.from_pretrained(folder, device="cpu")
    async with served(engine) as (_, url):
        async with aclosing(events(client, url)) as feed:
            new = (await anext(feed))["status"]
            assert new["state"] == "new"
            assert new["requests"] is new["caches"] is new["work"] is None
            async with engine:
                await until_state(feed, "running")
                await engine.drain()
                await until_state(feed, "draining")
                assert [event async for event in feed] == [], "who drains may want to stop"
        shown = [event["status"] async for event in events(client, url)]
        assert [status["state"] for status in shown] == ["closed"]
        assert shown[0]["requests"]["running"] == 0, "the last figures stay"


async def until_state(feed: AsyncIterator[dict[str, Any]], state: str) -> None:
    async for event in feed:
        if event.get("status", {}).get("state") == state:
            return
    raise AssertionError(f"the feed ended before {state}")


async def test_a_dead_engine_says_so(folder: Path, client: httpx.AsyncClient) -> None:
    engine = AsyncEngine.from_pretrained(folder, device="cpu")
    async with engine, served(engine) as (_, url):
        engine._core.die(RuntimeError("the device is gone"))
        shown = [event["status"] async for event in events(client, url)]
    assert [status["state"] for status in shown] == ["dead"]


async def test_a_server_stops_while_somebody_looks(
    engine: AsyncEngine, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "MAX_RESPONSE_S", 0.5)
    async with served(engine) as (_, url):
        feed = events(client, url)
        await anext(feed)
    assert engine.state is EngineState.RUNNING
    rest = [event["status"]["state"] async for event in feed]  # it ended well, not in the middle
    assert set(rest) <= {"running"}
    await until(lambda: not ticking())


async def test_servers_that_raise_when_the_client_has_left(folder: Path) -> None:
    """As ASGI has it from version 2.4 on, where nobody listens for the disconnection."""
    page = StatusPage(AsyncEngine.from_pretrained(folder))
    sent: list[str] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message["type"])
        if len(sent) == 3:
            raise OSError("gone")

    async def receive() -> dict[str, Any]:
        raise AssertionError("nothing to receive")

    scope = {
        **{"type": "http", "method": "GET", "path": "/status/events", "root_path": ""},
        **{"headers": [], "query_string": b"", "asgi": {"version": "3.0", "spec_version": "2.4"}},
    }
    with pytest.raises(ClientDisconnect):
        async with asyncio.timeout(DEADLINE_S):
            await Starlette(routes=page.routes())(scope, receive, send)
    assert sent == ["http.response.start", "http.response.body", "http.response.body"]
    assert page._feed._num_viewers == 0
    await until(lambda: not ticking())
