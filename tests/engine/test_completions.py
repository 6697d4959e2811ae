"""Several completions of one prompt: what they share, and that each ends by itself."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, FinishReason, Prompt, SamplingParams
from aioengine.core.plan import StepPlan, StepResult
from aioengine.errors import InvalidRequestError, OverloadedError, RequestAbortedError
from aioengine.instruments import StageSpan
from tests.support.engines import running_engine
from tests.support.tiny import save_tiny_llava, tiny_image

TEXT = "USER: <image>\nTell me all about it, and then some more of it. ASSISTANT:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completions")
    save_tiny_llava(path)
    return path


def params(n: int, **options: object) -> SamplingParams:
    settings = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True, **options}
    return SamplingParams(n=n, **settings)  # type: ignore[arg-type]


async def tokens(engine: AsyncEngine, wanted: SamplingParams) -> list[tuple[int, ...]]:
    output = await engine.generate(TEXT, wanted, images=[tiny_image(1)])
    assert [completion.index for completion in output.outputs] == list(range(wanted.n))
    return [completion.token_ids for completion in output.outputs]


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}, {"max_num_seqs": 2}])
async def test_each_is_what_it_would_be_alone(folder: Path, options: dict[str, object]) -> None:
    async with running_engine(folder, **options) as engine:
        many = await tokens(engine, params(5))
        alone = [(await tokens(engine, params(1, seed=5 + index)))[0] for index in range(5)]
    assert many == alone
    assert len(set(many)) == 5


@pytest.mark.parametrize("caching", [True, False])
async def test_media_and_prompt_are_computed_once(folder: Path, caching: bool) -> None:
    async with running_engine(folder, block_size=4, enable_prefix_caching=caching) as engine:
        output = await engine.generate(TEXT, params(6), images=[tiny_image(2)])
        statistics = engine.statistics()
    length = len(output.prompt_token_ids)
    assert statistics.encoder_items_run == 1
    assert statistics.finished == 1
    assert statistics.prefix_hit_tokens == 5 * min(length // 4 * 4, length - 1)
    assert output.usage.completion_tokens == 6 * 12
    assert output.usage.prompt_tokens == length
    assert output.usage.cached_tokens == 0


class Load:
    """The most KV blocks in use at once, and the tokens computed, over an engine's steps."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.num_blocks = self.num_tokens = 0
        self._engine = engine
        engine.instruments.listeners.append(self._hear)

    def _hear(self, span: StageSpan) -> None:
        if span.stage == "step":
            now = self._engine.statistics()
            self.num_blocks = max(self.num_blocks, now.kv_blocks_total - now.kv_blocks_free)
            self.num_tokens += int(span.detail.split()[0])


@pytest.mark.parametrize("caching", [True, False])
async def test_the_blocks_of_a_prompt_are_shared(folder: Path, caching: bool) -> None:
    """31 full blocks once, and for each completion one that the prompt's last tokens begin."""
    prompt = Prompt(token_ids=[5 + i % 300 for i in range(500)])
    async with running_engine(folder, enable_prefix_caching=caching) as engine:
        load = Load(engine)
        many = await engine.generate(prompt, params(8))
        assert load.num_blocks == 31 + 8
        assert load.num_tokens == 500 + 7 * (500 - 31 * 16) + 8 * (12 - 1)
        statistics = engine.statistics()
        assert statistics.prefix_query_tokens == 8 * 500
        assert statistics.prefix_hit_tokens == 7 * 31 * 16
        assert many.usage.cached_tokens == 0
        assert (statistics.kv_blocks_cached == 0) == (not caching)
        alone = [await engine.generate(prompt, params(1, seed=5 + index)) for index in range(8)]
    assert [each.token_ids for each in many.outputs] == [each.token_ids for each in alone]


@pytest.mark.parametrize("salt", [None, "tenant"])
async def test_without_a_prefix_cache_nobody_else_finds_the_blocks(
    folder: Path, salt: str | None
) -> None:
    prompt = Prompt(token_ids=[5 + i % 300 for i in range(50)], cache_salt=salt)
    async with running_engine(folder, enable_prefix_caching=False) as engine:
        async with engine.stream(prompt, params(3, max_tokens=300)) as stream:
            await stream.receive()
            others = [await engine.generate(prompt, params(n)) for n in (1, 2)]
            assert stream.statistics().deltas_pushed < 3 * 300  # it was live all the time
            statistics = engine.statistics()
        assert [output.usage.cached_tokens for output in others] == [0, 0]
        # 48 of 50 tokens are full blocks: of two of the first three, and one of the last two.
        assert statistics.prefix_hit_tokens == (2 + 1) * 48


async def test_scores_of_a_shared_prompt(folder: Path) -> None:
    prompt = Prompt(token_ids=[5 + i % 300 for i in range(50)])
    wanted = params(3, prompt_logprobs=1, logprobs=1)
    async with running_engine(folder, enable_prefix_caching=False) as engine:
        output = await engine.generate(prompt, wanted)
        first = await engine.generate(prompt, params(1, prompt_logprobs=1, logprobs=1))
        assert engine.statistics().prefix_hit_tokens == 2 * 48
    assert output.prompt_logprobs == first.prompt_logprobs
    assert output.outputs[0].logprobs == first.outputs[0].logprobs


