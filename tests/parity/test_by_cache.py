"""Decoders that are run by transformers' cache interface: greedy tokens equal `generate`.

Beside others, preempted, several of a prompt, in 32 and 16 bits. Chunks of several sizes and the
prefix cache are tried with more architectures by `test_sweep`.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from aioengine import AsyncEngine, SamplingParams
from aioengine.engine.loading import special_tokens
from aioengine.errors import InvalidRequestError, ModelLoadError
from aioengine.models.by_cache import calls
from aioengine.models.runtime import probe
from aioengine.models.text import TextModel
from tests.parity.families import MAX_TOKENS, TEXT, save_text
from tests.parity.test_text_families import build_chunked
from tests.support.engines import running_engine

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
PROMPTS = (
    "tell a story", "What is in the picture? There is", "a", "tell a story about colours",
    "What is in the picture? There is a long text here that goes on and on, and ends.",
)  # fmt: skip
SIZES: dict[str, Any] = {"block_size": 4, "kv_cache_bytes": 4 << 20, "max_model_len": 200}
COMMON = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BART = {
    "d_model": 48, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64,
    "max_position_embeddings": 256, "is_decoder": True, "is_encoder_decoder": False,
    "forced_eos_token_id": None,
}  # fmt: skip
MODELS = {
    # Its biases by distance are made for a whole sequence.
    "bloom": lambda s: hf.BloomForCausalLM(
        hf.BloomConfig(vocab_size=s["vocab_size"], hidden_size=48, n_layer=3, n_head=4, **COMMON)
    ),
    # Counts positions from the length of its cache alone, so that nothing can be padded.
    "bart": lambda s: hf.BartForCausalLM(
        hf.BartConfig(vocab_size=s["vocab_size"], **BART, **COMMON)
    ),
}
Saved = tuple[Path, list[tuple[int, ...]]]


def save(name: str, folder: Path) -> Saved:
    return folder, save_text(MODELS[name], folder, PROMPTS)


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The model's folder, and what transformers makes of the prompts."""
    return save(request.param, tmp_path_factory.mktemp(request.param))


async def ask(engine: AsyncEngine, prompts: Any = PROMPTS) -> list[tuple[int, ...]]:
    outputs = await asyncio.gather(*(engine.generate(each, PARAMS) for each in prompts))
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("budget", [512, 5])
async def test_tokens_equal_generate(saved: Saved, budget: int) -> None:
    folder, expected = saved
    assert len(set(expected)) >= 3
    options = {**SIZES, "dtype": "auto", "max_num_batched_tokens": budget}
    async with running_engine(folder, **options) as engine:
        for _ in range(2):  # with a cold and with a warm prefix cache
            assert await ask(engine) == expected
        assert engine.statistics().prefix_hit_tokens > 0


async def test_preempted_requests_go_on(saved: Saved) -> None:
    folder, expected = saved
    num_layers = 3 if "bloom" in str(folder) else 2
    block = 2 * 48 * 8 * 4 * num_layers
    options = {
        **SIZES, "dtype": "auto", "kv_cache_bytes": 24 * block, "max_model_len": 96,
        "max_num_seqs": 16, "enable_prefix_caching": False,
    }  # fmt: skip
    chosen = [*[2] * 16, 0, 1, 3]
    async with running_engine(folder, **options) as engine:
        for _ in range(2):
            found = await ask(engine, [PROMPTS[index] for index in chosen])
            assert found == [expected[index] for index in chosen]
        assert engine.statistics().preemptions > 0


async def test_completions_of_one_prompt(saved: Saved) -> None:
    folder, expected = saved
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, n=3)
    async with running_engine(folder, **SIZES, dtype="auto") as engine:
        output = await engine.generate(PROMPTS[1], params)
    assert [each.token_ids for each in output.outputs] == [expected[1]] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_fused_layers_and_narrow_pages(saved: Saved, dtype: str) -> None:
    """The trial at load compares logits; here nothing dies, and all answers are whole."""
    folder, _ = saved
    options = {**SIZES, "dtype": dtype, "kv_cache_dtype": "int8"}
    async with running_engine(folder, **options) as engine:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        outputs = await asyncio.gather(*(engine.generate(each, params) for each in PROMPTS))
    assert [len(each.token_ids) for each in outputs] == [MAX_TOKENS] * len(PROMPTS)


