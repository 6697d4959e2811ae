"""Families that hear: their tokens equal transformers', however prompts are cut and sounds come."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from aioengine import AsyncEngine, Embeddings, MediaConfig, Prompt, SamplingParams
from aioengine.errors import InvalidRequestError, MediaError, ModelLoadError
from aioengine.execution.memory_profiler import largest_items
from aioengine.models.runtime.registry import resolve
from aioengine.models.runtime.transformers_model import TransformersModel
from aioengine.processors.info import load_context
from aioengine.processors.items import (
    AudioClip,
    AudioHeader,
    AudioProcessorItems,
    MultiModalDataItems,
)
from aioengine.processors.registry import MULTIMODAL_REGISTRY
from tests.parity.audio_families import (
    FAMILIES,
    RATE,
    Case,
    Family,
    ToInputs,
    cases,
    resampled,
    sound,
    wav,
)
from tests.parity.families import MAX_TOKENS, greedy

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


@dataclass(frozen=True)
class Model:
    name: str
    folder: Path
    family: Family
    reference: Any
    to_inputs: ToInputs
    cases: tuple[Case, ...]

    def expect(self, text: str, *sounds: Any) -> tuple[int, ...]:
        """The tokens of transformers for sounds at its own rate."""
        return greedy(self.reference, self.to_inputs(text, sounds))


def engine_for(folder: Path, **options: Any) -> AsyncEngine:
    """Small blocks, so that few tokens make many."""
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 8 << 20, "max_model_len": 1024}
    return AsyncEngine.from_pretrained(folder, **{**sizes, **options})


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    reference, to_inputs = family.save(folder)
    made = cases(family, reference, to_inputs)
    return Model(request.param, folder, family, reference, to_inputs, made)


@pytest.fixture
def loaded(model: Model) -> tuple[TransformersModel, Any]:
    """The model and its processor, without an engine."""
    hf_config = hf.AutoConfig.from_pretrained(model.folder)
    model_class = resolve(hf_config.architectures)
    context = load_context(model.folder, hf_config=hf_config)
    processor = MULTIMODAL_REGISTRY.create_processor(model_class, context)
    options: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    return model_class.load(model.folder, hf_config=hf_config, **options), processor


async def check_all(engine: AsyncEngine, cases: tuple[Case, ...]) -> None:
    """All at once."""
    outputs = await asyncio.gather(
        *(engine.generate(case.text, PARAMS, **case.media) for case in cases)
    )
    for case, output in zip(cases, outputs, strict=True):
        case.check(output.token_ids)


def test_the_cases_differ(model: Model) -> None:
    """Else equal tokens would prove nothing."""
    assert len({case.expected for case in model.cases}) == len(model.cases)
    assert len({token for case in model.cases for token in case.expected}) > 6


@pytest.mark.parametrize("budget", [1024, 13, 5, 1])
async def test_tokens_equal_generate(model: Model, budget: int) -> None:
    async with engine_for(model.folder, max_num_batched_tokens=budget) as engine:
        for case in model.cases[:2]:
            output = await engine.generate(case.text, PARAMS, **case.media)
            case.check(output.token_ids)
        await engine.reset_caches()
        await check_all(engine, model.cases)
        await check_all(engine, model.cases)  # with prefix and encoder caches warm
        now = engine.statistics()
        assert now.prefix_hit_tokens > 0 and now.kv_blocks_free == now.kv_blocks_total


async def test_tokens_equal_generate_without_a_prefix_cache(model: Model) -> None:
    options = {"max_num_batched_tokens": 31, "enable_prefix_caching": False}
    async with engine_for(model.folder, **options) as engine:
        await check_all(engine, model.cases)
        await check_all(engine, model.cases)  # with the encoder cache warm
        assert engine.statistics().encoder_items_run == 3


async def test_other_rates_and_files(model: Model) -> None:
    case, text = model.cases[0], model.cases[0].text
    (samples, _), *_ = case.media["audios"]
    seconds = 1.4 * model.family.window_s
    async with engine_for(model.folder) as engine:
        for given in (wav(samples), (np.stack([samples, samples]), RATE)):
            case.check((await engine.generate(text, PARAMS, audios=[given])).token_ids)
        for rate in (8_000, 44_100):
            other = sound(rate, seconds, rate)
            expected = model.expect(text, resampled(other, rate))
            for given in ((other, rate), wav(other, rate)):
                output = await engine.generate(text, PARAMS, audios=[given])
                assert output.token_ids == expected


async def test_every_sound_is_heard(model: Model) -> None:
    """Other tokens for each, and for the same in another order."""
    text, window = model.cases[3].text, model.family.window_s
    sounds = [(sound(seed, window * part), RATE) for seed, part in enumerate((0.5, 1, 1.6))]
    async with engine_for(model.folder) as engine:
        pairs = [(a, b) for a in sounds for b in sounds]
        outputs = await asyncio.gather(
            *(engine.generate(text, PARAMS, audios=pair) for pair in pairs)
        )
        assert engine.statistics().encoder_items_run == 3
    assert len({output.token_ids for output in outputs}) >= 7


async def test_rows_that_were_computed_elsewhere(model: Model) -> None:
    case = model.cases[0]
    async with engine_for(model.folder) as engine:
        await engine.generate(case.text, PARAMS, **case.media)
        (rows,) = engine._core.loaded.runner._rows.values()
    async with engine_for(model.folder) as engine:
        output = await engine.generate(case.text, PARAMS, audios=[Embeddings(rows)])
        case.check(output.token_ids)
        both = (Embeddings(rows), model.cases[1].media["audios"][0])
        output = await engine.generate(model.cases[3].text, PARAMS, audios=both)
        model.cases[3].check(output.token_ids)


# What a conversation becomes; of the second, mistral_common 1.13.1 makes the same token ids.
CHATS = {
    "qwen2-audio": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\nAudio 1: <|audio_bos|>*<|audio_eos|>\nthe sound?<|im_end|>\n"
    "<|im_start|>assistant\nso the<|im_end|>\n<|im_start|>user\nwhy the<|im_end|>\n"
    "<|im_start|>assistant\n",
    "voxtral": "<s>[INST][BEGIN_AUDIO]*the sound?[/INST]so the</s>[INST]why the[/INST]",
}


async def test_chat(model: Model) -> None:
    given = model.cases[1].media["audios"][0]
    pad = "[AUDIO]" if model.name == "voxtral" else "<|AUDIO|>"
    parts = [{"type": "audio", "audio": given}, {"type": "text", "text": "the sound?"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "so the"},
        {"role": "user", "content": "why the"},
    ]
    async with engine_for(model.folder) as engine:
        output = await engine.generate(messages, PARAMS)
        text = engine.tokenizer.decode(output.prompt_token_ids).removeprefix("<s>")
        wanted = CHATS[model.name].replace("*", pad * text.count(pad))
        assert text == wanted.removeprefix("<s>")
        expanded = await engine.generate(output.prompt_token_ids, PARAMS, audios=[given])
        assert expanded.token_ids == output.token_ids
        typed = [parts[0], {"type": "text", "text": pad}]
        output = await engine.generate([{"role": "user", "content": typed}], PARAMS)
        assert output.usage.encoder_items == 1  # what a user types is text


def items_of(*lengths: int) -> MultiModalDataItems:
    clips = [AudioClip(sound(n, 6.0)[:n], RATE) for n in lengths]
    return MultiModalDataItems({"audio": AudioProcessorItems(clips)})


def test_rows_are_known_from_the_header(model: Model, loaded: tuple[Any, Any]) -> None:
    """And verified when the clip is processed."""
    _, processor = loaded
    window = int(model.family.window_s * RATE)
    lengths = (321, 480, 481, 640, 641, 960, 961, window - 1, window, window + 1, 3 * window + 5)
    for length in lengths:
        items, place = items_of(length), model.family.place
        header = AudioProcessorItems([AudioHeader(length, RATE)])
        layout = processor.layout(place, MultiModalDataItems({"audio": header}), {})
        outputs = processor.process(items, {})
        processor.verify_layout(layout, items, outputs, {})
        (placed,) = layout.placeholders["audio"]
        assert placed.num_embeds <= processor.info.get_mm_max_tokens_per_item(1024, {})["audio"]
    with pytest.raises(MediaError, match="promised"):
        processor.verify_layout(layout, items_of(321), processor.process(items_of(321), {}), {})


def test_memory_is_reserved_for_the_length_that_is_configured(model: Model) -> None:
    """Be it shorter than the model's window, or as long as several."""
    hf_config = hf.AutoConfig.from_pretrained(model.folder)
    window = int(model.family.window_s * RATE)
    for length in (window // 2, 10 * window):
        limits = {"audio": {"length": length}}
        context = load_context(model.folder, hf_config=hf_config, limit_mm_per_prompt=limits)
        model_class = resolve(hf_config.architectures)
        processor = MULTIMODAL_REGISTRY.create_processor(model_class, context)
        layout = processor.layout(model.family.place, items_of(length), {})
        (placed,) = layout.placeholders["audio"]
        assert largest_items(processor, 1024) == {"audio": placed.num_embeds}


def test_neighbours_in_a_batch_change_nothing(model: Model, loaded: tuple[Any, Any]) -> None:
    runner, processor = loaded
    window = int(model.family.window_s * RATE)
    lengths = (400, window // 3, window, 2 * window + 9, window - 160, 9 * window + 9)
    items = processor.process(items_of(*lengths), {})["audio"]
    with torch.inference_mode():
        together = runner.encode("audio", items)
        for item, length, rows in zip(items, lengths, together, strict=True):
            (alone,) = runner.encode("audio", [item])
            assert len(rows) == processor.info.get_num_audio_tokens(num_samples=length)
            torch.testing.assert_close(rows, alone, rtol=1e-12, atol=1e-12)


async def test_what_cannot_be_heard_is_refused(model: Model) -> None:
    text = model.cases[0].text
    (given,) = model.cases[0].media["audios"]
    async with engine_for(model.folder, media=MediaConfig(max_audio_s=2.0)) as engine:
        with pytest.raises(MediaError, match="max_audio_s"):
            await engine.generate(text, PARAMS, audios=[(sound(1, 2.1), RATE)])
        with pytest.raises(InvalidRequestError):
            await engine.generate(text, PARAMS, audios=[given, given])
        for options in ({"audio_kwargs": {"max_length": 40}}, {"truncation": False}):
            prompt = Prompt(
                text=text,
                media={"audio": [(sound(1, 1.9), RATE)]},
                mm_processor_kwargs=options,
            )
            with pytest.raises(InvalidRequestError, match="mm_processor_kwargs"):
                await engine.generate(prompt, PARAMS)
        model.cases[0].check((await engine.generate(text, PARAMS, audios=[given])).token_ids)
        assert engine.statistics().encoder_items_run == 1


@pytest.mark.parametrize("model", ["qwen2-audio"], indirect=True)
async def test_too_short_for_a_row(model: Model) -> None:
    async with engine_for(model.folder) as engine:
        with pytest.raises(MediaError, match=r"audios\[1\] is too small"):
            sounds = [(sound(1, 0.5), RATE), (sound(1, 0.02), RATE)]
            await engine.generate(model.cases[3].text, PARAMS, audios=sounds)


@pytest.mark.parametrize("model", ["voxtral"], indirect=True)
async def test_more_chunks_than_the_tower_takes_at_once(model: Model) -> None:
    text, samples = model.cases[0].text, sound(5, 9.3 * model.family.window_s)
    async with engine_for(model.folder) as engine:
        output = await engine.generate(text, PARAMS, audios=[(samples, RATE)])
        assert output.token_ids == model.expect(text, samples)


@pytest.mark.parametrize("model", ["voxtral"], indirect=True)
async def test_options_that_there_are_none_of(model: Model) -> None:
    with pytest.raises(ModelLoadError, match="mm_processor_kwargs"):
        async with engine_for(model.folder, mm_processor_kwargs={"padding": True}):
            pass
