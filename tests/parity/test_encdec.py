"""Encoder-decoder models of text: greedy tokens equal transformers' `generate`, in float64."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from aioengine import AsyncEngine, Prompt, SamplingParams
from aioengine.errors import InvalidRequestError, ModelLoadError, PromptTooLongError
from tests.parity.families import MAX_TOKENS, vocabulary
from tests.processors.conftest import make_tokenizer
from tests.support.engines import settled
from tests.support.grids import rest_is_slow
from tests.support.tiny import draw_weights

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
TEXTS = (
    "tell a story",
    "What is in the picture? There is",
    "a",
    "tell a story about colours",
    "tell a story",
)
DECODERS = (None, None, (5, 6, 7), tuple(range(30, 47)), tuple(range(30, 47)))
"""Prompts of the decoder's own; None: what `generate` starts with."""

BART = {
    "d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "max_position_embeddings": 64, "scale_embedding": True, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {
    "d_model": 48, "d_kv": 8, "num_heads": 4, "d_ff": 96, "num_layers": 3, "num_decoder_layers": 3,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "pad_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
FAMILIES: Mapping[str, Callable[[int], Any]] = {
    "bart": lambda size: hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=size, **BART)),
    "bart with a forced first token": lambda size: hf.BartForConditionalGeneration(
        hf.BartConfig(vocab_size=size, **BART, forced_bos_token_id=1)
    ),
    "mbart": lambda size: hf.MBartForConditionalGeneration(hf.MBartConfig(vocab_size=size, **BART)),
    "t5": lambda size: hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=size, **T5)),
    "t5 v1.1": lambda size: hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=size, **T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False
        )
    ),
}


@dataclass(frozen=True)
class Saved:
    """A model's folder, and what transformers makes of the prompts."""

    folder: Path
    expected: list[tuple[int, ...]]


def prompts() -> list[Prompt]:
    return [
        Prompt(text=text, decoder_token_ids=decoder)
        for text, decoder in zip(TEXTS, DECODERS, strict=True)
    ]


def options(**more: Any) -> dict[str, Any]:
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 4 << 20, "max_model_len": 60}
    return {**sizes, **more}


@torch.inference_mode()
def expect(model: Any, tokenizer: Any, text: str, decoder: tuple[int, ...] | None) -> list[int]:
    inputs = tokenizer(text, return_tensors="pt")
    start = [model.generation_config.decoder_start_token_id]
    given = {} if decoder is None else {"decoder_input_ids": torch.tensor([[*start, *decoder]])}
    output = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=False,
        max_new_tokens=MAX_TOKENS + 1, **given,
    )  # fmt: skip
    forced = model.generation_config.forced_bos_token_id
    begin = 1 + len(decoder or ()) + (forced is not None and decoder is None)
    return output[0, begin:].tolist()[:MAX_TOKENS]


