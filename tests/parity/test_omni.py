"""Images, videos and clips in one prompt: the tokens of transformers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from aioengine import AsyncEngine, Embeddings, Prompt, SamplingParams
from aioengine.errors import InvalidRequestError, MediaError, ModelLoadError
from aioengine.models.omni import OmniThinker, Qwen3OmniThinker
from aioengine.models.runtime.interfaces import PromptMedia
from aioengine.types import Span
from tests.engine.test_modalities import mkv
from tests.parity.audio_families import RATE, Case, sound, wav
from tests.parity.families import MAX_TOKENS, greedy, hf_processor
from tests.parity.omni_family import AUDIO, IMAGE, KINDS, VIDEO, make_whole, save_thinker
from tests.support.grids import rest_is_slow
from tests.support.tiny import tiny_image

PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
IMAGES = tuple(tiny_image(i).resize(size) for i, size in enumerate(((60, 60), (56, 112))))
# Shorter than a window of the tower, as long as one, and longer. Of Qwen3-Omni transformers makes
# other rows of a clip beside a longer one: spectra and convolutions read on into what pads it.
SECONDS = {"Qwen2_5Omni": (0.3, 0.5, 1.3), "Qwen3OmniMoe": (1.3, 1.3, 1.3)}
FILMS = tuple(
    np.random.default_rng(i).integers(0, 256, (count, 60, 90, 3), dtype=np.uint8)
    for i, count in enumerate((6, 4))
)
# Texts in which p0, s1 and f0 stand for an image, a sound and a film of these.
TEXTS = (
    "USER: p0 and s0 fit? ASSISTANT:",
    "USER: s2 with p1 fit? ASSISTANT:",
    "f0 s1 again s2 ?",
    "s0 p0 p1 f1 s2 what?",
    "s1",
    "Is p1 in f0 ?",
    "nothing to see or hear here",
)


@dataclass(frozen=True)
class Model:
    kind: str
    folder: Path
    reference: Any
    cases: tuple[Case, ...]


def engine_for(folder: Path, **options: Any) -> AsyncEngine:
    """Small blocks, so that few tokens make many."""
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 8 << 20, "max_model_len": 1024}
    return AsyncEngine.from_pretrained(folder, **{**sizes, **options})


def case_of(text: str, kind: str, reference: Any, processor: Any) -> Case:
    """The text with its media, through transformers."""
    sounds = [sound(i, seconds) for i, seconds in enumerate(SECONDS[kind])]
    media: dict[str, list[Any]] = {"images": [], "audios": [], "videos": []}
    kinds = {
        "p": (IMAGE, "images", IMAGES),
        "s": (AUDIO, "audios", sounds),
        "f": (VIDEO, "videos", FILMS),
    }
    words = text.split(" ")
    for place, word in enumerate(words):
        if len(word) == 2 and word[0] in kinds and word[1].isdigit():
            words[place], keyword, items = kinds[word[0]]
            media[keyword].append(items[int(word[1])])
    text = " ".join(words)
    given: dict[str, Any] = {"images": media["images"]} if media["images"] else {}
    if media["audios"]:
        given["audio"] = media["audios"]
    if media["videos"]:
        metadata = [
            hf.video_utils.VideoMetadata(
                total_num_frames=len(each), frames_indices=list(range(len(each)))
            )
            for each in media["videos"]
        ]
        given |= {"videos": media["videos"], "video_metadata": metadata}
        given["do_sample_frames"] = False
    expected = greedy(reference, dict(processor(text=text, **given, return_tensors="pt")))
    clips = tuple((samples, RATE) for samples in media["audios"])
    found = {"images": tuple(media["images"]), "audios": clips, "videos": tuple(media["videos"])}
    return Case(text, found, expected)


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    kind, folder = request.param, tmp_path_factory.mktemp("omni")
    reference = save_thinker(folder, kind)

    processor = hf_processor(folder)
    cases = tuple(case_of(text, kind, reference, processor) for text in TEXTS)
    return Model(kind, folder, reference, cases)


one_kind = pytest.mark.parametrize("model", rest_is_slow(KINDS, ["Qwen2_5Omni"]), indirect=True)


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
        cases = model.cases if budget > 1 else (*model.cases[:2], *model.cases[4:])
        await check_all(engine, cases)
        await check_all(engine, cases)  # with prefix and encoder caches warm
        now = engine.statistics()
        assert now.prefix_hit_tokens > 0 and now.kv_blocks_free == now.kv_blocks_total


@one_kind
async def test_tokens_equal_generate_without_a_prefix_cache(model: Model) -> None:
    options = {"max_num_batched_tokens": 31, "enable_prefix_caching": False}
    async with engine_for(model.folder, **options) as engine:
        await check_all(engine, model.cases)
        await check_all(engine, model.cases)  # with the encoder cache warm
        assert engine.statistics().encoder_items_run == 7


async def test_a_whole_models_checkpoint(model: Model, tmp_path: Path) -> None:
    make_whole(model.folder, tmp_path, model.kind)
    async with engine_for(tmp_path) as engine:
        await check_all(engine, model.cases)


@one_kind
async def test_chat(model: Model) -> None:
    """Each part gets its markers, in the order of the parts."""
    case = model.cases[3]
    kinds = {IMAGE: ("image", "images"), AUDIO: ("audio", "audios"), VIDEO: ("video", "videos")}
    media = {keyword: iter(items) for keyword, items in case.media.items()}
    parts: list[dict[str, Any]] = []
    for word in case.text.split(" "):
        if parts:
            parts.append({"type": "text", "text": " "})
        kind, keyword = kinds.get(word, ("text", ""))
        parts.append({"type": kind, kind: next(media[keyword]) if keyword else word})
    async with engine_for(model.folder) as engine:
        output = await engine.generate([{"role": "user", "content": parts}], PARAMS)
        case.check(output.token_ids)


@one_kind
async def test_sounds_in_files_and_beyond_what_is_heard(model: Model) -> None:
    async with engine_for(model.folder) as engine:
        (samples, _), *_ = model.cases[0].media["audios"]
        media = {**model.cases[0].media, "audios": (wav(samples),)}
        output = await engine.generate(model.cases[0].text, PARAMS, **media)
        model.cases[0].check(output.token_ids)
        processor = engine.processor.info.get_hf_processor()
        long = sound(9, 4.6)  # of four seconds that the feature extractor takes
        inputs = processor(text=model.cases[4].text, audio=[long], return_tensors="pt")
        output = await engine.generate(model.cases[4].text, PARAMS, audios=[(long, RATE)])
        Case("", {}, greedy(model.reference, dict(inputs))).check(output.token_ids)
        if model.kind == "Qwen3OmniMoe":  # whose tower gives a row for anything
            for seconds in (0.3, 1.0, 2.5):
                clip = sound(9, seconds)
                inputs = processor(text=model.cases[4].text, audio=[clip], return_tensors="pt")
                output = await engine.generate(model.cases[4].text, PARAMS, audios=[(clip, RATE)])
                Case("", {}, greedy(model.reference, dict(inputs))).check(output.token_ids)
            return
        with pytest.raises(MediaError):
            await engine.generate(model.cases[4].text, PARAMS, audios=[(sound(1, 0.02), RATE)])


async def test_a_films_own_rate(model: Model) -> None:
    """A file tells how far its frames are apart; transformers is told so with `fps`."""
    text, film = f"See {VIDEO} what?", FILMS[0]
    # Of the newer model the nearest rate of which steps in time are whole: 26 / 10 is nearly 3.
    rate_of = {"Qwen2_5Omni": 10.0, "Qwen3OmniMoe": 26 / 3}[model.kind]
    async with engine_for(model.folder) as engine:
        outputs = [await engine.generate(text, PARAMS, videos=[each]) for each in (mkv(film), film)]
        processor = engine.processor.info.get_hf_processor()
        for output, rate in zip(outputs, ({"fps": rate_of}, {}), strict=True):
            metadata = hf.video_utils.VideoMetadata(
                total_num_frames=len(film), frames_indices=list(range(len(film)))
            )
            options = {"video_metadata": [metadata], "do_sample_frames": False, **rate}
            inputs = processor(text=text, videos=[film], **options, return_tensors="pt")
            Case("", {}, greedy(model.reference, dict(inputs))).check(output.token_ids)
        assert outputs[0].token_ids != outputs[1].token_ids


@pytest.mark.parametrize("model", ["Qwen3OmniMoe"], indirect=True)
async def test_steps_in_time_are_whole_or_refused(model: Model) -> None:
    """transformers would give the decoder parts of positions."""
    async with engine_for(model.folder) as engine:
        options = {"videos_kwargs": {"fps": 7.0}}
        prompt = Prompt(
            text=f"See {VIDEO}", media={"video": [mkv(FILMS[0])]}, mm_processor_kwargs=options
        )
        with pytest.raises(InvalidRequestError, match=r"3\.71429 positions apart"):
            await engine.generate(prompt, PARAMS)


@one_kind
async def test_rows_that_were_computed_elsewhere(model: Model) -> None:
    """With their grids; those of a clip need nothing beside them."""
    extras = ("image_grid_thw", "video_grid_thw", "video_second_per_grid")

    async def encode(text: str, **media: Any) -> Embeddings:
        async with engine_for(model.folder) as engine:
            await engine.generate(text, PARAMS, **media)
            (rows,) = engine._core.loaded.runner._rows.values()
            (features,) = engine._core.input_processor.media.cache._items.values()
            return Embeddings(rows, **{name: features[name] for name in extras if name in features})

    image = await encode(IMAGE, images=IMAGES[:1])
    clip = await encode(AUDIO, audios=model.cases[0].media["audios"])
    film = await encode(VIDEO, videos=FILMS[:1])
    text, seen, heard = model.cases[0].text, model.cases[5], model.cases[0].media["audios"]
    async with engine_for(model.folder) as engine:
        for sounds in ([clip], heard):
            output = await engine.generate(text, PARAMS, images=[image], audios=sounds)
            model.cases[0].check(output.token_ids)
        output = await engine.generate(
            seen.text, PARAMS, images=seen.media["images"], videos=[film]
        )
        seen.check(output.token_ids)
        with pytest.raises(InvalidRequestError, match="video_second_per_grid"):
            lacking = Embeddings(film.rows, video_grid_thw=film.extra["video_grid_thw"])
            await engine.generate(VIDEO, PARAMS, videos=[lacking])
        with pytest.raises(InvalidRequestError, match="image_grid_thw"):
            await engine.generate(IMAGE, PARAMS, images=[Embeddings(image.rows)])


@one_kind
async def test_sound_woven_into_videos_is_refused(model: Model) -> None:
    case = model.cases[5]
    media = {"image": list(case.media["images"]), "video": list(case.media["videos"])}
    woven: tuple[dict[str, Any], ...] = (
        {"use_audio_in_video": True},
        {"videos_kwargs": {"load_audio_from_video": True}},
    )
    async with engine_for(model.folder) as engine:
        for options in woven:
            with pytest.raises(InvalidRequestError, match="use_audio_in_video is not supported"):
                prompt = Prompt(text=case.text, media=media, mm_processor_kwargs=options)
                await engine.generate(prompt, PARAMS)
        options = {"use_audio_in_video": False, "videos_kwargs": {"use_audio_in_video": False}}
        prompt = Prompt(text=case.text, media=media, mm_processor_kwargs=options)
        case.check((await engine.generate(prompt, PARAMS)).token_ids)
    with pytest.raises(ModelLoadError, match="use_audio_in_video"):
        async with engine_for(model.folder, mm_processor_kwargs=woven[0]):
            pass


def test_positions_are_those_of_transformers(model: Model) -> None:
    config = hf.AutoConfig.from_pretrained(model.folder)
    is_newer = model.kind == "Qwen3OmniMoe"
    model_class = Qwen3OmniThinker if is_newer else OmniThinker
    thinker = model_class.load(model.folder, hf_config=config, dtype=torch.float32, device="cpu")
    num_frames = 40 if is_newer else 20  # of five rows
    mark = {
        "image": (config.vision_start_token_id, config.image_token_id),
        "video": (config.vision_start_token_id, config.video_token_id),
        "audio": (config.audio_start_token_id, config.audio_token_id),
    }
    grids = {"image": [1, 4, 6], "video": [3, 6, 4], "audio": None}
    for order in ("image audio", "audio video audio", "video image", "audio", "video audio image"):
        for seconds in (1.0, 2 / 13, 5 / 13) if is_newer else (1.0, 0.5, 0.34):
            ids, items = [9, 9, 9], []
            kwargs: dict[str, Any] = {"audio_seqlens": [], "second_per_grids": []}
            for modality in order.split():
                start, pad = mark[modality]
                grid = grids[modality]
                size = 5 if grid is None else int(np.prod(grid)) // 4
                features: dict[str, torch.Tensor] = {}
                if grid is None:
                    kwargs["audio_seqlens"].append(num_frames)
                else:
                    features[f"{modality}_grid_thw"] = torch.tensor([grid])
                    kwargs.setdefault(f"{modality}_grid_thw", []).append(grid)
                if modality == "video":
                    features["video_second_per_grid"] = torch.tensor([seconds])
                    kwargs["second_per_grids"].append(seconds)
                span = Span(len(ids) + 1, size, ((0, size),))
                items.append(PromptMedia(modality, span, features))
                ids += [start, *[pad] * size, 8, 9, 9]
            tokens = torch.tensor([ids])
            theirs, delta = model.reference.get_rope_index(
                tokens,
                attention_mask=torch.ones_like(tokens),
                **{name: torch.tensor(values) for name, values in kwargs.items()},
            )
            positions, mine = thinker.positions(ids, items)
            theirs, delta = theirs.float().round().long(), delta.float().round()
            assert torch.equal(positions, theirs[:, 0]) and mine == int(delta)
