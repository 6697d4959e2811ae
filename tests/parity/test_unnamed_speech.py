"""Encoder-decoders of audio that no class here names: as `generate`, or refused in words."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from aioengine import AsyncEngine, Embeddings, SamplingParams
from aioengine.errors import InvalidRequestError, MediaError, ModelLoadError
from aioengine.models.encdec.hearing import Staircase
from aioengine.models.encdec.speech import SpeechToText
from aioengine.models.runtime.registry import choose
from aioengine.processors.items import AudioProcessorItems, MultiModalDataItems, noise_clip
from tests.parity.families import MAX_TOKENS, save_folder
from tests.parity.sweep import engine_options, expected_of, make
from tests.parity.sweep_models import RATE, Prompt, draw
from tests.support.engines import settled
from tests.support.grids import rest_is_slow
from tests.support.versions import skip_up_to

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SIZES = engine_options(takes_media=True) | {
    "limit_mm_per_prompt": {"audio": {"count": 1, "length": RATE}}
}
UNNAMED = {
    "CanaryForConditionalGeneration": (160, 1280),
    "CohereAsrForConditionalGeneration": (160, 1280),
    "MoonshineStreamingForConditionalGeneration": (1, 320),
    "SeamlessM4TForSpeechToText": (240, 2560),
    "SeamlessM4Tv2ForSpeechToText": (240, 2560),
    "Speech2TextForConditionalGeneration": (400, 640),
    "SpeechEncoderDecoderModel": (400, 320),
}
"""Architecture -> samples that make a row, and how many more make one more."""
LONGEST = {
    "CohereAsrForConditionalGeneration": 35 * RATE,  # what is longer is cut to pieces
    "MoonshineStreamingForConditionalGeneration": 2048 * 320,  # rows that its config knows
}
"""Architecture -> samples of the longest audio, where that is not the engine's own limit."""


@dataclass(frozen=True)
class Saved:
    """A model's folder, and what transformers makes of the prompts."""

    name: str
    folder: Path
    prompts: Sequence[Prompt]


@pytest.fixture(scope="module", params=UNNAMED)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    skip_up_to(5, 22, "the sweep is of the newest transformers")
    name, folder = request.param, tmp_path_factory.mktemp("speech")
    model, processor, medium = make(name)
    assert medium == "audio"
    draw(model, 0.15)
    save_folder(model, processor, folder)
    prompts = expected_of(model, processor, name, medium, folder)
    assert len({len(each.media["audios"][0][0]) for each in prompts}) == 3
    return Saved(name, folder, prompts)


async def check_all(engine: AsyncEngine, saved: Saved) -> None:
    """All at once: audio of three lengths, and decoder prompts."""
    outputs = await asyncio.gather(
        *(engine.generate(each.text, PARAMS, **each.media) for each in saved.prompts)
    )
    assert [each.token_ids for each in outputs] == [each.expected for each in saved.prompts]


@pytest.mark.parametrize("budget", [512, 3])
async def test_tokens_equal_generate(saved: Saved, budget: int) -> None:
    options = SIZES | {"max_num_batched_tokens": budget}
    async with AsyncEngine.from_pretrained(saved.folder, **options) as engine:
        assert engine.statistics().model_impl == "transformers"
        await check_all(engine, saved)
        before = engine.statistics()
        assert before.encoder_items_run == 3
        await check_all(engine, saved)  # with encoder and cross-attention caches warm
        await engine.reset_caches()
        for prompt in saved.prompts[:2]:  # alone
            output = await engine.generate(prompt.text, PARAMS, **prompt.media)
            assert output.token_ids == prompt.expected
        await settled(engine)
        now = engine.statistics()
        assert now.kv_blocks_free == now.kv_blocks_total and not now.encoder_cache_referenced
        if budget == 512:
            check_rows(engine.processor, engine._core.loaded.runner.model, saved)


