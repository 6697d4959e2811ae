"""Decoders whose layers keep a state: greedy tokens equal transformers' `generate`.

In chunks, after hits of the prefix cache, beside others, preempted, cancelled, several of a prompt.
"""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from aioengine import AsyncEngine, SamplingParams
from aioengine.errors import ModelLoadError
from aioengine.models.state import layers
from tests.parity.families import MAX_TOKENS, save_text
from tests.parity.state_families import TEXTS
from tests.support.engines import running_engine, settled
from tests.support.grids import rest_is_slow

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
PROMPTS = (
    "tell a story", "What is in the picture? There is", "a", "tell a story about colours",
    "What is in the picture? There is a long text here that goes on and on, and ends.",
)  # fmt: skip
HEAD = "What is in the picture? There is a long text here that goes on and on, "
TAILS = ("and it ends here.", "but there is more of it.", "or is there?")
SIZES: dict[str, Any] = {"block_size": 4, "kv_cache_bytes": 4 << 20, "max_model_len": 256}
Tokens = tuple[int, ...]


@pytest.fixture(scope="module", params=TEXTS)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Tokens]]:
    """The family's folder, and what transformers makes of the prompts."""
    return save(request.param, tmp_path_factory.mktemp(request.param))


def save(name: str, folder: Path) -> tuple[Path, list[Tokens]]:
    return folder, save_text(TEXTS[name], folder, PROMPTS)


async def ask(engine: AsyncEngine, prompts: Any = PROMPTS, **options: Any) -> list[Tokens]:
    outputs = await asyncio.gather(*(engine.generate(each, PARAMS, **options) for each in prompts))
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("budget", [512, 5])
async def test_tokens_equal_generate(saved: tuple[Path, list[Tokens]], budget: int) -> None:
    folder, expected = saved
    assert len(set(expected)) >= 4
    options = {**SIZES, "dtype": "auto", "max_num_batched_tokens": budget}
    async with running_engine(folder, **options) as engine:
        for _ in range(2):  # with a cold and with a warm prefix cache
            # Two of each length, which share their calls.
            assert await ask(engine, PROMPTS * 2) == expected * 2
        now = engine.statistics()
        assert now.prefix_hit_tokens > 0 and now.states_cached > 0
        assert now.model_impl == "transformers"


KINDS = ["qwen3.5", "falcon-h1", "lfm2"]
one_kind = pytest.mark.parametrize("one", rest_is_slow(KINDS, ["qwen3.5"]), indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def one(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Tokens]]:
    return save(request.param, tmp_path_factory.mktemp(request.param))


async def test_preempted_requests_go_on_where_a_snapshot_is(
    one: tuple[Path, list[Tokens]],
) -> None:
    folder, expected = one
    config = json.loads((folder / "config.json").read_text())
    heads = hf.AutoConfig.from_pretrained(folder).get_text_config()
    num_layers = sum("attention" in each for each in config.get("layer_types", ["attention"] * 3))
    num_layers -= sum("linear" in each for each in config.get("layer_types", []))
    head_dim = getattr(heads, "head_dim", None) or 12
    block = 2 * heads.num_key_value_heads * head_dim * 8 * 4 * num_layers
    options = {**SIZES, "kv_cache_bytes": 24 * block, "max_model_len": 96, "max_num_seqs": 16}
    # Of short prompts many start side by side, and have no room to grow.
    chosen = [*[2] * 16, 0, 1, 2, 3, 4]
    async with running_engine(folder, **options) as engine:
        for _ in range(2):
            tokens = await ask(engine, [PROMPTS[index] for index in chosen])
            assert tokens == [expected[index] for index in chosen]
        assert engine.statistics().preemptions > 0


@one_kind
@pytest.mark.parametrize("caching", [True, False])
async def test_completions_of_one_prompt_share_its_state(
    one: tuple[Path, list[Tokens]], caching: bool
) -> None:
    folder, expected = one
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, n=3)
    options = {**SIZES, "enable_prefix_caching": caching}
    async with running_engine(folder, **options) as engine:
        for text, tokens in zip(PROMPTS, expected, strict=True):
            output = await engine.generate(text, params)
            assert [each.token_ids for each in output.outputs] == [tokens] * 3
        now = engine.statistics()
        assert now.prefix_hit_tokens > 0
        assert bool(now.states_cached) == caching


@one_kind
async def test_a_longer_prompt_begins_where_one_like_it_parted(
    one: tuple[Path, list[Tokens]],
) -> None:
    """The first takes a snapshot at its own end alone. The second, which shares half of it, takes
    one where they part; so the third has that half."""
    folder, _ = one
    options = {**SIZES, "enable_prefix_caching": True, "max_num_seqs": 2}
    async with running_engine(folder, **options) as engine:
        engine._core.scheduler.states._interval = 1 << 20
        alone = []
        for tail in TAILS:
            await engine.reset_caches()
            alone += await ask(engine, [HEAD + tail])
        await engine.reset_caches()
        hits = []
        for tail, tokens in zip(TAILS, alone, strict=True):
            before = engine.statistics().prefix_hit_tokens
            assert await ask(engine, [HEAD + tail]) == [tokens]
            hits.append(engine.statistics().prefix_hit_tokens - before)
        assert hits[:2] == [0, 0] and hits[2] >= 32


@one_kind
@pytest.mark.parametrize(
    "count", [400, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
async def test_cancelling_leaves_all_places_free(
    one: tuple[Path, list[Tokens]], count: int
) -> None:
    folder, expected = one
    rng = random.Random(3)
    async with running_engine(folder, **SIZES, max_num_seqs=4) as engine:
        for _ in range(count // len(PROMPTS)):
            tasks = [asyncio.create_task(engine.generate(text, PARAMS)) for text in PROMPTS]
            await asyncio.sleep(rng.random() * 0.02)
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task
        await settled(engine)
        assert await ask(engine) == expected


async def test_the_trial_sees_a_state_that_is_lost(
    one: tuple[Path, list[Tokens]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # without verdicts of earlier trials
    monkeypatch.setattr(layers, "_store", lambda memory, place, cache: None)
    with pytest.raises(ModelLoadError, match="does not compute"):
        async with AsyncEngine.from_pretrained(one[0], device="cpu", **SIZES):
            pass
