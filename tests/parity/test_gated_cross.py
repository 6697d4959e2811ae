"""Decoders with gated cross-attention to a prompt's images: tokens, caches, the trial at load.

Weights are drawn, gates too: as they are made they are zero, and nothing of an image would show.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine import AsyncEngine, Embeddings, Prompt, SamplingParams
from aioengine.core.request import Item
from aioengine.engine.input_processor import _places
from aioengine.errors import InvalidRequestError, ModelLoadError, UnsupportedModalityError
from aioengine.models.encdec import media_memory
from aioengine.models.encdec.gated_cross import LastImageModel, TiledMemoryModel
from aioengine.types import Span
from tests.parity.families import MAX_TOKENS, greedy, save_folder
from tests.parity.sweep import SPREADS, make
from tests.parity.sweep_models import Prompt as Asked
from tests.parity.sweep_models import draw, in_turns
from tests.support.engines import settled
from tests.support.grids import rest_is_slow
from tests.support.tiny import tiny_image

TILED, LAST = "MllamaForConditionalGeneration", "IdeficsForVisionText2Text"
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SIZES = ((80, 60), (60, 120), (112, 112), (30, 130))
# A text with a star for each image, and which images these are.
ASKED = (
    ("USER: *\nWhat is it? ASSISTANT:", (0,)),
    ("USER: *\nWhat is it? ASSISTANT:", (1,)),
    ("USER: *\nWhat is it? ASSISTANT:", (2,)),
    ("USER: *\nWhat is it? ASSISTANT:", (3,)),
    ("*Tell of it", (1,)),
    ("tell a story", ()),
    ("**", (0, 1)),
    ("First ** then * now", (0, 1, 3)),
    ("First * then ** now", (1, 3, 0)),
    ("First * then ** now", (1, 3, 2)),
    ("a * b * c * d", (2, 2, 1)),
    ("What is it? *", (2,)),
)  # fmt: skip


@dataclass(frozen=True)
class Saved:
    folder: Path
    place: str
    expected: Sequence[tuple[int, ...]]

    def prompts(self) -> list[Prompt]:
        return [self.prompt(text, chosen) for text, chosen in ASKED]

    def prompt(self, text: str, chosen: Sequence[int], **more: Any) -> Prompt:
        media = {"image": images(chosen)} if chosen else {}
        return Prompt(text=text.replace("*", self.place), media=media, **more)


def images(chosen: Sequence[int]) -> list[Any]:
    return [tiny_image(index).resize(SIZES[index]) for index in chosen]


def tiled() -> tuple[Any, Any]:
    model, processor, _ = make(TILED)
    return model, processor


def last_image() -> tuple[Any, Any]:
    model, processor, _ = make(LAST)
    return model, processor


def resampled() -> tuple[Any, Any]:
    """With what checkpoints have: a resampler, tokens of a second table, fewer cross layers."""
    model, processor, _ = make(LAST)
    config = copy.deepcopy(model.config)
    added = 8
    config.additional_vocab_size, config.vocab_size = added, config.vocab_size - added
    config.use_resampler, config.qk_layer_norms, config.cross_layer_interval = True, True, 2
    config.num_hidden_layers = 4
    config.alpha_type, config.perceiver_config.resampler_n_latents = "vector", 6
    with torch.random.fork_rng(devices=[]):
        return type(model)(config), processor


def inputs_of(processor: Any, text: str, chosen: Sequence[int], place: str) -> Any:
    written = text.replace("*", place)
    if hasattr(processor, "image_token"):
        given = {"images": images(chosen)} if chosen else {}
        return processor(text=written, **given, return_tensors="pt")
    turns = in_turns(Asked(written, {"images": images(chosen)}))
    return processor(text=[turns], return_tensors="pt")


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{% if part.type == 'image' %}*"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}"
)
MODELS = {"tiled": tiled, "last": last_image, "resampled": resampled}


def save(name: str, folder: Path) -> Saved:
    """Write a tiny model, and ask transformers."""
    model, processor = MODELS[name]()
    place = getattr(processor, "image_token", "<image>")
    for spread in SPREADS:
        draw(model, spread)
        with torch.no_grad():
            for path, gate in model.named_parameters():
                if path.endswith(("_gate", "alpha_cross_attn", "alpha_dense")):
                    gate.copy_(gate.sign() + gate)
        with torch.inference_mode():
            expected = [greedy(model, inputs_of(processor, *asked, place)) for asked in ASKED]
        if are_told_apart(expected):
            break
    save_folder(model, processor, folder)
    return Saved(folder, place, expected)


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(request.param, tmp_path_factory.mktemp(request.param))


one_model = pytest.mark.parametrize("saved", rest_is_slow(MODELS, ["tiled"]), indirect=True)
"""What is the same machinery for all of them."""


def are_told_apart(expected: Sequence[tuple[int, ...]]) -> bool:
    """Else equal tokens would prove nothing: other images, other answers to the same text."""
    enough = len(set(expected)) >= len(ASKED) - 1 and len(set(expected[:4])) == 4
    return enough and expected[8] != expected[9]


def options(**more: Any) -> dict[str, Any]:
    sizes = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 64 << 20, "max_model_len": 80}
    return {**sizes, **more}


engine_of = partial(AsyncEngine.from_pretrained)


async def check_all(engine: AsyncEngine, saved: Saved) -> None:
    outputs = await asyncio.gather(*(engine.generate(p, PARAMS) for p in saved.prompts()))
    assert [output.token_ids for output in outputs] == list(saved.expected)


def test_the_cases_differ(saved: Saved) -> None:
    assert are_told_apart(saved.expected)


@pytest.mark.parametrize("budget", [64, 13, 5, 1])
async def test_tokens_equal_generate(saved: Saved, budget: int) -> None:
    async with engine_of(saved.folder, **options(max_num_batched_tokens=budget)) as engine:
        assert engine.statistics().model_impl == "transformers"
        for prompt, expected in zip(saved.prompts(), saved.expected, strict=True):
            assert (await engine.generate(prompt, PARAMS)).token_ids == expected, prompt.text
        await engine.reset_caches()
        await check_all(engine, saved)
        before = engine.statistics().encoder_items_run
        await check_all(engine, saved)
        assert engine.statistics().encoder_items_run == before
        await settled(engine)
        now = engine.statistics()
        assert now.kv_blocks_free == now.kv_blocks_total
        assert now.encoder_cache_referenced == 0


@pytest.mark.parametrize("dtype", rest_is_slow(["float32", "bfloat16"], ["float32"]))
async def test_fused_layers_pass_the_trial(saved: Saved, dtype: str) -> None:
    async with engine_of(saved.folder, **options(dtype=dtype)) as engine:
        outputs = await asyncio.gather(*(engine.generate(p, PARAMS) for p in saved.prompts()))
        same = sum(o.token_ids == e for o, e in zip(outputs, saved.expected, strict=True))
        assert same > len(ASKED) * 2 // 3 or dtype == "bfloat16"
        assert engine._core.loaded.runner.decode_steps is None


@one_model
@pytest.mark.parametrize("option", ["quantization", "kv_cache_dtype"])
async def test_eight_bits_pass_the_trial(saved: Saved, option: str) -> None:
    more: dict[str, Any] = {option: "int8"}
    async with engine_of(saved.folder, **options(dtype="float32", **more)) as engine:
        for prompt in saved.prompts()[:6]:
            assert (await engine.generate(prompt, PARAMS)).token_ids


@one_model
async def test_tokens_equal_generate_without_a_prefix_cache(saved: Saved) -> None:
    async with engine_of(saved.folder, **options(enable_prefix_caching=False)) as engine:
        await check_all(engine, saved)
        await check_all(engine, saved)


async def test_what_is_cached_of_a_text_goes_by_its_images(saved: Saved) -> None:
    text = ASKED[0][0]
    async with engine_of(saved.folder, **options()) as engine:
        for index in (0, 1, 2):
            output = await engine.generate(saved.prompt(text, (index,)), PARAMS)
            assert output.token_ids == saved.expected[index]
            assert output.usage.cached_tokens == 0
        for index in (2, 0, 1):
            output = await engine.generate(saved.prompt(text, (index,)), PARAMS)
            assert output.token_ids == saved.expected[index]
            assert output.usage.cached_tokens >= 12
            assert engine.statistics().encoder_items_run == 3
        salted = saved.prompt(text, (0,), cache_salt="other")
        output = await engine.generate(salted, PARAMS)
        assert (output.token_ids, output.usage.cached_tokens) == (saved.expected[0], 0)


def test_words_that_look_like_an_image_are_told_apart() -> None:
    """Equal tokens, of which another one is the image, are not read alike."""
    spans = [Item("a", "image", Span(place, 1), 4) for place in (1, 3)]
    assert _places((5, 9, 6, 9), spans) == []
    assert [_places((5, 9, 6, 9), [each]) for each in spans] == [[1], [3]]


@pytest.mark.parametrize("name", ["tiled", "last"])
async def test_a_chat_that_spells_a_place_is_written_like_any_other(
    name: str, tmp_path: Path
) -> None:
    saved = save(name, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE.replace("*", saved.place)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (image,) = images((1,))
    async with engine_of(tmp_path, **options()) as engine:
        spelt, other = [
            await engine.generate(
                [{
                    "role": "user",
                    "content": [
                        {"type": "text", "text": f"what {word} is "},
                        {"type": "image", "image": image},
                        {"type": "text", "text": " it"},
                    ],
                }],
                PARAMS,
            )
            for word in (saved.place, "~")
        ]  # fmt: skip
        tokenizer = engine.processor.info.get_tokenizer()
    texts = [tokenizer.decode(each.prompt_token_ids) for each in (spelt, other)]
    assert texts[0] == texts[1].replace("~", saved.place)
    place = tokenizer.convert_tokens_to_ids(saved.place)
    assert [list(each.prompt_token_ids).count(place) for each in (spelt, other)] == [1, 1]


@one_model
async def test_scarce_memory_changes_nothing(saved: Saved) -> None:
    """Room for one request and a little: they are preempted and write their keys again."""
    few = options(max_model_len=60, limit_mm_per_prompt={"image": 1})
    asked = [index for index, (_, chosen) in enumerate(ASKED) if len(chosen) < 2]
    prompts = [saved.prompt(*ASKED[index]) for index in asked]
    expected = [saved.expected[index] for index in asked]
    async with engine_of(saved.folder, **few) as engine:
        loaded = engine._core.loaded
        block_bytes = (64 << 20) // loaded.limits.num_blocks
        num_rows = loaded.limits.max_encoder_len
    memory = -(-num_rows // 4)
    # Two begin, and do not come to their ends.
    few["kv_cache_bytes"] = block_bytes * max(2 * (memory + 6), memory + 60 // 4)
    few["encoder_cache_bytes"] = loaded.row_bytes * num_rows * 2
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    async with engine_of(saved.folder, **few) as engine:
        alone = [(await engine.generate(each, long)).token_ids for each in prompts]
        assert [each[: len(e)] for each, e in zip(alone, expected, strict=True)] == expected
        for _ in range(2):
            outputs = await asyncio.gather(*(engine.generate(each, long) for each in prompts))
            assert [output.token_ids for output in outputs] == alone
        assert engine.statistics().preemptions
        await settled(engine)
        now = engine.statistics()
        assert now.kv_blocks_free == now.kv_blocks_total


@one_model
async def test_completions_share_the_images(saved: Saved) -> None:
    for caching in (True, False):
        async with engine_of(saved.folder, **options(enable_prefix_caching=caching)) as engine:
            params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, n=3)
            output = await engine.generate(saved.prompt(*ASKED[7]), params)
            assert {each.token_ids for each in output.outputs} == {saved.expected[7]}
            assert engine.statistics().encoder_items_run == 1


@one_model
async def test_whoever_leaves_takes_nobody_along(saved: Saved) -> None:
    async with engine_of(saved.folder, **options(max_num_batched_tokens=5)) as engine:
        for turns in range(0, 40, 4):
            await engine.reset_caches()
            both = [asyncio.ensure_future(engine.generate(saved.prompt(*ASKED[i]), PARAMS))
                    for i in (0, 0, 1)]  # fmt: skip
            for _ in range(turns):
                await asyncio.sleep(0)
            both[0].cancel()
            outputs = await asyncio.gather(*both, return_exceptions=True)
            assert outputs[1].token_ids == saved.expected[0]  # type: ignore[union-attr]
            assert outputs[2].token_ids == saved.expected[1]  # type: ignore[union-attr]
            await settled(engine)
            now = engine.statistics()
            assert now.kv_blocks_free == now.kv_blocks_total
            assert now.encoder_cache_referenced == 0


async def test_what_is_refused(saved: Saved) -> None:
    async with engine_of(saved.folder, **options(limit_mm_per_prompt={"image": 1})) as engine:
        with pytest.raises(UnsupportedModalityError, match="raise limit_mm_per_prompt"):
            await engine.generate(saved.prompt("**", (0, 1)), PARAMS)
        width = engine._core.loaded.layout_processor.info.get_hidden_size()
        rows = Prompt(text=saved.place, media={"image": [Embeddings(torch.zeros(4, width))]})
        with pytest.raises(UnsupportedModalityError, match="no image embeddings"):
            await engine.generate(rows, PARAMS)
        output = await engine.generate(saved.prompt(*ASKED[1]), PARAMS)
        assert output.token_ids == saved.expected[1]
    async with engine_of(saved.folder, **options(limit_mm_per_prompt={"image": 0})) as engine:
        output = await engine.generate(saved.prompt(*ASKED[5]), PARAMS)
        assert output.token_ids == saved.expected[5]


async def test_other_numbers_of_tiles_reach_no_table(tmp_path: Path) -> None:
    """What lies beyond a table's end would be the end of a CUDA device."""
    saved = save("tiled", tmp_path)
    async with engine_of(saved.folder, **options()) as engine:
        for count, index in ((8, 0), (8, 3), (2, 1)):
            tiles = {"max_image_tiles": count}
            asked = saved.prompt(f"{saved.place} a", (index,), mm_processor_kwargs=tiles)
            with pytest.raises(InvalidRequestError, match=rf"{count} tiles.* takes 4"):
                await engine.generate(asked, PARAMS)
        assert (await engine.generate(saved.prompt(*ASKED[0]), PARAMS)).token_ids


@one_model
@pytest.mark.parametrize("fault", ["nobody", "all", "shifted", "gates"])
async def test_the_trial_sees_what_tokens_read(
    saved: Saved, fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # without verdicts of earlier trials
    lay_out = media_memory.lay_out_memory

    def wrong(mask: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if fault == "nobody":
            mask = mask & False
        elif fault == "all":
            mask = mask | True
        elif fault == "shifted":
            mask = torch.cat([mask[2:], mask[-1:], mask[-1:]])
        return lay_out(mask, *args, **kwargs)

    monkeypatch.setattr(media_memory, "lay_out_memory", wrong)
    if fault == "gates":
        for kind in (TiledMemoryModel, LastImageModel):
            given = kind.memory_arguments
            monkeypatch.setattr(
                kind, "memory_arguments", lambda s, m, t, given=given: given(s, m, ~t)
            )
    with pytest.raises(ModelLoadError, match=r"a short trial|are off by"):
        async with engine_of(saved.folder, **options()):
            pass
