"""Voxtral Realtime: rows of audio beside each token, of the prompt and of the answer."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers as hf
from transformers.utils import is_mistral_common_available

from aioengine import AsyncEngine, Embeddings, Prompt, SamplingParams, StructuredOutputs
from aioengine.asgi import openai_app
from aioengine.errors import InvalidRequestError, MediaError, ModelLoadError
from aioengine.models.voxtral import realtime, realtime_processing
from aioengine.processors.info import load_context
from aioengine.processors.items import AudioClip, AudioProcessorItems, MultiModalDataItems
from aioengine.processors.registry import MULTIMODAL_REGISTRY
from aioengine.types import FinishReason
from tests.parity.audio_families import (
    RATE,
    TEXT,
    Array,
    Case,
    finish,
    sound,
    vocabulary,
    wav,
    write_tekken,
)
from tests.support.tiny import draw_weights

LEFT, DELAY = 3, 2
"""Tokens of silence before the audio, and by which the text is late."""
TOKEN = 1280
"""Samples of a token."""
ALL = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
STREAMED = {
    "sampling_rate": RATE,
    "frame_rate": 12.5,
    "audio_encoding_config": {"num_mel_bins": 8, "hop_length": 160, "window_size": 400},
    "transcription_format": "streaming",
    "transcription_delay_ms": 80.0 * DELAY,
    "streaming_look_ahead_ms": 2.5,
    "streaming_look_back_ms": 52.5,
    "streaming_n_left_pad_tokens": LEFT,
}


def save(folder: Path) -> Any:
    """A tiny random model in a folder as on the hub; windows that are shorter than prompts."""
    write_tekken(folder / "tekken.json", {32: "[STREAMING_PAD]"}, audio=STREAMED)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder, mistral_format=False)
    text = hf.AutoConfig.for_model(
        "voxtral_realtime_text", vocab_size=vocabulary(tokenizer), sliding_window=9, **TEXT
    )
    audio = hf.AutoConfig.for_model(
        "voxtral_realtime_encoder",
        num_mel_bins=8, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, head_dim=8, sliding_window=7, vocab_size=8,
    )  # fmt: skip
    options = {"default_num_delay_tokens": DELAY, "tie_word_embeddings": False}
    settings = hf.VoxtralRealtimeConfig(text_config=text, audio_config=audio, **options)
    with torch.random.fork_rng(devices=[]):
        model = hf.VoxtralRealtimeForConditionalGeneration(settings)
    hf.VoxtralRealtimeFeatureExtractor(feature_size=8).save_pretrained(folder)
    model = finish(model, folder)
    # As wide as what is added to them: else a token does not depend on those before it.
    draw_weights(model.model.language_model.embed_tokens, seed=2, std=1.0)
    model.save_pretrained(folder)
    model.generation_config.eos_token_id = None
    return model


def to_inputs(folder: Path, samples: Array) -> dict[str, Any]:
    """What transformers' processor makes with mistral_common's help."""
    after = -len(samples) % TOKEN + (DELAY + 1 + 10) * TOKEN
    padded = np.pad(samples, (LEFT * TOKEN, after))
    extractor = hf.AutoFeatureExtractor.from_pretrained(folder)
    outputs = extractor([padded], sampling_rate=RATE, center=True, return_tensors="pt")
    return {
        "input_ids": torch.tensor([[1, *[32] * (LEFT + DELAY)]]),
        "input_features": outputs["input_features"],
        "num_delay_tokens": DELAY,
    }


def expect(reference: Any, folder: Path, samples: Array) -> Case:
    """All that transformers writes while it hears."""
    inputs = to_inputs(folder, samples)
    features = inputs["input_features"].to(torch.float64)
    given = {**inputs, "input_features": features}
    output = reference.generate(**given, do_sample=False, max_new_tokens=1000)
    tokens = tuple(output[0, inputs["input_ids"].shape[1] :].tolist())
    return Case("", {"audios": ((samples, RATE),)}, tokens)


@dataclass(frozen=True)
class Model:
    folder: Path
    reference: Any
    cases: tuple[Case, ...]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("voxtral-realtime")
    reference = save(folder)
    sounds = [sound(seed, seconds) for seed, seconds in enumerate((0.5, 0.161, 1.3, 0.7))]
    cases = tuple(expect(reference, folder, samples) for samples in sounds)
    return Model(folder, reference, cases)


@pytest.fixture
def sounds(model: Model) -> list[Array]:
    return [case.media["audios"][0][0] for case in model.cases]


@pytest.fixture
def expected(model: Model) -> list[tuple[int, ...]]:
    return [case.expected for case in model.cases]


def engine_for(model: Model, **options: Any) -> AsyncEngine:
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 8 << 20, "max_model_len": 256}
    return AsyncEngine.from_pretrained(model.folder, dtype="float64", **{**sizes, **options})


async def hear_all(
    engine: AsyncEngine, sounds: list[Array], params: SamplingParams = ALL
) -> list[Any]:
    return await asyncio.gather(
        *(engine.generate("", params, audios=[(each, RATE)]) for each in sounds)
    )


def test_the_answers_differ(sounds: list[Array], expected: list[tuple[int, ...]]) -> None:
    """And each is as long as its audio, whose last word may come late."""
    assert len({tokens[:8] for tokens in expected}) == len(sounds)
    assert len({token for tokens in expected for token in tokens}) > 12
    assert [len(tokens) for tokens in expected] == [-(-len(each) // TOKEN) + 10 for each in sounds]


@pytest.mark.parametrize("budget", [256, 7, 5, 1])
async def test_tokens_equal_generate(
    model: Model, sounds: list[Array], expected: list[tuple[int, ...]], budget: int
) -> None:
    async with engine_for(model, max_num_batched_tokens=budget) as engine:
        for _ in range(2):  # the second time from the caches
            outputs = await hear_all(engine, sounds)
            assert [output.token_ids for output in outputs] == expected
            assert {output.outputs[0].finish_reason for output in outputs} == {FinishReason.STOP}
        now = engine.statistics()
        assert now.kv_blocks_free == now.kv_blocks_total and now.encoder_items_run == len(sounds)
        assert now.model_impl == "native"


@pytest.mark.parametrize("scarce", ["blocks", "rows"])
async def test_scarce_memory(
    model: Model, sounds: list[Array], expected: list[tuple[int, ...]], scarce: str
) -> None:
    """Requests are preempted, or rows evicted that somebody's answer still takes."""
    row_bytes = 8 * model.reference.config.text_config.hidden_size
    limits = {
        "blocks": {"kv_cache_bytes": 13 * 12 * row_bytes},
        "rows": {"encoder_cache_bytes": 45 * row_bytes},
    }
    async with engine_for(model, max_model_len=40, **limits[scarce]) as engine:
        for _ in range(2):
            outputs = await hear_all(engine, sounds)
            assert [output.token_ids for output in outputs] == expected
        now = engine.statistics()
        assert now.preemptions if scarce == "blocks" else now.encoder_items_run > len(sounds)
        assert now.kv_blocks_free == now.kv_blocks_total


