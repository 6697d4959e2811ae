"""The engine on a GPU: parity, laws, faults and memory, with steps in flight."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine import AsyncEngine, RequestOutput, SamplingParams, StructuredOutputs
from aioengine.errors import EngineDeadError, InvalidRequestError, MediaError
from tests.support.engines import running_engine, settled
from tests.support.tiny import save_tiny_llava, tiny_image

TEXT = "USER: <image>\nWhat is it, and where? ASSISTANT:"
PLAIN = "USER: tell a story. ASSISTANT:"
ROW_BYTES = 48 * 8
BLOCKED_S = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda")
    save_tiny_llava(path, torch.float64)
    return path


def greedy(max_tokens: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


async def ask(
    engine: AsyncEngine, seed: int | None, params: SamplingParams | None = None
) -> RequestOutput:
    if seed is None:
        return await engine.generate(PLAIN, params or greedy())
    return await engine.generate(TEXT, params or greedy(), images=[tiny_image(seed)])


async def tokens(engine: AsyncEngine, seeds: Sequence[int | None]) -> list[tuple[int, ...]]:
    outputs = await asyncio.gather(*(ask(engine, seed) for seed in seeds))
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int | None, tuple[int, ...]]:
    """What the CPU says, one request at a time; tests/parity holds that equal to transformers."""

    async def run() -> dict[int | None, tuple[int, ...]]:
        async with running_engine(folder) as engine:
            return {seed: (await ask(engine, seed)).token_ids for seed in (None, *range(8))}

    return asyncio.run(run())


def rotated(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    return logits + logits.roll(sum(token_ids) % 7 + len(token_ids))


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("budget", [1, 7, 64, 4096])
async def test_tokens_are_the_same_whatever_the_company(
    folder: Path,
    expected: dict[int | None, tuple[int, ...]],
    budget: int,
    prefix_caching: bool,
) -> None:
    options = {"max_num_batched_tokens": budget, "enable_prefix_caching": prefix_caching}
    async with running_engine(folder, device="cuda", **options) as engine:
        seeds = [None, *range(8), None, 3, 3]
        for _ in range(2):  # cold, then warm
            assert await tokens(engine, seeds) == [expected[seed] for seed in seeds]


async def test_preemption_and_a_small_encoder_cache(
    folder: Path, expected: dict[int | None, tuple[int, ...]]
) -> None:
    options = {
        "block_size": 4,
        "max_model_len": 96,
        "kv_cache_bytes": 30 * 4 * 2 * 2 * (2 * 12) * 8,
        "encoder_cache_bytes": 2 * 16 * ROW_BYTES,
        "enable_prefix_caching": False,
    }
    async with running_engine(folder, device="cuda", **options) as engine:
        seeds = [*range(8), None, *range(8)]
        assert await tokens(engine, seeds) == [expected[seed] for seed in seeds]
        now = engine.statistics()
        assert now.preemptions > 0 and now.encoder_cache_evictions > 0


async def test_encoder_rows_are_not_reused_while_a_step_reads_them(
    folder: Path, expected: dict[int | None, tuple[int, ...]]
) -> None:
    """Rows come and go all the time, while steps that read them are in flight."""
    options = {"encoder_cache_bytes": 2 * 16 * ROW_BYTES, "enable_prefix_caching": False}
    rng = random.Random(5)
    async with running_engine(folder, device="cuda", **options) as engine:
        for _ in range(10):
            seeds = [rng.choice([None, *range(8)]) for _ in range(24)]
            assert await tokens(engine, seeds) == [expected[seed] for seed in seeds]
        assert engine.statistics().encoder_cache_evictions > 50


async def test_a_bad_logits_processor_ends_its_request_alone(
    folder: Path, expected: dict[int | None, tuple[int, ...]]
) -> None:
    """What it returns is looked at when the step is read: nothing waits for the device before."""

    def raises(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        raise ValueError

    def no_numbers(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.mul_(float("nan")) if len(token_ids) == 4 else logits

    def on_the_host(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(logits), dtype=logits.dtype)

    bad = {raises: "raised ValueError", no_numbers: "below infinity", on_the_host: "on cpu"}
    async with running_engine(folder, device="cuda") as engine:
        for function, message in bad.items():
            params = greedy(logits_processors=[rotated, function])
            asked = [ask(engine, None), ask(engine, 1, params), ask(engine, 2)]
            first, error, last = await asyncio.gather(*asked, return_exceptions=True)
            assert isinstance(error, InvalidRequestError) and message in str(error)
            assert error.parameter == "logits_processors[1]"
            assert isinstance(first, RequestOutput) and first.token_ids == expected[None]
            assert isinstance(last, RequestOutput) and last.token_ids == expected[2]


async def test_sampling_is_the_same_alone_and_in_company(folder: Path) -> None:
    """Penalties see the tokens of steps in flight; grammars wait for them."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "seed": 4, "top_p": 0.7, "top_k": 20, "min_p": 0.01},
        {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"temperature": 0, "logprobs": 2, "logit_bias": {7: 3.0}, "bad_words": ["a", "the end"]},
        {"temperature": 1.0, "seed": 5, "n": 3},
        {"temperature": 1.0, "structured_outputs": StructuredOutputs(regex="[a-f]{10}"), "seed": 6},
        {"temperature": 1.0, "seed": 7, "logits_processors": [rotated]},
    ]
    params = [SamplingParams(max_tokens=24, **kind) for kind in kinds]
    results = []
    for device in ("cpu", "cuda"):
        async with running_engine(folder, device=device) as engine:
            alone = [await ask(engine, 1, p) for p in params]
            together = await asyncio.gather(*(ask(engine, 1, p) for p in params))
            for one, other in zip(alone, together, strict=True):
                assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
            results.append([[c.token_ids for c in output.outputs] for output in alone])
    assert results[0] == results[1]


