"""Any number of prompts through `AsyncEngine.map`: order, bounds, errors, and who may stop it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioengine import AsyncEngine, Engine, Prompt, RequestOutput, SamplingParams
from aioengine.engine.bulk import HELD, Window
from aioengine.errors import (
    EngineClosedError,
    InvalidRequestError,
    PlaceholderMismatchError,
    RequestAbortedError,
)
from tests.support.engines import greedy, running_engine, settled, until
from tests.support.tiny import save_tiny_llava, tiny_image

PROMPTS = [f"tell me of number {index}" for index in range(24)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_llava")
    save_tiny_llava(path)
    return path


async def alone(engine: AsyncEngine, params: SamplingParams) -> list[tuple[int, ...]]:
    return [(await engine.generate(prompt, params)).token_ids for prompt in PROMPTS]


def lengths() -> list[SamplingParams]:
    """Later ones are shorter, so that the order of completion is another."""
    return [greedy(2 + 3 * (index % 7 == 0)) for index in range(len(PROMPTS))]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    max_live=st.integers(1, 5),
    is_ordered=st.booleans(),
    choices=st.lists(st.integers(0, 999), max_size=60),
)
def test_a_window_bounds_what_lives_and_what_is_held(
    max_live: int, is_ordered: bool, choices: list[int]
) -> None:
    window: Window[str] = Window(max_live, is_ordered=is_ordered)
    live: list[int] = []
    taken: list[int] = []
    for choice in choices:
        if window.has_room and choice % 3:
            live.append(window.draw())
        elif live:
            index = live.pop(choice % len(live))
            window.finish(index, f"result {index}")
        if choice % 5:
            for index, result in window.take():
                assert result == f"result {index}"
                taken.append(index)
        assert len(live) == window.num_live <= max_live
        assert window.num_held <= max_live * HELD
        is_full = len(live) == max_live or window.num_held == max_live * HELD
        assert window.has_room is not is_full
    while live:
        window.finish(live[0], f"result {live.pop(0)}")
    taken += [index for index, _ in window.take()]
    assert sorted(taken) == list(range(window._num_drawn))
    assert not is_ordered or taken == sorted(taken)
    assert window.has_room


@pytest.mark.parametrize("max_in_flight", [None, 1, 3])
async def test_outputs_come_in_the_order_of_the_prompts(
    folder: Path, max_in_flight: int | None
) -> None:
    async with running_engine(folder) as engine:
        expected = [
            (await engine.generate(prompt, params)).token_ids
            for prompt, params in zip(PROMPTS, lengths(), strict=True)
        ]
        outputs = engine.map(PROMPTS, lengths(), max_in_flight=max_in_flight)
        assert [output.token_ids async for output in outputs] == expected
        seen = {}
        async for index, output in engine.map(PROMPTS, lengths(), ordered=False):
            assert isinstance(output, RequestOutput)
            seen[index] = output.token_ids
        assert [seen[index] for index in range(len(PROMPTS))] == expected
        assert list(seen) != sorted(seen)


async def test_media_go_with_each_prompt(folder: Path) -> None:
    async with running_engine(folder) as engine:
        images = [tiny_image(seed) for seed in range(5)]
        expected = [
            (await engine.generate("<image> what", greedy(), images=[image])).token_ids
            for image in images
        ]
        prompts = (Prompt(text="<image> what", media={"image": [image]}) for image in images)
        outputs = [output.token_ids async for output in engine.map(prompts, greedy())]
        assert outputs == expected and len(set(outputs)) == len(outputs)


async def test_prompts_are_drawn_as_there_is_room(folder: Path) -> None:
    drawn = taken = most = 0

    def source() -> Iterator[str]:
        nonlocal drawn, most
        for index in range(200):
            drawn += 1
            most = max(most, drawn - taken)
            yield f"number {index}"

    async with running_engine(folder) as engine:
        async for _ in engine.map(source(), greedy(1), max_in_flight=4):
            taken += 1
            if taken == 10:  # a reader who rests: what waits for it is bounded
                await until(lambda: drawn >= 10 + 4 * HELD - 1)
                await settled(engine)
        assert taken == drawn == 200
        assert most <= 4 * HELD + 1


async def test_prompts_may_come_from_an_asynchronous_source(folder: Path) -> None:
    """An output does not wait for the next prompt."""
    first_is_out = asyncio.Event()

    async def source() -> AsyncIterator[str]:
        yield PROMPTS[0]
        await first_is_out.wait()
        yield PROMPTS[1]

    async with running_engine(folder) as engine:
        expected = await alone(engine, greedy())
        outputs = []
        async for output in engine.map(source(), iter([greedy(), greedy()])):
            outputs.append(output.token_ids)
            first_is_out.set()
        assert outputs == expected[:2]


async def test_the_first_error_ends_it(folder: Path) -> None:
    bad = [*PROMPTS[:3], "<image> without one", *PROMPTS[3:]]
    async with running_engine(folder) as engine:
        outputs = []
        with pytest.raises(PlaceholderMismatchError):
            async for output in engine.map(bad, greedy()):
                outputs.append(output)  # noqa: PERF401 - what came before the error is kept
        assert len(outputs) == 3
        await settled(engine)


async def test_errors_may_stand_in_the_place_of_outputs(folder: Path) -> None:
    bad: list[Any] = [*PROMPTS[:3], "<image> without one", [1, "two"], *PROMPTS[3:5]]
    async with running_engine(folder) as engine:
        expected = await alone(engine, greedy())
        outcomes = [
            each if isinstance(each, InvalidRequestError) else each.token_ids  # type: ignore[union-attr]
            async for each in engine.map(bad, greedy(), return_exceptions=True)
        ]
        mismatch, wrong = outcomes[3:5]
        assert isinstance(mismatch, PlaceholderMismatchError)
        assert isinstance(wrong, InvalidRequestError) and wrong.parameter == "prompt"
        assert outcomes[:3] + outcomes[5:] == expected[:5]


async def test_what_ends_the_engine_ends_it_in_any_case(folder: Path) -> None:
    async with AsyncEngine.from_pretrained(folder, device="cpu") as engine:
        outcomes = engine.map(PROMPTS, greedy(64), return_exceptions=True, max_in_flight=2)
        closing = None
        with pytest.raises(EngineClosedError):
            async for outcome in outcomes:
                closing = closing or asyncio.create_task(engine.aclose())
                assert isinstance(outcome, RequestOutput | RequestAbortedError)
        assert closing is not None
        await closing


async def test_an_error_of_the_source_comes_out(folder: Path) -> None:
    def source() -> Iterator[str]:
        yield PROMPTS[0]
        raise OSError("the disk is gone")

    outputs = []
    async with running_engine(folder) as engine:
        with pytest.raises(OSError, match="the disk is gone"):
            async for output in engine.map(source(), greedy(64)):
                outputs.append(output)  # noqa: PERF401
    assert len(outputs) == 1


async def test_too_few_parameters(folder: Path) -> None:
    async with running_engine(folder) as engine:
        with pytest.raises(InvalidRequestError, match="params has 3 entries"):
            async for _ in engine.map(PROMPTS, [greedy()] * 3):
                pass
    for wrong in (0, -1, "many"):
        with pytest.raises(InvalidRequestError) as caught:
            engine.map(PROMPTS, max_in_flight=wrong)  # type: ignore[call-overload]
        assert caught.value.parameter == "max_in_flight"


async def test_closing_it_early_ends_its_requests_and_no_others(folder: Path) -> None:
    async with running_engine(folder) as engine:
        other = asyncio.create_task(engine.generate("another", greedy(40)))
        async with aclosing(engine.map(PROMPTS, greedy(200))) as outputs:  # type: ignore[type-var]
            async for _ in outputs:
                break
        assert engine.statistics().running + engine.statistics().waiting <= 1
        assert len((await other).token_ids) == 40


async def test_it_waits_for_room_beside_others(folder: Path) -> None:
    """An engine that is full with others' requests is no error of this one's."""
    async with running_engine(folder, max_num_seqs=2, max_queued_requests=1) as engine:
        others = [asyncio.create_task(engine.generate("x", greedy(60))) for _ in range(3)]
        await asyncio.sleep(0)
        prompts = [
            Prompt(text="<image> a", media={"image": iter([tiny_image(seed)])}) for seed in range(5)
        ]
        outputs = [output async for output in engine.map(prompts, greedy(2))]
        assert [output.usage.encoder_items for output in outputs] == [1] * 5
        await asyncio.gather(*others)


async def test_any_prompt_from_an_asynchronous_source(folder: Path) -> None:
    async def source() -> AsyncIterator[Any]:
        for prompt in (np.array([5, 6, 7]), None, "text"):
            yield prompt

    async with running_engine(folder) as engine:
        outcomes = [each async for each in engine.map(source(), greedy(), return_exceptions=True)]
        expected = await engine.generate([5, 6, 7], greedy())
        first, second, third = outcomes
        assert isinstance(first, RequestOutput) and first.token_ids == expected.token_ids
        assert isinstance(second, InvalidRequestError) and isinstance(third, RequestOutput)


@pytest.mark.parametrize("wrong", ["text", {"prompt": "text"}, Prompt(text="a"), None, 5])
def test_one_prompt_is_not_many(folder: Path, wrong: Any) -> None:
    for kind in (AsyncEngine, Engine):
        with pytest.raises(InvalidRequestError, match=r"generate\(\) takes one") as caught:
            kind.from_pretrained(folder).map(wrong)
        assert caught.value.parameter == "prompts"
        with pytest.raises(InvalidRequestError, match="params must be"):
            kind.from_pretrained(folder).map(["a"], 5)