async def test_several_answers_and_their_ends(
    model: Model, sounds: list[Array], expected: list[tuple[int, ...]]
) -> None:
    """An answer that `max_tokens` or an EOS ends is cut off, or over, before the audio is."""
    audios = [(sounds[2], RATE)]
    async with engine_for(model) as engine:
        three = SamplingParams(temperature=1, seed=1, n=3, max_tokens=None, ignore_eos=True)
        output = await engine.generate("", three, audios=audios)
        assert {len(each.token_ids) for each in output.outputs} == {len(expected[2])}
        assert len({each.token_ids for each in output.outputs}) == 3
        for num_tokens, reason in (
            (len(expected[2]) + 1, FinishReason.STOP),
            (len(expected[2]), FinishReason.STOP),
            (len(expected[2]) - 1, FinishReason.LENGTH),
        ):
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            (found,) = (await engine.generate("", params, audios=audios)).outputs
            assert found.token_ids == expected[2][:num_tokens]
            assert found.finish_reason == reason
        stopped = SamplingParams(temperature=0, max_tokens=None, stop_token_ids=[expected[2][5]])
        (found,) = (await engine.generate("", stopped, audios=audios)).outputs
        assert found.token_ids == expected[2][: expected[2].index(expected[2][5]) + 1]
        assert found.stop_reason == expected[2][5]


async def test_whatever_a_prompt_may_be(
    model: Model, sounds: list[Array], expected: list[tuple[int, ...]]
) -> None:
    """Nothing, the first token, or all of them: but never text."""
    audios = [(sounds[0], RATE)]
    async with engine_for(model) as engine:
        whole = [1, *[32] * (LEFT + DELAY)]
        for prompt in ("", [1], whole, "<s>"):
            output = await engine.generate(prompt, ALL, audios=audios)
            assert output.token_ids == expected[0]
            assert list(output.prompt_token_ids) == whole
        for prompt in ("hello", [1, 50], [*whole, 50], whole[:-1], [50]):
            with pytest.raises(InvalidRequestError, match="reads no text"):
                await engine.generate(prompt, ALL, audios=audios)
        for prompt in ("", whole):
            with pytest.raises(InvalidRequestError, match="give an empty prompt and one audio"):
                await engine.generate(prompt, ALL)
        with pytest.raises(InvalidRequestError, match="at most 1 "):
            await engine.generate("", ALL, audios=audios * 2)
        with pytest.raises(InvalidRequestError, match="mm_processor_kwargs"):
            await engine.generate(
                Prompt(text="", media={"audio": audios}, mm_processor_kwargs={"a": 1}), ALL
            )
        assert engine.statistics().encoder_items_run == 1