def draw(model: torch.nn.Module) -> None:
    """Wider where the decoder looks at what the encoder read, and at where it stands."""
    draw_weights(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "encoder_attn." in name or "EncDecAttention" in name or "decoder.embed_pos" in name:
                weight *= 4


def save(build: Callable[[int], Any], folder: Path) -> tuple[Any, Any]:
    tokenizer = make_tokenizer("bytes")
    with torch.random.fork_rng(devices=[]):
        model = build(vocabulary(tokenizer))
    draw(model)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias = torch.linspace(-1, 1, model.final_logits_bias.shape[-1])[None]
    model.generation_config.forced_eos_token_id = None
    model = model.double().eval().requires_grad_(False)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("encdec")
    model, tokenizer = save(FAMILIES[request.param], folder)
    expected = [
        tuple(expect(model, tokenizer, text, decoder))
        for text, decoder in zip(TEXTS, DECODERS, strict=True)
    ]
    return Saved(folder, expected)


one_of_a_kind = pytest.mark.parametrize(
    "saved", rest_is_slow(FAMILIES, ["bart", "t5"]), indirect=True
)


async def check_all(engine: AsyncEngine, saved: Saved) -> None:
    """All at once."""
    outputs = await asyncio.gather(*(engine.generate(each, PARAMS) for each in prompts()))
    assert [output.token_ids for output in outputs] == saved.expected


def test_the_cases_differ(saved: Saved) -> None:
    """Else equal tokens would prove nothing."""
    assert len(set(saved.expected)) == len(saved.expected)
    assert len({token for tokens in saved.expected for token in tokens}) >= 5


@pytest.mark.parametrize("budget", [512, 5, 1])
async def test_tokens_equal_generate(saved: Saved, budget: int) -> None:
    async with AsyncEngine.from_pretrained(
        saved.folder, **options(max_num_batched_tokens=budget)
    ) as engine:
        for prompt, expected in zip(prompts(), saved.expected, strict=True):
            assert (await engine.generate(prompt, PARAMS)).token_ids == expected
        await engine.reset_caches()
        await check_all(engine, saved)
        before = engine.statistics()
        await check_all(engine, saved)  # with prefix, encoder and cross-attention caches warm
        await settled(engine)
        now = engine.statistics()
        assert now.prefix_hit_tokens > before.prefix_hit_tokens
        assert now.encoder_items_run == before.encoder_items_run
        assert now.kv_blocks_free == now.kv_blocks_total and not now.encoder_cache_referenced


@one_of_a_kind
async def test_tokens_equal_generate_without_a_prefix_cache(saved: Saved) -> None:
    async with AsyncEngine.from_pretrained(
        saved.folder, **options(enable_prefix_caching=False)
    ) as engine:
        await check_all(engine, saved)
        await check_all(engine, saved)
        assert engine.statistics().encoder_items_run == len(set(TEXTS))


@one_of_a_kind
async def test_scarce_memory_changes_nothing(saved: Saved) -> None:
    """Room for one request and a little: they are preempted and write their keys again."""
    async with AsyncEngine.from_pretrained(saved.folder, **options()) as engine:
        total = engine.statistics().kv_blocks_total
        block_bytes = (4 << 20) // total
        least = sum(-(-60 // 4) for _ in range(2))
    scarce = options(kv_cache_bytes=block_bytes * (least + 6), encoder_cache_bytes=48 * 8 * 70)
    async with AsyncEngine.from_pretrained(saved.folder, **scarce) as engine:
        for _ in range(3):
            await check_all(engine, saved)
        await settled(engine)
        now = engine.statistics()
        assert now.kv_blocks_free == now.kv_blocks_total


@one_of_a_kind
async def test_several_completions_share_what_the_encoder_read(saved: Saved) -> None:
    async with AsyncEngine.from_pretrained(saved.folder, **options()) as engine:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, n=3)
        output = await engine.generate(TEXTS[1], params)
        assert {each.token_ids for each in output.outputs} == {saved.expected[1]}
        assert engine.statistics().encoder_items_run == 1
        assert output.usage.encoder_items == 1
        tokenizer = engine.tokenizer
        encoder_ids = tokenizer(TEXTS[1])["input_ids"]
        assert output.usage.prompt_tokens == len(output.prompt_token_ids) + len(encoder_ids)
        for prompt in (
            encoder_ids,
            Prompt(encoder_text=TEXTS[1]),
            Prompt(encoder_token_ids=encoder_ids),
            Prompt(encoder_text=TEXTS[1], decoder_token_ids=output.prompt_token_ids),
            Prompt(encoder_text=TEXTS[1], cache_salt="other"),
        ):
            assert (await engine.generate(prompt, PARAMS)).token_ids == saved.expected[1]
        assert engine.statistics().encoder_items_run == 2  # the salted one is nobody else's


@one_of_a_kind
async def test_completions_share_blocks_of_cross_attention(saved: Saved) -> None:
    """Without a prefix cache, too: each has one block of its own, for its decoder prompt."""
    most = []
    for caching in (True, False):
        async with AsyncEngine.from_pretrained(
            saved.folder, **options(enable_prefix_caching=caching)
        ) as engine:
            scheduler, used = engine._core.scheduler, []
            engine.instruments.listeners.append(
                lambda _: used.append(scheduler.pool.count - scheduler.pool.num_free)  # noqa: B023
            )
            output = await engine.generate(
                TEXTS[1], SamplingParams(temperature=0, max_tokens=2, n=4)
            )
            assert {each.token_ids for each in output.outputs} == {saved.expected[1][:2]}
            rows = output.usage.prompt_tokens - len(output.prompt_token_ids)
            assert max(used) == -(-rows // 4) + 4
            most.append(max(used))
            await settled(engine)
            now = engine.statistics()
            assert now.kv_blocks_free == now.kv_blocks_total
            assert bool(now.kv_blocks_cached) == caching
    assert most[0] == most[1]


@pytest.mark.parametrize("saved", ["bart"], indirect=True)
async def test_what_makes_no_prompt_is_refused(saved: Saved) -> None:
    async with AsyncEngine.from_pretrained(saved.folder, **options()) as engine:
        for prompt, parameter in (
            (Prompt(text="a", encoder_text="b"), "prompt"),
            (Prompt(decoder_text="b"), "prompt"),
            (Prompt(encoder_text="a", encoder_token_ids=[1]), "encoder_text"),
            (Prompt(encoder_text=[1]), "encoder_text"),  # type: ignore[arg-type]
            ([{"role": "user", "content": "a"}], "prompt"),
            (Prompt(encoder_token_ids=[1, 99999]), "encoder_token_ids"),
            (Prompt(encoder_token_ids=[]), "encoder_token_ids"),
            (Prompt(text="a", decoder_token_ids=[1, 99999]), "decoder_token_ids"),
            (Prompt(text="a", decoder_token_ids=[1, 0.5]), "decoder_token_ids"),  # type: ignore[list-item]
            (Prompt(text="a", decoder_token_ids="b"), "decoder_token_ids"),
            (Prompt(text="a", decoder_text="\ud800"), "decoder_text"),
            (Prompt(encoder_text="\ud800"), "encoder_text"),
            (Prompt(), "prompt"),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                await engine.generate(prompt, PARAMS)
            assert caught.value.parameter == parameter, prompt
        with pytest.raises(PromptTooLongError, match="64 at most"):
            await engine.generate(Prompt(encoder_token_ids=[5] * 65), PARAMS)
        with pytest.raises(PromptTooLongError):
            await engine.generate(Prompt(text="a", decoder_token_ids=[5] * 60), PARAMS)
        assert (await engine.generate(TEXTS[0], PARAMS)).token_ids == saved.expected[0]


@pytest.mark.parametrize("name", ["bart", "mbart", "t5"])
async def test_a_checkpoint_of_the_bare_model(name: str, tmp_path: Path) -> None:
    """Its head is its embedding table."""
    tokenizer = make_tokenizer("bytes")
    with torch.random.fork_rng(devices=[]):
        model = FAMILIES[name](vocabulary(tokenizer))
    draw(model)
    model.generation_config.forced_eos_token_id = None
    model = model.double().eval()
    expected = [tuple(expect(model, tokenizer, text, None)) for text in TEXTS[:2]]
    bare = (model.model if hasattr(model, "model") else model).__class__
    if name == "t5":
        bare = hf.T5Model
        inner = hf.T5Model(model.config).double()
        inner.load_state_dict(model.state_dict(), strict=False)
    else:
        inner = model.model
    inner.config.architectures = [bare.__name__]
    inner.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    async with AsyncEngine.from_pretrained(tmp_path, **options()) as engine:
        for text, tokens in zip(TEXTS, expected, strict=False):
            assert (await engine.generate(text, PARAMS)).token_ids == tokens


@pytest.mark.parametrize("saved", ["bart"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_start_token_id": [2]}, None),
        ({"decoder_start_token_id": [2, 3]}, "decoder_start_token_id"),
        ({"forced_bos_token_id": "x"}, "forced_bos_token_id"),
        ({"decoder_start_token_id": 99999}, "begin with the token 99999"),
        ({"suppress_tokens": 5}, "could not be loaded"),
    ],
)
async def test_what_a_generation_config_says_of_the_start(
    saved: Saved, tmp_path: Path, changes: dict[str, Any], message: str | None
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved.folder, folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    engine = AsyncEngine.from_pretrained(folder, **options())
    if message is not None:
        with pytest.raises(ModelLoadError, match=message):
            await engine.start()
        return
    async with engine:
        assert (await engine.generate(TEXTS[0], PARAMS)).token_ids == saved.expected[0]


async def test_a_decoder_alone_takes_no_halves(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("bytes")
    config = hf.LlamaConfig(
        vocab_size=vocabulary(tokenizer), hidden_size=16, intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=2, eos_token_id=2,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config)
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    async with AsyncEngine.from_pretrained(tmp_path, **options()) as engine:
        for name, value in (("encoder_text", "a"), ("decoder_token_ids", [4])):
            with pytest.raises(InvalidRequestError, match="encoder-decoder") as caught:
                await engine.generate(Prompt(text="a", **{name: value}), PARAMS)
            assert caught.value.parameter == name
