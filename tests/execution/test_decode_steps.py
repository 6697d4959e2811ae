"""Steps without Python in between: the same tokens as by Python, whatever the requests are."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlavaForConditionalGeneration,
    MixtralConfig,
    Qwen3MoeConfig,
)

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine.errors import EngineDeadError
from aioengine.kernels.cpu import library
from aioengine.kernels.cpu.decode_queue import QueuedToken
from aioengine.streams.pace import Pace
from tests.support.engines import assert_at_rest, greedy, running_engine, settled, until
from tests.support.tiny import (
    VOCAB_SIZE,
    draw_weights,
    llava_config,
    save_tiny_llava,
    tiny_image,
    tiny_processor,
    tiny_tokenizer,
)

pytestmark = pytest.mark.skipif(
    not library.is_available() or library.instruction_set() == "generic",
    reason="the layers are not planned here",
)

TEXTS = ["hello", "What is this? " * 7, "one two three " * 12, "a", "one two three " * 12 + "four"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("queue") / "llava"
    save_tiny_llava(folder, hidden_size=128, intermediate_size=192)
    return folder


@asynccontextmanager
async def opened(folder: Path, *, queues: bool, **options: Any) -> AsyncIterator[AsyncEngine]:
    async with running_engine(folder, **options) as engine:
        assert engine._core.loaded.runner.decode_steps is not None
        if not queues:
            engine._core.loaded.runner.decode_steps = None
        yield engine


@contextmanager
def planning(monkeypatch: pytest.MonkeyPatch, ahead: int | None) -> Iterator[None]:
    """Have devices plan so many steps ahead, whatever they measure; None: as they do."""
    with monkeypatch.context() as patched:
        if ahead is not None:
            patched.setattr(Pace, "ahead", ahead)
        yield


def num_queued(engine: AsyncEngine) -> int:
    steps = engine._core.loaded.runner.decode_steps
    return 0 if steps is None else steps.queue.num_put - 1  # one is the trial's


async def ask(engine: AsyncEngine, number: int) -> RequestOutput:
    text, params = TEXTS[number % len(TEXTS)], greedy(6 + 5 * (number % 7))
    if number % 3 == 1:
        return await engine.generate(f"<image>{text}", params, images=[tiny_image(number)])
    if number % 7 == 3:  # some tokens may not come
        params = SamplingParams(temperature=0, max_tokens=12, min_tokens=6)
    if number % 7 == 5:  # who goes another way takes the others along for as long as it lives
        params = greedy(9, logprobs=2)
    if number % 7 == 6:
        params = SamplingParams(temperature=1, top_p=0.9, seed=number, max_tokens=19)
    return await engine.generate(text, params)


async def all_tokens(engine: AsyncEngine) -> list[tuple[int, ...]]:
    found = []
    for _ in range(2):  # the second time with the prefixes of the first
        outputs = await asyncio.gather(*(ask(engine, number) for number in range(15)))
        found += [output.token_ids for output in outputs]
    await settled(engine)
    assert_at_rest(engine)
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "bfloat16": {"dtype": "bfloat16"},
    "few blocks": {"kv_cache_bytes": 280_000, "max_model_len": 256},
    "few at a time": {"max_num_seqs": 3, "max_num_batched_tokens": 16},
}


@pytest.mark.parametrize("ahead", [None, 5])
@pytest.mark.parametrize("name", SETTINGS)
async def test_the_same_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, ahead: int | None
) -> None:
    options = {"dtype": "float32", **SETTINGS[name]}
    async with opened(folder, queues=False, **options) as engine:
        wanted = await all_tokens(engine)
    with planning(monkeypatch, ahead):
        async with opened(folder, queues=True, **options) as engine:
            assert await all_tokens(engine) == wanted
            assert num_queued(engine) > 20
            if name == "few blocks":
                assert engine.statistics().preemptions > 0


def decoder_of_experts(name: str) -> Any:
    """The configuration of a decoder with routed experts, small."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if name == "mixtral":
        return MixtralConfig(
            **sizes, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2
        )
    return Qwen3MoeConfig(
        **sizes, intermediate_size=96, moe_intermediate_size=32, num_experts=8,
        num_experts_per_tok=3, norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=[0],
    )  # fmt: skip


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
async def test_routed_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, quantization: str | None
) -> None:
    """The same tokens as by Python, alone and together, with images and without."""

    def save() -> None:
        config = llava_config()
        config.text_config = decoder_of_experts(name)
        model = LlavaForConditionalGeneration(config)
        draw_weights(model)
        model.save_pretrained(tmp_path)
        tiny_processor().save_pretrained(tmp_path)

    await asyncio.to_thread(save)
    options = {"dtype": dtype, "quantization": quantization}
    async with opened(tmp_path, queues=False, **options) as engine:
        wanted = await all_tokens(engine)
    with planning(monkeypatch, 5):
        async with opened(tmp_path, queues=True, **options) as engine:
            assert await all_tokens(engine) == wanted
            assert num_queued(engine) > 20
            await engine.reset_caches()
            alone = [(await ask(engine, number)).token_ids for number in range(15)]
    assert alone == wanted[:15]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_soft_caps(tmp_path: Path, dtype: str) -> None:
    """Of logits, in the queue as in the model: Gemma 2 has them."""

    def save() -> None:
        config = Gemma2Config(
            vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=8,
            final_logit_softcapping=2.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        model = Gemma2ForCausalLM(config)
        draw_weights(model)
        model.save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)

    await asyncio.to_thread(save)
    params = [greedy(12), SamplingParams(temperature=1, seed=3, max_tokens=12, ignore_eos=True)]
    found = []
    for queues in (True, False):
        async with opened(tmp_path, queues=queues, dtype=dtype) as engine:
            asked = (engine.generate([5 + i, 9, 30], each) for i in range(4) for each in params)
            found.append([output.token_ids for output in await asyncio.gather(*asked)])
            scores = await engine.generate([5, 9, 30], greedy(4, logprobs=5))
            assert (num_queued(engine) > 5) is queues
    assert found[0] == found[1] and len(set(found[0])) > 4
    spread = scores.outputs[0].logprobs
    assert spread is not None and all(
        max(x.logprob for x in each.values()) - min(x.logprob for x in each.values()) <= 4
        for each in spread
    )