@pytest.mark.parametrize("seed", range(5))
async def test_cancelling_at_any_moment(
    folder: Path, expected: dict[int | None, tuple[int, ...]], seed: int
) -> None:
    rng = random.Random(seed)
    async with running_engine(folder, device="cuda") as engine:
        stays = asyncio.create_task(tokens(engine, [0, None, 5]))
        for _ in range(20):
            task = asyncio.create_task(ask(engine, rng.randrange(8), greedy(40)))
            await asyncio.sleep(rng.random() * 0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await stays == [expected[0], expected[None], expected[5]]
        await settled(engine)


async def test_an_encoder_that_fails_harms_its_request_alone(
    folder: Path, expected: dict[int | None, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine(folder, device="cuda") as engine:
        model = engine._core.loaded.runner.model
        encode, is_broken = model.encode, True

        def failing(modality: str, features: Sequence[Any]) -> Any:
            if is_broken:
                raise RuntimeError("no")
            return encode(modality, features)

        monkeypatch.setattr(model, "encode", failing)
        text = asyncio.create_task(tokens(engine, [None]))
        with pytest.raises(MediaError):
            await ask(engine, 1)
        is_broken = False
        assert await text == [expected[None]]
        assert await tokens(engine, [1]) == [expected[1]]


async def test_decode_goes_on_while_an_encoder_blocks_its_thread(
    folder: Path, expected: dict[int | None, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As code does that reads a size back from the device: no step's launch waits for it."""
    async with running_engine(folder, device="cuda") as engine:
        model = engine._core.loaded.runner.model
        encode, is_blocked, gate = model.encode, threading.Event(), threading.Event()

        def blocking(modality: str, features: Sequence[Any]) -> Any:
            rows = encode(modality, features)
            is_blocked.set()
            assert gate.wait(BLOCKED_S)
            return rows

        monkeypatch.setattr(model, "encode", blocking)
        begun = asyncio.create_task(tokens(engine, [None]))
        image = asyncio.create_task(tokens(engine, [1]))
        try:
            assert await asyncio.to_thread(is_blocked.wait, BLOCKED_S)
            assert await tokens(engine, [None, None]) == [expected[None]] * 2
            assert await begun == [expected[None]]
            assert not image.done() and engine.statistics().encoder_items_run == 0
        finally:
            gate.set()
        assert await image == [expected[1]]


async def test_few_items_share_an_encoder_run(
    folder: Path, expected: dict[int | None, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the first of many images that are ready at once are soon of use."""
    async with running_engine(folder, device="cuda") as engine:
        runner = engine._core.loaded.runner
        encode, sizes = runner.encode, list[int]()

        def watched(plan: Any, features: Sequence[Any]) -> Any:
            sizes.append(len(plan.keys))
            return encode(plan, features)

        monkeypatch.setattr(runner, "encode", watched)
        seeds = [*range(8)]
        assert await tokens(engine, seeds) == [expected[seed] for seed in seeds]
        assert sum(sizes) == 8 and max(sizes) <= 4


async def test_a_step_that_fails_ends_the_engine_and_every_stream_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncEngine.from_pretrained(folder, device="cuda", kv_cache_bytes=8 << 20) as engine:
        tasks = [asyncio.create_task(ask(engine, None, greedy(400))) for _ in range(3)]
        await asyncio.sleep(0.05)

        def fails(*args: object) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(engine._core.loaded.runner, "_stage", fails)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError)


async def test_lower_precision_stays_near(folder: Path) -> None:
    """Log probabilities in bfloat16 against float64, for the same tokens."""
    found = []
    for dtype in ("float64", "bfloat16"):
        async with running_engine(folder, device="cuda", dtype=dtype) as engine:
            output = await ask(engine, 2, greedy(1, prompt_logprobs=0))
            assert output.prompt_logprobs is not None
            scores = [next(iter(s.values())).logprob for s in output.prompt_logprobs if s]
            found.append(torch.tensor(scores))
    difference = (found[0] - found[1]).abs()
    assert difference.mean() < 0.1 and difference.max() < 1.0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_half_precision_agrees_with_the_reference(folder: Path, dtype: str) -> None:
    """In float64 PyTorch takes other kernels. Chunks, and decode steps in company, by the same
    weights: log probabilities of prompts, and of tokens up to the first that differs."""
    params = greedy(12, prompt_logprobs=0, logprobs=0)
    seeds = [None, *range(4), 1]
    found: list[list[RequestOutput]] = []
    for backend in ("reference", "auto"):
        options = {"attention_backend": backend, "max_num_batched_tokens": 24, "dtype": dtype}
        async with running_engine(folder, device="cuda", **options) as engine:
            found.append(await asyncio.gather(*(ask(engine, seed, params) for seed in seeds)))
    num_compared, differences = 0, []
    for reference, output in zip(*found, strict=True):
        for one, other in zip(_scores(reference), _scores(output), strict=False):
            if one.keys() != other.keys():
                break
            num_compared += 1
            pairs = zip(one.values(), other.values(), strict=True)
            differences += [abs(a.logprob - b.logprob) for a, b in pairs]
    assert num_compared > 150
    assert max(differences) < 0.5 and sum(differences) / len(differences) < 0.05


def _scores(output: RequestOutput) -> list[Any]:
    (completion,) = output.outputs
    assert output.prompt_logprobs is not None and completion.logprobs is not None
    return [*filter(None, output.prompt_logprobs), *completion.logprobs]


async def test_memory_is_given_back(folder: Path) -> None:
    """All but what the first engine leaves for the next: workspaces of its streams' matmuls."""
    held = []
    for _ in range(3):
        async with running_engine(folder, device="cuda") as engine:
            await tokens(engine, [0, None])
        del engine
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_allocated())
    assert max(held[1:]) <= held[0] + (1 << 20)


async def test_what_an_engine_leaves_may_be_freed_late(folder: Path) -> None:
    """A garbage collection frees pinned memory, which asks for the streams that have read it."""
    late = []
    for _ in range(3):
        async with running_engine(folder, device="cuda") as engine:
            await tokens(engine, [0, None])
            late.append(engine._core.loaded.runner)
        del engine
    late.clear()
    gc.collect()
    async with running_engine(folder, device="cuda") as engine:
        assert len((await ask(engine, 1)).token_ids) == 12


async def test_sizes_from_a_profiling_run(folder: Path) -> None:
    options = {"kv_cache_bytes": None, "max_num_batched_tokens": 512}
    async with running_engine(folder, device="cuda", **options) as engine:
        total = engine.statistics().kv_blocks_total
        assert total > 0
        assert len((await ask(engine, 1)).token_ids) == 12