@pytest.mark.parametrize("caching", [True, False])
async def test_scarce_blocks(folder: Path, caching: bool) -> None:
    """Completions preempt each other and still say what they would say alone."""
    async with running_engine(folder, block_size=4) as engine:
        free = await tokens(engine, params(6, max_tokens=40))
        blocks = engine.statistics().kv_blocks_total
    small = {"block_size": 4, "kv_cache_bytes": (8 << 20) * 36 // blocks, "max_model_len": 120}
    async with running_engine(folder, enable_prefix_caching=caching, **small) as engine:
        assert await tokens(engine, params(6, max_tokens=40)) == free
        assert engine.statistics().preemptions > 0


async def test_a_stream_carries_all_of_them(folder: Path) -> None:
    async with running_engine(folder) as engine:
        texts: dict[int, str] = defaultdict(str)
        ids: dict[int, list[int]] = defaultdict(list)
        scores: dict[int, int] = defaultdict(int)
        ends: dict[int, FinishReason] = {}
        wanted = params(3, logprobs=1)
        async with engine.stream(TEXT, wanted, images=[tiny_image(1)]) as stream:
            async for delta in stream:
                texts[delta.index] += delta.text
                ids[delta.index] += delta.token_ids
                assert delta.logprobs is not None
                scores[delta.index] += len(delta.logprobs)
                if delta.finish_reason is not None:
                    assert delta.index not in ends
                    ends[delta.index] = delta.finish_reason
            output = await stream.result()
    assert ends == dict.fromkeys(range(3), FinishReason.LENGTH)
    for completion in output.outputs:
        assert texts[completion.index] == completion.text
        assert tuple(ids[completion.index]) == completion.token_ids
        assert scores[completion.index] == len(completion.token_ids) == 12
        assert completion.logprobs is not None
        assert len(completion.logprobs) == 12


async def test_each_ends_by_itself(folder: Path) -> None:
    async with running_engine(folder) as engine:
        free = await engine.generate(TEXT, params(4), images=[tiny_image(1)])
        token_id = free.outputs[2].token_ids[4]
        stopped = await engine.generate(
            TEXT, params(4, stop_token_ids=[token_id]), images=[tiny_image(1)]
        )
        word = free.outputs[1].text[3:6]
        cut = await engine.generate(TEXT, params(4, stop=word), images=[tiny_image(1)])
    for before, after in zip(free.outputs, stopped.outputs, strict=True):
        if token_id in before.token_ids:
            end = before.token_ids.index(token_id) + 1
            assert after.token_ids == before.token_ids[:end]
            assert (after.finish_reason, after.stop_reason) == (FinishReason.STOP, token_id)
        else:
            assert after.token_ids == before.token_ids
            assert (after.finish_reason, after.stop_reason) == (FinishReason.LENGTH, None)
    for before, after in zip(free.outputs, cut.outputs, strict=True):
        assert after.text == before.text.split(word)[0]
        assert (after.stop_reason == word) == (word in before.text)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("turns", [0, 1, 3, 10, 30])
async def test_cancelling_ends_all_of_them(folder: Path, turns: int, caching: bool) -> None:
    async with running_engine(folder, enable_prefix_caching=caching) as engine:
        work = engine.generate(TEXT, params(4, max_tokens=100), images=[tiny_image(1)])
        task = asyncio.ensure_future(work)
        for _ in range(turns):
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_abort_ends_all_of_them(folder: Path) -> None:
    async with running_engine(folder) as engine:
        stream = engine.stream("Tell me", params(3, max_tokens=200), request_id="a")
        async with stream:
            await stream.receive()
            await engine.abort("a")
            with pytest.raises(RequestAbortedError):
                await stream.result()
        assert engine.statistics().aborted == 1


async def test_names_of_completions_are_taken_too(folder: Path) -> None:
    async with running_engine(folder) as engine:
        async with engine.stream("Tell", params(2, max_tokens=200), request_id="a") as stream:
            await stream.receive()
            with pytest.raises(InvalidRequestError, match="in use"):
                engine.stream("Tell", request_id="a#1")
        async with engine.stream("Tell", params(1, max_tokens=200), request_id="b#1"):
            with pytest.raises(InvalidRequestError, match="in use"):
                await engine.generate("Tell", params(2), request_id="b")
        assert engine.statistics().rejected == 1


@pytest.mark.parametrize(
    ("parameter", "options"),
    [
        ("logit_bias", {"logit_bias": {10**6: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": [3, 10**6]}),
        ("stop_token_ids", {"stop_token_ids": [3, 10**6]}),
    ],
)
async def test_tokens_that_there_are_not(
    folder: Path, parameter: str, options: dict[str, object]
) -> None:
    async with running_engine(folder) as engine:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.generate(Prompt(text="Tell me"), params(1, **options))
        assert caught.value.parameter == parameter


async def test_the_first_token_that_there_is_not(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    size = config["text_config"]["vocab_size"]
    async with running_engine(folder) as engine:
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token_id in (size - 1, size):
                value: Any = {token_id: 0.0} if name == "logit_bias" else [3, token_id]
                answer = engine.generate("Tell me", params(1, max_tokens=1, **{name: value}))
                if token_id < size:
                    await answer
                    continue
                with pytest.raises(InvalidRequestError, match=f"{name} .* {size}, .* {size - 1};"):
                    await answer


async def test_a_name_that_an_ended_completion_gave_back(folder: Path) -> None:
    """The completion's state ends later, and must not take the name's new owner with it."""
    async with running_engine(folder) as engine:
        wanted = params(2, max_tokens=60, seed=1)
        free = await engine.generate("Tell", wanted)
        first, second = (set(completion.token_ids[:20]) for completion in free.outputs)
        token_id = next(iter(second - first))
        wanted = params(2, max_tokens=60, seed=1, stop_token_ids=[token_id])
        async with engine.stream("Tell", wanted, request_id="a") as stream:
            async for delta in stream:
                if delta.index == 1 and delta.finish_reason is not None:
                    break
            newcomer = asyncio.create_task(
                engine.generate("Tell", params(1, max_tokens=100), request_id="a#1")
            )
            await stream.result()
        assert len((await newcomer).token_ids) == 100


async def test_a_late_failure_spares_the_name_s_new_owner(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine(folder) as engine:
        tracker = engine._core.tracker
        assert tracker is not None
        deliver = tracker.deliver
        late: list[str] = []

        def with_failure(plan: StepPlan, result: StepResult) -> None:
            # The step that was in flight when the first owner was aborted.
            failures = {name: RuntimeError("late") for name in late}
            late.clear()
            deliver(plan, replace(result, failures=failures))

        monkeypatch.setattr(tracker, "deliver", with_failure)
        stream = engine.stream("Tell", params(1, max_tokens=100), request_id="a")
        async with stream:
            await stream.receive()
            tracker.abort("a", "enough")  # with no moment between the two for that step to end
            late.append("a")
        output = await engine.generate("Tell", params(1), request_id="a")
        assert len(output.token_ids) == 12


async def test_late_scores_of_a_prompt_are_not_the_name_s_new_owner_s(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompt is the longer one, and its second step ends after the name changed hands."""
    async with running_engine(folder, max_num_batched_tokens=16) as engine:
        wanted = params(1, prompt_logprobs=1)
        expected = await engine.generate("Tell", wanted)
        runner, numbers = engine._core.loaded.runner, itertools.count()
        is_held, gate, step = threading.Event(), threading.Event(), runner.step

        def held(plan: StepPlan) -> Any:
            if next(numbers) == 1:
                is_held.set()
                assert gate.wait(20)
            return step(plan)

        monkeypatch.setattr(runner, "step", held)
        async with engine.stream("Tell me more " * 10, wanted, request_id="a") as first:
            await asyncio.to_thread(is_held.wait, 20)
            first.close()
        async with engine.stream("Tell", wanted, request_id="a") as second:
            gate.set()
            output = await second.result()
        assert output.prompt_logprobs == expected.prompt_logprobs


async def test_followers_ask_for_no_image_again(folder: Path) -> None:
    """An encoder cache for one image, and a prompt that goes on behind both."""
    text = "USER: <image> first <image> then " + "and more " * 20 + "ASSISTANT:"
    sizes = {"encoder_cache_bytes": 16 * 48 * 8, "max_num_batched_tokens": 16, "block_size": 4}
    async with running_engine(folder, **sizes) as engine:
        images = [tiny_image(1), tiny_image(2)]
        await engine.generate(text, params(1), images=images)  # now both are processed
        engine._core.scheduler.pool.clear()
        before = engine.statistics().encoder_items_run
        await engine.generate(text, params(3), images=images)
        assert engine.statistics().encoder_items_run - before == 2


async def test_completions_count_for_the_queue(folder: Path) -> None:
    async with running_engine(folder, max_num_seqs=2, max_queued_requests=2) as engine:
        four = asyncio.create_task(engine.generate("Tell", params(4, max_tokens=50)))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            engine.stream("Tell")
        await four


async def test_seeds_that_are_drawn(folder: Path) -> None:
    async with running_engine(folder) as engine:
        wanted = [params(1, seed=seed, max_tokens=30) for seed in (None, None, -1, -1, 7, 7)]
        found = [await tokens(engine, each) for each in wanted]
        assert len({str(each) for each in found[:4]}) == 4 and found[4] == found[5]


async def test_scores_of_a_prompt_are_a_sequence(folder: Path) -> None:
    async with running_engine(folder) as engine:
        output = await engine.generate("Tell me more", params(1, prompt_logprobs=2))
        scores = output.prompt_logprobs
        assert scores is not None and len(scores) == len(output.prompt_token_ids)
        assert scores[0] is None and scores[-1] == list(scores)[-1] == scores[1:][-1]
        for token_id, found in list(zip(output.prompt_token_ids, scores, strict=True))[1:]:
            assert found is not None and next(iter(found)) == token_id and 2 <= len(found) <= 3
        with pytest.raises(IndexError):
            scores[len(scores)]
