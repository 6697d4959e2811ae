"""Embeddings beside generation: caches, defaults, limits, cancellations and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf

from aioengine import AsyncEngine, Embeddings, Engine, Prompt
from aioengine.errors import (
    InvalidRequestError,
    MediaError,
    ModelLoadError,
    OverloadedError,
    PromptTooLongError,
)
from tests.support.embedders import (
    QWEN3,
    SIZES,
    cosine,
    pair_tokenizer,
    save_model,
    save_modules,
    states,
)
from tests.support.engines import assert_at_rest, cancelled_at, greedy, running_engine, settled
from tests.support.tiny import save_tiny_llava, tiny_image

PROMPT = [*range(5, 45)]
BLOCK_BYTES = 3 * 2 * 2 * 12 * 8 * 4
"""Of three layers' keys and values, two heads of 12 numbers each, of 4 tokens in float64."""
POOLING = ["Transformer", "Pooling", "Normalize"]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model that generates text too."""
    folder = tmp_path_factory.mktemp("chat")
    return folder, save_model(folder, "Qwen3ForCausalLM", hf.Qwen3Config(**QWEN3))


def embedder(folder: Path, kinds: list[str], **pooling: Any) -> Any:
    """A backbone with what sentence-transformers says of it."""
    model = save_model(folder, "Qwen3ForCausalLM", hf.Qwen3Config(**QWEN3))
    save_modules(folder, kinds, **pooling)
    return model


async def test_the_last_state_finds_prefixes_and_the_mean_does_not(chat: Any) -> None:
    folder, model = chat
    rows = states(model, PROMPT)
    async with running_engine(folder, block_size=4, max_num_batched_tokens=13) as engine:
        for kind, num_cached, expected in (("last", 36, rows[-1]), ("mean", 0, rows.mean(0))):
            for cached in (0, num_cached):
                output = await engine.embed_output(PROMPT, pooling=kind)
                assert cosine(output.vector, expected) >= 1 - 1e-5
                assert output.usage.cached_tokens == cached
                assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (40, 0)
            await engine.reset_caches()
        await engine.embed(PROMPT, pooling="mean")  # what it has computed, others find
        assert (await engine.embed_output(PROMPT)).usage.cached_tokens == 36
        generated = await engine.generate(PROMPT, greedy(3))
        assert generated.usage.cached_tokens == 39
        assert generated.vector is None


async def test_generation_goes_on_beside_it(chat: Any) -> None:
    folder, model = chat
    options = {"block_size": 4, "max_num_batched_tokens": 13, "max_num_seqs": 3}
    async with running_engine(folder, **options) as engine:
        alone = [await engine.generate(PROMPT[:n], greedy(9)) for n in (3, 20)]
        await engine.reset_caches()
        texts = [asyncio.ensure_future(engine.generate(PROMPT[:n], greedy(9))) for n in (3, 20)]
        kinds = ["last", "mean"] * 6
        vectors = await asyncio.gather(
            *(engine.embed(PROMPT[: 7 + i], pooling=kind) for i, kind in enumerate(kinds))
        )
        assert [(await text).token_ids for text in texts] == [each.token_ids for each in alone]
        for i, (kind, vector) in enumerate(zip(kinds, vectors, strict=True)):
            rows = states(model, PROMPT[: 7 + i])
            assert cosine(vector, rows[-1] if kind == "last" else rows.mean(0)) >= 1 - 1e-5
        assert engine.statistics().finished == 16


async def test_preemption_changes_nothing(chat: Any) -> None:
    folder, model = chat
    options = {"block_size": 4, "max_num_batched_tokens": 24, "max_model_len": 48}
    async with running_engine(folder, kv_cache_bytes=14 * BLOCK_BYTES, **options) as engine:
        texts = [asyncio.ensure_future(engine.generate(PROMPT[:9], greedy(30))) for _ in range(2)]
        vectors = await asyncio.gather(
            *(engine.embed(PROMPT[i:], pooling="mean", priority=1) for i in range(8))
        )
        for i, vector in enumerate(vectors):
            assert cosine(vector, states(model, PROMPT[i:]).mean(0)) >= 1 - 1e-5
        await asyncio.gather(*texts)
        assert engine.statistics().preemptions > 0


async def test_a_prompt_may_be_as_long_as_the_model_takes(chat: Any) -> None:
    """Also where all of it is in the cache, and takes all blocks that there are."""
    folder, model = chat
    prompt = [5 + i % 300 for i in range(48)]
    options = {"block_size": 4, "max_model_len": 48, "max_num_batched_tokens": 13}
    async with running_engine(folder, kv_cache_bytes=12 * BLOCK_BYTES, **options) as engine:
        assert engine.statistics().kv_blocks_total == 12
        expected = states(model, prompt)[-1]
        for cached in (0, 44):
            output = await engine.embed_output(prompt)
            assert cosine(output.vector, expected) >= 1 - 1e-5
            assert output.usage.cached_tokens == cached
        with pytest.raises(PromptTooLongError, match=r"49 tokens.* max_model_len is 48; shorten"):
            await engine.embed([*prompt, 5])
        with pytest.raises(PromptTooLongError, match="one output token must fit too"):
            await engine.generate(prompt)


@pytest.mark.parametrize("kind", ["last", "mean"])
async def test_cancelling_it_leaves_nothing(chat: Any, kind: str) -> None:
    folder, _ = chat
    options = {"block_size": 4, "max_num_batched_tokens": 5}
    async with running_engine(folder, **options) as engine:
        for number in range(100):
            others = [asyncio.ensure_future(engine.embed(PROMPT[1:], pooling=kind))]
            begun = asyncio.ensure_future(engine.embed([number, *PROMPT], pooling=kind))
            for _ in range(number % 33):
                await asyncio.sleep(0)
            begun.cancel()
            await asyncio.gather(begun, *others, return_exceptions=True)
        await settled(engine)
        statistics = engine.statistics()
        assert statistics.finished >= 100 and statistics.aborted > 20
        assert statistics.finished + statistics.aborted <= 200
        await cancelled_at(_swallow(engine.score("a dog", ["a fox", "the dog"])), 1)


async def _swallow(call: Any) -> None:
    try:
        await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()


async def test_images_go_through_the_encoder_cache(tmp_path: Path) -> None:
    save_tiny_llava(tmp_path)
    prompt = "USER: <image>\nWhat is it? ASSISTANT:"
    async with running_engine(tmp_path, max_num_batched_tokens=13) as engine:
        first = await engine.embed_output(prompt, images=tiny_image(1))
        again = await engine.embed_output(prompt, images=[tiny_image(1)], pooling="mean")
        other = await engine.embed(prompt, images=tiny_image(2))
        assert (first.usage.encoder_items, again.usage.encoder_cached_items) == (1, 1)
        assert cosine(first.vector, other) < 0.999
        text = {"type": "text", "text": "What?"}
        messages = [{"role": "user", "content": [{"type": "image"}, text]}]
        found = await engine.embed(messages, images=tiny_image(1))
        rendered = await engine.embed("USER: <image>\nWhat? ASSISTANT:", images=tiny_image(1))
        assert np.array_equal(found, rendered)
        with pytest.raises(MediaError):
            await engine.embed(prompt, images=Embeddings(np.zeros((1, 3), dtype=np.float32)))


@pytest.mark.parametrize(
    ("kinds", "settings", "kind", "is_normal"),
    [
        (POOLING, {"pooling_mode_lasttoken": True}, "last", True),
        (POOLING[:2], {"pooling_mode_mean_tokens": True}, "mean", False),
        (POOLING[:2], {}, "mean", False),
        (POOLING, {"pooling_mode": "lasttoken"}, "last", True),
        (POOLING[:1], {}, "last", False),
    ],
)
async def test_a_checkpoint_says_how_it_is_pooled(
    kinds: list[str], settings: dict[str, Any], kind: str, is_normal: bool, tmp_path: Path
) -> None:
    rows = states(embedder(tmp_path, kinds, **settings), PROMPT)
    expected = {"last": rows[-1], "mean": rows.mean(0)}[kind]
    async with running_engine(tmp_path) as engine:
        found = await engine.embed(PROMPT)
        assert cosine(found, expected) >= 1 - 1e-5
        assert np.linalg.norm(found) == pytest.approx(
            1 if is_normal else np.linalg.norm(expected), rel=1e-5
        )
        for normalize in (True, False):
            other = await engine.embed(PROMPT, pooling="last", normalize=normalize)
            length = 1 if normalize else np.linalg.norm(rows[-1])
            assert np.linalg.norm(other) == pytest.approx(length, rel=1e-5)
        with pytest.raises(InvalidRequestError, match=r"gives no text; ask it for embeddings"):
            await engine.generate(PROMPT)


async def test_what_is_done_to_vectors_elsewhere_is_refused_by_name(tmp_path: Path) -> None:
    rows = states(embedder(tmp_path, ["Transformer", "Pooling", "Dense"]), PROMPT)
    async with running_engine(tmp_path) as engine:
        with pytest.raises(InvalidRequestError, match=r"the module 'Dense'; give pooling"):
            await engine.embed(PROMPT)
        assert cosine(await engine.embed(PROMPT, pooling="mean"), rows.mean(0)) >= 1 - 1e-5
    (tmp_path / "modules.json").write_text("[{}]")
    with pytest.raises(ModelLoadError, match=r"modules.json of .* is no list of modules"):
        async with AsyncEngine.from_pretrained(tmp_path):
            pass


async def test_what_cannot_be_is_refused_before_work_starts(chat: Any) -> None:
    folder, _ = chat
    async with running_engine(folder) as engine:
        wrong: list[tuple[str, str, dict[str, Any]]] = [
            ("pooling", "must be one of last, mean, cls, not 'max'", {"pooling": "max"}),
            ("pooling", "first token, which sees no other one", {"pooling": "cls"}),
            ("normalize", "must be True, False or None", {"normalize": "yes"}),
            ("priority", "priority", {"priority": "high"}),
            ("request_id", "request_id", {"request_id": 3}),
            ("params", "belongs to AsyncEngine.generate", {"params": None}),
        ]
        for parameter, match, options in wrong:
            with pytest.raises(InvalidRequestError, match=match) as caught:
                await engine.embed(PROMPT, **options)
            assert caught.value.parameter == parameter
        with pytest.raises(InvalidRequestError, match="prompt has no tokens"):
            await engine.embed([])
        with pytest.raises(InvalidRequestError, match="documents must be a list"):
            await engine.score("a dog", "a fox")
        with pytest.raises(InvalidRequestError, match="no image"):
            await engine.embed("a dog", images=tiny_image())
        assert engine.statistics().stages["step"].count == 0


async def test_scores_of_an_embedder_are_cosines(chat: Any) -> None:
    folder, _ = chat
    documents = ["the dog", PROMPT, "a red circle", "a dog"]
    async with running_engine(folder, max_queued_requests=1, max_num_seqs=2) as engine:
        output = await engine.score_output("a dog", documents)
        one = await engine.embed("a dog")
        vectors = [await engine.embed(each) for each in documents]
        assert output.scores == pytest.approx([cosine(one, each) for each in vectors], abs=1e-6)
        assert output.scores[3] == pytest.approx(1, abs=1e-6)
        assert len(output.usages) == 5
        assert await engine.score("a dog", []) == []
        with pytest.raises(OverloadedError):
            await asyncio.gather(*(engine.embed(PROMPT) for _ in range(4)))


async def test_what_is_wrong_with_one_document_names_it(chat: Any) -> None:
    folder, _ = chat
    talk = [{"role": "king", "content": "a"}]
    long, none = "the dog " * 600, Prompt(token_ids=())
    async with running_engine(folder) as engine:
        assert engine.embedding_width == len(await engine.embed("a"))
        for query, documents, place in (
            (long, ["a"], "query"),
            ("a", ["b", "c", long, "d"], "documents[2]"),
            ("a", ["b", none], "documents[1]"),
            ("a", ["b", talk], "documents[1].messages"),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                await engine.score(query, documents)
            assert caught.value.parameter == place
            assert str(caught.value).startswith(place)
            assert isinstance(caught.value, PromptTooLongError) == (long in (query, *documents))
        with pytest.raises(InvalidRequestError) as caught:
            await engine.score("a", ["b"], priority="high")  # type: ignore[arg-type]
        assert caught.value.parameter == "priority"
        assert_at_rest(engine)


async def test_a_head_of_many_labels_gives_no_score(tmp_path: Path) -> None:
    config = hf.BertConfig(**SIZES, num_labels=3)
    save_model(tmp_path, "BertForSequenceClassification", config, pair_tokenizer())
    async with running_engine(tmp_path) as engine:
        with pytest.raises(InvalidRequestError, match="has 3 labels, and a score needs one"):
            await engine.score("a dog", ["a fox"])
        assert (await engine.embed("a dog")).shape == (48,)


async def test_pairs_have_to_be_texts(tmp_path: Path) -> None:
    config = hf.BertConfig(**SIZES, num_labels=1)
    save_model(tmp_path, "BertForSequenceClassification", config, pair_tokenizer())
    async with running_engine(tmp_path) as engine:
        for query, documents, name in (
            (PROMPT, ["a"], "query"),
            ("a", ["b", PROMPT], r"documents\[1\]"),
        ):
            with pytest.raises(InvalidRequestError, match=f"{name} must be a text"):
                await engine.score(query, documents)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="not valid Unicode"):
            await engine.score("\ud800", ["a"])
        with pytest.raises(
            PromptTooLongError, match=r"^documents\[1\] with the query has"
        ) as caught:
            await engine.score("a", ["the dog", "the dog " * 600])
        assert caught.value.parameter == "documents[1]"


@pytest.fixture(scope="module")
def blocking(chat: Any) -> Iterator[Engine]:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float64", "max_model_len": 512}
    with Engine.from_pretrained(chat[0], kv_cache_bytes=8 << 20, **options) as engine:
        yield engine


def test_code_that_does_not_await_embeds_too(chat: Any, blocking: Engine) -> None:
    rows = states(chat[1], PROMPT)
    assert cosine(blocking.embed(PROMPT), rows[-1]) >= 1 - 1e-5
    found = blocking.embed(PROMPT, pooling="mean", normalize=False, timeout=60)
    assert found == pytest.approx(rows.mean(0), rel=1e-4, abs=1e-4)
    same, other = blocking.score("a dog", ["a dog", "the fox"], timeout=60)
    assert same == pytest.approx(1, abs=1e-6) and other < 0.999
    with pytest.raises(InvalidRequestError, match="pooling must be one of"):
        blocking.embed(PROMPT, pooling="first")


async def test_an_encoder_takes_no_more_than_a_step(tmp_path: Path) -> None:
    save_model(tmp_path, "BertModel", hf.BertConfig(**SIZES))
    async with running_engine(tmp_path, max_num_batched_tokens=32) as engine:
        with pytest.raises(PromptTooLongError, match="max_num_batched_tokens is 32; raise it"):
            await engine.embed(PROMPT)
        await engine.embed(PROMPT[:32], pooling="last")
        assert (await engine.embed_output(PROMPT[:32], pooling="last")).usage.cached_tokens == 0
        assert_at_rest(engine)
