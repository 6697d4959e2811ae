"""Logits processors of the caller's own: their effect, and whose request their faults end."""

from __future__ import annotations

import asyncio
import gc
import pickle
import random
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aioengine import AsyncEngine, SamplingParams, StructuredOutputs
from aioengine.asgi.api.fields import known
from aioengine.asgi.api.openapi import TABLES
from aioengine.cli import batch_lines
from aioengine.errors import InvalidRequestError
from aioengine.instruments import PROCESSORS
from tests.support.engines import Spans, greedy, running_engine, settled
from tests.support.tiny import EOS, save_tiny_llava

PROMPTS = [f"USER: tell story {number}. ASSISTANT:" for number in range(8)]
INF = float("inf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("processors")
    save_tiny_llava(path, torch.float64)
    return path


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    async with running_engine(folder) as engine:
        yield engine


def same(token_ids: Sequence[int], logits: Tensor) -> Tensor:
    return logits


def only(token_id: int) -> Callable[[Sequence[int], Tensor], Tensor]:
    """A processor that leaves one token."""

    def process(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        barred = torch.full_like(logits, -INF)
        barred[token_id] = logits[token_id]
        return barred

    return process


def at(index: int, fault: Callable[[Tensor], Any]) -> Callable[[Sequence[int], Tensor], Any]:
    """A processor that does nothing but a fault at one token."""

    def process(token_ids: Sequence[int], logits: Tensor) -> Any:
        return fault(logits) if len(token_ids) == index else logits

    return process


class Boom(Exception):
    """Fault of a caller's function."""


def raises(logits: Tensor) -> Tensor:
    raise Boom("secret")


def exits(logits: Tensor) -> Tensor:
    raise SystemExit


def infinite(logits: Tensor) -> Tensor:
    logits[3] = INF
    return logits


FAULTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "exception": (raises, "has raised Boom"),
    "exit": (exits, "has raised SystemExit"),
    "none": (lambda logits: None, "not NoneType"),
    "list": (lambda logits: logits.tolist(), "not list"),
    "shape": (lambda logits: logits[:-1], "must return a tensor"),
    "rows": (lambda logits: logits[None], "must return a tensor"),
    "resized": (lambda logits: logits.resize_(3), "must return a tensor"),
    "dtype": (lambda logits: logits.half(), "of torch.float16"),
    "device": (lambda logits: logits.to("meta"), "on meta"),
    "sparse": (lambda logits: logits.to_sparse(), "must return a tensor"),
    "nan": (lambda logits: logits.fill_(float("nan")), "numbers below infinity"),
    "one nan": (lambda logits: logits.index_fill_(0, torch.tensor(9), INF - INF), "numbers below"),
    "infinity": (infinite, "numbers below infinity"),
    "nothing left": (lambda logits: logits.fill_(-INF), "leave no token"),
}


async def test_one_bad_one_among_eight_requests(engine: AsyncEngine) -> None:
    expected = [(await engine.generate(p, greedy(12, logprobs=1))).outputs[0] for p in PROMPTS]
    for name, (fault, message) in FAULTS.items():
        bad = greedy(12, logits_processors=[same, at(5, fault)])
        params = [greedy(12, logprobs=1) for _ in PROMPTS]
        params[1] = greedy(12, logprobs=1, logits_processors=(same,))
        params[3] = bad
        asked = [engine.generate(p, each) for p, each in zip(PROMPTS, params, strict=True)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        error = found.pop(3)
        assert isinstance(error, InvalidRequestError), name
        assert message in str(error) and "secret" not in str(error), name
        if name != "nothing left":
            assert error.parameter == "logits_processors[1]", name
        assert isinstance(error.__cause__, Boom) == (name == "exception")
        others = [*expected[:3], *expected[4:]]
        for output, other in zip(found, others, strict=True):
            assert not isinstance(output, BaseException), name
            assert output.token_ids == other.token_ids, name
            assert output.outputs[0].logprobs == other.logprobs, name
    await settled(engine)
    assert engine.statistics().rejected == len(FAULTS)


async def test_embeddings_share_their_steps(engine: AsyncEngine) -> None:
    """What is pooled samples nothing, and has no processors to look for."""
    params = greedy(40, logits_processors=[same])
    alone = await engine.generate(PROMPTS[0], params)
    spans, pooled = Spans(engine), Spans(engine, PROCESSORS)
    async with engine.stream(PROMPTS[0], params, request_id="text") as stream:
        await spans.wait_for("text", 3)
        await engine.embed(PROMPTS[1], pooling="mean", request_id="vector")
        assert (await stream.result()).token_ids == alone.token_ids
    assert any("text" in span.requests for span in spans.of("vector"))
    assert pooled.of("text") and not pooled.of("vector")


async def test_what_a_processor_is_given(engine: AsyncEngine) -> None:
    seen: list[tuple[int, ...]] = []
    threads = set()

    def look(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        seen.append(tuple(token_ids))
        threads.add(threading.current_thread())
        assert logits.shape == (320,) and logits.dtype == torch.float64
        return logits

    plain = (await engine.generate(PROMPTS[0], greedy(6))).token_ids
    output = await engine.generate(PROMPTS[0], greedy(6, logits_processors=[look]))
    assert output.token_ids == plain
    assert seen == [plain[:count] for count in range(6)]
    assert threading.current_thread() not in threads


async def test_in_float32_processors_get_float32(folder: Path) -> None:
    dtypes = set()

    def look(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        dtypes.add(logits.dtype)
        return logits

    for dtype in ("float32", "bfloat16"):
        async with running_engine(folder, dtype=dtype) as engine:
            plain = (await engine.generate(PROMPTS[0], greedy(6))).token_ids
            params = greedy(6, logits_processors=[look])
            assert (await engine.generate(PROMPTS[0], params)).token_ids == plain
    assert dtypes == {torch.float32}


async def test_they_run_in_order_and_before_what_the_other_options_bar(engine: AsyncEngine) -> None:
    def boost(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        logits[40 + len(token_ids)] += 1000  # in place
        return logits

    def shift(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        return logits.roll(1)

    output = await engine.generate(PROMPTS[0], greedy(5, logits_processors=[boost]))
    assert output.token_ids == (40, 41, 42, 43, 44)
    output = await engine.generate(PROMPTS[0], greedy(5, logits_processors=[boost, shift]))
    assert output.token_ids == (41, 42, 43, 44, 45)
    # At any temperature, and for top-k.
    params = SamplingParams(temperature=2.0, top_k=1, max_tokens=3, logits_processors=[boost])
    assert (await engine.generate(PROMPTS[0], params)).token_ids == (40, 41, 42)
    # What is barred stays so, and a penalty comes behind.
    params = greedy(3, logits_processors=[boost], allowed_token_ids=[41, 7])
    assert (await engine.generate(PROMPTS[0], params)).token_ids[1] == 41
    assert 40 not in (await engine.generate(PROMPTS[0], params)).token_ids
    params = greedy(2, logits_processors=[only(40)], logit_bias={40: -100.0})
    assert (await engine.generate(PROMPTS[0], params)).token_ids == (40, 40)
    regex = StructuredOutputs(regex="[ab]{4}")
    params = SamplingParams(max_tokens=8, logits_processors=[boost], structured_outputs=regex)
    text = (await engine.generate(PROMPTS[0], params)).text
    assert len(text) == 4 and set(text) <= set("ab")
    params = SamplingParams(max_tokens=8, logits_processors=[only(40)], structured_outputs=regex)
    with pytest.raises(InvalidRequestError, match="leave no token"):
        await engine.generate(PROMPTS[0], params)


async def test_each_completion_has_its_own_tokens(engine: AsyncEngine) -> None:
    seen: list[tuple[int, ...]] = []

    def look(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        seen.append(tuple(token_ids))
        return logits

    options: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 6, "n": 3}
    plain = await engine.generate(PROMPTS[0], SamplingParams(**options, ignore_eos=True))
    params = SamplingParams(**options, ignore_eos=True, logits_processors=[look])
    output = await engine.generate(PROMPTS[0], params)
    texts = {each.token_ids for each in output.outputs}
    assert texts == {each.token_ids for each in plain.outputs} and len(texts) == 3
    assert sorted(seen) == sorted(each[:count] for each in texts for count in range(6))


async def test_preemption_changes_nothing(folder: Path) -> None:
    def favour(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        return logits + logits.roll(sum(token_ids) % 7 + len(token_ids))

    params = greedy(24, logits_processors=[favour])
    async with running_engine(folder) as engine:
        expected = [(await engine.generate(p, params)).token_ids for p in PROMPTS]
        plain = (await engine.generate(PROMPTS[0], greedy(24))).token_ids
    assert expected[0] != plain
    scarce = {"block_size": 4, "max_model_len": 64, "kv_cache_bytes": 24 * 4 * 2 * 2 * 24 * 8}
    for caching in (True, False):
        async with running_engine(folder, **scarce, enable_prefix_caching=caching) as engine:
            outputs = await asyncio.gather(*(engine.generate(p, params) for p in PROMPTS))
            assert [output.token_ids for output in outputs] == expected
            assert engine.statistics().preemptions > 0


async def test_100_random_cancellations(engine: AsyncEngine) -> None:
    rng = random.Random(3)
    reached = 0

    async def ask(number: int) -> None:
        nonlocal reached
        going, count = asyncio.Event(), rng.randrange(12)
        loop = asyncio.get_running_loop()

        def look(token_ids: Sequence[int], logits: Tensor) -> Tensor:
            if len(token_ids) == count:
                loop.call_soon_threadsafe(going.set)
            return logits

        params = greedy(64, n=rng.choice([1, 2]), logits_processors=[look])
        task = asyncio.ensure_future(engine.generate(PROMPTS[number % 8], params))
        await going.wait()
        reached += 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for first in range(0, 100, 10):
        await asyncio.gather(*(ask(number) for number in range(first, first + 10)))
        await settled(engine)
    assert reached == 100 == engine.statistics().aborted


async def test_their_time_is_counted(engine: AsyncEngine) -> None:
    spans = Spans(engine, PROCESSORS)
    await engine.generate(PROMPTS[1], greedy(3))
    assert engine.statistics().stages[PROCESSORS].count == 0
    params = greedy(5, logits_processors=[same])
    await asyncio.gather(
        engine.generate(PROMPTS[0], params, request_id="mine"),
        engine.generate(PROMPTS[1], greedy(9), request_id="other"),
    )
    found = engine.statistics().stages[PROCESSORS]
    assert found.count == 5 and 0 < found.max_s <= found.total_s
    assert len(spans.of("mine")) == 5 and not spans.of("other")
    steps = engine.statistics().stages["step"]
    assert found.total_s < steps.total_s


async def test_an_error_that_is_kept_keeps_no_logits(engine: AsyncEngine) -> None:
    def fails(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        raise Boom

    kept: list[weakref.ref[Any]] = []
    runner = engine._core.loaded.runner
    compute = runner.model.compute_logits

    def watched(*arguments: Any, **options: Any) -> Tensor:
        found = compute(*arguments, **options)
        kept.append(weakref.ref(found))
        return found

    runner.model.compute_logits = watched
    with pytest.raises(InvalidRequestError) as caught:
        await engine.generate(PROMPTS[0], greedy(2, logits_processors=[fails]))
    await settled(engine)
    gc.collect()
    cause = caught.value.__cause__
    assert cause is not None and cause.__traceback__ is not None
    assert cause.__traceback__.tb_frame.f_code is fails.__code__
    assert len(kept) == 1 and kept[0]() is None


async def test_a_model_without_numbers_is_not_blamed_on_a_processor(engine: AsyncEngine) -> None:
    runner = engine._core.loaded.runner
    compute = runner.model.compute_logits
    runner.model.compute_logits = lambda *args, **options: compute(*args, **options) * float("nan")
    assert len((await engine.generate(PROMPTS[0], greedy(2, logits_processors=[same]))).token_ids)


async def test_media_and_ends(engine: AsyncEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, logits_processors=[only(EOS)])
    output = await engine.generate(PROMPTS[0], params)
    assert output.token_ids == (EOS,) and output.outputs[0].finish_reason == "stop"


def test_what_comes_from_outside_the_process_has_none() -> None:
    for name in ("chat/completions", "completions"):
        with pytest.raises(InvalidRequestError) as caught:
            known({"logits_processors": []}, TABLES[name])
        assert caught.value.parameter == "logits_processors"
        assert known({"thinking_budget": 3}, TABLES[name]) == {"thinking_budget": 3}
    assert "logits_processors" not in batch_lines.SAMPLING
    assert "thinking_budget" in batch_lines.SAMPLING


def test_params() -> None:
    def here(token_ids: Sequence[int], logits: Tensor) -> Tensor:
        return logits

    wrong: list[tuple[Any, str]] = [
        (same, "logits_processors"),
        ("abc", "logits_processors"),
        ({same}, "logits_processors"),
        ([same, None], "logits_processors[1]"),
        ([Boom], "logits_processors[0]"),
        ((3,), "logits_processors[0]"),
    ]
    for value, parameter in wrong:
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(logits_processors=value)
        assert caught.value.parameter == parameter
    params = SamplingParams(logits_processors=(same,))
    assert params == SamplingParams(logits_processors=(same,)) != SamplingParams()
    assert len({params, SamplingParams(logits_processors=(same,)), SamplingParams()}) == 2
    assert pickle.loads(pickle.dumps(params)) == params
    assert "0x" not in repr(params) and repr(params) == repr(SamplingParams())
    assert SamplingParams(logits_processors=[]) and SamplingParams(logits_processors=[here, same])
