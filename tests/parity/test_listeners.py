"""Whisper and Moonshine: greedy tokens equal transformers' `generate`, in float64."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from aioengine import AsyncEngine, Embeddings, Prompt, SamplingParams
from aioengine.errors import InvalidRequestError, MediaError, ModelLoadError
from aioengine.processors.speech import whisper_prompt
from tests.parity.audio_families import RATE, resampled, sound, wav
from tests.parity.families import MAX_TOKENS
from tests.parity.listener_families import save_listener, tokenizer_for

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SOUNDS = tuple(sound(seed, seconds) for seed, seconds in enumerate((0.6, 1.0, 0.3, 0.9)))


@dataclass(frozen=True)
class Saved:
    """`asked`: decoder prompts and the clips they are asked about."""

    name: str
    folder: Path
    asked: list[tuple[str, int]]
    expected: list[tuple[int, ...]]


@torch.inference_mode()
def expect(model: Any, extractor: Any, tokenizer: Any, text: str, samples: Any) -> tuple[int, ...]:
    inputs = dict(extractor([samples], sampling_rate=RATE, return_tensors="pt"))
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    given: dict[str, Any] = {}
    if text:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        start = model.generation_config.decoder_start_token_id
        given["decoder_input_ids"] = torch.tensor([ids if ids[0] == start else [start, *ids]])
    output = model.generate(**inputs, **given, do_sample=False, max_new_tokens=MAX_TOKENS)
    tokens = output[0].tolist()
    if text:
        tokens = (
            tokens[given["decoder_input_ids"].shape[1] :] if len(tokens) > MAX_TOKENS else tokens
        )
    elif isinstance(model, hf.MoonshineForConditionalGeneration):
        tokens = tokens[1:]
    return tuple(tokens[-MAX_TOKENS:])


@pytest.fixture(scope="module", params=["whisper", "moonshine"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    tokenizer = tokenizer_for(name)
    model, extractor = save_listener(name, folder, tokenizer)
    other = whisper_prompt("de", "translate") if name == "whisper" else "tell a"
    asked = [("", 0), ("", 1), ("", 2), (other, 0), (other, 3), (other + "tell a story", 3)]
    expected = [expect(model, extractor, tokenizer, text, SOUNDS[index]) for text, index in asked]
    return Saved(name, folder, asked, expected)


def engine_for(saved: Saved, **more: Any) -> AsyncEngine:
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 8 << 20}
    return AsyncEngine.from_pretrained(saved.folder, **{**sizes, **more})


async def check_all(engine: AsyncEngine, saved: Saved) -> None:
    outputs = await asyncio.gather(
        *(
            engine.generate(text, PARAMS, audios=[(SOUNDS[index], RATE)])
            for text, index in saved.asked
        )
    )
    assert [output.token_ids for output in outputs] == saved.expected


def test_the_cases_differ(saved: Saved) -> None:
    assert len(set(saved.expected)) >= 4
    assert len({token for tokens in saved.expected for token in tokens}) >= 5


@pytest.mark.parametrize("budget", [512, 5, 1])
async def test_tokens_equal_generate(saved: Saved, budget: int) -> None:
    async with engine_for(saved, max_num_batched_tokens=budget) as engine:
        await check_all(engine, saved)
        before = engine.statistics()
        assert before.encoder_items_run == len({index for _, index in saved.asked})
        await check_all(engine, saved)
        now = engine.statistics()
        assert now.encoder_items_run == before.encoder_items_run
        assert now.kv_blocks_free == now.kv_blocks_total


async def test_without_a_prefix_cache(saved: Saved) -> None:
    async with engine_for(saved, enable_prefix_caching=False) as engine:
        await check_all(engine, saved)
        await check_all(engine, saved)


async def test_other_forms_of_a_clip(saved: Saved) -> None:
    text, index = saved.asked[0]
    (samples, expected) = SOUNDS[index], saved.expected[0]
    async with engine_for(saved) as engine:
        output = await engine.generate(text, PARAMS, audios=[wav(samples)])
        assert output.token_ids == expected
        output = await engine.generate(
            Prompt(decoder_text=text, media={"audio": [(samples, RATE)]}), PARAMS
        )
        assert output.usage.prompt_tokens == len(output.prompt_token_ids)
        (rows,) = [r for r in engine._core.loaded.runner._rows.values()][:1]
        output = await engine.generate(text, PARAMS, audios=[Embeddings(rows)])
        assert output.token_ids == expected
        fast = sound(9, 0.5, 48_000)
        one = await engine.generate(text, PARAMS, audios=[(fast, 48_000)])
        two = await engine.generate(text, PARAMS, audios=[(resampled(fast, 48_000), RATE)])
        assert one.token_ids == two.token_ids


async def test_rows_may_be_more_than_the_decoder_is_long(saved: Saved) -> None:
    expected = saved.expected[0]
    async with engine_for(saved, max_model_len=16) as engine:
        clip = (SOUNDS[0], RATE)
        assert (await engine.generate("", PARAMS, audios=[clip])).token_ids == expected
        (rows,) = engine._core.loaded.runner._rows.values()
        assert len(rows) > 16
        output = await engine.generate("", PARAMS, audios=[Embeddings(rows)])
        assert output.token_ids == expected
        only_media = Prompt(media={"audio": [clip]})
        assert (await engine.generate(only_media, PARAMS)).token_ids == expected
        with pytest.raises(MediaError, match="input_ids"):
            await engine.generate("", PARAMS, audios=[Embeddings(rows, input_ids=[0] * 9000)])


@pytest.mark.parametrize("saved", ["whisper"], indirect=True)
async def test_features_that_cannot_be_encoded_are_forgotten(saved: Saved) -> None:
    """Others are made when they are asked for again."""
    prompt = Prompt(text="", mm_processor_kwargs={"padding": "longest"})
    async with engine_for(saved) as engine:
        for _ in range(2):
            with pytest.raises(MediaError):
                await engine.generate(prompt, PARAMS, audios=[(SOUNDS[0], RATE)])
            assert engine.statistics().processor_cache_entries == 0


NO_WORDS: dict[str, Any] = {"language": None, "task": None}


@pytest.mark.parametrize("saved", ["whisper"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"language": "german"}, "<|de|><|transcribe|>"),
        ({"language": "<|de|>", "task": "translate"}, "<|de|><|translate|>"),
        (NO_WORDS, "<|en|><|transcribe|>"),
        (NO_WORDS | {"forced_decoder_ids": [[1, "<|de|>"], [2, "<|translate|>"]]},
         "<|de|><|translate|>"),
        (NO_WORDS | {"forced_decoder_ids": [[1, None], [2, "<|translate|>"]]},
         "<|en|><|translate|>"),
        ({"language": "klingon"}, None),
        ({"language": "fr"}, None),
        ({"task": "Transcribe"}, None),
    ],
)  # fmt: skip
async def test_what_a_generation_config_says(
    saved: Saved, tmp_path: Path, changes: dict[str, Any], words: str | None
) -> None:
    tokenizer = hf.AutoTokenizer.from_pretrained(saved.folder)
    folder = tmp_path / "model"
    shutil.copytree(saved.folder, folder)
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text()) | changes
    settings["forced_decoder_ids"] = [
        [at, word and tokenizer.convert_tokens_to_ids(word)]
        for at, word in settings.get("forced_decoder_ids") or ()
    ] or None
    file.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    engine = AsyncEngine.from_pretrained(folder, device="cpu", kv_cache_bytes=8 << 20)
    if words is None:
        with pytest.raises(ModelLoadError, match=r"language|task"):
            await engine.start()
        return
    async with engine:
        output = await engine.generate("", PARAMS, audios=[(SOUNDS[0], RATE)])
        asked = tokenizer(f"<|startoftranscript|>{words}<|notimestamps|>", add_special_tokens=False)
        assert list(output.prompt_token_ids) == asked["input_ids"]
        # What was said before stands before the start.
        before = [30, 31, *output.prompt_token_ids]
        output = await engine.generate(before, PARAMS, audios=[(SOUNDS[0], RATE)])
        assert list(output.prompt_token_ids) == before


async def test_what_cannot_be_heard_is_refused(saved: Saved) -> None:
    long = np.zeros(70 * RATE, np.float32)
    clip = (SOUNDS[0], RATE)
    async with engine_for(saved) as engine:
        with pytest.raises(MediaError, match="cut_windows"):
            await engine.generate("", PARAMS, audios=[(long, RATE)])
        beginning = Prompt(text="", mm_processor_kwargs={"truncation": True})
        cut = await engine.generate(beginning, PARAMS, audios=[(long, RATE)])
        most = (1 if saved.name == "whisper" else 64) * RATE
        same = await engine.generate("", PARAMS, audios=[(long[:most], RATE)])
        assert cut.token_ids == same.token_ids
        for prompt, audios in (
            ("", []),
            ("", [clip, clip]),
            (Prompt(text="a", decoder_text="b"), [clip]),
            (Prompt(encoder_text="a"), [clip]),
            (Prompt(text="", mm_processor_kwargs={"truncation": "no"}), [clip]),
        ):
            with pytest.raises(InvalidRequestError):
                await engine.generate(prompt, PARAMS, audios=audios)


@pytest.mark.parametrize("saved", ["moonshine"], indirect=True)
async def test_too_few_samples(saved: Saved) -> None:
    async with engine_for(saved) as engine:
        with pytest.raises(MediaError, match="too short"):
            await engine.generate("", PARAMS, audios=[(SOUNDS[0][:100], RATE)])
