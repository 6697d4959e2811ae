"""Draining, resuming, closing with time to finish; and the watchers of a request's life."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aioengine import AsyncEngine, EngineState, errors
from aioengine.instruments import RequestEvent
from tests.support.engines import DEADLINE_S, Spans, greedy, running_engine, settled, until
from tests.support.tiny import save_tiny_llava, tiny_image

PROMPT = "<image> what is this"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_llava")
    save_tiny_llava(path)
    return path


@pytest.fixture
async def engine(folder: Path) -> AsyncEngine:
    engine = AsyncEngine.from_pretrained(folder, device="cpu", max_model_len=512)
    assert engine.state is EngineState.NEW
    return engine


async def test_drain_finishes_what_runs_and_refuses_what_is_new(folder: Path) -> None:
    async with running_engine(folder) as engine:
        alone = await engine.generate(PROMPT, greedy(24), images=[tiny_image(0)])
        running = asyncio.create_task(
            engine.generate(PROMPT, greedy(24), images=[tiny_image(0)], request_id="first")
        )
        await Spans(engine).wait_for("first")
        draining = asyncio.create_task(engine.drain())
        await until(lambda: engine.state is EngineState.DRAINING)
        with pytest.raises(errors.EngineClosedError, match="draining"):
            await engine.generate("new")
        assert not draining.done()
        async with asyncio.timeout(DEADLINE_S):
            await draining
        assert running.done() and (await running).token_ids == alone.token_ids
        engine.resume()
        assert engine.state is EngineState.RUNNING
        again = await engine.generate(PROMPT, greedy(24), images=[tiny_image(0)])
        assert again.token_ids == alone.token_ids
        await engine.drain()  # with nothing live, at once


async def test_aclose_gives_requests_their_time(engine: AsyncEngine) -> None:
    async with engine:
        short = asyncio.create_task(engine.generate("a", greedy(6), request_id="short"))
        await Spans(engine).wait_for("short")
        async with asyncio.timeout(DEADLINE_S):
            await engine.aclose(timeout=None)
        assert engine.state is EngineState.CLOSED
        assert len((await short).token_ids) == 6


async def test_what_is_not_done_in_time_is_ended(engine: AsyncEngine) -> None:
    async with engine:
        long = asyncio.create_task(engine.generate("a", greedy(400), request_id="long"))
        await Spans(engine).wait_for("long")
        await engine.aclose(timeout=0.01)
        with pytest.raises(errors.RequestAbortedError):
            await long


async def test_cancelling_a_patient_close_closes_at_once(engine: AsyncEngine) -> None:
    async with engine:
        long = asyncio.create_task(engine.generate("a", greedy(400), request_id="long"))
        await Spans(engine).wait_for("long")
        closing = asyncio.create_task(engine.aclose(timeout=None))
        await until(lambda: engine.state is EngineState.DRAINING)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert engine.state is EngineState.CLOSED
        with pytest.raises(errors.RequestAbortedError):
            await long


async def test_states_of_an_engine_that_fails(tmp_path: Path) -> None:
    engine = AsyncEngine.from_pretrained(tmp_path)
    with pytest.raises(errors.ModelLoadError):
        await engine.start()
    assert engine.state is EngineState.CLOSED
    with pytest.raises(errors.EngineClosedError):
        await engine.drain()


async def test_watchers_see_a_life(folder: Path) -> None:
    seen: list[RequestEvent] = []
    async with running_engine(folder) as engine:
        engine.instruments.watchers.append(seen.append)
        output = await engine.generate(
            PROMPT, greedy(5, n=2), images=[tiny_image(0)], request_id="r"
        )
        with pytest.raises(errors.MediaError):
            await engine.generate(PROMPT, images=[b"no image"], request_id="bad")
        async with engine.stream("a", greedy(50), request_id="gone"):
            pass
        await settled(engine)
    kinds = [event.kind for event in seen if event.request_id == "r"]
    assert kinds == ["submitted", "admitted", *["token"] * 10, "finished"]
    assert sorted(event.index for event in seen if event.kind == "token")[:10] == [0] * 5 + [1] * 5
    assert seen[kinds.index("finished")].output is output
    assert [event.kind for event in seen if event.request_id == "bad"] == ["submitted", "rejected"]
    last = [event for event in seen if event.request_id == "gone"][-1]
    assert last.kind == "aborted" and isinstance(last.error, errors.RequestAbortedError)
    assert [event.time for event in seen] == sorted(event.time for event in seen)


@pytest.mark.parametrize("kind", ["submitted", "admitted", "token", "finished"])
async def test_a_watcher_may_end_the_request_and_may_fail(folder: Path, kind: str) -> None:
    async with running_engine(folder) as engine:

        def meddle(event: RequestEvent) -> None:
            if event.kind == kind:
                engine._core.tracker.abort(event.request_id, "by a watcher")  # type: ignore[union-attr]
                raise RuntimeError

        engine.instruments.watchers.append(meddle)
        if kind == "finished":
            await engine.generate("a", greedy(4))
        else:
            with pytest.raises(errors.RequestAbortedError, match="by a watcher"):
                await engine.generate("a", greedy(4))
        assert not engine.instruments.watchers
        await settled(engine)
        assert len((await engine.generate("a", greedy(4))).token_ids) == 4


async def test_later_watchers_hear_in_order_what_an_earlier_one_does(folder: Path) -> None:
    seen: list[str] = []
    async with running_engine(folder) as engine:

        def end(event: RequestEvent) -> None:
            if event.kind == "submitted":
                engine._core.tracker.abort(event.request_id, "by a watcher")  # type: ignore[union-attr]

        engine.instruments.watchers += [end, lambda event: seen.append(event.kind)]
        with pytest.raises(errors.RequestAbortedError):
            await engine.generate("a", greedy(4))
    assert seen == ["submitted", "aborted"]


async def test_a_dead_engine_is_closed_like_any_other(folder: Path) -> None:
    engine = AsyncEngine.from_pretrained(folder, device="cpu", max_model_len=512)
    await engine.start()
    long = asyncio.create_task(engine.generate("a", greedy(400), request_id="long"))
    await Spans(engine).wait_for("long")
    draining = asyncio.create_task(engine.drain())
    await asyncio.sleep(0)
    engine._core.die(RuntimeError("a broken device"))
    with pytest.raises(errors.EngineDeadError):
        await draining
    with pytest.raises(errors.EngineDeadError):
        await long
    assert engine.state is EngineState.DEAD
    await engine.aclose(5)
    assert engine.state is EngineState.DEAD


async def test_what_closes_is_not_resumed(engine: AsyncEngine) -> None:
    async with engine:
        long = asyncio.create_task(engine.generate("a", greedy(60), request_id="long"))
        await Spans(engine).wait_for("long")
        closing = asyncio.create_task(engine.aclose(None))
        await until(lambda: engine.state is EngineState.DRAINING)
        with pytest.raises(errors.EngineClosedError, match="being closed"):
            engine.resume()
        await closing
        assert len((await long).token_ids) == 60


async def test_a_watcher_that_is_cancelled_is_removed(folder: Path) -> None:
    async with running_engine(folder) as engine:

        def watch(event: RequestEvent) -> None:
            raise asyncio.CancelledError

        engine.instruments.watchers.append(watch)
        assert len((await engine.generate("a", greedy(4))).token_ids) == 4
        assert not engine.instruments.watchers


async def test_room_is_for_all_completions(folder: Path) -> None:
    async with running_engine(folder, max_num_seqs=2, max_queued_requests=2) as engine:
        with pytest.raises(errors.InvalidRequestError, match="at most 4"):
            await engine.generate("a", greedy(4, n=5))
        engine.check_room(4)
        async with engine.stream("a", greedy(60)):
            with pytest.raises(errors.OverloadedError):
                await engine.generate("a", greedy(4, n=4))
            engine.check_room(3)
            assert len((await engine.generate("a", greedy(4, n=3))).outputs) == 3