def test_what_is_padded(saved: Saved) -> None:
    folder, _ = saved
    config = hf.AutoConfig.from_pretrained(folder)
    model = TextModel.load(folder, hf_config=config, dtype=torch.float64, device="cpu")
    slot = getattr(model.decoder(), calls._SLOT)
    assert slot.pads == (config.model_type == "bloom")


async def test_where_padding_would_count_nothing_is_padded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4 counts its cache's tokens, which changes one where there are many."""
    monkeypatch.setattr(TextModel, "layers", TextModel.layers_by_cache)
    expected = save_text(build_chunked, tmp_path, PROMPTS)
    async with running_engine(tmp_path, **SIZES, dtype="auto") as engine:
        for _ in range(2):
            assert await ask(engine) == expected


def test_what_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    """MegatronBERT without `is_decoder`: its attention asks no interface, which would show it."""
    sizes = {name: TEXT[name] for name in ("hidden_size", "intermediate_size")}
    config = hf.MegatronBertConfig(
        vocab_size=99, num_hidden_layers=2, num_attention_heads=4, is_decoder=False, **sizes
    )
    config.architectures = ["MegatronBertForCausalLM"]
    model = hf.MegatronBertForCausalLM(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError):
        TextModel.load(tmp_path, hf_config=config, dtype=torch.float32, device="cpu")


def save_doge(folder: Path) -> list[tuple[int, ...]]:
    """Keys have biases that follow from values, which attention is given as a mask."""
    return save_text(lambda s: hf.DogeForCausalLM(hf.DogeConfig(**s)), folder, PROMPTS)


async def test_masks_that_follow_from_values_are_seen_without_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = save_doge(tmp_path)
    async with running_engine(tmp_path, **SIZES, dtype="auto", check_model=False) as engine:
        assert await ask(engine) == expected
    assert "DogeForCausalLM has no class of its own here and is run untried" in caplog.text


async def test_what_fails_on_a_flat_batch_is_tried_by_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where only numbers show it; a later start knows it by its verdict."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe._Recorder, "check_tensors", lambda *_: None)
    expected = save_doge(tmp_path / "model")
    said = []
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO, "aioengine"):
            async with running_engine(tmp_path / "model", **SIZES, dtype="auto") as engine:
                assert await ask(engine) == expected
        said.append([record.getMessage() for record in caplog.records])
    assert all(any("by its cache" in line for line in lines) for lines in said)
    tried = [any("on a flat batch" in line for line in lines) for lines in said]
    assert tried == [True, False]


def tiny_roberta() -> hf.RobertaConfig:
    sizes = {name: TEXT[name] for name in ("hidden_size", "intermediate_size")}
    return hf.RobertaConfig(
        vocab_size=99, num_hidden_layers=1, num_attention_heads=4, is_decoder=True, pad_token_id=1,
        **sizes,
    )  # fmt: skip


def test_padding_that_has_a_position_of_its_own_is_refused() -> None:
    model = TextModel.around(hf.RobertaForCausalLM(tiny_roberta()))
    assert model.first_position == 2
    assert model.prompt_inputs([5, 6, 7]) is None
    with pytest.raises(InvalidRequestError, match="padding token 1"):
        model.prompt_inputs([5, 1, 7])


def test_padding_that_has_a_position_of_its_own_is_never_said() -> None:
    """Tokens behind it have positions in transformers' forward that no counting finds."""
    model = TextModel.around(hf.RobertaForCausalLM(tiny_roberta()))
    assert special_tokens.suppressed(model, frozenset([2])) == (1,)
    with pytest.raises(ModelLoadError, match="token 1 is both padding"):
        special_tokens.suppressed(model, frozenset([1, 2]))
    plain = TextModel.around(hf.BertLMHeadModel(hf.BertConfig(vocab_size=99, is_decoder=True)))
    assert special_tokens.suppressed(plain, frozenset()) == ()


def test_attention_that_only_long_prompts_change_is_refused() -> None:
    sizes = {name: TEXT[name] for name in ("hidden_size", "intermediate_size")}
    config = hf.BigBirdConfig(
        vocab_size=99, num_hidden_layers=1, num_attention_heads=4, is_decoder=True, **sizes
    )
    config.architectures = ["BigBirdForCausalLM"]
    with pytest.raises(ModelLoadError, match="original_full"):
        TextModel.probe(config)
    config.attention_type = "original_full"
    assert len(TextModel.probe(config)) == 1