async def test_rows_that_were_computed_elsewhere(
    model: Model, sounds: list[Array], expected: list[tuple[int, ...]]
) -> None:
    async with engine_for(model) as engine:
        await hear_all(engine, sounds[:1])
        (rows,) = engine._core.loaded.runner._rows.values()
        output = await engine.generate("", ALL, audios=[Embeddings(rows)])
        assert output.token_ids == expected[0]
        with pytest.raises(MediaError, match=r"audios\[0\] has no row for an answer"):
            await engine.generate("", ALL, audios=[Embeddings(rows[: 1 + LEFT + DELAY])])


async def test_long_audio_in_pieces(
    model: Model, sounds: list[Array], expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The tower's attention keeps what a piece sees of those before it."""
    monkeypatch.setattr(realtime, "FRAMES_AT_ONCE", 20)
    async with engine_for(model) as engine:
        outputs = await hear_all(engine, sounds)
        assert [output.token_ids for output in outputs] == expected


async def test_transcription_endpoint(
    model: Model, sounds: list[Array], expected: list[tuple[int, ...]]
) -> None:
    async with engine_for(model) as engine:
        transport = httpx.ASGITransport(app=openai_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://local") as client:
            url, files = "/audio/transcriptions", {"file": ("a.wav", wav(sounds[0]))}
            answer = await client.post(url, files=files)
            params = SamplingParams(temperature=0, max_tokens=None)
            output = await engine.generate("", params, audios=[wav(sounds[0])])
            assert answer.json()["text"] == output.outputs[0].text.strip() != ""
            for field in ("language", "prompt"):
                refused = await client.post(url, files=files, data={field: "de"})
                assert refused.status_code == 400
                assert refused.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (None, "KeyError: 'audio'"),
        ([], "does not describe audio that is streamed"),
        ({"transcription_format": "instruct"}, "does not describe audio that is streamed"),
        ({"transcription_delay_ms": 100}, "transcription_delay_ms is no number of tokens"),
        ({"transcription_delay_ms": -80}, "transcription_delay_ms is no number of tokens"),
        ({"transcription_delay_ms": 1e300}, "transcription_delay_ms is no number of tokens"),
        ({"transcription_delay_ms": float("nan")}, "ValueError"),
        ({"transcription_delay_ms": "480"}, "TypeError"),
        ({"transcription_delay_ms": 240}, "delays the text by 3 tokens, its config by 2"),
        ({"streaming_n_left_pad_tokens": 10**12}, "streaming_n_left_pad_tokens is no number"),
        ({"streaming_n_left_pad_tokens": None}, "streaming_n_left_pad_tokens is no number"),
        ({"streaming_n_left_pad_tokens": 4000}, "all of its 2048 positions"),
        ({"sampling_rate": 8000}, "sampling_rate is 8000, and 16000 in the feature extractor"),
        ({"frame_rate": 0}, "ZeroDivisionError"),
        (
            {"frame_rate": 10, "transcription_delay_ms": 200},
            "for 10 frames of audio, its config for 8",
        ),
    ],
)
def test_settings_of_no_use_are_refused(
    model: Model, tmp_path: Path, changes: Any, reason: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model.folder, folder)
    tekken = json.loads((folder / "tekken.json").read_text())
    if isinstance(changes, dict):
        tekken["audio"] |= changes
    elif changes is None:
        del tekken["audio"]
    else:
        tekken["audio"] = changes
    (folder / "tekken.json").write_text(json.dumps(tekken))
    config = hf.AutoConfig.from_pretrained(folder)
    with pytest.raises(ModelLoadError, match=reason):
        context = load_context(
            folder, hf_config=config, info=realtime_processing.VoxtralRealtimeInfo
        )
        MULTIMODAL_REGISTRY.create_processor(realtime.VoxtralRealtime, context)