async def test_a_system_without_events_for_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only Linux has them; elsewhere steps go through Python."""
    async with running_engine(folder, dtype="float32") as engine:
        wanted = await engine.generate("hello", greedy(9))
    monkeypatch.delattr("os.eventfd")
    async with running_engine(folder, dtype="float32") as engine:
        assert engine._core.loaded.runner.decode_steps is None
        assert (await engine.generate("hello", greedy(9))).token_ids == wanted.token_ids


async def test_a_stop_found_late_gives_no_token_too_many(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with planning(monkeypatch, 6):
        async with opened(folder, queues=True, dtype="float32") as engine:
            whole = (await engine.generate("hello", greedy(30))).token_ids
            for length in (3, 11, 20):
                stop = whole[length - 1]
                first = whole.index(stop) + 1
                params = greedy(30, stop_token_ids=[stop])
                company = engine.generate("a", greedy(25))
                output, other = await asyncio.gather(engine.generate("hello", params), company)
                assert output.token_ids == whole[:first]
                assert len(other.token_ids) == 25
            await settled(engine)
            assert_at_rest(engine)


async def test_streams_that_are_closed_in_the_middle(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with planning(monkeypatch, 6):
        async with opened(folder, queues=True, dtype="float32") as engine:
            wanted = (await engine.generate("hello", greedy(40))).token_ids
            for count in range(1, 12, 3):
                rest = asyncio.create_task(engine.generate("hello", greedy(40)))
                async with engine.stream("a", greedy(200)) as stream:
                    for _ in range(count):
                        await stream.receive()
                assert (await rest).token_ids == wanted
            await settled(engine)
            assert_at_rest(engine)


async def test_a_step_that_cannot_be_ends_the_engine_and_not_the_process(folder: Path) -> None:
    sizes = {"dtype": "float32", "device": "cpu", "max_model_len": 512}
    async with AsyncEngine.from_pretrained(folder, **sizes) as engine:
        queue = engine._core.loaded.runner.decode_steps.queue
        put = queue.put

        def put_wrongly(tokens: Any, tables: Any) -> Any:
            return put([QueuedToken(10**6, *token[1:]) for token in tokens], tables)

        queue.put = put_wrongly
        with pytest.raises(EngineDeadError) as caught:
            await engine.generate("hello", greedy(20))
        assert "there is no such token" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("token", "tables"),
    [
        (QueuedToken(-1 - 10**6, 0, 1, 0), [[[0]]]),
        (QueuedToken(1, 0, 10**6, 0), [[[0]]]),
        (QueuedToken(1, 0, 0, 0), [[[0]]]),
        (QueuedToken(1, 0, 1, 0), [[[]]]),
    ],
)
async def test_what_a_step_may_not_say(folder: Path, token: QueuedToken, tables: Any) -> None:
    async with opened(folder, queues=True, dtype="float32") as engine:
        queue = engine._core.loaded.runner.decode_steps.queue
        for position in (-1, 10**6):
            assert queue.put([QueuedToken(1, position, 1)], [[[0]]]) is None

        def run() -> None:
            queue.put([token], tables)
            queue.let()
            queue.run(0)

        if token.token < 0:  # it stands for the last place that there is, whose token is known
            await asyncio.to_thread(run)
        else:
            with pytest.raises(RuntimeError, match=r"token|angles|block"):
                await asyncio.to_thread(run)


async def test_positions_beyond_the_first_ones(folder: Path) -> None:
    """Angles are made as they are needed."""
    found = []
    for queues in (False, True):
        async with opened(folder, queues=queues, dtype="float32", max_model_len=600) as engine:
            prompt = [5 + i % 40 for i in range(505)]
            output = await engine.generate(prompt, greedy(90))
            found.append(output.token_ids)
    assert found[0] == found[1] and len(found[1]) == 90


# ---- the interpreter's lock


async def test_a_step_asks_for_the_lock_at_most_four_times(folder: Path) -> None:
    """Beside a thread that never gives it away: whoever asks waits for a switch interval.

    So the time that steps take tells how often it was asked for, the loop's part included.
    """
    interval_s, before = 0.05, sys.getswitchinterval()
    is_over = threading.Event()

    def spin() -> None:
        while not is_over.is_set():
            pass

    async with opened(folder, queues=True, dtype="float32", max_model_len=512) as engine:
        engine._core.device._pace = _One()
        async with engine.stream("hello", greedy(400)) as stream:
            for _ in range(5):
                await stream.receive()
            await until(lambda: num_queued(engine) > 5)
            spinning = threading.Thread(target=spin)
            sys.setswitchinterval(interval_s)
            try:
                spinning.start()
                await stream.receive()
                count, since = 0, time.perf_counter()
                while count < 20:
                    delta = await stream.receive()
                    assert delta is not None
                    count += len(delta.token_ids)
                seconds = time.perf_counter() - since
            finally:
                is_over.set()
                sys.setswitchinterval(before)
                spinning.join()
    assert seconds / count / interval_s <= 4


class _One(Pace):
    """Each step waits until the one before has been seen."""

    @property
    def ahead(self) -> int:
        return 0