@torch.inference_mode()
def check_rows(processor: Any, model: Any, saved: Saved) -> None:
    """Assert that an encoder gives the rows that were foretold, whatever else it reads."""
    first, step = UNNAMED[saved.name]
    found = processor.info.staircase
    assert (found.first, found.step) == (first, step)
    longest = LONGEST.get(saved.name, 64 * RATE)
    assert processor.get_audio_window() == (longest, RATE)
    lengths = (first + step, first + 2 * step - 1, first + 2 * step, 7777, 40001)
    for length in (max(each, 1000) for each in lengths):
        clips = [noise_clip(length + 2000 * (n == 3), RATE) for n in range(4)]
        for n, clip in enumerate(clips):
            clip.samples[:500] *= n / 4
        items = processor.process(MultiModalDataItems({"audio": AudioProcessorItems(clips)}), {})
        rows = model.encode("audio", items["audio"])
        counts = [processor.info.get_num_audio_tokens(num_samples=len(c.samples)) for c in clips]
        assert [len(each) for each in rows] == counts
        for item, together in zip(items["audio"], rows, strict=True):
            (alone,) = model.encode("audio", [item])
            torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "saved", rest_is_slow(UNNAMED, ["CanaryForConditionalGeneration"]), indirect=True
)
async def test_scarce_memory_changes_nothing(saved: Saved) -> None:
    """They are preempted, and write their keys again."""
    options = SIZES | {"max_model_len": 40}
    async with AsyncEngine.from_pretrained(saved.folder, **options) as engine:
        first = saved.prompts[0]
        output = await engine.generate(first.text, PARAMS, **first.media)
        assert output.token_ids == first.expected
        (rows,) = engine._core.loaded.runner._rows.values()
        given = await engine.generate(first.text, PARAMS, audios=[Embeddings(rows)])
        assert given.token_ids == first.expected
        block_bytes = options["kv_cache_bytes"] // engine.statistics().kv_blocks_total
    least = 10 + -(-len(rows) // 4)
    scarce = options | {"kv_cache_bytes": block_bytes * (least + 2)}
    async with AsyncEngine.from_pretrained(saved.folder, **scarce) as engine:
        # Of one audio item many start side by side, and have no room to grow.
        crowded = replace(saved, prompts=[*[first] * 16, *saved.prompts])
        for _ in range(2):
            await check_all(engine, crowded)
        assert engine.statistics().preemptions > 0
        await settled(engine)
        now = engine.statistics()
        assert now.kv_blocks_free == now.kv_blocks_total


@pytest.mark.parametrize("saved", ["SeamlessM4TForSpeechToText"], indirect=True)
async def test_what_cannot_be_heard_is_refused(saved: Saved) -> None:
    short, long = noise_clip(100, RATE).samples, noise_clip(65 * RATE, RATE).samples
    async with AsyncEngine.from_pretrained(
        saved.folder, **engine_options(takes_media=True)
    ) as engine:
        for samples, words in ((long, "cut_windows"), (short, "too short")):
            with pytest.raises(MediaError, match=words):
                await engine.generate("", PARAMS, audios=[(samples, RATE)])
        processor: Any = engine.processor
        assert processor.create_transcription_prompt(None, "") == [1]
        with pytest.raises(InvalidRequestError, match="language"):
            processor.create_transcription_prompt("deu", "")
        processor.info.ctx.generation_config.text_decoder_lang_to_code_id = {"deu": 9, "fra": 10}
        assert processor.create_transcription_prompt("deu", "") == [1, 9]
        for language, context, words in (("x", "", "no token for"), ("deu", "b", "said before")):
            with pytest.raises(InvalidRequestError, match=words):
                processor.create_transcription_prompt(language, context)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("saved", ["Speech2TextForConditionalGeneration"], indirect=True)
async def test_silence_that_makes_no_numbers_is_refused(saved: Saved) -> None:
    """Here features are divided by their spread, which silence has not."""
    async with AsyncEngine.from_pretrained(saved.folder, **SIZES) as engine:
        with pytest.raises(MediaError, match="silent"):
            await engine.generate("", PARAMS, audios=[(np.zeros(RATE, np.float32), RATE)])
        first = saved.prompts[0]
        output = await engine.generate(first.text, PARAMS, **first.media)
        assert output.token_ids == first.expected


@pytest.mark.parametrize("saved", ["MoonshineStreamingForConditionalGeneration"], indirect=True)
async def test_places_that_no_table_gives_are_refused(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has the rows of several items side by side."""
    monkeypatch.setattr(SpeechToText, "_find_memory_tables", lambda *_: [])
    with pytest.raises(ModelLoadError, match="apart by their places"):
        await AsyncEngine.from_pretrained(saved.folder, **engine_options(takes_media=True)).start()


def test_code_that_attends_by_itself_is_refused() -> None:
    config = hf.SpeechT5Config(architectures=["SpeechT5ForSpeechToText"])
    with pytest.raises(ModelLoadError, match="SpeechT5DecoderWithTextPrenet"):
        choose(config).model_class.probe(config)


def test_a_staircase() -> None:
    stairs = Staircase(first=400, step=640, most_rows=3)
    assert [stairs.count(n) for n in (0, 399, 400, 1039, 1040, 2320)] == [0, 0, 1, 1, 2, 4]
    assert stairs.most_samples(9999) == 2319 and stairs.most_samples(800) == 800