@pytest.mark.skipif(not is_mistral_common_available(), reason="mistral_common is missing")
def test_prompts_and_features_are_those_of_transformers(model: Model, tmp_path: Path) -> None:
    """`make torchvision-test` has mistral_common, which takes audio through files of 16 bits."""
    from mistral_common.tokens.tokenizers.base import SpecialTokens

    folder = tmp_path / "model"
    shutil.copytree(model.folder, folder)
    tekken = json.loads((folder / "tekken.json").read_text())
    tekken["config"]["version"] = "v13"
    known = {each["token_str"] for each in tekken["special_tokens"]}
    missing = [each.value for each in SpecialTokens if each.value not in known]
    free = [each for each in tekken["special_tokens"] if each["token_str"].startswith("<SPECIAL_")]
    for each, name in zip(free, missing, strict=False):
        each["token_str"] = name
    (folder / "tekken.json").write_text(json.dumps(tekken))
    extractor = hf.AutoFeatureExtractor.from_pretrained(folder)
    theirs = hf.VoxtralRealtimeProcessor(extractor, hf.AutoTokenizer.from_pretrained(folder))
    config = hf.AutoConfig.from_pretrained(folder)
    context = load_context(folder, hf_config=config, info=realtime_processing.VoxtralRealtimeInfo)
    ours = MULTIMODAL_REGISTRY.create_processor(realtime.VoxtralRealtime, context)
    for length in (1, 159, 160, 1279, 1280, 1281, 8000, 20001, 48123):
        samples = (sound(length, 4.0)[:length] * 20_000).astype(np.int16) / np.float32(32768)
        expected = theirs(samples, return_tensors="pt")
        items = MultiModalDataItems({"audio": AudioProcessorItems([AudioClip(samples, RATE)])})
        layout = ours.layout("", items, {})
        assert [layout.token_ids] == expected["input_ids"].tolist()
        (item,) = ours.process(items, {})["audio"]
        assert torch.equal(item["input_features"], expected["input_features"][0])
        assert expected["num_delay_tokens"] == DELAY
        (placed,) = layout.placeholders["audio"]
        assert placed.num_embeds * 8 == expected["input_features"].shape[-1]


@pytest.mark.parametrize("number", [10**12, 3, -1, "40", None])
def test_a_tekken_of_too_many_tokens_is_refused(model: Model, tmp_path: Path, number: Any) -> None:
    """transformers would make a name for each."""
    folder = tmp_path / "model"
    shutil.copytree(model.folder, folder)
    tekken = json.loads((folder / "tekken.json").read_text())
    tekken["config"]["default_num_special_tokens"] = number
    (folder / "tekken.json").write_text(json.dumps(tekken))
    config = hf.AutoConfig.from_pretrained(folder)
    with pytest.raises(ModelLoadError, match="names 40 special tokens and says that there are"):
        load_context(folder, hf_config=config, info=realtime_processing.VoxtralRealtimeInfo)


def test_a_limit_that_leaves_nothing_to_hear_is_refused(model: Model) -> None:
    context = load_context(
        model.folder,
        hf_config=hf.AutoConfig.from_pretrained(model.folder),
        info=realtime_processing.VoxtralRealtimeInfo,
        limit_mm_per_prompt={"audio": 0},
    )
    with pytest.raises(ModelLoadError, match="limit_mm_per_prompt allows none"):
        MULTIMODAL_REGISTRY.create_processor(realtime.VoxtralRealtime, context)


@pytest.mark.parametrize("part", ["audio_config", "text_config"])
def test_windows_that_see_nothing_are_refused(model: Model, part: str) -> None:
    config = hf.AutoConfig.from_pretrained(model.folder)
    getattr(config, part).sliding_window = 1
    context = load_context(
        model.folder, hf_config=config, info=realtime_processing.VoxtralRealtimeInfo
    )
    with pytest.raises(ModelLoadError, match="a sliding_window of 1 sees nothing"):
        MULTIMODAL_REGISTRY.create_processor(realtime.VoxtralRealtime, context)


async def test_long_audio_is_transcribed_in_windows(model: Model) -> None:
    """Of as much as the engine has room for: none of it is lost."""
    samples = sound(9, 6.1)
    async with engine_for(model, max_model_len=48) as engine:
        window, rate = engine.processor.get_audio_window()
        assert (window, rate) == ((48 - LEFT - DELAY - 11) * TOKEN, RATE)
        transport = httpx.ASGITransport(app=openai_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://local") as client:
            files = {"file": ("a.wav", wav(samples))}
            answer = await client.post("/audio/transcriptions", files=files)
        assert answer.status_code == 200, answer.text
        assert engine.statistics().encoder_items_run == 3


async def test_what_a_grammar_wants_more_of_was_cut_off(model: Model) -> None:
    structured = StructuredOutputs(regex="[a-z]{200}")
    params = SamplingParams(temperature=0, max_tokens=None, structured_outputs=structured)
    async with engine_for(model) as engine:
        output = await engine.generate("", params, audios=model.cases[0].media["audios"])
        assert output.outputs[0].finish_reason == FinishReason.LENGTH
        own = SamplingParams(temperature=0, max_tokens=None, logits_processors=[lambda _, row: row])
        output = await engine.generate("", own, audios=model.cases[0].media["audios"])
        assert output.outputs[0].finish_reason == FinishReason.STOP
